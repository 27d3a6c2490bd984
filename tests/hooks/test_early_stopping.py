"""A run that ends when its validation no longer improves is finished, and a configuration can be
tried out without leaving anything."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from places import CONFIGS
from refusals import refused
from ten import make
from toy import ready, run

from callbacks import EarlyStopping
from fl_lightning.__main__ import main
from fl_lightning.errors import InputError
from fl_lightning.hooks import Meter, RoundRecord
from fl_lightning.run.tables import numbers
from fl_lightning.study.results.gather import check_comparable, gather

CONFIG = str(CONFIGS / "fedavg.yaml")
SMALL = [
    "fit",
    "--config",
    CONFIG,
    "--data.num_clients",
    "6",
    "--trainer.callbacks",
    "[]",
    "--trainer.logger",
    "false",
]


class Scripted(Meter):
    """Writes these validation accuracies into the record, as an evaluation would."""

    def __init__(self, *values: float) -> None:
        self.values = values

    def on_validate(self, accuracies, record, context):
        record.metrics["val/accuracy"] = self.values[record.round - 1]
        record.writers["val/accuracy"] = self


class Pull(Meter):
    """Presses Ctrl-C when so many rounds are done: in the next one, or at the end."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def on_round_end(self, record, context):
        if record.round > self.rounds:
            raise KeyboardInterrupt

    def on_fit_end(self, summary, context):
        raise KeyboardInterrupt


def fit(folder, *values, rounds=9, ckpt_path=None, stopping=None, more=(), **settings):
    stopping = stopping or EarlyStopping(patience=2)
    method = make("FedAvg")
    trainer = run(
        method, ready(val_fraction=0.2), folder, callbacks=[Scripted(*values), stopping, *more], max_rounds=rounds, participation=0.3,
        local_epochs=1, ckpt_path=ckpt_path, **settings,
    )  # fmt: skip
    return method, trainer.run_dir


def rounds_of(folder: Path) -> int:
    return len(numbers((folder / "metrics.csv").read_bytes()))


def metadata_of(folder: Path) -> dict:
    return json.loads((folder / "metadata.json").read_text())


def test_the_run_ends_as_finished_and_says_why(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "fl_lightning"):
        _, folder = fit(tmp_path, 0.1, 0.3, 0.2, 0.3, 0.9)
        found = metadata_of(folder)
        assert (found["status"], rounds_of(folder)) == ("finished", 4)
        assert (
            found["stopped_early"]
            == "val/accuracy did not improve in 2 evaluated rounds, best 0.3 in round 2"
        )
        assert found["stopped_early"] in caplog.text
        assert (found["final/best_val_round"], found["final/best_val_accuracy"]) == (2, 0.3)
        before = (folder / "metadata.json").read_bytes()
        fit(tmp_path, 0.1, 0.3, 0.2, 0.3, 0.9, ckpt_path=str(folder))
    assert "nothing to do" in caplog.text
    assert (folder / "metadata.json").read_bytes() == before


def test_a_run_that_is_not_stopped_says_nothing(tmp_path):
    _, folder = fit(tmp_path, 0.1, 0.3, 0.2, 0.4, rounds=4)
    assert "stopped_early" not in metadata_of(folder)
    _, folder = fit(tmp_path, 0.1, 0.3, 0.2, 0.2, rounds=4)  # it would stop where it ends
    assert "stopped_early" not in metadata_of(folder)


@pytest.mark.parametrize("interrupted", [1, 3, 4])
def test_what_was_seen_survives_a_resume(interrupted, tmp_path):
    """Interrupted before, and after, the round that decides, which then is not done again."""
    values = 0.1, 0.3, 0.2, 0.3, 0.9, 0.9, 0.9, 0.9, 0.9
    whole, _ = fit(tmp_path, *values)

    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, *values, more=[Pull(interrupted)], checkpoint_every=1, run_name="pulled")
    folder = tmp_path / "fl_lightning" / "pulled"
    assert rounds_of(folder) == interrupted
    # without the interruption
    rest, _ = fit(tmp_path, *values, ckpt_path=str(folder), allow_changed=True)
    assert torch.equal(whole.server["weights"], rest.server["weights"])
    assert rest.round == 4  # figures of the end name it
    assert (rounds_of(folder), metadata_of(folder)["status"]) == (4, "finished")
    assert "stopped_early" in metadata_of(folder)


