"""Costs of the four groups of the tiny network, written by hand."""

from __future__ import annotations

import torch
from lightning.fabric import Fabric
from tiny_language import method_of, set_up, tiny

from fl_lightning.energy import CostLine, CostTable, MeasuredCost
from fl_lightning.energy.switched import add_switches
from fl_lightning.engines import ClientTask
from fl_lightning.engines.asking import local_losses
from fl_lightning.evaluation import evaluate_batch
from fl_lightning.methods import HEST

CPU = Fabric(accelerator="cpu")
GROUPS = [layer.name for layer in add_switches(tiny(259))]


def costs(scope: str = "adapter", q99: float = 1.5, high=(2.0, 6.0), groups=GROUPS) -> CostTable:
    """Return costs of a + b n millijoules: off 1 + 2 n, int8 8 + n, high 2 + 6 n, everything else
    10 + n.

    At one token int8 costs more than high, and from two tokens on less. The 0.99 quantile is so
    many times the mean.
    """

    def measured(a: float, b: float) -> MeasuredCost:
        return MeasuredCost(CostLine(1e-3 * a, 1e-3 * b), CostLine(1e-3 * q99 * a, 1e-3 * q99 * b))

    each = {"off": measured(1, 2), "int8": measured(8, 1), "high": measured(*high)}
    every = dict.fromkeys(groups, each)
    return CostTable("modelled: CPU seconds x 15 W", "by hand", scope, 64, every, measured(10, 1))


def built(data=None, **settings):
    """A method that has been built with a strange controller, and its data."""
    given = {"costs": costs(), "budget": 0.8, "scope": "adapter", **settings}
    method = HEST(**given) if "network" in given else method_of(HEST, **given)
    return set_up(method, data)


def loss_in_use(method, data, client) -> float:
    """Mean loss of a client's training examples, as an evaluation of its model has it."""
    (labels,) = data.labels_of([client])
    inputs = data.inputs("train", torch.from_numpy(client.train))
    found = evaluate_batch(CPU, data.task, method.deploy(client), inputs, labels)[1]
    total, weight = found["loss"]
    return float(total.sum() / weight.sum())


def told_loss(method, data, client) -> float:
    """What a client tells that is asked for its loss."""
    (labels,) = data.labels_of([client])
    message = method.broadcast(client).to_bytes()
    task = ClientTask(client, method.round, message, labels, 1, 1)
    return local_losses(CPU, method, data, [task], {})[client.id].mean
