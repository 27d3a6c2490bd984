"""Facts that follow from a metric's name: its title, unit and digits in tables and figures, which
direction is better, whether it is a timing."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from math import inf, isfinite
from typing import Any

from fl_lightning.config.near_names import nearest
from fl_lightning.errors import InputError
from fl_lightning.metrics.declared import Metric
from fl_lightning.metrics.names import words_of
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
        short: a heading of a few words for a table on paper; empty: ``title`` is one.
    """

    metric: str
    title: str
    scale: float = 1.0
    digits: int = 3
    unit: str = ""
    short: str = ""

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


@dataclass(frozen=True)
class TaskMetrics:
    """What the runs of a study say of the metrics of their task.

    Args:
        primary: the task's primary metric, such as ``accuracy``.
        higher_is_better: whether more of it is better.
        shares: the task's metrics that lie in [0, 1] and are shown in percent.
        named: the metrics that were named by class path, and whether more of each is better.
        declared: what methods and callbacks declare of the metrics that they add, by name.
    """

    primary: str = "accuracy"
    higher_is_better: bool = True
    shares: frozenset[str] = frozenset({"accuracy"})
    named: Mapping[str, bool] = field(default_factory=dict, hash=False)
    declared: Mapping[str, Metric] = field(default_factory=dict, hash=False)

    @classmethod
    def of_run(cls, metadata: Mapping[str, Any]) -> TaskMetrics:
        """Return what ``metadata.json`` says.

        Where it says nothing of the task, as in runs of release 0.1 and where MLflow has lost the
        file, the name of ``final/last5_*`` tells the primary metric; without one it is the
        accuracy.
        """
        task = metadata.get("task")
        if isinstance(task, Mapping) and isinstance(task.get("primary"), str):
            higher, shares = task.get("higher_is_better") is not False, task.get("shares") or ()
            named = task.get("named")
            named = dict(named) if isinstance(named, Mapping) else {}
            return cls(task["primary"], higher, frozenset(map(str, shares)), named, _declared(task))
        primary = next(
            (found[1] for name in metadata if (found := LAST5.fullmatch(name))), "accuracy"
        )
        return cls() if primary == "accuracy" else cls(primary, direction(primary) != -1, SHARES)

    def is_share(self, metric: str) -> bool:
        """Return whether a metric is a share, or the mean or spread of one, and is shown in
        percent."""
        return measure_of(metric) in SHARES | self.shares

    @property
    def primary_in_words(self) -> str:
        return words_of(self.primary)

    @property
    def title(self) -> str:
        """The primary metric in words, with its unit."""
        return (
            f"{self.primary_in_words} (%)" if self.is_share(self.primary) else self.primary_in_words
        )

    @property
    def has_client_noise(self) -> bool:
        """Whether the primary metric of a client is the share of its examples that are right, so
        that its spread over clients holds the binomial noise of few examples."""
        return self.primary in HITS


def _declared(task: Mapping[str, Any]) -> dict[str, Metric]:
    """Return the declared metrics of a run or report, less those that this package knows by itself
    and what is no declaration, as in a file that was edited."""
    declared, keys, found = task.get("declared"), [one.name for one in fields(Metric)], {}
    for name, entry in declared.items() if isinstance(declared, Mapping) else ():
        if isinstance(entry, Mapping) and not _is_of_the_package(name, task):
            with suppress(InputError, TypeError):
                found[name] = Metric(
                    **{key: entry[key] for key in keys if key in entry} | {"name": name}
                )
    return found


def _is_of_the_package(metric: str, task: Mapping[str, Any]) -> bool:
    """Return whether a metric has a meaning in every run, or in all of this task."""
    measures = {
        task.get("primary"),
        *(task.get("shares") or ()),
        *(task.get("named") or ()),
        *CALIBRATION,
    }
    known = any(one.metric == metric for one in (*KNOWN, *CLOCKS))
    return known or metric.partition("/")[0] in FAMILIES or measure_of(metric) in measures


