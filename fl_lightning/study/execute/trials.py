"""The trials of one search: Optuna chooses, the pool runs them, and a killed search goes on as if
it had not been killed."""

from __future__ import annotations

import json
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from dataclasses import replace as replaced
from functools import partial
from math import isnan, nan
from pathlib import Path
from statistics import fmean
from typing import Any

import optuna
import yaml
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.exc import SQLAlchemyError

from fl_lightning.config.near_names import nearest_or_list
from fl_lightning.config.settings import (
    changed_settings,
    flatten,
    is_free,
    is_under,
    listed_changes,
    settings_hash,
)
from fl_lightning.errors import InputError, require
from fl_lightning.run.directory import read_json
from fl_lightning.study.execute.cells import config_files, resolved_settings
from fl_lightning.study.execute.display import Display
from fl_lightning.study.execute.jobs import Job, Pool, RunningJob, fit_arguments
from fl_lightning.study.metric_names import CLASSIFICATION, TaskMetrics, measure_of
from fl_lightning.study.plan.search import Direction, Search
from fl_lightning.study.results.run_records import find_run, read_metrics
from fl_lightning.support.disk import replace
from fl_lightning.tracking.mlflow_store import Status, sqlite_uri
from fl_lightning.tracking.runs import StudyRun, begin_study, end_study

DATABASE = "optuna.db"
"""The file in the folder of the trials that Optuna keeps them in."""
STORE_ERRORS = (optuna.exceptions.StorageInternalError, SQLAlchemyError)
"""What Optuna raises where it cannot read or write that file."""
TUNED = "tuned"
"""The name of the final run, and its label."""
TRIAL = "trial-"
PRUNED = "pruned"
"""The mark of a trial that was pruned, which is made before its process is ended."""
JUDGED = "judged"
"""The last round of a trial that was judged, and did not prune it."""
VALUES = "values"
"""The metric of a trial at each of its seeds, where it has several, in their order."""
REPEATED = "repeated"
"""The mark of a trial with the values of an earlier one, which is not made."""
TASK = "task"
"""What ``metadata.json`` calls the task of a run; the search keeps it."""
MADE = "made"
"""The attribute of a search that keeps, by trial, the SHA-256 of its examples and of the user's
files that it ran."""
SEED = re.compile(r"-seed(\d+)$")
"""The end of the name of a trial's run at another seed than the first."""
AGAIN = "the same command tries them again"


@dataclass
class SearchRun(ABC):
    """One session of a search, or of the searches of all methods of a study.

    Args:
        search: the search file.
        folder: the folder of the trials.
        pool: runs their processes.
        logger: whether MLflow is used.
        environment: the variables of each run.
        resolve: turns arguments of ``fit`` into the whole configuration.
        parent: the search's own run in MLflow.
    """

    search: Search
    folder: Path
    pool: Pool
    logger: bool
    environment: Mapping[str, str]
    resolve: Callable[[list[str]], str]
    parent: StudyRun | None = None

    def run(self) -> None:
        """Run until all trials and what follows them have ended.

        Raises:
            SystemExit: 1 when every trial of a method failed, or what follows them did.
        """
        self.open()
        if self.logger:
            self.parent = begin_study(self.search.name, self.folder, {"tunes": self.search.study})
        self.display = Display(self.summary, self.shown)
        self.display.line(f"{self.summary()}; {len(self.pool.slots)} at a time, in {self.folder}")
        done = good = False
        try:
            with self.display:
                self.pool.run(self.jobs(), self.ended, self.look)
                good = self.finish()
            done = True
        finally:
            status: Status = "KILLED" if not done else "FINISHED" if good else "FAILED"
            end_study(self.parent, self.folder, status, files=())
            if not done and not isinstance(sys.exc_info()[1], InputError):  # it says what to do
                self.display.line("stopped; the same command continues")
        if not good:
            sys.exit(1)

    @abstractmethod
    def open(self) -> None:
        """Begin or continue the search."""

    @abstractmethod
    def jobs(self) -> Iterable[Job]:
        """Return the first trials."""

    @abstractmethod
    def ended(self, running: RunningJob, code: int) -> Job | None:
        """Tell Optuna the outcome, and return the next trial."""

    @abstractmethod
    def look(self, running: list[RunningJob]) -> None:
        """Tell Optuna the rounds that have ended, and end the trials that it prunes."""

    @abstractmethod
    def finish(self) -> bool:
        """Do what follows the trials, and return whether it went well."""

    @abstractmethod
    def summary(self) -> str:
        """Return how far the search is, in one line."""

    @abstractmethod
    def shown(self, job: Job) -> tuple[Path | None, int]:
        """Return the run directory of a trial, once it exists, and its number of rounds."""


