"""The conformance kit: what every method must do, run on any method.

python -m fl_lightning check --model FedMPQ
python -m fl_lightning check --model my_methods.MyMethod --settings '{beta: 0.5}' --neutral '{beta: 0}'
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from fl_lightning import methods
from fl_lightning.conformance.checks import CHECKS, NotApplicable, Subject, Violation
from fl_lightning.errors import InputError
from fl_lightning.methods import Method

KNOWN: dict[str, dict[str, Any]] = {
    # One of a weight's two planes is zero and clamped there, so a step on planes is between half of SGD's and all of it.
    "FedMPQ": {"settings": {"bits": 8, "lambda_b": 0.0}, "least_step": 0.5, "noise": 0.1},
    "FedMPQKD": {"settings": {"bits": 8, "lambda_b": 0.0, "alpha": 0.1}, "least_step": 0.5, "noise": 0.1},
    "AQFL": {"settings": {"bits": 8}, "noise": 0.1},
    "QFedAvg": {"settings": {"bits": 8}, "noise": 0.05, "neutral": {"bits": 32}},
    "FedPQ": {"noise": 0.05},
    "FedKD": {"neutral": {"average_weights": True, "distill_epochs": 0, "server_epochs": 0}},
    "FedProx": {"neutral": {"mu": 0.0}},
    "FedNTD": {"settings": {"beta": 0.01}, "noise": 0.05, "neutral": {"beta": 0.0}},
}
"""What is known of the methods that come with the project: the settings the checks run with, and :class:`Subject`'s expectations."""


@dataclass(frozen=True)
class Outcome:
    """Of one check.

    Args:
        detail: what was seen, when it failed; why it does not apply.
    """

    check: str
    rule: str
    verdict: Literal["passed", "failed", "not applicable"]
    detail: str = ""


def run_checks(subject: Subject) -> Iterator[Outcome]:
    """Every check, in order."""
    for check in CHECKS:
        name, rule = check.__name__.replace("_", " "), (check.__doc__ or "").strip()
        with tempfile.TemporaryDirectory() as folder:
            try:
                check(subject, Path(folder))
                yield Outcome(name, rule, "passed")
            except NotApplicable as reason:
                yield Outcome(name, rule, "not applicable", str(reason))
            except Violation as violation:
                yield Outcome(name, rule, "failed", str(violation))
            except Exception as error:  # a method that cannot run breaks the rule too
                yield Outcome(name, rule, "failed", f"{type(error).__name__}: {error}")


def subject_of(
    method: type[Method],
    settings: dict[str, Any] | None = None,
    neutral: dict[str, Any] | None = None,
    noise: float | None = None,
) -> Subject:
    """The method with what is known of it, or with what is given."""
    known = dict(KNOWN.get(method.__name__, {})) if method.__module__.startswith("fl_lightning.") else {}
    subject = Subject(partial(method, **{**known.pop("settings", {}), **(settings or {})}), **known)
    if neutral is not None:
        subject = replace(subject, neutral=neutral)
    return replace(subject, noise=noise) if noise is not None else subject


def check(
    model: str, settings: dict[str, Any] | None = None, neutral: dict[str, Any] | None = None, noise: float | None = None
) -> None:
    """Run the conformance kit on a method and print a table.

    Args:
        model: class name of a method of the project, or the import path of your own.
        settings: its constructor's arguments, as YAML, other than network and optimizer, which the kit sets.
        neutral: settings under which it must equal FedAvg bit for bit, as YAML.
        noise: largest deviation from the known optimum that its rounding may cause.
    """
    subject = subject_of(find_method(model), settings, neutral, noise)
    with _quiet():
        outcomes = list(run_checks(subject))
    Console().print(table(model, outcomes))
    if any(outcome.verdict == "failed" for outcome in outcomes):
        raise SystemExit(1)


@contextmanager
def _quiet() -> Iterator[None]:
    """What toy runs log is expected: clients that diverge are rejected, callbacks never start."""
    log = logging.getLogger("fl_lightning")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)


def find_method(name: str) -> type[Method]:
    """A method by class name or import path.

    Raises:
        InputError: there is none.
    """
    module, _, attribute = name.rpartition(".")
    try:
        found = getattr(import_module(module) if module else methods, attribute)
    except (ImportError, AttributeError) as error:
        near = (get_close_matches(name, methods.__all__, n=1) or ["FedAvg"])[0]
        raise InputError(
            f"--model {name}; no such method ({error}); write --model {near}, or the import path of yours"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise InputError(f"--model {name}; a subclass of fl_lightning.methods.Method is needed; name one, such as FedAvg")
    return found


def table(model: str, outcomes: Sequence[Outcome]) -> Table:
    styles = {"passed": "green", "failed": "bold red", "not applicable": "dim"}
    grid = Table(title=f"{model}: {sum(o.verdict == 'passed' for o in outcomes)} of {len(outcomes)} checks passed")
    for column in ("check", "verdict", "rule, or what was seen"):
        grid.add_column(column)
    for outcome in outcomes:
        grid.add_row(outcome.check, f"[{styles[outcome.verdict]}]{outcome.verdict}[/]", outcome.detail or outcome.rule)
    return grid
