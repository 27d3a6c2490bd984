"""FedAvg (McMahan et al., AISTATS 2017), of a network or of any LightningModule."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from inspect import signature
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer

from fl_lightning.data import FederatedData
from fl_lightning.methods.base import Method
from fl_lightning.wire import Layout

log = logging.getLogger("fl_lightning")


class FedAvg(Method):
    """Weights of the clients that returned, averaged with n_k / sum n_k. Full precision both ways.

    Args:
        module: a LightningModule that knows nothing of federations: its ``training_step`` is the local objective, its
            ``configure_optimizers`` (one optimiser; schedulers are left out, a client's round is short) the local optimiser,
            its ``forward`` gives the logits that are evaluated; what it logs is dropped. Takes the place of ``network`` and
            ``optimizer``.
        settings: those of every method.
    """

    stackable = True

    def __init__(self, module: LightningModule | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        if isinstance(module, Method):
            raise ValueError(
                f"--model.module {type(module).__name__}; it is a method itself; write --model {type(module).__name__}"
            )
        self.module = module
        if module is not None:
            self.stackable = False  # nobody knows what a module keeps

    def build(self, data: FederatedData) -> None:
        if self.module is None:
            super().build(data)
            return
        self.module.log = self.module.log_dict = _logs_nothing  # type: ignore[method-assign, assignment]
        self.network = self.module
        self.layout = Layout.of(self.network)
        self.server = {"weights": self.layout.read(self.network)}
        self._check_outputs(data)
        if not self.module.automatic_optimization:
            raise ValueError(
                f"--model.module {type(self.module).__name__} with manual optimisation; a client's steps are the engine's; "
                "set automatic_optimization and return the loss from training_step"
            )
        self._takes_index = "batch_idx" in signature(self.module.training_step).parameters
        found = self.module.configure_optimizers()
        if isinstance(found, tuple) or (isinstance(found, dict) and "lr_scheduler" in found):
            log.warning(
                "%s: its learning-rate scheduler is left out: a client's optimiser lives for one round",
                type(self.module).__name__,
            )

    def _check_outputs(self, data: FederatedData) -> None:
        name = type(self.network).__name__
        with torch.no_grad():
            outputs = self.network.eval()(torch.zeros(2, *data.example_shape))
        if not isinstance(outputs, Tensor) or outputs.shape != (2, data.num_classes):
            shape = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
            raise ValueError(
                f"--model.module {name}, whose forward makes {shape} of two examples; logits [2, {data.num_classes}] are evaluated; "
                "make its forward return them"
            )

    def training_step(self, batch: Any, batch_idx: int = 0) -> dict[str, Tensor]:
        if self.module is None:
            return super().training_step(batch, batch_idx)
        arguments = (batch, batch_idx) if self._takes_index else (batch,)
        outputs = self.module.training_step(*arguments)
        loss: Any = outputs["loss"] if isinstance(outputs, Mapping) else outputs
        if loss is None:
            raise ValueError(f"{type(self.module).__name__}.training_step returned None; a local step needs a loss; return one")
        return {"loss": loss, "loss_task": loss}

    def configure_optimizers(self) -> Optimizer:
        if self.module is None:
            return super().configure_optimizers()
        found = self.module.configure_optimizers()
        if isinstance(found, tuple):
            found = found[0]
        if isinstance(found, dict):
            found = found["optimizer"]
        if isinstance(found, list) and len(found) == 1:
            found = found[0]
        if not isinstance(found, Optimizer):
            raise ValueError("its configure_optimizers does not return one optimizer")
        return found


def _logs_nothing(*args: Any, **settings: Any) -> None:
    """In place of ``LightningModule.log``, which needs a ``lightning.Trainer``."""
