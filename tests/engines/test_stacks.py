"""What is gathered and sent for many clients at once is what each of them would have had: data,
labels, uploads of any form."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import pytest
import torch
from fates import Fates
from lightning.fabric import Fabric
from ten import SMALL, fit, make, same
from torch import nn
from toy import run, sgd

from fl_lightning.conformance.toy import images, small_group_network, small_network
from fl_lightning.data import FederatedImages
from fl_lightning.engines import ClientTask, SequentialEngine, choice
from fl_lightning.engines.stacked import batched
from fl_lightning.engines.stacked.batched import BatchedEngine
from fl_lightning.hooks import Meter, Stressor
from fl_lightning.methods import (
    BalancedSoftmax,
    FedAvg,
    FedRep,
    FedSAM,
    FedSpeed,
    MoFedSAM,
    ProximalTerm,
)
from fl_lightning.models import SmallCNN
from fl_lightning.models.adapters import add_adapter
from fl_lightning.sampling import PowerOfChoice


class Noisy(FederatedImages):
    """Draws from torch's generators, which ``inputs`` may as long as nobody says that it is
    examplewise."""

    def inputs(self, split, index, draws=None):
        images = super().inputs(split, index, draws)
        return images + 0.3 * torch.randn_like(images) if split == "train" else images


class Standardised(FederatedImages):
    def inputs(self, split, index, draws=None):
        images = super().inputs(split, index, draws)
        return (images - images.mean()) / images.std()

    def labels(self, client):
        return (super().labels(client) + client.id) % 4


@pytest.mark.parametrize("kind", [FederatedImages, Noisy, Standardised])
def test_data_of_any_kind_are_the_same_in_stacks(kind, tmp_path, monkeypatch):
    def data():
        made = images()
        made.__class__ = kind
        return made

    one = run(
        make("FedAvg"), data(), tmp_path, max_rounds=2, engine="sequential", workers=1
    ).method.server
    monkeypatch.delattr(SequentialEngine, "train")  # of workers too, whose log is not here
    other = run(
        make("FedAvg"), data(), tmp_path, max_rounds=2, engine="batched", workers=2
    ).method.server
    assert torch.allclose(one["weights"], other["weights"], rtol=0, atol=2e-5)
    if kind is not FederatedImages:
        plain = run(
            make("FedAvg"), images(), tmp_path, max_rounds=2, engine="batched"
        ).method.server
        assert not torch.allclose(plain["weights"], other["weights"], rtol=0, atol=1e-3)


def test_no_autocast_around_what_a_step_leaves_outside(tmp_path, caplog):
    class Looks(FedAvg):
        stackable, within, after = True, [], []

        def training_step(self, batch, batch_idx):
            self.within.append(torch.is_autocast_enabled("cpu"))
            return super().training_step(batch, batch_idx)

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.after.append(torch.is_autocast_enabled("cpu"))

    fit(
        Looks(network=SMALL, optimizer=sgd(0.05)),
        tmp_path,
        engine="batched",
        workers=1,
        precision="bf16-mixed",
    )
    assert "one by one" not in caplog.text
    assert Looks.within
    assert all(Looks.within)
    assert Looks.after
    assert not any(Looks.after)


class Relabels(Stressor):
    def __init__(self, change) -> None:
        self.change = change

    def change_labels(self, labels, *, client, round, context):
        return self.change(labels) if client.id == 1 else labels


@pytest.mark.parametrize("engine", ["sequential", "batched"])
def test_labels_of_another_length_are_refused_and_of_another_form_kept_apart(engine, tmp_path):
    with pytest.raises(ValueError, match="for client 1; each of its"):
        fit(
            make("FedAvg"),
            tmp_path,
            engine=engine,
            callbacks=[Relabels(lambda labels: labels[:-1])],
        )
    soft = Relabels(lambda labels: nn.functional.one_hot(labels, 4).float())
    softened, _ = fit(make("FedAvg"), tmp_path, engine=engine, workers=2, callbacks=[soft])
    hard, _ = fit(make("FedAvg"), tmp_path, engine="sequential", workers=1)
    assert torch.allclose(softened["weights"], hard["weights"], rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("FedKD", {"temperature": 2.0}),
        ("FedProx", {}),
        ("FedMosaic", {"loss": "squared_error"}),
        ("FedNTD", {}),
        ("FedProto", {}),
        ("FedAvg", {"terms": [BalancedSoftmax()]}),
    ],
)
def test_a_method_takes_shares_of_classes_for_the_classes(name, settings, tmp_path):
    soft = Relabels(lambda labels: nn.functional.one_hot(labels, 4).float())
    servers = []
    for stressors in ([soft], []):
        method = make(name, **settings)
        asking = {"sampler": PowerOfChoice(6), "participation": 0.5} if name == "FedProx" else {}
        data = images(public_examples=40 if name == "FedKD" else 0)
        run(
            method, data, tmp_path, max_rounds=2, engine="sequential", callbacks=stressors, **asking
        )
        servers.append(method.server)
    for key, value in servers[1].items():
        assert torch.allclose(servers[0][key], value, rtol=0, atol=2e-5), key


def test_a_layout_that_reads_otherwise_is_read_client_by_client(tmp_path, caplog):
    class Halves(FedAvg):
        stackable = True

        def build(self, data):
            super().build(data)
            self.layout.read = lambda module, read=self.layout.read: 0.5 * read(module)

    one, other = (
        fit(Halves(network=SMALL, optimizer=sgd(0.05)), tmp_path, engine=engine)[0]
        for engine in ("sequential", "batched")
    )
    assert "one by one" not in caplog.text
    assert torch.allclose(one["weights"], other["weights"], rtol=0, atol=2e-5)


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_uploads_of_a_stack_are_those_of_each(norm, tmp_path, monkeypatch, caplog):
    settings = {"network": partial(SmallCNN, width=4, norm=norm)}
    expected, one = fit(make("FedAvg", **settings), tmp_path, engine="batched")
    monkeypatch.setattr("fl_lightning.engines.stacked.batched.default_uploads", lambda *_: None)
    found, other = fit(make("FedAvg", **settings), tmp_path, engine="batched")
    assert "one by one" not in caplog.text
    assert same(expected, found)
    assert (one / "ledger.csv").read_text() == (other / "ledger.csv").read_text()


STEPS_OF_TWO_KINDS = {
    "FedSAM": partial(FedSAM, rho=0.1, optimizer=sgd(0.05, momentum=0.9)),
    "FedSAM with a term": partial(FedSAM, network=small_group_network, terms=[ProximalTerm(0.1)]),
    "MoFedSAM": partial(MoFedSAM, rho=0.1),
    "FedSpeed": partial(FedSpeed, personal="norm"),
    "FedRep": partial(FedRep, head_steps=3, optimizer=sgd(0.05, momentum=0.9, weight_decay=0.01)),
    "FedRep at two rates": partial(FedRep, head_steps=2, head_lr=0.2, terms=[ProximalTerm(0.1)]),
}


class Kept(Meter):
    """What each client keeps at the end."""

    def on_round_end(self, record, context):
        self.states = {
            f"{id}: {name}": v for id, state in context.states.items() for name, v in state.items()
        }


@pytest.mark.quick("FedSAM with a term", "FedRep")
@pytest.mark.parametrize("name", STEPS_OF_TWO_KINDS)
def test_gradients_within_a_step_and_frozen_parts_in_stacks(name, tmp_path, caplog):
    """Statistics are those of SAM's first pass, and a frozen part takes no step of weight decay;
    with a client of one example, drop-outs, a lost and a rejected upload."""
    make_one, found = STEPS_OF_TWO_KINDS[name], []
    clip = {} if name == "MoFedSAM" else {"gradient_clip_val": 0.5}
    for engine in ("sequential", "batched"):
        method = make_one(**{"network": small_network, "optimizer": sgd(0.05), **make_one.keywords})
        kept, settings = Kept(), {"max_rounds": 4, "workers": 1, "engine": engine, **clip}
        # with seed 0 a value of FedSpeed's network is so near to 0 that rounding decides its ReLU
        run(method, images(), tmp_path, seed=1, callbacks=[Fates(), kept], **settings)
        found.append({**method.server, **kept.states})
    assert choice.is_stackable(method)
    assert "one by one" not in caplog.text
    assert found[0].keys() == found[1].keys()
    for tensor, value in found[0].items():
        torch.testing.assert_close(found[1][tensor], value, rtol=1e-4, atol=2e-5)


def test_stacks_are_cut_as_if_nothing_had_been_trained(monkeypatch):
    """A round of factors that are trained in turn freezes the other ones."""
    monkeypatch.setattr(batched, "MAX_STACK_BYTES", 4 * 4 * 4000)
    data = images()
    data.prepare_data()
    data.setup("fit")
    data.distribute(0, torch.device("cpu"))

    def adapted(num_classes):
        net = nn.Sequential(nn.Flatten(), nn.Linear(768, 32), nn.ReLU(), nn.Linear(32, num_classes))
        return add_adapter(net, "lora", 2, seed=0)

    method = FedAvg(network=adapted, adapter_average="alternate", optimizer=sgd(0.05))
    method.build(data)
    engine = BatchedEngine(Fabric(accelerator="cpu"), method, data)
    method.round = 1
    clients = [data.client(id) for id in range(6)]
    tasks = [
        ClientTask(one, 1, method.broadcast(one).to_bytes(), data.labels(one), 1, 1)
        for one in clients
    ]
    before = engine.units(tasks)
    assert len([*engine.train(tasks)]) == 6
    assert any(not p.requires_grad for n, p in method.named_parameters() if "lora" in n)
    assert engine.units(tasks) == before
    assert 1 < len(before) < 6


def hooked(num_classes):
    """A linear network whose weights see a third of their gradient."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(768, num_classes))
    net[1].weight.register_hook(lambda gradient: gradient / 3)
    return net


