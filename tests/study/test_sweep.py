"""A study becomes runs, whatever happens on the way."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from places import CONFIGS
from rich.console import Console

from fl_lightning.__main__ import main
from fl_lightning.config.settings import settings_hash
from fl_lightning.errors import InputError
from fl_lightning.probing import PROBES
from fl_lightning.study.execute import jobs, lock, mlflow_page
from fl_lightning.study.execute.cells import CellState, StudyCells
from fl_lightning.study.execute.display import Display
from fl_lightning.study.execute.estimate import (
    RemainingCost,
    RoundCost,
    find_cost,
    remaining_cost,
    show_plan,
)
from fl_lightning.study.execute.jobs import Job, Pool, slots_for
from fl_lightning.study.execute.session import SweepSession
from fl_lightning.study.execute.shards import WHOLE
from fl_lightning.study.execute.sweep import planned
from fl_lightning.study.plan.registration import Registration
from fl_lightning.study.plan.study import Cell, Study
from fl_lightning.study.report.tables import ReportTable, at
from fl_lightning.study.results import gather
from fl_lightning.tracking.loggers import Tracking
from fl_lightning.tracking.runs import begin_study, end_study

STUDY = """
study: small
config: {configs}/kd_default.yaml
settings:
  trainer.max_rounds: 2
  trainer.eval_every: 30
  trainer.max_local_steps: 2
  data.num_clients: 4
  data.partition.init_args.beta: 5.0
  trainer.callbacks: [{{class_path: callbacks.LabelNoise, init_args: {{round: 2}}}}]
seeds: [3]
methods:
  Long: {{settings: {{trainer.max_rounds: 60}}}}
  Broken: {{settings: {{data.public_examples: {public}}}}}
"""
SLOW = """
import time
from pathlib import Path

from fl_lightning.hooks import Meter


