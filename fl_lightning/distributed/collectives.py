"""Exchange of bytes, tensors and text between processes, without pickle.

With one process nothing is sent. Only bytes on the CPU are sent (gloo, whatever the device), as
:mod:`fl_lightning.distributed.frames` says. What is added up between processes are integers, so
that no order changes a sum.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from fl_lightning.distributed.frames import (
    lengths_of_ranks,
    lost_rank_errors,
    parts_of_others,
    transfer,
    wait_for,
)
from fl_lightning.support.tensor_bytes import raw_bytes

Part = TypeVar("Part", bound=bytes | Tensor)


def world_size() -> int:
    """Return the number of processes of the run."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return the number of this process, from 0."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def gather_bytes(data: bytes) -> list[bytes]:
    """Return the bytes of every rank in order of ranks, on every rank.

    Raises:
        RankLost: a rank died or did not answer within ``trainer.rank_timeout``.
    """
    found = [data] * world_size()
    if len(found) == 1:
        return found
    for source, _, view in parts_of_others(
        [data], [[length] for length in lengths_of_ranks(len(data))]
    ):
        found[source] = bytes(view)
    return found


def gather_parts(parts: Mapping[str, Part]) -> dict[str, Part]:
    """Return the parts of all ranks by name, on every rank.

    With several ranks tensors are on the CPU. Parts of other ranks are copied once, out of the
    receiving buffer; parts of this rank are not copied.

    Args:
        parts: bytes or tensors of this rank by name; no two ranks may use the same name.

    Raises:
        RankLost: a rank died or did not answer within ``trainer.rank_timeout``.
    """
    if world_size() == 1:
        return dict(parts)
    mine: dict[str, bytes | Tensor] = {
        name: _on_cpu(part) if isinstance(part, Tensor) else part for name, part in parts.items()
    }
    header = json.dumps([(name, *_type_and_shape(part)) for name, part in mine.items()]).encode()
    forms = [json.loads(header) for header in gather_bytes(header)]
    sizes = [
        [math.prod(shape) * _itemsize(kind) for _, kind, shape in of_rank] for of_rank in forms
    ]
    found = dict(mine)
    for source, position, view in parts_of_others(list(mine.values()), sizes):
        name, kind, shape = forms[source][position]
        found[name] = _to_tensor(view, kind, shape) if kind else bytes(view)
    return cast("dict[str, Part]", found)


def send_parts(parts: Mapping[str, Tensor], to: Mapping[str, int]) -> dict[str, Tensor]:
    """Send each part to one rank, and return the parts that this rank is sent, by name, on the CPU.

    All ranks call it, with parts or without. Only names and shapes go to every rank. Values are
    received where they stay, without a buffer between.

    Args:
        parts: tensors of this rank by name; no two ranks may use the same name.
        to: the rank that each part is for, another one than this.

    Raises:
        RankLost: a rank died or did not answer within ``trainer.rank_timeout``.
    """
    mine = {name: _on_cpu(part).contiguous() for name, part in parts.items()}
    header = json.dumps(
        [(name, to[name], *_type_and_shape(part)) for name, part in mine.items()]
    ).encode()
    found: dict[str, Tensor] = {}
    works: list[tuple[dist.Work | None, int]] = []
    for source, of_rank in enumerate(gather_bytes(header)):
        for tag, (name, target, kind, shape) in enumerate(json.loads(of_rank)):
            if target == rank():
                found[name] = torch.empty(shape, dtype=getattr(torch, kind))
                works.append((transfer(dist.irecv, found[name], source, tag), source))
            elif source == rank():
                works.append((transfer(dist.isend, mine[name], target, tag), target))
    for work, other in works:
        wait_for(work, other)
    return found


def sum_over_ranks(integers: Tensor) -> Tensor:
    """Return the sum of every rank's integers ``[P]``, on every rank; int64, in place of
    ``integers``.

    Each rank receives about 16 bytes a value: its own share of every other rank, then the sums of
    the others.

    Raises:
        RankLost: a rank died or did not answer within ``trainer.rank_timeout``.
    """
    if world_size() > 1 and len(integers):
        with lost_rank_errors("some rank"):
            dist.all_reduce(integers, dist.ReduceOp.SUM)
    return integers


def from_rank_zero(text: str) -> str:
    """Return rank 0's text on every rank.

    Raises:
        RankLost: a rank died or did not answer within ``trainer.rank_timeout``.
    """
    return gather_bytes(text.encode() if rank() == 0 else b"")[0].decode()


def barrier() -> None:
    """Wait until every rank has called this function.

    Raises:
        RankLost: a rank died or did not answer within ``trainer.rank_timeout``.
    """
    gather_bytes(b"")


def _on_cpu(part: Tensor) -> Tensor:
    return part.detach().cpu().resolve_conj().resolve_neg()


def _type_and_shape(part: bytes | Tensor) -> tuple[str, list[int]]:
    """Return the name of the type (empty for bytes) and the shape of a part."""
    if isinstance(part, bytes):
        return ("", [len(part)])
    return (str(part.dtype).removeprefix("torch."), list(part.shape))


def _itemsize(kind: str) -> int:
    dtype: torch.dtype = getattr(torch, kind or "uint8")
    return dtype.itemsize


def _to_tensor(view: memoryview, kind: str, shape: Sequence[int]) -> Tensor:
    """Return a tensor with memory of its own from the bytes in ``view``."""
    tensor = torch.empty(list(shape), dtype=getattr(torch, kind))
    raw_bytes(tensor).numpy().data[:] = view
    return tensor
