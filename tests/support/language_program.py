"""Runs of adapters on made-up instructions, and of a table: what test_language_exact.py fits, and
the program that it starts, kills, and starts in two processes."""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from budgeted import costs
from laddered import branch_costs
from tiny_language import fit, method_of, records
from toy import sgd

from callbacks import ExpertFigure, LabelNoise
from fl_lightning.data import IID, TableData
from fl_lightning.hooks import Stressor
from fl_lightning.methods import HEST, FedAvg, FedVEMoE, HESTLadder, LocalOnly

LADDER = "HESTLadder"
KINDS = {
    "FedAvg": (FedAvg, False),
    "FFA-LoRA": (FedAvg, True),
    "residual": (partial(FedAvg, adapter_average="residual"), False),
    "alternate": (partial(FedAvg, adapter_average="alternate"), False),
    "LocalOnly": (LocalOnly, False),
    "FedVEMoE": (partial(FedVEMoE, k_init=2, k_max=3, top_m=3), False),
    "HEST": (partial(HEST, costs=costs(), scope="adapter", budget=[0.6, 0.9]), False),
    LADDER: (
        partial(
            HESTLadder,
            costs=branch_costs(1),
            budget=[0.9, 0.8],
            all_on_rounds=1,
            subset_rounds=2,
            levels=1,
        ),
        False,
    ),
}
TABLE = "table"


class Stops(Stressor):
    """Sends this process a signal in the round after ``rounds``; None: it does nothing."""

    rounds: int | None = None
    number = signal.SIGINT

    def change_cohort(self, cohort, *, round, context):
        if self.rounds is not None and round > self.rounds:
            os.kill(os.getpid(), self.number)
        return cohort


def start(
    kind: str, folder: Path, stop_after: int | None = None, number: int = signal.SIGINT, **settings
) -> None:
    """Three rounds, of a ladder four, of a part of the clients with one or two local steps,
    evaluated with generated answers.

    Args:
        kind: one of ``KINDS``, or ``TABLE``.
        folder: holds the runs, and the table.
        stop_after: rounds after which the process gets the signal ``number``.
    """
    torch.set_num_threads(1)
    stops = Stops()
    stops.rounds, stops.number = stop_after, number
    if kind == TABLE:
        data = table(folder)
        method = FedAvg(network="mlp", optimizer=sgd(0.05))
    else:
        cls, ffa = KINDS[kind]
        data, method = records(), method_of(cls, ffa=ffa)
    small = {
        "max_rounds": 4 if kind == LADDER else 3,
        "participation": 0.75,
        "checkpoint_every": 1,
        "local_epochs": 1,
    }
    callbacks = [LabelNoise(round=2, clients=0.5, among="cohort"), stops]
    if isinstance(method, FedVEMoE):
        callbacks.append(ExpertFigure())
    fit(method, folder / "runs", data, **{**small, "callbacks": callbacks, **settings})


def table(folder: Path) -> TableData:
    """Numbers and a category of four hospitals, which are the clients; the class follows from a
    number."""
    random, n = np.random.default_rng(0), 80
    size = random.normal(50, 10, n)
    columns = {
        "size": size,
        "colour": random.choice(["red", "blue"], n),
        "hospital": random.choice(["west", "east", "north", "south"], n),
        "kind": np.where(size > 50, "malignant", "benign"),
    }
    path = folder / "table.csv"
    pd.DataFrame(columns).to_csv(path, index=False)
    return TableData(str(path), target="kind", partition=IID(), num_clients=4, batch_size=8)


if __name__ == "__main__":
    import language_program  # so that classes are those of the module and not of __main__

    folder, what = Path(sys.argv[1]), sys.argv[2]
    for kind in sys.argv[3:]:
        (folder / kind).mkdir(parents=True, exist_ok=True)
        if what == "kill":
            language_program.start(kind, folder / kind, 1, signal.SIGKILL)
        else:
            language_program.start(kind, folder / kind, devices=2, strategy="ddp", rank_timeout=120)
