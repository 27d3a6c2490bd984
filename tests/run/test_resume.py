"""Continuing a run: from where, with what, and when not."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import shlex
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from clocked import Loses
from kill_server import Fading, Remembering
from outcomes import differences, outcome, rows_of
from refusals import refused
from torch import nn
from toy import sgd

from callbacks import LabelNoise, StragglerDropout
from fl_lightning.config.settings import config_of, settings_hash
from fl_lightning.conformance.toy import images, trainer_in
from fl_lightning.conformance.toy import run as toy_run
from fl_lightning.data import IID, Dirichlet, FederatedImages
from fl_lightning.errors import InputError, RunStopped
from fl_lightning.hooks import Meter
from fl_lightning.methods import FedAvg, FedMPQ
from fl_lightning.models import SmallCNN
from fl_lightning.run import checkpoint
from fl_lightning.run.directory import RunDirectory
from fl_lightning.run.journal import Journal
from fl_lightning.run.log import RunLog
from fl_lightning.run.paths import rounds_kept
from fl_lightning.run.resume import find_start
from fl_lightning.run.snapshot import Snapshot
from fl_lightning.study.results.run_records import find_run
from fl_lightning.support import disk
from fl_lightning.trainer import FederatedTrainer


class Interrupt(Fading):
    """Presses Ctrl-C (or worse) in the round after ``rounds``."""

    def __init__(self, rounds: int, error: BaseException):
        super().__init__()
        self.rounds, self.error = rounds, error

    def change_cohort(self, cohort, *, round, context):
        if round > self.rounds:
            raise self.error
        return cohort


def fit(
    folder: Path,
    *,
    until: int | None = None,
    error: BaseException | None = None,
    ckpt_path=None,
    config=None,
    **settings,
):
    """Five rounds, or ``until`` one is done; the trainer."""
    data = FederatedImages(
        dataset="digits",
        num_clients=12,
        partition=Dirichlet(beta=1.0, min_size=2),
        batch_size=64,
        val_fraction=0.2,
    )
    method = Remembering(network=lambda classes: SmallCNN(classes, width=4), optimizer=sgd(0.05))
    last = Fading() if until is None else Interrupt(until, error or KeyboardInterrupt())
    callbacks = [StragglerDropout(0.2), LabelNoise(round=2, clients=0.5, among="cohort"), last]
    if until is not None:
        type(last).__module__, type(last).__qualname__ = Fading.__module__, Fading.__qualname__
    settings = {
        "max_rounds": 5,
        "participation": 0.3,
        "local_epochs": 1,
        "checkpoint_every": 1,
        "logger": False,
        **settings,
    }
    trainer = FederatedTrainer(
        accelerator="cpu", callbacks=callbacks, default_root_dir=str(folder / "runs"), **settings
    )
    trainer.config = config or {
        "model": {"alpha": 1.0},
        "trainer": {"run_name": settings.get("run_name")},
    }
    trainer.config_text = yaml.safe_dump(trainer.config)
    if until is None:
        trainer.fit(method, data, seed=3, ckpt_path=ckpt_path)
    else:
        with pytest.raises(type(last.error)):
            trainer.fit(method, data, seed=3, ckpt_path=ckpt_path)
    return trainer


@pytest.fixture(scope="module")
def wanted(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("whole")
    fit(folder)
    return outcome(folder)


@pytest.mark.parametrize("until", [1, 4])
@pytest.mark.parametrize(
    "settings", [{}, {"checkpoint_every": 0}, {"checkpoint_every": 2}, {"checkpoint_every": None}]
)
def test_interrupted_and_continued_is_exact(until, settings, wanted, tmp_path):
    fit(tmp_path, until=until, **settings)
    fit(tmp_path, ckpt_path="last", **settings)
    found = outcome(tmp_path)
    # how many there are depends on how often they are written
    found["checkpoints"] = wanted["checkpoints"]
    assert differences(found, wanted) == []


def test_the_best_and_the_last_are_kept(wanted, tmp_path):
    run = fit(tmp_path, checkpoint_every=0, keep_checkpoints=1).run
    best = wanted["best"][0]
    assert {path.name for path in run.checkpoints.glob("round_*")} == {
        f"round_{best:06d}",
        "round_000005",
    }


@pytest.mark.parametrize("damage", ["truncated", "flipped", "foreign", "records changed"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_used(damage, wanted, tmp_path, caplog):
    run = fit(tmp_path, until=3).run
    newest = run.checkpoints / "round_000003"
    file = newest / "server.safetensors"
    if damage == "truncated":
        file.write_bytes(file.read_bytes()[:-1])
    elif damage == "flipped":
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    elif damage == "foreign":
        checkpoint.save_checkpoint(newest, {"server": {}}, {"progress": {"format": 99}})
    else:
        lines = (run.path / "ledger.csv").read_text().splitlines(keepends=True)
        for path in run.tables["ledger"].paths:
            path.write_text("".join(lines[:-1]) + "3,0,trained,1,1,1\n")
    fit(tmp_path, ckpt_path=str(run.path))
    (refused,) = [
        record.message for record in caplog.records if "checkpoint refused" in record.message
    ]
    assert str(run.path / "ledger.csv" if damage == "records changed" else newest) in refused
    found = outcome(tmp_path)
    assert found.pop("files") == [*wanted["files"], "superseded_1"]
    assert differences(found, {key: value for key, value in wanted.items() if key != "files"}) == []


@pytest.mark.parametrize("file", ["metrics.csv", "ledger.csv"])
@pytest.mark.parametrize("damage", ["flipped", "removed"])
def test_damaged_records_are_restored(file, damage, wanted, tmp_path, caplog):
    """A checkpoint whose weights are whole is worth more than one bit of a table."""
    run = fit(tmp_path, until=3).run
    data = bytearray((run.path / file).read_bytes())
    data[len(data) // 3] ^= 1
    (run.path / file).write_bytes(data)
    if damage == "removed":
        (run.path / file).unlink()
    fit(tmp_path, ckpt_path=str(run.path))
    assert differences(outcome(tmp_path), wanted) == []
    assert ("is restored from" in caplog.text) == (damage == "flipped")


@pytest.mark.parametrize("damage", ["not JSON", "another", "removed"])
def test_a_damaged_partition_file_is_written_anew(damage, wanted, tmp_path, caplog):
    run = fit(tmp_path, until=3).run
    file = run.path / "partition.json"
    if damage == "removed":
        file.unlink()
    else:
        file.write_text(
            "{"
            if damage == "not JSON"
            else file.read_text().replace('"num_clients": 12', '"num_clients": 13')
        )
    fit(tmp_path, ckpt_path=str(run.path))
    assert differences(outcome(tmp_path), wanted) == []
    assert "partition.json" in caplog.text


DEEP = "[" * 200_000


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("metadata.json", DEEP),
        ("partition.json", DEEP),
        ("metadata.json", '{"started": "yesterday", "resumed": "x", "tracking_run_dir": 5}'),
        ("metadata.json", '{"started": 5}'),
        ("checkpoints/round_000003/manifest.json", DEEP),
    ],
)
def test_odd_files_of_a_run_do_not_keep_it_from_going_on(file, text, wanted, tmp_path):
    run = fit(tmp_path, until=3).run
    (run.path / file).write_text(text)
    fit(tmp_path, ckpt_path=str(run.path))
    assert differences({**outcome(tmp_path), "files": 0}, {**wanted, "files": 0}) == []


def test_a_log_that_is_a_folder_is_one_line(tmp_path):
    run = fit(tmp_path, until=3).run
    (run.path / "run.log").unlink()
    (run.path / "run.log").mkdir()
    with pytest.raises(RunStopped, match=r"cannot be written any more .*run.log"):
        fit(tmp_path, ckpt_path=str(run.path))


def test_no_whole_checkpoint_is_refused(tmp_path):
    run = fit(tmp_path, until=3).run
    for folder in run.checkpoints.glob("round_*"):
        (folder / "manifest.json").unlink()
    with pytest.raises(InputError, match=r"none of its \d checkpoints can be used"):
        fit(tmp_path, ckpt_path="last")


def test_auto_resume_of_damaged_checkpoints_says_how_to_start_anew(tmp_path):
    run = fit(tmp_path, until=2, auto_resume=True).run
    for folder in run.checkpoints.glob("round_*"):
        (folder / "manifest.json").unlink()
    with refused("--trainer.auto_resume", "another --trainer.run_name"):
        fit(tmp_path, auto_resume=True)
    fit(tmp_path, **named("anew"))


def test_a_run_that_another_process_has_continued_is_read_again(tmp_path, monkeypatch):
    """It had the lock after this process had read the checkpoint."""
    run, lock = fit(tmp_path, until=2).run, RunDirectory.lock

    def late(self):
        shutil.copytree(run.checkpoints / "round_000002", run.checkpoints / "round_000003")
        lock(self)

    monkeypatch.setattr(RunDirectory, "lock", late)
    with pytest.raises(InputError, match="another process has gone on with this run"):
        fit(tmp_path, ckpt_path="last")
    assert rounds_kept(run.path)[:2] == [3, 2]


def test_tags_of_before_stay(tmp_path):
    fit(tmp_path, until=2, tags={"team": "red", "try": "1"})
    run = fit(tmp_path, ckpt_path="last", tags={"try": "2"}).run
    assert run.read_json("metadata.json")["tags"] == {"team": "red", "try": "2"}


def test_the_line_that_says_how_to_continue_is_one_of_a_shell(tmp_path, caplog):
    trainer = trainer_in(tmp_path / "my runs", callbacks=[Interrupt(1, KeyboardInterrupt())])
    trainer.command_line = ["python"]
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(FedAvg(optimizer=sgd(0.05)), images())
    assert shlex.split(caplog.text.rpartition("--ckpt_path ")[2]) == [str(trainer.run_dir)]
    assert find_start(str(trainer.run_dir), Path()).checkpoint is not None
    with pytest.raises(RunStopped) as stopped, trainer.journal.writing():
        raise OSError
    assert shlex.split(str(stopped.value).rpartition("--ckpt_path ")[2]) == [str(trainer.run_dir)]


def test_an_interrupt_while_the_trackers_close_says_how_to_continue(tmp_path, caplog, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "finish", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fit(tmp_path)
    assert "stopped in round 5; continue after round 5 with trainer.fit(" in caplog.text
    assert fit(tmp_path, ckpt_path="last").run.read_json("metadata.json")["status"] == "finished"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no full disk")
def test_a_log_that_a_full_disk_does_not_take_hides_no_error(tmp_path):
    log_file = RunLog()
    log_file.__enter__()
    log_file.write_to(tmp_path)
    handler = log_file._handler
    handler.file.close()
    handler.file = open("/dev/full", "w")  # noqa: SIM115
    handler.stream = handler.file
    logging.getLogger("fl_lightning").error("no room")
    log_file.__exit__()
    assert handler.file.closed


def test_an_earlier_checkpoint_by_name(wanted, tmp_path):
    run = fit(tmp_path).run
    earlier = run.checkpoints / "round_000004"
    (run.path / "metadata.json").write_text("{}")
    fit(tmp_path, ckpt_path=str(earlier))
    assert (run.path / "superseded_1" / "round_000005" / "manifest.json").exists()
    assert differences({**outcome(tmp_path), "files": 0}, {**wanted, "files": 0}) == []


def test_a_changed_configuration_is_named_and_refused_unless_allowed(tmp_path, caplog):
    run = fit(tmp_path, until=2).run
    partition = (run.path / "partition.json").read_text()
    config = {"model": {"alpha": 2.0, "beta": 1}, "trainer": {"run_name": None, "devices": 4}}
    before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}
    with pytest.raises(
        InputError, match=r"model.alpha: 1.0 -> 2.0, model.beta: not set -> 1\); give the same one"
    ):
        fit(tmp_path, ckpt_path="last", config=config)
    assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*")} == before
    fit(tmp_path, ckpt_path="last", config=config, allow_changed=True)
    assert "resuming with a changed configuration: model.alpha: 1.0 -> 2.0" in caplog.text
    assert "alpha: 2.0" in (run.path / "config.yaml").read_text()
    assert "alpha: 1.0" in (run.path / "superseded_1" / "config.yaml").read_text()
    assert (run.path / "superseded_1" / "partition.json").read_text() == partition
    assert len((run.path / "metrics.csv").read_text().splitlines()) == 6


def test_a_continued_run_names_its_folder_as_a_new_one_does(tmp_path, caplog, monkeypatch):
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO)
    fit(Path("here"), until=2)
    fit(Path("here"), ckpt_path="last")
    said = [
        line
        for line in caplog.messages
        if "run directory  " in line or line.startswith("continuing ")
    ]
    assert len(said) == 2
    assert all(str(tmp_path) not in line for line in said), said


def test_what_may_round_sums_differently_is_named_and_noted(tmp_path, caplog):
    path = fit(tmp_path, until=2).run.path / "metadata.json"
    here = json.loads(path.read_text())
    there = {"threads": 99, "versions": {**here["versions"], "torch": "1.0"}}
    there["code"] = dict.fromkeys(here["code"], "0" * 64)
    assert there["code"]
    path.write_text(json.dumps(here | there))
    fit(tmp_path, ckpt_path="last")
    assert f"threads: 99 -> {here['threads']}; from here on sums" in caplog.text
    assert "'torch': '1.0'" in caplog.text
    assert f"the code of {', '.join(here['code'])} has changed since the run began" in caplog.text
    after = json.loads(path.read_text())
    assert {name: after[name] for name in there} == {name: here[name] for name in there}


def test_rounds_that_used_no_upload_are_counted_at_the_end(tmp_path):
    for name, callbacks in (("lost", [Loses({2: {*range(12)}})]), ("good", [])):
        trainer = toy_run(
            FedAvg(network=lambda classes: SmallCNN(classes, width=4), optimizer=sgd(0.05)),
            images(),
            tmp_path / name,
            callbacks=callbacks,
            max_rounds=3,
        )
        end = json.loads((trainer.run_dir / "metadata.json").read_text())
        assert end.get("rounds_without_uploads") == (1 if callbacks else None)
        assert end["rejected_uploads"] == 0


def test_a_folder_that_cannot_be_made_is_refused_by_name(tmp_path):
    (tmp_path / "runs").write_text("a file")
    with refused("--trainer.default_root_dir", "may write to"):
        fit(tmp_path)


class Praises(Meter):
    def on_fit_end(self, summary, context):
        summary["final/praise"] = 2.5


def test_a_finished_run_has_the_results_that_it_had(tmp_path):
    def results(rounds: int, ckpt_path: str | None) -> dict[str, float]:
        settings = {"max_rounds": rounds, "checkpoint_every": 1, "callbacks": [Praises()]}
        trainer = trainer_in(tmp_path, allow_changed=rounds == 2, **settings)
        method = FedAvg(network=lambda classes: SmallCNN(classes, width=4), optimizer=sgd(0.05))
        return trainer.fit(method, images(), ckpt_path=ckpt_path)

    first = results(3, None)
    assert first["final/praise"] == 2.5
    assert [*results(3, "last").items()] == [*first.items()]
    (run,) = (path.parent for path in tmp_path.rglob("metadata.json"))
    assert "final/praise" not in results(2, str(run / "checkpoints" / "round_000002"))


class Averages(Meter):
    def on_fit_end(self, summary, context):
        summary["final/mine"] = torch.tensor(0.25)


def test_what_a_meter_adds_at_the_end_is_a_number(tmp_path):
    """As in a round: metadata.json would have it as a text, and so a later fit."""
    with pytest.raises(
        TypeError, match=r"final/mine.* a metric of a method or a meter is a number"
    ):
        toy_run(
            FedAvg(network=lambda classes: SmallCNN(classes, width=4), optimizer=sgd(0.05)),
            images(),
            tmp_path,
            callbacks=[Averages()],
            max_rounds=1,
        )


def test_a_finished_run_is_left_alone(tmp_path, caplog):
    run = fit(tmp_path).run
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    caplog.set_level(logging.INFO)
    fit(tmp_path, ckpt_path="last")
    assert f"{run.path} is finished: 5 rounds, nothing to do" in caplog.text
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize("how", [{"ckpt_path": "last"}, {"auto_resume": True}, {"max_rounds": 9}])
def test_a_finished_run_without_its_checkpoints_keeps_its_results(how, tmp_path):
    run = fit(tmp_path, auto_resume="auto_resume" in how).run
    shutil.rmtree(run.path / "checkpoints")
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    with pytest.raises(InputError, match="its checkpoints are gone"):
        fit(tmp_path, **({} if "auto_resume" in how else {"ckpt_path": "last"}) | how)
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before


def test_auto_resume_continues_this_run_or_starts_it(wanted, tmp_path):
    other = {"model": {"alpha": 3.0}}
    fit(tmp_path, until=1, config=other, auto_resume=True)
    fit(tmp_path, until=2, auto_resume=True)
    fit(tmp_path, auto_resume=True)
    fit(tmp_path, auto_resume=True)
    runs = sorted((tmp_path / "runs" / "fl_lightning").iterdir())
    assert [run.name for run in runs] == ["Remembering-digits-seed3", "Remembering-digits-seed3-2"]
    status = [json.loads((run / "metadata.json").read_text()) for run in runs]
    assert [s["status"] for s in status] == ["interrupted", "finished"]
    assert status[1]["weights_sha256"] == wanted["weights_sha256"]
    assert [r["after_round"] for r in status[1]["resumed"]] == [2]


def named(name: str | None) -> dict:
    return {
        "run_name": name,
        "auto_resume": True,
        "config": {"model": {"alpha": 1.0}, "trainer": {"run_name": name}},
    }


def test_auto_resume_keeps_apart_the_second_run_of_a_name_and_a_run_of_that_name(
    wanted, tmp_path, caplog
):
    """``exp`` is killed, and ``exp-2`` is somebody's own name for a run that is done."""
    fit(tmp_path, until=2, **named("exp"))
    fit(tmp_path, **named("exp-2"))
    fit(tmp_path, **named("exp"))
    runs = sorted((tmp_path / "runs" / "fl_lightning").iterdir())
    assert [run.name for run in runs] == ["exp", "exp-2"]
    found = [json.loads((run / "metadata.json").read_text()) for run in runs]
    assert [(each["status"], each["weights_sha256"]) for each in found] == [
        ("finished", wanted["weights_sha256"])
    ] * 2
    assert "nothing to do" not in caplog.text


