"""Methods that are broken on purpose: how they say which checks must fail, and what they share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import pytest
import torch

from fl_lightning.conformance import CHECKS, method_under_test, run_checks

OPTIMA = {"known optimum", "agreement", "partial participation"}
BY_N = {"known optimum", "partial participation", "weights by examples", "broadcast"}


class Breaks(list):
    """Broken classes, as parameters of a test."""

    def fails(self, *checks: str | Iterable[str]):
        """The class below it must fail these checks."""
        names = {name for check in checks for name in ([check] if isinstance(check, str) else check)}

        def register(broken):
            self.append(pytest.param(broken, names, id=broken.__name__))
            return broken

        return register


def failed_checks(broken, names):
    """Which of these checks fail, with what is known of the method that was broken."""
    base = next(c for c in broken.__mro__[1:] if c.__module__.startswith("fl_lightning."))
    known = method_under_test(base)
    subject = replace(known, make=partial(broken, **known.make.keywords))
    checks = [check for check in CHECKS if check.__name__.replace("_", " ") in names]
    assert len(checks) == len(names)
    return {outcome.check for outcome in run_checks(subject, checks) if outcome.verdict == "failed"}


def padded(batches, size):
    """Batches filled up to ``size`` with blank examples of class 0, which count in the mean."""
    for inputs, target in batches:
        pad = max(0, size - len(target))
        blank = target.new_zeros(pad, *target.shape[1:])
        yield torch.cat([inputs, torch.zeros(pad, *inputs.shape[1:])]), torch.cat([target, blank])
