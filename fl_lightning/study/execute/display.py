"""The display of a sweep or a search: a line for every job that ends and, on a terminal, a live
table of the runs at work."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from fl_lightning.run.directory import read_json
from fl_lightning.study.execute.jobs import Job, RunningJob
from fl_lightning.study.metric_names import CLASSIFICATION, TaskMetrics
from fl_lightning.study.results.run_records import read_metrics
from fl_lightning.support.terminal import ResizableLive, clock

REFRESH_SECONDS = 1.0


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
        self.task = CLASSIFICATION

    def __enter__(self) -> Display:
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
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
        found = [(one, *self.find(one.job)) for one in running]
        self.task = next((task_of(run) for _, run, _ in found if run), self.task)
        columns = ("run", "round", self.task.primary_in_words, "s/round", "since")
        title = Text(f"{self.state()}, {self.elapsed}", style="table.title")
        heads = (Column(Text(name)) for name in columns)
        table = Table(*heads, title=title, title_justify="left")
        for one, run, rounds in found:
            rows, name = read_metrics(run), f"test/{self.task.primary}"
            value = next((shown(row[name], self.task) for row in reversed(rows) if name in row), "")
            pace = f"{rows[-1].get('time/round', 0.0):.2f}" if rows else ""
            stage = f"{len(rows)}/{rounds}" if one.job.args[0] == "fit" else one.job.args[0]
            since = clock(time.monotonic() - one.since)
            table.add_row(*map(Text, (one.job.name, stage, value, pace, since)))
        return table


def task_of(run: Path | None) -> TaskMetrics:
    """Return the task of a run, from its directory."""
    return TaskMetrics.of_run(read_json(run / "metadata.json") if run else {})


def shown(value: float, task: TaskMetrics) -> str:
    """Return a value of the primary metric for a line of text.

    >>> shown(0.5, CLASSIFICATION), shown(12.34567, TaskMetrics("perplexity", False, frozenset()))
    ('0.500', '12.35')
    """
    return f"{value:.3f}" if task.is_share(task.primary) else f"{value:.4g}"
