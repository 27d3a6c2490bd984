"""A profile of a few rounds by ``torch.profiler``, as a Chrome trace."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Annotated, Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from torch.profiler import ProfilerActivity, profile, record_function

from callbacks.figures.drawing import never_fatal
from fl_lightning.config.constraints import within
from fl_lightning.hooks import Context, Meter, RoundRecord

log = logging.getLogger("fl_lightning")


class Profile(Meter):
    """Writes ``figures/profile_rounds_0002_0002.json``: a trace of operations over time, for
    ``chrome://tracing`` or Perfetto.

    The loggers that keep files, such as MLflow's, get it too. What is seen is the process of rank
    0: with ``--trainer.workers 1`` the clients' steps too, otherwise the server's half and the
    evaluation. The rounds that are profiled take longer; the result stays the same, bit for bit.

    Args:
        start: first round that is profiled, at least 1; 2 leaves out what happens only once.
        rounds: so many rounds, at least 1.
        memory: whether allocations are part of the trace.
    """

    def __init__(
        self,
        start: Annotated[int, within("[1, inf)", "rounds are counted from 1", 2)] = 2,
        rounds: Annotated[int, within("[1, inf)", "rounds to profile, 1 or more", 1)] = 1,
        memory: bool = False,
    ) -> None:
        self.start, self.rounds, self.memory = start, rounds, memory
        self._profiler: Any = None
        self._label: Any = None
        self._first = self._last = 0

    def on_check(self, context: Context) -> None:
        if self.start > context.max_rounds:
            log.warning(
                "Profile(start=%d) in a run of %d rounds; it profiles none; write an earlier start",
                self.start,
                context.max_rounds,
            )

    def on_round_start(self, round: int, context: Context) -> None:
        if getattr(rank_zero_only, "rank", 0) or not self.start <= round < self.start + self.rounds:
            return
        if self._profiler is None:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._profiler, self._first = (
                profile(activities=activities, profile_memory=self.memory),
                round,
            )
            self._profiler.start()
        self._label = record_function(f"round {round}")
        self._label.__enter__()

    def on_round_end(self, record: RoundRecord, context: Context) -> None:
        if self._profiler is None:
            return
        self._end_label()
        self._last = record.round
        if record.round >= min(self.start + self.rounds - 1, context.max_rounds):
            self._write(record.round, context)

    def on_fit_end(self, summary: dict[str, float], context: Context) -> None:
        """Write what there is of a run that ends before its last round."""
        if self._profiler is not None:
            self._write(self._last, context)

    def on_exception(self, error: BaseException, context: Context) -> None:
        """Stop without a trace: the round was not finished."""
        if self._profiler is not None:
            self._end_label()
            self._profiler.stop()
            self._profiler = None

    def _end_label(self) -> None:
        if self._label is not None:
            self._label.__exit__(None, None, None)
            self._label = None

    def _write(self, last: int, context: Context) -> None:
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        name = f"profile_rounds_{self._first:04d}_{last:04d}.json"
        with never_fatal(f"figures/{name}"), tempfile.TemporaryDirectory() as folder:
            path = Path(folder, name)
            profiler.export_chrome_trace(str(path))
            context.log_text(name, path.read_text())
