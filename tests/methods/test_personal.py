"""Personal parts and fine-tuned copies: what stays, whose it is, what they go with, and mistakes of
public code."""

from __future__ import annotations

import math
from collections import Counter
from copy import deepcopy
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from golden_adapters import found_by_a_file
from lightning.pytorch import LightningModule
from refusals import refused
from torch import nn
from toy import run, sgd

from callbacks import LabelNoise
from fl_lightning import methods
from fl_lightning.conformance import (
    checks_orders,
    checks_runs,
    checks_state,
    checks_wire,
    method_under_test,
    run_checks,
)
from fl_lightning.conformance.toy import images, small_network
from fl_lightning.data import Dirichlet
from fl_lightning.data.test_owners import deal_test_set
from fl_lightning.engines import finetuning
from fl_lightning.errors import InputError
from fl_lightning.hooks import Meter
from fl_lightning.methods import (
    SCAFFOLD,
    FedAvg,
    FedBABU,
    FedBN,
    FedPer,
    FedProx,
    FedRep,
    FineTune,
    FineTuning,
    LGFedAvg,
    LocalOnly,
    ServerSGD,
)
from fl_lightning.methods.personal import OWN, part_of
from fl_lightning.methods.terms import ContrastiveTerm
from fl_lightning.models import build_network
from fl_lightning.models.language import LlamaTiny


class End(Meter):
    """The method, the data, the states of clients and the last round, as a run leaves them."""

    def on_round_end(self, record, context):
        self.method, self.data, self.record = context.method, context.data, record
        self.states = {id: dict(state) for id, state in context.states.items()}


def fit(method, folder, callbacks=(), data=None, **settings):
    """Return what a run of three rounds leaves."""
    method.network_spec = small_network
    if method.optimizer_spec is None:
        method.optimizer_spec = sgd(0.05)
    end = End()
    settings = {"max_rounds": 3, "local_epochs": 1, "callbacks": [*callbacks, end], **settings}
    run(method, data or images(), folder, **settings)
    return end


def test_layers_of_normalisation_are_known_by_their_type():
    network = build_network("resnet20", 10, (3, 16, 16))
    found = part_of(network, "norm")
    by_type = {
        f"{name}.{tensor}"
        for name, module in network.named_modules()
        if isinstance(module, (torch.nn.BatchNorm2d, torch.nn.GroupNorm))
        for tensor in (*dict(module.named_parameters()), *dict(module.named_buffers()))
    }
    assert found == by_type
    assert any("bn" not in name and "norm" not in name for name in found), "a name would do here"


def test_head_body_and_patterns():
    network = small_network(4)
    head, body = part_of(network, "head"), part_of(network, "body")
    assert {name.rpartition(".")[2] for name in head} == {"weight", "bias"}
    assert len(head) == 2
    assert not head & body
    one = next(iter(head)).rpartition(".")[0]
    assert part_of(network, f"{one}.*") == head
    adapted = part_of(LlamaTiny(259), "head")
    assert {name.removeprefix("layers.3.mlp.down_proj.") for name in adapted} == {
        "base_layer.weight",
        "lora_A.weight",
        "lora_B.weight",
    }
    with pytest.raises(InputError, match="no tensor of SmallCNN has such a name"):
        part_of(network, "nope.*")
    with pytest.raises(InputError, match="something has to travel"):
        FedAvg(personal="*", network=small_network).build(prepared())


def frozen_head(classes):
    network = small_network(classes)
    head = part_of(network, "head")
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(name not in head)
    return network


