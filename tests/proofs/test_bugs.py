"""A bug is not bad input: somebody's exception keeps its type and its traceback, and never becomes
a rejected upload."""

from __future__ import annotations

import errno
import json
import shutil
import sys
from pathlib import Path

import pytest
from places import CONFIGS
from ranks_program import Dropped, data_of, fit
from toy import run, sgd

from fl_lightning.__main__ import main
from fl_lightning.errors import InputError, RunStopped
from fl_lightning.hooks import Meter, Stressor
from fl_lightning.methods import FedAvg
from fl_lightning.support import disk
from fl_lightning.support.user_code import errors_as_refusals, is_bug_of_user
from fl_lightning.wire import PayloadError

QUICK = [
    "--trainer.max_rounds",
    "2",
    "--trainer.logger",
    "false",
    "--data.num_clients",
    "6",
    "--trainer.workers",
    "1",
]
METHODS = """
import torch
from fl_lightning.methods import FedAvg
from fl_lightning.wire import Codes, PayloadError
from fl_lightning.wire.codes import pack

class Typo(FedAvg):
    def check(self, upload, client):
        super().check(upload, client)
        upload.wieghts

class Fussy(FedAvg):
    def build(self, data):
        super().build(data)
        self.scale = float("three")

class Leaves(FedAvg):
    def training_step(self, batch, batch_idx=0):
        raise SystemExit(0)

class Reads(FedAvg):
    def aggregate(self, uploads):
        open("/nowhere/at/all")

class Overflows(FedAvg):
    def upload(self, client):
        pack(Codes(torch.tensor([9], dtype=torch.int32), 3))

class Says(FedAvg):
    def server_metrics(self):
        return {"mood": "good"}

class Clumsy(FedAvg):
    def __init__(self, **settings):
        super().__init__(**settings)
        self.scale = int("three")

class Choosy(FedAvg):
    def build(self, data):
        raise ValueError("--model.scale three; it is a number; write --model.scale 3")

class Picky(FedAvg):
    def check(self, upload, client):
        raise PayloadError("not good enough; send better ones; train longer")

class Silent(FedAvg):
    def training_step(self, batch, batch_idx=0):
        raise ValueError("a local step went wrong")
"""


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    (tmp_path / "own_methods.py").write_text(METHODS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("own_methods", None)  # of the test before, whose file is gone
    return tmp_path


def command(name: str) -> int:
    config = CONFIGS / "fedavg.yaml"
    return main(["fit", "--config", str(config), "--model", f"own_methods.{name}", *QUICK])


@pytest.mark.slow
@pytest.mark.essential
@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("Typo", "AttributeError"),
        ("Silent", "ValueError: a local step went wrong"),
        ("Leaves", "RuntimeError: code of this run called sys.exit(0)"),
        ("Reads", "FileNotFoundError"),
        ("Overflows", "MisuseError: a code lies outside [0, 8)"),
    ],
)
def test_a_bug_ends_the_run_and_its_traceback_is_in_the_log_of_the_run(
    name, error, project, capsys
):
    assert command(name) == 1
    (folder,) = (project / "runs" / "fedavg").iterdir()
    text = (folder / "run.log").read_text()
    assert "Traceback" in text
    assert 'own_methods.py", line' in text
    assert error in text
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith(f"fl_lightning: error: {error}")
    assert str(folder.relative_to(project) / "run.log") in lines[-1]
    assert not any("Traceback" in line for line in lines)
    assert json.loads((folder / "metadata.json").read_text())["status"] == "failed"
    assert "rejected" not in text


