"""Live progress on a terminal and in a notebook; a plain line now and then in a log file."""

from __future__ import annotations

import atexit
import logging
import sys
import time
from collections import deque
from typing import Annotated, Any

from lightning.fabric.utilities.rank_zero import rank_zero_only
from rich.console import Console, RenderableType
from rich.progress_bar import ProgressBar as Bar
from rich.table import Table
from rich.text import Text

from fl_lightning.client import Assignment, Client
from fl_lightning.config.constraints import within
from fl_lightning.hooks import Context, Meter, RoundRecord
from fl_lightning.support.notebook import KernelDisplay
from fl_lightning.support.terminal import ResizableLive, clock
from fl_lightning.tasks import Classification, Task

log = logging.getLogger("fl_lightning")


class ProgressBar(Meter):
    """Two lines that redraw themselves where stderr is a terminal, and in the output of a
    notebook's cell; elsewhere about ten log lines a run.

    The log lines go to the logger ``fl_lightning`` at level INFO.

    Args:
        refresh_per_second: redraws per second of the live display.
    """

    def __init__(
        self, refresh_per_second: Annotated[float, within("(0, inf]", "it is positive", 4)] = 4
    ) -> None:
        self.refresh_per_second = refresh_per_second
        self._live: ResizableLive | None = None
        self._cell: KernelDisplay | None = None
        self._redirected: list[tuple[logging.StreamHandler, Any]] = []
        # seconds; the last rounds say most about the next ones
        self._durations: deque[float] = deque(maxlen=20)
        self._round = self._finished = self._max_rounds = self._clients = self._expected = 0
        # seconds: the start of the run, the end of the last round
        self._started = self._mark = time.monotonic()
        self._metrics: dict[str, float] = {}
        self._bytes = 0.0
        self._best: float | None = None
        self._task: Task = Classification()

    def on_check(self, context: Context) -> None:
        self._metrics, self._bytes, self._best = {}, 0.0, None

    def on_setup(self, context: Context) -> None:
        self._task = context.data.task
        self._started = self._mark = time.monotonic()
        self._durations.clear()

    def on_round_start(self, round: int, context: Context) -> None:
        self._round, self._finished, self._max_rounds = round, round - 1, context.max_rounds
        self._clients = self._expected = 0
        if not self._is_shown and getattr(rank_zero_only, "rank", 0) == 0:
            self._start()

    def on_cohort(self, cohort: list[Assignment], round: int, context: Context) -> None:
        self._expected += sum(assignment.trains for assignment in cohort)

    def on_client_end(self, client: Client, round: int, context: Context) -> None:
        self._clients += 1
        if self._cell is not None:
            self._cell.refresh()

    def on_round_end(self, record: RoundRecord, context: Context) -> None:
        now, self._finished = time.monotonic(), record.round
        self._durations.append(now - self._mark)
        self._mark = now
        self._metrics |= record.metrics
        self._bytes += record.metrics.get("comm/total_bytes", 0)
        value = record.metrics.get(f"test/{self._task.primary}")
        if value is not None and self._task.is_better(value, self._best):
            self._best = value
        if self._cell is not None:
            self._cell.refresh()
        if (
            not self._is_shown
            and getattr(rank_zero_only, "rank", 0) == 0
            and self._is_milestone(record.round)
        ):
            log.info(
                "round %d/%d  %s  %s",
                record.round,
                self._max_rounds,
                self._numbers(),
                self._times(),
            )

    def on_fit_end(self, summary: dict[str, float], context: Context) -> None:
        self._stop()

    def on_exception(self, error: BaseException, context: Context) -> None:
        if self._live is not None:
            self._live.transient = True  # the round that it shows will not be finished
        self._stop()

    def state_dict(self) -> dict[str, Any]:
        return {"bytes": self._bytes, "best": self._best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._bytes, self._best = state["bytes"], state["best"]

    def __rich__(self) -> RenderableType:
        lines = Table.grid(padding=(0, 1), expand=True)
        for ratio in (None, 3, None, 1, None):
            lines.add_column(ratio=ratio, no_wrap=True)
        started = (
            min(self._clients / self._expected, 1)
            if self._expected and self._finished < self._round
            else 0
        )
        lines.add_row(
            Text(
                f"round {self._round:>{len(str(self._max_rounds))}}/{self._max_rounds}",
                style="bold",
            ),
            Bar(
                total=self._max_rounds,
                completed=self._finished + started,
                complete_style="cyan",
                finished_style="green",
            ),
            Text(f"client {self._clients:>{len(str(self._expected))}}/{self._expected or '?'}"),
            Bar(
                total=self._expected or 1,
                completed=self._clients,
                complete_style="blue",
                finished_style="blue",
            ),
            Text(self._times(), style="dim"),
        )
        both = Table.grid(expand=True)
        both.add_column(no_wrap=True, overflow="ellipsis")
        both.add_row(lines)
        both.add_row(Text(self._numbers(), overflow="ellipsis"))
        return both

    def _numbers(self) -> str:
        m, parts = self._metrics, []
        primary, shown = self._task.primary, self._task.shown
        if (value := m.get(f"test/{primary}")) is not None:
            best = value if self._best is None else self._best
            name = primary.replace("_", " ")
            parts.append(f"{name} {shown(primary, value)}, best {shown(primary, best)}")
        if "train/loss" in m:
            parts.append(f"train loss {m['train/loss']:.4g}")
        if "clients/trained" in m:
            rejected = (
                f", {m['clients/rejected']:.0f} rejected" if m.get("clients/rejected") else ""
            )
            parts.append(
                f"{m['clients/trained']:.0f} trained, {m.get('clients/dropped', 0):.0f} dropped{rejected}"
            )
        if "comm/total_bytes" in m:
            parts.append(f"{self._bytes / 1e6:.1f} MB")
        return "  ".join(parts) or "first round"

    def _times(self) -> str:
        now = time.monotonic()
        elapsed = f"{clock(now - self._started)} elapsed"
        if not self._durations:
            return elapsed
        left = sum(self._durations) / len(self._durations) * (self._max_rounds - self._finished) - (
            now - self._mark
        )
        if self._finished < self._max_rounds:
            return f"{elapsed}, {clock(max(left, 0))} left"
        return elapsed

    @property
    def _is_shown(self) -> bool:
        """Whether there is a live display."""
        return self._live is not None or self._cell is not None

    def _is_milestone(self, round: int) -> bool:
        tenth = max(1, -(-self._max_rounds // 10))
        return round % tenth == 0 or round in (1, self._max_rounds)

    def _start(self) -> None:
        console = Console(stderr=True)
        if console.is_jupyter:
            self._cell = KernelDisplay(self, self.refresh_per_second)
            self._cell.start()
            return
        if not console.is_terminal or console.is_dumb_terminal:
            return
        self._live = ResizableLive(
            self, console=console, refresh_per_second=self.refresh_per_second
        )
        self._live.max_width = 80  # of most terminals, so that few resizings break a line at all
        terminal = sys.stderr
        self._live.start()
        atexit.register(self._stop)  # whatever happens, the cursor comes back
        for logger in [logging.getLogger(), *logging.root.manager.loggerDict.values()]:
            for handler in getattr(logger, "handlers", ()):
                if isinstance(handler, logging.StreamHandler) and handler.stream is terminal:
                    self._redirected.append((handler, terminal))
                    # rich's, which writes above the display instead of through it
                    handler.setStream(sys.stderr)

    def _stop(self) -> None:
        if self._cell is not None:
            self._cell.stop()
            self._cell = None
        if self._live is None:
            return
        for handler, stream in self._redirected:
            handler.setStream(stream)
        self._redirected.clear()
        self._live.stop()
        self._live = None
        atexit.unregister(self._stop)
