"""Federations that take turns: whole rounds, synchronised with the device."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter

import torch

from fl_lightning.engines import Engine
from fl_lightning.loop import Federation, run_round

WARM = 2
"""Rounds before the first that counts: libraries choose their kernels in them, and what turns up often is
recorded."""


@dataclass
class Contender:
    """A federation that takes its turn with its engine; seconds and peak bytes of the rounds that count."""

    federation: Federation
    engine: Engine
    done: int = 0
    seconds: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    peak: int = 0

    def turn(self, counts: bool) -> None:
        device = self.federation.fabric.device
        self.done += 1
        before = _start(device)
        started = perf_counter()
        record = run_round(self.federation, self.engine, self.done)
        _wait(device)
        if counts:
            self.seconds.append(perf_counter() - started)
            self.steps.append(sum(_steps(self.federation, self.done)))
            self.peak = max(self.peak, _peak(device) - before)
        assert record.metrics["clients/trained"] > 0

    def result(self) -> dict[str, float]:
        middle = median(self.seconds)
        return {
            "seconds": middle, "rounds": len(self.seconds), "steps_per_second": sum(self.steps) / sum(self.seconds),
            "peak_mib": self.peak / 2**20,
        }  # fmt: skip


def compete(
    contenders: Mapping[str, Callable[[], tuple[Federation, Engine]]], options: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """In turn, until ``--repeats`` rounds of each are timed or the time is up; at least one of each."""
    started, found = perf_counter(), {}
    for name, make in contenders.items():
        found[name] = Contender(*make())
        for _ in range(WARM):
            found[name].turn(counts=False)
    for repeat in range(options.repeats):
        if repeat and perf_counter() - started > options.seconds:
            print(f"  stopped after {repeat} of {options.repeats} repeats: {options.seconds} s are up")
            break
        for contender in found.values():
            contender.turn(counts=True)
    return {name: contender.result() for name, contender in found.items()}


def _steps(fed: Federation, round: int) -> list[int]:
    """Local steps of the clients of a round."""
    ids = [entry.client for entry in fed.ledger.entries if entry.round == round]
    return [fed.data.num_steps(fed.data.client(id), fed.local_epochs) for id in ids]


def _start(device: torch.device) -> int:
    _wait(device)
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
