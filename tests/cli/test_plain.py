"""Stress is opt-in: examples on data of one's own have none, and every run says by what it is
stressed."""

from __future__ import annotations

import shlex
from pathlib import Path

import yaml
from page_commands import documented, file_of_page
from places import ROOT

from callbacks import LabelNoise, StragglerDropout
from fl_lightning.__main__ import main
from fl_lightning.cli.parser import resolve
from fl_lightning.cli.types import import_class
from fl_lightning.conformance.toy import images, on_images, run
from fl_lightning.hooks import Meter, Stressor
from fl_lightning.methods import FedAvg


def stressors(args: list[str]) -> list[str]:
    """Return the stressors that a command line resolves to."""
    callbacks = yaml.safe_load(resolve(args))["trainer"]["callbacks"] or []
    paths = [callback["class_path"] for callback in callbacks]
    return [path for path in paths if issubclass(import_class(path), Stressor)]


def test_examples_on_data_of_ones_own_have_no_stressors(tmp_path, monkeypatch):
    """Those of the page on data; those on text are layered on ``lora_default``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "examples")
    for name in ("own_dataset.py", "own_module.py"):
        (tmp_path / name).write_text(file_of_page(name))
    commands = [["--config", "lora_default"], *(args[1:] for args in documented("fit"))]
    assert len(commands) >= 12
    assert {shlex.join(args): found for args in commands if (found := stressors(args))} == {}
    assert stressors(["--config", "fedavg"]), "the search finds stressors where there are some"


class Watch(Stressor, Meter):
    """A meter that reads uploads by a stressor's hook and changes nothing."""


def first_lines(folder: Path, *callbacks: Stressor | Meter) -> list[str]:
    trainer = run(on_images(FedAvg()), images(), folder, max_rounds=1, callbacks=[*callbacks])
    return (trainer.run_dir / "run.log").read_text().splitlines()[:2]


def test_the_first_lines_of_the_log_say_by_what_a_run_is_stressed(tmp_path, caplog):
    caplog.set_level("INFO", "fl_lightning")
    stressed = first_lines(tmp_path / "a", StragglerDropout(0.5), LabelNoise(round=1), Watch())
    assert any(
        line.endswith(
            "stressed by: StragglerDropout(probability=0.5, mode=before, work=0.5), "
            "LabelNoise(round=1, clients=0.1, labels=0.2, among=federation)"
        )
        for line in stressed
    )
    assert any(line.endswith("no stressors") for line in first_lines(tmp_path / "b", Watch()))


def test_plain_is_found_by_its_bare_name_and_says_on_the_terminal_that_nothing_stresses_it(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    flags = ["--trainer.max_rounds", "1", "--trainer.logger", "false"]
    assert main(["fit", "--config", "plain", *flags]) == 0
    assert "no stressors" in capsys.readouterr().err.splitlines()[:2]
    assert main(["fit", "--config", "kd_default", "--trainer.fast_dev_run", "true"]) == 0
    lines = capsys.readouterr().err.splitlines()[:3]
    assert any(line.startswith("stressed by: StragglerDropout(probability=0.2") for line in lines)


def test_what_a_class_does_not_have_is_told_of_ones_own_settings_alone(tmp_path, capsys):
    """A setting of a packaged configuration was nobody's choice."""

    def notes(*args: str) -> list[str]:
        file = str(tmp_path / "absent.csv")
        main(["fit", *args, "--data", "TableData", "--data.train", file, "--data.target", "kind"])
        return [line for line in capsys.readouterr().err.splitlines() if "note: not used" in line]

    own = tmp_path / "own.yaml"
    own.write_text("data: {class_path: FederatedImages, init_args: {crop: pad}}\n")
    assert notes("--config", "plain") == []
    (note,) = notes("--config", "plain", "--config", str(own))
    assert note.endswith("the class in use has no such setting: data.crop")
    (note,) = notes("--config", "plain", "--data.flip", "true")
    assert note.endswith("the class in use has no such setting: data.flip")
