"""All outputs of a network at once, for what cannot be measured batch by batch; the metrics of
rounds come from :mod:`fl_lightning.evaluation`, which collects none."""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from fl_lightning.data import FederatedData
from fl_lightning.evaluation import (
    NO_HOLDERS,
    NO_STATES,
    States,
    averages,
    evaluation_mode,
    gather_columns,
    validation_batches,
)
from fl_lightning.methods import Method
from fl_lightning.tasks import Task


@torch.no_grad()
def _forward(fabric: Fabric, network: nn.Module, batch: tuple[Any, ...]) -> tuple[Tensor, ...]:
    inputs, *rest = batch
    with evaluation_mode(network), fabric.autocast():
        return network(inputs).float(), *rest


def predict_validation(
    fabric: Fabric, method: Method, data: FederatedData, states: States = NO_STATES
) -> tuple[Tensor, ...]:
    """Return outputs ``[n, C]``, targets ``[n]`` and owners ``[n]`` of all clients' validation
    examples, on the CPU; ``()`` when there are none."""
    return gather_columns(
        (number, _forward(fabric, network, batch))
        for number, network, batch in validation_batches(method, data, states, NO_HOLDERS)
    )


def metrics_of(task: Task, outputs: Tensor, target: Tensor) -> dict[str, float]:
    """Return the task's metrics of outputs ``[n, ...]`` that have been collected."""
    sums = task.sums(outputs, target)
    return {name: float(value) for name, value in task.finish(averages(sums)).items()}
