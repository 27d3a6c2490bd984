"""How evenly clients are served: the distribution of their validation accuracies."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from callbacks.figures.figure_meter import FigureMeter
from fl_lightning.figures import BLACK, BLUE, RED, legend_outside, open_frame
from fl_lightning.hooks import Context, RoundRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class ClientAccuracyFigure(FigureMeter):
    """Draws ``figures/client_accuracy``: how many clients have which accuracy on their own validation
    examples, the worst decile marked."""

    name = "client_accuracy"
    rule = "--data.val_fraction is 0 and no client has validation examples"
    instead = "write --data.val_fraction 0.05, or leave it out"
    empty: ClassVar = {"round": 0, "ids": [], "accuracies": []}

    def applies_to(self, context: Context) -> bool:
        return context.data.val_fraction > 0

    def on_validate(self, accuracies: dict[int, float], record: RoundRecord, context: Context) -> None:
        values = list(accuracies.values())
        self.seen = {"round": record.round, "ids": list(accuracies), "accuracies": values}

    def on_round_end(self, record: RoundRecord, context: Context) -> None:
        if self.seen["round"] == record.round:
            super().on_round_end(record, context)

    def figure(self, context: Context) -> Figure:
        held = [len(context.data.client(id).val) for id in self.seen["ids"]]
        return client_accuracy_figure(np.array(self.seen["accuracies"]), np.array(held), self.seen["round"])


def client_accuracy_figure(accuracies: np.ndarray, held: np.ndarray, round: int) -> Figure:
    """Left: clients by accuracy. Right: share of clients with at most that accuracy. Every client counts the
    same.

    Args:
        accuracies: in [0, 1], of each client ``[K]``.
        held: validation examples of each client ``[K]``; of one example an accuracy is 0 or 1.
    """
    from matplotlib.figure import Figure

    K = len(accuracies)
    if not K:
        raise ValueError("no client has been validated")
    percent = 100 * np.sort(accuracies)
    worst = -(-K // 10)
    figure = Figure(figsize=(9.6, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    open_frame(left, right)
    edges = np.linspace(0, 100, 11)
    left.hist(
        [percent[:worst], percent[worst:]], edges, stacked=True, color=[RED, BLUE], edgecolor="white",
        label=[f"worst decile: {worst} of {K} clients", "other clients"],
    )  # fmt: skip
    left.set(xlabel="validation accuracy (%), bins of 10 points", ylabel="clients", xlim=(0, 100))
    share = 100 * np.arange(1, K + 1) / K
    right.step([0, *percent, 100], [0, *share, 100], where="post", color=BLUE, linewidth=1.5, zorder=3)
    right.axhspan(0, 100 * worst / K, color=RED, alpha=0.25, linewidth=0)
    mean, low = percent.mean(), percent[:worst].mean()
    right.axvline(
        mean,
        color=BLACK,
        linestyle="--",
        linewidth=1,
        label=f"mean {mean:.1f} %, standard deviation {percent.std():.1f}",
    )
    right.axvline(low, color=RED, linestyle=":", linewidth=2, label=f"mean of the worst decile {low:.1f} %")
    right.set(
        xlabel="validation accuracy (%)",
        ylabel="clients with at most that accuracy (%)",
        xlim=(-1, 101),
        ylim=(0, 101),
    )
    few = f"{held.min()} to {held.max()} validation examples each, median {np.median(held):.0f}"
    figure.suptitle(
        f"Accuracy of {K} clients on their own examples, round {round} ({few})", fontsize="medium"
    )
    legend_outside(figure, columns=2)
    return figure