class Slow(Meter):
    \"\"\"Until there is a file `go` a round takes a second, so that no run has ended before it is killed.\"\"\"

    def on_round_end(self, record, context):
        if not Path("go").exists():
            time.sleep(1)
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """In an empty folder, with two threads less than the machine may have: none is left to
    chance."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def write(text: str = STUDY, public: int = 100_000) -> None:
        Path("study.yaml").write_text(text.format(configs=CONFIGS, public=public))

    return write


def start(*arguments: str) -> subprocess.Popen:
    """A sweep in a process of its own, that can be killed."""
    setup = (
        "import sys; from fl_lightning.__main__ import main; sys.exit(main(['sweep', '--config', "
        "'study.yaml', *sys.argv[1:]]))"
    )
    return subprocess.Popen([sys.executable, "-c", setup, "--logger", "false", *arguments])


def rows(run: str, name: str = "metrics.csv") -> list[dict[str, str]]:
    with suppress(FileNotFoundError), open(f"{run}/{name}") as file:
        return list(csv.DictReader(file))
    return []


def outcome(run: str) -> tuple:
    """All that must be the same: everything but times."""
    metadata = json.loads(Path(run, "metadata.json").read_text())
    metrics = [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows(run)]
    return metadata["weights_sha256"], metrics, rows(run, "ledger.csv")


def wait_for(condition, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def cells() -> dict[str, dict]:
    return {
        entry["label"]: entry for entry in json.loads(Path("runs/small/cells.json").read_text())
    }


@pytest.mark.slow
@pytest.mark.essential
def test_killed_and_continued_a_study_is_as_if_never_killed(write, capfd, tmp_path, monkeypatch):
    """One cell is at work when the sweep is killed, one fails, and once it is mended only that one
    runs again."""
    noise = '{"class_path": "callbacks.LabelNoise", "init_args": {"round": 2}}'
    slow = STUDY.replace(
        "[{{class_path: callbacks.LabelNoise, init_args: {{round: 2}}}}]",
        f"[{noise}, {{class_path: slow.Slow}}]".replace("{", "{{").replace("}", "}}"),
    )
    Path("slow.py").write_text(SLOW)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.syspath_prepend(tmp_path)
    write(slow)
    before = start("--jobs", "1")
    wait_for(lambda: len(rows("runs/small/Long-seed3")) >= 3)
    before.kill()
    before.wait()
    wait_for(lambda: "stopped in round" in Path("runs/small/logs/Long-seed3.log").read_text())
    Path("go").touch()
    capfd.readouterr()
    assert main(["sweep", "--config", "study.yaml", "--jobs", "2", "--logger", "false"]) == 1
    said = capfd.readouterr().err
    after = json.loads(Path("runs/small/Long-seed3/metadata.json").read_text())["resumed"][0][
        "after_round"
    ]
    assert 3 <= after < 60
    assert f"Long-seed3 continues after round {after}" in said
    assert "Broken-seed3 failed (fit, exit code 2)" in said
    assert "public_examples" in said  # the last lines of its log
    assert "Long-seed3 finished: accuracy 0." in said
    assert {label: entry["status"] for label, entry in cells().items()} == {
        "Long": "finished",
        "Broken": "failed",
    }
    assert cells()["Long"] | {"hash": ""} == {"name": "Long-seed3", "label": "Long", "seed": 3, "levels": {}, "hash": "",
                                              "status": "finished", "run": "Long-seed3", "threads": 1}  # fmt: skip
    registration = Registration.read(Path("runs/small"))
    assert json.loads(Path("runs/small/Long-seed3/metadata.json").read_text())["tags"] == {
        "study": "small",
        "label": "Long",
        # of the sweep that was killed, and of the next
        "registration": registration.first.sha256[:16],
    }
    assert registration.first.runs == 0
    assert registration.first.plan["methods"]["Long"]["changes"]["trainer.max_rounds"] == 60
    small = [
        "--trainer.max_rounds=60",
        "--trainer.eval_every=30",
        "--trainer.max_local_steps=2",
        "--data.num_clients=4",
        "--data.partition.init_args.beta=5.0",
        "--trainer.logger=false",
    ]
    alone = [
        "fit",
        "--config",
        f"{CONFIGS}/kd_default.yaml",
        *small,
        f'--trainer.callbacks=[{noise}, {{"class_path": "slow.Slow"}}]',
        "--seed_everything=3",
        "--trainer.run_name=alone",
    ]
    assert main(alone) == 0
    assert outcome("runs/small/Long-seed3") == outcome("runs/kd_default/alone")

    write(slow, public=5)
    capfd.readouterr()
    assert main(["sweep", "--config", "study.yaml", "--dry_run", "true"]) == 0
    assert "2 cells, 1 to run" in capfd.readouterr().out
    logs = {path.name: path.stat().st_size for path in Path("runs/small/logs").iterdir()}
    assert main(["sweep", "--config", "study.yaml", "--logger", "false"]) == 0
    assert "what holds     python -m fl_lightning compare --study small" in capfd.readouterr().err
    changed = [
        path.name
        for path in Path("runs/small/logs").iterdir()
        if path.stat().st_size != logs[path.name]
    ]
    assert changed == ["Broken-seed3.log"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"),
    [pytest.param(signal.SIGINT, 130, marks=pytest.mark.essential), (signal.SIGTERM, 143)],
)
def test_interrupted_a_sweep_ends_its_cells_with_their_checkpoints(write, capfd, number, code):
    write(STUDY.replace("trainer.max_rounds: 60", "trainer.max_rounds: 100000"))
    before = start("--jobs", "2")
    wait_for(lambda: len(rows("runs/small/Long-seed3")) >= 2)
    second = subprocess.run(
        [sys.executable, "-m", "fl_lightning", "sweep", "--config", "study.yaml"],
        capture_output=True,
        text=True,
    )
    assert second.returncode == 2
    assert "another process is running this study" in second.stderr
    before.send_signal(number)
    assert before.wait(240) == code
    assert cells()["Long"]["status"] == "interrupted"
    done = json.loads(Path("runs/small/Long-seed3/metadata.json").read_text())
    assert done["status"] == "interrupted"
    assert Path(
        f"runs/small/Long-seed3/checkpoints/round_{len(rows('runs/small/Long-seed3')):06d}"
    ).exists()
    assert "the same command continues" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.essential
def test_a_bad_cell_is_refused_before_anything_starts(write, capsys):
    for old, new, said in [
        (
            "Broken: {{settings: {{data.public_examples: {public}}}}}",
            "Broken: {{settings: {{model.alfa: 1}}}}",
            "alfa",
        ),
        (
            "Broken: {{settings: {{data.public_examples: {public}}}}}",
            "Broken: {{settings: {{model.alpha: -1}}}}",
            "weighs 0 or more",
        ),
        ("seeds: [3]", "seeds: [3]\ncriteria: [accuracy(Lang) > 0]", "Lang"),
    ]:
        assert old in STUDY
        write(STUDY.replace(old, new))
        assert main(["sweep", "--config", "study.yaml"]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1
    assert "cell Broken-seed3" not in error
    assert main(["sweep", "--config", "study.yaml", "--jobs", "0"]) == 2
    assert main(["sweep", "--config", "nothing.yaml"]) == 2
    assert main(["sweep"]) == 2
    assert [path.name for path in Path().iterdir()] == ["study.yaml"]


def test_a_root_below_the_home_is_where_fit_writes(write, tmp_path, monkeypatch):
    write(STUDY.replace("  Broken: {{settings: {{data.public_examples: {public}}}}}\n", ""))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    looked_in = []
    monkeypatch.setattr(SweepSession, "run", lambda self: looked_in.append(self.cells.folder))
    assert main(["sweep", "--config", "study.yaml", "--root", "~/runs"]) == 0
    assert looked_in == [tmp_path / "home/runs/small"]
    assert not Path("~").exists()
    assert gather.locate("small", Path("~/runs"), must_exist=False)[1] == looked_in[0]


def python(code: str, name: str, log: Path) -> Job:
    return Job(name, ["-c", code, name], log / f"{name}.log")


@pytest.fixture
def pool():
    made = Pool([{"PLACE": "a"}, {"PLACE": "b"}], program=[sys.executable])
    yield made
    made.stop()


@pytest.mark.parametrize("places", [1, 2])
def test_a_pool_has_as_many_jobs_as_places_and_what_follows_goes_next(places, tmp_path):
    """The second half of a cell (its test) comes before other cells begin."""
    order, most = [], []

    def ended(running, code):
        order.append((running.job.name, code))
        return (
            python("", f"{running.job.name}+", tmp_path)
            if code == 0 and "+" not in running.job.name
            else None
        )

    code = "import os, sys; print(os.environ['PLACE']); sys.exit(sys.argv[1] == 'b')"
    pool = Pool([{"PLACE": place} for place in "ab"[:places]], program=[sys.executable])
    try:
        pool.run(
            [python(code, name, tmp_path) for name in "abc"],
            ended,
            lambda running: most.append(len(running)),
        )
    finally:
        pool.stop()
    in_turn = [("a", 0), ("a+", 0), ("b", 1), ("c", 0), ("c+", 0)]
    assert order == in_turn if places == 1 else sorted(order) == in_turn
    assert max(most) == places
    assert (tmp_path / "a.log").read_text().splitlines()[-1] in "ab"


def test_a_pool_that_is_told_to_stop_starts_nothing_that_would_follow(pool, tmp_path, monkeypatch):
    """Both jobs have ended at one look: of the first a test would follow, the second ends the
    sweep."""
    monkeypatch.setattr(jobs, "POLL_SECONDS", 2.0)
    order = []

    def ended(running, code):
        order.append(running.job.name)
        if running.job.name == "b":
            pool.terminate()
        return python("", "a+", tmp_path) if running.job.name == "a" else None

    pool.run([python("", name, tmp_path) for name in "ab"], ended)
    assert order == ["a", "b"]


def test_a_stopped_pool_leaves_no_process(pool, tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "STOP_SECONDS", 0.5)
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); "
        "time.sleep(60)"
    )
    seen = []

    def look(running):
        seen[:] = [one.process for one in running]
        if all("up" in one.job.tail() for one in running) and len(running) == 2:
            os.kill(os.getpid(), signal.SIGINT)

    willing = "import time; print('up', flush=True); time.sleep(60)"
    with pytest.raises(KeyboardInterrupt):
        pool.run(
            [python(stubborn, "a", tmp_path), python(willing, "b", tmp_path)],
            lambda running, code: None,
            look,
        )
    assert [process.returncode for process in seen] == [-signal.SIGKILL, -signal.SIGTERM]


def test_a_process_whose_parent_is_gone_stops():
    """Its pipe ends; without a parent that dies, since the end of the pipe is all that it goes
    by."""
    code = (
        "import threading, time\n"
        "from fl_lightning.study.execute.worker import leave_with_parent\n"
        "threading.Thread(target=leave_with_parent, args=[0], daemon=True).start()\n"
        "print('up', flush=True)\n"
        "time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"up\n"
        assert process.poll() is None
        process.stdin.close()
        assert process.wait(10) == -signal.SIGTERM


def test_a_study_waits_for_the_cells_of_a_sweep_that_was_killed_and_for_no_other_sweep(
    tmp_path, monkeypatch
):
    with lock.only_one(tmp_path) as held:
        with (
            pytest.raises(InputError, match="another process is running this study"),
            lock.only_one(tmp_path),
        ):
            pass
        orphan = subprocess.Popen(
            [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=held
        )
    monkeypatch.setattr(lock, "ORPHANS_LIMIT", 0.3)
    with pytest.raises(InputError, match="do not end"), lock.only_one(tmp_path):
        pass
    monkeypatch.setattr(lock, "ORPHANS_LIMIT", 30.0)
    threading.Timer(0.3, lambda: orphan.communicate(b"\n")).start()
    with lock.only_one(tmp_path):
        assert orphan.wait(10) == 0


def test_what_is_left_is_estimated_from_runs_of_the_same_method(tmp_path):
    """By hand: 98 rounds of 3 s and 8 bytes and a start of 10 s; the first round is a warm-up."""
    (tmp_path / "metrics.csv").write_text("round,time/round,comm/total_bytes\n1,50,8\n2,3,8\n")
    begun = CellState(
        Cell("A", 0, {}, []), {"trainer.max_rounds": 100}, "", "interrupted", tmp_path
    )
    waiting = CellState(Cell("A", 1, {}, []), {"trainer.max_rounds": 100}, "")
    unknown = CellState(Cell("B", 0, {}, []), {"trainer.max_rounds": 100}, "")
    done = CellState(Cell("B", 1, {}, []), {"trainer.max_rounds": 100}, "", "finished")
    cells = StudyCells(None, tmp_path, str, WHOLE)  # type: ignore[arg-type]
    cells.states += [begun, waiting, unknown, done]
    known = {state.cell.name: state.metrics() for state in cells}
    costs = {state.cell.name: find_cost(cells, state, known) for state in cells}
    assert costs["A-seed1"] == RoundCost(3.0, 8.0, "A-seed0")
    assert remaining_cost(cells, costs, known) == RemainingCost(
        10 + 98 * 3 + 10 + 100 * 3, 198 * 8, ["B"]
    )


TESTED = {
    "chosen": "last",
    "weights_sha256": "w",
    "round": 4,
    "probes": {"clean": {}},
    "skipped": {"pgd": ["no images"]},
}


def test_a_cell_is_tested_as_the_study_now_asks_and_with_its_present_weights(tmp_path):
    (tmp_path / "metadata.json").write_text(
        json.dumps({"weights_sha256": "w", "final/best_val_round": 4})
    )
    record = CellState(Cell("A", 0, {}, []), {}, "", "finished", tmp_path)

    def is_tested(flags, **found):
        (tmp_path / "test.json").write_text(json.dumps({**TESTED, **found}))
        return record.is_tested(flags)

    assert is_tested({"probes": "clean,pgd"})
    assert is_tested({}, probes={name: {} for name in PROBES})
    assert is_tested(
        {"probes": "clean", "checkpoint": "best"}, chosen="best", weights_sha256="of round 4"
    )
    assert is_tested(
        {"probes": "clean", "checkpoint": "round_000002"},
        chosen="round_000002",
        round=2,
        weights_sha256="other",
    )
    assert not is_tested({})  # all
    assert not is_tested({"probes": "clean,fgsm"})
    assert not is_tested({"probes": "clean", "checkpoint": "best"})
    assert not is_tested({"probes": "clean"}, weights_sha256="of before")
    assert not is_tested({"probes": "clean", "checkpoint": "best"}, chosen="best", round=3)
    (tmp_path / "test.json").unlink()
    assert not record.is_tested({"probes": "clean"})


@pytest.mark.parametrize(
    ("metrics", "why"),
    [
        (None, "it has no rounds"),
        ("", "it has no rounds"),
        ("round,loss\n1,0.5,7\n", "metrics.csv cannot be read"),
        ("round,loss\n1,0.5\n", "metrics.csv has 1 rounds of 2"),
    ],
)
def test_a_run_without_its_metrics_is_not_finished_and_one_that_cannot_be_read_stops_nothing(
    tmp_path, caplog, metrics, why
):
    settings = "trainer.max_rounds: 2\n"
    for name, config in (("A-seed0-2", "[not: yaml"), ("A-seed0", settings)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(config)
    run = tmp_path / "A-seed0"
    about = {"status": "finished", "seed": 0, "partition_sha256": "1"}
    (run / "metadata.json").write_text(json.dumps(about))
    if metrics is not None:
        (run / "metrics.csv").write_text(metrics)
    record = CellState(
        Cell("A", 0, {}, []),
        {"trainer.max_rounds": 2},
        settings_hash({"trainer.max_rounds": 2}),
    )
    record.find_run(tmp_path)
    assert (record.run, record.status) == (run, "failed")
    assert "A-seed0-2/config.yaml; it cannot be read" in caplog.text
    plan = Console(record=True, width=300, file=io.StringIO())
    cells = StudyCells(SimpleNamespace(name="small"), tmp_path, str, WHOLE)  # type: ignore[arg-type]
    cells.states.append(record)
    show_plan(cells, 1, console=plan)
    said = " ".join(plan.export_text().split())
    assert f"A-seed0 is finished, but {why}" in said
    assert "(checkpoints/ has a copy of metrics.csv), or move the folder away" in said
    assert "1 to run" in said
    (run / "metrics.csv").write_text("round,loss\n1,0.5\n2,0.4\n")
    record.find_run(tmp_path)
    assert (record.status, record.problem) == ("finished", "")


def test_a_cell_keeps_the_threads_of_its_first_start_and_none_of_before(write, monkeypatch):
    write(public=7)
    study, root = Study.read("study.yaml"), Path("runs")
    monkeypatch.setattr(jobs, "cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS")

    cells = planned(StudyCells.plan(study, root, lambda args: "{}"), 4)
    cells["Long-seed3"].run = root / "small" / "Long-seed3"
    cells.folder.mkdir(parents=True)
    cells.write()
    after = planned(StudyCells.plan(study, root, lambda args: "{}"), 1)
    threads = {state.cell.method: state.threads for state in after}
    assert threads == {"Long": 2, "Broken": 8}


def test_gpus_are_dealt_in_turn():
    there = {"CUDA_VISIBLE_DEVICES": "1,3"}
    assert [slot["CUDA_VISIBLE_DEVICES"] for slot in slots_for(3, "auto", there)] == ["1", "3", "1"]
    assert slots_for(2, "1", there) == [{"CUDA_VISIBLE_DEVICES": "3"}] * 2
    assert slots_for(2, "auto", {"CUDA_VISIBLE_DEVICES": ""}) == [{}, {}]
    for wrong in ("2", "-1", "x", ""):
        with pytest.raises(InputError, match="numbers of GPUs"):
            slots_for(1, wrong, there)


def test_on_a_terminal_the_runs_at_work_are_a_live_table(tmp_path):
    (tmp_path / "metrics.csv").write_text("round,test/accuracy,time/round\n1,0.25,2.0\n2,,3.0\n")
    console = Console(force_terminal=True, width=100, record=True)
    display = Display(lambda: "1 of 2 cells finished", lambda job: (tmp_path, 60), console)
    running = jobs.RunningJob(Job("FedAvg-seed0", ["fit"], tmp_path / "log"), None, 0)
    display.shown = -1e9
    with display:
        display.look([running])
        assert display.live.is_started
        console.print(display.table([running]))
    text = console.export_text()
    for shown in ("1 of 2 cells finished", "FedAvg-seed0", "2/60", "0.250", "3.00"):
        assert shown in text


def test_names_in_square_brackets_are_shown_in_the_terminal_as_they_are(tmp_path):
    """They are no markup, in no table, and no smileys either."""
    name, levels = "A [bold] :heart:", {"axis": "[red]"}
    cell = Cell(name, 0, levels, [])
    state = CellState(cell, {"trainer.max_rounds": 2}, "", "interrupted", tmp_path)
    (tmp_path / "metrics.csv").write_text("round,time/round\n1,2.0\n")
    cells = StudyCells(SimpleNamespace(name="small"), tmp_path, str, WHOLE)  # type: ignore[arg-type]
    cells.states.append(state)
    console = Console(record=True, width=300, file=io.StringIO())
    show_plan(cells, 1, console=console)
    assert (
        console.export_text().count(cell.name) == 2
    )  # of the cell, and what its cost is known from
    display = Display(lambda: f"{cell.name} runs", lambda job: (tmp_path, 2), console)
    running = jobs.RunningJob(Job(cell.name, ["fit"], tmp_path / "log"), None, 0)
    console.print(display.table([running]))
    assert console.export_text().count(cell.name) == 2  # of the title, and of the row
    table = ReportTable.of(f"Bits{at(levels)}", ["layer", name], [[name, name]], caption="[C]")
    console.print(table.rich(console.width))
    said = console.export_text()
    assert said.count(name) == 3
    assert "axis=[red]: [C]" in said


@pytest.mark.slow
@pytest.mark.essential
def test_in_mlflow_the_runs_of_a_study_are_under_one_that_is_made_once(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folder = tmp_path / "runs" / "small"
    folder.mkdir(parents=True)
    (folder / "study.yaml").write_text("study: small\n")
    begun = begin_study("small", folder, {"cells": "2"}, mlflow_page.view_tags(["noise"]))
    end_study(begun, folder, "KILLED", files=["study.yaml"])
    assert begin_study("small", folder, {"cells": "3"}) == begun  # continued
    first = begun.run_id
    assert begin_study("small", tmp_path / "other" / "small", {"cells": "3"}) != begun
    tracking = Tracking(True, experiment="small", run_name="A-seed0", run_dir=folder / "A-seed0")
    tracking.start({}, {"label": "A", "noise": "on", "mlflow.parentRunId": first})
    tracking.finish("FINISHED", {})
    with closing(sqlite3.connect("mlflow.db")) as database:
        found = dict(
            database.execute(
                "select key, value from tags where run_uuid = ?", [tracking.run_id]
            ).fetchall()
        )
        parent = dict(
            database.execute("select key, value from tags where run_uuid = ?", [first]).fetchall()
        )
        (view,) = database.execute(
            "select value from experiment_tags where key = ?", [mlflow_page.TAG]
        ).fetchone()
        (status,) = database.execute(
            "select status from runs where run_uuid = ?", [first]
        ).fetchone()
    assert found["mlflow.parentRunId"] == first
    assert "tags.`noise`" in json.loads(view)["selectedColumns"]
    assert (found["label"], found["noise"]) == ("A", "on")
    assert (parent["mlflow.runName"], parent["cells"], status) == ("small", "3", "RUNNING")
    assert list(Path("mlartifacts").rglob("study.yaml"))
    # not a data base
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder / 'study.yaml'}")
    assert begin_study("small", folder, {}) is None
    assert "--logger false" in caplog.text


@pytest.mark.parametrize(
    ("installed", "fits"), [("3.17.2", True), ("3.18.0", False), ("4.0.0", False)]
)
def test_the_view_is_saved_for_the_mlflow_that_reads_it_alone(monkeypatch, installed, fits):
    monkeypatch.setattr(mlflow_page, "version", lambda name: installed)
    tags, link = mlflow_page.view_tags(["noise"]), mlflow_page.link("7", port=81)
    plain = "http://127.0.0.1:81/#/experiments/7/runs"
    if not fits:
        assert (tags, link) == ({}, plain)
        return
    view = json.loads(tags[mlflow_page.TAG])
    sections = {section["uuid"] for section in view["compareRunSections"]}
    assert {chart["metricSectionId"] for chart in view["compareRunCharts"]} == sections
    assert link.startswith(f"{plain}?viewStateShareKey={mlflow_page.TAG.rpartition('.')[2]}&")


@pytest.mark.slow
@pytest.mark.essential
@pytest.mark.usefixtures("write")
def test_a_sweep_ends_at_the_first_run_on_other_examples(capsys):
    """Before, it ran all the rest, and ``compare`` refused them all."""
    study = """
