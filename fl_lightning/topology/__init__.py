"""Who talks to whom: one server, edge servers, or peers without a server.

A topology is chosen once, where the trainer is set up, as the aggregation is. What a method's
clients would exchange with its server they exchange with each other: the server's half of the
method is then run at every edge server, or by every peer.
"""

from fl_lightning.topology.base import Star, Topology
from fl_lightning.topology.gossip import Gossip
from fl_lightning.topology.graphs import (
    Complete,
    Exponential,
    Graph,
    GraphFile,
    RandomGraph,
    RandomGroups,
    Ring,
    Torus,
)
from fl_lightning.topology.hierarchy import Hierarchy
from fl_lightning.topology.moshpit import Moshpit
