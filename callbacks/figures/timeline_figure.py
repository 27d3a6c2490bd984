"""When clients were at work, in virtual time: a Gantt chart of a few rounds, and how stale updates
were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np

from callbacks.figures.drawing import Every, evenly_spaced, sample
from callbacks.figures.figure_meter import FigureMeter
from fl_lightning.config.constraints import at_least
from fl_lightning.figures import BLACK, BLUE, GREY, ORANGE, RED, SKY, legend_outside, new_panels
from fl_lightning.hooks import Context, RoundRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_ROWS = 40
"""Clients that can be told apart in one chart."""
MOST_LABELS = 14
"""Lines of a chart that have the number of their client beside them."""
LOOKS = {
    "trained": ("used", BLUE, ""),
    "lost": ("lost: late, or offline", RED, "////"),
    "rejected": ("rejected", ORANGE, "xxxx"),
    "asked": ("asked for its loss, not taken", SKY, "...."),
    "dropped": ("asked for its loss, then dropped out", SKY, "////"),
    "edge": ("edge server: its sum up, the model down", GREY, ""),
}
"""How the chart shows a client's work, by the status that the ledger gives it: the words in the
legend, the colour of the bar, and its pattern."""

Bar = Sequence[Any]
"""Round, client, status, start and end of its work in virtual seconds."""


class TimelineFigure(FigureMeter):
    """Draws ``figures/timeline``: from when to when each client was at work in the last rounds,
    from the ledger; of asynchronous rounds also how many versions old the updates of the whole run
    were.

    Args:
        every: rounds between figures; 0: only at the end.
        rounds: how many rounds are shown, the last ones.
    """

    name = "timeline"
    rule = "the run has no virtual time"
    instead = "write --trainer.clock.devices LogNormalDevices, or leave it out"
    empty: ClassVar = {"bars": [], "ends": [], "staleness": {}}

    def __init__(self, every: Every = 0, rounds: Annotated[int, at_least(1)] = 5) -> None:
        super().__init__(every)
        self.rounds = rounds

    def applies_to(self, context: Context) -> bool:
        return context.timing is not None

    def on_round_end(self, record: RoundRecord, context: Context) -> None:
        if self.applies:
            fed: Any = context
            first, seen = record.round - self.rounds, self.seen
            bars = [
                [entry.round, entry.client, entry.status, entry.started, entry.ended]
                for entry in fed.ledger.entries
                if entry.ended is not None
            ]
            seen["bars"] = [bar for bar in seen["bars"] if bar[0] > first] + bars
            seen["ends"] = [*seen["ends"][-self.rounds :], record.metrics["clock/seconds"]]
            for versions in context.timing.staleness:
                seen["staleness"][str(versions)] = seen["staleness"].get(str(versions), 0) + 1
        super().on_round_end(record, context)

    def figure(self, context: Context) -> Figure:
        bars, ends = self.seen["bars"], self.seen["ends"]
        rounds = context.timing.rounds
        if not rounds.has_versions:
            return timeline_figure(bars, ends)
        counts = {int(versions): count for versions, count in self.seen["staleness"].items()}
        return timeline_figure(bars, ends, counts, (rounds.concurrency - 1) / rounds.buffer)


def timeline_figure(
    bars: Sequence[Bar],
    ends: Sequence[float],
    staleness: Mapping[int, int] | None = None,
    expected: float = 0.0,
) -> Figure:
    """Above: a line for each client with a bar for each time at work, and a vertical line where a
    round ends. Below, of asynchronous rounds: how many updates were how stale.

    Args:
        bars: times at work, in the order of the rounds.
        ends: virtual seconds at which the round before the first, and each that is shown, ended.
        staleness: updates by the versions between their download and their use; None: there are no
            versions.
        expected: mean staleness without ties, (M - 1) / K.
    """
    if not bars:
        raise ValueError("no client was at work in virtual time")
    both = staleness is not None
    size, heights = (6.8, 6.2 if both else 4.4), [3, 2] if both else [1]
    figure, panels = new_panels(size, len(heights), 1, height_ratios=heights)
    _draw_bars(panels[0, 0], bars, ends, "Versions" if both else "Rounds")
    if staleness is not None:
        _draw_staleness(panels[1, 0], staleness, expected)
    legend_outside(figure)
    return figure


def _draw_bars(axes: Axes, bars: Sequence[Bar], ends: Sequence[float], what: str) -> None:
    workers = sorted({bar[1] for bar in bars})
    edges = [id for id in workers if id < 0]  # servers between clients and the cloud
    clients = [id for id in workers if id >= 0]
    shown = [clients[place] for place in evenly_spaced(len(clients), MOST_ROWS)]
    listed = [*edges[::-1][:MOST_ROWS], *shown]
    rows = {worker: row for row, worker in enumerate(listed)}
    for status, (words, colour, hatch) in LOOKS.items():
        of_one = [bar for bar in bars if bar[2] == status and bar[1] in rows]
        if of_one:
            begins = np.array([bar[3] for bar in of_one])
            widths = np.array([bar[4] for bar in of_one]) - begins
            # rounds in a row stay apart
            face, edge = ("white", colour) if hatch else (colour, "white")
            style: dict[str, Any] = {"facecolor": face, "edgecolor": edge, "hatch": hatch}
            places = [rows[bar[1]] for bar in of_one]
            # who is late is still at work while it is asked anew: what is used stays in sight
            style["zorder"] = 1.0 if status == "lost" else 1.5
            axes.barh(places, widths, 0.7, begins, label=words, linewidth=0.8, **style)
    for number, end in enumerate(ends):
        label = f"a {what.lower()[:-1]} ends" if number == 0 else None
        axes.axvline(end, color=BLACK, linewidth=0.8, linestyle="--", label=label)
    numbers = [bar[0] for bar in bars]
    every = -(-len(listed) // MOST_LABELS)
    axes.set(
        title=f"{what} {min(numbers)} to {max(numbers)}: {sample(len(shown), len(clients))}",
        xlabel="virtual seconds",
        ylabel="client",
        yticks=range(0, len(listed), every),
        yticklabels=[f"edge {-1 - id}" if id < 0 else str(id) for id in listed[::every]],
    )
    axes.margins(x=0.01)
    axes.invert_yaxis()
    axes.grid(False, axis="y")


def _draw_staleness(axes: Axes, staleness: Mapping[int, int], expected: float) -> None:
    from matplotlib.ticker import MaxNLocator

    total = sum(staleness.values())
    mean = sum(versions * count for versions, count in staleness.items()) / max(total, 1)
    axes.bar(
        list(staleness),
        [100 * count / max(total, 1) for count in staleness.values()],
        0.8,
        color=GREY,
    )
    axes.axvline(mean, color=BLUE, linewidth=1.5, label=f"mean {mean:.2f}")
    axes.axvline(
        expected, color=ORANGE, linewidth=1.5, linestyle=":", label=f"(M - 1) / K = {expected:.2f}"
    )
    axes.set(
        title=f"{total} updates of the whole run",
        xlabel="staleness (versions between download and use)",
        ylabel="updates (%)",
    )
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    axes.grid(False, axis="x")
