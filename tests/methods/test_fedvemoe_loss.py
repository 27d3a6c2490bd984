"""What clients of Fed-VEMoE minimise and weigh experts by, by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_language import method_of, set_up

from fl_lightning.methods import FedVEMoE
from fl_lightning.methods.fedvemoe import Choice
from fl_lightning.metrics.text import IGNORED


def test_the_local_loss_draws_the_mean_weights_of_labelled_tokens_to_the_shares():
    """L_CE + gate_weight KL(mean_t a_t || share), with a seat that is empty and tokens without a
    label, a whole example of them included."""
    method, data = set_up(method_of(FedVEMoE, k_init=3, k_max=3, top_m=4, gate_weight=0.3))
    client, share = data.client(0), np.array([0.8, 0.2])
    method.receive(method.broadcast(client), client)
    method._take(Choice(torch.full((4,), 0.25), [1, 3], torch.from_numpy(share)))
    with torch.no_grad():
        method.seats.gate.router.normal_()
    index = torch.arange(4)
    target = data.train_target[index].clone()
    target[0], target[1:, ::3] = IGNORED, IGNORED
    terms = method.training_step((data.inputs("train", index), target))

    weights = method.seats.gate.log_weights.detach().double().exp().numpy()
    labelled = target[:, : weights.shape[1]].numpy() != IGNORED
    assert 0 < labelled[1:].sum() < labelled[1:].size
    mean = weights[labelled].mean(axis=0)
    assert mean[2] == 0  # the empty seat
    divergence = (mean[:2] * np.log(mean[:2] / share)).sum()
    loss, task, gate = (terms[name].detach() for name in ("loss", "loss_task", "loss_gate"))
    assert gate.item() == pytest.approx(0.3 * divergence, rel=1e-4)
    assert (loss - task).item() == pytest.approx(gate.item(), rel=1e-3)
    terms["loss_gate"].backward()
    assert method.seats.gate.router.grad[:2].norm() > 0


def test_a_client_chooses_in_training_what_it_is_evaluated_with():
    """Clients train under the autocast of trainer.precision, and models are deployed outside it."""
    method, data = set_up(method_of(FedVEMoE, k_init=2, k_max=2))
    client = data.client(0)
    method.receive(method.broadcast(client), client)
    with torch.no_grad():
        method.received.rows[2].normal_()
    deployed = method.choose(data, client, data.labels(client))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        trained = method.choose(data, client, data.labels(client))
    assert trained.r.tolist() == deployed.r.tolist()


def test_probes_are_read_in_batches_of_the_evaluation(monkeypatch):
    """Logits of all at once would be gigabytes; and the choice is the same."""
    method, data = set_up(method_of(FedVEMoE, k_init=2, k_max=2))
    client, sizes, read = data.client(0), [], data.inputs
    method.receive(method.broadcast(client), client)
    with torch.no_grad():
        method.received.rows[2].normal_()
    whole = method.choose(data, client, data.labels(client))
    monkeypatch.setattr(type(data), "evaluation_batch", 2)
    monkeypatch.setattr(data, "inputs", lambda split, i: sizes.append(len(i)) or read(split, i))
    parts = method.choose(data, client, data.labels(client))
    assert max(sizes) == 2
    assert parts.r.tolist() == pytest.approx(whole.r.tolist(), abs=1e-6)
    assert 0 < whole.r[2] < 1
