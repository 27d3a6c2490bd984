"""Bad input: exit code 2, one line on stderr in three parts, no traceback, nothing created, nothing
trained."""

from __future__ import annotations

import errno
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_trainer import replace_command
from refusals import know_installed_classes_alone

from fl_lightning.__main__ import main
from fl_lightning.cli import parser
from fl_lightning.cli.commands import COMMANDS
from fl_lightning.cli.early import refuse_by
from fl_lightning.errors import InputError
from fl_lightning.trainer import FederatedTrainer

FILES = {
    "base.yaml": """\
model:
  class_path: FedMPQKD
  init_args:
    alpha: 0.5
    optimizer: {class_path: SGD, init_args: {lr: 0.05}}
data:
  class_path: FederatedImages
  init_args:
    partition: {class_path: Dirichlet, init_args: {beta: 0.1}}
""",
    "key.yaml": "model: FedAvg\ntrainer:\n  max_round: 3\n",
    "group.yaml": "model: FedAvg\ntrainr:\n  max_rounds: 3\n",
    "model_key.yaml": "model:\n  class_path: FedMPQKD\n  init_args:\n    alhpa: 3\n",
    "data_key.yaml": "model: FedAvg\ndata:\n  num_clientz: 7\n",
    "class.yaml": "model:\n  class_path: FedAvgg\n",
    "value.yaml": "model: FedAvg\ntrainer:\n  max_rounds: three\n",
    "seed.yaml": "model: FedAvg\nseed_everything: true\n",
    "null.yaml": "model: FedAvg\ntrainer:\n",
    "null_value.yaml": "model: FedAvg\ntrainer:\n  local_epochs:\n",
    "null_argument.yaml": "model: FedAvg\ntrainer:\n  callbacks:\n    - class_path: LabelNoise\n      init_args: {round: null}\n",
    "list.yaml": "- a\n- b\n",
    "text.yaml": "hello\n",
    "empty.yaml": "",
    "four.yaml": "trainer: {max_rounds: 4}",
    "model_null.yaml": "trainer: {max_rounds: 1}\nmodel:",
    "syntax.yaml": "model: FedAvg\ntrainer:\n  max_rounds: [3\nmodel: FedAvg\n",
    "tab.yaml": "trainer:\n\tmax_rounds: 3\n",
    "no_mapping.yaml": (
        "model:\n  optimizer: {class_path: torch.optim.SGD, init_args: [lr, 0.03]}\n"
    ),
    "twice.yaml": "model: FedAvg\nmodel: FedMPQ\n",
    "odd.yaml": "? [a, b]\n: 3\n",
    "number.yaml": "3: 3\nmodel: FedAvg\n",
    "object.yaml": "model: !!python/object/apply:os.getcwd []\n",
    "callback.yaml": "model: FedAvg\ntrainer:\n  callbacks:\n    - class_path: LabelNois\n",
    "callback_key.yaml": "model: FedAvg\ntrainer:\n  callbacks:\n    - class_path: LabelNoise\n      init_args: {rond: 3}\n",
    "study.yaml": "study: s\nconfig: base.yaml\nseeds: [0]\nmethods: {FedAvg: {}}\n",
    "search.yaml": "study: s\nconfig: base.yaml\nspace: {model.alpha: [0, 1]}\ntrials: 2\n",
    "named.yaml": "model:\n  class_path: FedAvg\n  init_args:\n    network: llama_tiny\n",
    "epochs.yaml": "model: FedAvg\ntrainer:\n  max_epochs: 5\n",
    "beside.yaml": "model:\n  class_path: FedAvg\n  network: resnet20\n",
    "callback_beside.yaml": "model: FedAvg\ntrainer:\n  callbacks:\n    - class_path: LabelNoise\n      round: 3\n",
    "no_list.yaml": "model: FedAvg\ntrainer:\n  callbacks: LabelNoise\n",
    "octal.yaml": "model: FedAvg\nseed_everything: 010\n",
    "sexagesimal.yaml": "model: FedAvg\ntrainer: {callbacks: [], max_rounds: 1:30}\n",
}

