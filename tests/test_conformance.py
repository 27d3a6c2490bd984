"""Every method passes the kit, and the kit fails methods that are broken on purpose."""

from __future__ import annotations

import pytest
import torch

from fl_lightning import methods
from fl_lightning.__main__ import main
from fl_lightning.conformance import run_checks, subject_of
from fl_lightning.conformance.checks import Subject
from fl_lightning.methods import FedAvg, FedMPQ, Method

METHODS = [
    name for name in methods.__all__ if isinstance(getattr(methods, name), type) and issubclass(getattr(methods, name), Method)
]


@pytest.mark.parametrize("name", [name for name in METHODS if name != "Method"])
def test_every_method_conforms(name):
    outcomes = list(run_checks(subject_of(getattr(methods, name))))
    assert [f"{o.check}: {o.detail}" for o in outcomes if o.verdict == "failed"] == []
    assert sum(o.verdict == "passed" for o in outcomes) >= 8


class WrongSign(FedAvg):
    def aggregate(self, uploads):
        start = self.server["weights"]
        super().aggregate(uploads)
        self.server["weights"] = 2 * start - self.server["weights"]


class Unweighted(FedAvg):
    def aggregate(self, uploads):
        self.server["weights"] = torch.stack([upload.tensor("weights") for upload in uploads.values()]).mean(0)


class ReadsUnsentState(FedAvg):
    def aggregate(self, uploads):
        super().aggregate(uploads)
        self.server["weights"] = (self.server["weights"] + self.layout.read(self.network)) / 2


class TrainsPadding(FedAvg):
    def local_batches(self, data, client, **order):
        for inputs, target in super().local_batches(data, client, **order):
            pad = data.batch_size - len(target)
            yield torch.cat([inputs, torch.zeros(pad, *inputs.shape[1:])]), torch.cat([target, target.new_zeros(pad)])

    def task_loss(self, outputs, target):
        return super().task_loss(outputs, target)


class KeepsStaleState(FedAvg):
    def receive(self, message, client):
        before = {name: b.clone() for name, b in self.network.named_buffers()}
        super().receive(message, client)
        for name, buffer in self.network.named_buffers():
            buffer.copy_(before[name])


class OvershootsBudget(FedMPQ):
    def _allocate(self, budget):
        bits = super()._allocate(budget)
        return [min(8, bits[0] + 1), *bits[1:]]


@pytest.mark.parametrize(
    ("broken", "checks"),
    [
        (WrongSign, {"known optimum", "agreement", "partial participation"}),
        (Unweighted, {"known optimum", "partial participation"}),
        (ReadsUnsentState, {"server reads uploads only"}),
        (TrainsPadding, {"known optimum", "partial participation"}),
        (KeepsStaleState, {"no stale state"}),
        (OvershootsBudget, {"budget"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_kit_catches(broken, checks):
    known = subject_of(broken.__mro__[1])
    subject = Subject(lambda **settings: broken(**{**known.make.keywords, **settings}), known.least_step, known.noise)
    failed = {outcome.check for outcome in run_checks(subject) if outcome.verdict == "failed"}
    assert checks <= failed


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "from fl_lightning.methods import FedAvg\n\nclass Half(FedAvg):\n    def __init__(self, part=0.5, **settings):\n"
        "        super().__init__(**settings)\n        self.part = part\n\n    def aggregate(self, uploads):\n"
        "        start = self.server['weights']\n        super().aggregate(uploads)\n"
        "        if self.part:\n"
        "            self.server['weights'] = start + (1 - self.part) * (self.server['weights'] - start)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["check", "--model", "mine.Half"]) == 1  # half a step is not a mean
    assert "partial participation" in capsys.readouterr().out
    assert main(["check", "--model", "mine.Half", "--settings", "{part: 0.0}", "--neutral", "{part: 0.0}"]) == 0
    assert list(tmp_path.iterdir()) == [tmp_path / "mine.py"]


@pytest.mark.parametrize("model", ["FedAvgg", "no.such.Method", "torch.nn.Linear"])
def test_no_such_method(model, capsys):
    assert main(["check", "--model", model]) == 2
    assert capsys.readouterr().err.count("\n") == 1
