"""Encoding of many payloads with the same names and shapes at once; their common bytes are written
once."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from fl_lightning.wire.payload import HEADER, MAGIC, VERSION, checksum_of_header, entry_head


def encode_rows(entries: Mapping[str, Tensor]) -> list[bytes]:
    """Return ``Payload({name: tensor[k] for ...}).to_bytes()`` for each k.

    Args:
        entries: stacked entries ``[K, ...]`` by name.

    >>> from fl_lightning.wire import Payload
    >>> encode_rows({"x": torch.eye(2)})[1] == Payload({"x": torch.tensor([0.0, 1.0])}).to_bytes()
    True
    """
    columns = [column for name, tensor in entries.items() for column in _columns(name, tensor)]
    count = len(next(iter(entries.values())))
    body = sum(column.shape[-1] for column in columns)
    wire = np.empty((count, HEADER.size + body), np.uint8)
    at = HEADER.size
    for column in columns:
        wire[:, at : at + column.shape[-1]] = column
        at += column.shape[-1]
    seed = checksum_of_header(len(entries))
    for row in wire:
        checksum = zlib.crc32(row[HEADER.size :], seed)
        row[: HEADER.size] = np.frombuffer(
            HEADER.pack(MAGIC, VERSION, len(entries), body, checksum), np.uint8
        )
    return [row.tobytes() for row in wire]


def _columns(name: str, tensor: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return the head of an entry, uint8 ``[H]``, and its data in each payload, uint8 ``[K,
    B]``."""
    head = np.frombuffer(entry_head(name, tensor[0]), np.uint8)
    rows = tensor.detach().cpu().contiguous()
    data = rows.view(-1).view(torch.uint8).numpy() if rows.numel() else np.empty(0, np.uint8)
    return head, data.reshape(len(tensor), -1) if rows.numel() else np.empty(
        (len(tensor), 0), np.uint8
    )