def test_two_starts_at_once_are_one_run(tmp_path):
    """The second one starts while the first one, which found no run either, is still preparing its
    data."""

    class Overtaken(Fading):
        def on_check(self, context):
            fit(tmp_path, **named("exp"))

    data = FederatedImages(dataset="digits", num_clients=12, batch_size=64)
    late = FederatedTrainer(
        accelerator="cpu", callbacks=[Overtaken()], default_root_dir=str(tmp_path / "runs"), logger=False, max_rounds=1,
        run_name="exp", auto_resume=True,
    )  # fmt: skip
    late.config = named("exp")["config"]
    with pytest.raises(InputError, match="another process has just started"):
        late.fit(
            Remembering(network=lambda classes: SmallCNN(classes, width=4), optimizer=sgd(0.05)),
            data,
            seed=3,
        )
    assert [path.name for path in (tmp_path / "runs" / "fl_lightning").iterdir()] == ["exp"]


ODD = {
    "round": [-1, "3", None, 4, True],
    "best_round": ["x", -1],
    "best_value": ["high", []],
    "tables": [None, {}, {"metrics": {"rows": 3}}, {"metrics": 1, "ledger": 2}],
    "callbacks": [None, [["a"]], [["a", "{"]], "abc"],
    "on_device": [None, [1]],
    "config": [None, [1]],
    "partition": [None, 7],
}