BAD = [
    (
        "fit --config named.yaml --model.network.init_args.ffa true",
        "error: --model.network.init_args.ffa true; model.network is a name here (named.yaml, line 4), "
        "and only a class has settings; write --model.network LlamaTiny --model.network.init_args.ffa true",
    ),
    # the command line itself
    ("ftt --config base.yaml", "write python -m fl_lightning fit"),
    ("--config base.yaml fit", "must be a command"),
    ("fit", "no model given"),
    ("fit base.yaml", "write --config base.yaml"),
    ("fit --config", "write --config FILE"),
    ("fit --config base.yaml --trainer.max_round 3", "write --trainer.max_rounds"),
    ("fit --config base.yaml --max_rounds 3", "write --trainer.max_rounds"),
    ("fit --config base.yaml --num_clients 3", "write --data.num_clients"),
    ("fit --config base.yaml --partition.beta 3", "write --data.partition.beta"),
    (
        "fit --config base.yaml --model.scheduler ReduceLROnPlateau",
        "several classes have that name, and it must be a class of LRScheduler or null; "
        "write --model.scheduler torch.optim.lr_scheduler.ReduceLROnPlateau",
    ),
    ("fit --config base.yaml --trainer.max_rounds", "--trainer.max_rounds without a value"),
    ("fit --config base.yaml --print_config=nonsense", "nonsense"),
    # values
    (
        "fit --config base.yaml --trainer.max_rounds three",
        "three; it must be an int; write --trainer.max_rounds 100",
    ),
    ("fit --config base.yaml --trainer.max_rounds 3.5", "must be an int"),
    ("fit --config base.yaml --trainer.max_rounds true", "must be an int"),
    ("fit --config base.yaml --trainer.max_rounds=", "must be an int"),
    ("fit --config base.yaml --trainer.participation '{a: 1}'", "must be a number"),
    ("fit --config base.yaml --trainer.precision 32", "write --trainer.precision 32-true"),
    ("fit --config base.yaml --trainer.engine sequentiall", "write --trainer.engine sequential"),
    ("fit --config base.yaml --trainer 3", "trainer is a group of settings"),
    ("fit --config base.yaml --seed_everything true", "must be an int >= 0"),
    ("fit --config base.yaml --seed_everything=-1", "must be an int >= 0"),
    ("fit --config base.yaml --seed_everything 1.5", "must be an int >= 0"),
    ("fit --config base.yaml --data.num_clients ten", "write --data.num_clients"),
    ("fit --config base.yaml --model.alpha three", "--model.alpha three; it must be a number"),
    (
        "fit --config base.yaml --model.optimizer.lr three",
        "--model.optimizer.lr three; it must be a number",
    ),
    ("fit --config base.yaml --trainer.max_rounds 0", "max_rounds"),
    ("fit --config base.yaml --trainer.devices nonsense", "devices"),
    # what YAML 1.1 reads to other bases
    ("fit --config octal.yaml", "octal.yaml, line 2: 010; YAML 1.1 reads it to the base 8 or 60"),
    ("fit --config sexagesimal.yaml", "sexagesimal.yaml, line 2: 1:30; YAML 1.1"),
    ("fit --config base.yaml --trainer.max_rounds 1:30", "1:30; it must be an int"),
    ("fit --config base.yaml --trainer.participation 0:0.5", "0:0.5; it must be a number"),
    # names of settings
    ("fit --config base.yaml --model.alhpa 3", "write --model.alpha 3"),
    ("fit --config base.yaml --model.num_classes 3", "comes from the data"),
    ("fit --config base.yaml --model FedAvg --model.bits 3", "FedAvg has no setting bits"),
    ("fit --config base.yaml --model.optimizer.lrr 3", "write --model.optimizer.lr 3"),
    ("fit --config base.yaml --data.partition.betta 3", "write --data.partition.beta 3"),
    (
        "fit --config base.yaml --trainer.callbacks+=LabelNoise --trainer.callbacks.rond 3",
        "write --trainer.callbacks.round 3",
    ),
    (
        "fit --config base.yaml --model.optimizer AdamW --model.optimizer.momentum 0.9",
        "AdamW has no setting momentum; write one of amsgrad, betas, ",
    ),
    (
        "fit --config base.yaml --trainer.callbacks+=StragglerDropout --trainer.callbacks.fraction 0.9",
        "StragglerDropout has no setting fraction; write ",
    ),
    (
        "fit --config base.yaml --data.partition IID --data.partition.alpha 1",
        "IID has no setting alpha",
    ),
    ("fit --config base.yaml --model.lr 0.1", "write --model.optimizer.lr 0.1"),
    # names of classes
    ("fit --config base.yaml --model FedAvgg", "write --model FedAvg"),
    ("fit --config base.yaml --model no.such.Class", "cannot be imported"),
    (
        "fit --config base.yaml --model torch.nn.Linear",
        "write --model NAME with one of those that --model.help lists",
    ),
    ("fit --config base.yaml --model.optimizer AdamX", "write --model.optimizer Adam"),
    ("fit --config base.yaml --model.optimizer torch.nn.Linear", "AdamW"),
    ("fit --config base.yaml --data FederatedImage", "write --data FederatedImages"),
    ("fit --config base.yaml --data.partition Dirichle", "write --data.partition Dirichlet"),
    (
        "fit --config base.yaml --trainer.callbacks+=LabelNois",
        "write --trainer.callbacks+=LabelNoise",
    ),
    (
        "fit --config base.yaml --trainer.callbacks LabelNoise",
        "write --trainer.callbacks+=LabelNoise",
    ),
    ("fit --config base.yaml --trainer.logger CSVLoger", "write --trainer.logger CSVLogger"),
    ("fit --config base.yaml --trainer.logger CSVLogger", "write --trainer.logger.save_dir"),
    # what other programs call it
    ("fit --config base.yaml --trainer.max_epochs 5", "write --trainer.max_rounds for rounds"),
    (
        "fit --config base.yaml --trainer.max_epochs 5",
        "--trainer.local_epochs for a client's passes",
    ),
    (
        "fit --config epochs.yaml",
        "trainer.max_epochs (epochs.yaml, line 3); there is no such setting; write trainer.max_rounds",
    ),
    ("fit --config base.yaml --epochs 5", "write --trainer.max_rounds"),
    ("fit --config base.yaml --rounds 5", "write --trainer.max_rounds"),
    ("fit --config base.yaml --seed 1", "write --seed_everything"),
    ("fit --config base.yaml --trainer.seed 1", "write --seed_everything"),
    ("fit --config base.yaml --trainer.rounds 3", "write --trainer.max_rounds 3"),
    ("fit --config base.yaml --federation.rounds 3", "write --trainer.max_rounds"),
    ("fit --config base.yaml --lr 0.1", "write --model.optimizer.lr"),
    ("fit --config base.yaml --model.lr 0.1", "write --model.optimizer.lr 0.1"),
    ("fit --config base.yaml --optimizer.lr 0.1", "write --model.optimizer.lr"),
    ("fit --config base.yaml --batch_size 8", "write --data.batch_size"),
    ("fit --config base.yaml --alpha 0.1", "write --model.alpha"),
    ("fit --config base.yaml --data.alpha 0.1", "write --data.partition.beta 0.1"),
    ("fit --config base.yaml --dataset digits", "write --data.dataset"),
    ("fit --config base.yaml --gpus 1", "write --trainer.devices"),
    ("fit --config base.yaml --trainer.gpus 1", "write --trainer.devices"),
    ("fit --config base.yaml --zzz 1", "see --help"),
    ("fit --config base.yaml --model.optimizer Adma", "write --model.optimizer Adam\n"),
    ("fit --config base.yaml --trainer.callbacks+=NoSuchThing", "write --trainer.callbacks+=NAME"),
    (
        "fit --config study.yaml",
        (
            "it is a study, and fit runs one configuration; write python -m fl_lightning sweep --config "
            "study.yaml"
        ),
    ),
    ("compare --config study.yaml --out report", "write --study study.yaml"),
    ("sweep --study study.yaml", "write --config"),
    ("fit --config search.yaml", "write python -m fl_lightning tune --config search.yaml"),
    ("sweep --config base.yaml", "write python -m fl_lightning fit --config base.yaml"),
    ("sweep --config search.yaml", "write python -m fl_lightning tune --config search.yaml"),
    ("tune --config study.yaml", "write python -m fl_lightning sweep --config study.yaml"),
    (
        "fit --config beside.yaml",
        "model.network (beside.yaml, line 3); beside class_path stands init_args alone; write network under",
    ),
    ("fit --config callback_beside.yaml", "trainer.callbacks.round (callback_beside.yaml, line 5)"),
    # near names, and none that misleads
    ("fit --config base.yaml --trainer.name x", "write --trainer.run_name"),
    (
        "fit --config base.yaml --data.metrics+=torchmetrics.classification.MulticlassF2Score",
        "write --data.metrics+=torchmetrics.classification.MulticlassF1Score",
    ),
    (
        "fit --config base.yaml --data TableData --data.train x.csv --data.target label --data.missing zero",
        "drop or null; write --data.missing NAME with one of these names\n",
    ),
    (
        "export x --config base.yaml --to out --format pt",
        "transformers or onnx; write --format auto",
    ),
    # names that are near none
    (
        "fit --config base.yaml --model GossipSGD",
        "write --model NAME with one of those that --model.help lists",
    ),
    ("fit --config base.yaml --model FedSGD", "write --model FedAvg"),
    ("fit --config base.yaml --trainer.callbacks [EarlyStopping,LabelNoize]", "+=LabelNoise\n"),
    (
        "fit --config base.yaml --trainer.callbacks+=Zzz",
        "NAME with one of those that --trainer.callbacks.help",
    ),
    ("fit --config base.yaml --trainer.precision fp16", "write --trainer.precision 16-mixed"),
    ("fit --config base.yaml --trainer.precision bf16", "write --trainer.precision bf16-mixed"),
    (
        "fit --config base.yaml --trainer.logger.tracking_uri X",
        "write --trainer.logger MLFlowLogger --trainer.logger.tracking_uri X",
    ),
    ("fit --config base.yaml --trainer.logger wandb", "write --trainer.logger WandbLogger"),
    ("fit --config base.yaml trainer.max_rounds=3", "write --trainer.max_rounds 3"),
    ("fit --config base.yaml --trainer.tags three", "trainer.tags"),
    ("train --config base.yaml", "write python -m fl_lightning fit"),
    ("krum", "see python -m fl_lightning --help"),
    ("fit --config base.yaml --data.partition", "--data.partition without a value"),
    (
        "fit --config base.yaml --trainer.logger",
        "--trainer.logger without a value; it needs one; write",
    ),
    ("check --modell FedAvg", "write --model"),
    ("energy --rank 4", "--rank 4 without --calibrate; it is of a measurement"),
    ("energy --high bfloat16", "--high bfloat16 without --calibrate"),
    ("check --model FedAvg --noise -1", "--noise -1.0; a deviation is 0 or more"),
    ("check", "write --model FedAvg, or the import path of yours"),
    (
        "rank --model FedAvg --settings words",
        "it must be a mapping or null; write --settings '{NAME: VALUE}'",
    ),
    (
        "fit --config base.yaml --trainer.tags '{a: 1}'",
        """a mapping of names to texts or null; write --trainer.tags '{NAME: "TEXT"}'""",
    ),
    ("sweep --config study.yaml --dryrun", "write --dry_run"),
    ("compare --study s --no_such_thing 3", "there is no such flag"),
    # files
    ("fit --config bas.yaml", "there is no such file; write --config base.yaml"),
    ("sweep --config zzz.yaml", "there is no such file; write --config configs/exp1_embedded.yaml"),
    (
        "tune --config zzz.yaml",
        "there is no such file; write --config configs/tune_exp1_embedded.yaml",
    ),
    ("fit --config base.yml", "write --config base.yaml"),
    ("fit --config folder", "it is a directory"),
    ("fit --config binary.yaml", "it is not a text file"),
    ("fit --config latin.yaml", "line 2 has the byte 0xe9, which is not UTF-8; save it as UTF-8"),
    (
        "track --run_dirs runs/a",
        "--run_dirs; it is no flag; write its values as words after the command",
    ),
    ("export nowhere --to folder", "error: nowhere; it is neither a run directory"),
    (
        "fit --config key.yaml",
        "trainer.max_round (key.yaml, line 3); there is no such setting; write trainer.max_rounds",
    ),
    ("fit --config base.yaml --config key.yaml", "(key.yaml, line 3)"),
    ("fit --config group.yaml", "group.yaml, line 3"),
    (
        "fit --config model_key.yaml",
        "model.alhpa (model_key.yaml, line 4); FedMPQKD has no setting alhpa; write model.alpha",
    ),
    ("fit --config data_key.yaml", "write data.num_clients"),
    ("fit --config class.yaml", "(class.yaml, line 1)"),
    (
        "fit --config value.yaml",
        "trainer.max_rounds: three (value.yaml, line 3); it must be an int",
    ),
    ("fit --config seed.yaml", "(seed.yaml, line 2); it must be an int >= 0"),
    ("fit --config null.yaml", "trainer is a group of settings"),
    ("fit --config model_null.yaml", "model: null (model_null.yaml, line 2); model is a group"),
    (
        "fit --config value.yaml --config four.yaml",
        "trainer.max_rounds: three (value.yaml, line 3)",
    ),
    ("fit --model FedAvg --model.optimizer.lr 0.1", "name the class of model.optimizer before it"),
    (
        "fit --config null_value.yaml",
        "trainer.local_epochs: null (null_value.yaml, line 3); it must be an int",
    ),
    (
        "fit --config null_argument.yaml",
        "trainer.callbacks.round: null (null_argument.yaml, line 5)",
    ),
    ("fit --config base.yaml --data.num_clients null", "data.num_clients"),
    ("fit --config list.yaml", "it is not a mapping"),
    ("fit --config text.yaml", "it is not a mapping"),
    ("fit --config empty.yaml", "it is empty"),
    ("fit --config syntax.yaml", "syntax.yaml, line 4"),
    ("fit --config tab.yaml", "tab.yaml, line 2, column 1; it is not valid YAML"),
    ("fit --config twice.yaml", "twice.yaml, line 2: model; a key may be given once"),
    ("fit --config odd.yaml", "it is not valid YAML"),
    ("fit --config number.yaml", "number.yaml, line 1: 3; a setting has a name"),
    ("fit --config object.yaml", "it is not valid YAML"),
    ("fit --config callback.yaml", "(callback.yaml, line 3)"),
    (
        "fit --config callback_key.yaml",
        "trainer.callbacks.rond (callback_key.yaml, line 5); LabelNoise has no setting rond",
    ),
    (
        "fit --config no_mapping.yaml",
        "model.optimizer.init_args: ['lr', 0.03] (no_mapping.yaml, line 2); it is a mapping",
    ),
    ("fit --config no_list.yaml", "write trainer.callbacks: [LabelNoise]"),
]


