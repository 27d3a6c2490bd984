"""What a topology is, and the usual one: a server in the middle."""

from __future__ import annotations

from abc import ABC, abstractmethod

from fl_lightning.aggregation.base import Aggregation
from fl_lightning.config.recorded import Recorded
from fl_lightning.data import FederatedData
from fl_lightning.errors import require
from fl_lightning.hooks import Callback


class Topology(Recorded, ABC):
    """Who talks to whom."""

    settings_shown = ("--trainer.topology.{name} {value}",) * 2
    has_nodes: bool = True
    """Whether there are several models at a time."""
    has_peers: bool = False
    """Whether clients talk to each other, and there is no server."""
    partners_stay: bool = False
    """Whether a node hears the same others in every round, so that it knows what they have sent
    before."""

    @abstractmethod
    def way(self, usual: Aggregation, data: FederatedData) -> Aggregation:
        """Return what becomes of the uploads of a round, once method and data are built.

        Args:
            usual: what would where there is one server.
            data: dealt out to the clients.

        Raises:
            InputError: there are too few or too many clients.
        """

    def peers_of(self, data: FederatedData) -> list[int]:
        """Return the ids of the clients, or refuse a single one."""
        require(
            len(data.active) > 1,
            f"--trainer.topology {type(self).__name__} of one client",
            "peers are two or more",
            "leave it out",
        )
        return [int(id) for id in data.active]

    def meters(self) -> list[Callback]:
        """Return the callbacks that a run has because of its topology."""
        return []


class Star(Topology):
    """Every client talks to one server."""

    has_nodes = False

    def way(self, usual: Aggregation, data: FederatedData) -> Aggregation:
        return usual
