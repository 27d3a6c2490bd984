"""``rank`` trains one method alone, and says of it what a sweep of all methods says."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from compared import report_of
from published import InProcessPool
from refusals import refused

from fl_lightning.__main__ import main
from fl_lightning.cli.parser import resolve
from fl_lightning.study.execute import sweep
from fl_lightning.study.execute.rank import _levels, rank
from fl_lightning.study.plan.variations import Variation
from fl_lightning.study.report.compare import compare

pytestmark = pytest.mark.usefixtures("figures_only_where_looked_at")
STUDY = """
study: {name}
config: plain.yaml
seeds: [3, 4]
settings:
  trainer.max_rounds: 1
  trainer.callbacks: []
  data.num_clients: 3
  data.batch_size: 256
methods: {{{methods}}}
grid:
  setting:
    iid: {{}}
    noisy: {{settings: {{trainer.callbacks: [{{class_path: callbacks.LabelNoise, init_args: {{round: 1}}}}]}}}}
proposed: [{proposed}]
"""
BORING = "lightning.pytorch.demos.boring_classes"
THEIRS = "A: {}, B: {settings: {model.init_args.optimizer.init_args.lr: 0.01}}"
MINE = "Third: {settings: {model.class_path: ranked_method.Third, model.init_args.mu: 0.5}}"
METHOD = """
from fl_lightning.methods import FedProx


class Third(FedProx):
    \"\"\"A method of one's own.\"\"\"
