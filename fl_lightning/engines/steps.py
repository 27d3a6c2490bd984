"""The local steps of one client after another, as the sequential engine takes them."""

from __future__ import annotations

from typing import Any

from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import MixedPrecision
from torch import Tensor
from torch.optim import Optimizer

from fl_lightning.engines.base import LossSums, size_of
from fl_lightning.engines.optimizers import local_optimizer
from fl_lightning.methods import Method
from fl_lightning.methods.optimizing import clip_gradients


class Steps:
    """Takes local steps eagerly. For each client come :meth:`before`, :meth:`start`, its steps and
    :meth:`end`."""

    def __init__(self, fabric: Fabric, method: Method) -> None:
        self.fabric, self.method = fabric, method
        self.losses = LossSums()

    def before(self) -> None:
        """Prepare for a client whose message has not been received yet."""

    def start(self) -> None:
        """Make the optimiser of a client: the module is what it starts from, in training mode."""
        self.optimizer = local_optimizer(self.method)
        self.losses = LossSums()
        self._reset_loss_scale()

    def step(self, batch: Any, index: int) -> None:
        """Make local step number ``index``, counted from 0, and add its loss terms to ``losses``."""
        self.losses.add(local_step(self.fabric, self.method, self.optimizer, batch, index), size_of(batch))

    def end(self) -> None:
        """Finish a client: its steps are done and the module's tensors are its own."""

    def _reset_loss_scale(self) -> None:
        """Start with a fresh loss scale in 16-mixed: it must not depend on who trained before."""
        precision = self.fabric.strategy.precision
        if isinstance(precision, MixedPrecision) and precision.scaler is not None:
            precision.scaler = type(precision.scaler)(precision.device)


def local_step(
    fabric: Fabric, method: Method, optimizer: Optimizer, batch: Any, index: int
) -> dict[str, Tensor]:
    """Make one local step and return its loss terms, detached from the graph."""
    with fabric.autocast():
        outputs = method.training_step(batch, index)
    optimizer.zero_grad()
    fabric.backward(outputs["loss"])
    if method.gradient_clip_val is not None:
        fabric.strategy.precision.unscale_gradients(optimizer)
        clip_gradients(optimizer, method.gradient_clip_val, method.gradient_clip_algorithm)
    fabric.strategy.optimizer_step(optimizer)
    method.on_train_batch_end(outputs, batch, index)
    return {name: value.detach() for name, value in outputs.items()}
