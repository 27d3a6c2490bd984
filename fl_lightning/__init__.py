"""Federated learning for people who know PyTorch Lightning.

The names in ``__all__`` are the public ones. Each is imported when it is first asked for (PEP 562),
so that ``python -m fl_lightning --help`` does not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fl_lightning.cli.export import export_model
    from fl_lightning.data import FederatedData
    from fl_lightning.hooks import Meter, Stressor
    from fl_lightning.methods import Method
    from fl_lightning.rng import stream
    from fl_lightning.tasks import Task
    from fl_lightning.trainer import FederatedTrainer
    from fl_lightning.wire import Payload

__version__ = "0.2.0"

__all__ = [
    "FederatedData",
    "FederatedTrainer",
    "Meter",
    "Method",
    "Payload",
    "Stressor",
    "Task",
    "__version__",
    "export_model",
    "stream",
]

_MODULES = {
    "FederatedData": "data",
    "FederatedTrainer": "trainer",
    "Meter": "hooks",
    "Method": "methods",
    "Payload": "wire",
    "Stressor": "hooks",
    "Task": "tasks",
    "export_model": "cli.export",
    "stream": "rng",
}


def __getattr__(name: str) -> Any:
    """Return a public name, imported from its module.

    Raises:
        AttributeError: the package has no such name.
    """
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
