"""What a report says of the registration of its study: whether it asks what was registered, and
what the registered criteria say if it does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from fl_lightning.errors import InputError
from fl_lightning.study.plan.registration import (
    TAG,
    TAG_LENGTH,
    Registration,
    differences,
    has_registered_hash,
    level_key,
    registered_hash,
)
from fl_lightning.study.report.comparison import Comparison
from fl_lightning.study.report.looks import counted
from fl_lightning.study.report.verdicts import check_task
from fl_lightning.study.results.gather import check_comparable, gather_registered
from fl_lightning.study.results.published import add_published, without_published
from fl_lightning.study.results.runs import FinishedRun, Results

Status = Literal[
    "as registered", "not complete", "not as registered", "registered late", "not registered"
]


@dataclass(frozen=True)
class RegistrationReport:
    """How a report stands to the registration of its study.

    Args:
        status: ``not complete``: as registered, and cells have no run that counts; ``registered
            late``: runs were there before.
        line: the first line of the report, below its title.
        differences: what differs from the registered plan, one clause each.
        sha256: the hash of the registered plan, or empty.
        dates: of the registration and its amendments.
        registered: the runs under the registered plan, where the report has another one.
    """

    status: Status
    line: str
    differences: Sequence[str] = ()
    sha256: str = ""
    dates: Sequence[str] = ()
    registered: Comparison | None = None


NOT_REGISTERED = RegistrationReport(
    "not registered",
    "**Not registered**: nothing shows that criteria, metric, methods and seeds were chosen before the runs.",
)


def registration_report(results: Results, folder: Path) -> RegistrationReport:
    """Compare what a report asks with what was registered.

    Args:
        results: the runs under the study of the report.
        folder: the folder of the study.

    Raises:
        InputError: the registration cannot be read.
    """
    registration, results = Registration.read(folder), without_published(results)
    missing = _missing(results)
    if registration is None:
        return replace(NOT_REGISTERED, line=f"{NOT_REGISTERED.line} {missing}".rstrip())
    first = registration.first
    found = [*differences(first.plan, results.study), *_different_runs(registration, results)]
    later = [entry for entry in registration.entries if entry.sha256 != first.sha256]
    found += [f"amended {_day(entry.date)}" for entry in later]
    if not all(entry.is_intact for entry in registration.entries):
        found.insert(0, "registration.json was edited: a plan in it does not have its hash")
    if found and first.runs:
        found.append(f"{first.runs} runs are older than the registration")
    dates = [entry.date for entry in registration.entries]
    mark = f"SHA-256 {first.sha256[:TAG_LENGTH]}"
    report_of = partial(RegistrationReport, sha256=first.sha256, dates=dates)
    if found:
        comparison, why = _registered(results, registration, folder)
        line = f"**Not as registered** on {_day(first.date)} ({mark}): {'; '.join(found)}."
        line = " ".join(part for part in (line, missing, why) if part)
        return report_of("not as registered", line, found, registered=comparison)
    if first.runs:
        were = f"{first.runs} run{'s were' if first.runs > 1 else ' was'}"
        line = f"**Registered late**, on {_day(first.date)} ({mark}), when {were} in the folder already."
        return report_of("registered late", f"{line} {missing}".rstrip())
    unchanged = (
        f"s registered before the first run ({mark}): selection, metric, criteria, premises, methods, seeds "
        "and stopping rule are unchanged"
    )
    if missing:
        line = (
            f"**Not complete**: {missing} What follows is of the others, and its 95 % "
            "are those of one look when all are there: whoever looks in between and stops where it suits "
            f"errs more often. Else a{unchanged}."
        )
        return report_of("not complete", line)
    return report_of("as registered", f"A{unchanged}.")


def _missing(results: Results) -> str:
    """Return a sentence on the cells that have no run that counts; empty where all have, and where
    seeds are added."""
    without = cells_without_run(results) if results.study.until is None else []
    if not without:
        return ""
    cells = len(results.study.cells())
    return f"{len(without)} of {cells} cells have no run that counts, such as {without[0]}."


def cells_without_run(results: Results) -> list[str]:
    """Return the cells of the study, by name, that have no run that counts."""
    study = results.study
    done = {(run.label, run.seed, level_key(run.levels)) for run in results.runs}
    return [
        cell.name
        for cell in study.cells()
        if any(
            (cell.method, cell.seed, level_key(at)) not in done for at in study.compared_at(cell)
        )
    ]


def _registered(
    results: Results, registration: Registration, folder: Path
) -> tuple[Comparison | None, str]:
    """Return the runs under the registered plan, and a sentence on where its verdicts are."""
    try:
        found = add_published(counted(gather_registered(results, registration.first.plan, folder)))
        check_comparable(found)
        check_task(found.study)
        judged = found.study.criteria or results.study.criteria
        return Comparison(found), "The verdicts of both are below." if judged else ""
    except InputError as error:
        return None, f"The registered criteria cannot be judged: {error}."


def _different_runs(registration: Registration, results: Results) -> list[str]:
    """Return what of the runs themselves was not registered: their settings, or their
    registration."""
    plan, found, runs = registration.first.plan, list[str](), results.distinct
    changed = [run for run in runs if _has_other_settings(run, plan)]
    if changed:
        labels = ", ".join(dict.fromkeys(run.label for run in changed))
        found.append(f"{len(changed)} runs of {labels} have other settings than registered")
    strange = [run.name for run in runs if _tag(run) not in {*registration.tags, None}]
    if strange:
        found.append(f"{_some(strange)} made under a registration that is not in registration.json")
    unmarked = [run.name for run in runs if _tag(run) is None]
    if unmarked and not registration.first.runs:
        found.append(f"{_some(unmarked)} not made by the sweep that registered the study")
    return found


def _some(names: Sequence[str]) -> str:
    return f"{len(names)} runs, such as {names[0]}, were" if len(names) > 1 else f"{names[0]} was"


def _has_other_settings(run: FinishedRun, plan: Mapping[str, Any]) -> bool:
    record = run.record
    registered = registered_hash(plan, run.label, run.levels)
    if registered is None or not (record.settings and record.typed):
        return False  # a method or level that was not registered is named as such
    return not has_registered_hash(record.settings, registered)


def _tag(run: FinishedRun) -> str | None:
    tag = run.record.tags.get(TAG)
    return None if tag is None else str(tag)


def _day(date: str) -> str:
    return f"{date[:10]} {date[11:16]} UTC"
