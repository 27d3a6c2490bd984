"""Parts of a user's own: what they return is checked where it comes in, and what they are given is
theirs to change."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from clocked import Fixed
from lightning.pytorch import LightningModule
from refusals import refused
from ten import SMALL
from torch import nn
from torch.nn.functional import cross_entropy
from torchmetrics.classification import MulticlassAccuracy
from toy import run, sgd

from callbacks import StragglerDropout
from fl_lightning.aggregation.averages import NormClipping, WeightedMean
from fl_lightning.clock import Availability, Clock, Diurnal, FedBuff, SameDevice
from fl_lightning.clock.staleness import Staleness
from fl_lightning.conformance.toy import images
from fl_lightning.data import Partition
from fl_lightning.errors import MisuseError
from fl_lightning.hooks import Meter, Stressor
from fl_lightning.methods import FedAvg
from fl_lightning.sampling import Sampler, Uniform
from fl_lightning.topology import Gossip
from fl_lightning.topology.graphs import Exponential, Graph


def fit(folder, *, method=None, max_rounds=2, **settings):
    settings = {"participation": 0.5, **settings}
    method = method or FedAvg(network=SMALL, optimizer=sgd(0.05))
    return run(method, images(), folder, max_rounds=max_rounds, **settings)


def weights(trainer) -> str:
    return json.loads((trainer.run_dir / "metadata.json").read_text())["weights_sha256"]


class Draws(Sampler):
    def __init__(self, make):
        self.make = make

    def draw(self, view, among, count):
        return self.make(view, among, count)


@pytest.mark.parametrize(
    "make",
    [
        lambda view, among, count: among.tolist(),
        lambda view, among, count: [int(among[0])] * 2,
        lambda view, among, count: among < 3,
        lambda view, among, count: [0.0, 1.0],
        lambda view, among, count: [999],
        lambda view, among, count: None,
        lambda view, among, count: [[0], [1, 2]],
        lambda view, among, count: {0, 1},
    ],
    ids=["too many", "twice", "mask", "floats", "unknown", "nothing", "ragged", "set"],
)
def test_a_sampler_returns_ids_of_those_who_can_be_reached(make, tmp_path):
    with refused("Draws.draw, which returned", "take them from among", MisuseError):
        fit(tmp_path, sampler=Draws(make))


def test_what_a_sampler_does_with_the_ids_leaves_the_federation_as_it_is(tmp_path):
    def spoils(view, among, count):
        chosen = Uniform().draw(view, among, count)
        among[:] = among[0]
        return chosen

    assert weights(fit(tmp_path / "a", sampler=Draws(spoils))) == weights(fit(tmp_path / "b"))


def test_a_partition_changes_no_target():
    class Sorts(Partition):
        def __call__(self, labels, num_clients, seed):
            parts = np.array_split(np.argsort(labels, kind="stable"), num_clients)
            labels.sort()
            return [np.sort(part) for part in parts]

    data = images()
    data.partition = Sorts()
    data.setup()
    before = data.train_target.clone()
    data.distribute(0, "cpu")
    assert torch.equal(data.train_target, before)


class Median(WeightedMean):
    def __call__(self, vectors, shares, start):
        return torch.stack([*vectors]).median(0).values


class Mixed:
    def __call__(self, vectors, shares, start):
        return Median()(vectors, shares, start)


class Both(Mixed, WeightedMean):
    pass


class Never(NormClipping):
    def __call__(self, vectors, shares, start):
        raise ArithmeticError("called")


def test_a_rule_of_its_own_is_called_though_it_is_derived_from_a_sum(tmp_path):
    for rule in (Median(), Both()):
        averaged = FedAvg(network=SMALL, optimizer=sgd(0.05), average=rule)
        assert weights(fit(tmp_path / "a", method=averaged)) != weights(fit(tmp_path / "b"))
    with pytest.raises(ArithmeticError, match="called"):
        fit(tmp_path / "c", method=FedAvg(network=SMALL, optimizer=sgd(0.05), average=Never(1.0)))


@pytest.mark.parametrize(
    "result",
    [None, torch.zeros(()), torch.zeros(3), torch.tensor(float("nan"))],
    ids=["nothing", "number", "short", "not a number"],
)
def test_an_average_is_a_vector_of_the_models_length(result, tmp_path):
    class Gives(WeightedMean):
        def __call__(self, vectors, shares, start):
            spread = result is not None and bool(result.isnan().any())
            return result.expand(start.shape) if spread else result

    with refused("Gives, which gave", "return one", MisuseError):
        fit(tmp_path, method=FedAvg(network=SMALL, optimizer=sgd(0.05), average=Gives()))


class OneWay(Graph):
    def mixing(self, peers, seed, round):
        return Exponential().mixing(peers, seed, round)


class Says(OneWay):
    symmetric = False


class Half(Graph):
    def mixing(self, peers, seed, round):
        return {i: {i: Fraction(1, 2)} for i in range(peers)}


class Floats(Graph):
    def mixing(self, peers, seed, round):
        return {i: {i: 1.0} for i in range(peers)}


def test_a_graph_is_symmetric_as_it_says_and_its_rows_add_up_to_one(tmp_path):
    def gossip(graph):
        method = FedAvg(network=SMALL, optimizer=sgd(0.05), weigh_by="clients")
        return fit(tmp_path / type(graph).__name__, method=method, topology=Gossip(graph))

    with refused("OneWay.mixing", "symmetric = False in OneWay", MisuseError):
        gossip(OneWay())
    for graph in (Half(), Floats()):
        with refused(type(graph).__name__ + ".mixing", "Fraction", MisuseError):
            gossip(graph)
    assert weights(gossip(Says())) == weights(gossip(Exponential()))


@pytest.mark.parametrize("weight", [-1.0, 0.0, 2.0, float("nan"), 0.5, None])
def test_an_update_that_is_not_stale_weighs_one_and_none_more(weight, tmp_path):
    class Own(Staleness):
        def weight(self, versions):
            return weight

    rounds = FedBuff(concurrency=4, buffer=2, staleness=Own())
    with refused("Own.weight(", "return such a number", MisuseError):
        fit(
            tmp_path,
            rounds=rounds,
            clock=Clock(devices=Fixed(1.0, 3.0)),
            participation=1.0,
            max_rounds=4,
        )


class Comes(Availability):
    def __init__(self, make):
        self.make = make

    def spans(self, seed, clients, at):
        return self.make(clients * 0.0, at)


SPANS = {
    "ends before it starts": lambda zero, at: (zero + at + 9, zero + at + 3),
    "over": lambda zero, at: (zero - 2, zero - 1),
    "no number": lambda zero, at: (zero + np.nan, zero + np.inf),
    "short": lambda zero, at: (zero[:1], zero[:1] + np.inf),
    "lists": lambda zero, at: (zero.tolist(), (zero + np.inf).tolist()),
    "pairs": lambda zero, at: [(0.0, np.inf) for _ in zero],
    "nothing": lambda zero, at: None,
    "integers": lambda zero, at: (zero.astype(int), zero.astype(int) + 10**6),
    "tomorrow": lambda zero, at: (zero + at + 1, zero + at + 2),
}


@pytest.mark.parametrize("name", SPANS)
def test_an_availability_returns_spans_that_are_still_to_end(name, tmp_path):
    clock = Clock(devices=SameDevice(0.01), availability=Comes(SPANS[name]))
    with refused("Comes.spans(at=", "", MisuseError):
        fit(tmp_path, clock=clock)


class Labels(Stressor):
    def __init__(self, make):
        self.make = make

    def change_labels(self, labels, *, client, round, context):
        return self.make(labels)


LABELS = {
    "floats": lambda labels: labels.float(),
    "above": lambda labels: labels + 1,
    "ignored": lambda labels: labels.zero_().sub_(100),
    "short": lambda labels: labels[:2],
    "a column": lambda labels: labels[:, None],
    "int32": lambda labels: labels.int(),
    "shares of no number": lambda labels: torch.full((len(labels), 4), torch.nan),
}


@pytest.mark.parametrize("name", LABELS)
def test_labels_are_those_of_the_clients_examples(name, tmp_path):
    with refused("Labels.change_labels, which returned", "like the one given", MisuseError):
        fit(tmp_path, callbacks=[Labels(LABELS[name])])


class Cohort(Stressor):
    def __init__(self, make):
        self.make = make

    def change_cohort(self, cohort, *, round, context):
        return self.make(cohort)


@pytest.mark.parametrize(
    "make",
    [
        lambda cohort: cohort + cohort,
        lambda cohort: [one.client.id for one in cohort],
        lambda cohort: [replace(one, work=0.0) for one in cohort],
        lambda cohort: [replace(one, work=2.0) for one in cohort],
        lambda cohort: [
            replace(cohort[0], client=replace(cohort[0].client, id=5 - cohort[-1].client.id))
        ],
    ],
    ids=["twice", "ids", "no work", "more work", "another"],
)
def test_a_cohort_is_a_list_of_clients_with_one_assignment_each(make, tmp_path):
    with refused("change_cohort of a stressor", "", MisuseError):
        fit(tmp_path, callbacks=[Cohort(make)])


def test_who_stays_away_may_have_no_work(tmp_path):
    absent = Cohort(lambda cohort: [replace(cohort[0], work=0.0, trains=False), *cohort[1:]])
    assert fit(tmp_path, callbacks=[absent]).progress.history[0]["clients/dropped"] == 1


@pytest.mark.parametrize(
    ("hook", "value"),
    [
        ("change_cohort", iter(())),
        ("change_labels", [0, 1]),
        ("change_upload", {}),
        ("change_uploads", []),
        ("change_bytes", "text"),
    ],
)
def test_a_hook_of_a_stressor_returns_a_value_of_its_kind(hook, value, tmp_path):
    wrong = type("Wrong", (Stressor,), {hook: lambda self, given, **details: value})
    with pytest.raises(TypeError, match=f"Wrong.{hook} returned {type(value).__name__}; "):
        fit(tmp_path, callbacks=[wrong()])


def test_a_state_that_is_no_json_is_named(tmp_path):
    class Remembers(Meter):
        def state_dict(self):
            return {"seen": torch.zeros(2)}

    with refused("Remembers.state_dict", "as lists", MisuseError):
        fit(tmp_path, callbacks=[Remembers()])


@pytest.mark.parametrize("state", [{1: 2}, {"seen": [({"a": 1, None: 2}, 3)]}])
def test_a_key_that_would_come_back_as_a_text_is_named(state, tmp_path):
    remembers = type("Remembers", (Meter,), {"state_dict": lambda self: state})
    with refused("Remembers.state_dict", "keys as texts", MisuseError):
        fit(tmp_path, callbacks=[remembers()])


class Meddles(Meter):
    def on_cohort(self, cohort, round, context):
        cohort.clear()

    def on_client_start(self, client, message, labels, round, context):
        labels.zero_()


def test_a_meter_changes_no_training(tmp_path):
    meddled = fit(tmp_path / "a", callbacks=[Meddles()])
    assert weights(meddled) == weights(fit(tmp_path / "b"))


def test_a_meter_replaces_nothing_of_the_summary(tmp_path):
    class Praises(Meter):
        def on_fit_end(self, summary, context):
            summary["final/accuracy"] = 1.0

    with refused("the metric final/accuracy", "another name", MisuseError):
        fit(tmp_path, callbacks=[Praises()])


@pytest.mark.parametrize(
    ("name", "value"),
    [("sampler", Uniform), ("clock", Clock), ("rounds", FedBuff), ("callbacks", [Meter])],
)
def test_a_class_in_the_place_of_its_object_is_refused(name, value, tmp_path):
    with refused(f"{name}=", "(...)"):
        fit(tmp_path, **{name: value})
    with refused("average=WeightedMean", "average=WeightedMean(...)"):
        FedAvg(network=SMALL, average=WeightedMean)
    with refused("graph=Exponential", "graph=Exponential(...)"):
        Gossip(Exponential)
    with refused("devices=SameDevice", "devices=SameDevice(...)"):
        Clock(devices=SameDevice)


class Momentum(WeightedMean):
    def __init__(self):
        self.before = {"weights": torch.zeros(1, dtype=torch.bfloat16)}

    def __call__(self, vectors, shares, start):
        mean = torch.stack([*vectors]).mean(0)
        self.before = {"weights": mean.bfloat16()}
        return mean


class Counts(Uniform):
    def __init__(self):
        self.drawn = 0

    def draw(self, view, among, count):
        self.drawn += count
        return super().draw(view, among, count)


class Keeps(Counts):
    def state_dict(self):
        return {"drawn": self.drawn}

    def load_state_dict(self, state):
        self.drawn = state["drawn"]


def test_state_that_no_checkpoint_has_is_said_once(tmp_path):
    method = FedAvg(network=SMALL, optimizer=sgd(0.05), average=Momentum())
    for sampler, names in (
        (Counts(), {"Momentum.before", "Counts.drawn"}),
        (Keeps(), {"Momentum.before"}),
    ):
        trainer = fit(
            tmp_path / type(sampler).__name__, method=method, sampler=sampler, max_rounds=3
        )
        lines = (trainer.run_dir / "run.log").read_text().splitlines()
        told = [line for line in lines if "is in no checkpoint" in line]
        assert len(told) == len(names)
        assert all(any(name in line for line in told) for name in names)


class Forgetful(StragglerDropout):
    def __init__(self):
        super().__init__(0.1)
        self.seen = 0

    def on_round_start(self, round, fed):
        self.seen += round


class Decaying(LightningModule):
    """Its rate and what of it is trained change in its steps; its features are those of a step."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(images().example_inputs()[0].numel(), 4), nn.Linear(4, 4)
        self.rate, self.right = 0.1, MulticlassAccuracy(4)

    def forward(self, x):
        self.features = self.first(x.flatten(1))
        return self.last(self.features)

    def training_step(self, batch, batch_idx):
        self.rate *= 0.9
        self.right(self(batch[0]), batch[1])
        self.first.requires_grad_(False)
        return cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.rate)


