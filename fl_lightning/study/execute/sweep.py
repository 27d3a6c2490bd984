"""``sweep``: every cell of a study becomes a run. Started again, it does what is left, whatever ended it
before."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from fl_lightning.study.execute import mlflow_page as page
from fl_lightning.study.execute.board import Board, Record
from fl_lightning.study.execute.display import ACCURACY, Display, clock
from fl_lightning.study.execute.estimate import show_plan
from fl_lightning.study.execute.jobs import Job, Pool, Running, fit_arguments, slots_for, threads_per_job
from fl_lightning.study.execute.lock import only_one
from fl_lightning.study.spec.plan import Study, as_flag
from fl_lightning.support.disk import replace
from fl_lightning.support.redaction import redact
from fl_lightning.tracking.mlflow_store import store
from fl_lightning.tracking.runs import StudyRun, begin_study, end_study

Resolve = Callable[[list[str]], str]


def sweep(
    config: str,
    jobs: int = 1,
    root: str = "runs",
    devices: str = "auto",
    logger: bool = True,
    dry_run: bool = False,
    probe: bool = False,
    *,
    resolve: Resolve,
) -> None:
    """Run every cell of a study that is not finished yet; failed cells are listed and do not stop the rest.

    Args:
        config: the study file.
        jobs: cells that run at a time, at least 1.
        root: folder of all runs; those of the study go to ``<root>/<study>/``.
        devices: GPUs that cells are dealt to in turn: ``auto`` for all, ``none``, or their numbers, as in
            ``0,2``.
        logger: false: no MLflow, neither for the study nor for its cells.
        dry_run: print the cells and an estimate of time and bytes, and create nothing.
        probe: with ``dry_run``: run three rounds of each method that no run tells about, to estimate it.
    """
    study = Study.read(config)
    slots = slots_for(jobs, devices)
    board = Board.plan(study, Path(root), resolve)
    for record in board.records:
        record.threads = threads_per_job(jobs, record.threads)
    if dry_run:
        show_plan(board, jobs, probe=probe)
        return
    with only_one(board.folder) as held:
        for record in board.records:
            record.find_run(board.folder)  # those of a sweep that was killed have stopped by now
        Sweep(board, Pool(slots, held), logger).run()


@dataclass
class Sweep:
    """One session of a sweep.

    Args:
        board: what is to be done.
        pool: where it is done.
        logger: whether MLflow is used.
    """

    board: Board
    pool: Pool
    logger: bool
    parent: StudyRun | None = None
    tested: dict[str, int] = field(default_factory=dict)

    def run(self) -> None:
        """Until all cells are finished or failed.

        Raises:
            SystemExit: 1 when one failed.
        """
        board, study = self.board, self.board.study
        replace(board.folder / "study.yaml", study.to_yaml().encode())
        for record in board.records:
            if record.status == "failed" and not record.problem:
                record.status = "interrupted"  # it is tried again
        board.write()
        if self.logger and any(record.config.get("trainer.logger") is True for record in board.records):
            self.parent = begin_study(
                study.name,
                board.folder,
                {"cells": str(len(board.records))},
                {page.TAG: page.view(list(study.grid))},
            )
        self.display = Display(
            self.state, lambda job: (self.found(job.name).run, self.found(job.name).rounds)
        )
        self.display.line(f"{self.state()}; {len(self.pool.slots)} at a time, in {board.folder}")
        self.show_problems()
        done = False
        try:
            with self.display:
                self.pool.run(
                    [job for record in board.records if (job := self.next_job(record))], self.ended, self.look
                )
            done = True
        finally:
            for record in board.records:
                if record.status == "running":
                    record.status = "interrupted"
                    record.find_run(board.folder)
            board.write()
            end_study(
                self.parent,
                board.folder,
                "KILLED" if not done else "FAILED" if self.failures() else "FINISHED",
            )
            self.display.line(f"{self.state()}, in {self.display.elapsed}")
            if not done:
                self.display.line("stopped; the same command continues")
        if self.failures():
            tried = [name for name in self.failures() if not board[name].problem]
            if tried:
                self.display.line(
                    f"failed: {', '.join(tried)}; logs in {board.folder / 'logs'}; the same command "
                    "tries again"
                )
                self.show_problems()
            sys.exit(1)
        if self.parent:
            self.display.line(f"curves         mlflow ui --backend-store-uri {redact(store())}")
            self.display.line(f"               {page.link(self.parent.experiment_id)}")
        self.display.line(
            f"what holds     python -m fl_lightning compare --study {study.name} --out reports/{study.name}"
        )

    def show_problems(self) -> None:
        """What the user must do before some cells can be run."""
        for record in self.board.records:
            if record.problem:
                self.display.line(f"{record.cell.name}: {record.problem}")

    def state(self) -> str:
        board = self.board
        counts = {name: board.count(name) for name in ("running", "interrupted", "waiting", "failed")}
        others = "".join(f", {count} {name}" for name, count in counts.items() if count)
        return f"{board.study.name}: {board.count('finished')} of {len(board.records)} cells finished{others}"

    def failures(self) -> list[str]:
        return [
            r.cell.name for r in self.board.records if r.status == "failed" or self.tested.get(r.cell.name)
        ]

    def found(self, name: str) -> Record:
        """The record of a cell at work, with its run."""
        record = self.board[name]
        if record.run is None:
            record.find_run(self.board.folder)
            record.status = "running"
        return record

    def next_job(self, record: Record) -> Job | None:
        """What is left to do for a cell, and can be done."""
        if record.problem:
            return None
        cell, study, folder = record.cell, self.board.study, self.board.folder
        log = folder / "logs" / f"{cell.name}.log"
        environment = {"OMP_NUM_THREADS": str(record.threads)}
        if record.status != "finished":
            tags = {"study": study.name, "label": cell.method, **cell.levels}
            if self.parent:
                tags["mlflow.parentRunId"] = self.parent.run_id
            args = fit_arguments(
                cell.args,
                root=folder.parent,
                experiment=study.name,
                name=cell.name,
                tags=tags,
                logger=self.logger,
            )
            return Job(cell.name, args, log, environment)
        if study.test is not None and cell.name not in self.tested and not record.is_tested(study.test):
            flags = [f"--{name}={as_flag(value)}" for name, value in study.test.items()]
            return Job(cell.name, ["test", "--ckpt_path", str(record.run), *flags], log, environment)
        return None

    def look(self, running: list[Running]) -> None:
        """Note what has started, and show how far the cells at work are."""
        for one in running:
            record = self.board[one.job.name]
            if record.status in ("waiting", "interrupted"):
                after = len(record.metrics())
                self.display.line(
                    f"{record.cell.name} {f'continues after round {after}' if after else 'starts'}"
                )
                record.status = "running"
                self.board.write()
        self.display.look(running)

    def ended(self, running: Running, code: int) -> Job | None:
        """Take note of a job that ended; what comes next for its cell."""
        job, record = running.job, self.board[running.job.name]
        if job.args[0] == "test":
            self.tested[job.name] = code
            if code:
                self.display.failed(job.name, job, code)
            return None
        record.find_run(self.board.folder)
        if code or record.status != "finished":
            record.status = "failed"
            self.display.failed(job.name, job, code)
        else:
            rows = record.metrics()
            accuracy = f"accuracy {rows[-1][ACCURACY]:.3f}, " if rows and ACCURACY in rows[-1] else ""
            seconds = clock(sum(row.get("time/round", 0.0) for row in rows))
            self.display.line(
                f"{job.name} finished: {accuracy}{len(rows)} rounds in {seconds}; {self.state()}"
            )
        self.board.write()
        return self.next_job(record) if record.status == "finished" else None
