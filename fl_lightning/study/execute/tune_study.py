"""A search over all methods of a study, and the record of what it chose.

Every method has the same space and the same number of trials. Each runs one trial at a time, and
several methods are at work together, so that what is tried does not depend on which trial ends
first: with any ``--jobs`` and as many threads a trial, killed or not, the record is the same.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from optuna.trial import TrialState

from fl_lightning import __version__
from fl_lightning.errors import InputError, require
from fl_lightning.study.execute.jobs import Job, RunningJob
from fl_lightning.study.execute.trials import AGAIN, VALUES, SearchRun, SearchSession
from fl_lightning.study.plan.search import MethodSearch, Range, Search
from fl_lightning.study.plan.spec_file import SpecFile
from fl_lightning.study.plan.tuned import TunedMethod, TunedRecord, is_of_search, search_hash
from fl_lightning.support.disk import replace


def check_record(search: Search) -> None:
    """Check that the record can be written and replaces none of another search.

    Raises:
        InputError: it cannot, or would.
    """
    assert search.record is not None
    folder = next(parent for parent in search.record.parents if parent.exists())
    writable = folder.is_dir() and os.access(folder, os.W_OK)
    another = "write record: and the path of a file that can be written"
    require(writable, f"{search.record}", "the record cannot be written there", another)
    if search.record.exists():
        try:
            same = is_of_search(TunedRecord.read(search.record), SpecFile(search.path))
        except InputError:
            same = False
        rule = "another search, or an earlier form of this one, has its record there"
        require(same, f"{search.record}", rule, "move it away, or name another record:")


@dataclass
class StudySearchSession(SearchRun):
    """One session of a search over all methods of a study, whose record follows its trials.

    Args:
        parts: the search of each method, by label.
    """

    parts: dict[str, SearchSession] = field(default_factory=dict)

    def open(self) -> None:
        for part in self.search.parts:
            session = SearchSession(
                part, self.folder, self.pool, self.logger, self.environment, self.resolve
            )
            session.open()
            self.parts[part.label] = session

    def jobs(self) -> Iterator[Job]:
        """Yield the first trial of each method that has trials left."""
        for session in self.parts.values():
            session.parent, session.display = self.parent, self.display
            if job := session.next_job():
                yield job

    def part_of(self, job: Job) -> SearchSession:
        return next(session for session in self.parts.values() if job.name in session.settings)

    def shown(self, job: Job) -> tuple[Path | None, int]:
        session = self.part_of(job)
        return session.run_of(job), int(session.settings[job.name]["trainer.max_rounds"])

    def summary(self) -> str:
        states = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
        ended = sum(len(session.trials(*states)) for session in self.parts.values())
        total = sum(session.search.wanted for session in self.parts.values())
        return f"{self.search.name}: {ended} of {total} trials of {len(self.parts)} methods"

    def ended(self, running: RunningJob, code: int) -> Job | None:
        return self.part_of(running.job).ended(running, code)

    def look(self, running: list[RunningJob]) -> None:
        for session in self.parts.values():
            session.prune([one for one in running if one.job.name in session.settings])
        self.display.look(running)

    def finish(self) -> bool:
        """Write the record, and return whether there is one: every method needs a finished
        trial."""
        without = [label for label, session in self.parts.items() if session.best() is None]
        if without:
            logs = self.folder / "logs"
            self.display.line(
                f"no trial of {', '.join(without)} was finished, and no record; logs in {logs}; {AGAIN}"
            )
            return False
        assert self.search.record is not None
        self.search.record.parent.mkdir(parents=True, exist_ok=True)
        replace(self.search.record, self.record().sealed().to_yaml().encode())
        for label, session in self.parts.items():
            best = session.best()
            assert best is not None
            self.display.line(
                f"{label}: {session.metric} {session.value_of(best):.4g} with {best.params}"
            )
        entry = f"tuned: {os.path.relpath(self.search.record, self.search.path.parent)}"
        self.display.line(f"record: {self.search.record}; the study reads it by '{entry}'")
        return True

    def record(self) -> TunedRecord:
        """Return what was chosen, and how; it is a function of the search alone."""
        search, first = self.search, next(iter(self.parts.values()))
        assert search.record is not None
        ends = [
            trial.datetime_complete
            for session in self.parts.values()
            for trial in session.trials(TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
            if trial.datetime_complete
        ]
        return TunedRecord(
            study=search.study,
            search=os.path.relpath(search.path, search.record.parent),
            search_sha256=search_hash(SpecFile(search.path)),
            date=max(ends).date().isoformat(),
            version=__version__,
            metric=first.metric,
            direction=search.direction_of(first.task),
            trials=search.trials,
            seed=search.seed,
            space={
                key: asdict(allowed) if isinstance(allowed, Range) else allowed
                for key, allowed in search.space.items()
            },
            settings={
                "config": [os.path.relpath(path, search.path.parent) for path in search.configs],
                **search.settings,
            },
            chosen={label: _chosen(session) for label, session in self.parts.items()},
            seeds=search.seeds if len(search.seeds) > 1 else (),
        )


def _chosen(session: SearchSession) -> TunedMethod:
    best = session.best()
    assert best is not None
    assert isinstance(session.search, MethodSearch)
    return TunedMethod(
        settings=best.params,
        value=float(session.value_of(best)),
        trial=best.number,
        finished=len(session.trials(TrialState.COMPLETE)),
        pruned=len(session.trials(TrialState.PRUNED)),
        failed=len(session.trials(TrialState.FAIL)),
        method_sha256=session.search.method_sha256,
        runs_sha256=session.search.runs_sha256,
        values=best.user_attrs.get(VALUES, ()),
    )
