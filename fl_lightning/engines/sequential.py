"""One client after another through the resident module."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from lightning.fabric import Fabric

from fl_lightning import rng
from fl_lightning.data import FederatedData
from fl_lightning.engines.base import ClientResult, Engine, Inbox, Order, Units, local_batches, one_thread
from fl_lightning.engines.graphs import make_steps
from fl_lightning.engines.steps import Steps
from fl_lightning.methods import Method


class SequentialEngine(Engine):
    """
    Args:
        steps: how local steps are taken; default: recorded as CUDA graphs where the device is one, eager elsewhere.
    """

    name = "sequential"

    def __init__(self, fabric: Fabric, method: Method, data: FederatedData, steps: Steps | None = None) -> None:
        self.fabric, self.method, self.data = fabric, method, data
        self.steps = steps
        self.inbox = Inbox()

    def train(self, orders: Sequence[Order], units: Units | None = None) -> Iterator[ClientResult]:
        for order in orders:
            with one_thread(self.fabric.device):
                result = self.train_client(order)
            yield result

    def train_client(self, order: Order) -> ClientResult:
        self.steps = self.steps or make_steps(self.fabric, self.method)
        method, client, local = self.method, order.client, self.steps
        local.before()
        method.receive(self.inbox.decode(order.message), client)
        method.train()
        local.start()
        steps, batches = 0, local_batches(method, self.data, order)
        with rng.torch_stream(method.seed, "dropout", method.round, client.id):
            while True:
                with self.fabric.autocast():  # what a method computes for its batches, like its steps
                    batch = next(batches, None)
                if batch is None:
                    break
                local.step(batch, steps)
                steps += 1
        local.end()
        with torch.no_grad():
            upload = method.upload(client).to_bytes()
        return ClientResult(client, upload, client.state, local.losses.totals(), local.losses.seen, steps, intact=True)
