"""Packing of unsigned integers of b bits, without padding between them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from fl_lightning.errors import MisuseError


@dataclass(frozen=True, slots=True, eq=False)
class Codes:
    """Unsigned integers of ``bits`` bits each.

    Args:
        values: integers in [0, 2**bits), any shape, int32 on the CPU.
        bits: 1 to 16.
        are_indices: whether they are positions in a table, such as a codebook, and not numbers.
            Neighbouring indices need not stand for neighbouring values, and the table may have
            fewer than 2**bits rows.

    Raises:
        MisuseError: ``bits`` is out of range.
    """

    values: Tensor
    bits: int
    are_indices: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 16:
            raise MisuseError(
                f"codes of {self.bits} bits", "1 to 16 can be packed", "choose bits in that range"
            )


def packed_nbytes(count: int, bits: int) -> int:
    """Return the number of bytes of ``count`` packed codes; zero bits fill the last byte."""
    return (count * bits + 7) // 8


def pack(codes: Codes) -> bytes:
    """Return the codes as a little-endian bit stream: code i has bits [i * b, (i + 1) * b), lowest
    bit first.

    Raises:
        MisuseError: a value does not fit into ``bits`` bits.

    >>> pack(Codes(torch.tensor([1, 2, 3]), bits=2)).hex()
    '39'
    """
    values, bits = codes.values.numpy().reshape(-1), codes.bits
    if values.size and (values.min() < 0 or values.max() >> bits):
        raise MisuseError(
            f"a code lies outside [0, {2**bits})",
            f"{bits} bits cannot hold it",
            "clamp before packing",
        )
    if bits in (8, 16):
        return values.astype(f"<u{bits // 8}").tobytes()
    groups = np.zeros((-(-values.size // 8), 8), dtype=np.uint32)
    groups.reshape(-1)[: values.size] = values
    packed = np.zeros((len(groups), bits), dtype=np.uint8)
    for position, byte, shift in _places(bits):
        word = groups[:, position] << shift
        for offset in range(-(-(shift + bits) // 8)):
            packed[:, byte + offset] |= (word >> 8 * offset).astype(np.uint8)
    return packed.tobytes()[: packed_nbytes(values.size, bits)]


def _places(bits: int) -> list[tuple[int, int, int]]:
    """Return position, first byte and lowest bit in it for each of the eight codes in ``bits``
    bytes."""
    return [(position, position * bits // 8, position * bits % 8) for position in range(8)]


def unpack(data: bytes | memoryview, count: int, bits: int) -> Tensor:
    """Return the codes that :func:`pack` packed, int32 ``[count]``.

    Raises:
        MisuseError: the number of bytes is not that of ``count`` codes.
    """
    raw = np.frombuffer(data, dtype=np.uint8)
    if raw.size != packed_nbytes(count, bits):
        raise MisuseError(
            f"{raw.size} bytes for {count} codes of {bits} bits",
            f"they take {packed_nbytes(count, bits)}",
            "pass those",
        )
    if bits in (8, 16):
        return torch.from_numpy(raw.view(f"<u{bits // 8}").astype(np.int32))
    if bits in (1, 2, 4):
        return torch.from_numpy(
            _codes_of_bytes(bits).take(raw, axis=0, mode="clip").reshape(-1)[:count]
        )
    if bits < 8:
        pairs = (_words(raw, bits) >> np.arange(0, 8, 2) * bits) & (4**bits - 1)
        return torch.from_numpy(
            _codes_of_pairs(bits).take(pairs, axis=0, mode="clip").reshape(-1)[:count]
        )
    packed = np.zeros((-(-count // 8), bits), dtype=np.uint8)
    packed.reshape(-1)[: raw.size] = raw
    groups = np.empty((len(packed), 8), dtype=np.int32)
    for position, byte, shift in _places(bits):
        word = packed[:, byte].astype(np.int32)
        for offset in range(1, -(-(shift + bits) // 8)):
            word |= packed[:, byte + offset].astype(np.int32) << 8 * offset
        groups[:, position] = (word >> shift) & (2**bits - 1)
    return torch.from_numpy(groups.reshape(-1)[:count])


def _words(raw: np.ndarray, bits: int) -> np.ndarray:
    """Return eight codes in each word, int64 ``[G, 1]``; zeros fill the last word."""
    whole, left = divmod(raw.size, bits)
    words = np.zeros((whole + (left > 0), 8), dtype=np.uint8)
    words[:whole, :bits] = raw[: raw.size - left].reshape(whole, bits)
    words[whole:, :left] = raw[raw.size - left :]
    return words.view("<i8")


@cache
def _codes_of_pairs(bits: int) -> np.ndarray:
    """Return the two codes in each number of ``2 * bits`` bits, int32 ``[4**bits, 2]``."""
    pairs = np.arange(4**bits)
    return np.stack([pairs & 2**bits - 1, pairs >> bits], axis=1).astype(np.int32)


@cache
def _codes_of_bytes(bits: int) -> np.ndarray:
    """Return the codes in each byte, int32 ``[256, 8 / bits]``.

    Looking codes up in this table is 2 to 9 times as fast as shifting them out.
    """
    return (np.arange(256)[:, None] >> np.arange(0, 8, bits) & 2**bits - 1).astype(np.int32)
