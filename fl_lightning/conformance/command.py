"""``python -m fl_lightning check``."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fl_lightning import methods
from fl_lightning.conformance.kit import Outcome, run_checks
from fl_lightning.conformance.subject import subject_of
from fl_lightning.errors import InputError
from fl_lightning.methods import Method


def check(
    model: str,
    settings: dict[str, Any] | None = None,
    neutral: dict[str, Any] | None = None,
    noise: float | None = None,
) -> None:
    """Run the conformance kit on a method and print a table.

    Args:
        model: class name of a method of the project, or the import path of your own.
        settings: its constructor's arguments, as YAML, other than network and optimizer, which the kit sets.
        neutral: settings under which it must equal FedAvg bit for bit, as YAML.
        noise: largest deviation from the known optimum that its rounding may cause.
    """
    subject = subject_of(find_method(model), settings, neutral, noise)
    for given, name in ((settings, "settings"), (neutral, "neutral")):
        try:
            subject.make(**(given or {}))
        except (TypeError, ValueError) as error:
            raise InputError(
                f"--{name} {given}",
                f"{model} cannot be made with them ({error})",
                "write the arguments of its constructor as YAML",
            ) from error
    outcomes = list(run_checks(subject))
    Console().print(table(model, outcomes))
    if any(outcome.verdict == "failed" for outcome in outcomes):
        raise SystemExit(1)


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
            f"--model {name}",
            f"no such method ({error})",
            f"write --model {near}, or the import path of yours",
        ) from error
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise InputError(
            f"--model {name}",
            "a subclass of fl_lightning.methods.Method is needed",
            "name one, such as FedAvg",
        )
    return found


def table(model: str, outcomes: Sequence[Outcome]) -> Table:
    """One row a check; what was seen stands in place of the rule, a figure below it."""
    styles = {
        "passed": ("green", "passed"),
        "failed": ("bold red", "FAILED"),
        "not applicable": ("dim", "n/a"),
    }
    count = {verdict: sum(outcome.verdict == verdict for outcome in outcomes) for verdict in styles}
    title = (
        f"{model}: {count['passed']} passed, {count['failed']} failed, {count['not applicable']} not "
        "applicable"
    )
    grid = Table(title=title)
    grid.add_column("check", no_wrap=True)
    grid.add_column("verdict", no_wrap=True)
    grid.add_column("rule, or what was seen")
    for outcome in outcomes:
        style, word = styles[outcome.verdict]
        seen = [outcome.rule, outcome.detail] if outcome.verdict == "passed" else [outcome.detail]
        grid.add_row(outcome.check, f"[{style}]{word}[/]", escape("\n".join(filter(None, seen))))
    return grid
