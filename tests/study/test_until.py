"""A sweep that adds seeds stops where the results in the order of seeds say, and nothing else moves
that point."""

from __future__ import annotations

import errno
import json
import random
import shutil
from collections import deque
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from compared import comparable
from places import CONFIGS
from synthetic_runs import CLASSIFICATION, make_run, make_study

from fl_lightning.__main__ import main
from fl_lightning.errors import InputError
from fl_lightning.study.execute import session
from fl_lightning.study.execute.cells import StudyCells
from fl_lightning.study.execute.jobs import RunningJob
from fl_lightning.study.execute.until import UntilSession, with_flags
from fl_lightning.study.plan.study import Study
from fl_lightning.study.report.compare import compare
from fl_lightning.study.report.comparison import Comparison
from fl_lightning.study.report.document import report
from fl_lightning.study.report.looks import counted
from fl_lightning.study.report.markdown import HOW_TO_READ, IN_A_SEQUENCE
from fl_lightning.study.results.gather import gather
from fl_lightning.study.results.seeds import complete_seeds
from fl_lightning.study.statistics import sequence_interval
from fl_lightning.tasks import LanguageModelling, Task

STUDY = """
study: small
config: {configs}/fedavg.yaml
seeds: [2, 3, 4]
methods: {{A: {{}}, B: {{settings: {{trainer.max_rounds: 7}}}}}}
metric: final/accuracy
criteria:
  - metric("final/accuracy", A) - metric("final/accuracy", B) >= 0.0
  - metric("final/accuracy", A) - metric("final/accuracy", B) <= 0.03
  - upload(A) <= upload(B)
  - time(A) <= 0.5 * time(B)
until: {{max_seeds: 20}}
"""


def accuracy_of(label: str, seed: int) -> float:
    draw = random.Random(seed)
    base, gain = draw.gauss(0.8, 0.05), draw.gauss(0.01, 0.006)
    return base + gain * (label == "A")


def resolve(args: list[str]) -> str:
    """Stands in for the parser: the flags as they are."""
    return yaml.safe_dump(
        dict(word.removeprefix("--").split("=", 1) for word in args if "=" in word)
    )


class Process:
    stopped = False

    def terminate(self):
        self.stopped = True


class Cells:
    """Stands in for the pool: cells end in any order, fail when they are told to, and the sweep can
    be killed before any of them ends."""

    def __init__(
        self,
        slots: int,
        lives: int = 1000,
        failing: str = "",
        seed: int = 0,
        task: Task = CLASSIFICATION,
    ) -> None:
        self.slots, self.lives, self.failing = [{}] * slots, lives, failing
        self.choose, self.task = random.Random(seed), task
        self.running: list[RunningJob] = []
        self.started: list[str] = []
        self.session: UntilSession

    def run(self, jobs, ended, look):
        following, others = deque(), iter(jobs)
        while True:
            while len(self.running) < len(self.slots):
                job = following.popleft() if following else next(others, None)
                if job is None:
                    break
                self.started.append(job.name)
                self.running.append(RunningJob(job, Process(), 0))
            if not self.running:
                return
            look(self.running)
            one = self.running.pop(self.choose.randrange(len(self.running)))
            code = 143 if one.process.stopped else int(one.job.name == self.failing)
            if not code:
                if self.lives == 0:
                    raise SystemExit(143)
                self.lives -= 1
                state = self.session.cells[one.job.name]
                label, seed = state.cell.method, state.cell.seed
                config = {
                    key: value for key, value in state.config.items() if key != "seed_everything"
                }
                made = {"config": config, "task": self.task}
                make_run(self.session.cells.folder, label, seed, accuracy_of(label, seed), **made)
            if job := ended(one, code):
                following.append(job)

    def terminate(self):
        for one in self.running:
            one.process.terminate()


def sweep(root: Path, *, text: str = STUDY, slots: int = 1, **pool) -> tuple[Cells, dict]:
    """One session, and what its file says then."""
    root.mkdir(exist_ok=True)
    (root / "study.yaml").write_text(text.format(configs=CONFIGS))
    cells = StudyCells.plan(Study.read(root / "study.yaml"), root, resolve)
    cells.folder.mkdir(exist_ok=True)
    made = Cells(slots, **pool)
    made.session = UntilSession(cells, made, False, jobs_at_a_time=slots)
    try:
        made.session.run()
    except SystemExit as end:
        made.code = end.code
    return made, json.loads((cells.folder / "until.json").read_text())