study: table
config: data.yaml
settings: {trainer.max_rounds: 1, trainer.callbacks: []}
seeds: [1]
methods:
  A: {}
"""
    data = {"train": "rows.csv", "test": "rows.csv", "target": "kind", "num_clients": 2}
    model = {"class_path": "FedAvg", "init_args": {"network": "mlp"}}
    config = {"model": model, "data": {"class_path": "TableData", "init_args": data}}
    Path("data.yaml").write_text(json.dumps(config))
    lines = [f"{i},{i % 2}" for i in range(40)]

    def sweep(first: str, *more: str) -> str:
        Path("rows.csv").write_text("\n".join(["size,kind", first, *lines]))
        methods = "".join(f"  {label}: {{}}\n" for label in more)
        Path("study.yaml").write_text(study + methods)
        with suppress(SystemExit):
            main(["sweep", "--config", "study.yaml", "--logger", "false"])
        return capsys.readouterr().err

    assert "what holds" in sweep("1,1")
    mixed = sweep("2,1", "B", "C")
    assert "A-seed1 and B-seed1 in runs/table" in mixed
    assert "they were trained on different examples" in mixed
    assert "the same command continues" not in mixed  # it would not
    assert not Path("runs/table/C-seed1").exists()
    again = sweep("1,1", "B", "C")
    assert "A-seed1 and B-seed1" in again
    assert "C-seed1 starts" not in again
    shutil.rmtree("runs/table/B-seed1")
    assert "what holds" in sweep("1,1", "B", "C")


@pytest.mark.parametrize(
    ("rounds", "stale"), [([2], ["mine"]), ([0], []), ([2, 4], ["mine"]), ([2, 0], [])]
)
def test_a_run_whose_first_rounds_another_version_trained_is_listed(tmp_path, rounds, stale):
    """But for rounds that were made anew since."""
    first, *later = rounds
    resumed = [{"after_round": first, "code_before": {"mine": "a", "yours": "c"}}]
    resumed += [{"after_round": round} for round in later]
    end = {"status": "finished", "code": {"mine": "b", "yours": "c"}, "resumed": resumed}
    (tmp_path / "metadata.json").write_text(json.dumps(end))
    state = CellState(Cell("A", 0, {}, []), {}, "", run=tmp_path)
    state.find_run(tmp_path)
    assert state.changed == stale


@pytest.mark.parametrize("name", [".sweep.lock", ".cells.lock"])
def test_no_lock_is_opened_through_a_link(tmp_path, name):
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / name).symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match=name), lock.only_one(tmp_path / "study"):
        pass
    assert (tmp_path / "victim").read_text() == "mine"