def accumulating(num_classes):
    net = nn.Sequential(nn.Flatten(), nn.Linear(768, num_classes))

    def halve(weight):
        weight.grad *= 0.5

    net[1].weight.register_post_accumulate_grad_hook(halve)
    return net


def normalised(parameters):
    """An optimiser that steps on each whole tensor's direction."""

    def normalise(optimizer, args, kwargs):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad /= parameter.grad.norm()

    optimizer = torch.optim.SGD(parameters, lr=0.05)
    optimizer.register_step_pre_hook(normalise)
    return optimizer


class DrawsScale(nn.Sequential):
    """Each forward pass takes the next of the draws that a test gives to ``random`` or NumPy."""

    def __init__(self, draw):
        super().__init__(nn.Flatten(), nn.Linear(768, 4))
        self.draw = draw

    def forward(self, x):
        return super().forward(x) * self.draw()


class Anneals(nn.Sequential):
    """Its passes are counted in a plain number, and it shows the features of the last one."""

    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(768, 4))
        self.passes, self.features = 0, None

    def forward(self, x):
        self.passes += self.training
        self.features = super().forward(x)
        return self.features * (1 + 1 / (1 + self.passes))


class Centres(Anneals):
    """It takes a moving mean of its features off them."""

    def forward(self, x):
        features = nn.Sequential.forward(self, x)
        if self.training:
            mean = features.mean(0).detach()
            self.features = mean if self.features is None else 0.9 * self.features + 0.1 * mean
        return features if self.features is None else features - self.features