ONLY_BY_THE_PARSER = {
    "fit --config base.yaml --model.scheduler ReduceLROnPlateau",
    "energy --rank 4",
    "energy --high bfloat16",
    "check --model FedAvg --noise -1",
    "fit --config base.yaml --trainer.tags '{a: 1}'",
    "rank --model FedAvg --settings words",
    # what Fabric refuses, what is of the whole configuration, settings below no class, and words as
    # a flag
    "track --run_dirs runs/a",
    "fit --config named.yaml --model.network.init_args.ffa true",
    "fit --config no_mapping.yaml",
    "fit --config base.yaml --trainer.logger.tracking_uri X",
    "fit --config base.yaml --trainer.devices nonsense",
    "fit --config base.yaml --print_config=nonsense",
    # what has to be imported
    "fit --config base.yaml --data.metrics+=torchmetrics.classification.MulticlassF2Score",
    "fit --config base.yaml --model no.such.Class",
    "fit --config base.yaml --model torch.nn.Linear",
    "fit --config base.yaml --model.optimizer torch.nn.Linear",
    # what YAML may read in several ways
    "fit --config base.yaml --trainer.participation '{a: 1}'",
    "fit --config base.yaml --data.num_clients null",
    "fit --config base.yaml --trainer.max_rounds 1:30",
    "fit --config base.yaml --trainer.participation 0:0.5",
    "fit --config base.yaml --trainer.tags three",
    "fit --config seed.yaml",
    "fit --model FedAvg --model.optimizer.lr 0.1",
    "fit --config null_value.yaml",
    "fit --config null_argument.yaml",
    "fit --config group.yaml",
    "fit --config callback.yaml",
}
"""Slips that are not refused before torch is imported."""


