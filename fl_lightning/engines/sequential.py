"""One client after another through the resident module."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning.fabric import Fabric
from torch.optim import Optimizer

from fl_lightning import rng
from fl_lightning.client import Client
from fl_lightning.data import FederatedData
from fl_lightning.engines.base import ClientResult, Engine, Losses, Order, Units, local_batches, one_thread
from fl_lightning.engines.cuda.graphs import make_steps
from fl_lightning.engines.steps import Steps
from fl_lightning.engines.uploads import upload_of
from fl_lightning.methods import Method


@dataclass(frozen=True, slots=True)
class Begun:
    """A client whose steps have been asked for: its losses so far, on the device, how many steps and with
    which optimiser."""

    client: Client
    losses: Losses
    steps: int
    optimizer: Optimizer


class SequentialEngine(Engine):
    """
    Args:
        steps: how local steps are taken; default: recorded as CUDA graphs where the device is one, eager
            elsewhere.
    """

    name = "sequential"

    def __init__(
        self, fabric: Fabric, method: Method, data: FederatedData, steps: Steps | None = None
    ) -> None:
        self.fabric, self.method, self.data = fabric, method, data
        self.steps = steps

    def train(self, orders: Sequence[Order], units: Units | None = None) -> Iterator[ClientResult]:
        for order in orders:
            with one_thread(self.fabric.device):
                result = self.train_client(order)
            yield result

    def train_client(self, order: Order) -> ClientResult:
        return self.end(self.begin(order))

    def begin(self, order: Order) -> Begun:
        """Ask for all local steps. A device may still be at them afterwards; the module is taken until
        :meth:`end`."""
        self.steps = self.steps or make_steps(self.fabric, self.method)
        method, client, local = self.method, order.client, self.steps
        local.before()
        method.receive(order.received(), client)
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
        return Begun(client, local.losses, steps, local.optimizer)

    def end(self, begun: Begun) -> ClientResult:
        """Read what the steps of the client begun last made of it."""
        client, losses = begun.client, begun.losses
        upload = upload_of(self.method, client, begun.steps, begun.optimizer).to_bytes()
        return ClientResult(
            client, upload, client.state, losses.totals(), losses.seen, begun.steps, intact=upload
        )
