"""What no step changes is there once for a whole stack: the frozen base of adapters, constant
buffers."""

from __future__ import annotations

import logging

import pytest
import torch
from ten import make
from tiny_language import fit, method_of
from torch import nn
from toy import run

from fl_lightning.conformance.toy import images
from fl_lightning.engines.stacked import batched
from fl_lightning.methods import FedAvg, FedNTD, FedProx, LocalOnly


@pytest.fixture
def stacks(monkeypatch):
    """The stacks that were made."""
    made = []

    class Seen(batched.Stack):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(batched, "Stack", Seen)
    return made


@pytest.mark.quick("FedAvg-True", "FedNTD-False")
@pytest.mark.parametrize(
    ("cls", "ffa"),
    [(FedAvg, False), (FedAvg, True), (LocalOnly, False), (FedProx, True), (FedNTD, False)],
)
def test_adapters_share_one_base_and_end_as_one_after_another(cls, ffa, stacks, tmp_path, caplog):
    """Also where each client receives something else (LocalOnly)."""
    ends = {}
    for engine in ("sequential", "batched"):
        trainer = fit(method_of(cls, ffa=ffa), tmp_path / engine, engine=engine)
        kept = [state["weights"] for _, state in sorted(trainer.progress.done.states.items())]
        ends[engine] = torch.stack(kept) if kept else trainer.method.server["weights"]
        assert "one by one" not in caplog.text
    torch.testing.assert_close(ends["batched"], ends["sequential"], rtol=0, atol=2e-5)
    assert len(stacks) == 2
    trained = {
        f"network.{name}"
        for name, p in trainer.method.network.named_parameters()
        if p.requires_grad
    }
    for stack in stacks:
        assert {name for name in stack.tensors if name.startswith("network.")} == trained
        assert all(stack.tensors[name].shape[0] == 4 for name in trained)
        assert len(stack.shared) == sum(
            not p.requires_grad for p in trainer.method.network.parameters()
        )


def test_where_nothing_is_frozen_nothing_is_shared(stacks, tmp_path):
    run(make("QFedAvg"), images(), tmp_path, max_rounds=1, engine="batched", workers=1)
    (stack,) = stacks
    assert stack.shared == {}


class Tables(nn.Module):
    """A linear network with a table that is no part of its state, and a frozen factor.

    Args:
        classes: outputs.
        sets: what it sets in each pass, against the rule: ``nothing``, ``value`` of the factor, or
            ``buffer``.
    """

    def __init__(self, classes: int, sets: str) -> None:
        super().__init__()
        self.sets, self.linear = sets, nn.LazyLinear(classes)
        self.factor = nn.Parameter(torch.full((), 0.5), requires_grad=False)
        self.register_buffer("table", torch.linspace(-1, 1, classes), persistent=False)

    def forward(self, inputs):
        if self.sets == "value":
            self.factor.mul_(0.9)
        if self.sets == "buffer":
            self.table = self.table + 0.1
        return self.factor * self.linear(inputs.flatten(1)) + self.table


@pytest.mark.parametrize("sets", ["nothing", "value", "buffer"])
def test_a_constant_that_is_set_after_all_stops_stacking_and_changes_nothing(
    sets, tmp_path, caplog
):
    """The clients are trained one by one, from what they received."""
    ends = {}
    for engine in ("sequential", "batched"):
        with caplog.at_level(logging.WARNING, "fl_lightning"):
            method = FedAvg(network=lambda classes: Tables(classes, sets))
            trainer = run(
                method, images(), tmp_path / engine, max_rounds=1, engine=engine, workers=1
            )
        ends[engine] = trainer.method.server["weights"]
    assert ("outside of the state_dict" in caplog.text) == (sets != "nothing")
    if sets == "nothing":
        torch.testing.assert_close(ends["batched"], ends["sequential"], rtol=0, atol=2e-5)
    else:
        assert torch.equal(ends["batched"], ends["sequential"])