def test_more_patience_continues_a_run_that_was_stopped(tmp_path):
    values = 0.1, 0.3, 0.2, 0.3, 0.5, 0.4
    _, folder = fit(tmp_path, *values, rounds=6)
    fit(
        tmp_path,
        *values,
        rounds=6,
        stopping=EarlyStopping(patience=3),
        ckpt_path=str(folder),
        allow_changed=True,
    )
    assert (rounds_of(folder), metadata_of(folder)["status"]) == (6, "finished")
    assert "stopped_early" not in metadata_of(folder)


@pytest.mark.parametrize(
    ("settings", "values", "stops_after"),
    [
        ({"patience": 1}, (0.1, 0.2, 0.2), 3),
        ({"patience": 2, "min_delta": 0.05}, (0.1, 0.12, 0.16, 0.2, 0.2), 5),
        ({"patience": 1, "mode": "min"}, (0.3, 0.2, 0.25), 3),
        ({"patience": 2}, (float("nan"), float("nan")), 2),
        ({"patience": 2}, (0.1, float("nan"), 0.2, 0.1), None),
    ],
)
def test_what_counts_as_an_improvement(settings, values, stops_after):
    stopping, stopped = EarlyStopping("val/accuracy", **settings), None
    for round, value in enumerate(values, start=1):
        stopping.on_validate({}, record := RoundRecord(round, {"val/accuracy": value}), None)
        stopping.on_round_end(record, None)
        # not evaluated: it does not count
        stopping.on_round_end(RoundRecord(round + 100, {"val/accuracy": 0.0}), None)
        if stopping.stop_reason() and stopped is None:
            stopped = round
    assert stopped == stops_after


@pytest.mark.parametrize(
    "settings",
    [
        {"monitor": "test/accuracy"},
        {"monitor": "val/acc"},
        {"patience": 0},
        {"mode": "up"},
        {"min_delta": -0.1},
        {"min_delta": float("nan")},
    ],
)
def test_settings_are_checked(settings):
    with refused(f"EarlyStopping({next(iter(settings))}=", "write"):
        EarlyStopping(**settings).on_check(SimpleNamespace(data=ready()))


def test_without_validation_examples_there_is_nothing_to_monitor():
    context = SimpleNamespace(data=ready(val_fraction=0.0))
    with pytest.raises(ValueError, match="no client has validation examples"):
        EarlyStopping().on_check(context)
    EarlyStopping(monitor="train/loss", mode="min").on_check(context)


@pytest.mark.slow
@pytest.mark.essential
def test_stopped_runs_are_compared_with_whole_ones(tmp_path, monkeypatch):
    """They were asked for as many rounds."""
    monkeypatch.chdir(tmp_path)
    stopping = [
        "--trainer.callbacks+=EarlyStopping",
        "--trainer.callbacks.patience",
        "1",
        "--trainer.callbacks.min_delta",
        "1",
    ]
    for flags in (
        [*stopping, "--trainer.run_name", "stopped"],
        ["--trainer.run_name", "whole", "--model.optimizer.lr", "0.02"],
    ):
        assert main([*SMALL, *flags, "--trainer.max_rounds", "4"]) == 0
    results = gather("runs/fedavg", Path("runs"))
    check_comparable(results)
    assert sorted((run.rounds, run.asked_rounds) for run in results.runs) == [(2, 4), (4, 4)]
    assert (
        main(
            [
                *SMALL,
                "--trainer.run_name",
                "short",
                "--model.optimizer.lr",
                "0.01",
                "--trainer.max_rounds",
                "2",
            ]
        )
        == 0
    )
    with pytest.raises(InputError, match="number of rounds"):
        check_comparable(gather("runs/fedavg", Path("runs")))


