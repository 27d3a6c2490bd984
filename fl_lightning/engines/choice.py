"""Which engine runs the clients, on how many workers."""

from __future__ import annotations

import logging
import math
import sys
import time
from typing import Literal

import torch
from lightning.fabric import Fabric

from fl_lightning.data import FederatedData
from fl_lightning.distributed import collectives
from fl_lightning.engines.base import Engine, Order
from fl_lightning.engines.cuda.seats import MOST as MOST_SEATS
from fl_lightning.engines.cuda.seats import SeatsEngine
from fl_lightning.engines.memory import keep_freed_memory
from fl_lightning.engines.pool import PoolEngine
from fl_lightning.engines.ranks import RankedEngine
from fl_lightning.engines.sequential import SequentialEngine
from fl_lightning.engines.stacked.batched import MOST, BatchedEngine
from fl_lightning.errors import InputError
from fl_lightning.methods import Method
from fl_lightning.methods.base import is_stackable

log = logging.getLogger("fl_lightning")

EngineName = Literal["auto", "sequential", "batched"]
CLEARLY = 0.75
"""Share of the sequential engine's time below which the batched one is taken: the two round differently, so a
choice between equals must not hang on the noise of a clock."""
HEAVY = 0.005
"""Seconds of a local step on a CPU that is bound by arithmetic: nothing is saved by starting fewer
operations."""
MANY = 32
"""Clients in a cohort from which stacking them is worth a measurement."""
STEPS = 2  # of each client of the probe
BRIEF = 0.3  # seconds that the probe's clients take in turn, at most, if that is at least FEWEST of them
FEWEST = 16


def make_engine(
    fabric: Fabric,
    method: Method,
    data: FederatedData,
    *,
    engine: EngineName,
    workers: int | Literal["auto"],
    cohort: int,
    before: str | None,
    timeout: float = math.inf,
) -> Engine:
    """The engine of a run.

    Args:
        engine: ``auto`` measures both on this method, network and data; with several workers on CUDA it is
            ``sequential``.
        workers: what trains clients side by side: processes on a CPU, seats (streams) on CUDA. ``auto``:
            :func:`most_workers`.
        cohort: clients of a round.
        before: what an earlier part of this run chose, which stays.
        timeout: seconds after which worker processes that do not answer are given up.
    """
    if fabric.device.type == "cpu":
        keep_freed_memory()
    size = min(cohort, most_workers(fabric) if workers == "auto" else workers)
    if engine != "auto":
        name: str = engine
    elif before:
        name = before
    else:
        worth_it = cohort >= MANY and is_stackable(method) and not (size > 1 and _has_streams(fabric))
        name = collectives.from_rank_zero(_measured(fabric, method, data)) if worth_it else "sequential"
    inner, where = _engine(name, fabric, method, data, size, timeout)
    log.info("engine: %s, %s", name, where)
    return RankedEngine(inner, data)


def _engine(
    name: str, fabric: Fabric, method: Method, data: FederatedData, size: int, timeout: float
) -> tuple[Engine, str]:
    """The engine of one rank, and in words where it trains."""
    if _has_streams(fabric) and size > 1 and name == "sequential":
        return SeatsEngine(fabric, method, data, size), f"{size} seats on {fabric.device}"
    inner = (BatchedEngine if name == "batched" else SequentialEngine)(fabric, method, data)
    if size == 1:
        return inner, "in this process"
    if _has_streams(
        fabric
    ):  # auto chose it in an earlier part of this run, and another engine would round differently
        return inner, f"in this process; {size} workers on {fabric.device} train no stacks"
    return PoolEngine(inner, method, data, size, timeout), f"{size} worker processes"


def check_workers(fabric: Fabric, workers: int | Literal["auto"], engine: EngineName) -> None:
    """Raises:
    InputError: several workers where a process cannot be forked while it trains and a device has no streams,
        or more than it has, or streams for the stacks of the batched engine.
    """
    if workers == "auto" or workers == 1 or _can_fork(fabric):
        return
    given = f"--trainer.workers {workers} on {fabric.device} ({sys.platform})"
    if not _has_streams(fabric):
        raise InputError(
            f"{given}",
            "workers are forks that train on a CPU, on Linux, or streams on CUDA",
            "leave it out, or write --trainer.devices for more than one process",
        )
    if workers > MOST_SEATS:
        raise InputError(
            f"{given}",
            f"workers on CUDA are streams, at most {MOST_SEATS}, each with a copy of the model",
            f"write 2 to {MOST_SEATS}",
        )
    if engine == "batched":
        raise InputError(
            f"{given} with --trainer.engine batched",
            "a stack has many clients on the device by itself",
            "leave one of the two out, or write --trainer.engine sequential",
        )


def most_workers(fabric: Fabric) -> int:
    """Forks that pay: one for each thread that torch would use; with several ranks none, these are the
    workers.

    On CUDA one until a card has been measured: ``python benchmarks/gpu.py seats``.
    """
    return torch.get_num_threads() if _can_fork(fabric) and collectives.world_size() == 1 else 1


def _can_fork(fabric: Fabric) -> bool:
    return fabric.device.type == "cpu" and sys.platform.startswith("linux")


def _has_streams(fabric: Fabric) -> bool:
    return fabric.device.type == "cuda"


def _measured(fabric: Fabric, method: Method, data: FederatedData) -> str:
    if collectives.rank() != 0:
        return ""
    sequential, batched = SequentialEngine(fabric, method, data), BatchedEngine(fabric, method, data)
    round, method.round = method.round, 1
    try:
        clients = [data.client(int(id)) for id in data.active[:MOST]]
        orders = [
            Order(
                client,
                method.broadcast(client).to_bytes(),
                data.labels(client),
                1,
                min(STEPS, data.num_steps(client, 1)),
            )
            for client in clients
        ]
        for _ in range(2):  # the first one warms up
            one = _seconds(sequential, orders[:1])
        if fabric.device.type == "cpu" and one > HEAVY * orders[0].steps:
            return _say("sequential", f"a local step takes {1e3 * one / orders[0].steps:.0f} ms, arithmetic")
        orders = orders[: max(FEWEST, int(BRIEF / one))]
        steps = sum(order.steps for order in orders)
        in_turn = at_once = float("inf")
        for _ in range(3):
            in_turn, at_once = (
                min(in_turn, _seconds(sequential, orders)),
                min(at_once, _seconds(batched, orders)),
            )
            if batched.reason:
                return "sequential"
        shown = (
            f"{steps} local steps of {len(orders)} clients take {1e3 * in_turn:.1f} ms in turn, "
            f"{1e3 * at_once:.1f} ms at once"
        )
        return _say("batched" if at_once < CLEARLY * in_turn else "sequential", shown)
    finally:
        method.round = round


def _seconds(engine: Engine, orders: list[Order]) -> float:
    started = time.perf_counter()
    for _ in engine.train(orders):
        pass
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def _say(name: str, reason: str) -> str:
    log.info("engine auto: %s (%s)", name, reason)
    return name