@pytest.fixture(scope="module")
def described() -> dict[str, Any]:
    """What each command takes, as a call of the program describes it."""
    parser.import_short_names()
    return {}


@pytest.fixture(autouse=True)
def no_classes_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Methods, data and callbacks that other tests of this process defined are neither listed nor
    near."""
    know_installed_classes_alone(monkeypatch)


def refused_early(line: str, described: dict[str, Any]) -> str | None:
    """The refusal before torch is imported, as the program prints it; None if the parser
    decides."""
    command, *args = shlex.split(line)
    if command not in COMMANDS:
        return None
    if command not in described:
        described[command] = parser.description_of(command)
    try:
        refuse_by(described[command], command, args)
    except InputError as error:
        return f"fl_lightning: error: {' '.join(str(error).split())}\n"
    return None


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with every file above; ``fit`` must not be reached."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in [name for name in os.environ if name.startswith("FL_LIGHTNING_")]:
        monkeypatch.delenv(name)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "latin.yaml").write_bytes("trainer:\n  experiment: café\n".encode("latin-1"))
    (tmp_path / "binary.yaml").write_bytes(bytes(range(256)))
    (tmp_path / "folder").mkdir()
    replace_command(monkeypatch, "fit", lambda given: pytest.fail("bad input reached the trainer"))
    return tmp_path


def refuse(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Call with bad input, check what holds for every refusal, and return the line that was
    printed."""
    before = sorted(Path().rglob("*"))
    assert main(shlex.split(line)) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("fl_lightning: error: ")
    assert printed.err.count("\n") == 1
    assert printed.err.endswith("\n")
    assert "Traceback" not in printed.err
    assert sorted(Path().rglob("*")) == before
    return printed.err


