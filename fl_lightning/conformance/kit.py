"""All checks, in order, and how they are run."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fl_lightning.conformance import (
    checks_declared,
    checks_images,
    checks_orders,
    checks_quadratic,
    checks_state,
    checks_wire,
)
from fl_lightning.conformance.bench import Bench
from fl_lightning.conformance.subject import Subject
from fl_lightning.conformance.verdicts import NotApplicable, Violation

Check = Callable[[Bench], str | None]
"""Docstring: the rule. What it returns is a figure to print beside the rule."""

CHECKS: tuple[Check, ...] = (
    checks_images.contract,
    checks_quadratic.known_optimum,
    checks_quadratic.agreement,
    checks_quadratic.partial_participation,
    checks_quadratic.learning,
    checks_quadratic.weights_by_examples,
    checks_declared.federation_size,
    checks_declared.control_variates,
    checks_quadratic.copies,
    checks_quadratic.permutation,
    checks_images.neutral,
    checks_images.determinism,
    checks_images.resume,
    checks_images.finite,
    checks_images.empty_round,
    checks_images.diverged_client,
    checks_wire.bytes_on_the_wire,
    checks_wire.server_reads_uploads_only,
    checks_wire.broadcast,
    checks_wire.budget,
    checks_orders.clients_read_messages_only,
    checks_orders.orders_are_obeyed,
    checks_orders.only_its_own_examples,
    checks_orders.deployed_from_the_server,
    checks_state.no_stale_state,
    checks_state.kept_state_is_used,
    checks_state.nothing_in_place,
)


@dataclass(frozen=True)
class Outcome:
    """Of one check.

    Args:
        detail: what was seen, when it failed; why it does not apply; or a figure.
    """

    check: str
    rule: str
    verdict: Literal["passed", "failed", "not applicable"]
    detail: str = ""


def run_checks(subject: Subject, checks: Sequence[Check] = CHECKS) -> Iterator[Outcome]:
    """These checks, in order; where the method cannot make a step, the others have nothing to look at."""
    broken = False
    with _quiet(), tempfile.TemporaryDirectory() as folder:
        bench = Bench(subject, Path(folder))
        for check in checks:
            name, rule = check.__name__.replace("_", " "), (check.__doc__ or "").strip()
            if broken:
                yield Outcome(name, rule, "not applicable", "it makes no step: see contract")
                continue
            try:
                yield Outcome(name, rule, "passed", check(bench) or "")
            except NotApplicable as reason:
                yield Outcome(name, rule, "not applicable", str(reason))
            except Violation as violation:
                yield Outcome(name, rule, "failed", str(violation))
                broken = check is checks_images.contract
            except Exception as error:  # a method that cannot run breaks the rule too
                yield Outcome(name, rule, "failed", f"{type(error).__name__}: {error}")


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
