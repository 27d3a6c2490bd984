"""Methods whose clients have models of their own: what they equal, bit for bit, what clients keep,
and the mistakes of public code, each of which a golden file catches."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from golden_adapters import found_by_a_file
from lightning.pytorch import LightningModule
from refusals import refused
from tiny_language import fit, method_of, set_up
from torch import nn
from toy import run, sgd

from fl_lightning.conformance.toy import images, small_group_network, small_network
from fl_lightning.errors import InputError
from fl_lightning.hooks import Meter, Stressor
from fl_lightning.methods import (
    APFL,
    Ditto,
    FedALA,
    FedAvg,
    FedPer,
    FedProto,
    FedRoD,
    FineTune,
    FLTrust,
    Krum,
    LocalOnly,
)
from fl_lightning.wire import Payload, PayloadError

STACKED = (
    partial(Ditto, optimizer=sgd(0.05, momentum=0.9), lam=1.0),
    partial(Ditto, optimizer=sgd(0.05, momentum=0.9), personal_steps=2, personal_lr=0.01),
    partial(FedRoD, optimizer=sgd(0.05, momentum=0.9)),
    partial(APFL, network=small_group_network),
    partial(FedALA, optimizer=sgd(0.05, momentum=0.9), ala_lr=100.0),
    partial(FedProto, optimizer=sgd(0.05, momentum=0.9)),
)


class Dropping(nn.Sequential):
    """A network with statistics and with random numbers of its own."""

    def __init__(self, num_classes, small=small_network):
        super().__init__(small(16), nn.Dropout(0.5), nn.Linear(16, num_classes))


class Lost(Stressor):
    """The upload of client 2 is lost in round 2."""

    def change_cohort(self, cohort, *, round, context):
        return [replace(a, returns=(round, a.client.id) != (2, 2)) for a in cohort]


class Models(Meter):
    """Every client's model, and the global one, after the last round."""

    def on_round_end(self, record, context):
        method, data, states = context.method, context.data, context.states
        clients = [data.client(id, dict(states.get(id, {}))) for id in range(data.num_clients)]
        *self.own, self.shared = (
            method.layout.read(method.deploy(client)) for client in (*clients, None)
        )


def after(method, folder, **settings):
    models = Models()
    settings = {
        "max_rounds": 3,
        "participation": 0.5,
        "callbacks": [Lost(), models],
        "workers": 1,
        **settings,
    }
    run(method, images(), folder, **settings)
    return models


def of(kind, **settings):
    return kind(**{"network": Dropping, "optimizer": sgd(0.05, momentum=0.9), **settings})


@pytest.mark.parametrize(
    ("kind", "own"),
    [
        (Ditto, {}),
        (Ditto, {"lam": 1.0, "personal_steps": 2, "personal_lr": 0.01}),
        (FedRoD, {"gamma": 0.0}),
        (APFL, {}),
        (FedALA, {"ala_epochs": 0}),
    ],
)
def test_the_global_model_is_fedavgs(kind, own, tmp_path):
    """Bit for bit, with masks of dropout, statistics of BatchNorm and momentum where it may have
    them."""
    plain = {"network": partial(Dropping, small=small_group_network), "optimizer": sgd(0.05)}
    common = plain if kind is APFL else {}
    mine, fedavg = after(of(kind, **common, **own), tmp_path), after(of(FedAvg, **common), tmp_path)
    assert torch.equal(mine.shared, fedavg.shared)
    assert any(not torch.equal(mine.shared, model) for model in mine.own)


class Classifier(LightningModule):
    def __init__(self):
        super().__init__()
        self.network = small_group_network(4)

    def forward(self, inputs):
        return self.network(inputs)

    def training_step(self, batch, batch_idx):
        return 2 * nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05)


@pytest.mark.parametrize(("kind", "own"), [(Ditto, {}), (APFL, {}), (FedALA, {"ala_epochs": 0})])
def test_a_module_gives_its_loss_to_both_models(kind, own, tmp_path):
    module = Classifier()
    mine = after(kind(module=module, optimizer=sgd(0.05), **own), tmp_path)
    assert torch.equal(mine.shared, after(FedAvg(module=module), tmp_path).shared)
    assert any(not torch.equal(mine.shared, model) for model in mine.own)


@pytest.mark.parametrize("kind", [Ditto, FedProto])
def test_clients_that_nothing_pulls_are_local_only(kind, tmp_path):
    mine, alone = after(of(kind, lam=0.0), tmp_path), after(of(LocalOnly), tmp_path)
    assert torch.equal(torch.stack(mine.own), torch.stack(alone.own))