def first_decided(listed: int = 3, most: int = 20) -> int:
    """The first number of seeds at which both intervals decide; worked out without the code of
    reports."""
    differences = [accuracy_of("A", seed) - accuracy_of("B", seed) for seed in range(2, 2 + most)]
    for count in range(listed, most + 1):
        low, high = sequence_interval(differences[:count])
        if (low >= 0 or high < 0) and (high <= 0.03 or low > 0.03):
            return count
    raise AssertionError


def test_a_sweep_of_another_task_ends_by_its_primary_metric(tmp_path):
    """The same numbers as perplexities end it at the same seed; a criterion on accuracy ends it at
    the first look, and not after twenty seeds without one."""
    text = STUDY.replace('metric("final/accuracy", ', "primary(")
    _, said = sweep(tmp_path, text=text, task=LanguageModelling())
    assert (said["ending"], len(said["seeds"])) == ("decided", first_decided())
    shutil.rmtree(tmp_path)
    text = text.replace("- upload", "- accuracy(A) >= 0.1\n  - upload")
    with pytest.raises(InputError, match=r"metric of the runs is perplexity; write primary\(A\)"):
        sweep(tmp_path, text=text, task=LanguageModelling())
    assert len(list((tmp_path / "small").glob("*-seed*"))) == 6


def report_of(root: Path) -> dict:
    return json.loads(json.dumps(report(Comparison(counted(gather("small", root))))))


@pytest.mark.slow
@pytest.mark.essential
def test_seeds_that_count_do_not_depend_on_order_jobs_or_kills(tmp_path):
    """One cell at a time and never killed, against three at a time, ended in random order and
    killed after every few cells: the same seeds, verdicts and report."""
    count = first_decided()
    assert 5 <= count <= 12
    seeds = [*range(2, 2 + count)]
    whole, said = sweep(tmp_path / "whole")
    assert whole.started == [f"{label}-seed{seed}" for seed in seeds for label in "AB"]
    assert (said["seeds"], said["ending"], said["undecided"]) == (seeds, "decided", [])
    first = report_of(tmp_path / "whole")
    assert first["seeds"] == seeds
    assert [one["verdict"] for one in first["criteria"]] == ["holds"] * 3
    for trial in range(4):
        root = tmp_path / f"killed{trial}"
        for lives in (1, 4, 0, 3, 1000):
            last, said = sweep(root, slots=3, lives=lives, seed=trial)
        assert (said["seeds"], said["ending"]) == (seeds, "decided")
        assert len(last.started) < 2 * count
        assert comparable(report_of(root)) == comparable(first)
        again, said = sweep(root, slots=3)
        assert (again.started, said["seeds"]) == ([], seeds)


def test_the_report_says_which_interval_decides_and_where_the_sweep_stopped(tmp_path):
    sweep(tmp_path)
    compare("small", tmp_path / "report", tmp_path)
    found = json.loads((tmp_path / "report" / "report.json").read_text())
    count = first_decided()
    differences = [accuracy_of("A", seed) - accuracy_of("B", seed) for seed in range(2, 2 + count)]
    judged = found["criteria"][0]["levels"][0]
    assert (judged["low"], judged["high"]) == pytest.approx(
        sequence_interval(differences), abs=1e-9
    )
    assert (found["interval"], found["stopping"]["ending"]) == ("confidence sequence", "decided")
    assert found["stopping"]["seeds"] == found["seeds"]
    text = (tmp_path / "report" / "report.md").read_text()
    assert "confidence sequence" in text
    assert f"no seed is added after {count} seeds" in text
    assert "t interval decides" not in text
    assert all(fixed in HOW_TO_READ and fixed not in text for fixed in IN_A_SEQUENCE)
    assert "p (sequence)" in text


def test_p_is_the_sequential_one_in_a_study_that_adds_seeds(tmp_path):
    """After four seeds a fixed-n p of 0.03 is below 0.05 and the sequential one is not."""
    text = (
        STUDY[: STUDY.index("criteria:")]
        + "criteria: ['p(A, B) < 0.05']\nuntil: {{max_seeds: 20}}\n"
    )
    sweep(tmp_path, text=text)
    found = report_of(tmp_path)
    differences = [accuracy_of("A", seed) - accuracy_of("B", seed) for seed in found["seeds"]]
    assert sequence_interval(differences)[0] > 0 >= sequence_interval(differences[:-1])[0]
    assert found["criteria"][0]["verdict"] == "holds"