def test_odd_progress_is_refused_and_the_checkpoint_before_it_used(wanted, tmp_path, caplog):
    """With a manifest that fits: made by hand, or by another program."""
    run = fit(tmp_path, until=3).run
    newest = run.checkpoints / "round_000003"
    tensors, documents = checkpoint.load_checkpoint(newest)
    cases = [(name, value) for name, values in ODD.items() for value in values]
    for name, value in cases:
        checkpoint.save_checkpoint(
            newest, tensors, {"progress": {**documents["progress"], name: value}}
        )
        found = find_start(str(run.path), run.path.parent)
        assert found.checkpoint.path.name == "round_000002", (name, value)
        assert f"an odd '{name}'" in caplog.messages[-1]
    odd = {**tensors, "clients": {"../x": torch.zeros(1)}}
    checkpoint.save_checkpoint(newest, odd, documents)
    assert find_start(str(run.path), run.path.parent).checkpoint.path.name == "round_000002"


def test_a_run_from_before_a_class_got_an_argument_is_counted_and_continued(tmp_path):
    def train(**more: object) -> FederatedTrainer:
        method = FedMPQ(network=lambda classes: SmallCNN(classes, width=4), optimizer=sgd(0.05))
        return toy_run(method, images(), tmp_path, max_rounds=2, keep_checkpoints=3, **more)

    run = train().run
    wanted = run.read_json("metadata.json")["weights_sha256"]
    now = settings_hash(config_of(run.path))
    for path in run.checkpoints.glob("round_*"):
        tensors, documents = checkpoint.load_checkpoint(path)
        assert documents["progress"]["config"].pop("model.init_args.supernet") is False
        checkpoint.save_checkpoint(path, tensors, documents)
    config = yaml.safe_load((run.path / "config.yaml").read_text())
    del config["model"]["init_args"]["supernet"]
    (run.path / "config.yaml").write_text(yaml.safe_dump(config))
    assert find_run(run.path.parent, run.path.name, now) == run.path
    continued = train(ckpt_path=str(run.checkpoints / "round_000001")).run
    assert continued.read_json("metadata.json")["weights_sha256"] == wanted


