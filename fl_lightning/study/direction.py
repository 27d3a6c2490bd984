"""Whether more of a metric is better, by the words in its name; what has none of them cannot be ranked."""

from __future__ import annotations

import re

from fl_lightning.errors import InputError

LOWER = {"loss", "ece", "brier", "nll", "bytes", "megabytes", "std", "rounds", "seconds", "drop", "flops", "bits"}
HIGHER = {"accuracy", "accuracies"}
LOWER_FAMILIES = {"train", "time", "latency", "memory"}
"""``train/*``: losses, unless the name says accuracy."""
HIGHER_FAMILIES = {"corrupted"}
"""``corrupted/fog``: the accuracy under it."""


def direction(metric: str) -> int | None:
    """1: higher is better; -1: lower is; None: not known.

    >>> direction("corrupted/fog"), direction("fgsm/full_gradient_accuracy"), direction("fgsm/loss"), direction("clients/trained")
    (1, 1, -1, None)
    """
    words = set(re.split(r"[/_]", metric))
    family = metric.partition("/")[0]
    if words & LOWER:
        return -1
    if words & HIGHER:
        return 1
    return -1 if family in LOWER_FAMILIES else 1 if family in HIGHER_FAMILIES else None


def higher_is_better(metric: str) -> bool:
    """:func:`direction` of a metric that something is ranked by.

    Raises:
        InputError: it is not known of this one.
    """
    found = direction(metric)
    if found is None:
        higher, lower = (
            f"in names with {', '.join(sorted(words))} and in {', '.join(f'{family}/*' for family in sorted(families))}"
            for words, families in ((HIGHER, HIGHER_FAMILIES), (LOWER, LOWER_FAMILIES))
        )
        raise InputError(
            f"metric {metric}; whether more of it is better is not known, so that nothing can be ranked by it or tested in p(...); "
            f"higher is better {higher}, lower {lower}; "
            "write --metric final/accuracy, or give it such a name"
        )
    return found > 0
