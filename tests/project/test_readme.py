"""The README's commands, one after another in one folder, as a newcomer would type them."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml
from cifar_files import write_cifar
from places import ROOT

from fl_lightning.__main__ import main

README = (ROOT / "README.md").read_text()
SHORT = {"trainer": {"max_rounds": 2, "max_local_steps": 2, "logger": False}}
CIFAR = {
    "trainer": {"participation": 0.5, "callbacks": []},
    "data": {"init_args": {"num_clients": 4, "partition": {"init_args": {"beta": 5}}}},
}


def commands() -> list[list[str]]:
    """Return the arguments of every command of the README that names the program, in order."""
    blocks = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    words = [shlex.split(line, comments=True) for line in lines]
    return [found[3:] for found in words if found[:3] == ["python", "-m", "fl_lightning"]]


def shortened(args: list[str]) -> list[str]:
    """Return a command that does the same with less work.

    Configuration files and not flags shorten a fit, so that its run has the name that the README
    says.
    """
    layers = ["--config", "short.yaml"]
    if any("cifar100" in word for word in args):
        layers += ["--config", "cifar.yaml"]
    if args[0] == "fit":
        last = max(number for number, word in enumerate(args) if word == "--config") + 2
        return [*args[:last], *layers, *args[last:]]
    return [*args, "--max_seeds", "3"] if "--until" in args else args


def write_short_files(folder: Path) -> None:
    """Write the layers of :func:`shortened`, and small studies by the names that the README has."""
    (folder / "short.yaml").write_text(yaml.safe_dump(SHORT))
    (folder / "cifar.yaml").write_text(yaml.safe_dump(CIFAR))
    (folder / "configs").mkdir()
    for name, less in (("try", {"seeds": [0, 1]}), ("tune_try", {"trials": 2, "final": {}})):
        study = yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text()) | less
        study["settings"] |= {"trainer.max_rounds": 2, "trainer.max_local_steps": 2}
        (folder / "configs" / f"{name}.yaml").write_text(yaml.safe_dump(study))
    write_cifar(folder / "data", "cifar100", rows=40)


@pytest.mark.slow
@pytest.mark.essential
@pytest.mark.timeout(1800)
def test_the_commands_of_the_readme_work_in_order_in_one_folder(tmp_path, monkeypatch, capsys):
    """Each ends with 0, and what one leaves does not stand in the way of another."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    write_short_files(tmp_path)
    found = commands()
    kinds = {args[0] for args in found}
    assert kinds == {"fit", "test", "sweep", "tune", "compare", "track", "check", "configs"}
    for args in found:
        code = main(shortened(args))
        assert code == 0, f"{shlex.join(args)}: {capsys.readouterr().err}"
    names = sorted(
        str(path.parent.relative_to("runs")) for path in Path("runs").glob("*/*/metadata.json")
    )
    assert "kd_default/FedMPQKD-digits-seed0" in names
    assert "plain/FedAvg-digits-optimizer_AdamW-lr0.001-seed1" in names
    assert not [name for name in names if re.search("seed[0-9]-", name)], (
        "two runs ask for one name"
    )
    reports = {
        path.parent.name: json.loads(path.read_text())
        for path in Path("reports").rglob("report.json")
    }
    assert set(reports) == {"try", "kd_default"}
    # two methods, three seeds, a tuned one
    assert len([name for name in names if name.startswith("try/")]) == 7


def test_the_readme_says_how_long_what_takes_minutes_takes():
    """Of each block of commands with something longer than a minute, in the text around it."""
    for command in ("lora_default", "overlays/diagnostics.yaml", "sweep --config configs/try.yaml"):
        before, _, after = README.partition(f"fl_lightning fit --config configs/{command}")
        if not after:
            before, _, after = README.partition(command)
        around = before[-700:] + after[:700]
        assert re.search(r"\bminutes?\b", around), command
