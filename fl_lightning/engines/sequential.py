"""One client after another through the resident module."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning.fabric import Fabric
from torch.optim import Optimizer

from fl_lightning import rng
from fl_lightning.client import Client
from fl_lightning.data import FederatedData
from fl_lightning.engines.base import (
    ClientResult,
    ClientTask,
    Engine,
    LossSums,
    Units,
    local_batches,
    one_thread,
    start_client,
)
from fl_lightning.engines.steps import Steps
from fl_lightning.engines.uploads import upload_of
from fl_lightning.methods import Method


@dataclass(frozen=True, slots=True)
class RunningClient:
    """A client whose steps have been asked for.

    Args:
        client: who it is.
        losses: its losses so far, on the device.
        steps: how many steps.
        optimizer: with which optimiser.
    """

    client: Client
    losses: LossSums
    steps: int
    optimizer: Optimizer


class SequentialEngine(Engine):
    """Trains one client after another through the resident module.

    Args:
        steps: how local steps are taken; default: eagerly.
    """

    name = "sequential"

    def __init__(
        self, fabric: Fabric, method: Method, data: FederatedData, steps: Steps | None = None
    ) -> None:
        self.fabric, self.method, self.data = fabric, method, data
        self.steps = steps or Steps(fabric, method)

    def train(self, tasks: Sequence[ClientTask], units: Units | None = None) -> Iterator[ClientResult]:
        for task in tasks:
            with one_thread(self.fabric.device):
                result = self.train_client(task)
            yield result

    def train_client(self, task: ClientTask) -> ClientResult:
        return self.end(self.begin(task))

    def begin(self, task: ClientTask) -> RunningClient:
        """Queue all local steps of one client. A device may still work on them afterwards, so the module is
        in use until :meth:`end`."""
        method, client, local = self.method, task.client, self.steps
        local.before()
        start_client(method, task)
        local.start()
        steps, batches = 0, local_batches(method, self.data, task)
        with rng.torch_stream(method.seed, "dropout", task.round, client.id):
            while True:
                with self.fabric.autocast():  # what a method computes for its batches, like its steps
                    batch = next(batches, None)
                if batch is None:
                    break
                local.step(batch, steps)
                steps += 1
        local.end()
        return RunningClient(client, local.losses, steps, local.optimizer)

    def end(self, begun: RunningClient) -> ClientResult:
        """Wait for the client that was begun last and return its result."""
        client, losses = begun.client, begun.losses
        upload = upload_of(self.method, client, begun.steps, begun.optimizer).to_bytes()
        return ClientResult(client, upload, client.state, losses.means(), begun.steps, verified=upload)