SHARES = frozenset({"accuracy", "token_accuracy", "exact_match", "rouge_l"})
"""Metrics of the tasks of this package that are shares."""
CALIBRATION = ("loss", "ece", "brier")
FAMILIES = frozenset(
    {"final", "total", "client", "target", "time", "comm", "clients", "clock", "privacy"}
)
"""First parts of names that this package alone gives."""
HITS = frozenset({"accuracy", "exact_match"})
"""Those of them of which an example is right or wrong."""
MEASURES = ("accuracy", "perplexity", "token_accuracy", "exact_match", "rouge_l", "mse", "mae")
"""Metrics that can be the primary one of a task of this package."""
CLASSIFICATION = TaskMetrics()
LAST5 = re.compile(r"final/last5_(?!val_)(\w+)")
FORMS = re.compile(
    r"(?:final/(?:last5_val_|last5_|best_val_test_|best_val_|auc_)?|.*/|)"
    r"(.*?)(?:_std_corrected|_std|_worst_decile_min5|_worst_decile|_slowest_decile)?"
)
"""The forms that a metric of a task has in the rounds, at the end of a run and over clients."""


def measure_of(metric: str) -> str:
    """Return the metric of the task that a metric of a run is a form of.

    >>> names = ("final/last5_val_mse", "val/rouge_l_worst_decile", "corrupted/fog/accuracy", "test/ece")
    >>> tuple(map(measure_of, names))
    ('mse', 'rouge_l', 'accuracy', 'ece')
    """
    found = FORMS.fullmatch(metric)
    assert found is not None, "it matches every text"
    return found[1]


def may_be_of_named(metric: str) -> bool:
    """Return whether a metric can be a form of one that was named by class path and is the primary
    one of its runs; what is near one of :data:`MEASURES` is a misspelling.

    >>> names = ("final/last5_f1_score", "final/r2_score", "final/last5_acuracy", "total/f1_score")
    >>> tuple(map(may_be_of_named, names))
    (True, True, False, False)
    """
    measure = FORMS.fullmatch(metric)[1]  # type: ignore[index]
    others = (*MEASURES, "acc", "los", "round", "time", "upload", "download", "bytes")
    return metric.count("/") == 1 and metric.startswith("final/") and not nearest(measure, others)


def _share(metric: str, title: str, short: str = "") -> Column:
    return Column(metric, f"{title} (%)", 100, 2, " points", short and f"{short} (%)")


def _bytes(metric: str, title: str, digits: int = 3, short: str = "") -> Column:
    return Column(metric, f"{title} (MB)", 1e-6, digits, " MB", short)


def _millijoules(metric: str, title: str) -> Column:
    return Column(metric, f"{title} (mJ)", 1e3, 3, " mJ")


def _of_task(metric: str, title: str, task: TaskMetrics, short: str = "") -> Column:
    digits = 3 if measure_of(metric) == "perplexity" else 4
    if task.is_share(metric):
        return _share(metric, title, short)
    return Column(metric, title, 1, digits, short=short)


def measure_column(measure: str, task: TaskMetrics) -> Column:
    """Return how a metric of the task itself is written, such as ``perplexity`` or ``loss``."""
    if measure == "loss":
        return Column("loss", "loss" if task.primary in ("mse", "mae") else "loss (nats)")
    return _of_task(measure, words_of(measure), task)


