"""Packing of b-bit unsigned integers, without padding between them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Codes:
    """Unsigned integers of ``bits`` bits each.

    Args:
        values: integers in [0, 2**bits), any shape, int32 on the CPU.
        bits: 1 to 16.
    """

    values: Tensor
    bits: int

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 16:
            raise ValueError(f"codes of {self.bits} bits; 1 to 16 can be packed; choose bits in that range")


def packed_nbytes(count: int, bits: int) -> int:
    """Bytes that ``count`` codes of ``bits`` bits take: the last byte is filled with zero bits."""
    return (count * bits + 7) // 8


def pack(codes: Codes) -> bytes:
    """Little-endian bit stream: code i is at bits [i * b, (i + 1) * b), lowest bit first.

    Raises:
        ValueError: a value does not fit into ``bits`` bits.

    >>> pack(Codes(torch.tensor([1, 2, 3]), bits=2)).hex()
    '39'
    """
    values, bits = codes.values.numpy().reshape(-1), codes.bits
    if values.size and (values.min() < 0 or values.max() >> bits):
        raise ValueError(f"a code lies outside [0, {2**bits}); {bits} bits cannot hold it; clamp before packing")
    if bits in (8, 16):
        return values.astype(f"<u{bits // 8}").tobytes()
    planes = np.unpackbits(values.astype("<u2").view(np.uint8).reshape(-1, 2), axis=1, count=bits, bitorder="little")
    return np.packbits(planes, bitorder="little").tobytes()


def unpack(data: bytes | memoryview, count: int, bits: int) -> Tensor:
    """Inverse of :func:`pack`: int32 ``[count]``."""
    raw = np.frombuffer(data, dtype=np.uint8)
    if bits in (8, 16):
        return torch.from_numpy(raw.view(f"<u{bits // 8}").astype(np.int32))
    planes = np.unpackbits(raw, count=count * bits, bitorder="little").reshape(count, bits)
    words = np.packbits(planes, axis=1, bitorder="little").astype(np.int32)
    values = words[:, 0] if words.shape[1] == 1 else words[:, 0] | words[:, 1] << 8
    return torch.from_numpy(np.ascontiguousarray(values))
