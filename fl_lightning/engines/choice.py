"""Which engine runs the clients, on how many workers."""

from __future__ import annotations

import logging
import math
import multiprocessing
import sys
import time
from typing import Literal

import torch
from lightning.fabric import Fabric

from fl_lightning.data import FederatedData
from fl_lightning.distributed import collectives
from fl_lightning.engines.attributes import held_by, is_stackable, put_back
from fl_lightning.engines.base import ClientTask, Engine
from fl_lightning.engines.holders import Holders
from fl_lightning.engines.pool import PoolEngine
from fl_lightning.engines.ranks import RankedEngine
from fl_lightning.engines.sequential import SequentialEngine
from fl_lightning.engines.stacked.batched import MAX_STACK, BatchedEngine
from fl_lightning.errors import InputError, require
from fl_lightning.methods import Method
from fl_lightning.support.memory import keep_freed_memory

log = logging.getLogger("fl_lightning")

EngineName = Literal["auto", "sequential", "batched"]
MAX_BATCHED_TIME_SHARE = 0.75
"""The batched engine is taken where it needs less than this share of the sequential one's time: the
two round differently, so a choice between equals must not hang on the noise of a clock."""
MAX_STEP_SECONDS = 0.005
"""A local step on a CPU that takes longer is bound by arithmetic: nothing is saved by starting
fewer operations."""
MIN_BATCHED_COHORT = 32
"""Clients in a cohort from which stacking them is worth a measurement."""
PROBE_STEPS = 2  # local steps of each client of the measurement
PROBE_SECONDS = 0.3  # that the measurement's clients take one after another, at most ...
MIN_PROBE_CLIENTS = 16  # ... if that is at least so many of them


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
    holders: Holders | None = None,
) -> Engine:
    """Make the engine of a run.

    Args:
        engine: ``auto`` measures both on this method, network and data.
        workers: processes that train clients side by side on a CPU. ``auto``: :func:`most_workers`.
        cohort: clients of a round.
        before: what an earlier part of this run chose, which stays.
        timeout: seconds after which worker processes that do not answer are given up.
        holders: which rank holds which client's state; the engine keeps it up to date.
    """
    size = min(cohort, most_workers(fabric) if workers == "auto" else workers)
    if fabric.device.type == "cpu":
        keep_freed_memory(large=size == 1)  # this process trains; workers call it themselves
    if workers != "auto" and workers > size:
        log.info("workers: %d of %d, since a round has no more clients", size, workers)
    name: str = before or "auto" if engine == "auto" else engine
    if name == "auto" and not (cohort >= MIN_BATCHED_COHORT and is_stackable(method)):
        name = "sequential"
    inner: BatchedEngine | SequentialEngine = SequentialEngine(fabric, method, data)
    if name != "sequential":
        inner = BatchedEngine(fabric, method, data)
        if name == "auto":
            held = held_by(method)
            name = collectives.from_rank_zero(_measured(inner))
            put_back(held)  # a run does not go on from clients that were measured
        inner = inner if name == "batched" else inner.one_by_one
    made, where = _engine(inner, size, timeout)
    log.info("engine: %s, %s", name, where)
    return RankedEngine(made, data, holders) if collectives.world_size() > 1 else made


def _engine(
    inner: BatchedEngine | SequentialEngine, size: int, timeout: float
) -> tuple[Engine, str]:
    """Return the engine of one rank, and in words where it trains."""
    if size == 1:
        return inner, "in this process"
    if not _can_fork(inner.fabric):
        return inner, f"in this process; {size} workers on {inner.fabric.device} train no stacks"
    pool = PoolEngine(inner, inner.method, inner.data, size, timeout)
    return pool, f"{size} worker processes"


def check_workers(fabric: Fabric, workers: int | Literal["auto"]) -> None:
    """Refuse several workers where a process cannot be forked while it trains."""
    if workers == "auto" or workers == 1 or _can_fork(fabric):
        return
    require(
        not multiprocessing.current_process().daemon,
        f"--trainer.workers {workers} in a process of multiprocessing.Pool",
        "such a process may not have processes of its own",
        "leave it out, or use concurrent.futures.ProcessPoolExecutor",
    )
    raise InputError(
        f"--trainer.workers {workers} on {fabric.device} ({sys.platform})",
        "workers are forks that train on a CPU, on Linux",
        "leave it out, or write --trainer.devices for more than one process",
    )


def most_workers(fabric: Fabric) -> int:
    """Return how many forks pay: one for each thread that torch would use, or one where ranks are
    the workers or a process may not fork."""
    return torch.get_num_threads() if _can_fork(fabric) and collectives.world_size() == 1 else 1


def _can_fork(fabric: Fabric) -> bool:
    on_cpu = fabric.device.type == "cpu" and sys.platform.startswith("linux")
    return on_cpu and not multiprocessing.current_process().daemon


def _measured(batched: BatchedEngine) -> str:
    if collectives.rank() != 0:
        return ""
    fabric, method, data = batched.fabric, batched.method, batched.data
    sequential = batched.one_by_one
    method.round = 1

    def task(id: int) -> ClientTask:
        client = data.client(id)
        message = method.broadcast(client).to_bytes()
        steps = min(PROBE_STEPS, data.num_steps(client, 1))
        return ClientTask(client, 1, message, data.labels(client), 1, steps)

    first, *others = map(int, data.active[:MAX_STACK])
    tasks = [task(first)]
    for _ in range(2):  # the first one warms up
        one = _seconds(sequential, tasks)
    if fabric.device.type == "cpu" and one > MAX_STEP_SECONDS * tasks[0].steps:
        return _say(
            "sequential", f"a local step takes {1e3 * one / tasks[0].steps:.0f} ms, arithmetic"
        )
    # a large network has been sent away by now, whose messages would take gigabytes
    tasks += map(task, others[: max(MIN_PROBE_CLIENTS, int(PROBE_SECONDS / one)) - 1])
    steps = sum(task.steps for task in tasks)
    in_turn = at_once = float("inf")
    for _ in range(3):
        in_turn, at_once = (
            min(in_turn, _seconds(sequential, tasks)),
            min(at_once, _seconds(batched, tasks)),
        )
        if batched.reason:
            return "sequential"
    shown = (
        f"{steps} local steps of {len(tasks)} clients take {1e3 * in_turn:.1f} ms in turn, "
        f"{1e3 * at_once:.1f} ms at once"
    )
    return _say("batched" if at_once < MAX_BATCHED_TIME_SHARE * in_turn else "sequential", shown)


def _seconds(engine: Engine, tasks: list[ClientTask]) -> float:
    started = time.perf_counter()
    for _ in engine.train(tasks):
        pass
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def _say(name: str, reason: str) -> str:
    log.info("engine auto: %s (%s)", name, reason)
    return name