@pytest.mark.slow
def test_a_sweep_takes_a_stopped_cell_as_finished_and_compare_compares_it(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    stopping = {
        "class_path": "callbacks.EarlyStopping",
        "init_args": {"patience": 1, "min_delta": 1.0},
    }
    study = {
        "study": "early",
        "config": CONFIG,
        "seeds": [0],
        "settings": {"trainer.max_rounds": 6, "data.num_clients": 6},
        "methods": {
            "stopped": {"settings": {"trainer.callbacks": [stopping]}},
            "whole": {"settings": {"trainer.callbacks": []}},
        },
    }
    Path("study.yaml").write_text(yaml.safe_dump(study))
    command = ["sweep", "--config", "study.yaml", "--logger", "false"]
    assert main(command) == 0
    (stopped,) = Path("runs/early").glob("*stopped*/metadata.json")
    assert "stopped_early" in json.loads(stopped.read_text())
    before = stopped.stat().st_mtime_ns
    assert main(command) == 0
    assert stopped.stat().st_mtime_ns == before
    capsys.readouterr()
    assert main(["compare", "--study", "study.yaml", "--out", "report"]) == 0


# fast_dev_run


@pytest.mark.parametrize(("given", "rounds"), [("true", 1), ("2", 2)])
def test_trying_out_runs_everything_and_leaves_nothing(
    given, rounds, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    seen = []
    monkeypatch.setattr(
        EarlyStopping, "on_round_end", lambda self, record, context: seen.append(record.metrics)
    )
    stopping = [
        "--trainer.callbacks+=EarlyStopping",
        "--trainer.callbacks+=StragglerDropout",
        "--trainer.callbacks.probability",
        "1",
    ]
    flags = [
        *SMALL[:-2],
        *stopping,
        "--trainer.participation",
        "1",
        "--trainer.max_rounds",
        "50",
        "--trainer.fast_dev_run",
        given,
    ]
    assert main(flags) == 0
    assert "everything ran" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert [metrics["clients/trained"] for metrics in seen] == [2] * rounds  # though all drop out
    assert all("test/accuracy" in metrics for metrics in seen)


def test_a_step_each_and_no_run_to_continue(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    method = make("FedAvg")
    steps = []
    step = method.training_step
    method.training_step = lambda *arguments: (steps.append(1), step(*arguments))[1]
    trainer = run(method, ready(), tmp_path / "runs", fast_dev_run=3, max_rounds=7, workers=1)
    assert len(steps) == 3 * 2
    assert list(tmp_path.iterdir()) == []
    assert trainer.max_rounds == 7
    for flags in (
        ["--trainer.fast_dev_run", "true", "--ckpt_path", "last"],
        ["--trainer.fast_dev_run", "-1"],
    ):
        assert main([*SMALL, *flags]) == 2
        assert capsys.readouterr().err.count("\n") == 1


CLOCK = ["--trainer.clock.devices", "LogNormalDevices"]
DEADLINE = ["--trainer.rounds.seconds", "100", "--trainer.rounds.least", "3"]


@pytest.mark.parametrize(
    ("needs", "fewest"),
    [
        (["--model.average", "MultiKrum"], 5),
        ([*CLOCK, "--trainer.rounds", "Deadline", *DEADLINE], 3),
    ],
    ids=["average", "deadline"],
)
def test_a_trial_run_has_as_many_clients_as_a_round_needs(needs, fewest, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seen = []
    monkeypatch.setattr(
        EarlyStopping, "on_round_end", lambda self, record, context: seen.append(record.metrics)
    )
    few = ["--trainer.participation", "1", "--trainer.callbacks+=EarlyStopping"]
    assert main([*SMALL, *few, *needs, "--trainer.fast_dev_run", "true"]) == 0
    assert [metrics["clients/trained"] for metrics in seen] == [fewest]


def test_what_fails_while_it_is_tried_out_leaves_nothing_either(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    method = make("FedAvg")
    method.upload = lambda client: 1 / 0
    with pytest.raises(ZeroDivisionError):
        run(method, ready(), tmp_path / "runs", fast_dev_run=True, workers=1)
    assert list(tmp_path.iterdir()) == []
