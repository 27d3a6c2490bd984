"""How metrics are written in words."""

from __future__ import annotations

SPELLINGS = {"rouge_l": "ROUGE-L", "mse": "MSE", "mae": "MAE"}
"""Metrics whose name in words is not their name."""


def words_of(measure: str) -> str:
    """Return a metric of a task in words.

    >>> words_of("rouge_l"), words_of("exact_match")
    ('ROUGE-L', 'exact match')
    """
    return SPELLINGS.get(measure, measure.replace("_", " "))