def test_budgets_end_it_and_more_budget_goes_on(tmp_path):
    undecidable = STUDY.replace("- upload", '- metric("final/accuracy", A) >= 0.8\n  - upload')
    pool, said = sweep(tmp_path, text=undecidable.replace("20", "5"), slots=2)
    assert (said["ending"], said["seeds"]) == ("max_seeds", [2, 3, 4, 5, 6])
    assert said["undecided"][-1] == 'metric("final/accuracy", A) >= 0.8'
    assert report_of(tmp_path)["stopping"]["ending"] == "max_seeds"
    pool, said = sweep(tmp_path, text=undecidable.replace("20", "7"), slots=2)
    assert said["ending"] == "max_seeds"
    assert {name.split("seed")[1] for name in pool.started} == {"7", "8"}
    spent = undecidable.replace("max_seeds: 20", "max_seeds: 20, max_hours: 0.5")
    (tmp_path / "small" / "until.json").write_text(json.dumps({"seconds": 1900}))
    pool, said = sweep(tmp_path, text=spent)
    assert (pool.started, said["ending"], len(said["seeds"])) == ([], "max_hours", 7)
    assert said["seconds"] >= 1900


def test_no_seed_is_added_for_what_no_seed_can_decide(tmp_path):
    """A target that a seed never reaches leaves a criterion undecided, however many seeds come."""
    text = STUDY.replace("- upload", "- rounds(A) <= rounds(B)\n  - upload")
    _, said = sweep(tmp_path, text=text + "target_accuracy: 0.999\n")
    assert (said["ending"], len(said["seeds"])) == ("decided", first_decided())
    found = report_of(tmp_path)
    assert [one["verdict"] for one in found["criteria"]] == ["holds", "holds", "undecided", "holds"]
    assert "lost" not in found["criteria"][2]["levels"][0]  # the sweep alone needs it


def test_a_seed_is_complete_where_the_test_of_a_run_could_skip_all_that_was_asked(tmp_path):
    """As a sweep has it, which would look at nothing otherwise. A test of other weights is none."""
    criteria = ['metric("final/accuracy", A) >= 0.9']
    keys = {"test": ["membership"], "until": {"max_seeds": 9}, "criteria": criteria}
    accuracies = {"A": {0: 0.5, 1: 0.51, 2: 0.52}}
    folder = make_study(tmp_path, accuracies, name="small", run={"tested": {}}, **keys)
    assert complete_seeds(gather("small", tmp_path)) == [0, 1, 2]
    assert counted(gather("small", tmp_path)).stopping.seeds == (0, 1, 2)
    file = folder / "A-seed1/test.json"
    file.write_text(json.dumps({"round": 5, "metrics": {}, "weights_sha256": f"{7:064x}"}))
    assert complete_seeds(gather("small", tmp_path)) == [0]
    file.unlink()
    assert complete_seeds(gather("small", tmp_path)) == [0]


@pytest.mark.slow
@pytest.mark.essential
def test_what_was_registered_is_decided_too_when_the_criteria_were_changed(tmp_path):
    """An easier criterion is put in place of the registered ones: the sweep goes on until these are
    decided, and both verdicts are on the seeds that their own looks ended at."""
    count = first_decided()
    _, said = sweep(tmp_path, lives=7)
    easy = (
        STUDY[: STUDY.index("criteria:")] + "criteria: ['metric(\"final/accuracy\", A) >= 0.2']\n"
    )
    _, said = sweep(tmp_path, text=easy + "until: {{max_seeds: 20}}\n", slots=2)
    assert said["ending"] == "decided"
    assert len(said["seeds"]) < count
    compare("small", tmp_path / "report", tmp_path)
    found = json.loads((tmp_path / "report" / "report.json").read_text())
    assert len(found["seeds"]) == len(said["seeds"])
    assert len({run.name for run in (tmp_path / "small").glob("A-seed*")}) >= count
    text = (tmp_path / "report" / "report.md").read_text()
    assert text.splitlines()[2].startswith("**Not as registered**")


def test_a_cell_that_fails_ends_it_since_no_seed_after_it_can_count(tmp_path):
    pool, said = sweep(tmp_path, slots=2, failing="A-seed4")
    assert (pool.code, said["ending"], said["seeds"]) == (1, "failed", [])
    assert not any(name.endswith("seed8") for name in pool.started)
    compare("small", tmp_path / "report", tmp_path)
    assert "a cell failed, and seeds count in order" in (tmp_path / "report/report.md").read_text()
    pool, said = sweep(tmp_path, slots=2)
    assert pool.started[0] == "A-seed4"
    assert (said["ending"], len(said["seeds"])) == ("decided", first_decided())


def test_seeds_before_a_cell_that_fails_are_still_looked_at(tmp_path):
    """A cell of a later seed fails while the one that decides is at work."""
    count = first_decided()
    failing = f"A-seed{2 + count}"
    seen = [sweep(tmp_path / str(n), slots=4, failing=failing, seed=n) for n in range(8)]
    assert {(said["ending"], len(said["seeds"])) for _, said in seen} == {("decided", count)}
    assert {getattr(pool, "code", 0) for pool, _ in seen} == {0}