def task_columns(task: TaskMetrics = CLASSIFICATION) -> list[Column]:
    """Return the columns of a task's metrics."""
    primary, name = task.primary, task.primary_in_words
    clients, noise = "clients with 5+ validation examples", ", binomial noise included"
    few = "these clients" if task.has_client_noise else clients
    noise = noise if task.has_client_noise else ""
    area = "%" if primary in SHARES | task.shares else name
    titles = {
        f"final/last5_{primary}": f"{name}, last five evaluations",
        f"final/{primary}": f"{name}, last round",
        f"final/best_val_test_{primary}": f"{name}, best-validation round",
        f"personal/{primary}": f"{name} of own models, mean over clients",
        f"global/{primary}": f"{name} of the one model for all",
        f"val/{primary}_std_corrected": f"std over {clients}, noise removed",
        f"val/{primary}_worst_decile_min5": f"worst decile of {few}",
        f"val/{primary}_std": f"std over clients{noise}",
        f"val/{primary}_worst_decile": f"worst decile of clients{noise}",
        f"val/{primary}_slowest_decile": "slowest decile of clients",
        f"val/{primary}": f"{name}, mean over clients",
    }
    short = {
        f"final/last5_{primary}": f"{name}, last five",
        f"val/{primary}_std_corrected": "std over clients",
        f"val/{primary}_worst_decile_min5": "worst decile of clients",
        f"val/{primary}_std": "std over all clients",
        f"val/{primary}_worst_decile": "worst decile of all clients",
    }
    columns = [
        _of_task(metric, title, task, short.get(metric, "")) for metric, title in titles.items()
    ]
    columns.append(Column(f"target/seconds_to_{primary}", "virtual seconds to target", 1, 1, " s"))
    columns.append(
        Column(f"final/auc_{primary}", f"AUC ({area} x rounds)", 1, 0 if area == "%" else 3)
    )
    if primary in ("mse", "mae"):
        columns.append(Column("test/loss", "test loss"))  # not in nats
    return columns


KNOWN = [
    *task_columns(),
    Column("final/best_val_round", "best-validation round", 1, 1),
    Column("test/ece", "ECE (%)", 100, 2, " points"),
    Column("test/loss", "test loss (nats)"),
    Column("test/brier", "Brier score"),
    Column("val/clients_min5", "clients with 5+ validation examples", 1, 0, short="clients"),
    _share("corrupted/accuracy", "corrupted"),
    _share("fgsm/accuracy", "FGSM"),
    _share("pgd/accuracy", "PGD"),
    Column("bits/average", "bits per weight", 1, 2),
    Column("average/factor_error", "factor error (%)", 100, 2, " points"),
    Column("privacy/epsilon", "epsilon", 1, 2),
    _millijoules("energy/joules", "energy of a sequence"),
    _millijoules("energy/joules_model", "energy of a sequence, whole network"),
    _millijoules("energy/joules_high", "energy of a sequence, all layers at high"),
    _millijoules("energy/joules_generated", "energy of prompt and written answer"),
    _millijoules("energy/spent", "energy of a sequence, 0.99 quantile"),
    _millijoules("energy/granted", "budget of a sequence, 0.99 quantile"),
    Column("energy/over_budget", "sequences over budget", 1, 1),
    Column("energy/refused", "sequences refused", 1, 1),
    Column("energy/clamped", "tokens clamped", 1, 1),
    Column("energy/controller_parameters", "parameters of the controller", 1, 0),
    Column("experts/active", "experts", 1, 1),
    Column("router/purity", "purity of clusters", 1, 2),
    Column("target/rounds_to_purity", "round from which purity is 1", 1, 1),
    _bytes("total/total_bytes", "up and down, all rounds", 1, "all rounds (MB)"),
    _bytes("total/upload_bytes", "up, all rounds", 1),
    _bytes("total/download_bytes", "down, all rounds", 1),
    Column("client/upload_bytes", "up per counted upload (kB)", 1e-3, 1, " kB", "up (kB)"),
    Column("client/download_bytes", "down per counted upload (kB)", 1e-3, 1, " kB", "down (kB)"),
    Column("cost/train_flops", "training, all clients of a round (GFLOP)", 1e-9, 2, " GFLOP"),
    _bytes("cost/train_memory", "peak of a local step", 1),
    Column("target/rounds", "rounds to target", 1, 1),
    Column("target/megabytes", "MB to target", 1, 2),
    Column("clock/seconds", "virtual time (s)", 1, 1, " s"),
    Column("clock/round_seconds", "virtual time of the last round (s)", 1, 2, " s"),
    Column("clock/idle", "share of time spent waiting (%)", 100, 1, " points"),
    Column("clients/late", "late clients", 1, 1),
    Column("consensus/distance", "distance from consensus", 1, 4),
    _bytes("comm/bytes_per_peer", "up and down of a peer in a round", 1),
    Column("clients/asked", "clients asked for their loss", 1, 1),
    Column("clients/offline", "clients that went offline", 1, 1),
    _bytes("comm/wasted_download_bytes", "down, to clients that were lost or rejected", 1),
]
CLOCKS = [
    Column("time/round", "round (s)"),
    Column("time/train", "training (s)"),
    Column("time/total", "all rounds (s)", 1, 1),
]
PACKAGE_FAMILIES = FAMILIES | {"train"} | {one.metric.partition("/")[0] for one in KNOWN}
"""First parts of names that this package gives."""
OF_THE_RUN = (
    *("client/upload_bytes", "client/download_bytes", "total/total_bytes"),
    *("clock/seconds", "cost/train_flops", "cost/train_memory", "privacy/epsilon"),
)
"""Headline columns that are not of the selected model, beside the area under the curve: they are of
all rounds, ``cost/train_*`` of the last round until then in which anybody trained."""
OF_EVERY_METHOD = ("method", "seeds")
"""The first columns of a table of methods."""
OF_EXPERTS = ("experts/active", "router/purity", "target/rounds_to_purity")
"""Headline columns of methods that find clusters of clients."""
OF_ENERGY = ("energy/joules", "energy/joules_model", "energy/over_budget", "energy/refused")
"""Headline columns of methods under a budget of energy: the whole network stands beside its
switched layers, and what was refused beside joules, of which it costs none."""


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
    ),
    *("memory", "bits", "perplexity", "mse", "mae", "epsilon", "error", "distance"),
    *("late", "offline", "idle"),
}
"""Words of a name that say that lower is better."""
HIGHER = {
    *("accuracy", "accuracies", "match", "rouge", "purity", "margin"),
    *("f1", "auroc", "precision", "recall", "specificity", "jaccard", "kappa", "r2"),
}
"""Words of a name that say that higher is better."""
LOWER_FAMILIES = {"train", "time", "latency", "memory", "energy", "membership"}
"""First parts of names; ``train/*`` are losses, unless the name says accuracy, and ``membership/*``
is what an attack finds out."""
HIGHER_FAMILIES = {"corrupted"}
"""First parts of names; ``corrupted/fog`` is the accuracy under fog."""


