"""Data sets, and partitions that distribute them to clients."""

from fl_lightning.data.base import FederatedData
from fl_lightning.data.images import FederatedImages
from fl_lightning.data.partition import IID, Dirichlet, Partition, Shards, dirichlet_partition

__all__ = [
    "IID",
    "Dirichlet",
    "FederatedData",
    "FederatedImages",
    "Partition",
    "Shards",
    "dirichlet_partition",
]
