"""A search file: which settings ``tune`` may choose, and what it maximises.

study: exp2_embedded             # folder and experiment of the tuned run; trials: <study>-tune
config: kd_default.yaml          # one `fit` configuration or a list, layered; paths are relative to the file
settings: {trainer.max_rounds: 30}   # optional: of every trial and of the final run
final: {trainer.max_rounds: 100} # optional: settings of the final run alone
space:                           # dotted setting -> range, or list of choices
  model.alpha: {low: 0.0, high: 1.0}
  model.optimizer.init_args.lr: {low: 1.0e-3, high: 1.0e-1, log: true}
  trainer.local_epochs: {low: 1, high: 5}
  model.temperature: [1.0, 2.0, 4.0]
trials: 20
metric: final/best_val_accuracy  # of validation or training, never of the test set
direction: maximize
seed: 0                          # of every run and of the search
prune: false                     # end trials early that are below the median of those before, round by round
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, Literal

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import TPESampler

from fl_lightning.rng import stream
from fl_lightning.study.spec.plan import as_arguments
from fl_lightning.study.spec.yaml_checks import Checks, read_mapping

KEYS = ("study", "config", "settings", "final", "space", "trials", "metric", "direction", "seed", "prune")
METRIC = "final/best_val_accuracy"


@dataclass(frozen=True)
class Range:
    """Numbers from ``low`` to ``high``, both included; integers if both are.

    Args:
        low, high: its ends.
        log: whether to draw evenly on a logarithmic scale.
    """

    low: float
    high: float
    log: bool = False

    @property
    def is_whole(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)


@dataclass(frozen=True)
class Search:
    """What a search file says; :meth:`read` it.

    Args:
        study: the study that the tuned run belongs to.
        path: the file.
        configs: ``fit`` configurations, layered.
        settings: dotted settings of every run.
        final: those of the final run alone.
        space: dotted setting -> what it may be.
        trials: how many, those that fail or are pruned among them.
        metric: what is compared.
        direction: ``maximize`` or ``minimize``.
        seed: of every run, and of the search.
        prune: whether trials may be ended early.
    """

    study: str
    path: Path
    configs: tuple[Path, ...]
    settings: Mapping[str, Any]
    final: Mapping[str, Any]
    space: Mapping[str, Range | list[Any]]
    trials: int
    metric: str = METRIC
    direction: Literal["maximize", "minimize"] = "maximize"
    seed: int = 0
    prune: bool = False

    @classmethod
    def read(cls, path: str | Path) -> Search:
        """The search in a YAML file.

        Raises:
            InputError: it cannot be read, or something in it is wrong; the message names the file and the
                key.
        """
        path = Path(path)
        return _search(Checks(path), read_mapping(path, "search file", "study: my_study"))

    @property
    def name(self) -> str:
        """Of the folder and the experiment of the trials."""
        return f"{self.study}-tune"

    def args(self, chosen: Mapping[str, Any], *, final: bool = False) -> list[str]:
        """Arguments of ``fit`` with these values of the space."""
        settings = {**self.settings, **(self.final if final else {}), **chosen}
        return as_arguments(self.configs, settings, self.seed)

    def corners(self) -> list[dict[str, Any]]:
        """Each end of each range and each choice at least once, the other settings at their first value."""
        values = {
            key: [allowed.low, allowed.high] if isinstance(allowed, Range) else allowed
            for key, allowed in self.space.items()
        }
        first = {key: allowed[0] for key, allowed in values.items()}
        others = [first | {key: value} for key, allowed in values.items() for value in allowed[1:]]
        return [first, *others]

    def distributions(self) -> dict[str, BaseDistribution]:
        """The space in Optuna's words."""
        return {name: _distribution(allowed) for name, allowed in self.space.items()}

    def sampler(self, number: int) -> TPESampler:
        """Of trial ``number``."""
        return TPESampler(seed=int(stream(self.seed, "tune", number).integers(2**32)))


def _distribution(allowed: Range | list[Any]) -> BaseDistribution:
    if not isinstance(allowed, Range):
        return CategoricalDistribution(allowed)
    if allowed.is_whole:
        return IntDistribution(int(allowed.low), int(allowed.high), log=allowed.log)
    return FloatDistribution(allowed.low, allowed.high, log=allowed.log)


def _search(check: Checks, document: Mapping[str, Any]) -> Search:
    check.keys(document, KEYS, needed=("study", "space", "trials"))
    direction = check.one_of(document.get("direction", "maximize"), ("maximize", "minimize"), "direction")
    space = check.mapping(document["space"], "space")
    for key in space:
        check.setting(key, "space")
    metric = check.text(document.get("metric", METRIC), "metric", METRIC)
    allowed = metric == METRIC or metric.startswith(("val/", "train/", "comm/", "bits/"))
    check.require(
        allowed,
        f"metric: {metric}",
        "the test set must not choose settings",
        f"write metric: {METRIC}, or one of val/*",
    )
    prune = document.get("prune", False)
    check.require(isinstance(prune, bool), f"prune: {prune!r}", "it is true or false", "write prune: false")
    return Search(
        study=check.plain(document["study"], "study"),
        path=check.path,
        configs=check.configs(document.get("config"), "config"),
        settings=check.settings(document.get("settings"), "settings"),
        final=check.settings(document.get("final"), "final"),
        space={key: _allowed(check, value, f"space.{key}") for key, value in space.items()},
        trials=check.whole(document["trials"], "trials", 1),
        metric=metric,
        direction="maximize" if direction == "maximize" else "minimize",
        seed=check.whole(document.get("seed", 0), "seed", 0),
        prune=prune,
    )


def _allowed(check: Checks, value: Any, where: str) -> Range | list[Any]:
    if isinstance(value, list):
        plain = value and all(isinstance(item, (bool, int, float, str, type(None))) for item in value)
        check.require(
            plain,
            f"{where}: {value!r}",
            "choices are numbers, strings, true, false or null",
            f"write {where}: [0.1, 0.2]",
        )
        return value
    example = f"write {where}: {{low: 0.1, high: 1.0}}, or a list of choices"
    check.require(isinstance(value, Mapping), f"{where}: {value!r}", "it is a range or a list", example)
    check.keys(value, ("low", "high", "log"), f"{where}.", needed=("low", "high"))
    low, high, log = value["low"], value["high"], value.get("log", False)
    numbers = all(isinstance(end, (int, float)) and not isinstance(end, bool) for end in (low, high))
    check.require(
        numbers,
        f"{where}: {low!r} to {high!r}",
        "the ends are numbers (YAML takes 1e-3 for a string: write 1.0e-3)",
        example,
    )
    finite = low > -inf and high < inf
    check.require(finite, f"{where}: {low} to {high}", "the ends are finite numbers", example)
    check.require(low < high, f"{where}: {low} to {high}", "low is less than high", example)
    check.require(isinstance(log, bool), f"{where}.log: {log!r}", "it is true or false", "write log: true")
    check.require(
        not log or low > 0, f"{where}: {low} to {high}", "a logarithmic range is above 0", "raise low"
    )
    return Range(low, high, log)
