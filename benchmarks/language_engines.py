"""Compare engines on a federation of LoRA adapters: clients in turn, stacked over one base, and stacked with a
base each.

    OMP_NUM_THREADS=1 python benchmarks/language_engines.py [--clients 8] [--rows 16] [--steps 6] [--repeats 5]

Each contender runs in a process of its own, on one thread. Printed are the least CPU seconds of one client's
local step, everything included from its message to its upload, and by how much the process grew at most while
it trained.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
from time import process_time

import torch
from lightning.fabric import Fabric

from fl_lightning.data import InstructionData
from fl_lightning.engines import BatchedEngine, ClientTask, SequentialEngine
from fl_lightning.methods import FedAvg
from fl_lightning.support.memory import keep_freed_memory

CONTENDERS = ("in turn", "stacked, one base", "stacked, a base each")


class BaseEach(BatchedEngine):
    """Stacks the frozen weights too."""

    @property
    def constants(self) -> dict[str, torch.Tensor]:
        return {}


def measure(name: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    data = InstructionData(
        num_clients=options.clients,
        examples_per_client=2 * options.rows * options.steps,
        batch_size=options.rows,
        tests_per_task=1,
    )
    data.prepare_data()
    data.setup()
    data.distribute(0, torch.device("cpu"))
    method = FedAvg(
        network="llama_tiny", optimizer=lambda weights: torch.optim.AdamW(weights, lr=1e-3, fused=True)
    )
    method.build(data)
    cls = dict(zip(CONTENDERS, (SequentialEngine, BatchedEngine, BaseEach), strict=True))[name]
    engine = cls(Fabric(accelerator="cpu", devices=1), method, data)
    clients = [data.client(id) for id in range(options.clients)]
    message = method.broadcast(clients[0]).to_bytes()
    tasks = [ClientTask(c, 1, message, data.labels(c), 1, options.steps) for c in clients]
    seconds, before = [], peak()
    for _ in range(1 + options.repeats):
        started = process_time()
        list(engine.train(tasks))
        seconds.append(process_time() - started)
    assert not getattr(engine, "reason", "")
    least = min(seconds[1:]) / options.clients / options.steps
    print(f"{name} | {1e3 * least:.1f} | {peak() - before:.0f}")


def peak() -> float:
    """Largest memory of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--rows", type=int, default=16, help="records of a local step")
    parser.add_argument("--steps", type=int, default=6, help="local steps of a client")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", choices=CONTENDERS, help="measure this one in this process")
    options = parser.parse_args()
    if options.only:
        measure(options.only, options)
        return
    print("engine | CPU ms of a client's step | MiB\n---|---|---", flush=True)
    for name in CONTENDERS:
        subprocess.run([sys.executable, *sys.argv, "--only", name], check=True)


if __name__ == "__main__":
    main()