@dataclass
class SearchSession(SearchRun):
    """One session of a search for one method.

    Args:
        task: the task of the runs.
        knows_task: whether a trial has told it.
        at_work: numbers of trials.
        settings: the settings of each run of this session, by its name, with dotted keys.
        runs: the run directories, by name, once they exist.
        files: the SHA-256 of each configuration file, when the session began.
    """

    task: TaskMetrics = CLASSIFICATION
    knows_task: bool = False
    at_work: set[int] = field(default_factory=set)
    settings: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    runs: dict[str, Path] = field(default_factory=dict)
    files: Mapping[Path, str] = field(default_factory=dict)

    @property
    def what(self) -> str:
        """The name of the search, with the method that is tuned."""
        return f"{self.search.name}, {self.search.label}" if self.search.label else self.search.name

    def open(self) -> None:
        """Begin or continue the search, with what its trials have told of their task."""
        self.files = config_files(self.search.args({}))
        self.study = open_search(self.search, self.folder, self.resolve)
        known = self.study.user_attrs
        self.task, self.knows_task = TaskMetrics.of_run(known), TASK in known

    def jobs(self) -> Iterable[Job]:
        return [job for _ in self.pool.slots if (job := self.next_job())]

    def shown(self, job: Job) -> tuple[Path | None, int]:
        return self.run_of(job), int(self.settings[job.name]["trainer.max_rounds"])

    def learn_task(self, run: Path | None) -> None:
        """Note the task of a run; it is the same for all trials.

        Raises:
            InputError: the search file names the metric of another task, or only a direction, the
                wrong one.
        """
        document = read_json(run / "metadata.json") if run and not self.knows_task else {}
        if TASK not in document:
            return
        task = TaskMetrics.of_run(document)
        asked = self.search.metric_of(task)
        fits = not asked.startswith("final/") or measure_of(asked) == task.primary
        rule = f"the primary metric of the runs is {task.primary}"
        instead = f"write metric: final/best_val_{task.primary}, or leave it out, and remove {self.folder}"
        require(fits, f"{self.search.path}: metric: {asked}", rule, instead)
        wanted = replaced(self.search, direction=None).direction_of(task)
        fits = self.search.metric is not None or self.search.direction in (None, wanted)
        given = f"{self.search.path}: direction: {self.search.direction}"
        instead = f"leave direction out, or write {wanted}, and remove {self.folder}"
        require(fits, given, rule, instead)
        self.study.set_user_attr(TASK, document[TASK])
        self.task, self.knows_task = task, True

    def learn_made(self, job: Job, run: Path | None) -> None:
        """Note of what a trial was made; it is the same for all, except what the search itself
        varies.

        Raises:
            InputError: an earlier trial was made with other examples, or another version of a file.
        """
        document = read_json(run / "metadata.json") if run else {}
        trial = self.study.get_trials()[number_of(job)]
        own = [
            f" with {key} {value}" for key, value in trial.params.items() if is_under(key, ["data"])
        ]
        if seed := SEED.search(job.name):
            own.append(f" at seed {seed[1]}")
        made = {f"the data{''.join(own)}": document.get("content_sha256")}
        made |= document.get("code") or {}
        made = {what: sha for what, sha in made.items() if sha}
        known: dict[str, dict[str, str]] = self.study.user_attrs.get(MADE, {})
        for other, before in known.items():
            several = [what for what in made if made[what] != before.get(what, made[what])]
            require(
                not several,
                f"{other} and {job.name} of {self.folder}",
                f"they were made with two versions of {', '.join(several)}, and cannot be compared",
                f"remove {self.folder} to search anew, or restore the first version "
                f"and remove {run}",
            )
        self.study.set_user_attr(MADE, {**known, job.name: made})

    @property
    def metric(self) -> str:
        """The metric that is optimised."""
        return self.search.metric_of(self.task)

    @property
    def sign(self) -> int:
        """The factor from the metric to what Optuna maximises or minimises.

        The direction of its search is fixed before a run tells its task, and is then ``maximize``
        where the search file does not name one.
        """
        return 1 if self.search.direction_of(self.task) == optuna_direction(self.search) else -1

    def value_of(self, trial: FrozenTrial) -> float:
        """Return the metric of a trial that ended."""
        assert trial.value is not None
        return self.sign * trial.value

    def trials(self, *states: TrialState) -> list[FrozenTrial]:
        """Return the trials that were drawn completely, but for those that were drawn before."""
        return [trial for trial in _drawn(self.search, self.study) if trial.state in states]

    def summary(self) -> str:
        ended = self.trials(TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
        best = self.best()
        shown = (
            f", best {self.metric} {self.value_of(best):.4g} in {self.name_of(best)}"
            if best
            else ""
        )
        return f"{self.what}: {len(ended)} of {self.search.wanted} trials{shown}"

    def best(self) -> FrozenTrial | None:
        """Return the best trial; the first of equally good ones."""
        complete = self.trials(TrialState.COMPLETE)
        sign = 1 if optuna_direction(self.search) == "maximize" else -1
        return max(complete, key=lambda trial: sign * (trial.value or 0.0), default=None)

    def next_job(self) -> Job | None:
        """Return a trial that a killed session left behind, else a new one, else none."""
        for trial in self.study.get_trials(states=(TrialState.RUNNING,)):
            if trial.number not in self.at_work:
                if PRUNED in trial.user_attrs:
                    self.study.tell(trial.number, state=TrialState.PRUNED)
                    continue
                if len(values := trial.user_attrs.get(VALUES, ())) == len(self.search.seeds):
                    self.study.tell(trial.number, self.sign * fmean(values))
                    continue
                if set(trial.params) == set(self.search.space):
                    if self.is_replaced(trial):
                        continue
                    return self.job(trial)
                # killed while it was drawn: it does not count
                self.study.tell(trial.number, state=TrialState.FAIL)
        before = self.trials(*TrialState)
        if len(before) >= self.search.wanted:
            return None
        self.study.sampler = self.search.sampler(len(before))
        number = self.study.ask(self.search.distributions()).number
        if self.is_replaced(self.study.get_trials()[number]):
            number = self.study.ask(self.search.distributions()).number
        return self.job(self.study.get_trials()[number])

    def is_replaced(self, trial: FrozenTrial) -> bool:
        """Return whether a trial repeats an earlier one, and put one with other values in its place.

        A session may be killed between any two of these steps: the next one goes on with them.
        """
        before = [one for one in self.trials(*TrialState) if one.number < trial.number]
        tried = [one.params for one in before]
        is_made = (self.folder / self.name_of(trial)).exists()
        if REPEATED not in trial.user_attrs and (trial.params not in tried or is_made):
            return False
        another = self.search.untried(tried, len(before))
        if another is None:
            return False
        # the same seed would give the same metric
        optuna.trial.Trial(self.study, trial._trial_id).set_user_attr(REPEATED, True)
        if not self.study.get_trials(states=(TrialState.WAITING,)):
            self.study.enqueue_trial(another)
        self.study.tell(trial.number, state=TrialState.FAIL)
        return True

    def job(self, trial: FrozenTrial) -> Job:
        self.at_work.add(trial.number)
        tags = {"study": self.search.name, "label": "trial", "trial": str(trial.number)}
        if self.search.label:
            tags["label"] = self.search.label
        if self.parent:
            tags["mlflow.parentRunId"] = self.parent.run_id
        seed = self.search.seeds[len(trial.user_attrs.get(VALUES, ()))]
        name = self.name_of(trial) + (f"-seed{seed}" if seed != self.search.seed else "")
        return self.fit(self.search.args(trial.params, seed=seed), self.search.name, name, tags)

    def fit(self, args: list[str], experiment: str, name: str, tags: Mapping[str, str]) -> Job:
        root = self.folder.parent
        if config_files(args) != self.files:
            check_asked(self.search, self.study, self.folder, self.resolve)
        self.settings[name] = flatten(resolved_settings(args, self.resolve))
        args = fit_arguments(
            args, root=root, experiment=experiment, name=name, tags=tags, logger=self.logger
        )
        return Job(name, args, self.folder / "logs" / f"{name}.log", self.environment)

    def run_of(self, job: Job) -> Path | None:
        """Return the run directory of a job, once it exists.

        An older run with other settings may have its name.
        """
        if job.name not in self.runs:
            is_final = job.name == f"{TUNED}-seed{self.search.seed}" and not self.search.label
            folder = self.folder.parent / self.search.study if is_final else self.folder
            if found := find_run(folder, job.name, settings_hash(self.settings[job.name])):
                self.runs[job.name] = found
        return self.runs.get(job.name)

    def look(self, running: list[RunningJob]) -> None:
        self.prune(running)
        self.display.look(running)

    def prune(self, running: list[RunningJob]) -> None:
        """Tell Optuna the rounds of these trials, which are of this search, and end those that it
        prunes."""
        if self.search.prune:
            for one in running:
                trial, run = self.study.get_trials()[number_of(one.job)], self.run_of(one.job)
                self.learn_task(run)
                if PRUNED not in trial.user_attrs and self.should_prune(trial, run):
                    one.process.terminate()

    def should_prune(self, trial: FrozenTrial, run: Path | None) -> bool:
        """Return whether Optuna prunes a trial, and note it beside the trial.

        It is told the rounds one by one, so that it does not matter how many have ended since the
        last look, and judges each of them once, also where a session was killed in between.
        """
        if VALUES in trial.user_attrs:  # its first seed is behind it, by which trials are pruned
            return False
        live = optuna.trial.Trial(self.study, trial._trial_id)
        name = f"val/{measure_of(self.metric)}" if self.metric.startswith("final/") else self.metric
        judged = trial.user_attrs.get(JUDGED, 0)
        for row in read_metrics(run):
            round = int(row["round"])
            if name in row and round > judged:
                if round not in trial.intermediate_values:
                    live.report(self.sign * row[name], round)
                pruned = live.should_prune()
                live.set_user_attr(PRUNED if pruned else JUDGED, round)
                if pruned:
                    return True
        return False

    def ended(self, running: RunningJob, code: int) -> Job | None:
        job, number = running.job, number_of(running.job)
        self.at_work.discard(number)
        run = self.run_of(job)
        self.learn_task(run)
        value = metric_of(run, self.metric) if run and code == 0 else None
        if value is not None:  # before it is told, so that a search that goes on asks again
            self.learn_made(job, run)
        if (
            run
            and code == 0
            and value is None
            and not self.study.get_trials(states=[TrialState.COMPLETE])
        ):
            self._require_metric(run)
        if self.search.prune and self.is_pruned(number, run if code == 0 else None):
            self.study.tell(number, state=TrialState.PRUNED)
            self.display.line(f"{job.name} pruned; {self.summary()}")
        elif value is None:
            self.study.tell(number, state=TrialState.FAIL)
            self.display.failed(job.name, job, code)
        else:
            values = self.with_value(number, value)
            ended = len(values) == len(self.search.seeds)
            if ended:
                self.study.tell(number, self.sign * fmean(values))
            self.display.line(f"{job.name} finished: {self.metric} {value:.4g}; {self.summary()}")
            if not ended:
                return self.job(self.study.get_trials()[number])
        return self.next_job()

    def with_value(self, number: int, value: float) -> list[float]:
        """Return the metric of a trial at the seeds that have run, this one the last, and note it
        beside the trial where there are several."""
        trial = self.study.get_trials()[number]
        values = [*trial.user_attrs.get(VALUES, ()), value]
        if len(self.search.seeds) > 1:
            live = optuna.trial.Trial(self.study, trial._trial_id)
            live.set_user_attr(VALUES, values)
        return values

    def is_pruned(self, number: int, run: Path | None) -> bool:
        """Return whether a trial that has ended was pruned, or its last rounds say that it is."""
        trial = self.study.get_trials()[number]
        return PRUNED in trial.user_attrs or (run is not None and self.should_prune(trial, run))

    def _require_metric(self, run: Path) -> None:
        """Refuse a metric that the first trials to finish have not: of rounds, or of the end of a
        run that validated nothing."""
        given = f"{self.search.path}: metric: {self.metric}"
        prefix, _, _ = self.metric.partition("/")
        if prefix == "final":  # one that diverged has it, as NaN
            validated = f"final/last5_val_{measure_of(self.metric)}"
            require(
                validated in read_json(run / "metadata.json"),
                given,
                f"{run.name} has finished and validated nothing",
                f"write settings: {{data.val_fraction: 0.1}}, and remove {self.folder}",
            )
            return
        known = sorted(
            {name for row in read_metrics(run) for name in row if name.startswith(f"{prefix}/")}
        )
        rule = f"{run.name} has finished and has no such metric"
        instead = (
            nearest_or_list(self.metric, known) if known else f"a metric that is not of {prefix}/"
        )
        instead = f"write metric: {instead}, and remove {self.folder}"
        require(self.metric in known, given, rule, instead)

    def name_of(self, trial: FrozenTrial) -> str:
        prefix = f"{self.search.label}-" if self.search.label else ""
        return f"{prefix}{TRIAL}{trial.number:04d}"

    def finish(self) -> bool:
        """Run once with the best values, in the study, and return whether that run finished."""
        best = self.best()
        if best is None:
            self.display.line(
                f"{self.search.name}: no trial was finished; logs in {self.folder / 'logs'}; {AGAIN}"
            )
            return False
        chosen = {"trial": best.number, self.metric: self.value_of(best), "settings": best.params}
        replace(self.folder / "best.yaml", yaml.safe_dump(chosen, sort_keys=False).encode())
        tags = {
            "study": self.search.study,
            "label": TUNED,
            "tuned_by": self.search.name,
            "trial": str(best.number),
        }
        args, name = self.search.args(best.params, final=True), f"{TUNED}-seed{self.search.seed}"
        job = self.fit(args, self.search.study, name, tags)
        codes: list[int] = []

        def ended(running: RunningJob, code: int) -> None:
            codes.append(code)
            if code:
                self.display.failed(job.name, job, code)

        self.pool.run([job], ended, self.display.look)
        if codes == [0]:
            found = f"best of {self.search.wanted} trials: {json.dumps(best.params)}"
            self.display.line(f"{found}; run directory {self.run_of(job)}")
        return codes == [0]


def open_search(search: Search, folder: Path, resolve: Callable[[list[str]], str]) -> optuna.Study:
    """Begin or continue the search in the folder's database; one all of whose trials failed is
    begun anew.

    Raises:
        InputError: it was begun with another space, metric or configuration.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = sqlite_uri((folder / DATABASE).absolute())
    name = f"{search.name}: {search.label}" if search.label else search.name
    create = partial(
        optuna.create_study,
        storage=storage,
        study_name=name,
        direction=optuna_direction(search),
        load_if_exists=True,
        pruner=optuna.pruners.MedianPruner(n_startup_trials=4)
        if search.prune
        else optuna.pruners.NopPruner(),
    )
    study = create()
    drawn = _drawn(search, study)
    if len(drawn) >= search.wanted and {trial.state for trial in drawn} == {TrialState.FAIL}:
        optuna.delete_study(study_name=name, storage=storage)
        study, drawn = create(), []
    asked, made = check_asked(search, study, folder, resolve), len(drawn)
    if made > search.wanted:
        given = f"{search.path}: trials: {search.wanted}"
        what = f" of {search.label}" if search.label else ""
        rule = f"{made}{what} were begun in {folder}, and what is chosen is the best of all"
        raise InputError(given, rule, f"write trials: {made} or more, or remove that folder")
    study.set_user_attr("search", asked)
    return study


def check_asked(
    search: Search, study: optuna.Study, folder: Path, resolve: Callable[[list[str]], str]
) -> dict[str, Any]:
    """Return what its trials have in common, and check that earlier ones of Optuna's study have it
    as well.

    Raises:
        InputError: they were made with another space, metric or configuration.
    """
    settings = flatten(resolved_settings(search.args(search.corners()[0]), resolve))
    asked: dict[str, Any] = {
        "space": repr(dict(search.space)),
        "metric": search.metric_of(CLASSIFICATION),
        "direction": optuna_direction(search),
        "prune": search.prune,
        "seeds": [*search.seeds],
        "settings": {key: value for key, value in settings.items() if not is_free(key, settings)},
    }
    before = study.user_attrs.get("search")
    begun = {**asked, "seeds": [search.seed], **before} if before else asked
    changed = [
        f"{key}: {begun[key]} -> {asked[key]}"
        for key in ("metric", "direction", "prune", "seeds")
        if begun[key] != asked[key]
    ]
    changed += (
        ["another space"]
        if begun["space"] != asked["space"]
        else changed_settings(begun["settings"], asked["settings"])
    )
    if changed:
        shown = listed_changes(changed)
        rename = f"change 'study: {search.study}' in {search.path} to another name"
        if search.label:
            shown, rename = f"of {search.label}: {shown}", "move it away"
        rule = f"its trials were made with another configuration ({shown})"
        raise InputError(f"{folder}", rule, f"remove that folder to search anew, or {rename}")
    return asked


def _drawn(search: Search, study: optuna.Study) -> list[FrozenTrial]:
    """Return the trials that were drawn completely, but for those that were drawn before."""
    return [
        trial
        for trial in study.get_trials()
        if set(trial.params) == set(search.space) and REPEATED not in trial.user_attrs
    ]


def optuna_direction(search: Search) -> Direction:
    """Return the direction of Optuna's search, which begins before a run tells its task."""
    return search.direction_of(CLASSIFICATION)


def metric_of(run: Path, metric: str) -> float | None:
    """Return a metric of a finished run: from its summary, else from the last round that has it;
    None: neither has a number."""
    value = read_json(run / "metadata.json").get(metric)
    rows = [row[metric] for row in read_metrics(run) if metric in row]
    found = float(value) if value is not None else rows[-1] if rows else nan
    return None if isnan(found) else found


def number_of(job: Job) -> int:
    return int(SEED.sub("", job.name).rpartition("-")[2])
