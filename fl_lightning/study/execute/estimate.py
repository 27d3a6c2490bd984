"""How long the rest of a study will take, estimated from the rounds that runs of the same method
recorded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fl_lightning.study.execute.cells import CellState, StudyCells
from fl_lightning.support.terminal import clock

START_SECONDS = 10.0
"""Seconds of imports and set-up of a run."""


@dataclass(frozen=True)
class RoundCost:
    """The cost of one round.

    Args:
        seconds: its wall-clock time.
        bytes: its bytes over the wire, up and down.
        source: the cell that it was measured in.
    """

    seconds: float
    bytes: float
    source: str


Rounds = Mapping[str, Sequence[Mapping[str, float]]]
"""The rounds that each cell has recorded so far, by its name."""


def find_cost(cells: StudyCells, state: CellState, known: Rounds) -> RoundCost | None:
    """Return the mean cost of a round in a cell of the same method: of the same levels if there is
    one, and of these the longest.

    The first round warms up and does not count, unless it is alone. None: no such cell has a round.
    """
    same_method = [other for other in cells if other.cell.method == state.cell.method]
    same_levels = [other for other in same_method if other.cell.levels == state.cell.levels]
    for others in (same_levels, same_method):
        measured = [(known[other.cell.name], other.cell.name) for other in others]
        rows, name = max(measured, key=lambda one: len(one[0]))
        if rows:
            counted = rows[1:] or rows
            sums = [
                sum(row.get(key, 0.0) for row in counted)
                for key in ("time/round", "comm/total_bytes")
            ]
            return RoundCost(sums[0] / len(counted), sums[1] / len(counted), name)
    return None


@dataclass(frozen=True)
class RemainingCost:
    """The cost of the cells that are left.

    Args:
        seconds: the time of their work, one cell after another.
        bytes: their bytes over the wire.
        unknown: the names of the methods whose cost is not known.
    """

    seconds: float
    bytes: float
    unknown: list[str]


def remaining_cost(
    states: Iterable[CellState], costs: dict[str, RoundCost | None], known: Rounds
) -> RemainingCost:
    """Add up the rounds that are left, and the start of each process.

    Args:
        states: all cells of a study.
        costs: the cost of a round by the name of the cell.
        known: the rounds that are recorded.
    """
    seconds, size, unknown = 0.0, 0.0, dict[str, None]()
    for state in states:
        if state.status == "finished":
            continue
        cost, left = costs[state.cell.name], state.rounds - len(known[state.cell.name])
        if cost is None:
            unknown[state.cell.method] = None
            continue
        seconds += START_SECONDS + left * cost.seconds
        size += left * cost.bytes
    return RemainingCost(seconds, size, list(unknown))


def show_plan(cells: StudyCells, jobs: int, console: Console | None = None) -> None:
    """Print every cell with its state and cost, and the sum of what is left.

    Args:
        cells: the cells of the study.
        jobs: the number of cells that run at a time.
        console: where to print; default: standard output.
    """
    console = console or Console(highlight=False, soft_wrap=True)
    known = {state.cell.name: state.metrics() for state in cells}
    costs = {state.cell.name: find_cost(cells, state, known) for state in cells}
    table = Table("cell", "state", "rounds", "minutes", "MB", "known from")
    for state in cells:
        cost, figures = costs[state.cell.name], ["unknown", "unknown", ""]
        if cost:
            minutes, megabytes = state.rounds * cost.seconds / 60, state.rounds * cost.bytes / 1e6
            figures = [f"{minutes:.1f}", f"{megabytes:.1f}", cost.source]
        row = [state.cell.name, state.status, f"{len(known[state.cell.name])}/{state.rounds}"]
        table.add_row(*map(Text, (*row, *figures)))
    console.print(table)
    for line in cells.problems():
        console.print(line, markup=False)
    rest, count = remaining_cost(cells, costs, known), len(cells.states)
    about = (
        f"about {clock(rest.seconds / jobs)} (h:mm:ss) with --jobs {jobs} and "
        f"{rest.bytes / 1e6:.1f} MB over the wire"
    )
    if rest.unknown:  # what is known of the others is a lower bound, and of nothing it is no bound
        about = (
            f"more than {about.removeprefix('about ')}"
            if rest.seconds
            else "time and bytes unknown"
        )
    left = [state for state in cells if state.status != "finished"]
    rounds = sum(state.rounds - len(known[state.cell.name]) for state in left)
    part = "" if cells.shard.is_whole else f", shard {cells.shard}"
    console.print(
        f"{cells.study.name}{part}: {count} cells, {len(left)} to run, {rounds} rounds: {about}",
        markup=False,
    )
    if rest.unknown:
        console.print(
            f"not counted: {', '.join(rest.unknown)}. An estimate is made from rounds that have run: leave "
            "--dry_run out, stop it with Ctrl-C after a round of each, and ask again; what is done counts",
            markup=False,
        )
