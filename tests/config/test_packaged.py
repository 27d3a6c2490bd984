"""Configurations found by name from any folder, the wheel that carries them, and what it says of
itself."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from places import ROOT

import fl_lightning
from fl_lightning.__main__ import main
from fl_lightning.config.packaged import configs_folder, find_config

STUDY = """\
study: small
config: configs/fedavg.yaml
settings:
  trainer.max_rounds: 1
  trainer.workers: 1
  data.num_clients: 4
seeds: [0, 1]
methods: {FedAvg: {}, FedProx: {config: fedprox}}
overlays: overlays/noise_off
"""


@pytest.fixture
def here(bare_directory: Path) -> Path:
    return bare_directory


@pytest.mark.parametrize(
    "name", ["kd_default", "kd_default.yaml", "configs/kd_default.yaml", "configs/kd_default"]
)
def test_a_bare_name_finds_what_comes_with_the_project(here: Path, name: str) -> None:
    assert find_config(name) == ROOT / "configs" / "kd_default.yaml"
    assert (
        find_config(name.replace("kd_default", "overlays/noise_on"))
        == ROOT / "configs" / "overlays" / "noise_on.yaml"
    )


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../pyproject",
        "/etc/hostname.yaml",
        "nothing",
        "overlays",
        "a\0b",
        "x" * 5000,
    ],
)
def test_other_names_find_nothing(here: Path, name: str) -> None:
    assert find_config(name) is None


def test_a_file_of_the_users_wins(here: Path) -> None:
    (here / "configs").mkdir()
    (here / "configs" / "fedavg.yaml").write_text("model: FedAvg")
    assert (
        find_config("fedavg") == find_config("configs/fedavg.yaml") == Path("configs/fedavg.yaml")
    )
    (here / "fedavg.yaml").write_text("model: FedAvg")
    assert find_config("fedavg") == Path("fedavg.yaml")
    assert find_config("fedavg", here / "configs") == here / "configs" / "fedavg.yaml"


@pytest.mark.parametrize(
    "how", ["--config kd_default", "--config=kd_default", "-c kd_default", "environment"]
)
def test_fit_takes_it(
    here: Path, how: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FL_LIGHTNING_CONFIG", "kd_default" if how == "environment" else "")
    if how != "environment":
        monkeypatch.delenv("FL_LIGHTNING_CONFIG")
    args = [] if how == "environment" else how.split()
    assert main(["fit", *args, "--config", "overlays/noise_off.yaml", "--print_config"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["trainer"]["experiment"] == "kd_default"


def test_a_slip_of_its_name_is_hinted(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--config", "fedmpqkd_default"]) == 2
    assert main(["fit", "--config", "noise_onn.yaml"]) == 2
    assert "write --config configs/overlays/noise_on.yaml" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.essential
def test_a_study_of_the_users_refers_to_it(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "small.yaml").write_text(STUDY)
    assert main(["sweep", "--config", "small", "--dry_run", "true"]) == 0
    said = capsys.readouterr().out
    assert "4 cells, 4 to run, 4 rounds: time and bytes unknown" in said
    assert "made from rounds that have run" in said
    assert "0:00:00" not in said
    assert main(["compare", "--study", "configs/exp2_embedded.yaml", "--out", "reports"]) == 2
    assert "runs/exp2_embedded, which does not exist" in capsys.readouterr().err


def test_configs_lists_and_copies_and_overwrites_nothing(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {str(path.relative_to(ROOT / "configs")) for path in (ROOT / "configs").rglob("*.yaml")}
    assert main(["configs"]) == 0
    assert {line.split()[0] + ".yaml" for line in capsys.readouterr().out.splitlines()} == names
    (here / "mine").mkdir()
    (here / "mine" / "fedavg.yaml").write_text("mine")
    assert main(["configs", "mine"]) == 0
    line = capsys.readouterr().out
    assert line.count("\n") == 1
    assert "fedavg.yaml" in line
    assert (here / "mine" / "fedavg.yaml").read_text() == "mine"
    assert {
        str(path.relative_to(here / "mine")) for path in (here / "mine").rglob("*.yaml")
    } == names
    (here / "mine" / "fedavg.yaml").unlink()
    assert main(["configs", "mine"]) == 0
    assert "differ" not in capsys.readouterr().out
    for args in (["a", "b"], ["mine/fedavg.yaml"], ["--all"], ["a\0b"]):
        assert main(["configs", *args]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_the_version_is_in_one_place(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"fl_lightning {fl_lightning.__version__}\n"
    assert fl_lightning.__version__ not in (ROOT / "pyproject.toml").read_text()


def test_a_wheel_takes_every_file_of_the_packages() -> None:
    tree = ast.parse((ROOT / "setup.py").read_text())
    (patterns,) = (
        ast.literal_eval(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.keyword) and node.arg == "package_data"
    )
    folders = {package: ROOT / package.replace(".", "/") for package in patterns}
    taken = {
        path
        for name, folder in folders.items()
        for one in patterns[name]
        for path in folder.glob(one)
    }
    files = {path for top in ("fl_lightning", "callbacks") for path in (ROOT / top).rglob("*.*")}
    assert not {
        path for path in files - taken if path.is_file() and path.suffix not in (".py", ".pyc")
    }


@pytest.mark.slow
def test_a_wheel_works_in_an_empty_folder(tmp_path: Path) -> None:
    """Built from a copy, installed without its dependencies, started in a folder that is no
    repository."""
    source, site, empty = tmp_path / "source", tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    leave = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    for name in ("fl_lightning", "callbacks", "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=leave)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    offline = ["--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "wheel", str(source), *offline, "-w", str(tmp_path)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run(
        [*pip, "install", str(wheel), "--no-deps", "--no-index", "--target", str(site)], check=True
    )
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    environment.pop("MLFLOW_TRACKING_URI", None)

    def run(*args: str) -> str:
        done = subprocess.run(args, cwd=empty, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    program = [sys.executable, "-m", "fl_lightning"]
    where = run(
        sys.executable, "-c", "import fl_lightning.config.packaged as p; print(p.configs_folder())"
    )
    assert Path(where.strip()) == site / "fl_lightning" / "configs"
    base = run(
        sys.executable,
        "-c",
        "from fl_lightning.models import LlamaTiny as L; print(len(L(259).layers))",
    )
    assert base.strip() == "4"
    words = "from fl_lightning.data.text.instructions import words; print(len(words()))"
    assert run(sys.executable, "-c", words).strip() == "1500"
    assert len(run(*program, "configs").splitlines()) == len([*configs_folder().rglob("*.yaml")])
    script = run(
        str(site / "bin" / "fl-lightning"),
        "fit",
        "--config",
        "kd_default",
        "--trainer.max_rounds=1",
        "--trainer.logger=false",
    )
    assert "run directory" in script or "runs/kd_default" in script
    (empty / "small.yaml").write_text(STUDY)
    run(*program, "sweep", "--config", "small.yaml", "--logger", "false")
    assert "160 cells" in run(*program, "sweep", "--config", "exp2_embedded", "--dry_run", "true")
    run(*program, "compare", "--study", "small.yaml", "--out", "report")
    assert (empty / "report" / "report.md").is_file()
    metadata = (
        site / f"fl_lightning-{fl_lightning.__version__}.dist-info" / "METADATA"
    ).read_text()
    assert "License-Expression: Apache-2.0" in metadata


def printed(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    assert main(["fit", *args, "--print_config"]) == 0
    return dict(yaml.safe_load(capsys.readouterr().out))


def test_a_file_is_layered_on_its_base(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    """From the command line, from the environment, and over two floors; the file itself has the
    last word."""
    (here / "mine.yaml").write_text(
        "base: fedprox.yaml\ntrainer: {max_rounds: 7, tags: {base: tall}}\n"
    )
    found = printed(capsys, "--config", "mine.yaml")
    assert found["model"]["class_path"].endswith("FedProx")
    assert found["data"]["init_args"]["num_clients"] == 100
    assert (found["trainer"]["max_rounds"], found["trainer"]["tags"]) == (7, {"base": "tall"})
    assert "base" not in found
    monkeypatch.setenv("FL_LIGHTNING_CONFIG", "mine.yaml")
    assert printed(capsys) == found
    block = "base: federations/digits.yaml"  # as a value it is no layer
    assert printed(capsys, f"--trainer.tags={block}")["trainer"]["tags"] == {
        "base": "federations/digits.yaml"
    }


def test_a_file_glued_to_its_flag_has_its_base_too(here: Path, capsys) -> None:
    assert printed(capsys, "-cconfigs/fedprox.yaml") == printed(
        capsys, "-c", "configs/fedprox.yaml"
    )


FORMS = {
    "plain": "base: {}\nmodel: FedAvg\n",
    "quoted": 'base: "{}"   # with a comment\nmodel: FedAvg\n',
    "blank before the colon": "base : {}\nmodel: FedAvg\n",
    "quoted key": '"base": {}\nmodel: FedAvg\n',
    "last": "model: FedAvg\nbase: {}\n",
    "flow": "{{base: {}, model: FedAvg}}\n",
    "Windows": "base: {}\r\nmodel: FedAvg\r\n",
    "byte order mark": "\ufeffbase: {}\nmodel: FedAvg\n",
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_that_yaml_has_of_a_base_is_one(
    here: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    (here / "my folder").mkdir()
    (here / "my folder" / "low#er.yaml").write_text("trainer: {max_rounds: 7}\n")
    (here / "mine.yaml").write_bytes(FORMS[form].format("my folder/low#er.yaml").encode())
    found = printed(capsys, "--config", "mine.yaml")
    assert (found["trainer"]["max_rounds"], found["model"]["class_path"]) == (
        7,
        "fl_lightning.methods.FedAvg",
    )


def test_a_file_that_has_a_base_only_is_that_base(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "mine.yaml").write_text("# nothing of my own\nbase: fedavg\n")
    assert printed(capsys, "--config", "mine.yaml") == printed(capsys, "--config", "fedavg")


def test_a_file_may_be_based_on_the_packaged_one_of_its_name(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "fedavg.yaml").write_text("base: fedavg\ntrainer: {max_rounds: 7}\n")
    found = printed(capsys, "--config", "fedavg")
    assert (found["trainer"]["max_rounds"], found["trainer"]["experiment"]) == (7, "fedavg")


def test_variables_of_the_environment_beat_the_configuration_in_it(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    """Whether it has a base or not; and the variable stays as it is, for the ranks that inherit
    it."""
    monkeypatch.setenv("FL_LIGHTNING_CONFIG", "kd_default")
    monkeypatch.setenv("FL_LIGHTNING_TRAINER__MAX_ROUNDS", "5")
    monkeypatch.setenv("FL_LIGHTNING_TRAINER__LOCAL_EPOCHS", "3")
    found = printed(capsys, "--trainer.local_epochs", "4")
    assert found["model"]["class_path"].endswith("FedMPQKD")
    assert (found["trainer"]["max_rounds"], found["trainer"]["local_epochs"]) == (5, 4)
    assert Path(os.environ["FL_LIGHTNING_CONFIG"]).name == "kd_default.yaml"


def test_a_base_that_cannot_be_used_is_named(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "mine.yaml").write_text("base: nothing.yaml\nmodel: FedAvg\n")
    assert main(["fit", "--config", "mine.yaml"]) == 2
    assert "mine.yaml, base: nothing.yaml; " in capsys.readouterr().err
    (here / "one.yaml").write_text("base: other.yaml\n")
    (here / "other.yaml").write_text("base: one.yaml\n")
    assert main(["fit", "--config", "one.yaml"]) == 2
    assert "files are not based on each other" in capsys.readouterr().err
    (here / "list.yaml").write_text("base: [fedavg]\n")
    assert main(["fit", "--config", "list.yaml"]) == 2
    assert "list.yaml, base; it names one configuration file" in capsys.readouterr().err
    (here / "late.yaml").write_text(
        "base: federations/digits.yaml\nmodel: FedAvg\ntrainer:\n  max_round: 3\n"
    )
    assert main(["fit", "--config", "late.yaml"]) == 2
    assert "late.yaml, line 4" in capsys.readouterr().err, "the line of the file as it was written"
