"""The display of a sweep or a search: a line for every job that ends and, on a terminal, a live table of the
runs at work."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.table import Table

from fl_lightning.study.execute.jobs import Job, RunningJob
from fl_lightning.study.results.run_records import read_metrics
from fl_lightning.support.terminal import ResizableLive

REFRESH_SECONDS = 1.0
ACCURACY = "test/accuracy"
COLUMNS = ("run", "round", "accuracy", "s/round", "since")


class Display:
    """A context in which a live table is shown.

    Args:
        state: returns one line on the whole.
        find: returns the folder of a job's run, once there is one, and its number of rounds.
        console: where it is shown; default: standard error.
    """

    def __init__(
        self,
        state: Callable[[], str],
        find: Callable[[Job], tuple[Path | None, int]],
        console: Console | None = None,
    ) -> None:
        self.state, self.find = state, find
        self.console = console or Console(stderr=True, highlight=False, soft_wrap=True)
        self.live = (
            ResizableLive(console=self.console, auto_refresh=False, transient=True)
            if self.console.is_terminal
            else None
        )
        self.begun = self.shown = time.monotonic()

    def __enter__(self) -> Display:
        if self.live:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live:
            self.live.stop()

    @property
    def elapsed(self) -> str:
        return clock(time.monotonic() - self.begun)

    def line(self, text: str) -> None:
        self.console.print(text, markup=False)

    def failed(self, name: str, job: Job, code: int) -> None:
        """Print that a job failed, with the last lines of its log."""
        how = f"exit code {code}" if code >= 0 else f"signal {-code}"
        lines = "".join(f"\n    {line}" for line in job.tail())
        self.line(f"{name} failed ({job.args[0]}, {how}); {job.log} ends with{lines}")

    def look(self, running: list[RunningJob]) -> None:
        """Draw the table anew, if the last time is long enough ago."""
        if self.live and time.monotonic() - self.shown >= REFRESH_SECONDS:
            self.shown = time.monotonic()
            self.live.update(self.table(running), refresh=True)

    def table(self, running: list[RunningJob]) -> Table:
        table = Table(*COLUMNS, title=f"{self.state()}, {self.elapsed}", title_justify="left")
        for one in running:
            run, rounds = self.find(one.job)
            rows = read_metrics(run)
            accuracy = next((f"{row[ACCURACY]:.3f}" for row in reversed(rows) if ACCURACY in row), "")
            pace = f"{rows[-1].get('time/round', 0.0):.2f}" if rows else ""
            stage = f"{len(rows)}/{rounds}" if one.job.args[0] == "fit" else one.job.args[0]
            table.add_row(one.job.name, stage, accuracy, pace, clock(time.monotonic() - one.since))
        return table


def clock(seconds: float) -> str:
    """Return a duration as hours, minutes and seconds.

    >>> clock(3725.4)
    '1:02:05'
    """
    return str(timedelta(seconds=round(seconds)))
