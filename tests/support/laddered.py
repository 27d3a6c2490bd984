"""Small networks of branches, their costs by hand, and methods that have been built with them."""

from __future__ import annotations

import csv
from functools import partial

import torch
from tiny_language import adam, set_up

from fl_lightning.energy import CostLine, CostTable, MeasuredCost
from fl_lightning.energy.options import BRANCH
from fl_lightning.energy.switched.branches import branch_names
from fl_lightning.methods import HESTLadder
from fl_lightning.models.adapters import add_adapter
from fl_lightning.models.language import Llama


def branch_costs(blocks: int = 2, q99: float = 1.5) -> CostTable:
    """Return costs of a + b n millijoules: attention 3 + n, feed-forward 1 + 1.5 n, everything else
    1 + 0.2 n; in a step of one token 4, 2.5 and 1.2; a decision of the controller 0.1. The 0.99
    quantile is so many times the mean."""

    def measured(a: float, b: float) -> MeasuredCost:
        return MeasuredCost(CostLine(1e-3 * a, 1e-3 * b), CostLine(1e-3 * q99 * a, 1e-3 * q99 * b))

    on = {"self_attn": measured(3, 1), "mlp": measured(1, 1.5)}
    groups = {}
    for name in branch_names(blocks):
        cost = on[name.rpartition(".")[2]]
        groups[name] = {"off": measured(0, 0), "int8": cost, "high": cost}
    label = "modelled: CPU seconds x 15 W"
    return CostTable(
        label,
        "by hand",
        BRANCH,
        64,
        groups,
        measured(1, 0.2),
        adapter="merged",
        controller=measured(0.1, 0),
    )


def two_blocks(vocab_size: int, blocks: int = 2, rank: int = 2) -> Llama:
    """Two blocks of 16 features, with adapters unless ``rank`` is 0."""
    network = Llama(vocab_size, width=16, depth=blocks, heads=2)
    network.client_ranks = []
    return add_adapter(network, "lora", rank=rank) if rank else network


def ladder_of(**settings) -> HESTLadder:
    """A ladder of two levels: a round all on, three of subsets, then the ladder."""
    small = {
        "all_on_rounds": 1,
        "subset_rounds": 3,
        "levels": 2,
        "budget": 0.6,
        "costs": branch_costs(),
    }
    given = {**small, "network": two_blocks, "optimizer": adam(), **settings}
    return HESTLadder(**given)


def built_ladder(data=None, round: int = 5, **settings):
    """A method that has been built, in a round, and its data."""
    return set_up(ladder_of(**settings), data, round)


def rows_of(trainer) -> list[dict[str, float]]:
    """The numbers that a run has logged, round by round."""
    with (trainer.run_dir / "metrics.csv").open() as file:
        return [{name: float(v) for name, v in row.items() if v} for row in csv.DictReader(file)]


def ledger_of(trainer) -> str:
    """The bytes that a run has sent, as its file has them."""
    return (trainer.run_dir / "ledger.csv").read_text()


def some(data, count: int = 6):
    """Inputs and targets of the first test examples."""
    index = torch.arange(count)
    return data.inputs("test", index), data.test_target[index]


def with_ladder(method, rows):
    """The method with a ladder that has been found."""
    method.server["ladder"] = torch.tensor(rows, dtype=torch.uint8)
    return method


def disturbed(method, size: float = 0.5):
    """The method with weights that are not those of the start."""
    draws = torch.Generator().manual_seed(0)
    weights = method.server["weights"]
    method.server["weights"] = weights + size * torch.randn(weights.shape, generator=draws)
    return method


LEVELS = [[1, 1, 1, 1], [1, 1, 0, 1], [1, 0, 0, 1]]


three_blocks = partial(two_blocks, blocks=3)
