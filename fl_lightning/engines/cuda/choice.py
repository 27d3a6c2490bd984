"""What ``--trainer.cuda_graphs true`` trains with: recorded steps, streams, and teachers on streams of their
own."""

from __future__ import annotations

from lightning.fabric import Fabric

from fl_lightning.data import FederatedData
from fl_lightning.engines.base import Engine
from fl_lightning.engines.cuda.graphs import make_steps
from fl_lightning.engines.cuda.seats import SeatsEngine
from fl_lightning.engines.cuda.side_stream import SideStream
from fl_lightning.engines.sequential import SequentialEngine
from fl_lightning.methods import FedMPQKD, Method


def cuda_engine(fabric: Fabric, method: Method, data: FederatedData, size: int) -> tuple[Engine, str]:
    """Return the engine of one rank, and in words where it trains.

    Args:
        size: clients on the device at once.
    """
    if isinstance(method, FedMPQKD):
        method.teacher_stream = SideStream()
    if size == 1:
        return SequentialEngine(fabric, method, data, make_steps(fabric, method)), "recorded, in this process"
    return SeatsEngine(fabric, method, data, size), f"{size} seats on {fabric.device}"
