"""The command ``python -m fl_lightning check``: run the conformance kit and print its table."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fl_lightning import methods
from fl_lightning.compatibility import why_not
from fl_lightning.config.near_names import nearest_or_list
from fl_lightning.conformance.kit import CheckResult, run_checks
from fl_lightning.conformance.known_methods import MethodUnderTest, method_under_test
from fl_lightning.errors import InputError, MisuseError, error_reason, require
from fl_lightning.methods import Method, Term
from fl_lightning.support.user_code import is_bug_of_user


def check(
    model: str,
    settings: dict[str, Any] | None = None,
    neutral: dict[str, Any] | None = None,
    noise: float | None = None,
) -> None:
    """Run the conformance kit on a method and print a table.

    Args:
        model: class name of a method of the project, or the import path of your own.
        settings: its constructor's arguments, as YAML, other than network and optimizer, which the
            kit sets.
        neutral: settings under which it must equal FedAvg bit for bit, as YAML.
        noise: largest deviation from the known optimum that its rounding may cause.

    Raises:
        InputError: there is no such method, its clients do not train, it learns neither images nor
            text, its constructor refuses the settings, or they are the kit's.
        SystemExit: a check failed; the exit code is 1.
    """
    require(
        noise is None or noise >= 0,
        f"--noise {noise}",
        "a deviation is 0 or more",
        "write --noise 0.01",
    )
    for name, given in (("settings", settings), ("neutral", neutral)):
        theirs = [one for one in ("network", "optimizer") if one in (given or {})]
        require(
            not theirs,
            f"--{name} with {' and '.join(theirs)}",
            "the kit sets network and optimizer, to know the path that a method has to take",
            "leave them out",
        )
    given_settings = made_terms(settings)
    given_neutral = made_terms(neutral)
    kind = find_method(model)
    require(
        not kind.pools_examples,
        f"--model {model}",
        "its server trains by itself, and the kit checks what clients train and send",
        "name a method whose clients train, such as FedAvg",
    )
    why = why_not(kind, "classification")
    require(
        not why or not why_not(kind, "language"),
        f"--model {model}",
        f"the kit has images and text, and the method refuses both: {why}",
        "try it out on its own data, with fit --trainer.fast_dev_run 2",
    )
    subject = method_under_test(kind, given_settings, given_neutral, noise)
    for given, made, name in (
        (settings, given_settings, "settings"),
        (neutral, given_neutral, "neutral"),
    ):
        shown = f"no --{name}" if given is None else f"--{name} {given}"
        _require_made(subject, made or {}, shown, model)
    results = list(run_checks(subject))
    Console().print(results_table(model, results))
    if any(result.verdict == "failed" for result in results):
        raise SystemExit(1)


def _require_made(
    subject: MethodUnderTest, settings: dict[str, Any], shown: str, model: str
) -> None:
    """Refuse settings with which the method cannot be made; a bug of its constructor stays what it
    raised."""
    try:
        subject.make(**settings)
    except (InputError, MisuseError):
        raise
    except (TypeError, ValueError) as error:
        # a constructor hands on what it does not know, and that call is then the one that fails
        unknown = any(f"argument {name!r}" in str(error) for name in settings)
        if is_bug_of_user(error) and not unknown:
            raise
        rule = f"{model} cannot be made with them ({error_reason(error)})"
        raise InputError(shown, rule, "write the arguments of its constructor as YAML") from error


def find_method(name: str) -> type[Method]:
    """Return the class of a method, given its name in the project or its import path.

    Raises:
        InputError: there is no such class, or it is no subclass of :class:`Method`.
    """
    module, _, attribute = name.rpartition(".")
    try:
        found = getattr(import_module(module) if module else methods, attribute)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        if is_bug_of_user(error):
            raise
        known = [each for each in methods.__all__ if _is_method(getattr(methods, each))]
        raise InputError(
            f"--model {name}",
            f"no such method ({error})",
            f"write --model {nearest_or_list(name, known)}, or the import path of yours",
        ) from error
    if not _is_method(found):
        raise InputError(
            f"--model {name}",
            "a subclass of fl_lightning.methods.Method is needed",
            "name one, such as FedAvg",
        )
    return found


def _is_method(found: object) -> bool:
    return isinstance(found, type) and issubclass(found, Method) and found is not Method


def made_terms(settings: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the settings with the loss terms that ``terms`` names, as in a configuration.

    Raises:
        InputError: there is no such term, or it refuses its arguments.
    """
    if not isinstance(settings, dict) or not isinstance(settings.get("terms"), list):
        return settings
    made = []
    for term in settings["terms"]:
        if isinstance(term, Term):  # the parser made it of a full class path
            made.append(term)
            continue
        try:
            module, _, name = str(term["class_path"]).rpartition(".")
            cls = getattr(import_module(module) if module else methods, name)
            made.append(cls(**term.get("init_args", {})))
        except (TypeError, KeyError, ImportError, AttributeError) as error:
            if is_bug_of_user(error):
                raise
            rule = f"it cannot be made ({error_reason(error)})"
            instead = "write {class_path: LabelSmoothing, init_args: {smoothing: 0.1}}"
            raise InputError(f"terms with {term}", rule, instead) from error
    return {**settings, "terms": made}


def results_table(model: str, results: Sequence[CheckResult]) -> Table:
    """Return a table with one row for each check.

    The last column holds the rule, and below it a figure if the check returned one, or what was
    seen and expected if it failed. For a check that does not apply it holds the reason instead.
    """
    styles = {
        "passed": ("green", "passed"),
        "failed": ("bold red", "FAILED"),
        "not applicable": ("dim", "n/a"),
    }
    count = {verdict: sum(result.verdict == verdict for result in results) for verdict in styles}
    title = (
        f"{model}: {count['passed']} passed, {count['failed']} failed, {count['not applicable']} not "
        "applicable"
    )
    grid = Table(title=title)
    grid.add_column("check", no_wrap=True)
    grid.add_column("verdict", no_wrap=True)
    grid.add_column("rule, and what was seen")
    for result in results:
        style, word = styles[result.verdict]
        detail = f"seen: {result.detail}" if result.verdict == "failed" else result.detail
        seen = [detail] if result.verdict == "not applicable" else [result.rule, detail]
        grid.add_row(result.check, f"[{style}]{word}[/]", escape("\n".join(filter(None, seen))))
    return grid