def column(metric: str, task: TaskMetrics = CLASSIFICATION) -> Column:
    """Return how ``metric`` is written, in a study of runs of this task.

    >>> column("corrupted/fog/accuracy").title, column("new/thing").title
    ('corrupted/fog/accuracy (%)', 'new/thing')
    """
    for known in (*task_columns(task), *KNOWN, *CLOCKS):
        if known.metric == metric:
            return known
    if one := task.declared.get(metric):
        return Column(metric, one.title or metric, one.scale, one.digits, one.unit, one.short)
    if metric.endswith("accuracy") or metric.startswith("corrupted/") or task.is_share(metric):
        return _share(metric, metric)
    if metric.startswith(("bits/", "total/bits_")):
        return Column(metric, metric, 1, 2 if metric.startswith("bits/") else 1)
    return _bytes(metric, metric) if metric.endswith("_bytes") else Column(metric, metric, 1, 4)


def headline(
    metric: str,
    selected: Sequence[str],
    measured: Sequence[str],
    task: TaskMetrics = CLASSIFICATION,
) -> list[Column]:
    """Return the columns of the table of results, as far as they were measured.

    Args:
        metric: the primary metric of the study, which comes first.
        selected: the forms of the task's primary metric for the selected model.
        measured: the names of all metrics that there are.
        task: the task of the runs.
    """
    primary = task.primary
    validated = [
        name.removesuffix("_worst_decile") for name in measured if name.endswith("_worst_decile")
    ]
    others = [name.replace("val/", "test/", 1) for name in validated if name != f"val/{primary}"]
    spread = [
        f"val/{primary}_std_corrected",
        *([] if task.has_client_noise else [f"val/{primary}_std"]),
    ]
    of_clients = [*spread, f"val/{primary}_worst_decile_min5", "val/clients_min5"]
    if (slow := f"val/{primary}_slowest_decile") in measured:
        of_clients += [f"val/{primary}", slow]
    of_model = ["corrupted/accuracy", "fgsm/accuracy", "pgd/accuracy", "bits/average", *OF_EXPERTS]
    of_model += ["average/factor_error", *OF_ENERGY]
    of_model += [name for name, one in task.declared.items() if one.title]
    of_task = [
        metric,
        *selected,
        f"final/auc_{primary}",
        f"personal/{primary}",
        f"global/{primary}",
        *others,
    ]
    names = [*of_task, "test/ece", *of_clients, *of_model, *OF_THE_RUN]
    titled = {name: _of_task(name, words_of(measure_of(name)), task) for name in others}
    found = [
        titled.get(name) or column(name, task) for name in dict.fromkeys(names) if name in measured
    ]
    return with_own_titles(found)


