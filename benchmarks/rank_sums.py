"""What a rank receives in a round: sums of integers against all uploads, over gloo on 127.0.0.1
(Linux).

    python benchmarks/rank_sums.py [--ranks 2 4] [--cohorts 20 80 320 640] [--values 33946]
        [--repeats 5]

Every rank has its share of a cohort's uploads of fp32 values. ``sums``: it adds its own up, the
ranks exchange sums and a record of each client (``Sums.merge_ranks``, ``exchange_receipts``).
``uploads``: every rank hears all of them (``gather_parts``) and takes the mean. Bytes are those of
the loopback device, the least of the repeats, divided by the ranks; seconds are medians on rank 0.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from fl_lightning.aggregation.averages import WEIGHTED_MEAN, weighted_mean
from fl_lightning.aggregation.base import Receipt
from fl_lightning.aggregation.sums import Addend, Sums
from fl_lightning.client import Client
from fl_lightning.distributed.collectives import barrier, gather_parts
from fl_lightning.engines import ClientTask, exchange_receipts
from fl_lightning.metrics import Mean
from fl_lightning.wire import LedgerEntry

NOBODY = np.empty(0, np.int64)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--cohorts", type=int, nargs="+", default=[20, 80, 320, 640])
    parser.add_argument("--values", type=int, default=33_946, help="of one upload")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    print("| ranks | cohort | sums: MB a rank | uploads: MB a rank | sums: ms | uploads: ms |")
    print("|---:|---:|---:|---:|---:|---:|", flush=True)
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


def serve(rank: int, ranks: int, options: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    for cohort in options.cohorts:
        torch.manual_seed(rank)
        own = {at: torch.randn(options.values) for at in range(rank, cohort, ranks)}
        tasks = [
            ClientTask(Client(id, np.arange(10), NOBODY), 1, b"", torch.zeros(10), 1, 1)
            for id in range(cohort)
        ]

        def sums(own=own, tasks=tasks, cohort=cohort) -> torch.Tensor:
            receipts = {
                at: Receipt(
                    tasks[at].client, LedgerEntry(1, at, "trained"), {"loss": Mean(1.0, 1)}, 10
                )
                for at in own
            }
            exchange_receipts(receipts, tasks, {})
            found = Sums(WEIGHTED_MEAN, cohort)
            found.add("weights", [Addend(vector, 10, 10) for vector in own.values()])
            found.merge_ranks()
            return found.mean("weights")

        def uploads(own=own, cohort=cohort) -> torch.Tensor:
            everybody = gather_parts({str(at): vector for at, vector in own.items()})
            return weighted_mean(
                [everybody[str(at)] for at in range(cohort)], [1 / cohort] * cohort
            )

        measured = [measure(function, ranks, options.repeats) for function in (sums, uploads)]
        if rank == 0:
            (some, quick), (all_, slow) = measured
            print(
                f"| {ranks} | {cohort} | {some / 1e6:.2f} | {all_ / 1e6:.2f} | "
                f"{1e3 * quick:.0f} | {1e3 * slow:.0f} |",
                flush=True,
            )
    dist.destroy_process_group()


def measure(function: Callable[[], Any], ranks: int, repeats: int) -> tuple[float, float]:
    """Bytes a rank and seconds of one call."""
    function()
    received, took = [], []
    for _ in range(repeats):
        barrier()
        before, started = loopback_bytes(), time.perf_counter()
        barrier()
        function()
        took.append(time.perf_counter() - started)
        barrier()
        received.append((loopback_bytes() - before) / ranks)
    return min(received), median(took)


def loopback_bytes() -> int:
    """Bytes that the loopback device has received."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[0])
    raise RuntimeError("there is no loopback device; run this on Linux")


if __name__ == "__main__":
    main()
