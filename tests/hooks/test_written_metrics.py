"""A metric has one writer: nothing replaces what the run or another callback has measured."""

from __future__ import annotations

import pytest
from refusals import refused
from ten import SMALL, make
from toy import run, sgd

from callbacks import ConfusionMatrix, GradientNorms, LossLandscape
from fl_lightning.conformance.toy import images
from fl_lightning.errors import MisuseError
from fl_lightning.hooks import Meter
from fl_lightning.methods import FedAvg


class Writes(Meter):
    """Its metric in two hooks, of which the later one corrects the earlier."""

    def __init__(self, name: str, value: float) -> None:
        self.name, self.value = name, value

    def on_validate(self, values, record, context):
        record.metrics[self.name] = 0.0

    def on_round_end(self, record, context):
        record.metrics |= {self.name: self.value}


class Understates(FedAvg):
    def server_metrics(self):
        return {**super().server_metrics(), "comm/upload_bytes": 1.0}


def fit(folder, *callbacks, method=None):
    method = method or make("FedAvg")
    return run(method, images(), folder, max_rounds=1, callbacks=callbacks).progress.history[0]


@pytest.mark.parametrize(
    "name", ["test/accuracy", "val/accuracy", "comm/upload_bytes", "train/loss", "round"]
)
def test_a_meter_replaces_nothing_of_the_run(name, tmp_path):
    """By the final metrics a run is ranked, and by ``val`` its best round is chosen."""
    with refused(f"the metric {name}", "another name", MisuseError):
        fit(tmp_path, Writes(name, 0.999))


def test_two_meters_of_one_metric_agree(tmp_path):
    with refused("the metric my/own", "another name", MisuseError):
        fit(tmp_path / "two", Writes("my/own", 1.0), Writes("my/own", 2.0))
    row = fit(tmp_path / "one", Writes("my/own", 1.0), Writes("my/other", 2.0))
    assert (row["my/own"], row["my/other"]) == (1.0, 2.0)


def test_gradient_norms_of_other_clients_are_refused_before_a_round(tmp_path):
    with refused("callbacks.GradientNorms", "leave one"):
        fit(tmp_path, GradientNorms(clients=2), GradientNorms(clients=1))
    assert not list(tmp_path.iterdir())
    alike = GradientNorms(clients=1, last_step=True), GradientNorms(every=1, clients=1)
    assert fit(tmp_path, *alike).keys() >= {"gradient/task", "gradient/last_task"}


def test_a_method_replaces_no_bytes(tmp_path):
    with refused("the metric comm/upload_bytes", "another name", MisuseError):
        fit(tmp_path, method=Understates(network=SMALL, optimizer=sgd(0.05)))


class One(ConfusionMatrix):
    """Another class with the name of its base, and so with its file."""


def test_two_figures_of_one_name_are_refused(tmp_path):
    fit(tmp_path, ConfusionMatrix(), ConfusionMatrix(every=1))
    with refused("ConfusionMatrix and One", "another name"):
        fit(tmp_path, ConfusionMatrix(), One())
    with refused("LossLandscape and LossLandscape", "leave one out"):
        fit(tmp_path / "new", LossLandscape(dimensions=1), LossLandscape(dimensions=2))
    assert not (tmp_path / "new").exists()
