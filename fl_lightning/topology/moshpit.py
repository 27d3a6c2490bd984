"""Moshpit SGD (Ryabinin et al., NeurIPS 2021): peers average in small groups, in which they meet
others every time.

Of N = M^d peers each has a key of d - 1 indices below M, and those with equal keys are a group of
M. After they have averaged, each drops the oldest index of its key and appends its rank in the
group. Peers are thus on a grid of M^d places and average along one axis after the other: d
averagings make the exact mean.
"""

from __future__ import annotations

from itertools import count
from typing import Annotated

from fl_lightning.aggregation.base import Aggregation
from fl_lightning.config.constraints import at_least, within
from fl_lightning.data import FederatedData
from fl_lightning.errors import require
from fl_lightning.hooks import Callback
from fl_lightning.topology.base import Topology
from fl_lightning.topology.exchange import Peers
from fl_lightning.topology.graphs import Mixing, in_groups
from fl_lightning.topology.meter import NodeMeter

DIMS = within(
    "[1, 64]", "a grid has 1 to 64 axes; with 64 even a side of 2 has a place for everybody", 2
)


class Moshpit(Topology):
    """Every client is a peer with a place on a grid, row by row in the order of ids, and averages
    with those on its line along one axis; the next time along the next. A group's mean is over
    those who are there.

    Args:
        side: M, peers in a group, at least 2.
        dims: d, axes of the grid, 1 to 64; there are at most M^d peers, and places may stay
            empty.
        averagings: in a round, at least 1; all but the first exchange models in full precision.
    """

    has_peers = True

    def __init__(
        self,
        side: Annotated[int, at_least(2)] = 4,
        dims: Annotated[int, DIMS] = 2,
        averagings: Annotated[int, at_least(1)] = 1,
    ) -> None:
        self.side, self.dims, self.averagings = side, dims, averagings

    def way(self, usual: Aggregation, data: FederatedData) -> Aggregation:
        ids, places = self.peers_of(data), self.side**self.dims
        enough = next(side for side in count(self.side) if side**self.dims >= len(ids))
        require(
            len(ids) <= places,
            f"--trainer.topology Moshpit with {len(ids)} clients on {self.side}^{self.dims} places",
            "each peer has a place",
            f"write --trainer.topology.side {enough}",
        )
        return Peers(usual.method, ids, self.mixing, averagings=self.averagings)

    def mixing(self, averaging: int, present: list[int]) -> Mixing:
        """Return W among the peers that are there, by place, for an averaging counted from 0."""
        groups: dict[int, list[int]] = {}
        for place in present:
            groups.setdefault(self.key(place, averaging), []).append(place)
        return in_groups(groups.values())

    def key(self, place: int, averaging: int) -> int:
        """Return the key of the group that a place is in: its indices but one, as one number.

        >>> [Moshpit(side=2, dims=2).key(place, 0) for place in range(4)]
        [0, 1, 0, 1]
        """
        weight = self.side ** (self.dims - 1 - averaging % self.dims)
        return place - place // weight % self.side * weight

    def meters(self) -> list[Callback]:
        return [NodeMeter("peers")]
