"""Facts that follow from a metric's name: its title, unit and digits in tables and figures, which direction
is better, whether it is a timing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite

from fl_lightning.errors import InputError
from fl_lightning.study.statistics import mean_std


@dataclass(frozen=True)
class Column:
    """The column of a metric in a table.

    Args:
        metric: the name of the metric.
        title: the heading, with the unit.
        scale: the factor from values of the metric to those of the table.
        digits: the digits after the point.
        unit: the unit of a difference.
    """

    metric: str
    title: str
    scale: float = 1.0
    digits: int = 3
    unit: str = ""

    def number(self, value: float, sign: bool = False) -> str:
        """Write one value."""
        if not isfinite(value):
            return "-"
        text = f"{value * self.scale:{'+' if sign else ''}.{self.digits}f}"
        return text.replace("-", "−") if sign else text

    def mean(self, values: Sequence[float]) -> str:
        """Write mean and standard deviation over seeds.

        >>> Column("a", "a").mean([1.0, 2.0]), Column("a", "a").mean([1.0]), Column("a", "a").mean([])
        ('1.500 ± 0.707', '1.000', '-')
        """
        mean, std = mean_std(values)
        return self.number(mean) + (f" ± {self.number(std)}" if isfinite(std) else "")


def _accuracy(metric: str, title: str) -> Column:
    return Column(metric, f"{title} (%)", 100, 2, " points")


def _bytes(metric: str, title: str, digits: int = 3) -> Column:
    return Column(metric, f"{title} (MB)", 1e-6, digits, " MB")


KNOWN = [
    _accuracy("final/last5_accuracy", "accuracy, last five rounds"),
    _accuracy("final/accuracy", "accuracy, last round"),
    _accuracy("final/best_val_test_accuracy", "accuracy, best-validation round"),
    Column("final/best_val_round", "best-validation round", 1, 1),
    Column("final/auc_accuracy", "AUC (% x rounds)", 1, 0),
    Column("test/ece", "ECE (%)", 100, 2, " points"),
    Column("test/loss", "test loss (nats)"),
    Column("test/brier", "Brier score"),
    _accuracy("val/accuracy_std_corrected", "std over clients with 5+ validation examples, noise removed"),
    _accuracy("val/accuracy_worst_decile_min5", "worst decile of these clients"),
    Column("val/clients_min5", "clients with 5+ validation examples", 1, 0),
    _accuracy("val/accuracy_std", "std over clients, binomial noise included"),
    _accuracy("val/accuracy_worst_decile", "worst decile of clients, binomial noise included"),
    _accuracy("corrupted/accuracy", "corrupted"),
    _accuracy("fgsm/accuracy", "FGSM"),
    _accuracy("pgd/accuracy", "PGD"),
    Column("bits/average", "bits per weight", 1, 2),
    _bytes("total/total_bytes", "up and down, all rounds", 1),
    _bytes("total/upload_bytes", "up, all rounds", 1),
    _bytes("total/download_bytes", "down, all rounds", 1),
    Column("client/upload_bytes", "up per client and round (kB)", 1e-3, 1, " kB"),
    Column("client/download_bytes", "down per client and round (kB)", 1e-3, 1, " kB"),
    Column("cost/train_flops", "training, all clients of a round (GFLOP)", 1e-9, 2, " GFLOP"),
    _bytes("cost/train_memory", "peak of a local step", 1),
    Column("target/rounds", "rounds to target", 1, 1),
    Column("target/megabytes", "MB to target", 1, 2),
]
CLOCKS = [
    Column("time/round", "round (s)"),
    Column("time/train", "training (s)"),
    Column("time/total", "all rounds (s)", 1, 1),
]
OF_THE_RUN = (
    "final/auc_accuracy",
    "client/upload_bytes",
    "client/download_bytes",
    "total/total_bytes",
    "cost/train_flops",
    "cost/train_memory",
)
"""Headline columns that are of all rounds, whichever model is selected."""
OF_THE_MODEL = (
    "test/ece",
    "val/accuracy_std_corrected",
    "val/accuracy_worst_decile_min5",
    "val/clients_min5",
    "corrupted/accuracy",
    "fgsm/accuracy",
    "pgd/accuracy",
    "bits/average",
)
"""Headline columns that are of the selected model."""


LOWER = {
    *(
        "loss",
        "ece",
        "brier",
        "nll",
        "bytes",
        "megabytes",
        "std",
        "rounds",
        "seconds",
        "drop",
        "flops",
        "memory",
        "bits",
    ),
}
"""Words of a name that say that lower is better."""
HIGHER = {"accuracy", "accuracies"}
"""Words of a name that say that higher is better."""
LOWER_FAMILIES = {"train", "time", "latency", "memory"}
"""First parts of names; ``train/*`` are losses, unless the name says accuracy."""
HIGHER_FAMILIES = {"corrupted"}
"""First parts of names; ``corrupted/fog`` is the accuracy under fog."""


def column(metric: str) -> Column:
    """Return how ``metric`` is written.

    >>> column("corrupted/fog/accuracy").title, column("new/thing").title
    ('corrupted/fog/accuracy (%)', 'new/thing')
    """
    for known in (*KNOWN, *CLOCKS):
        if known.metric == metric:
            return known
    if metric.endswith("accuracy") or metric.startswith("corrupted/"):
        return _accuracy(metric, metric)
    if metric.startswith(("bits/", "total/bits_")):
        return Column(metric, metric, 1, 2 if metric.startswith("bits/") else 1)
    return _bytes(metric, metric) if metric.endswith("_bytes") else Column(metric, metric, 1, 4)


def headline(primary: str, accuracies: Sequence[str], measured: Sequence[str]) -> list[Column]:
    """Return the columns of the table of results, as far as they were measured.

    Args:
        primary: the primary metric, which comes first.
        accuracies: the accuracies of the selected model.
        measured: the names of all metrics that there are.
    """
    names = dict.fromkeys([primary, *accuracies, OF_THE_RUN[0], *OF_THE_MODEL, *OF_THE_RUN[1:]])
    return [column(name) for name in names if name in measured]


def p_value(p: float) -> str:
    """Write a p-value with three digits.

    >>> p_value(0.0412), p_value(0.00001), p_value(float("nan"))
    ('0.041', '< 0.001', '-')
    """
    if not isfinite(p):
        return "-"
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def seeds(count: float) -> str:
    """Write how many seeds are needed.

    >>> seeds(12), seeds(float("inf")), seeds(float("nan"))
    ('12', '> 10000', '-')
    """
    return "> 10000" if count == inf else f"{count:.0f}" if isfinite(count) else "-"


def plain(value: float) -> str:
    """Write a number without a unit, with four digits.

    >>> plain(12345678.0), plain(0.95123), plain(float("nan"))
    ('12345678', '0.9512', '-')
    """
    if not isfinite(value):
        return "-"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def direction(metric: str) -> int | None:
    """Return 1 where higher is better, -1 where lower is, None where it is not known.

    >>> names = ("corrupted/fog", "fgsm/full_gradient_accuracy", "fgsm/loss", "clients/trained")
    >>> tuple(map(direction, names))
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
    """Return whether higher is better, for a metric that something is ranked by.

    Raises:
        InputError: it is not known.
    """
    found = direction(metric)
    if found is None:
        higher, lower = (
            ", ".join([*sorted(words), *(f"{one}/*" for one in sorted(families))])
            for words, families in ((HIGHER, HIGHER_FAMILIES), (LOWER, LOWER_FAMILIES))
        )
        rule = (
            "a ranking and p(...) need to know whether more of it is better, which the name tells: higher is "
            f"better with {higher}, lower is with {lower}"
        )
        instead = "write --metric final/last5_accuracy, or give it such a name"
        raise InputError(f"metric {metric}", rule, instead)
    return found > 0


def is_timing(metric: str) -> bool:
    """Return whether a metric belongs to the machine: it differs between two equal runs."""
    return metric.startswith(("time/", "latency/", "memory/"))


def is_exact(metric: str) -> bool:
    """Return whether a metric is counted and not estimated: one seed is enough to decide on it."""
    return metric.startswith(("total/", "bits/")) or (metric.endswith("_bytes") and not is_timing(metric))
