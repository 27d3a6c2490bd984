"""Oracle: FedAvg inside the true groups. The reference for methods that have to find the groups.

    w_g <- sum_{k in g} p_k w_k,     p_k = n_k / sum of n over the clients of g that returned

A client's group is the one that most of its examples have: its domain or cluster where the data say
so, else its most frequent class. No real server knows it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress

from torch import Tensor, nn

from fl_lightning.aggregation.average import NoAverageError
from fl_lightning.aggregation.sums import Addend, Sums
from fl_lightning.client import Client
from fl_lightning.compatibility import no_personal
from fl_lightning.data import FederatedData
from fl_lightning.methods.base import Method
from fl_lightning.wire import Payload


class Oracle(Method):
    """One global model for each group of clients, known to the server from the data."""

    kind = "references"
    stackable = True
    personalised = True
    refuses = {
        **no_personal("its models are those of groups of clients"),
        "secure_sum": "it adds each client to its group's sum, and a masked vector has one place for all",
        "privacy": "it deals clients into groups by their examples, which no noise hides",
        "own_data": "it knows the group of each client, and nodes do not say it",
        "server_optimizer": "it has a mean for each group of clients, and no other",
    }

    def build(self, data: FederatedData) -> None:
        super().build(data)
        self.group = data.group_counts().argmax(1)  # of each client; the lowest of equals
        weights = self.server.pop("weights")
        self.server["groups"] = weights.repeat(data.num_groups, 1)

    def broadcast(self, client: Client) -> Payload:
        return Payload({"weights": self._weights(client)})

    def _weights(self, client: Client) -> Tensor:
        return self.server["groups"][int(self.group[client.id])]

    def bounded_weights(self, examples: Mapping[int, int]) -> dict[int, int]:
        """Return weights of which ``max_share`` bounds each within its group."""
        groups: dict[int, dict[int, int]] = defaultdict(dict)
        for id, number in examples.items():
            groups[int(self.group[id])][id] = number
        bounded = map(super().bounded_weights, groups.values())
        return {id: weight for of_group in bounded for id, weight in of_group.items()}

    def addends(self, upload: Payload, client_id: int, weight: int) -> dict[str, Addend]:
        group = int(self.group[client_id])
        start = self.server["groups"][group].float()
        return {f"groups/{group}": Addend(self.decode(upload), weight, self.largest_weight, start)}

    def add_up(self, uploads: Mapping[int, Payload], examples: Mapping[int, int]) -> Sums:
        """Return the sums of groups; one whose clients have no average rests."""
        try:
            return super().add_up(uploads, examples)
        except NoAverageError as reason:
            failed = reason
        groups: dict[int, dict[int, Payload]] = defaultdict(dict)
        for id, upload in uploads.items():
            groups[int(self.group[id])][id] = upload
        there = dict[int, Payload]()
        for of_group in groups.values():
            with suppress(NoAverageError):
                super().add_up(of_group, examples)
                there |= of_group
        if not there:
            raise failed
        return super().add_up(there, examples)

    def starts(self) -> Mapping[str, Tensor]:
        return {f"groups/{group}": row.float() for group, row in enumerate(self.server["groups"])}

    def next_state(self, sums: Sums) -> None:
        groups = self.server["groups"].clone()
        for name in sums:
            groups[int(name.split("/")[1])] = sums.mean(name)
        self.server["groups"] = groups

    def deploy(self, client: Client | None = None) -> nn.Module:
        mean = self.server["groups"].mean(0)
        self.layout.write(self.network, mean if client is None else self._weights(client))
        return self.network
