"""A picture of a ladder: what each level leaves out, what that saves, and what it loses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from callbacks.figures.figure_meter import FigureMeter
from fl_lightning.energy.budgets.ladder import BranchCosts, distinct
from fl_lightning.figures import BLUE, GREY, ORANGE, RED, new_panels
from fl_lightning.hooks import Context

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_NAMED = 24
"""Branches whose names fit below their columns."""
KINDS = {"self_attn": "attention", "mlp": "feed-forward"}


class LadderFigure(FigureMeter):
    """Draws ``figures/ladder`` for ``HESTLadder``.

    Left: a row for each level, the whole network at the top, and a column for each branch; a branch
    that is computed is filled, one that is left out is empty. Right: what a token of an answer
    costs at each level, as a share of the whole network on the first client's device, with the
    budgets as lines, and beside each bar the loss on the clients' validation examples when the
    level was chosen."""

    name = "ladder"
    rule = "it draws the ladder of HESTLadder under a budget"
    instead = "write --model HESTLadder, or leave it out"

    def applies_to(self, context: Context) -> bool:
        return self.name in context.method.shows

    def figure(self, context: Context) -> Figure:
        method = context.method
        ladder = method.server["ladder"]
        levels = distinct(ladder)
        device = method.devices[0]
        shares = BranchCosts.of(device).share(levels).tolist()
        losses = [
            float(method.server["ladder_losses"][(ladder.bool() == level).all(1).nonzero()[0, 0]])
            for level in levels
        ]
        known = losses if any(losses) else []
        return ladder_figure(
            levels.numpy(),
            list(device.table.groups),
            shares,
            known,
            method.budget_shares,
            device.table.label,
        )


def ladder_figure(
    levels: np.ndarray,
    branches: list[str],
    shares: list[float],
    losses: list[float],
    budgets: list[float],
    source: str,
) -> Figure:
    """Draw the two panels.

    Args:
        levels: which branches are computed, bool ``[K + 1, G]``, the whole network first.
        branches: their names, as ``layers.0.self_attn``.
        shares: joules of a token at each level, as a share of the whole network's.
        losses: validation loss of each level in nats a token; empty where it is not known.
        budgets: of the clients, as shares.
        source: where joules come from.
    """
    from matplotlib.patches import Rectangle

    rows, columns = levels.shape
    width = 0.7 if columns <= MOST_NAMED else 0.3
    size, widths = (4 + width * columns, 2.2 + 0.55 * rows), [0.8 * width * columns, 3.2]
    figure, ((left, right),) = new_panels(size, 1, 2, width_ratios=widths, sharey=True)
    for row in range(rows):
        for column in range(columns):
            on = bool(levels[row, column])
            color = (BLUE if column % 2 == 0 else ORANGE) if on else "none"
            place = (column - 0.4, row - 0.36)
            left.add_patch(
                Rectangle(
                    place, 0.8, 0.72, facecolor=color, edgecolor=GREY, linestyle="-" if on else ":"
                )
            )
    parts = [name.split(".") for name in branches]
    if columns <= MOST_NAMED:
        left.set_xticks(
            range(columns), [f"{one[1]} {KINDS[one[2]]}" for one in parts], fontsize=8, rotation=45
        )
        shown = "block and branch"
    else:
        left.set_xticks(np.arange(0, columns, 2) + 0.5, [one[1] for one in parts[::2]], fontsize=8)
        shown = "block: attention blue, feed-forward orange"
    names = [
        "all branches",
        *(f"level {row}: {missing(levels[row], branches)}" for row in range(1, rows)),
    ]
    left.set_yticks(range(rows), names, fontsize=9)
    left.set(xlim=(-0.6, columns - 0.4), ylim=(rows - 0.4, -0.6), xlabel=shown)
    left.set_title("filled: computed; empty: left out")
    right.barh(range(rows), shares, height=0.72, color=GREY, alpha=0.35)
    for row, share in enumerate(shares):
        text = f"{share:.0%}" + (f", loss {losses[row]:.3f}" if losses else "")
        right.text(0.02, row, text, va="center", fontsize=9)
    different = sorted({min(budget, 1.0) for budget in budgets})
    for budget in different:
        right.axvline(budget, color=RED, linestyle="--", linewidth=1.2)
        right.text(budget, -0.58, f"{budget:g}", color=RED, fontsize=8, va="bottom", ha="center")
    right.set_title("budget" if len(different) == 1 else "budgets", color=RED, fontsize=9, pad=14)
    right.set(xlim=(0, 1.08), xlabel=f"energy of a token, share\nof the whole network's\n{source}")
    return figure


def missing(level: np.ndarray, branches: list[str]) -> str:
    """Return what a level leaves out in a few words.

    >>> missing(np.array([True, False]), ["layers.0.self_attn", "layers.0.mlp"])
    'without 0 feed-forward'
    """
    gone = [name.split(".") for name, on in zip(branches, level, strict=True) if not on]
    if len(gone) > 3:
        return f"without {len(gone)} branches"
    return "without " + ", ".join(f"{one[1]} {KINDS[one[2]]}" for one in gone)
