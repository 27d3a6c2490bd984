"""What can be imported from ``fl_lightning`` itself, and what the program imports before it has
to."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import fl_lightning
from fl_lightning.config.settings import changed_settings, settings_hash

NAMES = {
    "FederatedData": "data.base",
    "FederatedTrainer": "trainer",
    "Meter": "hooks",
    "Method": "methods.base",
    "Payload": "wire.payload",
    "Stressor": "hooks",
    "Task": "tasks.base",
    "export_model": "cli.export",
    "stream": "rng",
}


def test_public_names_are_those_of_their_modules():
    assert set(fl_lightning.__all__) == {*NAMES, "__version__"}
    for name, module in NAMES.items():
        defined = getattr(importlib.import_module(f"fl_lightning.{module}"), name)
        assert getattr(fl_lightning, name) is defined
        assert name in dir(fl_lightning)


def test_a_name_that_does_not_exist_is_refused_by_name():
    with pytest.raises(AttributeError, match="Federation"):
        _ = fl_lightning.Federation
    with pytest.raises(ImportError, match="Federation"):
        from fl_lightning import Federation  # noqa: F401


@pytest.mark.parametrize("command", ["--help", "--version"])
def test_help_needs_no_torch(command):
    """Torch takes seconds to import, and the answer is to take less than a tenth of one."""
    code = (
        "import sys; from fl_lightning.__main__ import main; main(sys.argv[1:]); "
        "print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, command], capture_output=True, text=True, check=True
    )
    assert "fl_lightning" in done.stdout
    imported = set(done.stderr.split())
    assert "fl_lightning.cli.commands" in imported
    assert imported.isdisjoint({"torch", "lightning", "numpy", "jsonargparse", "mlflow"})


def test_settings_of_a_run_made_before_the_public_names_are_the_same():
    """jsonargparse writes the shortest path of a class, which is another one since the package
    exports it."""
    before = {"model.class_path": "fl_lightning.methods.Method", "model.init_args.max_share": 0.5}
    after = before | {"model.class_path": "fl_lightning.Method"}
    assert changed_settings(before, after) == []
    assert settings_hash(before) == settings_hash(after)
    other = before | {"model.class_path": "fl_lightning.methods.FedAvg"}
    assert settings_hash(before) != settings_hash(other)