def test_one_norm_of_both_models_is_refused(tmp_path):
    with pytest.raises(InputError, match="gradient_clip_algorithm value"):
        run(of(Ditto), images(), tmp_path / "runs", gradient_clip_val=1.0)
    run(
        of(Ditto),
        images(),
        tmp_path,
        max_rounds=1,
        gradient_clip_val=1.0,
        gradient_clip_algorithm="value",
    )


def test_fedrods_personal_model_is_the_sum_of_its_heads(tmp_path):
    method = of(FedRoD)
    client = run(method, images(), tmp_path, max_rounds=1).data.client(0)
    client.state["P"] = torch.arange(4 * 17) / 10
    inputs = torch.rand(5, 3, 16, 16)
    with torch.no_grad():
        shared = method.deploy().eval()(inputs)
        z = method.tap.take()
        personal = method.deploy(client).eval()(inputs)
    weight, bias = client.state["P"].split([64, 4])
    torch.testing.assert_close(personal, shared + z @ weight.view(4, 16).T + bias)


def test_a_network_without_a_last_linear_layer_is_refused(tmp_path):
    def network(num_classes):
        return nn.Sequential(small_network(num_classes), nn.Softmax(1))

    with pytest.raises(InputError, match="does not end with a linear layer"):
        run(FedRoD(network=network), images(), tmp_path / "runs")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"network": small_network}, "use group normalisation"),
        (
            {"network": small_group_network, "optimizer": sgd(0.05, momentum=0.9)},
            "optimizer.momentum 0",
        ),
    ],
)
def test_mixtures_that_are_no_model_are_refused(settings, says, tmp_path):
    with pytest.raises(InputError, match=says):
        run(APFL(**settings), images(), tmp_path / "runs")


def test_fedala_learns_in_so_many_batches(tmp_path):
    """The authors' loop goes on until the losses stand still, which they need not. What is learnt
    moves shares, and neither statistics nor what is drawn afterwards."""
    method = of(FedALA, ala_epochs=2, ala_lr=100.0)
    data = run(method, images(), tmp_path, max_rounds=1).data
    client, asked = data.client(0), method.task_and_logits
    client.state["v"] = torch.randn(method.layout.size)
    method.receive(method.broadcast(client), client)
    before, calls = {name: b.clone() for name, b in method.network.named_buffers()}, []
    method.task_and_logits = lambda *arguments: calls.append(arguments) or asked(*arguments)
    drawn = torch.get_rng_state()
    next(method.train().local_batches(data, client, epochs=1, labels=data.labels(client), steps=1))
    assert len(calls) == data.num_steps(client, 2) > 2
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(before[name], buffer) for name, buffer in method.network.named_buffers())
    assert 0 <= float(method.W.min()) < float(method.W.max()) <= 1


def test_names_of_no_parameter_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"write --model.ala_names '\[2\]'"):
        run(of(FedALA, ala_names=["fc."]), images(), tmp_path / "runs")


def test_prototypes_are_means_of_the_labels_that_a_client_trains_on(tmp_path):
    """In evaluation mode, over all its examples; noise has changed the labels."""
    method = of(FedProto)
    data = run(method, images(), tmp_path, max_rounds=1).data
    client, labels = data.client(0), (data.labels(data.client(0)) + 1) % 3
    method.start_client(method.broadcast(client), client, labels)
    upload = method.train().upload(client)
    method.network.eval()(data.inputs("train", torch.from_numpy(client.train)))
    z = method.tap.take()
    assert upload.tensor("counts").tolist() == [*torch.bincount(labels).tolist(), 0]
    for c in range(3):
        torch.testing.assert_close(upload.tensor("prototypes")[c], z[labels == c].mean(0))


def test_classes_may_be_bytes(tmp_path):
    """As files of images have them."""

    def with_bytes(data):
        setup = data.setup

        def as_bytes(stage="fit"):
            setup(stage)
            data.train_target = data.train_target.to(torch.uint8)

        data.setup = as_bytes
        return data

    methods = of(FedProto), of(FedProto)
    run(methods[0], images(), tmp_path / "longs", max_rounds=2)
    run(methods[1], with_bytes(images()), tmp_path / "bytes", max_rounds=2)
    assert torch.equal(*(method.server["prototypes"] for method in methods))


def test_a_server_that_trains_too_keeps_no_model_to_mix(tmp_path):
    """FedALA on the root set would begin each round with the first weights as its own."""
    with refused("--model.average FLTrust with --model FedALA", "MultiKrum"):
        run(of(FedALA, average=FLTrust(1)), images(), tmp_path)
    run(of(FedALA, average=FLTrust(1), ala_epochs=0), images(), tmp_path, max_rounds=1)


