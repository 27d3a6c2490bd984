"""Which model of a run the tables of a study hold, and which form of the task's primary metric is
its own.

Runs have ``final/last5_accuracy`` where the primary metric of their task is the accuracy, and
``final/last5_perplexity`` where it is the perplexity. A study file is read before there are runs:
there the accuracy stands for the primary metric, whatever it will be.
"""

from __future__ import annotations

import re
from typing import Literal

Selection = Literal["last5", "best_val", "last"]
"""``last5`` is the last round's model with the mean primary metric of the last five evaluated
rounds, ``best_val`` the model of the round that validation chose, and ``last`` the last round's
model."""
FORMS: dict[Selection, str] = {
    "last5": "final/last5_{}",
    "best_val": "final/best_val_test_{}",
    "last": "final/{}",
}
"""The form of the primary metric that each selection stands for."""
ACCURACY = "accuracy"
"""The primary metric of studies whose runs are not known."""


def selected_metric(selection: Selection, primary: str = ACCURACY) -> str:
    """Return the metric that a selection stands for.

    >>> selected_metric("last5"), selected_metric("best_val", "perplexity")
    ('final/last5_accuracy', 'final/best_val_test_perplexity')
    """
    return FORMS[selection].format(primary)


def selected_metrics(selection: Selection, primary: str = ACCURACY) -> tuple[str, ...]:
    """Return the columns of a table that are about the selected model alone."""
    if selection == "best_val":
        return selected_metric("best_val", primary), "final/best_val_round"
    other: Selection = "last" if selection == "last5" else "last5"
    return selected_metric(selection, primary), selected_metric(other, primary)


def selection_of(metric: str) -> Selection | None:
    """Return the selection that a metric of one round, or of the last five, is about.

    >>> names = ("final/mse", "final/last5_mse", "final/best_val_mse", "final/auc_mse", "test/ece")
    >>> [selection_of(name) for name in names]
    ['last', 'last5', 'best_val', None, None]
    """
    if not metric.startswith("final/") or re.match("final/(last5_val|auc)_", metric):
        return None
    if metric.startswith("final/best_val_"):
        return "best_val"
    return "last5" if metric.startswith("final/last5_") else "last"


def for_primary(metric: str, selection: Selection, primary: str) -> str:
    """Return the metric of a study file for runs with this primary metric.

    The accuracy that the selection stands for, which a file without a ``metric`` has, becomes the
    primary metric; others stay.
    """
    return selected_metric(selection, primary) if metric == selected_metric(selection) else metric


def described(selection: Selection, primary: str = ACCURACY) -> str:
    """Return what the tables of a selection are of, in words.

    Args:
        selection: the study's.
        primary: the primary metric in words.
    """
    return {
        "last5": f"the last round's model, with the mean {primary} of the last five evaluations",
        "last": "the last round's model",
        "best_val": "the model of the round that validation chose",
    }[selection]