@pytest.mark.parametrize(("line", "fragment"), BAD, ids=[line for line, _ in BAD])
def test_bad_input(
    line: str, fragment: str, capsys: pytest.CaptureFixture[str], described: dict[str, Any]
) -> None:
    """The check before torch is imported refuses the same with the same text, or leaves it to the
    parser."""
    error = refuse(line, capsys)
    assert fragment in error
    early = refused_early(line, described)
    assert early in (error, None)
    assert (early is None) == (line in ONLY_BY_THE_PARSER or line.split()[0] not in COMMANDS)
    # this one is in jsonargparse's own words
    if "print_config" not in line:
        assert error.count(";") >= 2, "what was given; the rule; what to write instead"


@pytest.mark.parametrize(
    ("name", "value", "fragment"),
    [
        ("FL_LIGHTNING_TRAINER__MAX_ROUND", "3", "write FL_LIGHTNING_TRAINER__MAX_ROUNDS"),
        ("FL_LIGHTNING_SEED_EVERYTHIN", "3", "write FL_LIGHTNING_SEED_EVERYTHING"),
        ("FL_LIGHTNING_DATA__NUM_CLIENTS", "3", "write FL_LIGHTNING_DATA='{num_clients: 3}'"),
        (
            "FL_LIGHTNING_TRAINER__MAX_ROUNDS",
            "three",
            (
                "environment variable FL_LIGHTNING_TRAINER__MAX_ROUNDS=three; it must be an int; write "
                "FL_LIGHTNING_TRAINER__MAX_ROUNDS=100"
            ),
        ),
        (
            "FL_LIGHTNING_DATA",
            "{num_clients: ten}",
            "environment variable FL_LIGHTNING_DATA={num_clients: ten}; it must be an int",
        ),
        ("FL_LIGHTNING_CONFIG", "bas.yaml", "there is no such file"),
        (
            "FL_LIGHTNING_TRAINER__CALLBACKS",
            "LabelNoise",
            "write FL_LIGHTNING_TRAINER__CALLBACKS=[LabelNoise]",
        ),
    ],
)
def test_bad_environment(
    name: str,
    value: str,
    fragment: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(name, value)
    # beaten by nothing, and not to blame
    Path("base.yaml").write_text(FILES["base.yaml"] + "trainer:\n  max_rounds: 7\n")
    assert fragment in refuse("fit --config base.yaml", capsys)


def test_what_a_constructor_refuses(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "strict.py").write_text(
        "from fl_lightning.methods import FedAvg\n"
        "class Strict(FedAvg):\n"
        "    def __init__(self, kind: str = 'value'):\n"
        "        if kind == 'value': raise ValueError('kind value;\\nno;\\nother')\n"
        "        open('no/such/file')\n"
    )
    try:
        assert "kind value; no; other" in refuse("fit --model strict.Strict", capsys)
        assert "no/such/file" in refuse("fit --model strict.Strict --model.kind file", capsys)
    finally:
        sys.modules.pop("strict", None)


def test_a_constructor_that_hides_the_settings_of_every_method_is_told_so(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flag is refused, and what a configuration says is not used, with a line that says why."""
    (here / "hiding.py").write_text(
        "from fl_lightning.methods import Method\n"
        "class Hides(Method):\n"
        "    def __init__(self, alpha: float = 0.1, **settings):\n"
        "        super().__init__(**{'weigh_by': 'clients', **settings})\n"
    )
    monkeypatch.setattr(FederatedTrainer, "fit", lambda *given, **settings: None)
    try:
        asked = "fit --model hiding.Hides"
        assert "super().__init__(..., **settings)" in refuse(f"{asked} --model.network mlp", capsys)
        assert main(shlex.split("fit --config named.yaml --model hiding.Hides")) == 0
        assert "model.network; end its constructor with super()" in capsys.readouterr().err
    finally:
        sys.modules.pop("hiding", None)


def test_an_unreadable_file(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(self: Path, *_: object) -> str:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", denied)
    assert "it cannot be read (Permission denied)" in refuse("fit --config base.yaml", capsys)


@pytest.mark.parametrize("command", ["configs", "--help", "configs --help", "--version"])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_closed_pipe_ends_a_quick_answer_quietly(command, unbuffered):
    read, write = os.pipe()
    os.close(read)
    ended = subprocess.run(
        [sys.executable, "-m", "fl_lightning", *command.split()],
        stdout=write,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        check=False,
    )
    os.close(write)
    assert (ended.returncode, ended.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("command", "instead"),
    [("compare --study a", "give the command again"), ("fit", "continue with --ckpt_path")],
)
def test_a_full_disk_is_answered_with_what_the_command_has(monkeypatch, capsys, command, instead):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("fl_lightning.cli.early.refuse_early", full)
    assert main(command.split()) == 1
    said = capsys.readouterr().err
    assert said.endswith(f"; {command.split()[0]} needs room to write; make some and {instead}\n")


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (
            PermissionError(errno.EACCES, "Permission denied", "closed/runs"),
            2,
            "closed/runs; it cannot be read or written (Permission denied); make it so, or name another",
        ),
        (
            OSError(errno.EROFS, "Read-only file system", "mnt/runs"),
            1,
            "fit writes, and this file system is read-only; make it writable and continue",
        ),
    ],
)
def test_a_closed_folder_is_one_line(monkeypatch, capsys, error, code, said):
    def closed(*_):
        raise error

    monkeypatch.setattr(Path, "is_dir", closed)
    assert main(["fit", "--config", "closed/base.yaml"]) == code
    shown = capsys.readouterr().err
    assert said in shown
    assert shown.count("\n") == 1


@pytest.mark.parametrize("rank", ["node1", "0"])
def test_an_error_is_told_whatever_the_rank_is_called(monkeypatch, capsys, rank):
    monkeypatch.setenv("RANK", rank)
    assert main(["fitt"]) == 2
    assert "the first argument must be a command" in capsys.readouterr().err


def test_a_working_directory_that_is_gone_is_one_line(monkeypatch, capsys, tmp_path):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(["fit", "--model", "FedAvg"]) == 2
    assert "the working directory; it is not there any more" in capsys.readouterr().err
    assert main(["--help"]) == 0


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [("MODEL__OPTIMIZER__LR", "0.5", "lr: 0.5"), ("MODEL__NETWORK", "mlp", "network: mlp")],
)
def test_the_advice_for_a_variable_that_sets_nothing_works(
    monkeypatch, capsys, variable, value, expected
):
    """Whoever follows it has the setting."""
    fit = ["fit", "--model", "FedAvg", "--model.optimizer", "torch.optim.SGD", "--print_config"]
    monkeypatch.setenv(f"FL_LIGHTNING_{variable}", value)
    assert main(fit) == 2
    advice = capsys.readouterr().err.rpartition("write ")[2].strip()
    monkeypatch.delenv(f"FL_LIGHTNING_{variable}")
    if advice.startswith("--"):
        fit[-1:-1] = advice.split()
    else:
        name, _, settings = advice.partition("=")
        monkeypatch.setenv(name, settings.strip("'"))
        del fit[1:5]
    assert main(fit) == 0
    assert expected in capsys.readouterr().out
