"""What a command line becomes: the matrix of calls, with a trainer whose ``fit`` only remembers
what it was given."""

from __future__ import annotations

import ast
import gc
import importlib
import os
import subprocess
import sys
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from fake_trainer import replace_command
from places import ROOT
from refusals import know_installed_classes_alone

from fl_lightning.__main__ import main
from fl_lightning.cli import commands
from fl_lightning.cli.configs import check_encoding
from fl_lightning.errors import InputError
from fl_lightning.export.folder import check_folder
from fl_lightning.probing.command import parse_request
from fl_lightning.run.paths import run_and_checkpoints
from fl_lightning.support.imports import garbage_collection_off
from fl_lightning.trainer import FederatedTrainer

BASE = """\
seed_everything: 3
trainer:
  max_rounds: 7
  callbacks:
    - class_path: callbacks.StragglerDropout
model:
  class_path: FedMPQKD
  init_args:
    alpha: 0.5
    optimizer: {class_path: SGD, init_args: {lr: 0.05, momentum: 0.9}}
data:
  class_path: FederatedImages
  init_args:
    num_clients: 100
    partition: {class_path: Dirichlet, init_args: {beta: 0.1, min_size: 1}}
"""


@pytest.fixture
def here(bare_directory: Path) -> Path:
    """A working directory with ``base.yaml``, and no settings in the environment."""
    (bare_directory / "base.yaml").write_text(BASE)
    return bare_directory


@pytest.fixture
def runs(here: Path, monkeypatch: pytest.MonkeyPatch) -> list[SimpleNamespace]:
    """What each call handed to ``fit``."""
    calls: list[SimpleNamespace] = []
    replace_command(monkeypatch, "fit", calls.append)
    return calls


def call(runs: list[SimpleNamespace], line: str) -> SimpleNamespace:
    assert main(["fit", *line.split()]) == 0
    return runs[-1]


def names(objects: Any) -> list[str]:
    return [type(each).__name__ for each in objects]


def test_the_example_config(runs: list[SimpleNamespace]) -> None:
    run = call(runs, "--config base.yaml")
    assert (type(run.method).__name__, run.seed, run.ckpt_path, run.trainer.max_rounds) == (
        "FedMPQKD",
        3,
        None,
        7,
    )
    assert run.trainer.command_line == [
        "python",
        "-m",
        "fl_lightning",
        "fit",
        "--config",
        "base.yaml",
    ]
    assert names(run.trainer.callbacks) == ["StragglerDropout"]


@pytest.mark.parametrize(
    ("line", "path", "expected"),
    [
        ("--trainer.max_rounds 3", "trainer.max_rounds", 3),
        ("--trainer.max_rounds=3", "trainer.max_rounds", 3),
        ("--trainer.precision bf16-mixed", "trainer.precision", "bf16-mixed"),
        ("--seed_everything 0", "seed_everything", 0),
        ("--model.alpha 1.0", "model.init_args.alpha", 1.0),
        ("--model.network resnet20", "model.init_args.network", "resnet20"),
        ("--model FedAvg", "model.class_path", "fl_lightning.methods.FedAvg"),
        ("--model fl_lightning.methods.FedMPQ", "model.class_path", "fl_lightning.methods.FedMPQ"),
        ("--model.optimizer.lr 3e-4", "model.init_args.optimizer.init_args.lr", 3e-4),
        (
            "--model.optimizer AdamW --model.optimizer.lr 3e-4",
            "model.init_args.optimizer.class_path",
            "torch.optim.AdamW",
        ),
        (
            "--model.optimizer AdamW --model.optimizer.lr 3e-4",
            "model.init_args.optimizer.init_args.weight_decay",
            0.01,
        ),
        ("--data.num_clients 10", "data.init_args.num_clients", 10),
        ("--data.partition IID", "data.init_args.partition.class_path", "fl_lightning.data.IID"),
        ("--data.partition.beta 0.5", "data.init_args.partition.init_args.beta", 0.5),
        ("--trainer.logger false", "trainer.logger", False),
        (
            "--trainer.logger CSVLogger --trainer.logger.save_dir x",
            "trainer.logger.class_path",
            "lightning.pytorch.loggers.CSVLogger",
        ),
    ],
)
def test_flags_beat_the_file(
    runs: list[SimpleNamespace], line: str, path: str, expected: object
) -> None:
    value: Any = call(runs, f"--config base.yaml {line}").config
    for key in path.split("."):
        value = value[key]
    assert value == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--trainer.callbacks+=callbacks.LabelNoise", ["StragglerDropout", "LabelNoise"]),
        (
            "--trainer.callbacks+=LabelNoise --trainer.callbacks+=Calibration",
            ["StragglerDropout", "LabelNoise", "Calibration"],
        ),
        ("--config append.yaml", ["StragglerDropout", "LabelNoise", "Calibration"]),
        ("--config replace.yaml", ["Calibration"]),
    ],
)
def test_callbacks_are_appended_or_replaced(
    runs: list[SimpleNamespace], here: Path, line: str, expected: list[str]
) -> None:
    (here / "append.yaml").write_text(
        "trainer: {callbacks+: [LabelNoise, {class_path: callbacks.Calibration}]}"
    )
    (here / "replace.yaml").write_text("trainer: {callbacks: [Calibration]}")
    assert names(call(runs, f"--config base.yaml {line}").trainer.callbacks) == expected