@pytest.mark.parametrize("kind", [Ditto, APFL, FedALA])
def test_a_client_has_a_model_of_its_own_rank(kind, tmp_path):
    """Clients 0 and 2 have the rank 2 of 4."""
    settings = {"rank": [2, 4], "adapter_average": "product"}
    method, models = method_of(kind, **settings), Models()
    if kind is APFL:
        method.optimizer_spec = sgd(0.05)
    trainer = fit(method, tmp_path, participation=0.5, callbacks=[models])
    data, states = trainer.data, trainer.progress.done.states
    for id, model in enumerate(models.own):
        own = method.own_model(data.client(id, dict(states.get(id, {}))))
        for name, values in (
            *method.layout.unpack(model).items(),
            *method.layout.unpack(own).items(),
        ):
            beyond = values[2:] if name.endswith("lora_A.weight") else values[:, 2:]
            if id % 2 == 0:
                assert (beyond == 0).all()
            elif name.endswith("lora_A.weight"):
                assert (beyond != 0).any()


def test_ranks_of_clients_and_what_stays_on_them():
    settings = {"rank": [2, 4], "adapter_average": "product"}
    method, data = set_up(method_of(FineTune, **settings, finetune_steps=2))
    method.receive(method.broadcast(data.client(0)), data.client(0))
    values = method.layout.unpack(method.layout.read(method.deploy(data.client(0))))
    assert all((a[2:] == 0).all() for name, a in values.items() if name.endswith("lora_A.weight"))
    with refused("adapters that stay on their clients", "write one rank"):
        set_up(method_of(FedPer, **settings))


@pytest.mark.parametrize("counts", [[0.5, 0, 0, 0], [-1, 2, 0, 0], [1e6, 0, 0, 0]])
def test_counts_that_no_client_has_are_refused(counts, tmp_path):
    method = of(FedProto)
    client = run(method, images(), tmp_path, max_rounds=1).data.client(0)
    upload = {"examples": method.examples_of(client), "prototypes": torch.zeros(4, 16)}
    with pytest.raises(PayloadError, match="they are whole numbers"):
        method.check(Payload({**upload, "counts": torch.tensor(counts)}), client)


def test_an_average_without_enough_clients_of_a_class_leaves_its_prototype(tmp_path):
    """Of three clients a median of all would have moved class 1, which only one of them has."""
    method = of(FedProto, average=Krum(0))
    run(method, images(), tmp_path, max_rounds=1)
    method.server["prototypes"], before = torch.zeros(4, 16), method.server["known"]
    counts = torch.tensor([[1.0, 0, 0, 0], [1, 1, 0, 0], [1, 0, 0, 0]])
    uploads = {
        k: Payload({"prototypes": torch.full((4, 16), k + 1.0), "counts": counts[k]})
        for k in range(3)
    }
    method.aggregate(uploads)
    assert method.server["prototypes"][:, 0].tolist()[1:] == [0, 0, 0]
    assert method.server["prototypes"][0, 0] > 0
    assert torch.equal(method.server["known"], before | torch.tensor([1, 0, 0, 0]))


@pytest.mark.parametrize("make", STACKED, ids=lambda make: make.func.__name__)
def test_stacks_of_clients_are_trained_as_each_by_itself(make, tmp_path, caplog):
    one, stacked = (
        after(make(**{"network": small_network, **make.keywords}), tmp_path, engine=name)
        for name in ("sequential", "batched")
    )
    assert not [record for record in caplog.records if "one by one" in record.message]
    for mine, other in ((one.own, stacked.own), ([one.shared], [stacked.shared])):
        torch.testing.assert_close(torch.stack(mine), torch.stack(other), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [FedALA, FedProto])
def test_two_processes_leave_the_same(kind, tmp_path):
    """To the last bit; what W and prototypes are made of is at hand where a client is trained."""
    one, two = (
        after(of(kind), tmp_path, workers=workers, engine="sequential") for workers in (1, 2)
    )
    assert torch.equal(torch.stack([*one.own, one.shared]), torch.stack([*two.own, two.shared]))


# Mistakes of public code


class StartsFromX(Ditto):
    """v starts each round from the global model."""

    def kept(self, client, name):
        return self.layout.read(self.network)