@pytest.mark.parametrize(
    ("method", "instead"),
    [
        (FedPer, "write --model FedAvg --model.personal with a pattern"),
        (FedRep, "write --model FedAvg --model.personal with a pattern"),
        (FedBABU, "write --model FedAvg --model.personal with a pattern"),
        (partial(FedProx, personal="head"), "write --model.personal with a pattern"),
        (partial(FineTune, finetune_part="head"), "write --model.finetune_part full"),
        (partial(FedAvg, finetune=FineTuning(part="head")), "write --model.finetune.part full"),
    ],
)
def test_a_head_that_nobody_trains_is_refused(method, instead, tmp_path):
    with refused("nothing there is trained", instead):
        run(method(network=frozen_head), images(), tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
    assert part_of(small_network(4), "*weight")  # a pattern as it is told to write


def test_a_network_without_a_linear_layer_is_tuned_whole(tmp_path):
    network = partial(nn.Sequential, nn.Conv2d(3, 4, 16), nn.Flatten())
    method = FineTune(network=lambda classes: network(), optimizer=sgd(0.05), finetune_part="head")
    with refused("nothing there is trained", "write --model.finetune_part full"):
        run(method, images(), tmp_path / "runs")


class Counting(nn.Sequential):
    """Its statistics are means over all batches that a counter has counted, which does not
    travel."""

    def __init__(self, classes):
        first = nn.Linear(3 * 16 * 16, 8)
        norm = nn.BatchNorm1d(8, momentum=None)
        super().__init__(nn.Flatten(), first, norm, nn.Linear(8, classes))


def test_a_copy_is_tuned_from_the_counters_of_the_start(tmp_path):
    """Whichever client was tuned before."""
    method = FineTune(network=Counting, optimizer=sgd(0.05), finetune_steps=2)
    data = run(method, images(), tmp_path, max_rounds=1).data

    def model_of(id):
        return method.layout.read(method.deploy(data.client(id)))

    assert torch.equal(model_of(0), [model_of(2), model_of(0)][1])


def prepared():
    data = images()
    data.setup("fit")
    data.distribute(0, torch.device("cpu"))
    return data


@pytest.mark.parametrize("method", [FineTune, partial(FedAvg, finetune=FineTuning(3, part="head"))])
def test_fine_tuning_leaves_the_server_what_fedavg_has(method, tmp_path):
    tuned, plain = fit(method(), tmp_path / "tuned"), fit(FedAvg(), tmp_path / "plain")
    assert torch.equal(tuned.method.server["weights"], plain.method.server["weights"])
    assert tuned.record.metrics["global/accuracy"] == plain.record.metrics["test/accuracy"]
    assert tuned.states == {}


def test_epochs_are_as_many_steps_as_the_client_makes_in_them(tmp_path):
    end = fit(FedAvg(finetune=FineTuning(epochs=2)), tmp_path / "epochs")
    by_steps = fit(FedAvg(finetune=FineTuning(steps=1)), tmp_path / "steps")
    for id in (0, 2, 4):
        by_steps.method.finetune.steps = 2 * end.data.num_steps(end.data.client(id), 1)
        one, other = (
            each.method.layout.read(each.method.deploy(each.data.client(id)))
            for each in (end, by_steps)
        )
        assert torch.equal(one, other)


def test_a_client_that_holds_nothing_to_train_on_is_tuned_by_no_step():
    data = prepared()
    nobody = replace(data.client(0), train=data.client(0).train[:0])
    assert data.num_steps(nobody, 1) == 0
    assert [data.epochs_for(nobody, steps) for steps in (0, 5)] == [0, 5]
    batches = data.train_batches(nobody, round=1, epochs=5, labels=data.labels(nobody), steps=5)
    assert [*batches] == []


def test_without_steps_the_global_model_is_evaluated_client_by_client(tmp_path):
    end = fit(FineTune(finetune_steps=0), tmp_path)
    metrics = end.record.metrics
    assert metrics["test/accuracy"] == pytest.approx(metrics["global/accuracy"])


def test_fedbn_without_normalisation_is_fedavg(tmp_path):
    def network(classes):
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 16 * 16, classes))

    weights = []
    for method in (FedBN(), FedAvg()):
        method.network_spec, method.optimizer_spec, end = network, sgd(0.05), End()
        run(method, images(), tmp_path / type(method).__name__, max_rounds=2, callbacks=[end])
        weights.append(end.method.server["weights"])
    assert torch.equal(*weights)


def test_personal_metrics_by_hand(tmp_path):
    """The mean over clients, each of which counts once, of its own model on the test examples that
    it is dealt; a client that was never counted has the initial head."""
    end = fit(FedPer(), tmp_path, participation=0.34, max_rounds=2)
    method, data = end.method, end.data
    assert 0 < len(end.states) < data.num_clients
    owner, found = deal_test_set(data), []
    for id in np.unique(owner).tolist():
        network = method.deploy(data.client(id, dict(end.states.get(id, {})))).eval()
        mine = torch.from_numpy(np.flatnonzero(owner == id))
        with torch.no_grad():
            right = network(data.inputs("test", mine)).argmax(1) == data.test_target[mine]
        found.append(float(right.double().mean()))
    assert end.record.metrics["personal/accuracy"] == pytest.approx(np.mean(found))
    with torch.no_grad():
        every = torch.arange(len(data.test_target))
        network = method.deploy().eval()
        right = network(data.inputs("test", every)).argmax(1) == data.test_target
    assert end.record.metrics["global/accuracy"] == pytest.approx(float(right.double().mean()))


