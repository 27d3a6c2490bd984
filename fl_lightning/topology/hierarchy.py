"""Hierarchical federated averaging (Liu et al., ICC 2020): edge servers average their clients in
every round, and each other now and then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import torch

from fl_lightning.aggregation.base import Aggregation, Receipt, Round
from fl_lightning.aggregation.intake import Uploads
from fl_lightning.aggregation.server import SummingServer, examples_in
from fl_lightning.aggregation.sums import Sums
from fl_lightning.config.constraints import at_least
from fl_lightning.data import FederatedData
from fl_lightning.errors import require
from fl_lightning.hooks import Callback
from fl_lightning.topology.base import Topology
from fl_lightning.topology.exchange import NodeAggregation
from fl_lightning.topology.meter import NodeMeter
from fl_lightning.topology.nodes import Nodes, State, mean_of
from fl_lightning.wire import LedgerEntry, Payload


class Hierarchy(Topology):
    """Clients are dealt to edge servers, in blocks of equal size in the order of ids. An edge
    averages those of its clients that return; every ``every`` rounds the edges send their sums of
    that round to the cloud, and get its model back.

    Args:
        groups: number of edge servers, at least 1.
        every: rounds between averages of the edges, at least 1; 1 is one server, bit for bit.
    """

    partners_stay = True

    def __init__(
        self, groups: Annotated[int, at_least(1)] = 2, every: Annotated[int, at_least(1)] = 2
    ) -> None:
        self.groups, self.every = groups, every

    def way(self, usual: Aggregation, data: FederatedData) -> Aggregation:
        ids = [int(id) for id in data.active]
        require(
            self.groups <= len(ids),
            f"--trainer.topology.groups {self.groups} of {len(ids)} clients",
            "an edge server has clients",
            f"write {len(ids)} or less",
        )
        edges = {id: place * self.groups // len(ids) for place, id in enumerate(ids)}
        return Edges(usual.method, edges, self._weights(usual.method, data, edges), self.every)

    def _weights(self, method: Any, data: FederatedData, edges: Mapping[int, int]) -> list[int]:
        """Return the sum of n_k over all clients of each edge."""
        weights = [0] * self.groups
        for id, edge in edges.items():
            weights[edge] += method.client_weights.of(data.client(id))
        return weights

    def meters(self) -> list[Callback]:
        return [NodeMeter("edges")]


class Edges(NodeAggregation):
    """Runs the server's half at every edge server, and now and then in the cloud, which has the
    usual state.

    Between two averages of the edges the cloud's model is the mean of theirs, by n_k of all their
    clients; it is there to be measured, and nobody starts from it.

    Args:
        method: the server's half, after ``build``.
        edges: the edge of each client, by id.
        weights: n_k of all clients of each edge.
        every: rounds between averages of the edges.
    """

    def __init__(
        self, method: SummingServer, edges: Mapping[int, int], weights: Sequence[int], every: int
    ) -> None:
        super().__init__(method)
        self.edges, self.weights, self.every = edges, weights, every
        self.nodes = Nodes(method, range(len(weights)), "edge")

    def node_of(self, client: int) -> int:
        return self.edges[client]

    def link_of(self, client: int) -> int:
        return -1 - self.edges[client]

    def close(
        self, round: Round, uploads: Uploads, receipts: Sequence[Receipt]
    ) -> list[LedgerEntry]:
        entries = [receipt.entry for receipt in receipts]
        unused = self._average(round, uploads, entries) if uploads else set()
        round.metrics["consensus/distance"] = self.nodes.distance()
        return [entry.unused() if entry.client in unused else entry for entry in entries]

    def _average(
        self, round: Round, uploads: Mapping[int, Payload], entries: Sequence[LedgerEntry]
    ) -> set[int]:
        """Make the next states of the edges and of the cloud, and return the clients whose uploads
        were not used, since what they would have made is not finite."""
        method, nodes, number = self.method, self.nodes, round.number
        examples = {id: examples_in(upload) for id, upload in uploads.items()}
        weights, unused = method.bounded_weights(examples), set[int]()
        of_edge: dict[int, list[int]] = {}
        for id in sorted(uploads):
            of_edge.setdefault(self.edges[id], []).append(id)
        meets, states = number % self.every == 0, {}
        for edge, ids in of_edge.items() if not meets else ():
            own = method.bounded_weights({id: examples[id] for id in ids})
            make = partial(method.next_state, self.add(uploads, own))
            states[edge], made = nodes.next(nodes.of(edge), number, entries, make)
            unused |= set() if made else {*ids}
        # last, so that the method's metrics are of a server that got all uploads
        make = partial(method.next_state, self.add(uploads, weights))
        cloud, made = nodes.next(nodes.mean(), number, entries, make)
        if meets:
            sent = cloud if made else None
            round.links.extend(self._links(number, uploads, of_edge, weights, sent))
            if made:
                nodes.put(cloud, dict.fromkeys(nodes.ids, cloud))
            return set() if made else {*uploads}
        nodes.put(cloud, states)
        models = [nodes.get(edge, "weights") for edge in nodes.ids]
        nodes.put({"weights": mean_of(models, self.weights)}, {})
        return unused

    def _links(
        self,
        round: int,
        uploads: Mapping[int, Payload],
        of_edge: Mapping[int, Sequence[int]],
        weights: Mapping[int, int],
        cloud: State | None,
    ) -> list[LedgerEntry]:
        """Return the bytes between edges and cloud: exact sums up, 8 bytes a value, and the cloud's
        state down, if it made one. Edge 0 is client -1 of the ledger, edge 1 is -2."""
        down, links = 0 if cloud is None else Payload(cloud).nbytes, []
        for edge in self.nodes.ids:
            ids = of_edge.get(edge, ())
            up = nbytes_of(self.add(uploads, {id: weights[id] for id in ids})) if ids else 0
            links.append(LedgerEntry(round, -1 - edge, "edge", down, up))
        return links


def nbytes_of(sums: Sums) -> int:
    """Return the bytes of sums on their way between servers: the integers of each, and then the sum
    of its weights."""
    parts = {
        name: [total.integers, torch.tensor([weight])] for name, total, weight, _ in sums.merged()
    }
    return Payload({name: torch.cat(part) for name, part in parts.items()}).nbytes
