"""The list of all checks in their order, and the function that runs them."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from fl_lightning.conformance import (
    checks_declared,
    checks_orders,
    checks_quadratic,
    checks_runs,
    checks_state,
    checks_wire,
)
from fl_lightning.conformance.bench import Bench
from fl_lightning.conformance.known_methods import MethodUnderTest
from fl_lightning.conformance.verdicts import NotApplicable, Violation, in_words
from fl_lightning.engines.base import one_thread

Check = Callable[[Bench], str | None]
"""The docstring of a check is its rule; the text that it may return is printed beside the rule."""

CHECKS: tuple[Check, ...] = (
    checks_runs.contract,
    checks_quadratic.known_optimum,
    checks_quadratic.agreement,
    checks_quadratic.partial_participation,
    checks_quadratic.learning,
    checks_quadratic.weights_by_examples,
    checks_declared.federation_size,
    checks_declared.settings_of_the_server,
    checks_declared.control_variates,
    checks_declared.dynamic_regularisation,
    checks_quadratic.copies,
    checks_quadratic.permutation,
    checks_runs.neutral,
    checks_runs.determinism,
    checks_runs.resume,
    checks_runs.finite,
    checks_runs.empty_round,
    checks_runs.diverged_client,
    checks_wire.bytes_on_the_wire,
    checks_wire.server_reads_uploads_only,
    checks_wire.shapes_of_entries,
    checks_wire.hostile_entries,
    checks_wire.order_of_uploads,
    checks_wire.broadcast,
    checks_wire.budget,
    checks_orders.clients_read_messages_only,
    checks_orders.stacked_as_alone,
    checks_orders.orders_are_obeyed,
    checks_orders.only_its_own_examples,
    checks_orders.deployed_from_the_server,
    checks_state.no_stale_state,
    checks_state.kept_state_is_used,
    checks_state.same_start_as_declared,
    checks_state.nothing_in_place,
)


@dataclass(frozen=True)
class CheckResult:
    """The result of one check.

    Args:
        check: name of the check.
        rule: what the check demands of a method.
        verdict: whether the method passed.
        detail: what was seen, if the check failed; why it does not apply; or a figure, if it
            passed.
    """

    check: str
    rule: str
    verdict: Literal["passed", "failed", "not applicable"]
    detail: str = ""


def run_checks(subject: MethodUnderTest, checks: Sequence[Check] = CHECKS) -> Iterator[CheckResult]:
    """Run the checks in order and yield the result of each.

    A method that fails ``contract`` cannot make a training step, so the checks after it do not
    apply.
    """
    broken = False
    with _quiet() as warnings, tempfile.TemporaryDirectory() as folder:
        bench = Bench(subject, Path(folder))
        for check in checks:
            name, rule = check.__name__.replace("_", " "), (check.__doc__ or "").strip()
            if broken:
                yield CheckResult(name, rule, "not applicable", "it makes no step: see contract")
                continue
            warnings.clear()
            try:
                # as in a run: sums over more are rounded differently
                with one_thread(torch.device("cpu")):
                    seen = check(bench) or ""
                yield CheckResult(name, rule, "passed", seen)
            except NotApplicable as reason:
                yield CheckResult(name, rule, "not applicable", str(reason))
            except Violation as violation:
                yield CheckResult(name, rule, "failed", str(violation))
                broken = check is checks_runs.contract
            except Exception as error:  # a method that cannot run breaks the rule too
                why = in_words(error, next(iter(warnings), ""))
                yield CheckResult(name, rule, "failed", why)


class _Warnings(logging.Handler):
    """Keeps what the log has warned of, in ``said``."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


@contextmanager
def _quiet() -> Iterator[list[str]]:
    """Silence the project's log, as the toy runs warn about diverging clients on purpose; yield
    what it would have warned of."""
    log, kept = logging.getLogger("fl_lightning"), _Warnings()
    level, handlers, propagate = log.level, log.handlers, log.propagate
    log.setLevel(logging.WARNING)
    log.handlers, log.propagate = [kept], False
    try:
        yield kept.said
    finally:
        log.setLevel(level)
        log.handlers, log.propagate = handlers, propagate
