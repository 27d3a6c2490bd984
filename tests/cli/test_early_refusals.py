"""Slips are refused before torch is imported: in a new process, by a description that is never out
of date."""

from __future__ import annotations

import json
import os
import random
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from places import ROOT
from refusals import know_installed_classes_alone

from fl_lightning.__main__ import main
from fl_lightning.cli import description as kept
from fl_lightning.cli import parser
from fl_lightning.cli.commands import COMMANDS
from fl_lightning.cli.configs import read_configs
from fl_lightning.cli.description import Description, read_description, write_description
from fl_lightning.cli.early import Unsure, check_arguments, refuse_by
from fl_lightning.cli.refusals import Setting
from fl_lightning.config.constraints import at_least
from fl_lightning.config.packaged import configs_folder, with_found_configs
from fl_lightning.errors import InputError
from fl_lightning.run.session import RunSession

SLIPS = [
    "fit --config kd_default --trainer.max_round 3",
    "fit --config kd_default --model GossipSGD",
    "fit --config kd_default --trainer.callbacks+=LabelNois",
    "fit --config kd_default --model.optimizer.lrr 3",
    "fit --config kd_default --trainer.precision fp16",
    "fit --config kd_defult",
    "fit --config hest_default --trainer.max_rounds three",
    "test --ckpt_path nowhere",
    "track nowhere",
    "fit --config kd_default --ckpt_path nowhere",
    "fit --config plain --data TableData --data.train nowhere.csv --data.target label",
    "fit --config plain --data TableData",
    "fit --config plain --data ImageFolder --data.train nowhere",
    "fit --config plain --data TextFiles --data.train nowhere",
    "fit --config plain --data LeafData --data.train nowhere",
    "fit --config kd_default --data.dataset mnist",
    "fit --config kd_default --model.network resnet21",
    "fit --config kd_default --trainer.max_rounds 0",
    "fit --config kd_default --model FedProx --model.mu -1",
    "fit --config kd_default --data.batch_size 0",
    "fit --config kd_default --trainer.callbacks+=EarlyStopping --trainer.callbacks.patience 0",
]
OF_OTHER_COMMANDS = {
    "energy --network nope": "no table of costs for nope",
    "energy --table nope.json": "it cannot be read (No such file or directory)",
    "energy --table llama_tiny": "name no file, but the network llama_tiny",
    "test --config kd_default --ckpt_path nowhere": "it is neither a run directory nor a checkpoint in one",
    "export nowhere --config kd_default --to x": "it is neither a run directory nor a checkpoint in one",
    "sweep --config nowhere": "there is no such file",
    "sweep --config fedavg": "it is no study file, but one for fit",
    "tune --config exp2_embedded": "it is no search file, but one for sweep",
    "compare --study nowhere --out report": "it is the name of a study in runs",
}
NEW_PROCESS = """
import shlex, sys
from fl_lightning.__main__ import main
for line in sys.stdin.read().splitlines():
    sys.argv[1:] = shlex.split(line)
    print(main(), "torch" in sys.modules, "lightning" in sys.modules)
"""


def printed_by_a_new_process(lines: list[str], folder: Path) -> tuple[list[str], list[str]]:
    """Standard output and error of these command lines, one after the other in one process."""
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith("FL_LIGHTNING_")
    }
    done = subprocess.run(
        [sys.executable, "-c", NEW_PROCESS],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        cwd=folder,
        env={**clean, "XDG_CACHE_HOME": str(folder / "cache"), "PYTHONPATH": str(ROOT)},
        check=True,
    )
    return done.stdout.splitlines(), done.stderr.splitlines()


