"""Which model of a run the tables of a study hold, and which accuracy is its own."""

from __future__ import annotations

from typing import Literal

Selection = Literal["last5", "best_val", "last"]
"""``last5`` is the last round's model with the mean accuracy of the last five evaluated rounds, ``best_val``
the model of the round that validation chose, and ``last`` the last round's model."""
ACCURACY_METRICS: dict[Selection, str] = {
    "last5": "final/last5_accuracy",
    "best_val": "final/best_val_test_accuracy",
    "last": "final/accuracy",
}
"""The accuracy that each selection stands for."""
SELECTION_OF: dict[str, Selection] = {
    **{metric: selection for selection, metric in ACCURACY_METRICS.items()},
    "final/best_val_accuracy": "best_val",
    "final/best_val_round": "best_val",
}
"""The selection that a metric of one round, or of the last five, is about."""
ACCURACIES: dict[Selection, tuple[str, ...]] = {
    "last5": ("final/last5_accuracy", "final/accuracy"),
    "last": ("final/accuracy", "final/last5_accuracy"),
    "best_val": ("final/best_val_test_accuracy", "final/best_val_round"),
}
"""The accuracy columns of each selection."""
MODELS: dict[Selection, str] = {
    "last5": "the last round's model, with the mean accuracy of the last five rounds",
    "last": "the last round's model",
    "best_val": "the model of the round that validation chose",
}
"""What the tables of each selection are of."""