LEFT_OUT = {
    "a counter of a network": (lambda num_classes: Anneals(), sgd(0.05)),
    "a mean of a network": (lambda num_classes: Centres(), sgd(0.05)),
    "a weight's hook": (hooked, sgd(0.05)),
    "a hook of the accumulated gradient": (accumulating, sgd(0.05)),
    "an optimiser's hook": (SMALL, normalised),
    "random": (lambda num_classes: DrawsScale(random.random), sgd(0.05)),
    "NumPy": (lambda num_classes: DrawsScale(np.random.random), sgd(0.05)),
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_a_stack_would_leave_out_is_trained_one_by_one(name, tmp_path, caplog):
    network, optimizer = LEFT_OUT[name]
    found = []
    for engine in ("sequential", "batched"):
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        made = FedAvg(network=network, optimizer=optimizer)
        found.append(fit(made, tmp_path, engine=engine, workers=1, max_rounds=1)[0])
    why = "draws from random or NumPy in a step" if name in ("random", "NumPy") else "has hooks"
    assert ("in a step; it would be one value" if "network" in name else why) in caplog.text
    assert same(*found)


@pytest.mark.parametrize("network", [Anneals, Centres])
@pytest.mark.parametrize("share", [0.0, 1e9], ids=["in turn", "at once"])
def test_measuring_leaves_nothing_in_a_network(network, share, tmp_path, monkeypatch):
    monkeypatch.setattr(choice, "MIN_BATCHED_COHORT", 1)
    monkeypatch.setattr(choice, "MAX_STEP_SECONDS", 9.0)
    monkeypatch.setattr(choice, "MAX_BATCHED_TIME_SHARE", share)
    found = []
    for engine in ("sequential", "auto"):
        made = FedAvg(network=lambda num_classes: network(), optimizer=sgd(0.05))
        found.append(fit(made, tmp_path, engine=engine, workers=1, max_rounds=1)[0])
    assert same(*found)