def test_what_stays_is_no_part_of_a_message(tmp_path):
    end = fit(FedPer(), tmp_path)
    method, whole = end.method, fit(FedAvg(), tmp_path / "whole").method
    assert method.layout.size + method.own.size == whole.layout.size
    assert method.server["weights"].numel() == method.layout.size
    assert {*method.own.shapes} == part_of(method.network, "head")
    assert end.states
    for state in end.states.values():
        assert {*state} == {OWN}


def test_a_copy_is_tuned_on_the_labels_that_the_client_trains_on(tmp_path, monkeypatch):
    """Also where a stressor has changed them: with clean ones it would look better than it is."""
    seen = []
    prepare = finetuning.prepare_finetuning

    def spy(fabric, method, data, labels_of):
        def labels(client):
            seen.append((method.round, client.id, labels_of(client)))
            return seen[-1][2]

        prepare(fabric, method, data, labels)

    monkeypatch.setattr("fl_lightning.run.preparation.prepare_finetuning", spy)
    end = fit(FineTune(finetune_steps=1), tmp_path, [LabelNoise(round=1, clients=1.0, labels=0.5)])
    changed = 0
    for _, id, labels in seen:
        changed += int((labels != end.data.labels(end.data.client(id))).sum())
    assert changed > 0


def test_they_compose(tmp_path):
    """SCAFFOLD, a server's momentum and terms over what travels, with normalisation or the head
    staying."""
    methods = (
        SCAFFOLD(personal="norm", optimizer=sgd(0.05)),
        FedProx(personal="head", server_optimizer=ServerSGD(1.0, 0.5), finetune=FineTuning(1)),
        FedAvg(personal="norm", terms=[ContrastiveTerm()]),
    )
    for number, method in enumerate(methods):
        end = fit(method, tmp_path / str(number))
        assert end.states
        assert all(OWN in state for state in end.states.values())
        assert math.isfinite(end.record.metrics["personal/accuracy"])
    assert end.method.layout.size > 0


CODED = {
    "QFedAvg": {"personal": "head"},
    "FedPQ": {"personal": "norm"},
    "AQFL": {"personal": "body", "download": "quantised"},
    "FedMPQ": {"personal": "head", "finetune": FineTuning(1)},
    "FedMPQKD": {"personal": "norm", "download": "quantised", "teacher": 1},
}
ON_WIRE_AND_CLIENTS = (
    checks_runs.resume,
    checks_runs.diverged_client,
    checks_wire.bytes_on_the_wire,
    checks_wire.shapes_of_entries,
    checks_wire.order_of_uploads,
    checks_wire.budget,
    checks_orders.clients_read_messages_only,
    checks_state.no_stale_state,
    checks_state.kept_state_is_used,
)


@pytest.mark.essential
@pytest.mark.slow
@pytest.mark.parametrize("name", CODED)
def test_parts_stay_with_clients_that_send_codes(name):
    subject = method_under_test(getattr(methods, name), CODED[name])
    outcomes = [*run_checks(subject, ON_WIRE_AND_CLIENTS)]
    assert [f"{o.check}: {o.detail}" for o in outcomes if o.verdict == "failed"] == []
    without_budget = {"budget"} if name in ("QFedAvg", "FedPQ") else set()
    assert {o.check for o in outcomes if o.verdict == "not applicable"} == without_budget


@pytest.mark.parametrize("name", CODED)
def test_codes_with_parts_that_stay_in_stacks(name, tmp_path):
    ended = []
    for engine in ("sequential", "batched"):
        method = getattr(methods, name)(**CODED[name])
        end = fit(method, tmp_path / engine, engine=engine, workers=1, max_rounds=2)
        ended.append(
            {
                **end.method.server,
                **{f"{id} {k}": v for id, s in end.states.items() for k, v in s.items()},
            }
        )
    one, other = ended
    assert one.keys() == other.keys()
    assert any(OWN in key for key in one)
    for key, value in one.items():
        assert torch.allclose(value.float(), other[key].float(), rtol=0, atol=1e-3), key


