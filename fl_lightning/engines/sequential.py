"""One client after another through the resident module."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import MixedPrecision
from torch import Tensor
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
    size_of,
    start_client,
)
from fl_lightning.methods import Method
from fl_lightning.methods.lit_module import end_steps, no_descent
from fl_lightning.methods.local_work import LocalWork
from fl_lightning.methods.optimizing import clip_gradients, local_optimizer
from fl_lightning.support.hook_forms import wrong_types
from fl_lightning.support.hook_values import check_kept, check_outputs, check_returned
from fl_lightning.wire import Payload


class SequentialEngine(Engine):
    """Trains one client after another through the resident module."""

    name = "sequential"

    def __init__(self, fabric: Fabric, method: Method, data: FederatedData) -> None:
        self.fabric, self.method, self.data = fabric, method, data

    def train(
        self, tasks: Sequence[ClientTask], units: Units | None = None
    ) -> Iterator[ClientResult]:
        for task in tasks:
            with one_thread(self.fabric.device):
                made = [self.train_client(task)]
            yield made.pop()  # whoever asks may drop it before the next client makes one

    def train_client(self, task: ClientTask) -> ClientResult:
        """Make all local steps of one client and its upload."""
        method, client, losses = self.method, task.client, LossSums()
        start_client(method, task)
        optimizer = start_optimizer(self.fabric, method)
        steps, batches = 0, local_batches(method, self.data, task)
        with rng.torch_stream(method.seed, "dropout", task.round, client.id):
            while True:
                # what a method computes for its batches, like its steps
                with self.fabric.autocast():
                    batch = next(batches, None)
                if batch is None:
                    break
                losses.add(local_step(self.fabric, method, optimizer, batch, steps), size_of(batch))
                steps += 1
        upload = upload_of(method, client, steps, optimizer).to_bytes()
        return ClientResult(client, upload, client.state, losses.means(), steps, verified=upload)


def start_optimizer(fabric: Fabric, method: Method) -> Optimizer:
    """Return the optimiser of a client that starts its round.

    In 16-mixed its loss scale is fresh, since it must not depend on who trained before, and steps
    are counted that are made, since those whose gradients overflow are left out.
    """
    precision, optimizer = fabric.strategy.precision, local_optimizer(method)
    if isinstance(precision, MixedPrecision) and precision.scaler is not None:
        precision.scaler = type(precision.scaler)(precision.device)
        made = vars(optimizer).setdefault("steps_made", [])
        optimizer.register_step_post_hook(lambda *_: made.append(1))
    return optimizer


def local_step(
    fabric: Fabric, method: Method, optimizer: Optimizer, batch: object, index: int
) -> dict[str, Tensor]:
    """Make local step number ``index``, counted from 0, and return its loss terms, detached from
    the graph."""
    with fabric.autocast():
        outputs = method.training_step(batch, index)
    check_outputs(method, outputs)
    descend(fabric, method, optimizer, outputs["loss"])
    method.on_train_batch_end(outputs, batch, index)
    return {name: value.detach().reshape(()) for name, value in outputs.items()}


def descend(fabric: Fabric, method: Method, optimizer: Optimizer, loss: Tensor) -> None:
    """Step along the gradient of a loss, clipped as the method says."""
    if loss.numel() != 1 or not loss.requires_grad:
        raise no_descent(method, loss)
    optimizer.zero_grad()
    fabric.backward(loss)
    if method.gradient_clip_val is not None:
        fabric.strategy.precision.unscale_gradients(optimizer)
        clip_gradients(optimizer, method.gradient_clip_val, method.gradient_clip_algorithm)
    fabric.strategy.optimizer_step(optimizer)


@torch.no_grad()
def upload_of(method: Method, client: Client, steps: int, optimizer: Optimizer) -> Payload:
    """Return what the client sends after ``steps`` local steps of ``optimizer``."""
    if steps and method.module is not None:
        end_steps(method)
    method.local_work = LocalWork(len(getattr(optimizer, "steps_made", range(steps))), optimizer)
    try:
        method.end_client(client)
        upload = method.upload(client)
    finally:
        method.local_work = None
    check_returned(
        method, "upload", upload, Payload, 'write return Payload({"weights": ..., "examples": ...})'
    )
    types = {getattr(one, "dtype", None) for name, one in upload.items() if name != "examples"}
    if types - {None, torch.float32, method.layout.dtype}:
        raise wrong_types(method, types)
    check_kept("client.state", client.state)
    # copies: what a method goes on to write into, such as its network, serves the next client too
    client.state.update({name: tensor.detach().clone() for name, tensor in client.state.items()})
    return upload
