"""What the collective of several ranks costs: every rank hears every upload, over gloo on 127.0.0.1.

python benchmarks/ranks.py [--ranks 2 4] [--bytes 16 38488 1048576 9437184] [--clients 20] [--seconds 2]

For each number of ranks: one ``gather_bytes`` in which every rank gives so many bytes; then one ``gather_tensors`` of so many uploads
of that size, dealt to the ranks, with packing and unpacking. Medians, on rank 0. The last line fits the first table by
seconds = latency + bytes that a rank hears / bandwidth.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from fl_lightning.engines.collectives import barrier, gather_bytes, gather_tensors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--bytes", type=int, nargs="+", default=[16, 38488, 1_048_576, 9_437_184], help="of one upload")
    parser.add_argument("--clients", type=int, default=20, help="uploads of a round")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each measurement")
    options = parser.parse_args()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    for ranks in options.ranks:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            os.environ["MASTER_PORT"] = str(free.getsockname()[1])
        context = multiprocessing.get_context("spawn")
        others = [context.Process(target=serve, args=(rank, ranks, options)) for rank in range(1, ranks)]
        for process in others:
            process.start()
        serve(0, ranks, options)
        for process in others:
            process.join()


def serve(rank: int, ranks: int, options: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    heard, took = [], []
    for size in options.bytes:
        data = bytes(size)
        seconds = timed(lambda data=data: gather_bytes(data), options.seconds)
        uploads = {f"{at}/upload": torch.zeros(size, dtype=torch.uint8) for at in range(rank, options.clients, ranks)}
        whole = timed(lambda uploads=uploads: gather_tensors(uploads), options.seconds)
        heard.append(size * (ranks - 1))
        took.append(seconds)
        if rank == 0:
            print(f"{ranks} ranks, {size} bytes: gather of one each {1e3 * seconds:.2f} ms; of {options.clients} uploads "
                  f"{1e3 * whole:.2f} ms, {1e-6 * size * options.clients / whole:.0f} MB/s", flush=True)  # fmt: skip
    if rank == 0 and len(heard) > 1:
        per_byte = np.polyfit(heard, took, 1, w=1 / np.array(took))[0]
        print(f"{ranks} ranks: latency {1e3 * took[0]:.2f} ms a gather, bandwidth {1e-6 / per_byte:.0f} MB/s heard by a rank")
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


if __name__ == "__main__":
    main()
