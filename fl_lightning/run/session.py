"""A run while it goes on: its engine, its rounds, and what is kept and said when it ends."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from shlex import quote

from fl_lightning.clock.asynchronous import forget_flights
from fl_lightning.config.recorded import arguments_of
from fl_lightning.distributed.launch import start_others, stop_others
from fl_lightning.engines import Engine, spread_states
from fl_lightning.errors import RunStopped
from fl_lightning.federation import Federation, weights_hash
from fl_lightning.hooks import Meter, RoundRecord, Stressor, tell
from fl_lightning.loop import run_round
from fl_lightning.run.clients import clients_csv
from fl_lightning.run.interrupts import Interrupts
from fl_lightning.run.journal import Journal
from fl_lightning.run.log import RunLog
from fl_lightning.run.paths import short_path
from fl_lightning.run.progress import Progress, check_numbers
from fl_lightning.run.resume import require_one_identity
from fl_lightning.run.unsaved import unsaved_state, warn_of_changes

log = logging.getLogger("fl_lightning")


@dataclass
class RunSession:
    """The rounds of one call of ``fit``, from the engine's start to the summary or the error that
    ends them.

    Args:
        fed: what the rounds touch.
        journal: the run directory and the trackers, and the rounds that are done.
        interrupts: signals, which end the run between two rounds.
        log_file: the run's log.
        make_engine: makes the engine, which is not started yet.
        stop_reason: returns why the run ends after the rounds that are done; empty: it goes on.
        begun: is called when the run has its directory, and so is a run that is finished already.
        command_line: the command line of the program; empty where Python code calls.
        tags: names and values that the trackers show.
        keeps: whether the run directory stays.
    """

    fed: Federation
    journal: Journal
    interrupts: Interrupts
    log_file: RunLog
    make_engine: Callable[[Federation], Engine]
    stop_reason: Callable[[], str]
    begun: Callable[[], None]
    command_line: Sequence[str]
    tags: dict[str, str]
    keeps: bool

    @property
    def progress(self) -> Progress:
        """The rounds that are done, and their checkpoints."""
        return self.journal.progress

    def run(self, *, launch_as: str | None) -> dict[str, float]:
        """Run the rounds that are left and return the summary.

        Args:
            launch_as: name of the run, which processes of further ranks are started with; None:
                they run.

        Raises:
            RunStopped: a process was lost, the run directory cannot be written any more, or no
                upload ever counted.
        """
        fed, max_rounds = self.fed, self.fed.max_rounds
        if self.journal.is_finished(max_rounds, self.stop_reason()):
            self.begun()
            return self.journal.summary
        log.info("%s", stressors_text(fed.callbacks))
        fed.files = self.journal
        with ExitStack() as running:
            running.callback(self.journal.close)
            try:
                if launch_as is not None:
                    start_others(fed.fabric, launch_as)
                # Python drops what a signal handler raises while a worker is forked
                with self.interrupts.held():
                    engine = self._start_engine(running)
                with self.interrupts.held(), self.journal.writing():
                    self.journal.open(fed, engine.name, self.command_line, self.tags, self.log_file)
                    self.begun()
                    self._note(engine)
                try:
                    tell(fed.callbacks, "on_setup", fed)
                finally:
                    # not before: opening a store takes seconds, which the callbacks need not share
                    self.journal.track()
                before = unsaved_state(fed)
                while self.progress.done.round < max_rounds and not self.stop_reason():
                    self._run_round(engine)
                    warn_of_changes(before, fed)
                    before = {}  # once is enough
                engine.rest()
                return self._finish()
            except BaseException as error:
                stop_others()
                if isinstance(error, SystemExit) and not self._is_interrupt(error):
                    error = _left(error)
                if self.journal.is_open:
                    self._stop(error)
                raise error

    def _start_engine(self, running: ExitStack) -> Engine:
        """Choose and start the engine, which ``running`` closes.

        It comes before the trackers: workers are forks, and a fork must not find locks that threads
        of this process hold.
        """
        shared = self.fed.timing.in_flight if self.fed.timing else ()
        forget_flights(self.fed.states, shared)
        spread_states(self.fed.states, self.fed.holders, shared)
        require_one_identity(self.progress.identity)
        engine = self.make_engine(self.fed)
        running.callback(engine.close)
        engine.start()
        return engine

    def _note(self, engine: Engine) -> None:
        """Note where clients are trained, if there is something to note and it is new."""
        notes = engine.notes()
        if any(self.journal.metadata.get(name) != value for name, value in notes.items()):
            self.journal.note(**notes)

    def _run_round(self, engine: Engine) -> None:
        self.interrupts.check()
        fed, round = self.fed, self.progress.done.round + 1
        tell(fed.callbacks, "on_round_start", round, fed)
        record = run_round(fed, engine, round)
        tell(fed.callbacks, "on_round_end", record, fed)
        with self.interrupts.held(), self.journal.writing():
            self.progress.add(fed, record, self.journal.run)
            self.journal.log_round(record.metrics, round)
            self._note(engine)

    def _finish(self) -> dict[str, float]:
        fed, summary = self.fed, self.progress.summary
        with self.interrupts.held(), self.journal.writing():
            self.progress.save(self.journal.run)
        record = RoundRecord(self.progress.done.round, summary)
        for callback in fed.callbacks:
            with record.written_by(callback):
                tell([callback], "on_fit_end", summary, fed)
        check_numbers(record)
        early = self.progress.done.round < fed.max_rounds
        reason = self.stop_reason() if early else ""
        self.progress.check_learned(reason)
        with self.journal.writing():
            self.journal.finish(
                summary,
                weights_hash(fed),
                clients=clients_csv(fed.data, self.progress.done.clients),
                stopped_early=reason,
                kept=self.keeps,
            )
        return summary

    def _stop(self, error: BaseException) -> None:
        """End the run early: keep what is done and say how to continue."""
        self.interrupts.ignore()
        interrupted = self._is_interrupt(error)
        done = self.progress.done.round
        run = self.journal.run
        if not interrupted:
            self.log_file.add_traceback(error)
            if self.log_file.path is not None and self.keeps:
                error.run_log = short_path(self.log_file.path)  # type: ignore[attr-defined]
        self.journal.metadata["status"] = "interrupted" if interrupted else "failed"
        try:
            self.progress.save(run)
            self.journal.note()
        except OSError as problem:
            log.error("no checkpoint of round %d could be written (%s)", done, problem)
        try:
            tell(self.fed.callbacks, "on_exception", error, self.fed)
        except Exception as second:
            # it must not hide the first one, nor keep the trackers from being closed
            log.exception(
                "on_exception of a callback failed (%s: %s)", type(second).__name__, second
            )
        if not self.keeps:
            log.error("fast_dev_run: stopped in round %d; nothing was kept", done + 1)
        # an error of its own after the last round says itself what to do
        elif min(done, self.progress.saved) < self.fed.max_rounds or not isinstance(
            error, RunStopped
        ):
            again = (
                f"after round {self.progress.saved}" if self.progress.saved else "from the start"
            )
            path = str(short_path(run.path))
            by = f"--ckpt_path {quote(path)}"
            if not self.command_line:  # it was started from Python
                by = f"trainer.fit(method, data, seed={self.fed.seed}, ckpt_path={path!r})"
            reached = min(done + 1, self.fed.max_rounds)
            log.error("stopped in round %d; continue %s with %s", reached, again, by)
        self.interrupts.release()
        self.journal.stop("KILLED" if interrupted else "FAILED")

    def _is_interrupt(self, error: BaseException) -> bool:
        """Return whether a signal, or an exit as after one, ends the run, and not an error."""
        asked = isinstance(error, SystemExit) and error.code == 128 + signal.SIGTERM
        return self.interrupts.received or isinstance(error, KeyboardInterrupt) or asked


def _left(error: SystemExit) -> RuntimeError:
    """Make an error of a ``sys.exit`` in the code of a run, whose code 0 would say that the run is
    done."""
    found = RuntimeError(
        f"code of this run called sys.exit({error.code!r}) in mid-run; raise an exception"
    )
    found.__cause__ = error
    return found


def stressors_text(callbacks: Iterable[object]) -> str:
    """Return by what a run is stressed, or that it is not, for the first lines of its log.

    A meter that uses a stressor's hook to observe is none.
    """
    found = [one for one in callbacks if isinstance(one, Stressor) and not isinstance(one, Meter)]
    shown = [
        f"{type(one).__name__}({', '.join(f'{name}={value}' for name, value in arguments_of(one).items())})"
        for one in found
    ]
    return f"stressed by: {', '.join(shown)}" if shown else "no stressors"
