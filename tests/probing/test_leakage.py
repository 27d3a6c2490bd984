"""Probes of what leaks: membership by the loss, and images from updates, against cases whose answer
is known."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from probed import subject_of
from torch import nn

from fl_lightning.conformance import toy
from fl_lightning.methods import FedAvg, FedKD, FedPer, FedProto, LocalOnly, Oracle
from fl_lightning.models import SmallCNN
from fl_lightning.probing import PROBES, inversion, leakage, select_probes
from fl_lightning.probing.inversion import Attacker, psnr, recognised
from fl_lightning.probing.probed_model import Protection


@pytest.fixture
def subject(tmp_path, monkeypatch):
    monkeypatch.setattr(leakage, "VICTIMS", 2)
    monkeypatch.setattr(Attacker.reconstruct, "__defaults__", (150,))
    method = FedAvg(network=partial(SmallCNN, width=8), optimizer=toy.sgd(0.05))
    trainer = toy.run(method, toy.images(), tmp_path, max_rounds=1)
    return leakage.ProbedModel(trainer.fabric, method, trainer.data, {}, trainer.seed, cohort=6)


def test_the_gradient_of_a_biased_layer_holds_the_image_and_the_attack_finds_it():
    """dL/dW = (p - y) x^T and dL/db = p - y (Phong et al., 2018): their quotient is the input,
    exactly; the attack, which knows nothing of it, comes close."""
    data = toy.images()
    data.prepare_data()
    data.setup("fit")
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 4))
    weights = dict(network.named_parameters())
    attacker = Attacker(network, weights, data.task, data)
    pixels, label = data.train_images[:1].float() / 255, data.train_target[:1]
    gradient = attacker.gradient(pixels, label, list(weights)).detach()
    by_layer = gradient[: 4 * 768].view(4, 768) / gradient[4 * 768 :, None]
    torch.testing.assert_close(
        data.denormalise(by_layer[:1].view(1, 3, 16, 16)), pixels, atol=1e-4, rtol=0
    )
    named = {"1.weight": -gradient[: 4 * 768].view(4, 768), "1.bias": -gradient[4 * 768 :]}
    found = attacker.reconstruct(named, label, torch.full_like(pixels, 0.5))
    assert float(psnr(found, pixels)) > float(psnr(torch.full_like(pixels, 0.5), pixels)) + 6


@pytest.mark.slow
@pytest.mark.essential
def test_a_single_update_gives_its_image_away_and_noise_hides_it(subject):
    plain = PROBES["inversion"](subject).metrics
    assert plain["inversion/server_recognised"] == 1
    clipped = PROBES["inversion"](replace(subject, protection=Protection(clip_norm=1e-3))).metrics
    assert clipped["inversion/server_recognised"] == 1, "a direction has no length"
    guard = Protection(clip_norm=1e-3, noise_std=1e-3)
    noisy = PROBES["inversion"](replace(subject, protection=guard)).metrics
    assert noisy["inversion/server_psnr"] == clipped["inversion/server_psnr"], (
        "the server adds it itself"
    )
    assert noisy["inversion/released_psnr"] < clipped["inversion/released_psnr"]
    assert noisy["inversion/released_recognised"] == 0
    local = PROBES["inversion"](replace(subject, protection=replace(guard, share_std=1e-3))).metrics
    assert local["inversion/server_recognised"] == 0
    assert local["inversion/unprotected_psnr"] == plain["inversion/server_psnr"], (
        "the attack itself works"
    )


def test_the_update_that_is_attacked_is_one_step_of_the_method(subject):
    """lr times the gradient of one image, in the network's own mode."""
    client = leakage._victims(subject)[0]
    update = subject.method.layout.unpack(*leakage._update(subject, client))
    method = subject.method
    method.receive(method.broadcast(client), client)
    method.train()
    index = torch.from_numpy(client.train)
    loss = method.task.loss(
        method.network(subject.data.inputs("train", index)), subject.data.train_target[index]
    )
    gradients = torch.autograd.grad(loss, list(method.network.parameters()))
    for (name, _), gradient in zip(method.network.named_parameters(), gradients, strict=True):
        torch.testing.assert_close(update[name], -0.05 * gradient, atol=1e-6, rtol=1e-4)


def test_what_cannot_be_inverted_is_left_out_with_the_reason(tmp_path):
    finding = PROBES["inversion"](subject_of(FedKD(), tmp_path))
    assert not finding.metrics
    assert "the server of FedKD adds up no weights" in finding.skipped[0]
    finding = PROBES["inversion"](subject_of(FedProto(), tmp_path / "prototypes"))
    assert not finding.metrics
    assert "the server of FedProto adds up no weights" in finding.skipped[0]
    for method, why in ((FedPer(), "stays on its clients"), (Oracle(), "not all start from one")):
        finding = PROBES["inversion"](subject_of(method, tmp_path / type(method).__name__))
        assert not finding.metrics
        assert why in finding.skipped[0]
    finding = PROBES["membership"](subject_of(LocalOnly(), tmp_path))
    assert "model of its own" in finding.skipped[0]


