"""Cost tables of residual branches on this device, by measuring whole steps with some of the
branches.

All blocks of a network have one shape, so a step with the attentions alone, one with the
feed-forward layers alone and one without branches say what each costs in its place, in calls as
well as in products: on a CPU a step of one token pays an attention mostly by its calls. A
controller of levels is measured beside them. Steps with all branches are not fitted to, and say how
far the table is from a whole network."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import nn

from fl_lightning import rng
from fl_lightning.energy.calibration.calibrate import DEFAULT_CONTEXT, HELD_OUT, KNOTS, one_thread
from fl_lightning.energy.calibration.fitting import (
    high_quantile,
    measured_cost,
    relative_errors,
    robust_mean,
)
from fl_lightning.energy.calibration.measuring import measure
from fl_lightning.energy.calibration.meters import JouleMeter
from fl_lightning.energy.calibration.samples import Calibration, device_name
from fl_lightning.energy.calibration.steps import steps_of
from fl_lightning.energy.calibration.works import Prefix, prefix_of
from fl_lightning.energy.cost_shapes import CostLine, MeasuredCost
from fl_lightning.energy.costs import CostTable
from fl_lightning.energy.options import BRANCH
from fl_lightning.energy.regret import RegretController
from fl_lightning.energy.switched import merge_adapters
from fl_lightning.energy.switched.attach import is_adapted
from fl_lightning.energy.switched.branches import (
    PARTS,
    BranchBoard,
    BranchPlan,
    branch_names,
    switch_branches,
)
from fl_lightning.energy.switched.kinds import MERGED
from fl_lightning.errors import require
from fl_lightning.support.memory import keep_freed_memory

WHOLE, REST = "all branches", "no branch"
"""Names of the steps that have no branch left out, and none left."""
CONTROLLER = "controller"
"""Name of the work of choosing the levels of tokens by their states."""
MEASURED_LEVELS = 4
"""Levels that it chooses among; their number hardly matters beside the calls."""
NOTHING = MeasuredCost(CostLine(0.0, 0.0), CostLine(0.0, 0.0))


def calibrate_branches(
    network: nn.Module,
    meter: JouleMeter,
    seconds: float = 60.0,
    context: int = DEFAULT_CONTEXT,
    seed: int = 0,
) -> Calibration:
    """Measure what each branch of a network costs, with one CPU thread and its adapters merged.

    A branch that is off costs nothing. ``int8`` is not measured for branches, and has the cost of
    *high*, which no run then takes it for.

    Args:
        network: a Llama of the project's, perhaps with adapters, on the CPU; it is not changed.
        meter: where joules come from.
        seconds: time of the measurement, by the clock on the wall; three passes are done at least.
        context: tokens that a step sees, its own included.
        seed: of the random inputs.

    Raises:
        InputError: the network is of another kind, or a number is not above 0.
    """
    require(
        seconds > 0 and context >= 1,
        f"--seconds {seconds}, --context {context}",
        "both are above 0",
        "write --seconds 60 --context 256",
    )
    plain = copy.deepcopy(network).eval()
    if any(is_adapted(module) for module in plain.modules()):
        plain = merge_adapters(plain)
    board = switch_branches(plain)
    keep_freed_memory()
    with one_thread(), rng.torch_stream(seed, "calibration"), torch.inference_mode():
        samples = measure(_works(plain, board, context), meter, seconds)
    return _calibration(samples, board.branches // len(PARTS), meter.label, context)


def _works(
    network: nn.Module, board: BranchBoard, context: int
) -> dict[tuple[str, int], Callable[[], object]]:
    """Return the steps to measure, by what they have of the branches and by number of tokens."""
    steps, found = steps_of(network), {}
    gates = {
        name: torch.tensor(
            [name == WHOLE or name == PARTS[branch % 2] for branch in range(board.branches)]
        )
        for name in (REST, *PARTS, WHOLE)
    }
    for n in sorted({*KNOTS, *HELD_OUT}):
        prefix = prefix_of(network, n, context)
        for name, gate in gates.items():
            plan = BranchPlan(gate.expand(1, n, -1))
            found[name, n] = _step(steps, board, plan, prefix)
        found[CONTROLLER, n] = _decision(network, n)
    return found


def _decision(network: nn.Module, tokens: int) -> Callable[[], object]:
    """Return what chooses the levels of so many tokens: its predictions and the least of them; what
    a ledger adds is in no table."""
    width: int = network.embed_tokens.embedding_dim  # type: ignore[union-attr, assignment]
    controller, states = RegretController(width, MEASURED_LEVELS), torch.randn(1, tokens, width)
    scores = controller.priced(torch.arange(MEASURED_LEVELS + 1, 0, -1), price=0.1)
    return lambda: scores(states).argmin(-1)


def _step(
    steps: object, board: BranchBoard, plan: BranchPlan, prefix: Prefix
) -> Callable[[], object]:
    def step() -> object:
        with board.using(plan):
            return steps.last_logits(prefix.ids[:, prefix.before :], prefix.cache)  # type: ignore[attr-defined]

    return step


def _calibration(
    samples: Mapping[tuple[str, int], np.ndarray], blocks: int, label: str, context: int
) -> Calibration:
    """Return the table of the samples of :func:`_works`.

    The quantile of a branch is its mean times what the quantiles of the four steps of that many
    tokens are of their means at most: quantiles of parts do not add up, and this charges a whole
    step no less than its own.
    """
    knots = list(KNOTS)
    means = {key: robust_mean(values) for key, values in samples.items()}
    spread = np.array(
        [
            max(
                high_quantile(samples[name, n]) / max(means[name, n], 1e-12)
                for name in (REST, *PARTS, WHOLE)
            )
            for n in knots
        ]
    )
    rest = np.array([means[REST, n] for n in knots])
    costs = {}
    for part in PARTS:
        each = np.array([max(means[part, n] - means[REST, n], 0.0) / blocks for n in knots])
        costs[part] = measured_cost(knots, each, each * spread)
    lost = np.array(  # so that a step with all branches is charged no less than its quantile
        [
            high_quantile(samples[WHOLE, n])
            - blocks * sum(float(costs[part].q99.at(n)) for part in PARTS)
            for n in knots
        ]
    )
    whole_rest = measured_cost(knots, rest, np.maximum(rest * spread, lost))
    groups = {
        name: {"off": NOTHING, "int8": costs[part], "high": costs[part]}
        for name in branch_names(blocks)
        for part in PARTS
        if name.endswith(f".{part}")
    }
    deciding = np.array([means[CONTROLLER, n] for n in knots])
    controller = measured_cost(knots, deciding, deciding * spread)
    name = device_name()
    table = CostTable(
        label, name, BRANCH, context, groups, whole_rest, adapter=MERGED, controller=controller
    )
    held_out = {n: samples[WHOLE, n] for n in (1, *HELD_OUT)}
    errors = {WHOLE: relative_errors({n: table.all_high(n) for n in held_out}, held_out)}
    return Calibration(table, errors, min(map(len, samples.values())))
