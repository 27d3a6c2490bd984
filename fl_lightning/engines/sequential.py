"""One client after another through the resident module."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import MixedPrecision

from fl_lightning import rng
from fl_lightning.data import FederatedData
from fl_lightning.engines.base import ClientResult, Engine, Losses, Order, Units, one_thread, size_of
from fl_lightning.engines.optimizers import local_optimizer
from fl_lightning.methods import Method
from fl_lightning.wire import Payload


class SequentialEngine(Engine):
    name = "sequential"

    def __init__(self, fabric: Fabric, method: Method, data: FederatedData) -> None:
        self.fabric, self.method, self.data = fabric, method, data

    def train(self, orders: Sequence[Order], units: Units | None = None) -> Iterator[ClientResult]:
        for order in orders:
            with one_thread(self.fabric.device):
                result = self.train_client(order)
            yield result

    def train_client(self, order: Order) -> ClientResult:
        method, client = self.method, order.client
        method.receive(Payload.from_bytes(order.message), client)
        method.train()
        optimizer = local_optimizer(method)
        self._reset_loss_scale()
        losses, steps = Losses(), 0
        batches = method.local_batches(self.data, client, epochs=order.epochs, labels=order.labels, steps=order.steps)
        with rng.torch_stream(method.seed, "dropout", method.round, client.id):
            for steps, batch in enumerate(batches, start=1):
                with self.fabric.autocast():
                    outputs = method.training_step(batch, steps - 1)
                optimizer.zero_grad()
                self.fabric.backward(outputs["loss"])
                self.fabric.strategy.optimizer_step(optimizer)
                method.on_train_batch_end(outputs, batch, steps - 1)
                losses.add(outputs, size_of(batch))
        with torch.no_grad():
            upload = method.upload(client).to_bytes()
        return ClientResult(client, upload, client.state, losses.totals(), losses.seen, steps)

    def _reset_loss_scale(self) -> None:
        """16-mixed: a client's loss scale must not depend on who trained before it."""
        precision = self.fabric.strategy.precision
        if isinstance(precision, MixedPrecision) and precision.scaler is not None:
            precision.scaler = type(precision.scaler)(precision.device)
