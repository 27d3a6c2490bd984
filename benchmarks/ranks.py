"""What the collectives of several ranks cost: every rank hears every upload, over gloo on
127.0.0.1.

    python benchmarks/ranks.py [--ranks 2 4] [--bytes 16 38488 1048576 9437184] [--clients 20]
        [--seconds 2]

For each number of ranks and bytes: the wire alone (every rank broadcasts so many bytes in turn,
from and to memory that is there); one ``gather_bytes`` in which every rank gives so many bytes;
then a round without training: ``RankedEngine`` gets so many uploads of that size from its engine,
dealt to the ranks, and hands all of them on, held together as a round holds them. Medians, on rank
0; MB/s count what all ranks gave. Peak: the most memory that rank 0 held meanwhile, beyond its own
share of the uploads, over the size of all. The last line fits the gathers by seconds = latency +
bytes that a rank hears / bandwidth.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from fl_lightning.client import Client
from fl_lightning.distributed.collectives import barrier, gather_bytes
from fl_lightning.engines.base import ClientResult, ClientTask, Engine, Units
from fl_lightning.engines.ranks import RankedEngine
from fl_lightning.metrics import Mean

NOBODY = np.empty(0, np.int64)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument(
        "--bytes",
        type=int,
        nargs="+",
        default=[16, 38488, 1_048_576, 9_437_184],
        help="of one upload",
    )
    parser.add_argument("--clients", type=int, default=20, help="uploads of a round")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each measurement")
    options = parser.parse_args()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    for ranks in options.ranks:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            os.environ["MASTER_PORT"] = str(free.getsockname()[1])
        context = multiprocessing.get_context("spawn")
        others = [
            context.Process(target=serve, args=(rank, ranks, options)) for rank in range(1, ranks)
        ]
        for process in others:
            process.start()
        serve(0, ranks, options)
        for process in others:
            process.join()


class Trained(Engine):
    """An engine whose clients have done their work before: uploads of ``size`` bytes, each with
    bytes of its own."""

    def __init__(self, size: int, ids: Sequence[int]) -> None:
        self.uploads = {id: bytes([id % 256]) * size for id in ids}

    def train(
        self, orders: Sequence[ClientTask], units: Units | None = None
    ) -> Iterator[ClientResult]:
        for order in orders:
            yield ClientResult(
                order.client, self.uploads[order.client.id], {}, {"loss": Mean(1.0, 1)}, 1
            )


def serve(rank: int, ranks: int, options: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    orders = [
        ClientTask(Client(id, np.arange(10), NOBODY), 1, b"", torch.zeros(10), 1, 1)
        for id in range(options.clients)
    ]
    heard, took = [], []
    for size in options.bytes:
        data, memory = bytes(size), torch.zeros(ranks, size, dtype=torch.uint8)
        wire = timed(
            lambda memory=memory: [dist.broadcast(slot, at) for at, slot in enumerate(memory)],
            options.seconds,
        )
        seconds = timed(lambda data=data: gather_bytes(data), options.seconds)
        engine = RankedEngine(
            Trained(size, range(rank, options.clients, ranks)), SimpleNamespace(batch_size=10)
        )
        held = peak(lambda engine=engine: list(engine.train(orders)))
        whole = timed(lambda engine=engine: list(engine.train(orders)), options.seconds)
        heard.append(size * (ranks - 1))
        took.append(seconds)
        if rank == 0:
            rates = [
                1e-6 * size * count / per
                for count, per in ((ranks, wire), (ranks, seconds), (options.clients, whole))
            ]
            print((
                f"{ranks} ranks, {size} bytes: wire {1e3 * wire:.2f} ms, {rates[0]:.0f} MB/s; gather "
                f"of one each {1e3 * seconds:.2f} ms, {rates[1]:.0f} MB/s; of {options.clients} "
                f"uploads {1e3 * whole:.2f} ms, {rates[2]:.0f} MB/s; peak "
                f"{held / (size * options.clients):.2f}"
            ), flush=True)  # fmt: skip
    if rank == 0 and len(heard) > 1:
        per_byte = np.polyfit(heard, took, 1, w=1 / np.array(took))[0]
        print(
            f"{ranks} ranks: latency {1e3 * took[0]:.2f} ms a gather, bandwidth "
            f"{1e-6 / per_byte:.0f} MB/s heard by a rank"
        )
    dist.destroy_process_group()


def timed(function: Callable[[], Any], seconds: float) -> float:
    """Median; every rank calls it equally often, as rank 0 says."""
    function()
    started = time.perf_counter()
    function()
    once = torch.tensor([time.perf_counter() - started])
    dist.broadcast(once, 0)
    found = []
    for _ in range(max(3, min(200, int(seconds / max(float(once), 1e-4))))):
        barrier()
        started = time.perf_counter()
        function()
        found.append(time.perf_counter() - started)
    return median(found)


def peak(function: Callable[[], Any]) -> int:
    """Bytes that this process held at most while it ran, beyond those before (Linux)."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
    before = _status("VmRSS")
    function()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return 1024 * int(found[1])


if __name__ == "__main__":
    main()
