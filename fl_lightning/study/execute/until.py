"""``sweep --until decided``: seeds are added until every criterion is decided, or a budget ends it.

Cells start seed by seed. A slot that would wait for the last cells of a seed takes one of the next,
which may turn out not to be needed; it is ended then, and does not count. The results are looked at
when a seed is complete and all before it are (:mod:`fl_lightning.study.report.looks`), so that
where the sweep stops depends on the results alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fl_lightning.errors import InputError, require
from fl_lightning.run.directory import read_json, to_json
from fl_lightning.study.execute.cells import CellState
from fl_lightning.study.execute.jobs import Job, RunningJob, threads_per_job
from fl_lightning.study.execute.session import SweepSession
from fl_lightning.study.plan.spec_file import SpecFile
from fl_lightning.study.plan.stopping import Ending, Stopping, StoppingRule, check_rule
from fl_lightning.study.plan.study import Study, check_cells, check_published_seeds
from fl_lightning.study.report.looks import counted, looks
from fl_lightning.study.report.verdicts import check_task
from fl_lightning.study.results.gather import gather_registered
from fl_lightning.study.results.run_records import RunRecord, read_directory
from fl_lightning.study.results.runs import FinishedRun, Results, selected
from fl_lightning.study.results.seeds import complete_seeds
from fl_lightning.support.disk import replace as replace_file

FILE = "until.json"
"""The file in the study's folder that holds the seconds of sweeping and where the sweep stands."""
SAVE_SECONDS = 20.0
"""Seconds between two times that the seconds of sweeping are written down."""


def with_flags(
    study: Study, until: str | None, max_seeds: int | None, max_hours: float | None
) -> Study:
    """Return the study with the stopping rule that the flags of ``sweep`` ask for.

    Args:
        study: the study, whose file may have a rule.
        until: ``decided``, or None for what the file says.
        max_seeds, max_hours: what takes the place of the rule's own; None for what the file says.

    Raises:
        InputError: a limit is given without a rule, or the rule does not fit the study.
    """
    limits = {"max_seeds": max_seeds, "max_hours": max_hours}
    given = {name: value for name, value in limits.items() if value is not None}
    if until is None and study.until is None:
        flags = " ".join(f"--{name} {value}" for name, value in given.items())
        require(not given, flags, "it limits seeds that are added", "add --until decided")
        return study
    hours = f"--max_hours {max_hours}"
    require(max_hours is None or max_hours > 0, hours, "it is above 0", "write --max_hours 6")
    rule = replace(study.until or StoppingRule(), **given)  # type: ignore[arg-type]
    check_rule(rule, study.seeds, study.criteria, "--" if given or until else f"{study.path}: ")
    found = replace(study, until=rule)
    for _, record in found.tuned.parts if found.tuned else ():
        record.check_seeds("", found.seed_order)
    check_published_seeds(SpecFile(study.path), found)
    check_cells(SpecFile(study.path), found)
    return found


