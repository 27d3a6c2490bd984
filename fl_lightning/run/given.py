"""What Python code gives a trainer: a method, data and a seed, and not what is easily taken for
them."""

from __future__ import annotations

from inspect import isclass
from typing import Any

from lightning import LightningDataModule
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, Dataset

from fl_lightning.config.constraints import Constraint
from fl_lightning.data import FederatedData
from fl_lightning.errors import InputError, require
from fl_lightning.methods import Method

RULE, INSTEAD = "a seed is an int, at least 0 and below 2^63", "write seed=0"
SEED = Constraint(RULE, INSTEAD, interval=f"[0, {2**63})", whole=True, given="seed={value}")


def check_given(method: Any, data: Any, seed: Any) -> None:
    """Refuse what is no method, no data or no seed.

    Raises:
        InputError: it says what to write in its place.
    """
    swapped = isinstance(method, FederatedData) or isinstance(data, Method)
    # the last is what only the constructor of the base sets
    for value, what, base, instead, set_by_base in (
        (method, "method", Method, _method_from(method), "network_spec"),
        (data, "data", FederatedData, _data_from(data), "batch_size"),
    ):
        name = value.__name__ if isclass(value) else type(value).__name__
        given, instead = (
            f"{what}={name}",
            "the method comes first: fit(method, data)" if swapped else instead,
        )
        if isclass(value) and issubclass(value, base):
            raise InputError(given, "it is a class, and an object is needed", f"write {name}(...)")
        require(isinstance(value, base), given, f"it is no fl_lightning.{base.__name__}", instead)
        require(
            hasattr(value, set_by_base),
            given,
            f"its constructor does not call that of fl_lightning.{base.__name__}",
            f"begin {name}.__init__ with super().__init__(**settings)",
        )
    require(seed is not None, "seed=None", RULE, INSTEAD)
    SEED.check(seed)


def _method_from(value: object) -> str:
    """Return how to get a method of what was given in its place."""
    name = value.__name__ if isclass(value) else type(value).__name__
    kind = value if isclass(value) else type(value)
    if issubclass(kind, LightningModule):
        return f"write FedAvg(module={name}(...)), or another method of fl_lightning.methods"
    if issubclass(kind, nn.Module):
        return f"write FedAvg(network={name}), or another method of fl_lightning.methods"
    return "write e.g. FedAvg(), of fl_lightning.methods"


def _data_from(value: object) -> str:
    """Return how to get data of what was given in their place."""
    kind = value if isclass(value) else type(value)
    if issubclass(kind, LightningDataModule):
        return f"write fl_lightning.data.DataModuleData({kind.__name__}, num_clients=..., partition=...)"
    if issubclass(kind, (Dataset, DataLoader)):
        return "write fl_lightning.data.DatasetData(a function that makes it, num_clients=..., partition=...)"
    return 'write e.g. fl_lightning.data.FederatedImages(dataset="digits")'
