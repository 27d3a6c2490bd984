"""The root set: labelled examples that the server holds, and what it learns of them in a round
(FLTrust)."""

from __future__ import annotations

import numpy as np
from lightning.fabric import Fabric
from torch import Tensor

from fl_lightning.aggregation.server import SummingServer
from fl_lightning.client import Client
from fl_lightning.config.overriding import overrides
from fl_lightning.data import FederatedData
from fl_lightning.engines.base import ClientTask
from fl_lightning.engines.sequential import SequentialEngine
from fl_lightning.errors import require
from fl_lightning.methods.base import Method


def prepare_guides(fabric: Fabric, method: Method, data: FederatedData) -> None:
    """Get ready what the ``average`` of a method that was just built goes by.

    Args:
        fabric: device and precision of the server's own steps.
        method: it was built.
        data: of the run.

    Raises:
        InputError: it needs a root set, which data or method do not have.
    """
    method.server |= method.first_guides()
    needs_root = method.average.guide == "root_update"
    method.root_update = RootSet(fabric, method, data).update if needs_root else None


class RootSet:
    """The public set of the data, with its labels, as one more client, which no round samples.

    Args:
        fabric: device and precision.
        method: trains on it.
        data: have the set.

    Raises:
        InputError: they have none with labels, or clients of the method send something else than
            weights.
    """

    def __init__(self, fabric: Fabric, method: Method, data: FederatedData) -> None:
        given = f"--model.average {type(method.average).__name__}"
        require(
            not any(overrides(method, SummingServer, hook) for hook in ("aggregate", "addends")),
            f"{given} with --model {type(method).__name__}",
            "the server compares its own update of the weights with those of the clients",
            "write --model FedAvg, or --model.average MultiKrum",
        )
        require(
            not (method.own.size and method.own_part_learns),
            f"{given} with --model {type(method).__name__}, of which a part stays on the clients",
            "the server's own update would be that of a part that never learns beside it",
            "write --model.average MultiKrum, or --model FedAvg without personal",
        )
        require(
            len(data.public) > 0 and not data.public_dataset,
            f"{given} without a public set of the training examples",
            "the server trains on labelled examples of its own",
            "write --data.public_examples 100",
        )
        self.engine, self.method, self.data = SequentialEngine(fabric, method, data), method, data

    def update(self, steps: int) -> Tensor:
        """Return what the client's half of the method makes of the server's weights in so many
        steps, minus these weights; float32 ``[P]``."""
        method, examples = self.method, self.data.public
        # which keeps nothing
        client = Client(self.data.num_clients, examples, np.empty(0, np.int64))
        message, (labels,) = method.broadcast(client).to_bytes(), self.data.labels_of([client])
        epochs = self.data.epochs_for(client, steps)
        self.engine.train_client(ClientTask(client, method.round, message, labels, epochs, steps))
        return method.layout.read(method.network).float() - method.starts()["weights"]
