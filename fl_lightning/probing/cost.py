"""The cost of a forward pass: floating-point operations, seconds, memory, bytes.

Seconds and memory are measured, so they depend on the machine and its load.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

WARM_UP_PASSES = 10  # forward passes before the measurement


def flop_counter(**formulas: Callable[..., int]) -> FlopCounterMode:
    """Return torch's counter of floating-point operations, in which products of integers count as
    those of floats do.

    Args:
        formulas: of other operations of ``torch.ops.aten``, by name.
    """
    every = {"_int_mm": product_flops, **formulas}
    mapping = {getattr(torch.ops.aten, name): formula for name, formula in every.items()}
    return FlopCounterMode(display=False, custom_mapping=mapping)


def product_flops(left: Sequence[int], right: Sequence[int], **other: Any) -> int:
    """Return the operations of a product of matrices of these shapes."""
    return 2 * left[0] * left[1] * right[1]


@torch.no_grad()
def flops(network: nn.Module, inputs: Any) -> int:
    """Return the floating-point operations of a forward pass, as torch counts them.

    They are those of matrix products, of integers too, and convolutions; a multiply-add counts as
    two.
    """
    with flop_counter() as counter:
        network(inputs)
    return int(counter.get_total_flops())


def float_bytes(network: nn.Module) -> int:
    """Return the bytes of all parameters and floating-point buffers, 4 bytes for each value."""
    tensors = [
        *network.parameters(),
        *(buffer for buffer in network.buffers() if buffer.is_floating_point()),
    ]
    return 4 * sum(tensor.numel() for tensor in tensors)


@torch.no_grad()
def latencies(
    networks: Mapping[str, nn.Module], batches: Sequence[Any], device: torch.device
) -> dict[str, np.ndarray]:
    """Return the seconds of each forward pass by network.

    The networks take turns, so that other load on the machine affects all of them alike.

    Args:
        networks: networks by name.
        batches: inputs of each pass.
        device: where they are.
    """
    taken: dict[str, list[float]] = {name: [] for name in networks}
    for network in networks.values():
        for batch in batches[:WARM_UP_PASSES]:
            network(batch)
    for batch in batches:
        for name, network in networks.items():
            taken[name].append(_seconds(partial(network, batch), device))
    return {name: np.array(seconds) for name, seconds in taken.items()}


def _seconds(function: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds of one call of ``function``, including its work on the device."""
    _synchronize(device)
    started = perf_counter()
    function()
    _synchronize(device)
    return perf_counter() - started


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


@torch.no_grad()
def peak_memory(network: nn.Module, inputs: Any, device: torch.device) -> tuple[int, str]:
    """Return the peak memory in bytes, and a description of what it counts.

    On CUDA it is the peak allocation during one forward pass; elsewhere the peak of the whole
    process so far.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        network(inputs)
        _synchronize(device)
        return torch.cuda.max_memory_allocated(
            device
        ), "allocated on the device at the peak of one forward pass"
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(
        resource.RUSAGE_SELF
    ).ru_maxrss * unit, "the largest resident size of the whole process so far"
