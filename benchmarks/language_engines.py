"""Compare engines on a federation of LoRA adapters: clients in turn, stacked over one base, and
stacked with a base each; and clients in turn with a loop that is written by hand.

    OMP_NUM_THREADS=1 python benchmarks/language_engines.py [--clients 8] [--rows 16] [--steps 6]
        [--repeats 5] [--base FOLDER] [--by_hand]

Each contender runs in a process of its own, on one thread. Printed are the least CPU seconds of one
client's local step, everything included from its message to its upload, and by how much the process
grew at most while it trained. ``--by_hand`` takes the loop and the engine in turn in one process
and prints the ratio of their fastest rounds, which is 1.15 at most. ``--base`` is a folder of a
transformers model in place of the byte model.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
from time import process_time

import torch
from lightning.fabric import Fabric
from torch.nn import functional as F

from fl_lightning.data import InstructionData
from fl_lightning.engines import BatchedEngine, ClientTask, SequentialEngine
from fl_lightning.methods import FedAvg
from fl_lightning.support.memory import keep_freed_memory
from fl_lightning.wire import Payload

CONTENDERS = ("in turn", "stacked, one base", "stacked, a base each")


class BaseEach(BatchedEngine):
    """Stacks the frozen weights too."""

    @property
    def constants(self) -> dict[str, torch.Tensor]:
        return {}


def federation(options: argparse.Namespace) -> tuple[InstructionData, FedAvg]:
    """Return dealt data, and a built method."""
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
    network = f"hf:{options.base}" if options.base else "llama_tiny"
    method = FedAvg(
        network=network, optimizer=lambda weights: torch.optim.AdamW(weights, lr=1e-3, fused=True)
    )
    method.build(data)
    return data, method


def by_hand(
    data: InstructionData, method: FedAvg, options: argparse.Namespace
) -> list[torch.Tensor]:
    """Train the clients as a script would: set the adapters, make the steps, copy the adapters; and
    return what each ends with, one vector."""
    network, ended = method.network, []
    method.layout.write(network, method.server["weights"])
    trained = [weight for weight in network.parameters() if weight.requires_grad]
    start = [weight.detach().clone() for weight in trained]
    for id in range(options.clients):
        with torch.no_grad():
            for weight, value in zip(trained, start, strict=True):
                weight.copy_(value)
        optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=True)
        network.train()
        for inputs, target in data.train_batches(
            data.client(id), round=1, epochs=1, steps=options.steps
        ):
            logits = network(inputs)
            labels = target[:, : logits.shape[1]]
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        ended.append(torch.cat([weight.detach().flatten() for weight in trained]))
    return ended


def compare_by_hand(options: argparse.Namespace) -> None:
    data, method = federation(options)
    engine = SequentialEngine(Fabric(accelerator="cpu", devices=1), method, data)
    clients = [data.client(id) for id in range(options.clients)]
    message = method.broadcast(clients[0]).to_bytes()
    tasks = [ClientTask(c, 1, message, data.labels(c), 1, options.steps) for c in clients]
    seconds: dict[str, list[float]] = {"by hand": [], "engine": []}
    for _ in range(1 + options.repeats):
        started = process_time()
        ended = by_hand(data, method, options)
        middle = process_time()
        results = list(engine.train(tasks))
        seconds["by hand"].append(middle - started)
        seconds["engine"].append(process_time() - middle)
    for result, vector in zip(results, ended, strict=True):
        found = Payload.from_bytes(result.upload).tensor("weights")
        torch.testing.assert_close(found, vector, rtol=1e-3, atol=1e-5)
    least = {
        name: min(times[1:]) / options.clients / options.steps for name, times in seconds.items()
    }
    for name, time in least.items():
        print(f"{name} | {1e3 * time:.2f} CPU ms of a client's step")
    print(f"ratio | {least['engine'] / least['by hand']:.3f}")


def measure(name: str, options: argparse.Namespace) -> None:
    data, method = federation(options)
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
    parser.add_argument("--base", help="folder of a transformers model; default: the byte model")
    parser.add_argument("--by_hand", action="store_true", help="take the engine and a loop in turn")
    parser.add_argument("--only", choices=CONTENDERS, help="measure this one in this process")
    options = parser.parse_args()
    if options.by_hand:
        compare_by_hand(options)
        return
    if options.only:
        measure(options.only, options)
        return
    print("engine | CPU ms of a client's step | MiB\n---|---|---", flush=True)
    for name in CONTENDERS:
        subprocess.run([sys.executable, *sys.argv, "--only", name], check=True)


if __name__ == "__main__":
    main()