def test_a_run_that_goes_on_with_fewer_clients_lists_those_alone(tmp_path):
    def train(clients: int, rate: float, **more: object) -> FederatedTrainer:
        data = images(num_clients=clients, partition=IID(), val_fraction=0.3)
        method = FedAvg(network=lambda classes: SmallCNN(classes, width=4), optimizer=sgd(rate))
        return toy_run(method, data, tmp_path, **more)

    begun = train(6, 0.05, max_rounds=1).run_dir
    path = train(3, 0.0, max_rounds=2, ckpt_path=str(begun), allow_changed=True).run_dir
    listed = [(row["round"], row["client"]) for row in rows_of(path / "clients.csv")]
    assert {client for _, client in listed} == {"0", "1", "2"}
    assert {round for round, _ in listed} == {"2"}  # the first round was of other clients


def test_last_is_the_run_that_was_written_last_even_without_a_checkpoint(tmp_path, caplog):
    """Killed before its first checkpoint, it starts anew in its own directory."""
    fit(tmp_path, run_name="old")
    new = fit(tmp_path, run_name="new", until=0).run
    assert not list(new.checkpoints.glob("round_*"))
    assert (
        "continue from the start with trainer.fit(method, data, seed=3, ckpt_path=" in caplog.text
    )
    fit(tmp_path, run_name="new", ckpt_path="last")
    assert json.loads((new.path / "metadata.json").read_text())["status"] == "finished"
    assert len(list((tmp_path / "runs" / "fl_lightning").iterdir())) == 2


