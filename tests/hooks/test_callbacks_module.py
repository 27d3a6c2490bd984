"""A module or folder called ``callbacks`` in the user's project, beside the project's own: real
folders, real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from places import ROOT, SUPPORT

pytestmark = [pytest.mark.slow, pytest.mark.essential]

MINE = """\
from fl_lightning.hooks import Meter


class MyThing(Meter):
    def __init__(self, number: int = 3) -> None:
        self.number = number
"""
CONFIG = """\
model: FedAvg
data: {num_clients: 4, dataset: synthetic, synthetic_examples: 80, synthetic_test_examples: 20, synthetic_size: 16}
trainer:
  max_rounds: 1
  participation: 1.0
  workers: 1
  logger: false
  callbacks:
    - class_path: callbacks.LabelNoise
      init_args: {round: 1}
"""


Done = SimpleNamespace


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SUPPORT / "forked.py")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder of the user's."""
    folder = tmp_path / "project"
    folder.mkdir()
    return folder


@pytest.fixture
def start(server: subprocess.Popen[str], here: Path) -> Callable[..., Done]:
    def started(*main: str, script: str | None = None) -> Done:
        what = {"main": main} if script is None else {"script": script}
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps({"folder": str(here), **what}) + "\n")
        server.stdin.flush()
        return Done(
            **dict(zip(("code", "out", "err"), json.loads(server.stdout.readline()), strict=True))
        )

    return started


def config(*more: str) -> str:
    return CONFIG + "".join(f"    - class_path: {name}\n" for name in more)


def resolved(start: Callable[..., Done], *args: str) -> list[str]:
    """Class paths of the callbacks of the resolved configuration."""
    done = start("fit", "--config", "run.yaml", *args, "--print_config")
    assert done.code == 0, done.err
    return [each["class_path"] for each in yaml.safe_load(done.out)["trainer"]["callbacks"]]


LAYOUTS: dict[str, dict[str, str]] = {
    "a module": {"callbacks.py": MINE},
    "a package with a relative import": {"callbacks/__init__.py": "from .mine import MyThing\n", "callbacks/mine.py": MINE},
    "a package with an absolute import": {"callbacks/__init__.py": "import callbacks.mine\nfrom callbacks.mine import MyThing\n",
                                          "callbacks/mine.py": MINE},
    "files of the same names": {"callbacks/__init__.py": "from .calibration import MyThing\nfrom . import drawing\nassert drawing.here\n",
                                "callbacks/calibration.py": MINE, "callbacks/drawing.py": "here = True\n"},
    "rooms and files of the same names": {
        "callbacks/__init__.py": "from .meters.calibration import MyThing\nfrom .figures import drawing\nassert drawing.here\n",
        "callbacks/meters/__init__.py": "", "callbacks/meters/calibration.py": MINE, "callbacks/figures/drawing.py": "here = True\n"},
}  # fmt: skip


