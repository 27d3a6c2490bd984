"""One session of the command ``sweep``: what is started for each cell, and what is said of it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from fl_lightning.errors import InputError
from fl_lightning.run.paths import rounds_kept
from fl_lightning.study.execute import mlflow_page
from fl_lightning.study.execute.cells import CellState, StudyCells
from fl_lightning.study.execute.display import Display, shown, task_of
from fl_lightning.study.execute.jobs import Job, Pool, RunningJob, fit_arguments
from fl_lightning.study.execute.lock import one_writer
from fl_lightning.study.metric_names import CLASSIFICATION, TaskMetrics
from fl_lightning.study.plan.registration import (
    FILE,
    TAG,
    TAG_LENGTH,
    Registration,
    plan_differences,
    plan_of,
    register,
)
from fl_lightning.study.plan.study import as_flag
from fl_lightning.study.report.verdicts import check_task
from fl_lightning.study.results.run_records import runs_in
from fl_lightning.support.disk import replace
from fl_lightning.support.redaction import redact
from fl_lightning.support.terminal import clock
from fl_lightning.tracking.mlflow_store import Status, store
from fl_lightning.tracking.runs import StudyRun, begin_study, end_study, tag_experiment


@dataclass
class SweepSession:
    """One session of a sweep.

    Args:
        cells: the cells of the study.
        pool: runs their processes.
        logger: whether MLflow is used.
        parent: the study's own run in MLflow.
        tested: the exit code of each ``test`` of this session, by cell.
        task: the task of the runs, as far as it is known.
    """

    cells: StudyCells
    pool: Pool
    logger: bool
    parent: StudyRun | None = None
    tested: dict[str, int] = field(default_factory=dict)
    task: TaskMetrics = CLASSIFICATION

    def run(self) -> None:
        """Run until all cells are finished or failed.

        Raises:
            InputError: finished cells were trained on different examples.
            SystemExit: 1 when one failed.
        """
        cells, study = self.cells, self.cells.study
        cells.check_content()
        every = ((one.cell.method, one.cell.levels, one.config) for one in cells.every)
        with one_writer(cells.folder, cells.shard):
            known = Registration.read(cells.folder)
            plan = plan_of(study, every, known.entries[-1].plan if known else None)
            self.registration = register(cells.folder, plan, runs_in(cells.folder))
            replace(cells.folder / "study.yaml", study.to_yaml().encode())
            if self.logger and any(one.config.get("trainer.logger") is True for one in cells.every):
                tags = {"cells": str(len(cells.every))}
                view = mlflow_page.view_tags(list(study.grid))
                self.parent = begin_study(study.name, cells.folder, tags, view)
        cells.write()
        self.display = Display(
            self.summary, lambda job: (self.at_work(job.name).run, self.at_work(job.name).rounds)
        )
        self.display.line(f"{self.summary()}; {len(self.pool.slots)} at a time, in {cells.folder}")
        for state in cells:
            if state.status == "failed" and not state.problem:
                state.status = "interrupted"  # it is tried again
        self.show_registration(known)
        self.learn_task(next((task_of(state.run) for state in cells if state.run), self.task))
        self.show_problems()
        self.begin()
        done = False
        hidden: tuple[type[OSError], ...] = (OSError,)  # after an error, such as of a full disk
        try:
            with self.display:
                self.pool.run(self.jobs(), self.ended, self.look)
            done, hidden = True, ()
        finally:
            for state in cells:
                if state.status == "running":
                    state.status = "interrupted"
                    state.find_run(cells.folder)
            with suppress(*hidden):
                cells.write()
            status: Status = "KILLED" if not done else "FAILED" if self.failures() else "FINISHED"
            left = cells.left_to_others()
            if not left:  # else another shard closes it
                end_study(self.parent, cells.folder, status)
            self.display.line(f"{self.summary()}, in {self.display.elapsed}")
            with suppress(*hidden):
                self.finish()
            if not done and not isinstance(sys.exc_info()[1], InputError):  # it says what to do
                self.display.line("stopped; the same command continues")
        if failures := self.failures():
            if tried := ", ".join(name for name in failures if not cells[name].problem):
                logs = cells.folder / "logs"
                self.display.line(f"failed: {tried}; logs in {logs}; the same command tries again")
                self.show_problems()
            sys.exit(1)
        if self.parent:
            uri = shlex.quote(redact(store()))
            self.display.line(f"curves         mlflow ui --backend-store-uri {uri}")
            self.display.line(f"               {mlflow_page.link(self.parent.experiment_id)}")
        if left:
            self.display.line(
                f"other shards   {left} of their {len(cells.others)} cells are not finished in this folder"
            )
        compare = ["compare", "--study", study.name, "--out", f"reports/{study.name}"]
        if cells.folder.parent != Path("runs"):
            compare += ["--root", str(cells.folder.parent)]
        self.display.line(f"what holds     python -m fl_lightning {shlex.join(compare)}")

    def learn_task(self, task: TaskMetrics) -> None:
        """Let MLflow's page show the metrics of the task that a run has, and print what of the
        study does not fit it."""
        if task.primary == self.task.primary:
            return
        self.task, study = task, self.cells.study
        tag_experiment(self.parent, mlflow_page.view_tags(list(study.grid), task))
        try:
            check_task(study.with_task(task))
        except InputError as error:
            self.display.line(f"{study.path}: {error}; compare will refuse it")

    def begin(self) -> None:
        """Do what comes before the first job."""

    def jobs(self) -> Iterable[Job]:
        """Yield the first job of each cell, in the order in which they start."""
        return (job for state in self.cells if (job := self.next_job(state)))

    def finish(self) -> None:
        """Do what comes after the last job, however the session ended."""

    def show_registration(self, before: Registration | None) -> None:
        """Print the hash of what is registered, and how this session differs from it."""
        first = self.registration.first
        mark = f"{first.sha256[:TAG_LENGTH]} of {first.date[:10]} {first.date[11:16]} UTC"
        self.display.line(f"registered     {mark}, in {self.cells.folder / FILE}")
        last = self.registration.entries[-1]
        if last.sha256 != first.sha256:
            what = "; ".join(plan_differences(first.plan, last.plan))
            added = "this is an amendment" + (", added now" if before != self.registration else "")
            self.display.line(f"not as registered: {what}; {added}; compare will say so")

    def show_problems(self) -> None:
        """Print what the user must do before some cells can be run."""
        for line in self.cells.problems():
            self.display.line(line)

    def summary(self) -> str:
        """Return how many cells have which status, in one line."""
        count, statuses = self.cells.count, ("running", "interrupted", "waiting", "failed")
        others = "".join(f", {count(status)} {status}" for status in statuses if count(status))  # type: ignore[arg-type]
        name, total = self.cells.study.name, len(self.cells.states)
        if not self.cells.shard.is_whole:
            name += f", shard {self.cells.shard}"
        return f"{name}: {count('finished')} of {total} cells finished{others}"

    def failures(self) -> list[str]:
        """Return the names of the cells whose run or test failed."""
        names = [(state.cell.name, state.status) for state in self.cells]
        return [name for name, status in names if status == "failed" or self.tested.get(name)]

    def at_work(self, name: str) -> CellState:
        """Return a cell at work, with its run once there is one."""
        state = self.cells[name]
        if state.run is None:
            state.find_run(self.cells.folder)
            state.status = "running"
        return state

    def next_job(self, state: CellState) -> Job | None:
        """Return what is left to do for a cell, if it can be done.

        Raises:
            InputError: its configuration is another now than when the sweep began.
        """
        if state.problem:
            return None
        cell, study, folder = state.cell, self.cells.study, self.cells.folder
        log = folder / "logs" / f"{cell.name}.log"
        environment = {"OMP_NUM_THREADS": str(state.threads)}
        if state.status != "finished":
            self.cells.check_config(state)
            tags = {
                "study": study.name,
                "label": cell.method,
                **cell.levels,
                TAG: self.registration.tag,
            }
            if self.parent:
                tags["mlflow.parentRunId"] = self.parent.run_id
            own = {"root": folder.parent, "experiment": study.name, "name": cell.name}
            args = fit_arguments(cell.args, **own, tags=tags, logger=self.logger)  # type: ignore[arg-type]
            return Job(cell.name, args, log, environment)
        if (
            study.test is not None
            and cell.name not in self.tested
            and not state.is_tested(study.test)
        ):
            flags = [f"--{name}={as_flag(value)}" for name, value in study.test.items()]
            return Job(cell.name, ["test", "--ckpt_path", str(state.run), *flags], log, environment)
        return None

    def look(self, running: list[RunningJob]) -> None:
        """Note which cells have started, and show how far the cells at work are."""
        for one in running:
            state = self.cells[one.job.name]
            if state.status in ("waiting", "interrupted"):
                kept = max(rounds_kept(state.run), default=0) if state.run else 0
                self.display.line(
                    f"{state.cell.name} {f'continues after round {kept}' if kept else 'starts'}"
                )
                state.status = "running"
                self.cells.write()
        self.display.look(running)

    def ended(self, running: RunningJob, code: int) -> Job | None:
        """Note that a job ended, and return the next job of its cell."""
        job, state = running.job, self.cells[running.job.name]
        if job.args[0] == "test":
            self.tested[job.name] = code
            if code:
                self.display.failed(job.name, job, code)
            return None
        state.find_run(self.cells.folder)
        if code == 0 and state.run is None:  # it has trained with other settings
            self.cells.check_config(state)
        if code or state.status != "finished":
            state.status = "failed"
            self.display.failed(job.name, job, code)
        else:
            rows, task = state.metrics(), task_of(state.run)
            last = rows[-1].get(f"test/{task.primary}") if rows else None
            value = "" if last is None else f"{task.primary_in_words} {shown(last, task)}, "
            self.learn_task(task)
            took = f"{len(rows)} rounds in {clock(sum(row.get('time/round', 0.0) for row in rows))}"
            self.display.line(f"{job.name} finished: {value}{took}; {self.summary()}")
        self.cells.write()
        self.cells.check_content()
        return self.next_job(state) if state.status == "finished" else None