class DrawnToY(Ditto):
    """v is drawn to the global model while that one is trained."""

    def personal_losses(self, batch, batch_idx):
        self.start = self.trained.read(self.network)
        return super().personal_losses(batch, batch_idx)


class TrainsTheBase(FedRoD):
    """FL-bench: the gradient of P's loss enters base and G."""

    def training_step(self, batch, batch_idx=0):
        _, logits = self.task_and_logits(batch, batch_idx)
        personal = self.task_loss(logits + self.head(self.tap.take()), batch[1])
        outputs = super().training_step(batch, batch_idx)
        return {**outputs, "loss": outputs["loss"] - outputs["loss_personal"] + personal}


class ApartFromG(FedRoD):
    """P learns by itself what G knows already."""

    def training_step(self, batch, batch_idx=0):
        outputs = super().training_step(batch, batch_idx)
        self.network(batch[0])
        personal = self.task_loss(self.head(self.tap.take().detach()), batch[1])
        return {**outputs, "loss": outputs["loss"] - outputs["loss_personal"] + personal}


class MixesLogits(APFL):
    """FedTorch, FL-bench: the outputs of v and w are mixed, and not their weights."""

    def task_and_logits(self, batch, batch_idx, weights=None):
        if weights is None:
            return super().task_and_logits(batch, batch_idx)
        A = self.A if batch_idx == 0 else self.A.detach().clamp(0, 1)
        logits = A * self.beside(batch[0]) + (1 - A) * self.network(batch[0]).detach()
        return self.task_loss(logits, batch[1]), logits


class OverwritesV(APFL):
    """PFLlib: v makes a step by its own loss, and then becomes the mixture."""

    def task_and_logits(self, batch, batch_idx, weights=None):
        return super().task_and_logits(
            batch, batch_idx, weights and dict(self.beside.named_parameters())
        )

    @torch.no_grad()
    def on_train_batch_end(self, outputs, batch, batch_idx):
        for v, w in zip(self.beside.parameters(), self.network.parameters(), strict=True):
            v.copy_(self.A * v + (1 - self.A) * w)


class AddsAShareOfA(APFL):
    """FedTorch: A is drawn to 0 by 0.02 A."""

    def training_step(self, batch, batch_idx=0):
        outputs = super().training_step(batch, batch_idx)
        extra = 0.01 * self.A.square() if batch_idx == 0 else 0.0
        return {**outputs, "loss": outputs["loss"] + extra}


class LearnsAInEveryStep(APFL):
    """A moves in all steps of a round."""

    def training_step(self, batch, batch_idx=0):
        return super().training_step(batch, 0)


class ForgetsW(FedALA):
    """W is 1 in every round."""

    def kept(self, client, name):
        return self.first["W"] if name == "W" else super().kept(client, name)


class MixesEverything(FedALA):
    """All layers are mixed, and not those that were asked for."""

    def build(self, data):
        self.ala_names = [""]
        super().build(data)


class OnAfterTheServer(FedALA):
    """The personal model is the mixture with what the server has made of all."""

    def deploy(self, client=None):
        network = FedAvg.deploy(self)
        if client is not None:
            self.receive(self.broadcast(client), client)
        return network


class Unweighted(FedProto):
    """The authors' code: clients count once each, however many examples of the class they have."""

    def upload(self, client):
        sent = super().upload(client)
        return Payload({**sent, "counts": sent.tensor("counts").clamp(max=1)})


class CollectsWhileTraining(FedProto):
    """The authors' code: what is sent is of the weights before the last step."""

    def training_step(self, batch, batch_idx=0):
        with torch.no_grad():
            self.network(batch[0])
            of_class = nn.functional.one_hot(batch[1], len(self.known)).T.float()
            self.seen = (of_class @ self.tap.take()) / of_class.sum(1, keepdim=True).clamp_min(1)
        return super().training_step(batch, batch_idx)

    def upload(self, client):
        return Payload({**super().upload(client), "prototypes": self.seen})


class ForgetsClasses(FedProto):
    """A class that nobody in a round has is not known in the next one."""

    def aggregate(self, uploads):
        self.server["known"] = torch.zeros_like(self.server["known"])
        super().aggregate(uploads)


FAULTS = (
    *(StartsFromX, DrawnToY, TrainsTheBase, ApartFromG),
    *(ForgetsW, MixesEverything, OnAfterTheServer),
    *(Unweighted, CollectsWhileTraining, ForgetsClasses),
    *(MixesLogits, OverwritesV, AddsAShareOfA, LearnsAInEveryStep),
)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_golden_file_catches_it(fault, tmp_path):
    assert found_by_a_file(fault, tmp_path)