def test_the_argument_of_an_appended_callback(runs: list[SimpleNamespace]) -> None:
    run = call(
        runs, "--config base.yaml --trainer.callbacks+=LabelNoise --trainer.callbacks.round 3"
    )
    assert run.config["trainer"]["callbacks"][-1]["init_args"]["round"] == 3


@pytest.mark.parametrize("method", ["SCAFFOLD", "FedCM", "MoFedSAM"])
def test_a_rate_of_the_server_counts_beside_settings_that_are_left_out(
    runs: list[SimpleNamespace], method: str
) -> None:
    """The parser passes those too, as null."""
    run = call(runs, f"--config base.yaml --model {method} --model.server_lr 0.5")
    assert run.method.server_optimizer.lr == 0.5


def test_files_are_layered_in_their_order(runs: list[SimpleNamespace], here: Path) -> None:
    (here / "small.yaml").write_text("trainer: {max_rounds: 2}\ndata: {num_clients: 10}")
    run = call(runs, "--config base.yaml --config small.yaml")
    assert (run.trainer.max_rounds, run.data.num_clients, run.data.partition.beta) == (2, 10, 0.1)
    assert call(runs, "--config small.yaml --config base.yaml").trainer.max_rounds == 7


def test_data_needs_no_class(runs: list[SimpleNamespace], here: Path) -> None:
    (here / "plain.yaml").write_text("model: FedAvg\ndata: {num_clients: 7, partition: IID}")
    run = call(runs, "--config plain.yaml")
    assert (type(run.data).__name__, run.data.num_clients, type(run.data.partition).__name__) == (
        "FederatedImages",
        7,
        "IID",
    )