def test_something_has_to_travel_as_codes():
    with pytest.raises(InputError, match="no layer travels as codes"):
        methods.FedMPQ(personal="*.weight", network=small_network).build(prepared())


def test_codes_of_32_bits_leave_fedper_as_it_is(tmp_path):
    coded = fit(methods.QFedAvg(32, personal="head"), tmp_path / "coded")
    plain = fit(FedPer(), tmp_path / "plain")
    assert torch.equal(coded.method.server["weights"], plain.method.server["weights"])
    assert all(torch.equal(coded.states[id][OWN], plain.states[id][OWN]) for id in plain.states)


@pytest.mark.parametrize("name", ["FedMPQ", "AQFL"])
def test_full_precision_has_the_part_of_no_client(name):
    data = prepared()
    method = getattr(methods, name)(personal="head", network=small_network)
    method.build(data)
    client = data.client(0, {OWN: torch.full_like(method.own_start, 0.25)})
    before = method.own.read(method.full_precision())
    assert torch.equal(method.own.read(method.deploy(client)), client.state[OWN])
    assert torch.equal(method.own.read(method.full_precision()), before)


def test_a_teacher_has_the_clients_own_part():
    data = prepared()
    method = methods.FedMPQKD(personal="head", network=small_network)
    method.build(data)
    client = data.client(0)
    client.state[OWN] = torch.full_like(method.own_start, 0.25)
    message = method.broadcast(client)
    method.start_client(message, client, data.labels(client))
    assert torch.equal(method.own.read(method.teacher), client.state[OWN])
    assert "w0" not in message
    heads = {name for name in method.codec.names if name in part_of(method.network, "head")}
    assert heads == set()


@pytest.mark.slow
@pytest.mark.essential
def test_a_personal_body_learns_more_of_its_client_than_nothing(tmp_path):
    """On clients with few classes each, own heads beat the one model for all."""
    data = partial(
        images,
        partition=Dirichlet(beta=0.1, min_size=5),
        synthetic_examples=600,
        synthetic_test_examples=200,
    )
    personal = fit(FedPer(), tmp_path / "per", data=data(), max_rounds=8, local_epochs=2)
    plain = fit(
        FineTune(finetune_steps=0), tmp_path / "avg", data=data(), max_rounds=8, local_epochs=2
    )
    assert personal.record.metrics["personal/accuracy"] > plain.record.metrics["personal/accuracy"]


# Mistakes, each of which a golden file finds


class Jointly(FedRep):
    """Head and body train together in all steps, which is FedPer."""

    def training_step(self, batch, batch_idx=0):
        return FedAvg.training_step(self, batch, batch_idx)


class ZerosForNone(FedRep):
    """What is frozen has zeros for gradients, so that momentum moves it on."""

    def training_step(self, batch, batch_idx=0):
        trains_head = batch_idx < self.head_steps
        weights = {
            name: p if (name in self.own.shapes) == trains_head else p.detach() + 0 * p
            for name, p in self.network.named_parameters()
        }
        return {"loss": self.task_and_logits(batch, batch_idx, weights)[0]}


class KeepsTheCopy(FineTune):
    """The tuned model is what the next evaluation of this client starts from."""

    def deploy(self, client=None):
        network = super().deploy(client)
        if client is not None:
            kept = self.__dict__.setdefault("copies", {})
            if client.id in kept:
                self.layout.write(network, kept[client.id])
                self.finetuner(client)
            kept[client.id] = self.layout.read(network)
        return network


class OfTheLastClient(FedPer):
    """A client's model has the head of whoever trained last."""

    def take_own(self, client):
        pass


class TrainsTheHead(FedBABU):
    """The head takes steps in training."""

    def split_network(self):
        super().split_network()
        self.network.requires_grad_(True)


class StatisticsTravel(FedBN):
    """Weights and biases of normalisation stay, their statistics are averaged."""

    def split_network(self):
        super().split_network()
        from fl_lightning.wire import Layout

        statistics = {name for name in self.own.shapes if "running" in name}
        self.layout = Layout.of(
            self.network, include={*self.layout.shapes, *statistics}.__contains__
        )
        self.own = Layout.of(self.network, include=({*self.own.shapes} - statistics).__contains__)
        self.own_start = self.own.read(self.network)