def test_membership_is_the_share_of_pairs_that_the_loss_orders(subject):
    """The area under the curve is the Mann-Whitney statistic."""
    metrics = PROBES["membership"](subject).metrics
    data = subject.data
    everyone = torch.from_numpy(
        np.sort(np.concatenate([data.client(int(id)).train for id in data.active]))
    )
    members = leakage._losses(subject, "train", everyone)
    others = leakage._losses(subject, "test", torch.arange(len(data.test_target)))
    pairs = (members[:, None] < others).mean() + 0.5 * (members[:, None] == others).mean()
    assert metrics["membership/auc"] == pytest.approx(pairs, abs=1e-12)
    least = np.sort(others)[: int(leakage.FALSE_POSITIVES * len(others)) + 1][-1]
    assert metrics["membership/tpr"] == pytest.approx((members < least).mean(), abs=1e-12)


def test_a_model_that_knows_its_examples_by_heart_gives_them_away(subject):
    data, method = subject.data, subject.method
    data.train_target = torch.randint(
        4, data.train_target.shape, generator=torch.Generator().manual_seed(0)
    )
    data.test_target = torch.randint(
        4, data.test_target.shape, generator=torch.Generator().manual_seed(1)
    )
    before = PROBES["membership"](subject).metrics["membership/auc"]
    optimizer = torch.optim.Adam(method.network.parameters(), lr=0.01)
    method.deploy()
    inputs = data.inputs("train", torch.arange(len(data.train_target)))
    for _ in range(200):
        optimizer.zero_grad()
        method.task.loss(method.network(inputs), data.train_target).backward()
        optimizer.step()
    method.server["weights"] = method.layout.read(method.network)
    after = PROBES["membership"](subject).metrics["membership/auc"]
    assert abs(before - 0.5) < 0.15
    assert after > 0.9


def test_quality_of_reconstructions_by_hand():
    images = torch.tensor([[[0.0, 0.0]], [[1.0, 1.0]]])
    found = torch.tensor([[[0.1, 0.1]]])
    torch.testing.assert_close(
        psnr(found, images), torch.tensor([20.0, -10 * np.log10(0.81)]).float()
    )
    assert recognised(found, images, torch.tensor([[[0.5, 0.5]]])) == 0.5
    assert recognised(found, images, torch.tensor([[[0.1, 0.2]]])) == 0
    assert float(inversion.total_variation(torch.tensor([[[0.0, 1.0], [0.0, 1.0]]]))) == 1


def test_the_long_attack_is_run_only_where_it_is_named():
    assert "inversion" not in select_probes(None)
    assert select_probes("inversion") == ["inversion"]


def test_what_the_server_and_others_see(subject, monkeypatch):
    """A share of noise is that of the run's cohort, however few clients are attacked; a sum has all
    of it."""
    seen = []
    monkeypatch.setattr(
        leakage,
        "_reconstruct",
        lambda subject, messages, labels, shape: seen.append(messages) or torch.rand(shape),
    )

    def views(**guard) -> list[torch.Tensor]:
        seen.clear()
        PROBES["inversion"](replace(subject, protection=Protection(**guard)))
        return list(seen)

    bare, total = views()
    shared, released, control = views(noise_std=1.0, share_std=0.25)
    assert float((shared - bare).std()) == pytest.approx(0.25, rel=0.05)
    assert float((released - total).std()) == pytest.approx(1.0, rel=0.05)
    assert torch.equal(control, bare)
    masked, noisy, _ = views(secure=True, noise_std=1.0, share_std=0.25)
    assert torch.equal(masked, noisy)
    central, noisy, _ = views(secure=True, noise_std=1.0)
    assert torch.equal(central, total)
    assert not torch.equal(noisy, total)


def test_clients_that_never_took_part_are_no_members(subject):
    data, some = subject.data, frozenset([0, 2])
    found = PROBES["membership"](replace(subject, trained_on=some))
    count = sum(len(data.client(id).train) for id in some)
    assert found.details["members"] == f"{count} examples of 2 clients that took part"
    losses = leakage._losses(subject, "train", torch.from_numpy(np.sort(data.client(0).train)))
    assert len(losses) == len(data.client(0).train)
    alone = replace(subject, trained_on=frozenset([0]))
    others = leakage._losses(subject, "test", torch.arange(len(data.test_target)))
    pairs = (losses[:, None] < others).mean() + 0.5 * (losses[:, None] == others).mean()
    assert PROBES["membership"](alone).metrics["membership/auc"] == pytest.approx(pairs, abs=1e-12)
