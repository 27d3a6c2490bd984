"""How much a client weighs in an average: by its training examples, by the labelled tokens in them,
or as all others."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

from fl_lightning.client import Client
from fl_lightning.config.near_names import require_choice
from fl_lightning.config.overriding import overrides
from fl_lightning.data import FederatedData
from fl_lightning.errors import InputError
from fl_lightning.tasks import Task

Weighing = Literal["examples", "tokens", "clients"]


class ClientWeights:
    """The weight n_k of each client in averages.

    Args:
        per_example: what each training example of the data counts, int64 ``[N]``; None: 1.
        equal: whether all clients weigh 1.
    """

    def __init__(self, per_example: np.ndarray | None = None, *, equal: bool = False) -> None:
        self.per_example, self.equal = per_example, equal

    @classmethod
    def by(cls, what: Weighing, data: FederatedData) -> ClientWeights:
        """Return the weights by examples, by labelled tokens as the data have them, or equal ones.

        Raises:
            InputError: they are by tokens, and an example of this task has none.
        """
        require_choice(what, get_args(Weighing), "--model.weigh_by")
        if what == "examples":
            return BY_EXAMPLES
        if what == "clients":
            return EQUAL
        if not overrides(data.task, Task, "weight"):
            raise InputError(
                f"--model.weigh_by tokens where the task is {type(data.task).__name__}",
                "its examples have no tokens",
                "write --model.weigh_by examples",
            )
        return cls(data.task.weight(data.train_target).cpu().numpy().round().astype(np.int64))

    def of(self, client: Client) -> int:
        """Return n_k."""
        if self.equal:
            return 1
        if self.per_example is None:
            return len(client.train)
        return int(self.per_example[client.train].sum())

    def largest(self, data: FederatedData) -> int:
        """Return the largest n_k of the clients of ``data``."""
        if self.equal:
            return 1
        if self.per_example is None:
            return int(data.sizes.max())
        return max(self.of(data.client(int(id))) for id in data.active)

    def says(self, client: Client) -> str:
        """Return n_k in words, for a message."""
        if self.equal:
            return "a weight of 1, as all"
        return f"{self.of(client)} {'training examples' if self.per_example is None else 'labelled tokens'}"


BY_EXAMPLES = ClientWeights()
EQUAL = ClientWeights(equal=True)