@pytest.mark.parametrize(
    "path", ["nowhere", ".", "runs/fl_lightning/Remembering-digits-seed3/checkpoints/round_000009"]
)
def test_a_path_that_is_no_run(path, tmp_path):
    fit(tmp_path, until=1)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InputError, match=r"--ckpt_path .*;.*;"):
        fit(tmp_path, ckpt_path=str(tmp_path / path))
    # a variable that is not set
    with pytest.raises(InputError, match="--ckpt_path ''; it names no run"):
        fit(tmp_path, ckpt_path="")
    with pytest.raises(InputError, match="--ckpt_path last; there is no run under"):
        fit(tmp_path, ckpt_path="last", experiment="another")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_run_has_one_writer(tmp_path):
    run = fit(tmp_path, until=1).run
    lock = os.open(run.path, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with pytest.raises(InputError, match="another process is writing this run"):
        fit(tmp_path, ckpt_path="last")
    os.close(lock)
    fit(tmp_path, ckpt_path="last")


class Shuffled(nn.Module):
    """Has what is drawn once and is in no message: as a buffer of integers, as one that no state
    has, or as an attribute."""

    seed = 0

    def __init__(self, kind: str, num_classes: int) -> None:
        super().__init__()
        draws = torch.Generator().manual_seed(self.seed)
        order = torch.randperm(3 * 16 * 16, generator=draws)
        if kind == "attribute":
            self.order = order
        else:
            order = order if kind == "integers" else order.float()
            self.register_buffer("order", order, persistent=kind == "integers")
        self.layer = nn.Linear(3 * 16 * 16, num_classes)

    def forward(self, x):
        return self.layer(x.flatten(1)[:, self.order.long()])


@pytest.mark.parametrize("kind", ["integers", "not saved", "attribute"])
def test_a_network_of_other_constants_is_not_continued(kind, tmp_path, monkeypatch):
    def begin(**settings):
        method = FedAvg(network=partial(Shuffled, kind), optimizer=sgd(0.05))
        return toy_run(method, images(), tmp_path, max_rounds=1, **settings)

    begin()
    begin(ckpt_path="last")
    monkeypatch.setattr(Shuffled, "seed", 1)
    with pytest.raises(InputError, match="the network's order, which is drawn anew"):
        begin(ckpt_path="last")


def test_other_data_are_refused(tmp_path):
    run = fit(tmp_path, until=2).run
    newest = run.checkpoints / "round_000002"
    tensors, documents = checkpoint.load_checkpoint(newest)
    documents["progress"]["partition"] = "0" * 64
    checkpoint.save_checkpoint(newest, tensors, documents)
    with pytest.raises(InputError, match="the clients' examples: 000000000000 -> "):
        fit(tmp_path, ckpt_path="last")


@pytest.mark.quick("0", "4", "9")
@pytest.mark.parametrize("fails", range(10))
def test_a_full_disk_stops_the_run_and_loses_nothing(fails, wanted, tmp_path, monkeypatch, caplog):
    """From any write of round 3 on the disk is full; when there is room again, the run goes on."""
    write, count = disk.write_synced, 0

    def full(path, data):
        nonlocal count
        count += "round_000003" in str(path) or count > 0
        if count > fails // 2:
            path.write_bytes(data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, data)

    monkeypatch.setattr(disk, "write_synced", full)
    with pytest.raises(RunStopped, match="No space"):
        fit(tmp_path, checkpoint_every=1 + fails % 2 * 2)
    monkeypatch.setattr(disk, "write_synced", write)
    assert "stopped in round" in caplog.text
    fit(tmp_path, ckpt_path="last")
    assert differences({**outcome(tmp_path), "checkpoints": 0}, {**wanted, "checkpoints": 0}) == []


def test_a_disk_that_is_full_after_the_best_checkpoint_does_not_lose_it(tmp_path, monkeypatch):
    """It and the last one are written as the run stops; round 8 is worse than round 7."""
    write, saved, settings = Snapshot.save, [], {"checkpoint_every": 0, "max_rounds": 9}

    def full(snapshot, *given):
        saved.append(snapshot.round)
        if len(saved) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(snapshot, *given)

    monkeypatch.setattr(Snapshot, "save", full)
    run = fit(tmp_path, until=8, **settings).run
    assert saved[:2] == [7, 8]
    assert rounds_kept(run.path) == [7]
    monkeypatch.setattr(Snapshot, "save", write)
    again = fit(tmp_path, ckpt_path="last", **settings)
    assert len(again.progress.history) == rounds_kept(run.path)[0] == 9


def test_a_table_with_a_field_that_never_ends_is_read_from_its_copy(wanted, tmp_path):
    run = fit(tmp_path, until=3).run
    ledger = run.path / "ledger.csv"
    begins = ledger.read_bytes().index(b"\n") + 1
    damaged = ledger.read_bytes()[:begins] + b'"' + b"0" * 200_000 + ledger.read_bytes()[begins:]
    ledger.write_bytes(damaged)
    fit(tmp_path, ckpt_path="last")
    assert differences(outcome(tmp_path), wanted) == []


def test_folders_beside_the_checkpoints_are_none(tmp_path):
    run = fit(tmp_path, until=3).run
    shutil.copytree(run.checkpoints / "round_000003", run.checkpoints / "round_mine")
    with refused("round_mine", "name the run directory"):
        fit(tmp_path, ckpt_path=str(run.checkpoints / "round_mine"))
    fit(tmp_path, ckpt_path="last", keep_checkpoints=1)
    assert (run.checkpoints / "round_000005").is_dir()
    (run.checkpoints / "round_1000000").mkdir()
    assert rounds_kept(run.path)[:2] == [1000000, 5]


def test_last_is_the_last_run_of_the_name_that_is_given(tmp_path):
    for age, name in enumerate(["other", "mine-2", "mine"]):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text("trainer: {run_name: mine}")
        os.utime(tmp_path / name / "config.yaml", ns=(10**18 - age * 10**9,) * 2)
    assert find_start("last", tmp_path).run == tmp_path / "other"
    assert find_start("last", tmp_path, "mine").run == tmp_path / "mine-2"
    # a run that somebody called so
    (tmp_path / "mine-2" / "config.yaml").write_text("trainer: {run_name: mine-2}")
    assert find_start("last", tmp_path, "mine").run == tmp_path / "mine"
    with pytest.raises(InputError, match="no run called theirs"):
        find_start("last", tmp_path, "theirs")
