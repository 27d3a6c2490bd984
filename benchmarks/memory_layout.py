"""Processor time of a local step with a network channels last, and as torch lays it out, in turn:

    python benchmarks/memory_layout.py

One thread; the median of the repeats in milliseconds, and the second in terms of the first.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch
from torch import nn

from fl_lightning.models import build_network

CASES = {"resnet18": (10, 32, 64), "resnet20": (10, 32, 64), "mobilenetv2": (10, 32, 64)}
"""Networks for images of 32 x 32, with the sizes of batches."""


def step_of(network: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the seconds of the processor that a forward and a backward pass take."""
    network.zero_grad()
    begun = time.process_time()
    nn.functional.cross_entropy(network(images), labels).backward()
    return time.process_time() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--only", choices=CASES, help="one network")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(
        "| network | batch | channels last, ms | torch's own, ms | ratio |\n|---|---:|---:|---:|---:|"
    )
    for name in [given.only] if given.only else CASES:
        both = [build_network(name, 10, (3, 32, 32), channels_last=last) for last in (True, False)]
        for size in CASES[name]:
            images, labels = torch.randn(size, 3, 32, 32), torch.randint(0, 10, (size,))
            last = images.contiguous(memory_format=torch.channels_last)
            turns = [
                (step_of(both[0], last, labels), step_of(both[1], images, labels))
                for _ in range(given.repeats + 1)
            ][1:]  # the first step makes the kernels
            first, second = (1e3 * median(side) for side in zip(*turns, strict=True))
            print(f"| {name} | {size} | {first:.1f} | {second:.1f} | {second / first:.2f} |")


if __name__ == "__main__":
    main()
