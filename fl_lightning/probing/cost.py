"""What one answer costs: floating-point operations, seconds, memory, bytes. Seconds and memory are this
machine's, and this moment's."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

WARM_UP = 10  # forward passes before the clock runs


@torch.no_grad()
def flops(network: nn.Module, inputs: Any) -> int:
    """Floating-point operations of a forward pass, as torch counts them: matrix products and convolutions,
    two a multiply-add."""
    with FlopCounterMode(display=False) as counter:
        network(inputs)
    return int(counter.get_total_flops())


def float_bytes(network: nn.Module) -> int:
    """Parameters and floating-point statistics at 4 bytes each."""
    tensors = [*network.parameters(), *(buffer for buffer in network.buffers() if buffer.is_floating_point())]
    return 4 * sum(tensor.numel() for tensor in tensors)


@torch.no_grad()
def latencies(networks: Mapping[str, nn.Module], inputs: Tensor, batch_size: int) -> dict[str, np.ndarray]:
    """Seconds of each forward pass over ``inputs``, by network; they take turns, so that a slow moment meets
    them all.

    Args:
        inputs: on the device, ``[n, ...]``.
        batch_size: examples of one pass.
    """
    batches = inputs.split(batch_size)
    taken: dict[str, list[float]] = {name: [] for name in networks}
    for network in networks.values():
        for batch in batches[:WARM_UP]:
            network(batch)
    for batch in batches:
        for name, network in networks.items():
            taken[name].append(_seconds(lambda network=network, batch=batch: network(batch), inputs.device))  # type: ignore[misc]
    return {name: np.array(seconds) for name, seconds in taken.items()}


def _seconds(work: Callable[[], Any], device: torch.device) -> float:
    _wait(device)
    started = perf_counter()
    work()
    _wait(device)
    return perf_counter() - started


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


@torch.no_grad()
def peak_memory(network: nn.Module, inputs: Tensor) -> tuple[int, str]:
    """Bytes, and of what: on CUDA the most that is allocated during a forward pass; elsewhere the most this
    process ever held."""
    if inputs.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(inputs.device)
        network(inputs)
        _wait(inputs.device)
        return torch.cuda.max_memory_allocated(
            inputs.device
        ), "allocated on the device at the peak of one forward pass"
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(
        resource.RUSAGE_SELF
    ).ru_maxrss * unit, "the largest resident size of the whole process so far"