@pytest.mark.parametrize("workers", [1, 2])
def test_state_of_callbacks_and_modules_that_no_checkpoint_has_is_said(workers, tmp_path):
    method, callbacks = FedAvg(module=Decaying()), [Forgetful()]
    trainer = fit(tmp_path, method=method, callbacks=callbacks, workers=workers)
    lines = (trainer.run_dir / "run.log").read_text()
    told = re.findall(r"(\S+) has changed in a (?:step|round)", lines)
    flags = ["Decaying.first.bias.requires_grad", "Decaying.first.weight.requires_grad"]
    assert told == [*flags, "Decaying.rate", "Forgetful.seen"]


def test_what_the_project_remembers_is_no_state(tmp_path):
    clock = Clock(devices=SameDevice(), availability=Diurnal())
    trainer = fit(tmp_path, clock=clock, participation=1.0)
    assert "is in no checkpoint" not in (trainer.run_dir / "run.log").read_text()


def test_a_round_with_fewer_uploads_than_an_average_needs_changes_nothing(tmp_path):
    class OfTwo(WeightedMean):
        fewest = 2

        def __call__(self, vectors, shares, start):
            first, second = vectors
            return (first + second) / 2

    class Alone(Stressor):
        def change_cohort(self, cohort, *, round, context):
            return cohort[:1] if round == 1 else cohort[:2]

    method = FedAvg(network=SMALL, optimizer=sgd(0.05), average=OfTwo())
    trainer = fit(tmp_path, method=method, callbacks=[Alone()])
    assert (
        "1 uploads are too few for OfTwo, which needs 2"
        in (trainer.run_dir / "run.log").read_text()
    )
    assert [row["clients/trained"] for row in trainer.progress.history] == [0, 2]
