"""FedMPQ as a supernet: narrower bit-widths are trained beside a client's own, and served from one
model."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from outcomes import rows_of
from refusals import refused
from torch.nn import functional as F
from toy import ready, run, sgd

from callbacks import BitBudgets
from fl_lightning import rng
from fl_lightning.data import IID, FederatedImages
from fl_lightning.federation import weights_hash
from fl_lightning.methods import FedAvg, FedMPQ, FedMPQKD
from fl_lightning.methods.supernet import narrower
from fl_lightning.tasks import Classification


def digits(**settings):
    given = {"num_clients": 4, "partition": IID(), "batch_size": 16, "val_fraction": 0.05}
    return FederatedImages(dataset="digits", **{**given, **settings})


def started(**settings):
    """A method at the start of its first round, and a batch."""
    data = ready(dataset="digits", num_clients=4, partition=IID(), batch_size=16)
    torch.manual_seed(0)
    method = FedMPQ(network="mlp", optimizer=sgd(0.05), **settings)
    method.build(data)
    method.round = 1
    client = data.client(0)
    method.receive(method.broadcast(client), client)
    batch = next(iter(data.train_batches(client, round=1, epochs=1)))
    return method, batch


def test_allocations_are_the_smallest_and_two_within_the_own():
    own = [1, 3, 8]
    found = [narrower(own, np.random.default_rng(seed)) for seed in range(60)]
    assert all(len(one) == 3 and one[0] == [1, 1, 1] for one in found)
    for layer, most in enumerate(own):
        drawn = {bits[layer] for one in found for bits in one[1:]}
        assert drawn == set(range(1, most + 1))


def test_the_loss_of_a_step_by_hand():
    method, batch = started(supernet=True, bits=4, lambda_b=0.0)
    losses = method.training_step(batch)
    weights, _ = method.quantized_weights()
    own = method._logits(batch[0], weights).detach()
    expected = torch.zeros(())
    for bits in narrower(method.layer_bits, rng.stream(method.seed, "allocations/0", 1)):
        # as it is deployed at these bits
        payload = method.quantized(bits, method.server["weights"])
        cut = method.layout.unpack(method.codec.decode(payload, sender="server"))
        narrow = method._logits(batch[0], {name: cut[name] for name in method.layers})
        expected = expected + F.kl_div(narrow.log_softmax(1), own.softmax(1), reduction="batchmean")
    assert float(losses["loss_narrow"].detach()) == pytest.approx(
        float(expected.detach()), rel=1e-4
    )
    assert float(losses["loss"].detach()) == pytest.approx(
        float((losses["loss_task"] + losses["loss_narrow"]).detach()), rel=1e-6
    )


@pytest.mark.slow
def test_one_trained_model_serves_narrow_budgets_better(tmp_path):
    """At one bit, and as well at its own six, on the same 4 rounds; it takes four passes a step
    where FedMPQ takes one."""
    accuracies: dict[tuple[bool, int], float] = {}
    for supernet in (False, True):
        data = digits()
        method = FedMPQ(
            network="small_cnn",
            optimizer=partial(sgd(0.03), momentum=0.9),
            bits=6,
            supernet=supernet,
        )
        run(method, data, tmp_path / str(supernet), max_rounds=4, max_local_steps=12, workers=1)
        for bits in (1, 2, 6):
            accuracies[supernet, bits] = accuracy_at(method, data, bits)
    assert accuracies[True, 1] > accuracies[False, 1] + 0.02, accuracies
    assert accuracies[True, 6] > accuracies[False, 6] - 0.02, accuracies


def accuracy_at(method: FedMPQ, data: FederatedImages, bits: float) -> float:
    network = method.deploy_at(bits).eval()
    with torch.no_grad():
        found = [(network(x).argmax(1) == y).double() for x, y in data.test_batches()]
    return float(torch.cat(found).mean())


def test_what_a_model_has_at_other_budgets_is_logged_and_changes_nothing(tmp_path):
    hashes = []
    for watched in ([], [BitBudgets([2, 4])]):
        data = digits()
        method = FedMPQ(network="mlp", optimizer=sgd(0.05), bits=6, supernet=True)
        folder = tmp_path / str(len(watched))
        trainer = run(
            method,
            data,
            folder,
            max_rounds=3,
            max_local_steps=2,
            workers=1,
            eval_every=2,
            callbacks=watched,
        )
        hashes.append(weights_hash(trainer))
    rows = rows_of(trainer.run_dir / "metrics.csv")
    assert [bool(row["bits/at/2/accuracy"]) for row in rows] == [False, True, True]
    for bits in (2, 4):
        assert float(rows[-1][f"bits/at/{bits}/accuracy"]) == pytest.approx(
            accuracy_at(method, data, bits)
        )
    assert hashes[0] == hashes[1]
    with refused("callbacks.BitBudgets with FedAvg"):
        run(
            FedAvg(network="mlp", optimizer=sgd(0.05)),
            digits(),
            tmp_path / "avg",
            callbacks=[BitBudgets()],
        )
    with refused("BitBudgets(budgets=[9])"):
        BitBudgets([9])


def test_what_has_no_other_grids_or_no_classes_is_refused():
    with refused("--model.supernet true with --model FedMPQ --model.representation planes"):
        FedMPQ(supernet=True, representation="planes")
    with refused("--model.supernet true with --model FedMPQKD"):
        FedMPQKD(supernet=True)
    assert Classification().has_classes
    assert not FedMPQ(supernet=True).stackable
    assert FedMPQ().stackable