def test_the_traceback_is_on_the_terminal_where_it_is_asked_for(project, capsys, monkeypatch):
    monkeypatch.setenv("FL_LIGHTNING_TRACEBACK", "1")
    assert command("Typo") == 1
    assert 'own_methods.py", line' in capsys.readouterr().err
    assert main(["fit", "--config", "nowhere.yaml"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_refusal_by_somebodys_code_says_where_it_was_raised():
    def picky() -> None:
        raise ValueError("boom of mine")

    with (
        pytest.raises(InputError, match=r"test_bugs\.py, line \d+, picky: boom of mine"),
        errors_as_refusals(),
    ):
        picky()
    with pytest.raises(InputError, match=r"^missing") as caught, errors_as_refusals():
        raise InputError("missing", "it is not there", "give it")
    assert "test_bugs" not in str(caught.value)


def test_a_value_error_of_somebodys_code_before_there_is_a_run_keeps_its_traceback(project):
    with pytest.raises(ValueError, match="could not convert string to float") as caught:
        command("Fussy")
    assert not isinstance(caught.value, InputError)
    assert is_bug_of_user(caught.value)
    assert not (project / "runs").exists()


def test_a_bug_in_somebodys_constructor_keeps_its_traceback(project):
    with pytest.raises(ValueError, match="invalid literal for int") as caught:
        command("Clumsy")
    assert not isinstance(caught.value, InputError)


def test_a_metric_is_a_number(project, capsys):
    assert command("Says") == 1
    assert (
        "TypeError: metrics {'mood': 'good'} of round 1; a metric of a method or a meter is a number"
        in capsys.readouterr().err
    )


def test_a_bug_in_on_exception_does_not_hide_the_first_one(tmp_path, caplog):
    class Worse(Meter):
        def on_exception(self, error, context):
            raise KeyError("second")

    stressor = type("First", (Stressor,), {"change_labels": lambda self, value, **details: 1 / 0})()
    with pytest.raises(ZeroDivisionError):
        fit("FedAvg", tmp_path, callbacks=[stressor, Worse()])
    assert "second" in caplog.text


def test_a_round_without_a_cohort_is_no_fault_of_the_disk(tmp_path):
    nobody = type(
        "Nobody",
        (Stressor,),
        {"change_cohort": lambda self, value, *, round, **details: value if round == 2 else []},
    )()
    trainer = fit("FedAvg", tmp_path, callbacks=[nobody])
    assert [row["clients/sampled"] for row in trainer.progress.history] == [0, 3]


def test_what_somebodys_code_refuses_with_raise_is_bad_input(project, capsys):
    assert command("Choosy") == 2
    assert (
        capsys.readouterr()
        .err.splitlines()[-1]
        .endswith("--model.scale three; it is a number; write --model.scale 3")
    )
    assert not (project / "runs").exists()


def test_a_value_error_of_ours_is_bad_input(tmp_path):
    data = data_of("FedAvg")
    data.public_examples = 10**9
    with pytest.raises(InputError, match="public_examples"):
        run(FedAvg(network=Dropped, optimizer=sgd(0.1)), data, tmp_path)


def test_a_run_in_which_nobody_ever_counted_has_failed(project, capsys):
    assert command("Picky") == 1
    assert "no upload of 2 rounds was ever counted" in capsys.readouterr().err
    (folder,) = (project / "runs" / "fedavg").iterdir()
    assert json.loads((folder / "metadata.json").read_text())["status"] == "failed"
    assert "not good enough" in (folder / "run.log").read_text()


@pytest.mark.parametrize("hook", ["change_cohort", "change_labels"])
def test_a_stressor_that_returns_nothing_is_named(hook, tmp_path):
    stressor = type("Forgetful", (Stressor,), {hook: lambda self, value, **details: None})()
    with pytest.raises(TypeError, match=f"Forgetful.{hook} returned None; .*; return it"):
        fit("FedAvg", tmp_path, callbacks=[stressor])


class Spoils(Stressor):
    """Does something to the run directory in round 2."""

    def __init__(self, spoil):
        self.spoil = spoil

    def change_cohort(self, cohort, *, round, context):
        if round == 2:
            self.spoil(context.run_dir)
        return cohort


def test_a_run_directory_that_is_removed_ends_the_run_and_does_not_come_back(tmp_path):
    with pytest.raises(RunStopped, match="cannot be written any more"):
        fit("FedAvg", tmp_path, callbacks=[Spoils(shutil.rmtree)])
    assert not (tmp_path / "FedAvg" / "run").exists()


def test_another_run_in_the_place_of_a_removed_one_stays_as_it_is(tmp_path):
    """It has all that the process would need to go on, and is not its run."""

    def put_another(folder):
        shutil.copytree(folder, tmp_path / "another")
        shutil.rmtree(folder)
        shutil.copytree(tmp_path / "another", folder)

    def files(folder):
        return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}

    with pytest.raises(RunStopped, match=r"written any more .*in the place of the one"):
        fit("FedAvg", tmp_path, callbacks=[Spoils(put_another)], checkpoint_every=1)
    assert files(tmp_path / "FedAvg" / "run") == files(tmp_path / "another")


def test_a_run_whose_checkpoint_does_not_fit_on_the_disk_has_failed(tmp_path, monkeypatch):
    def refuse(*arguments):
        raise OSError(errno.EFBIG, "File too large")

    def spoil(folder):
        monkeypatch.setattr("fl_lightning.run.directory.save_checkpoint", refuse)

    with pytest.raises(RunStopped, match=r"cannot be written any more .*too large"):
        fit("FedAvg", tmp_path, callbacks=[Spoils(spoil)], checkpoint_every=1)
    metadata = json.loads((tmp_path / "FedAvg" / "run" / "metadata.json").read_text())
    assert metadata["status"] == "failed"


def test_a_disk_that_becomes_read_only_ends_the_run_with_one_line(tmp_path, monkeypatch):
    def refuse(path, mode):
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    def spoil(folder):
        for module in ("fl_lightning.support.disk", "fl_lightning.run.tables"):
            monkeypatch.setattr(f"{module}.open_own", refuse)

    with pytest.raises(RunStopped, match=r"cannot be written any more .*Read-only"):
        fit("FedAvg", tmp_path, callbacks=[Spoils(spoil)])
    assert disk.open_own is refuse


def test_only_a_payload_error_rejects(tmp_path):
    class Careful(FedAvg):
        def check(self, upload, client):
            raise (PayloadError if client.id == 0 else KeyError)("weights")

    with pytest.raises(KeyError, match="weights"):
        fit(
            "FedAvg",
            tmp_path,
            Careful(network=Dropped, optimizer=sgd(0.1)),
            participation=1.0,
            max_rounds=1,
        )
