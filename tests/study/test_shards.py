"""The shards of a study, wherever they are run, are together exactly the sweep of the whole
study."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from compared import comparable, report_of
from places import CONFIGS
from synthetic_runs import make_run

from fl_lightning.__main__ import main
from fl_lightning.errors import InputError
from fl_lightning.study.execute import lock
from fl_lightning.study.execute.cells import StudyCells
from fl_lightning.study.execute.jobs import RunningJob
from fl_lightning.study.execute.session import SweepSession
from fl_lightning.study.execute.shards import WHOLE, Shard
from fl_lightning.study.plan.study import Study
from fl_lightning.study.report.compare import compare
from fl_lightning.study.results.run_records import read_cells

pytestmark = pytest.mark.usefixtures("figures_only_where_looked_at")

STUDY = f"""
study: small
config: {CONFIGS}/fedavg.yaml
seeds: [2, 3, 4, 5, 6]
methods: {{A: {{}}, B: {{settings: {{trainer.max_rounds: 7}}}}, C: {{grid: false}}}}
grid: {{noise: {{on: {{}}, off: {{settings: {{trainer.max_rounds: 9}}}}}}}}
selection: last
criteria: [accuracy(A) > accuracy(B)]
"""


def resolve(args: list[str]) -> str:
    """Stands in for the parser: the flags as they are."""
    return yaml.safe_dump(
        dict(word.removeprefix("--").split("=", 1) for word in args if "=" in word)
    )


class Cells:
    """Stands in for the pool: every cell becomes a run at once, and between two cells something
    else may be done, such as the work of another shard."""

    slots = ({},)

    def __init__(self, session: SweepSession, between) -> None:
        self.session, self.between, self.made = session, between, []

    def run(self, jobs, ended, look):
        for job in jobs:
            state, draw = self.session.cells[job.name], random.Random(job.name)
            config = {key: value for key, value in state.config.items() if key != "seed_everything"}
            own = {
                "levels": state.cell.levels,
                "config": config,
                "tags": json.loads(config_tags(job.args)),
            }
            make_run(
                self.session.cells.folder, state.cell.method, state.cell.seed, draw.random(), **own
            )
            self.made.append(job.name)
            ended(RunningJob(job, None, 0), 0)
            self.between()


def config_tags(args: list[str]) -> str:
    (tags,) = (word for word in args if word.startswith("--trainer.tags="))
    return tags.partition("=")[2]


def sweep(
    root: Path, shard: Shard = WHOLE, between=lambda: None, text: str = STUDY, resolve=resolve
) -> list[str]:
    """One session of a shard, and the names of the cells that it ran."""
    root.mkdir(exist_ok=True)
    (root / "study.yaml").write_text(text)
    cells = StudyCells.plan(Study.read(root / "study.yaml"), root, resolve, shard)
    with lock.only_one(cells.folder, shard):
        session = SweepSession(cells, None, False)  # type: ignore[arg-type]
        session.pool = made = Cells(session, between)  # type: ignore[assignment]
        session.run()
    return made.made


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Study:
    file = tmp_path_factory.mktemp("study") / "study.yaml"
    file.write_text(STUDY)
    return Study.read(file)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 40])
def test_all_shards_are_the_sweep_and_a_cell_keeps_its_shard(study, count):
    cells = study.cells()
    shards = [Shard(number, count).names(cells) for number in range(1, count + 1)]
    assert sorted(name for shard in shards for name in shard) == sorted(cell.name for cell in cells)
    assert max(map(len, shards)) - min(map(len, shards)) <= 1  # its seeds are consecutive
    turned = replace(
        study,
        seeds=[9, *study.seeds[::-1], 40],  # two that are added, and all in another order
        methods=dict(reversed(study.methods.items())),
        grid={axis: dict(reversed(levels.items())) for axis, levels in study.grid.items()},
    ).cells()
    for number, shard in enumerate(shards, start=1):
        assert {
            name
            for name in Shard(number, count).names(turned)
            if not name.endswith(("seed9", "seed40"))
        } == shard
    if count == 5:  # as many shards as cells of a seed: none has one method alone
        assert all(len({name.rpartition("-")[0] for name in shard}) > 1 for shard in shards)


@pytest.mark.slow
@pytest.mark.essential
def test_two_shards_in_one_folder_at_once_and_in_copied_folders_are_the_whole_sweep(tmp_path):
    whole = sweep(tmp_path / "whole")
    second: list[str] = []

    def other_shard():
        if not second:
            second.extend(sweep(tmp_path / "shared", Shard(2, 2)))

    first = sweep(tmp_path / "shared", Shard(1, 2), between=other_shard)
    assert sorted(first + second) == sorted(whole)
    for number in (1, 2):
        sweep(tmp_path / f"machine{number}", Shard(number, 2))
        shutil.copytree(tmp_path / f"machine{number}", tmp_path / "copied", dirs_exist_ok=True)
    names = ("whole", "shared", "copied")
    for name in names:
        compare("small", tmp_path / f"report_{name}", tmp_path / name)
    expected, *others = (report_of(tmp_path / f"report_{name}") for name in names)
    assert [comparable(one) for one in others] == [comparable(expected)] * 2
    assert expected["registration"]["status"] == "as registered"
    assert read_cells(tmp_path / "shared/small") == read_cells(tmp_path / "whole/small")
    for name in names[1:]:
        assert sweep(tmp_path / name) == []  # nothing is left for a sweep of the whole study


def test_a_shard_says_what_others_have_left(tmp_path, capsys):
    sweep(tmp_path, Shard(1, 2))
    assert "small, shard 1/2: 13 of 13 cells finished" in (said := capsys.readouterr().err)
    assert "12 of their 12 cells are not finished in this folder" in said
    sweep(tmp_path, Shard(2, 2))
    assert "not finished in this folder" not in capsys.readouterr().err


def test_a_sweep_ends_before_the_next_cell_when_a_configuration_is_edited(tmp_path, monkeypatch):
    """Also one that another is based on; a comment is no change, and a cell that has trained with
    the new settings all the same is none of the plan."""
    text = STUDY.replace(f"{CONFIGS}/fedavg.yaml", "own.yaml")
    (tmp_path / "own.yaml").write_text("base: shared.yaml\n")
    shared, done = tmp_path / "shared.yaml", []
    shared.write_text("data.num_clients: 4\n")

    def read(args: list[str]) -> str:
        return re.sub(r"'(\d+)'", r"\1", resolve(args)) + shared.read_text()

    def edit() -> None:
        done.append("a cell")
        number = 4 if len(done) < 3 else 5
        shared.write_text(f"data.num_clients: {number}  # edited {len(done)} times\n")

    said = r"study.yaml, cell A-noise=off-seed2.*\(data.num_clients: 4 -> 5\)"
    with pytest.raises(InputError, match=said):
        sweep(tmp_path, between=edit, text=text, resolve=read)
    assert len(done) == 3
    shared.write_text("data.num_clients: 4\n")
    monkeypatch.setattr(
        "test_shards.make_run", lambda *_, **__: shared.write_text("data.num_clients: 6\n")
    )
    with pytest.raises(InputError, match=r"4 -> 6"):
        sweep(tmp_path, text=text, resolve=read)
    assert len([*(tmp_path / "small").glob("*-seed*")]) == 3


def test_who_may_work_beside_whom(tmp_path):
    with lock.only_one(tmp_path, Shard(1, 3)), lock.only_one(tmp_path, Shard(3, 3)):
        for other, said in (
            (WHOLE, "another process is running this study"),
            (Shard(3, 3), "another process is running shard 3/3"),
            (Shard(2, 4), "its shards that run now are 3; write --shard 1/3"),
        ):
            with pytest.raises(InputError, match=said), lock.only_one(tmp_path, other):
                pass
        with lock.only_one(tmp_path, Shard(2, 3)):
            pass
    with lock.only_one(tmp_path, Shard(2, 4)), pytest.raises(InputError, match="running this study"), lock.only_one(tmp_path):  # fmt: skip
        pass
    with lock.only_one(tmp_path), pytest.raises(InputError, match="running this study"), lock.only_one(tmp_path, Shard(1, 2)):  # fmt: skip
        pass


def test_cells_of_a_shard_that_was_killed_are_waited_for(tmp_path, monkeypatch):
    """By that shard always; by others only where none of them is at work, who has waited for
    them."""
    with lock.only_one(tmp_path, Shard(2, 3)):
        with lock.only_one(tmp_path, Shard(1, 3)) as held:
            orphan = subprocess.Popen(
                [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=held
            )
        monkeypatch.setattr(lock, "ORPHANS_LIMIT", 0.3)
        with pytest.raises(InputError, match="do not end"), lock.only_one(tmp_path, Shard(1, 3)):
            pass
        with lock.only_one(tmp_path, Shard(3, 3)):
            pass
    for who in (WHOLE, Shard(1, 3), Shard(1, 2)):
        with pytest.raises(InputError, match="do not end"), lock.only_one(tmp_path, who):
            pass
    orphan.communicate(b"\n")
    for who in (WHOLE, Shard(1, 3), Shard(1, 2)):
        with lock.only_one(tmp_path, who):
            pass


@pytest.mark.parametrize("shard", ["0/8", "9/8", "3", "1/0", "-1/8", "a/b", "1/8/2", ""])
def test_what_is_no_shard_is_refused(tmp_path, monkeypatch, capsys, shard):
    monkeypatch.chdir(tmp_path)
    Path("study.yaml").write_text(STUDY)
    assert main(["sweep", "--config", "study.yaml", f"--shard={shard}"]) == 2
    error = capsys.readouterr().err
    assert (
        f"--shard {shard}; it is which shard, counted from 1, and of how many; write --shard 1/8"
        in error
    )
    assert error.count("\n") == 1
    assert [path.name for path in Path().iterdir()] == ["study.yaml"]


def test_neither_added_seeds_nor_a_search_have_shards(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("study.yaml").write_text(STUDY)
    assert main(["sweep", "--config", "study.yaml", "--until", "decided", "--shard", "1/2"]) == 2
    assert (
        "--shard 1/2 with until; seeds are added by what all cells show" in capsys.readouterr().err
    )
    assert main(["tune", "--config", "study.yaml", "--shard", "1/2"]) == 2
    assert "--shard; there is no such flag" in capsys.readouterr().err
    assert [path.name for path in Path().iterdir()] == ["study.yaml"]


SCHEDULER = """
read -r first last < <(sed -n 's/^#SBATCH --array=\\([0-9]*\\)-\\([0-9]*\\)$/\\1 \\2/p' "$1")
if [[ $SBATCH_ARRAY ]]; then first=${SBATCH_ARRAY%-*} last=${SBATCH_ARRAY#*-}; fi
export SLURM_JOB_NAME=sweep SLURM_ARRAY_JOB_ID=100 SLURM_ARRAY_TASK_COUNT=$((last - first + 1))
export SLURM_NTASKS=1 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_CPUS_PER_TASK=1
export SLURM_ARRAY_TASK_MIN=$first SLURM_ARRAY_TASK_MAX=$last
tasks=()
for ((task = first; task <= last; task++)); do
    SLURM_JOB_ID=$((100 + task)) SLURM_ARRAY_TASK_ID=$task bash "$@" > "slurm-100_$task.out" 2>&1 &
    tasks+=($!)
done
worst=0
for task in "${tasks[@]}"; do wait "$task" || worst=$?; done
exit "$worst"
"""
"""Stands in for sbatch: it starts the batch file once for each number of its array, all at once,
with the variables that SLURM sets for them."""


@pytest.fixture
def sbatch(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("SLURM_", "SBATCH_", "SHARDS"))]:
        monkeypatch.delenv(name)
    (tmp_path / "scheduler.sh").write_text(SCHEDULER)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").write_text(f'#!/bin/bash\nexec "{sys.executable}" "$@"\n')
    (tmp_path / "bin/python").chmod(0o755)
    paths = (str(tmp_path / "bin"), os.environ["PATH"])

    def sbatch(*words: str, array: str, **environment: str) -> int:
        own = {
            "PATH": os.pathsep.join(paths),
            "PYTHONPATH": str(CONFIGS.parent),
            "SBATCH_ARRAY": array,
        }
        command = ["bash", "scheduler.sh", str(BATCH_FILE), *words]
        return subprocess.run(command, env={**os.environ, **own, **environment}).returncode

    return sbatch


BATCH_FILE = CONFIGS.parent / "examples" / "slurm_sweep.sh"


def test_the_batch_file_gives_each_task_its_shard(sbatch, tmp_path):
    """Also where a few tasks are submitted again, whose number is not that of the shards."""
    (tmp_path / "bin/python").write_text('#!/bin/bash\necho "$OMP_NUM_THREADS: $*"\n')
    said = "{}: -m fl_lightning sweep --config my study.yaml --shard {} --logger false --jobs 2\n"
    threads = os.environ.get("OMP_NUM_THREADS", "1")  # else that of SLURM_CPUS_PER_TASK
    assert sbatch("my study.yaml", "--jobs", "2", array="") == 0
    for task in range(1, 9):
        assert Path(f"slurm-100_{task}.out").read_text() == said.format(threads, f"{task}/8")
    assert sbatch("my study.yaml", "--jobs", "2", array="3-4", SHARDS="8") == 0
    assert Path("slurm-100_3.out").read_text() == said.format(threads, "3/8")
    assert sbatch(array="1-1") != 0
    assert "the study file" in Path("slurm-100_1.out").read_text()


REAL = f"""
study: small
config: {CONFIGS}/fedavg.yaml
settings:
  trainer.max_rounds: 2
  trainer.callbacks: []
  data.num_clients: 4
  data.partition: IID
seeds: [3]
methods: {{A: {{}}, B: {{settings: {{trainer.local_epochs: 1}}}}, C: {{settings: {{trainer.local_epochs: 3}}}}}}
selection: last
"""


@pytest.mark.slow
def test_a_study_under_a_scheduler_is_the_sweep_of_one_machine(sbatch, tmp_path):
    """Two tasks at once in one folder, three cells: the weights of each are those of the run
    alone."""
    Path("study.yaml").write_text(REAL)
    assert sbatch("study.yaml", array="1-2") == 0, [
        path.read_text() for path in Path().glob("slurm-*.out")
    ]
    assert main(["compare", "--study", "small", "--out", "report"]) == 0
    report = report_of(tmp_path / "report")
    assert report["registration"]["status"] == "as registered"
    entries = read_cells(tmp_path / "runs/small")
    assert {entry["status"] for entry in entries.values()} == {"finished"}
    assert {entry["threads"] for entry in entries.values()} == {
        int(os.environ.get("OMP_NUM_THREADS", "1"))
    }
    found = {run["name"]: run["weights_sha256"] for run in report["runs"]}
    for cell in Study.read("study.yaml").cells():
        own = [
            "--trainer.run_name",
            cell.name,
            "--trainer.experiment",
            "alone",
            "--trainer.logger",
            "false",
        ]
        assert main(["fit", *cell.args, *own]) == 0
        alone = json.loads(Path("runs/alone", cell.name, "metadata.json").read_text())
        assert found.pop(cell.name) == alone["weights_sha256"]
    assert found == {}