def test_a_sweep_that_a_full_disk_stops_ends_its_record_in_mlflow(tmp_path, monkeypatch):
    ends = []

    def no_room(*_) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def begin(_) -> None:
        monkeypatch.setattr(StudyCells, "write", no_room)
        monkeypatch.setattr(UntilSession, "save", no_room)

    monkeypatch.setattr(UntilSession, "begin", begin)
    monkeypatch.setattr(session, "end_study", lambda run, folder, status: ends.append(status))
    with pytest.raises(OSError, match="No space left") as raised:
        sweep(tmp_path)
    assert raised.value.__context__ is None
    assert ends == ["KILLED"]


def test_a_study_that_cannot_be_decided_so_is_refused(tmp_path):
    def read(old: str, new: str) -> Study:
        (tmp_path / "study.yaml").write_text(STUDY.replace(old, new).format(configs=CONFIGS))
        return Study.read(tmp_path / "study.yaml")

    for old, new, said in [
        ("max_seeds: 20", "max_seeds: 2", "max_seeds 2.*lists 3 seeds.*write 3 or more"),
        (
            "max_seeds: 20",
            "max_seeds: 1000000000",
            "max_seeds: 1000000000; a study has at most 10000",
        ),
        ("{{max_seeds: 20}}", "bored", "until: 'bored'.*it is decided, or a mapping"),
        ("max_seeds: 20", "max_hours: 0", "until.max_hours: 0.*above 0"),
        ("max_seeds: 20", "max_sed: 2", "until.max_sed.*write until.max_seeds"),
        (
            STUDY[STUDY.index("criteria:") : STUDY.index("until:")],
            "",
            "until; seeds are added until criteria.*none",
        ),
    ]:
        with pytest.raises(InputError, match=f"(?s){said}"):
            read(old, new)
    assert read("{{max_seeds: 20}}", "decided").until.max_seeds == 50
    fixed = read("until: {{max_seeds: 20}}", "")
    with pytest.raises(InputError, match=r"--max_seeds 9.*add --until decided"):
        with_flags(fixed, None, 9, None)
    with pytest.raises(InputError, match=r"--max_seeds 2.*lists 3 seeds"):
        with_flags(fixed, "decided", 2, None)
    with pytest.raises(InputError, match=r"max_seeds: 1000000000; a study has at most 10000"):
        with_flags(fixed, "decided", 1_000_000_000, None)
    many = replace(fixed, methods=dict.fromkeys(map(str, range(201)), fixed.methods["A"]))
    with pytest.raises(InputError, match="10050 cells"):
        with_flags(many, "decided", None, None)
    with pytest.raises(InputError, match=r"--max_hours 0.*above 0"):
        with_flags(fixed, "decided", None, 0.0)
    assert with_flags(fixed, None, None, None).until is None
    changed = with_flags(read("", ""), None, None, 2.5)
    assert (changed.until.max_seeds, changed.until.max_hours) == (20, 2.5)
    (tmp_path / "copy.yaml").write_text(changed.to_yaml())
    assert Study.read(tmp_path / "copy.yaml").until == changed.until


@pytest.mark.slow
def test_from_the_command_line(tmp_path, monkeypatch, capfd):
    """A study without the entry, the flags, and a report that reads the study file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    settings = (
        "settings: {trainer.max_rounds: 1, data.num_clients: 4, data.partition.init_args.beta: 5.0}"
    )
    Path("study.yaml").write_text(
        f"study: small\nconfig: {CONFIGS}/fedavg.yaml\n{settings}\nseeds: [0]\nmetric: final/accuracy\n"
        "methods: {A: {}, B: {settings: {trainer.local_epochs: 1}}}\n"
        "criteria: ['metric(\"final/accuracy\", A) >= 0.1', upload(A) <= upload(B)]\n"
    )
    command = ["sweep", "--config", "study.yaml", "--until", "decided", "--max_seeds", "2"]
    assert main([*command, "--dry_run", "true"]) == 0
    assert "2 at most" in capfd.readouterr().out
    assert main([*command, "--jobs", "2", "--logger", "false"]) == 0
    said = capfd.readouterr().err
    assert "small: after 2 seeds (0, 1), max_seeds is reached; undecided: `metric(" in said
    assert main(["compare", "--study", "study.yaml", "--out", "report"]) == 0
    found = json.loads(Path("report/report.json").read_text())
    assert (found["seeds"], found["stopping"]["ending"]) == ([0, 1], "max_seeds")
    assert [one["verdict"] for one in found["criteria"]] == ["undecided", "holds"]
