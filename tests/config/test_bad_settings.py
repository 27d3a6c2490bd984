"""Settings that are valid in form and cannot work: exit code 2, one line, nothing left behind, and
no foreign function called."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest
from torch import nn

from fl_lightning.__main__ import main
from fl_lightning.data import FederatedImages
from fl_lightning.models import build_network
from fl_lightning.tasks import LanguageModelling
from fl_lightning.trainer import FederatedTrainer

FIT = shlex.split(
    "fit --model FedAvg --trainer.logger false --trainer.max_rounds 1 --trainer.workers 1 "
    "--data.num_clients 4 --data.dataset synthetic --data.synthetic_size 16 "
    "--data.synthetic_examples 40 --data.synthetic_test_examples 10"
)
NETWORKS = """\
import sys
from torch import nn


class Table(nn.Module):
    def __init__(self, num_classes: int, features: int = 768) -> None:
        super().__init__()
        self.layer = nn.Linear(features, num_classes)

    def forward(self, x):
        return self.layer(x.flatten(1))


class Wide(Table):
    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes + 3)


class Buggy(nn.Module):
    def __init__(self, num_classes: int) -> None:
        self.layer = undefined


class OneOnly(Table):
    def forward(self, x):
        return self.layer(x.reshape(1, -1)[:, :768])


class Untyped(Table):
    def __init__(self, num_classes, features: int = 768) -> None:
        super().__init__(num_classes, features)


def number(num_classes):
    return 3
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for name in [name for name in os.environ if name.startswith("FL_LIGHTNING_")]:
        monkeypatch.delenv(name)
    (tmp_path / "my_networks.py").write_text(NETWORKS)
    monkeypatch.delitem(sys.modules, "my_networks", raising=False)
    return tmp_path


def refused(args: list[str], capfd: pytest.CaptureFixture[str]) -> str:
    before = {path for path in Path().rglob("*") if "__pycache__" not in path.parts}
    assert main([*FIT, *args]) == 2
    line = capfd.readouterr().err
    assert line.startswith("fl_lightning: error: ")
    assert line.count("\n") == 1
    assert line.count(";") >= 1
    assert {path for path in Path().rglob("*") if "__pycache__" not in path.parts} == before
    return line


@pytest.mark.parametrize(
    "name",
    ["os.system", "os._exit", "os.abort", "sys.exit", "torch.load", "torch.hub.load", "subprocess.Popen", "subprocess.call",
     "builtins.print", "builtins.exec", "shutil.rmtree", "importlib.import_module", "functools.partial", "my_networks.sys.exit"],
)  # fmt: skip
def test_what_makes_no_network_is_refused_before_it_is_called(
    name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert name in refused(["--model.network", name], capfd)


@pytest.mark.parametrize("rate", [".nan", ".inf"])
def test_a_learning_rate_is_finite(rate: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert "a learning rate is finite" in refused(
        ["--model.optimizer", "SGD", "--model.optimizer.lr", rate], capfd
    )


@pytest.mark.parametrize(
    "setting", ["model.network", "model.optimizer", "trainer.callbacks+", "data.partition"]
)
def test_a_class_path_runs_no_command(
    setting: str, capfd: pytest.CaptureFixture[str], here: Path
) -> None:
    assert "os.system" in refused(
        [f"--{setting}", "{class_path: os.system, init_args: {command: touch done}}"], capfd
    )
    assert not (here / "done").exists()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (
            "my_networks.Table --model.network.features 7",
            "my_networks.Table: it raised RuntimeError",
        ),
        ("my_networks.Wide", "(2, 13) of two examples; logits [2, 10]"),
        ("my_networks.OneOnly", "(1, 10) of two examples"),
        ("my_networks.Buggy", "NameError (name 'undefined' is not defined)"),
        ("my_networks.number", "made a int"),
        ("my_networks.Untyped", "parameter num_classes of my_networks.Untyped has no type"),
        ("torch.nn.Identity", "(2, 3, 16, 16) of two examples"),
    ],
)
def test_a_network_that_does_not_fit_is_refused_with_its_own_error(
    args: str, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert words in refused(["--model.network", *args.split()], capfd)


def test_the_traceback_of_the_network_is_kept() -> None:
    def broken(num_classes: int) -> nn.Module:
        raise KeyError("mine")

    with pytest.raises(ValueError, match="KeyError") as caught:
        build_network(broken, 10, (3, 16, 16))
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize(
    "network", ["small_cnn", "resnet20", "residual_mlp", "mobilenetv2", "vit_small"]
)
def test_a_network_for_images_on_a_table_says_what_fits(network: str) -> None:
    with pytest.raises(
        ValueError,
        match=r"on examples of shape \[20\]; it needs images .* maps \[B, 20\] to logits",
    ):
        build_network(network, 3, (20,))


@pytest.mark.parametrize("network", ["small_cnn", "mlp", "mobilenetv2"])
def test_a_network_that_reads_no_tokens_is_refused_on_text(network: str) -> None:
    with pytest.raises(
        ValueError, match=r"it does not read tokens; write --model\.network llama_tiny"
    ):
        build_network(network, 259, (72,), task=LanguageModelling())


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 16)])
def test_an_empty_shape_is_refused(shape: tuple[int, ...]) -> None:
    for network in ("small_cnn", lambda num_classes: nn.Linear(1, num_classes)):
        with pytest.raises(ValueError, match="example_shape"):
            build_network(network, 3, shape)