def test_what_a_changed_class_does_not_know_is_dropped_and_said(
    runs: list[SimpleNamespace], capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    call(
        runs,
        (
            "--config base.yaml --model.temperature 3 --model FedAvg --model.optimizer AdamW "
            "--data.partition IID"
        ),
    )
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    for dropped in (
        "model.alpha",
        "model.temperature",
        "model.optimizer.momentum",
        "data.partition.beta",
    ):
        assert dropped in said
    (here / "dotted.yaml").write_text("model: {alpha: 0.1, optimizer.lr: 0.5}\n")
    call(runs, "--config base.yaml --config dotted.yaml")
    assert capsys.readouterr().err == ""


@pytest.mark.quick("FedDC", "FedMPQ", "FedRep")
@pytest.mark.parametrize(
    "name",
    [
        "FedDC",
        "FedSpeed",
        "MoFedSAM",
        "SCAFFOLD",
        "FedCM",
        "FedProx",
        "FedAdam",
        "FedMPQ",
        "FedRep",
    ],
)
def test_a_method_has_its_own_defaults_wherever_its_class_stands(name: str, here: Path) -> None:
    """Flags and files that set something of no class yet are of the class that is named last."""
    from fl_lightning.cli.parser import resolve

    (here / "part.yaml").write_text("model: {network: mlp}\n")
    flags, part = ["--model.network", "mlp"], ["--config", str(here / "part.yaml")]
    expected = yaml.safe_load(resolve(["--model", name, *flags]))
    assert expected["model"]["init_args"]["network"] == "mlp"
    class_path = f"--model.class_path=fl_lightning.methods.{name}"
    for given in ([*flags, "--model", name], [*flags, class_path], [*part, "--model", name]):
        assert yaml.safe_load(resolve(given)) == expected, given
    other = ["--model", "FedNova", *flags, "--model.mu", "0.25", "--model", name]
    model = yaml.safe_load(resolve(other))["model"]["init_args"]
    assert model == {**expected["model"]["init_args"], **({"mu": 0.25} if "mu" in model else {})}


def test_a_flag_beats_a_file_that_is_named_after_it(here: Path) -> None:
    from fl_lightning.cli.parser import resolve

    (here / "more.yaml").write_text("trainer: {participation: 0.5, callbacks: [LabelNoise]}\n")
    files = ["--config", "base.yaml", "-c", "more.yaml"]
    flags = [
        "--trainer.max_rounds=7",
        "--trainer.callbacks+=StragglerDropout",
        "--model",
        "SCAFFOLD",
    ]
    assert resolve([*flags, *files]) == resolve([*files, *flags])
    assert resolve([*flags[:1], *files[:2], *flags[1:], *files[2:]]) == resolve([*files, *flags])


def test_a_setting_before_the_class_that_has_it(here: Path) -> None:
    from fl_lightning.cli.parser import resolve

    model = yaml.safe_load(resolve(["--model.alpha", "0.3", "--model", "FedDyn"]))["model"][
        "init_args"
    ]
    assert (model["alpha"], model["weigh_by"]) == (0.3, "clients")


@pytest.mark.parametrize(
    "flags",
    [["--data", "TextFiles"], ["--data=fl_lightning.data.TextFiles"], ["--config", "text.yaml"]],
)
def test_a_class_has_its_own_defaults(
    flags: list[str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What neither a file nor a flag gives is the class's default, and no other class's; what a
    file gives to another class stays given, wherever the flags stand."""
    from fl_lightning.cli.parser import resolve

    (here / "text.yaml").write_text("data:\n  class_path: TextFiles\n")
    (here / "images.yaml").write_text(
        "data:\n  class_path: FederatedImages\n  init_args: {batch_size: 7, crop: pad}\n"
    )
    own = {"num_clients": 0, "val_fraction": 0.1, "partition": None, "context": 128}
    for more, size in (
        ([], 16),
        (["--config", str(here / "images.yaml")], 7),
        (["--data.batch_size", "5"], 5),
    ):
        given = ["--model", "FedAvg", *more, *flags, "--data.train", "x.jsonl"]
        data = yaml.safe_load(resolve(given))["data"]["init_args"]
        assert {name: data[name] for name in own} == own
        assert data["batch_size"] == size
        assert "crop" not in data
    named = "{class_path: TextFiles, init_args: {train: x.jsonl, batch_size: 3}}"
    monkeypatch.setenv("FL_LIGHTNING_DATA", named)
    data = yaml.safe_load(resolve(["--model", "FedAvg"]))["data"]
    assert {name: data["init_args"][name] for name in own} == own
    assert data["init_args"]["batch_size"] == 3


def test_the_environment_is_beaten_by_files_and_those_by_flags(
    runs: list[SimpleNamespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNRELATED__MAX_ROUNDS", "1")
    monkeypatch.setenv("FL_LIGHTNING_TRAINER__MAX_ROUNDS", "5")
    monkeypatch.setenv("FL_LIGHTNING_TRAINER__LOCAL_EPOCHS", "4")
    monkeypatch.setenv("FL_LIGHTNING_DATA", "{num_clients: 9}")
    run = call(runs, "--model FedAvg")
    assert (
        run.trainer.max_rounds,
        run.config["trainer"]["local_epochs"],
        run.data.num_clients,
    ) == (5, 4, 9)
    run = call(runs, "--config base.yaml")
    assert (
        run.trainer.max_rounds,
        run.config["trainer"]["local_epochs"],
        run.data.num_clients,
    ) == (
        7,
        4,
        100,
    )
    assert call(runs, "--config base.yaml --trainer.max_rounds 2").trainer.max_rounds == 2


def test_a_config_from_the_environment(
    runs: list[SimpleNamespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FL_LIGHTNING_CONFIG", "base.yaml")
    assert call(runs, "").trainer.max_rounds == 7


def test_numbers_of_flags_and_of_the_environment_are_decimal(
    runs: list[SimpleNamespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FL_LIGHTNING_TRAINER__EVAL_EVERY", "011")
    words = ["--config", "base.yaml", "--seed_everything", "010", "--trainer.run_name", "1:30"]
    assert main(["fit", *words, "--data.partition", "{min_size: 010}"]) == 0
    trainer = runs[-1].trainer
    assert (runs[-1].seed, trainer.eval_every, trainer.run_name) == (10, 11, "1:30")
    assert runs[-1].data.partition.min_size == 10


@pytest.mark.parametrize("given", ["base.yaml", ""])
def test_the_configuration_of_a_run_beats_that_of_the_environment(
    here: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    tested: list[SimpleNamespace] = []
    replace_command(monkeypatch, "test", tested.append)
    (here / "run").mkdir()
    (here / "run" / "config.yaml").write_text(BASE.replace("max_rounds: 7", "max_rounds: 9"))
    monkeypatch.setenv("FL_LIGHTNING_CONFIG", given)
    assert main(["test", "run"]) == 0
    assert tested[0].trainer.max_rounds == 9
    assert main(["test", "--ckpt_path", "last"]) == (0 if given else 2)


def test_a_tilde_is_the_home_folder(
    runs: list[SimpleNamespace], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(here))
    run = call(runs, "--config base.yaml --trainer.default_root_dir ~/runs")
    assert run.trainer.root == here / "runs"
    (here / "run").mkdir()
    (here / "run" / "config.yaml").write_text(BASE)
    assert run_and_checkpoints("~/run") == (here / "run", [])
    assert parse_request("~/run/checkpoints/round_000002", None)[0] == str(here / "run")
    assert check_folder("~/made", overwrite=False) == here / "made"


@pytest.mark.parametrize(
    "line",
    [
        "--config base.yaml",
        (
            "--config base.yaml --trainer.callbacks+=LabelNoise --trainer.logger CSVLogger "
            "--trainer.logger.save_dir logs"
        ),
        "--model FedAvg --model.optimizer AdamW --data.partition IID --seed_everything 8",
        "--config base.yaml --ckpt_path last",
        "--config base.yaml --model.network resnet20",
        "--config base.yaml --model.network torchvision.models.resnet18 --data.partition.beta .inf",
    ],
)
@pytest.mark.filterwarnings("default")
def test_the_saved_configuration_gives_the_same_run(
    runs: list[SimpleNamespace], here: Path, line: str
) -> None:
    first = call(runs, line)
    (here / "saved.yaml").write_text(first.trainer.config_text)
    again = call(runs, "--config saved.yaml")
    assert "Unable" not in first.trainer.config_text
    assert again.trainer.config_text == first.trainer.config_text
    assert (again.config, again.seed, again.ckpt_path) == (first.config, first.seed, None)


def test_print_config_can_be_run(
    runs: list[SimpleNamespace], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["fit", "--config", "base.yaml", "--trainer.max_rounds", "4", "--print_config"]) == 0
    )
    assert not runs
    (here / "printed.yaml").write_text(capsys.readouterr().out)
    assert call(runs, "--config printed.yaml").trainer.max_rounds == 4


def test_print_config_prints_the_whole_command_line_wherever_it_stands(here, capsys) -> None:
    shown = []
    for line in ("--config base.yaml --print_config", "--print_config --config base.yaml"):
        assert main(["fit", *line.split(), "--trainer.max_rounds", "4"]) == 0
        shown.append(yaml.safe_load(capsys.readouterr().out))
    assert shown[0] == shown[1]
    assert (shown[1]["seed_everything"], shown[1]["trainer"]["max_rounds"]) == (3, 4)


@pytest.mark.parametrize("name", ["MLFlowLogger", "TensorBoardLogger", "WandbLogger", "CSVLogger"])
def test_loggers_by_their_short_name(
    here: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert main(["fit", "--config", "base.yaml", "--trainer.logger", name, "--print_config"]) == 0
    assert (
        yaml.safe_load(capsys.readouterr().out)["trainer"]["logger"]["class_path"]
        == f"lightning.pytorch.loggers.{name}"
    )


def test_ckpt_path_goes_to_fit_only(runs: list[SimpleNamespace]) -> None:
    run = call(runs, "--config base.yaml --ckpt_path last")
    assert run.ckpt_path == "last"
    assert "ckpt_path" not in run.config


def test_a_class_of_the_working_directory(runs: list[SimpleNamespace], here: Path) -> None:
    (here / "my_methods.py").write_text(
        "from fl_lightning.methods import FedAvg\nclass MyMethod(FedAvg): pass\n"
    )
    try:
        assert (
            type(call(runs, "--config base.yaml --model my_methods.MyMethod").method).__name__
            == "MyMethod"
        )
    finally:
        sys.modules.pop("my_methods", None)


def test_global_seeds_are_left_alone(
    runs: list[SimpleNamespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    call(runs, "--config base.yaml")
    assert "PL_GLOBAL_SEED" not in os.environ


def test_help_of_a_class_is_one_screen(
    runs: list[SimpleNamespace], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    know_installed_classes_alone(monkeypatch)
    for flag, words in (
        ("--model.help FedAvg", "--model.average"),
        ("--trainer.callbacks.help=LabelNoise", "--trainer.callbacks.round"),
        ("--data.partition.help Dirichlet", "--data.partition.beta  a number"),
        ("--model.optimizer.help SGD", "--model.optimizer.lr  a number"),
        ("--model.server_optimizer.help ServerAdam", "--model.server_optimizer.tau"),
        ("--model.scheduler.help StepLR", "StepLR\nDecays the learning rate"),
    ):
        assert main(["fit", *flag.split()]) == 0
        text = capsys.readouterr().out
        assert words in text
        assert text.count("\n") <= 34
        assert max(map(len, text.splitlines())) <= 120
        assert "torch.nn" not in text
        assert "object at 0x" not in text
        assert "scheduler.optimizer" not in text
    assert main(["fit", "--model.help", "FedMPQKD"]) == 0
    assert capsys.readouterr().out.count("\n") <= 72
    assert main(["fit", "--model.optimizer.help"]) == 0
    assert "\nAdamW " in capsys.readouterr().out
    assert main(["fit", "--model.help"]) == 0
    printed = capsys.readouterr().out
    assert "FedProx" in printed
    lists = printed.split(":\n")
    kinds = {title.splitlines()[-1]: names for title, names in pairwise(lists)}
    assert "QFedAvg" in kinds["quantised"]
    assert "FedKD" not in kinds["quantised"]
    assert main(["fit", "--model.help", "FedAvgg"]) == 2
    assert "write --model.help FedAvg\n" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--help", "--model.help=FedAvg"])
def test_help_of_a_command(
    runs: list[SimpleNamespace], capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    assert main(["fit", flag]) == 0
    text = capsys.readouterr().out
    assert "FL_LIGHTNING_TRAINER__MAX_ROUNDS" in text if flag == "--help" else "network" in text


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (InputError("a", "b", "c"), 2),
        (KeyboardInterrupt(), 130),
        (SystemExit(143), 143),
        (SystemExit(), 0),
        (SystemExit("why"), 1),
    ],
)
def test_exit_codes(
    runs: list[SimpleNamespace], monkeypatch: pytest.MonkeyPatch, raised: BaseException, code: int
) -> None:
    monkeypatch.setattr(FederatedTrainer, "fit", _raising(raised))
    assert main(["fit", "--config", "base.yaml"]) == code


def test_a_bug_keeps_its_traceback(
    runs: list[SimpleNamespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FederatedTrainer, "fit", _raising(ValueError("in the middle of training")))
    with pytest.raises(ValueError, match="in the middle"):
        main(["fit", "--config", "base.yaml"])


def _raising(error: BaseException) -> Any:
    def fit(self: FederatedTrainer, method: Any, data: Any, *, seed: int = 0) -> None:
        raise error

    return fit


def test_a_command_without_trainer_is_one_entry_of_the_table(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "studying.py").write_text(
        "calls = []\ndef compare(study: str, *, out: str = 'reports') -> None:\n    calls.append((study, out))\n"
    )
    monkeypatch.syspath_prepend(here)
    monkeypatch.setitem(
        commands.COMMANDS, "compare", commands.Command("compare runs", function="studying:compare")
    )
    assert main(["compare", "--study", "exp2", "--out", "here"]) == 0
    assert sys.modules.pop("studying").calls == [("exp2", "here")]
    assert main(["compare", "--study", "exp2", "--output", "here"]) == 2
    sys.modules.pop("studying")


def test_a_switch_needs_no_value() -> None:
    from fl_lightning.cli.parser import with_bare_flags

    assert with_bare_flags([], ["calibrate"]) == []

    given = [
        "--calibrate",
        "--out",
        "x",
        "--dry_run=false",
        "--calibrate",
        "false",
        "--other",
        "--dry_run",
    ]
    assert with_bare_flags(given, ["calibrate", "dry_run"]) == [
        *("--calibrate", "true", "--out", "x", "--dry_run=false"),
        *("--calibrate", "false", "--other", "--dry_run", "true"),
    ]
    assert with_bare_flags(["--dry_run", "-c", "a"], ["dry_run"]) == [
        "--dry_run",
        "true",
        "-c",
        "a",
    ]


def test_a_command_with_trainer_is_a_method_of_it(
    runs: list[SimpleNamespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(commands.COMMANDS, "probe", commands.Command("probe a run"))

    def probe(self: FederatedTrainer, method: Any, data: Any, *, seed: int, depth: int = 1) -> None:
        runs.append(SimpleNamespace(method=method, depth=depth))

    monkeypatch.setattr(FederatedTrainer, "probe", probe, raising=False)
    assert main(["probe", "--config", "base.yaml", "--depth", "4"]) == 0
    assert runs[-1].depth == 4


PROGRAM = """
import sys
from fl_lightning.__main__ import main
code = main(sys.argv[1:])
heavy = {"torch", "lightning", "numpy", "jsonargparse", "mlflow"} & set(sys.modules)
assert not heavy, heavy
sys.exit(code)
"""


def python(*args: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, *args],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": paths},
    )


@pytest.mark.slow
@pytest.mark.essential
def test_the_commands_import_only_what_every_command_needs() -> None:
    """torchvision, scipy and matplotlib come with Lightning; what a run may never need comes when
    it does."""
    seen = (
        "import sys, fl_lightning.cli.parser, callbacks; print({name.partition('.')[0] for name in "
        "sys.modules})"
    )
    done = python("-c", seen)
    assert done.returncode == 0, done.stderr
    imported = set(ast.literal_eval(done.stdout))
    assert "torch" in imported
    assert imported.isdisjoint(
        {"mlflow", "sklearn", "timm", "optuna", "pandas", "sqlalchemy", "alembic", "tensorboard"}
    )


def test_imports_are_made_without_collections_and_the_rest_with_them() -> None:
    assert gc.isenabled()
    with suppress(ImportError), garbage_collection_off():
        assert not gc.isenabled()
        raise ImportError("no such module")
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    circle: list[Any] = [[]]
    circle.append(circle)
    del circle
    assert gc.collect() > 0


@pytest.mark.parametrize(
    ("flags", "code", "stream"),
    [(["--help"], 0, "stdout"), ([], 2, "stderr"), (["--version"], 0, "stdout")],
)
def test_quick_answers_import_nothing_heavy(flags: list[str], code: int, stream: str) -> None:
    done = python("-c", PROGRAM, *flags)
    assert done.returncode == code, done.stderr
    text = getattr(done, stream)
    if flags == ["--version"]:
        assert text.startswith("fl_lightning")
    else:
        assert "python -m fl_lightning fit --config configs/kd_default.yaml" in text
        assert "mlflow ui --backend-store-uri sqlite:///mlflow.db" in text
        assert all(name in text for name in commands.COMMANDS)


def test_the_first_line_of_a_commands_help_is_a_sentence() -> None:
    found = [one.function for one in commands.COMMANDS.values() if one.function and not one.extra]
    assert len(found) > 5
    for module, _, name in (function.partition(":") for function in found):
        first = (getattr(importlib.import_module(module), name).__doc__ or "").splitlines()[0]
        assert first.endswith((".", ":")), first


def test_rejected_uploads_are_one_line_and_their_number(
    here: Path, capfd: pytest.CaptureFixture[str], caplog: Any
) -> None:
    (here / "hostile.py").write_text(
        "from fl_lightning.hooks import Stressor\n"
        "class Cut(Stressor):\n"
        "    def change_bytes(self, upload, *, client, round, context):\n"
        "        return upload if client.id == 0 else upload[:-5]\n"
    )
    data = (
        "--data.dataset synthetic --data.synthetic_size 16 --data.synthetic_examples 40 "
        "--data.synthetic_test_examples 10"
    )
    line = (
        f"fit --model FedAvg {data} --data.num_clients 5 --trainer.participation 1 --trainer.max_rounds "
        "3 --trainer.logger false"
    )
    assert main([*line.split(), "--trainer.workers", "1", "--trainer.callbacks+=hostile.Cut"]) == 0
    sys.modules.pop("hostile")
    said = [text for text in capfd.readouterr().err.splitlines() if "rejected" in text]
    assert len(said) == 2
    assert said[0].startswith("round 1: upload of client")
    assert said[1].split()[:3] == ["uploads", "rejected", "12,"]
    # what other handlers get
    assert (
        len([record for record in caplog.records if "upload of client" in record.getMessage()])
        == 12
    )


def test_configurations_are_not_copied_to_a_folder_without_a_name(
    capsys, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["configs", ""]) == 2
    assert "it takes a folder to copy to" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
@pytest.mark.essential
def test_the_program_from_any_directory(here: Path) -> None:
    done = python(
        "-m",
        "fl_lightning",
        "fit",
        "--config",
        "base.yaml",
        "--model.network",
        "resnet20",
        "--print_config",
        cwd=here,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert yaml.safe_load(done.stdout)["model"]["init_args"]["network"] == "resnet20"
    assert sorted(path.name for path in here.iterdir()) == ["base.yaml"]


def test_bytes_that_the_locale_cannot_read_are_told_from_those_that_nobody_can():
    utf8, latin = (text.encode(name).decode("ascii", "surrogateescape") for text, name in UMLAUTS)
    with pytest.raises(InputError, match="ü; it is UTF-8, and the locale is not; set LC_ALL"):
        check_encoding([utf8])
    with pytest.raises(InputError, match=r"\\xfc; it is not UTF-8.*write it in UTF-8"):
        check_encoding([latin])


UMLAUTS = ("ü", "utf-8"), ("ü", "latin-1")