@pytest.mark.slow
@pytest.mark.essential
def test_a_new_process_refuses_without_torch(tmp_path):
    """The first call of a command imports torch and describes the command; from then on no slip
    does."""
    first = [SLIPS[0]]
    told, refusal = printed_by_a_new_process(first, tmp_path)
    assert told == ["2 True True"]
    assert [
        path.name.partition("-")[0] for path in (tmp_path / "cache" / "fl_lightning").iterdir()
    ] == ["fit"]
    told, refusals = printed_by_a_new_process(SLIPS, tmp_path)
    assert told == ["2 False False"] * len(SLIPS)
    assert refusals[0] == refusal[0]
    assert len(refusals) == len(SLIPS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache"]


@pytest.mark.parametrize("line", OF_OTHER_COMMANDS)
def test_runs_and_studies_that_are_not_there(line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command, *args = shlex.split(line)
    parser.import_short_names()
    known = parser.description_of(command)
    refusal = refusal_of(lambda: refuse_by(known, command, args))
    assert OF_OTHER_COMMANDS[line] in refusal
    assert main([command, *args]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"fl_lightning: error: {refusal}"


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "fl_lightning"


SMALL = Description(
    settings={
        "a.b": Setting(
            "an int", "1", choices=("x",), takes=("int", {"list": ["str"]}), constraint=at_least(1)
        )
    },
    of_classes=("model.c",),
    bases={"m.Base": {"C": "m.C"}},
    classes={"m.C": {"d": Setting(None, "VALUE", required=True)}},
    switches=("s",),
)


def test_a_description_of_another_state_is_not_read(cache, monkeypatch):
    assert read_description("fit") is None
    write_description("fit", SMALL)
    found = read_description("fit")
    assert (found.settings, found.classes) == (SMALL.settings, SMALL.classes)
    assert found.bases == SMALL.bases
    (file,) = cache.iterdir()
    monkeypatch.setattr(kept, "_state", lambda: "after an edit")
    assert read_description("fit") is None
    write_description("fit", SMALL)
    assert read_description("fit") is not None
    assert [*cache.iterdir()] == [file]
    for damaged in ("", "{", "[]", "null", json.dumps({"state": "after an edit"})):
        file.write_text(damaged)
        assert read_description("fit") is None


def test_the_state_follows_files_and_packages(tmp_path, monkeypatch):
    """A file that is edited, added or removed, and a package that is installed, each make another
    state."""
    package, site = tmp_path / "package", tmp_path / "site"
    (package / "inner").mkdir(parents=True)
    site.mkdir()
    (package / "inner" / "one.py").write_text("1")
    monkeypatch.setattr(kept, "PACKAGE", package)
    monkeypatch.setattr(sys, "path", [str(site)])

    def state() -> str:
        kept._state.cache_clear()
        return kept._state()

    states = [state()]
    assert state() == states[0]
    for change in (
        lambda: (package / "inner" / "one.py").write_text("12"),
        lambda: os.utime(package / "inner" / "one.py", ns=(1, 1)),
        lambda: (package / "two.py").write_text(""),
        lambda: (site / "torch-9.dist-info").mkdir(),
    ):
        change()
        states.append(state())
    kept._state.cache_clear()
    assert len(set(states)) == len(states)


def test_a_folder_that_cannot_be_written_changes_nothing(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    write_description("fit", SMALL)
    assert read_description("fit") is None


@pytest.fixture(scope="module")
def fit() -> Description:
    parser.import_short_names()
    with pytest.MonkeyPatch.context() as patch:
        know_installed_classes_alone(patch)
        # it imports data of its own, which the parser knows from then on
        parser.description_of("check")
        return parser.description_of("fit")


CONFIGS = sorted(
    path
    for path in configs_folder().rglob("*.yaml")
    if "study" not in yaml.safe_load(path.read_text())
)


def test_no_configuration_of_the_project_is_refused(fit):
    """Nearly all of them are read to their end, so that a slip beside them is found early."""
    unsure = 0
    for path in CONFIGS:
        args = with_found_configs(["--config", str(path), "--model", "FedAvg"])
        try:
            refusal = refusal_of(lambda args=args: check_arguments(fit, args, read_configs(args)))
        except Unsure:
            unsure += 1
            continue
        given, _, rule = refusal.partition("; ")  # data that a user has to fetch are not here
        assert not refusal or (given in path.read_text() and rule.startswith("no such file; ")), (
            refusal
        )
    assert unsure <= len(CONFIGS) // 4


@pytest.mark.slow
@pytest.mark.essential
def test_a_path_may_be_any_word():
    """A bare word is as good a folder as one with a slash."""
    tried = []
    for command in (name for name, one in COMMANDS.items() if not one.quick and not one.extra):
        known = parser.description_of(command)
        for name, setting in known.settings.items():
            if setting.words == "a path":
                refusal = refusal_of(
                    lambda args=(known, command, [f"--{name}", "rep"]): refuse_by(*args)
                )
                assert "rep" not in refusal  # another flag may be missing
                tried.append(name)
    assert {"out", "root"} <= {*tried}


def test_code_of_the_users_is_left_to_the_parser(fit, tmp_path, monkeypatch):
    """A class that the description does not know may define whatever the parser then finds."""
    monkeypatch.chdir(tmp_path)
    for line in (
        "--model mine.Method --model.alhpa 3",
        "--model FedAvg --data mine.Data --data.num_clientz 3",
        "--model FedAvg --trainer.callbacks+=mine.Figure --zzz 3",
    ):
        refuse_by(fit, "fit", shlex.split(line))
    with pytest.raises(InputError):
        refuse_by(fit, "fit", ["--model", "FedAvgg"])
    monkeypatch.setenv("FL_LIGHTNING_TRAINER__MAX_ROUNDS", "3")
    refuse_by(fit, "fit", ["--model", "FedAvgg"])
    monkeypatch.delenv("FL_LIGHTNING_TRAINER__MAX_ROUNDS")
    (tmp_path / "callbacks.py").write_text("")
    refuse_by(fit, "fit", ["--model", "FedAvgg"])


GOOD = [
    "--config kd_default",
    "--config hest_default",
    "--config lora_default",
    "--config overlays/noise_on",
    "--model FedAvg",
    "--model FedMPQKD",
    "--model HEST",
    "--data TableData --data.train x.csv",
    "--data FederatedImages",
    "--data DatasetData --data.train torchvision.datasets.FakeData",
    "--model.optimizer SGD --model.optimizer.lr 0.1",
    "--trainer.callbacks+=LabelNoise",
    "--trainer.callbacks.round 3",
    "--trainer.logger CSVLogger",
    "--trainer.max_rounds 3",
    "--data.partition IID",
    "--data.partition.beta 0.3",
    "--model.scheduler CosineAnnealingLR",
    "--model.network LlamaTiny",
    "--trainer.privacy.max_epsilon 3",
    "--model.class_path FedAvg",
    "--trainer.callbacks [LabelNoise,EarlyStopping]",
    "--model.terms+=LabelSmoothing",
    "--trainer.callbacks null",
    "--model.average TrimmedMean",
]
VALUES = [
    "3",
    "0.5",
    "three",
    "true",
    "null",
    "-1",
    "1e-3",
    "[1,2]",
    "Adam",
    "FedAvg",
    "x.y",
    "3.5",
    "auto",
    "none",
    "1_000",
    "0x10",
    "norm",
    "NoSuch",
    "yes",
    "off",
    "inf",
]


def mutated(text: str, rng: random.Random) -> str:
    at = rng.randrange(len(text))
    return text[:at] + rng.choice(["", text[at] * 2, rng.choice("abcxyz_")]) + text[at + 1 :]


def test_fields_of_privacy_and_of_secure_sums_are_refused_early(fit, tmp_path, monkeypatch):
    """Mistyped ones and values of another type, in the parser's own words."""
    monkeypatch.chdir(tmp_path)
    know_installed_classes_alone(monkeypatch)
    early = {}
    for group in ("trainer.privacy", "trainer.secure_sum"):
        (cls,) = [kind["fields"] for kind in fit.settings[group].takes if isinstance(kind, dict)]
        for name in fit.classes[cls]:
            for slip in (
                f"--{group}.{name}z=1",
                *(f"--{group}.{name}={value}" for value in ("x", "-1", "true")),
            ):
                args = ["--model=FedAvg", slip]
                if refusal := refusal_of(lambda args=args: refuse_by(fit, "fit", args)):
                    early[slip] = refusal
                    assert refusal == refusal_of(
                        lambda args=args: parser.FederatedCLI("fit", args)
                    ), args
    assert all(
        f"--{group}.{name}z=1" in early
        for group, name in (("trainer.privacy", "clip_norm"), ("trainer.secure_sum", "threshold"))
    )
    assert len(early) >= 20


@pytest.mark.slow
@pytest.mark.essential
@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_refused_early_the_parser_refuses_with_the_same_words(
    fit, seed, tmp_path, monkeypatch, capsys
):
    """Command lines with a random slip, of flags, values, classes and files; what the parser lets
    pass, the run refuses."""
    know_installed_classes_alone(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        RunSession, "run", lambda self, **_: pytest.fail("bad input reached the rounds")
    )
    rng, early = random.Random(seed), 0
    names = [*fit.settings, *fit.of_classes]
    for _ in range(60):
        parts = rng.choices(GOOD, k=rng.randrange(4))
        slip = rng.choice(
            [
                f"--{mutated(rng.choice(names), rng)} {rng.choice(VALUES)}",
                f"--{rng.choice(names)}={rng.choice(VALUES)}",
                f"--{rng.choice(names)} {mutated(rng.choice(VALUES), rng)}",
                mutated(rng.choice(GOOD), rng),
                f"--{rng.choice(names)}",
            ]
        )
        parts.insert(rng.randrange(len(parts) + 1), slip)
        args = shlex.split(" ".join(parts))
        if any(arg.startswith("--print_config") for arg in args):
            continue
        if refusal := refusal_of(lambda args=args: refuse_by(fit, "fit", args)):
            early += 1
            said = refusal_of(lambda args=args: parser.FederatedCLI("fit", args))
            if not said:
                assert main(["fit", *args]) == 2
                said = (
                    capsys.readouterr().err.splitlines()[-1].removeprefix("fl_lightning: error: ")
                )
            assert refusal == said, args
    assert early >= 24


@pytest.mark.slow
def test_what_an_annotation_does_not_allow_the_constructor_refuses_with_the_same_words(
    fit, tmp_path, monkeypatch
):
    """Each number of a method, of its average, of the data and of the trainer, below what is
    allowed."""
    monkeypatch.chdir(tmp_path)
    tried = 0
    groups = {
        "model": "fl_lightning.methods.base.Method",
        "data": "fl_lightning.data.base.FederatedData",
    }
    lines = [
        (f"--{group} {leaf}", f"{group}.{name}", one)
        for group, base in groups.items()
        for leaf, path in fit.bases[base].items()
        if "." not in leaf and path
        for name, one in fit.classes[path].items()
    ] + [("", name, one) for name, one in fit.settings.items() if name.startswith("trainer.")]
    for cls, name, one in lines:
        if (
            one.constraint is None
            or not one.constraint.interval
            or ("float" not in one.takes and "int" not in one.takes)
        ):
            continue
        args = shlex.split(f"--config plain {cls} --{name} -3")
        if refusal := refusal_of(lambda args=args: refuse_by(fit, "fit", args)):
            tried += 1
            assert refusal == refusal_of(lambda args=args: parser.FederatedCLI("fit", args)), args
    assert tried >= 60


def refusal_of(function: Callable[[], object]) -> str:
    """What a call is refused with; empty if it is not."""
    try:
        function()
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.essential
def test_every_command_can_be_described():
    for command in COMMANDS:
        if not COMMANDS[command].quick and not COMMANDS[command].extra:
            found = parser.description_of(command)
            assert found.settings
            assert json.dumps(list(found.settings))
