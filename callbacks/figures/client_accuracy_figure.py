"""How evenly clients are served: the distribution of their validation accuracies."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from callbacks.figures.drawing import sample
from callbacks.figures.figure_meter import FigureMeter
from fl_lightning.figures import BLACK, BLUE, RED, legend_outside, new_panels
from fl_lightning.hooks import Context, RoundRecord
from fl_lightning.metrics.names import words_of
from fl_lightning.tasks import Classification, Task

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLASSIFICATION = Classification()


class ClientAccuracyFigure(FigureMeter):
    """Draws ``figures/client_accuracy``: how many clients have which accuracy on their own
    validation examples, the worst decile marked."""

    name = "client_accuracy"
    rule = "no client has validation examples"
    instead = "write --data.val_fraction 0.05, or leave it out"
    empty: ClassVar = {"round": 0, "ids": [], "accuracies": []}

    def applies_to(self, context: Context) -> bool:
        return len(context.data.validating) > 0

    def on_check(self, context: Context) -> None:
        super().on_check(context)
        self.name = f"client_{context.data.task.primary}"  # type: ignore[misc]

    def on_validate(self, values: dict[int, float], record: RoundRecord, context: Context) -> None:
        self.seen = {
            "round": record.round,
            "ids": list(values),
            "accuracies": list(values.values()),
        }

    def on_round_end(self, record: RoundRecord, context: Context) -> None:
        if self.seen["round"] == record.round:
            super().on_round_end(record, context)

    def figure(self, context: Context) -> Figure:
        held = [len(context.data.client(id).val) for id in self.seen["ids"]]
        values, round = np.array(self.seen["accuracies"]), self.seen["round"]
        return client_accuracy_figure(values, np.array(held), round, context.data.task)


def client_accuracy_figure(
    values: np.ndarray, held: np.ndarray, round: int, task: Task = CLASSIFICATION
) -> Figure:
    """Left: clients by the task's primary metric. Right: share of clients with at most that value.
    Every client counts the same.

    Args:
        values: of each client ``[K]``.
        held: validation examples of each client ``[K]``; of one example an accuracy is 0 or 1.
            Clients without a finite value are left out, and counted in the title.
        task: names the metric.
    """
    from matplotlib.ticker import MaxNLocator

    asked, primary = len(values), task.primary
    if not asked:
        raise ValueError("no client has been validated")
    finite = np.isfinite(values)
    values, held, K = values[finite], held[finite], int(finite.sum())
    if not K:
        raise ValueError(f"none of {asked} clients has a finite {words_of(primary)}")
    name, title, is_share = words_of(primary), task.title(primary), primary in task.shares
    shown = task.scale(primary) * np.sort(values)
    worst = -(-K // 10) if K > 1 else 0
    is_worst = np.arange(K) < worst if task.higher_is_better else np.arange(K) >= K - worst
    figure, ((left, right),) = new_panels((9.6, 4.2), 1, 2)
    low, high = (0.0, 100.0) if is_share else (shown[0], max(shown[-1], shown[0] + 1e-9))
    left.hist(
        [shown[is_worst], shown[~is_worst]],
        np.linspace(low, high, 11),
        stacked=True,
        color=[RED, BLUE],
        edgecolor="white",
        label=[f"worst decile: {worst} of {K} clients", "other clients"] if worst else None,
    )
    bins = ", bins of 10 points" if is_share else ""
    left.yaxis.set_major_locator(MaxNLocator(integer=True))
    left.set(xlabel=f"validation {title}{bins}", ylabel="clients", xlim=(low, high))
    share = 100 * np.arange(1, K + 1) / K
    right.step(
        [low, *shown, high], [0, *share, 100], where="post", color=BLUE, linewidth=1.5, zorder=3
    )
    shade = (0, 100 * worst / K) if task.higher_is_better else (100 - 100 * worst / K, 100)
    scale = task.scale(primary)
    mean, std = shown.mean(), shown.std()
    spread = f"{std:.1f}" if is_share else f"{std:.3g}"
    right.axvline(
        mean,
        color=BLACK,
        linestyle="--",
        linewidth=1,
        label=f"mean {task.shown(primary, mean / scale)}, standard deviation {spread}",
    )
    if worst:
        of_worst = shown[is_worst].mean()
        right.axhspan(*shade, color=RED, alpha=0.25, linewidth=0)
        right.axvline(
            of_worst,
            color=RED,
            linestyle=":",
            linewidth=2,
            label=f"mean of the worst decile {task.shown(primary, of_worst / scale)}",
        )
    margin = 0.01 * (high - low)
    right.set(
        xlabel=f"validation {title}",
        ylabel=f"clients with at most that {name} (%)",
        xlim=(low - margin, high + margin),
        ylim=(0, 101),
    )
    few = f"{held.min()} validation examples each"
    if held.min() < held.max():
        few = f"{held.min()} to {held.max()} validation examples each, median {np.median(held):.0f}"
    few += f"; {asked - K} without a finite value left out" if asked > K else ""
    figure.suptitle(
        f"{name[0].upper()}{name[1:]} of {sample(K, K)} on their own examples, round {round} ({few})",
        fontsize="medium",
    )
    legend_outside(figure, columns=2)
    return figure