@pytest.mark.parametrize(
    "setting",
    ["synthetic_examples 1000000000000", "synthetic_test_examples 1000000000000", "synthetic_size 10000000",
     "synthetic_classes 1000000000000", "num_clients 100000000000000", "crop_padding 10000000 --data.crop pad"],
)  # fmt: skip
def test_what_exceeds_memory_is_refused_with_its_bytes(
    setting: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert "bytes" in refused(f"--data.{setting}".split(), capfd)


def test_what_fits_in_memory_is_not_refused() -> None:
    FederatedImages("synthetic", synthetic_examples=50_000, synthetic_test_examples=10_000)
    FederatedImages("digits", synthetic_examples=10**15)  # not used


@pytest.mark.parametrize("setting", ["run_name", "experiment", "default_root_dir"])
def test_names_that_are_no_utf8(
    setting: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = os.fsdecode(b"a\xffb")
    assert "a\\xffb" in refused([f"--trainer.{setting}", name], capfd)
    monkeypatch.setenv(f"FL_LIGHTNING_TRAINER__{setting.upper()}", name)
    assert "a\\xffb" in refused([], capfd)
    monkeypatch.undo()
    if setting != "default_root_dir":
        with pytest.raises(ValueError, match="UTF-8"):
            FederatedTrainer(**{setting: name})


@pytest.mark.slow
@pytest.mark.essential
@pytest.mark.parametrize("name", ["x" * 240, "\u00e9" * 101])
def test_names_that_are_too_long_for_a_folder(
    name: str, capfd: pytest.CaptureFixture[str], here: Path
) -> None:
    for setting in ("run_name", "experiment"):
        assert "at most 200 bytes" in refused([f"--trainer.{setting}", name], capfd)
    (here / "my_methods.py").write_text(
        f"from fl_lightning.methods import FedAvg\nclass {'X' * 240}(FedAvg): pass\n"
    )
    assert "at most 200 bytes" in refused(["--model", f"my_methods.{'X' * 240}"], capfd)
    sys.modules.pop("my_methods")


def test_the_longest_name_and_its_number_fit(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert main([*FIT, "--trainer.run_name", "x" * 200, "--trainer.experiment", "y" * 200]) == 0
    assert len(list((here / "runs" / ("y" * 200)).iterdir())) == 2


def test_a_seed_of_three_hundred_digits(capfd: pytest.CaptureFixture[str]) -> None:
    assert "below 2^63" in refused(["--seed_everything", "1" + "0" * 300], capfd)
