"""Early stopping: a run ends when its validation has not improved for a while."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

from fl_lightning.config.constraints import Constraint, within
from fl_lightning.errors import InputError
from fl_lightning.hooks import Context, Meter, RoundRecord
from fl_lightning.metrics import client_spread
from fl_lightning.tasks import Classification, Task

LOSS = "train/loss"


def monitors(task: Task) -> tuple[str, ...]:
    """Return the metrics of every round that is evaluated. The test set is not among them: it must
    not choose when a run ends."""
    return (
        *(name for metric in task.per_client for name in client_spread([0.0], metric=metric)),
        LOSS,
    )


FORM = re.compile(r"val/\w+|train/loss")


class EarlyStopping(Meter):
    """Ends the run, as finished, after ``patience`` evaluated rounds in a row without an
    improvement.

    Args:
        monitor: ``val/accuracy``, ``val/accuracy_std``, ``val/accuracy_worst_decile``, the same of
            another metric of the task such as ``val/perplexity``, or ``train/loss``; null: ``val/``
            and the task's primary metric.
        patience: evaluated rounds without an improvement after which the run ends, at least 1.
        mode: whether more of the monitor is better (``max``) or less (``min``); null: less of a
            loss or a spread, more of an accuracy, and of another metric as the task has it.
        min_delta: what a value has to be better by than the best one to count as an improvement, 0
            or more.
    """

    def __init__(
        self,
        monitor: str | None = None,
        patience: Annotated[
            int, within("[1, inf)", "at least 1 evaluated round is needed", 10)
        ] = 10,
        mode: Annotated[
            Literal["max", "min"] | None,
            Constraint("it is max or min", "for an accuracy write mode: max"),
        ] = None,
        min_delta: Annotated[float, within("[0, inf)", "it is 0 or more, and finite", 0.001)] = 0.0,
    ) -> None:
        if monitor is not None and not FORM.fullmatch(monitor):
            raise _unknown(monitor, Classification())
        self.monitor, self.patience, self.min_delta = monitor, patience, min_delta
        self._monitored = monitor or ""
        self.mode = mode
        self._sign = -1 if mode == "min" else 1
        self._forget()

    def _forget(self) -> None:
        self._evaluated = 0  # the last round that was
        self._best: float | None = None
        self._best_round = self._waited = 0

    def on_check(self, context: Context) -> None:
        self._forget()  # what another run of the same trainer has shown
        monitor = self._monitored = self.monitor or f"val/{context.data.task.primary}"
        if monitor != LOSS and monitor not in monitors(context.data.task):
            raise _unknown(monitor, context.data.task)
        if self.mode is None:
            self._sign = -1 if monitor == LOSS else _sign_of(monitor, context.data.task)
        if monitor.startswith("val/") and not len(context.data.validating):
            raise InputError(
                f"EarlyStopping(monitor={monitor!r}) where no client has validation examples",
                "there is nothing to monitor",
                "write --data.val_fraction 0.1",
            )

    def on_validate(self, values: dict[int, float], record: RoundRecord, context: Context) -> None:
        self._evaluated = record.round

    def on_round_end(self, record: RoundRecord, context: Context) -> None:
        if self._evaluated != record.round or self._monitored not in record.metrics:
            return
        value = record.metrics[self._monitored]
        gain = math.inf if self._best is None else self._sign * (value - self._best)
        if math.isfinite(value) and gain > self.min_delta:
            self._best, self._best_round, self._waited = value, record.round, 0
        else:
            self._waited += 1

    def stop_reason(self) -> str:
        if self._waited < self.patience:
            return ""
        best = (
            "never finite"
            if self._best is None
            else f"best {self._best:.4g} in round {self._best_round}"
        )
        rounds = f"{self._waited} evaluated round{'s'[: self._waited > 1]}"
        return f"{self._monitored} did not improve in {rounds}, {best}"

    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best, "best_round": self._best_round, "waited": self._waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._best, self._best_round, self._waited = (
            state["best"],
            state["best_round"],
            state["waited"],
        )


def _sign_of(monitor: str, task: Task) -> int:
    """Return 1 where more of a ``val/*`` metric is better, -1 where less is."""
    metric = monitor.removeprefix("val/").removesuffix("_worst_decile")
    return -1 if metric.endswith("_std") or metric in task.lower_is_better else 1


def _unknown(monitor: str, task: Task) -> InputError:
    known = monitors(task)
    return InputError(
        f"EarlyStopping(monitor={monitor!r})",
        f"it is one of {', '.join(known)}",
        f"write monitor: {known[0]}",
    )