def lay_out(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.mark.slow
@pytest.mark.essential
@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_are_known_under_one_name(layout: str, here: Path, start: Callable[..., Done]) -> None:
    lay_out(
        here, {**LAYOUTS[layout], "run.yaml": config("callbacks.MyThing", "callbacks.Calibration")}
    )
    paths = resolved(start, "--trainer.callbacks+=MyThing")
    assert paths == [
        "callbacks.LabelNoise",
        "callbacks.MyThing",
        "callbacks.Calibration",
        "callbacks.MyThing",
    ]


def test_a_run_and_its_continuation(here: Path, start: Callable[..., Done]) -> None:
    lay_out(
        here,
        {**LAYOUTS["a package with a relative import"], "run.yaml": config("callbacks.MyThing")},
    )
    done = start("fit", "--config", "run.yaml")
    assert done.code == 0, done.err
    assert "label noise from round 1" in done.err
    (run,) = (here / "runs" / "fl_lightning").iterdir()
    assert "callbacks.label_noise.LabelNoise" in "".join(
        file.read_text() for file in run.rglob("*.json")
    )
    more = ("--trainer.max_rounds", "2", "--ckpt_path", str(run))
    done = start(
        "fit", "--config", str(run / "config.yaml"), *more, "--trainer.allow_changed", "true"
    )
    assert done.code == 0, done.err


def test_a_name_that_both_have_is_the_users_and_is_said(
    here: Path, start: Callable[..., Done]
) -> None:
    clash = "from fl_lightning.hooks import Meter\nclass LabelNoise(Meter):\n    def __init__(self, round: int, mine: int = 7): ...\n"
    lay_out(here, {"callbacks/__init__.py": clash, "run.yaml": CONFIG})
    done = start("fit", "--config", "run.yaml", "--print_config")
    assert done.code == 0, done.err
    assert yaml.safe_load(done.out)["trainer"]["callbacks"][0]["init_args"] == {
        "round": 1,
        "mine": 7,
    }
    assert done.err.count("\n") == 1
    assert "callbacks.LabelNoise is yours" in done.err


def test_the_users_own_code_may_import_callbacks(here: Path, start: Callable[..., Done]) -> None:
    method = "import callbacks\nfrom fl_lightning.methods import FedAvg\nclass Mine(FedAvg):\n    number = callbacks.mine.NUMBER\n"
    lay_out(
        here,
        {
            "callbacks/__init__.py": "",
            "callbacks/mine.py": f"NUMBER = 4\n{MINE}",
            "run.yaml": config("callbacks.mine.MyThing"),
        },
    )
    (here / "my_methods.py").write_text(method)
    assert resolved(start, "--model", "my_methods.Mine") == [
        "callbacks.LabelNoise",
        "callbacks.mine.MyThing",
    ]


def test_what_had_been_imported_stays_itself(here: Path, start: Callable[..., Done]) -> None:
    """In a script: the user's classes before and after are the same, and a folder without
    ``__init__`` joins as well."""
    lay_out(here, LAYOUTS["a package with a relative import"])
    script = """
import callbacks, callbacks.mine
before = callbacks.MyThing
from fl_lightning.cli.callbacks_module import import_callbacks
joined = import_callbacks()
assert import_callbacks() is joined
from callbacks import LabelNoise, MyThing
from callbacks.mine import MyThing as again
assert before is MyThing is again
assert (LabelNoise.__module__, LabelNoise.__qualname__) == ("callbacks.stressors.label_noise", "LabelNoise")
import callbacks.label_noise, callbacks.stressors.label_noise
assert callbacks.stressors.label_noise.LabelNoise is callbacks.label_noise.LabelNoise is LabelNoise
"""
    done = start(script=script)
    assert done.code == 0, done.err


def test_a_folder_without_init_joins(here: Path, start: Callable[..., Done]) -> None:
    lay_out(here, {"callbacks/mine.py": MINE, "run.yaml": config("callbacks.mine.MyThing")})
    assert resolved(start) == ["callbacks.LabelNoise", "callbacks.mine.MyThing"]


def test_one_that_cannot_be_imported_breaks_nothing(here: Path, start: Callable[..., Done]) -> None:
    lay_out(
        here, {"callbacks/__init__.py": "import keras_of_another_project\n", "run.yaml": CONFIG}
    )
    done = start("fit", "--config", "run.yaml", "--print_config")
    assert done.code == 0
    assert done.err.count("\n") == 1
    assert "keras_of_another_project" in done.err
    done = start("fit", "--config", "run.yaml", "--trainer.callbacks+=callbacks.MyThing")
    assert done.code == 2
    assert "keras_of_another_project" in done.err.splitlines()[0]
    assert "callbacks.MyThing; it cannot be imported" in done.err.splitlines()[1]


@pytest.mark.slow
@pytest.mark.essential
def test_a_clone_around_an_installed_program_is_no_users_module(
    here: Path, start: Callable[..., Done]
) -> None:
    lay_out(
        here,
        {
            "callbacks/__init__.py": "raise SystemExit(9)",
            "fl_lightning/cli/callbacks_module.py": "",
            "fl_lightning/__init__.py": "",
        },
    )
    script = "import fl_lightning.cli.callbacks_module as m; print(m.import_callbacks().__path__)"
    done = start(script=script)
    assert (done.code, done.out.strip()) == (0, str([str(ROOT / "callbacks")])), done.err