@dataclass
class UntilSession(SweepSession):
    """One session of a sweep that adds seeds.

    Args:
        jobs_at_a_time: cells that run at a time; for the threads of cells that are added.
        stopping: the last look at the results.
        ending: why no cell is started any more; None: cells are started.
        records: what was read of finished runs, by the name of the cell.
        looked: the number of complete seeds at the last look.
        begun: ``time.monotonic()`` at the start of the session.
        saved: the same when the seconds were last written down.
        seconds: the seconds of earlier sessions.
        was_terminated: whether the cells at work were told to stop.
    """

    jobs_at_a_time: int = 1
    stopping: Stopping = field(default_factory=Stopping)
    ending: Ending | None = None
    records: dict[str, RunRecord] = field(default_factory=dict)
    looked: int = 0
    begun: float = field(default_factory=time.monotonic)
    saved: float = 0.0
    seconds: float = 0.0
    was_terminated: bool = False

    @property
    def rule(self) -> StoppingRule:
        assert self.cells.study.until is not None
        return self.cells.study.until

    @property
    def file(self) -> Path:
        return self.cells.folder / FILE

    def begin(self) -> None:
        self.seconds = float(read_json(self.file).get("seconds") or 0.0)
        limits = f"{self.rule.max_seeds} seeds at most"
        if self.rule.max_hours is not None:
            limits += f", {self.rule.max_hours:g} hours at most ({self.hours:.2f} are spent)"
        self.display.line(f"seeds are added until every criterion is decided; {limits}")
        for criterion in self.cells.study.parsed_criteria():
            if self.cells.study.is_timing(criterion):
                self.display.line(f"no seed is added for `{criterion.title}`: a clock decides it")

    @property
    def hours(self) -> float:
        """The hours of sweeping of this study, this session's among them."""
        return (self.seconds + time.monotonic() - self.begun) / 3600

    def jobs(self) -> Iterator[Job]:
        """Yield the jobs seed by seed, until a look or a budget ends it."""
        for seed in self.cells.study.seed_order:
            self.take_look()  # what earlier sessions left may decide everything
            self.check_budget()
            if self.ending is not None or self.failures():  # the seeds that are begun go on
                break
            states = self.cells.of_seed(seed) or self.added(seed)
            for state in states:
                if self.ending is None and (job := self.next_job(state)):
                    yield job
        self.take_look()

    def added(self, seed: int) -> list[CellState]:
        """Return the cells of a seed that is begun now."""
        states = self.cells.add_seed(seed)
        for state in states:
            state.threads = threads_per_job(self.jobs_at_a_time, state.threads)
        return states

    def look(self, running: list[RunningJob]) -> None:
        self.check_budget()
        if time.monotonic() - self.saved > SAVE_SECONDS:
            self.save()
        super().look(running)

    def ended(self, running: RunningJob, code: int) -> Job | None:
        if self.was_terminated and code:
            state = self.cells[running.job.name]
            state.find_run(self.cells.folder)
            if state.status != "finished":
                state.status = "interrupted"
            self.cells.write()
            return None
        following = super().ended(running, code)
        if following is None and self.ending is None:
            self.take_look()
        return None if self.ending is not None else following

    def end(self, ending: Ending) -> None:
        """Start no cell any more, and end those that are at work."""
        self.ending, self.was_terminated = ending, True
        self.pool.terminate()

    def check_budget(self) -> None:
        limit = self.rule.max_hours
        if self.ending is None and limit is not None and self.hours >= limit:
            self.end("max_hours")

    def failures(self) -> list[str]:
        """Return the names of the cells whose run or test failed, among those that count."""
        names = super().failures()
        if self.ending in ("decided", "max_seeds"):
            names = [name for name in names if self.cells[name].cell.seed in self.stopping.seeds]
        return names

    def take_look(self) -> None:
        """Look at the results after each seed that has become complete since the last look."""
        study = self.cells.study
        complete = self.count_complete()
        if self.ending is not None or complete <= self.looked or complete < len(study.seeds):
            return
        results = self.results(complete)
        check_task(results.study)
        for stopping in looks(results, max(len(study.seeds), self.looked + 1)):
            if self.stopping.ending != "decided":
                self.stopping = stopping
                self.display.line(self.progress(stopping))
            if stopping.ending == "max_seeds":
                self.end("max_seeds")
        if self.ending is None and self.stopping.ending == "decided":
            self.check_registered(results)
        self.looked = complete
        self.save()

    def check_registered(self, results: Results) -> None:
        """End the sweep if what was registered, where the study has changed since, is decided as
        well."""
        entries = self.registration.entries
        undecided: tuple[str, ...] = ()
        if entries[-1].sha256 != entries[0].sha256:
            try:
                found = counted(gather_registered(results, entries[0].plan, self.cells.folder))
                undecided = found.stopping.undecided if found.stopping else ()
            except InputError:  # no run was made by that plan
                undecided = ()
        if not undecided or len(complete_seeds(results)) >= self.rule.max_seeds:
            self.end("decided")
        else:
            waiting = ", ".join(f"`{text}`" for text in undecided)
            self.display.line(f"{self.cells.study.name}: registered, and undecided: {waiting}")

    def count_complete(self) -> int:
        """Return the number of seeds, from the first on, whose cells are finished and tested."""
        study = self.cells.study
        for number, seed in enumerate(study.seed_order):
            states = self.cells.of_seed(seed)
            if not states or not all(map(self.is_complete, states)):
                return number
        return len(study.seed_order)

    def is_complete(self, state: CellState) -> bool:
        tests = self.cells.study.test
        name = state.cell.name
        if name in self.records:
            return True
        done = state.status == "finished" and (tests is None or state.is_tested(tests))
        if done and state.run is not None:
            record = read_directory(state.run)
            if not record.problem:
                self.records[name] = record
                return True
            state.status, state.problem = "failed", f"{state.run}; {record.problem}"
        return False

    def results(self, count: int) -> Results:
        """Return the results of the first seeds, as a report has them."""
        study = self.cells.study
        runs = [
            FinishedRun(state.cell.method, state.cell.seed, levels, self.records[state.cell.name])
            for seed in study.seed_order[:count]
            for state in self.cells.of_seed(seed)
            for levels in study.compared_at(state.cell)
        ]
        return selected(Results(study, runs, [], records=list(self.records.values())))

    def progress(self, stopping: Stopping) -> str:
        """Return the outcome of a look in one line."""
        waiting = ", ".join(f"`{text}`" for text in stopping.undecided)
        said = (
            f"undecided: {waiting}"
            if waiting
            else "every criterion that seeds can decide is decided"
        )
        return f"{self.cells.study.name}: {len(stopping.seeds)} complete seeds; {said}"

    @property
    def stands(self) -> Ending:
        """What has ended it, or how it stands."""
        return self.ending or ("failed" if self.failures() else self.stopping.ending)

    def document(self) -> dict[str, Any]:
        return {
            "seconds": round(self.hours * 3600, 1),
            "seeds": list(self.stopping.seeds),
            "ending": self.stands,
            "undecided": list(self.stopping.undecided),
        }

    def save(self) -> None:
        self.saved = time.monotonic()
        replace_file(self.file, to_json(self.document()).encode())

    def finish(self) -> None:
        self.save()
        shown = replace(self.stopping, ending=self.stands)
        self.display.line(f"{self.cells.study.name}: {shown.sentence()}")