class StartsFromZeros(FedPer):
    """A client that was never counted has a head of zeros."""

    def split_network(self):
        super().split_network()
        self.own_start = torch.zeros_like(self.own_start)


@pytest.mark.parametrize(
    "fault",
    [
        Jointly,
        ZerosForNone,
        KeepsTheCopy,
        OfTheLastClient,
        TrainsTheHead,
        StatisticsTravel,
        StartsFromZeros,
    ],
)
def test_a_golden_file_catches_it(fault, tmp_path):
    assert found_by_a_file(fault, tmp_path)


# LG-FedAvg, which no golden file has: FedPer with the parts exchanged


def test_lgfedavg_averages_heads_and_keeps_bodies(tmp_path):
    """After one round of all clients the server has the mean of the heads that LocalOnly's clients
    have, and the clients have their bodies, for all start from the initial weights."""
    end = fit(LGFedAvg(), tmp_path / "lg", max_rounds=1, participation=1.0)
    alone = fit(LocalOnly(), tmp_path / "alone", max_rounds=1, participation=1.0)
    whole, head, mean = alone.method.layout, end.method.layout, 0.0
    total = sum(len(alone.data.client(id).train) for id in alone.states)
    for id, state in alone.states.items():
        named = whole.unpack(state["weights"])
        body = torch.cat([named[name].reshape(-1) for name in end.method.own.shapes])
        assert torch.equal(end.states[id][OWN], body)
        own = torch.cat([named[name].reshape(-1) for name in head.shapes]).double()
        mean = mean + len(alone.data.client(id).train) / total * own
    assert torch.allclose(end.method.server["weights"].double(), mean, atol=1e-6)


def test_fedrep_leaves_what_the_network_has_frozen(tmp_path):
    start, method = [], FedRep(head_steps=2)

    def frozen(classes):
        network = small_network(classes)
        first = next(network.parameters()).requires_grad_(False)
        start.append(first.clone())
        return network

    method.network_spec, method.optimizer_spec = frozen, sgd(0.05)
    run(method, images(), tmp_path, max_rounds=2, local_epochs=1)
    first = next(method.network.parameters())
    assert torch.equal(first, start[-1])
    assert not first.requires_grad


class OwnModule(LightningModule):
    """The small network, as a module of a user."""

    def __init__(self):
        super().__init__()
        self.network = small_network(4)

    def forward(self, inputs):
        return self.network(inputs)

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05)


def test_fedbabu_with_a_module_runs_twice_and_to_the_same_end(tmp_path):
    method, ends = FedBABU(module=OwnModule()), []
    for name in ("once", "again"):
        run(method, images(), tmp_path / name, max_rounds=2, local_epochs=1)
        ends.append(method.server["weights"])
    assert torch.equal(*ends)


def test_a_rate_of_the_head_that_a_module_would_ignore_is_refused():
    with pytest.raises(
        InputError, match=r"head_lr 0.1 beside --model.module OwnModule; .*; leave head_lr out"
    ):
        FedRep(module=OwnModule(), head_lr=0.1)


def test_overridden_hooks_of_clients_are_called_where_nothing_is_personal_and_no_term_is_set(
    tmp_path,
):
    """They are how a method of one's own adds a loss or keeps something on a client."""
    called: Counter[str] = Counter()

    class Own(FedAvg):
        def with_terms(self, outputs, batch, logits):
            called["with_terms"] += 1
            losses = super().with_terms(outputs, batch, logits)
            return {**losses, "loss": 2 * losses["loss"], "loss_own": losses["loss"]}

    for name in (
        "take_own",
        "remember_received",
        "start_terms",
        "end_terms",
        "keep_own",
        "active_terms",
    ):

        def counted(self, *args, name=name):
            called[name] += 1
            return getattr(super(Own, self), name)(*args)

        setattr(Own, name, counted)
    network = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 4))
    trainer = run(
        Own(network=lambda num_classes: deepcopy(network), optimizer=sgd()), images(), tmp_path
    )
    assert len(called) == 7
    assert trainer.history["train/loss_own"].notna().all()
