"""One client after another through the resident module."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import MixedPrecision
from torch import Tensor
from torch.optim import LBFGS
from torch.utils._pytree import tree_leaves

from fl_lightning import rng
from fl_lightning.data import FederatedData
from fl_lightning.engines.base import ClientResult, Order
from fl_lightning.errors import InputError
from fl_lightning.methods import Method
from fl_lightning.wire import Payload


class SequentialEngine:
    def __init__(self, fabric: Fabric, method: Method, data: FederatedData) -> None:
        self.fabric, self.method, self.data = fabric, method, data

    def train(self, orders: Sequence[Order]) -> Iterator[ClientResult]:
        for order in orders:
            yield self.train_client(order)

    def train_client(self, order: Order) -> ClientResult:
        method, client = self.method, order.client
        method.receive(Payload.from_bytes(order.message), client)
        method.train()
        optimizer = method.configure_optimizers()
        self._reset_loss_scale()
        losses: dict[str, Tensor] = {}
        seen = steps = 0
        batches = method.local_batches(self.data, client, epochs=order.epochs, labels=order.labels, steps=order.steps)
        with rng.torch_stream(method.seed, "dropout", method.round, client.id):
            for steps, batch in enumerate(batches, start=1):
                with self.fabric.autocast():
                    outputs = method.training_step(batch, steps - 1)
                optimizer.zero_grad()
                self.fabric.backward(outputs["loss"])
                self.fabric.strategy.optimizer_step(optimizer)
                method.on_train_batch_end(outputs, batch, steps - 1)
                size = len(tree_leaves(batch)[0])
                seen += size
                for name, value in outputs.items():
                    losses[name] = losses.get(name, 0.0) + value.detach().double() * size
        with torch.no_grad():
            upload = method.upload(client).to_bytes()
        return ClientResult(client, upload, client.state, {name: float(total) for name, total in losses.items()}, seen, steps)

    def _reset_loss_scale(self) -> None:
        """16-mixed: a client's loss scale must not depend on who trained before it."""
        precision = self.fabric.strategy.precision
        if isinstance(precision, MixedPrecision) and precision.scaler is not None:
            precision.scaler = type(precision.scaler)(precision.device)


def check_optimizer(method: Method) -> None:
    """A method whose optimiser cannot make a local step is refused.

    Raises:
        InputError: it cannot be built, or it wants a closure.
    """
    try:
        optimizer = method.configure_optimizers()
    except (ValueError, TypeError) as error:
        raise InputError(f"--model.optimizer; it cannot be built ({error}); correct that argument") from error
    if isinstance(optimizer, LBFGS):
        raise InputError("--model.optimizer LBFGS; a local step has one gradient and no closure; write --model.optimizer SGD")