def with_own_titles(columns: Sequence[Column]) -> list[Column]:
    """Return the columns of a table of methods with titles that no other column of it has.

    >>> columns = [Column("a", "t"), Column("b", "t"), Column("c", "seeds")]
    >>> [one.title for one in with_own_titles(columns)]
    ['t, a', 't, b', 'seeds, c']
    """
    titles = Counter([*OF_EVERY_METHOD, *(one.title for one in columns)])
    return [
        one if titles[one.title] == 1 else replace(one, title=f"{one.title}, {one.metric}")
        for one in columns
    ]


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


def direction(metric: str, task: TaskMetrics | None = None) -> int | None:
    """Return 1 where higher is better, -1 where lower is, None where it is not known.

    >>> names = ("corrupted/fog", "fgsm/full_gradient_accuracy", "fgsm/loss", "clients/trained")
    >>> tuple(map(direction, names))
    (1, 1, -1, None)
    >>> direction("bits/at/2/rouge_l"), direction("bits/at/2/loss"), direction("bits/average")
    (1, -1, -1)
    """
    if task is not None and metric in task.declared:
        higher = task.declared[metric].higher_is_better
        if higher is not None:
            return 1 if higher else -1
    if is_of_test_set(metric):
        metric = metric.rpartition("/")[2]
    words = set(re.split(r"[/_]", metric))
    family = metric.partition("/")[0]
    if task is not None and measure_of(metric) == task.primary and "std" not in words:
        return 1 if task.higher_is_better else -1
    if task is not None and measure_of(metric) in task.named and "std" not in words:
        return 1 if task.named[measure_of(metric)] else -1
    if words & LOWER:
        return -1
    if words & HIGHER:
        return 1
    return -1 if family in LOWER_FAMILIES else 1 if family in HIGHER_FAMILIES else None


def higher_is_better(metric: str, task: TaskMetrics | None = None) -> bool:
    """Return whether higher is better, for a metric that something is ranked by.

    Raises:
        InputError: it is not known.
    """
    found = direction(metric, task)
    if found is None:
        higher, lower = (
            ", ".join([*sorted(words), *(f"{one}/*" for one in sorted(families))])
            for words, families in ((HIGHER, HIGHER_FAMILIES), (LOWER, LOWER_FAMILIES))
        )
        rule = (
            "a ranking and p(...) need to know whether more of it is better, which the name tells: higher is "
            f"better with {higher}, lower is with {lower}"
        )
        instead = (
            "write --metric final/last5_accuracy, or say it in declared_metrics of the class that adds it "
            "and run again in another study: runs that have ended keep what was said"
        )
        raise InputError(f"metric {metric}", rule, instead)
    return found > 0


def is_timing(metric: str) -> bool:
    """Return whether a metric belongs to the machine: it differs between two equal runs."""
    return metric.startswith(("time/", "latency/", "memory/"))


def is_of_test_set(metric: str) -> bool:
    """Return whether a metric is the test set's although its name begins as that of a count:
    ``bits/at/2/accuracy`` of ``BitBudgets``."""
    return metric.startswith("bits/at/")


def is_exact(metric: str) -> bool:
    """Return whether a metric is counted and not estimated: one seed is enough to decide on it."""
    if is_of_test_set(metric):
        return False
    counted = metric.startswith(("total/", "bits/")) or metric == "privacy/epsilon"
    return counted or (metric.endswith("_bytes") and not is_timing(metric))
