"""What sums of integers cost: ``weighted_mean`` against a mean in float64 in the order of clients,
in turn.

    python benchmarks/exact_mean.py [--clients 10] [--values 2300000] [--repeats 9] [--build]

With ``--build`` the compiled sums are built first, if this machine has a compiler, and measured
beside those in Python.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from fl_lightning.aggregation import compiled_sum
from fl_lightning.aggregation.averages import weighted_mean

BLOCK_VALUES = 2**16


def float_mean(vectors: list[Tensor], shares: list[float]) -> Tensor:
    """The mean of before: added up in float64, one client after another."""
    mean = torch.empty(len(vectors[0]))
    for begin in range(0, len(mean), BLOCK_VALUES):
        block = slice(begin, begin + BLOCK_VALUES)
        total = torch.zeros(len(mean[block]), dtype=torch.float64)
        for vector, share in zip(vectors, shares, strict=True):
            total.add_(vector[block], alpha=share)
        mean[block] = total
    return mean


def seconds(mean: Callable[[list[Tensor], list[float]], Tensor], *arguments) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    mean(*arguments)
    return time.perf_counter() - wall, time.process_time() - cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--values", type=int, default=2_300_000)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--build", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    vectors = [0.05 * torch.randn(given.values) for _ in range(given.clients)]
    examples = torch.randint(1, 300, (given.clients,)).tolist()
    shares = [n / sum(examples) for n in examples]
    apart = (float_mean(vectors, shares) - weighted_mean(vectors, shares)).abs().max()
    print(
        f"{given.clients} clients, {given.values} values: integers / float64; largest difference {apart:.1e}"
    )
    sums, ways = compiled_sum.COMPILED, {"in Python": None}
    if given.build and sums.file.build():
        ways["compiled"] = sums.file.load()
    for way, sums.found in ways.items():
        taken = [
            (seconds(weighted_mean, vectors, shares), seconds(float_mean, vectors, shares))
            for _ in range(given.repeats)
        ]
        for at, what in enumerate(("seconds", "CPU seconds")):
            ratios = sorted(now[at] / before[at] for now, before in taken)
            print(
                f"{way}, {what}: median {ratios[len(ratios) // 2]:.2f}, from {ratios[0]:.2f} to {ratios[-1]:.2f}"
            )


if __name__ == "__main__":
    main()
