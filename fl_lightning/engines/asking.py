"""The losses that clients tell a server: of the model that they are sent, on their own training
examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from lightning.fabric import Fabric
from torch import Tensor

from fl_lightning.data import FederatedData
from fl_lightning.distributed.collectives import gather_parts, rank, world_size
from fl_lightning.engines.base import ClientTask, start_client
from fl_lightning.methods import Method
from fl_lightning.models import MeasuredNetwork

EXAMPLES_AT_ONCE = 512


class LocalLoss(NamedTuple):
    """A client's loss over its training examples.

    Args:
        mean: of the losses.
        root_mean_square: the root of the mean of their squares.
    """

    mean: float
    root_mean_square: float


def local_losses(
    fabric: Fabric,
    method: Method,
    data: FederatedData,
    tasks: Sequence[ClientTask],
    holders: Mapping[int, int],
) -> dict[int, LocalLoss]:
    """Return the losses of the model that each client starts from, by id, the same on every rank.

    Nothing is trained and nothing is augmented; labels are those that the client trains on. The
    clients are dealt to the ranks.

    Args:
        fabric: device and precision.
        method: the resident module; its next client starts anew.
        data: the clients' examples.
        tasks: what the clients are sent; of several ranks, the state of a client is on the one that
            holds it.
        holders: which rank holds which client's state.
    """
    mine = {
        str(task.client.id): _measured(fabric, method, data, task)
        for number, task in enumerate(tasks)
        if holders.get(task.client.id, number % world_size()) == rank()
    }
    found = {int(id): LocalLoss(*sums.tolist()) for id, sums in gather_parts(mine).items()}
    return {task.client.id: found[task.client.id] for task in tasks}


@torch.no_grad()
def _measured(fabric: Fabric, method: Method, data: FederatedData, task: ClientTask) -> Tensor:
    """Return mean and root mean square of a client's losses, float64 ``[2]`` on the CPU."""
    start_client(method, replace(task, client=task.client.apart()))
    method.eval()
    index = torch.from_numpy(task.client.train).to(data.device)
    sums = torch.zeros(3, dtype=torch.float64)
    size = min(EXAMPLES_AT_ONCE, data.evaluation_batch)
    for positions, target in zip(index.split(size), task.labels.split(size), strict=True):
        if isinstance(method.network, MeasuredNetwork):
            method.network.expect(target)
        with fabric.autocast():
            inputs = data.with_labels(data.inputs("train", positions), target)
            _, found = data.task.evaluate(method.network, inputs, target)
        total, weight = (part.double().cpu() for part in found["loss"])
        sums += torch.stack(
            [total.sum(), (total.square() / weight.clamp(min=1)).sum(), weight.sum()]
        )
    total, square, weight = sums / sums[2].clamp(min=1)
    return torch.stack([total, square.sqrt()])
