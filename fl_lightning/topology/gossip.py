"""Gossip: every client has a model, and mixes it with those of its neighbours.

    y_i = x_i after local steps,    x_i <- sum_j W_ij y_j

which is D-PSGD (Lian et al., NeurIPS 2017) in the order adapt, then combine, with several local
steps.
"""

from __future__ import annotations

from typing import Literal

from fl_lightning.aggregation.base import Aggregation
from fl_lightning.config.near_names import require_choice
from fl_lightning.data import FederatedData
from fl_lightning.hooks import Callback
from fl_lightning.topology.base import Topology
from fl_lightning.topology.exchange import Peers
from fl_lightning.topology.graphs import (
    Complete,
    Exponential,
    Graph,
    Mixing,
    RandomGraph,
    Ring,
    Torus,
    shares_given,
)
from fl_lightning.topology.meter import NodeMeter

GraphName = Literal["ring", "torus", "complete", "exponential", "random"]
GRAPHS: dict[str, type[Graph]] = {
    "ring": Ring,
    "torus": Torus,
    "complete": Complete,
    "exponential": Exponential,
    "random": RandomGraph,
}
"""The graphs that have a short name, with their default settings."""


class Gossip(Topology):
    """Every client is a peer with a model of its own, which it mixes with its neighbours' after
    local steps.

    Args:
        graph: who hears whom: ``Ring``, ``Torus``, ``Complete``, ``Exponential``, ``RandomGraph``,
            ``RandomGroups``, ``GraphFile``, or a :class:`~fl_lightning.topology.graphs.Graph` of
            yours. The first five with their defaults are also ``ring``, ``torus``, ``complete``,
            ``exponential`` and ``random``.
        push_sum: whether a peer keeps what it could not give to one who is away, and weights travel
            beside the models (stochastic gradient push, Assran et al., ICML 2019), so that the mean
            of all models is kept by every averaging; else a peer takes from itself what it could
            not take from one who is away. It makes a difference where the graph is directed, which
            ``Exponential`` is.
    """

    has_peers = True

    def __init__(self, graph: Graph | GraphName, push_sum: bool = True) -> None:
        if isinstance(graph, str):
            require_choice(graph, [*GRAPHS], "--trainer.topology.graph")
            graph = GRAPHS[graph]()
        self.graph: Graph = graph
        self.push_sum, self.partners_stay = push_sum, self.graph.stays

    def way(self, usual: Aggregation, data: FederatedData) -> Aggregation:
        ids, method = self.peers_of(data), usual.method
        self.graph.check(len(ids))

        push = self.push_sum and not self.graph.symmetric

        def mixing(averaging: int, present: list[int]) -> Mixing:
            whole = self.graph.checked(len(ids), method.seed, averaging + 1)
            return self.graph.among(shares_given(whole) if push else whole, present, push)

        peers = Peers(method, ids, mixing, push=push)
        peers.graph, peers.content_sha256 = self.graph, self.graph.content_sha256
        return peers

    def meters(self) -> list[Callback]:
        return [NodeMeter("peers")]