"""


@pytest.fixture(scope="module")
def swept(tmp_path_factory) -> Path:
    """A folder in which one sweep made all three methods in ``runs/all``, and two of them were
    published."""
    folder = tmp_path_factory.mktemp("swept")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        patch.setattr(sweep, "Pool", InProcessPool)
        Path("ranked_method.py").write_text(METHOD)
        Path("all.yaml").write_text(
            STUDY.format(name="all", methods=f"{MINE}, {THEIRS}", proposed="Third")
        )
        Path("two.yaml").write_text(STUDY.format(name="two", methods=THEIRS, proposed="A"))
        assert main(["sweep", "--config", "all.yaml", "--logger", "false"]) == 0
        for label in "AB":
            for run in Path("runs/all").glob(f"{label}-*"):
                shutil.copytree(run, Path("runs/two") / run.name)
        compare("two.yaml", Path("published"))
    return folder


@pytest.fixture
def published(swept, tmp_path, monkeypatch) -> Path:
    """The report of the two methods in a copy of that folder, which is the working directory."""
    shutil.copytree(swept, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sweep, "Pool", InProcessPool)
    monkeypatch.setattr(InProcessPool, "started", [])
    return Path("published")


def ranked(*more: str) -> int:
    args = ["rank", "--model", "ranked_method.Third", "--against", "published", "--logger", "false"]
    return main([*args, "--settings", "{model.init_args.mu: 0.5}", *more])


@pytest.mark.slow
@pytest.mark.essential
def test_a_third_method_alone_is_ranked_as_in_one_sweep_of_all_and_nothing_is_trained_twice(
    published, capsys
):
    assert ranked("--setting", "noisy") == 0
    assert InProcessPool.started == [f"Third-setting=noisy-seed{seed}" for seed in (3, 4)]
    assert "Third − A" in capsys.readouterr().out
    assert ranked() == 0  # all levels: what is finished is not run again
    assert InProcessPool.started[2:] == [f"Third-setting=iid-seed{seed}" for seed in (3, 4)]
    assert ranked() == 0
    assert len(InProcessPool.started) == 4

    compare("all", Path("swept"))
    shown = capsys.readouterr()
    assert "Place of what is proposed" in shown.out
    assert "setting=iid" in shown.out
    assert "trained with another" not in shown.err
    code = Path(sys.modules["ranked_method"].__file__)
    code.write_text(METHOD.replace("one's own", "another"))
    assert ranked() == 2
    code.write_text(METHOD)
    said = "trained with another ranked_method, and ranked as if it were this one"
    assert said in capsys.readouterr().err
    assert ranked("--label", "my third", "--setting", "noisy", "--seeds", "1") == 0
    said = "compare --study 'two-my third' --out 'reports/two-my third'"  # to be pasted
    assert said in capsys.readouterr().err
    for key in ("trainer.fast_dev_run", "seed_everything", "ckpt_path"):
        assert ranked("--settings", f"{{{key}: 7}}") == 2
        assert f"{key}; the command sets it; leave it out" in capsys.readouterr().err
    assert ranked("--settings", "{model.class_path: FedAvg}") == 2
    said = "--settings model.class_path: FedAvg; the method that is ranked is another one"
    assert said in capsys.readouterr().err
    of_rank, of_sweep = report_of(Path("reports/two-Third")), report_of(Path("swept"))
    assert of_rank["levels"] == of_sweep["levels"]  # to the last digit
    assert [(one["a"], one["b"]) for one in of_rank["levels"][0]["differences"]] == [
        ("Third", "A"),
        ("Third", "B"),
    ]
    assert of_rank["levels"][0]["differences"][0]["family"] == 2
    # a level was added after the first start
    assert of_rank["registration"]["status"] == "not as registered"
    for file, said in (
        ("report.md", "## Places at setting=iid"),
        ("tables.tex", r"\label{tab:two-Third-place}"),
    ):
        assert said in Path("reports/two-Third", file).read_text()


@pytest.mark.slow
@pytest.mark.essential
def test_a_published_partition_that_is_another_ends_it_at_the_first_run(published, capsys):
    report = json.loads((published / "report.json").read_text())
    for level in report["levels"]:
        level["partition_sha256"]["3"] = "f" * 64
    (published / "report.json").write_text(json.dumps(report))
    assert ranked() == 2
    assert "published: two has ffffffffffff" in capsys.readouterr().err
    assert InProcessPool.started == ["Third-setting=iid-seed3"]
    assert ranked() == 2  # nor is the rest trained at the next start
    assert len(InProcessPool.started) == 1
    assert not Path("reports").exists()


@pytest.mark.slow
@pytest.mark.essential
def test_what_breaks_the_pairing_is_refused_before_anything_is_trained(published):
    def of(model="FedProx", **more):
        rank(model, str(published), logger=False, resolve=resolve, **more)

    for more, named in (
        (
            {"settings": {"data.batch_size": 64}},
            "data.init_args.batch_size: 256 published, 64 here",
        ),
        ({"settings": {"model.network": "mlp"}}, "model.init_args.network"),
        ({"settings": {"model.module": f"{BORING}.BoringModel"}}, "model.init_args.module"),
        ({"seeds": 3}, "--seeds 3"),
        ({"seeds": 0}, "--seeds 0"),
        ({"setting": "nosy"}, "--setting nosy"),
        ({"label": "A"}, "--label A"),
        ({"label": "a"}, "--label a"),  # compare refuses it, when all is trained
        ({"label": "mine/1"}, "--label mine/1"),
        ({"method_config": "nowhere.yaml"}, "--method_config nowhere.yaml"),
        ({"model": "ranked_method.Forth"}, "ranked_method.Forth"),
    ):
        with refused(named):
            of(**more)
    with refused("--setting elsewhere", "write --setting iid, or another of them"):
        of(setting="elsewhere")
    with refused("--against nowhere"):
        rank("FedProx", "nowhere", resolve=resolve)
    Path("reports/two-FedProx").mkdir(parents=True)
    Path("reports/two-FedProx/mine.txt").write_text("mine")
    with refused("--out reports/two-FedProx"):
        of()
    runs = (published / "runs.csv").read_text()
    (published / "runs.csv").write_text(runs.replace(",0.", ",O.", 1))
    with refused("runs.csv", "make the report again"):
        of(label="Other")
    (published / "runs.csv").write_text(runs)
    (published / "study.yaml").unlink()
    with refused("--against published", "compare of this release"):
        of()
    assert not InProcessPool.started
    assert not list(Path("runs").glob("two-*"))
    assert Path("reports/two-FedProx/mine.txt").read_text() == "mine"


@pytest.mark.slow
@pytest.mark.essential
def test_a_dry_run_says_what_is_left_and_creates_nothing(published, capsys, caplog):
    assert ranked("--dry_run", "true", "--seeds", "1") == 0
    assert "two-Third: 2 cells, 2 to run, 2 rounds" in capsys.readouterr().out
    assert not Path("runs/two-Third").exists()
    assert "counts" not in caplog.text
    assert ranked("--dry_run", "true", "--settings", "{trainer.callbacks: []}") == 0
    assert "--settings trainer.callbacks: a level of the study's grid sets it" in caplog.text
    sgd = "{class_path: torch.optim.SGD, init_args: {lr: 0.02}}"
    assert ranked("--dry_run", "true", "--settings", f"{{model.init_args.optimizer: {sgd}}}") == 0


def test_a_method_can_be_ranked_against_the_leaderboard_that_comes_with_the_project(
    tmp_path, monkeypatch, capsys
):
    """Its protocol is that of the packaged configurations as they are now."""
    monkeypatch.chdir(tmp_path)
    rank("FedAvgM", dry_run=True, resolve=resolve)
    assert "leaderboard_digits-FedAvgM: 18 cells, 18 to run, 144 rounds" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_a_level_of_two_axes_is_named_with_its_axis():
    axes = {"noise": ("on", "off"), "drop": ("on", "some")}
    grid = {axis: dict.fromkeys(levels, Variation()) for axis, levels in axes.items()}
    with refused("--setting on", "write --setting noise=on"):
        _levels(grid, "on")
    for setting, noise, drop in (
        ("noise=on", ["on"], ["on", "some"]),
        ("off,some", ["off"], ["some"]),
    ):
        found = _levels(grid, setting)
        assert ([*found["noise"]], [*found["drop"]]) == (noise, drop)
