"""Exchange of bytes, tensors and text between processes, without pickle.

With one process nothing is sent. Only bytes on the CPU are sent (gloo, whatever the
device). What is added up between processes are integers, so that no order changes a sum. All ranks first
exchange the lengths of their parts, then the parts through two small buffers in turn.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, pairwise, zip_longest
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from fl_lightning.errors import RankLost

RANK_REPORT_SECONDS = 5.0
"""Time for the watch of processes to report which rank died, before a broken connection is reported."""
FRAME_BYTES = 4 * 2**20
"""Bytes that are sent together, through two buffers of about this size: allocating memory costs more than
sending."""

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
    for source, _, view in _parts_of_others([data], [[length] for length in _lengths(len(data))]):
        found[source] = bytes(view)
    return found


def gather_parts(parts: Mapping[str, Part]) -> dict[str, Part]:
    """Return the parts of all ranks by name, on every rank.

    With several ranks tensors are on the CPU. Parts of other ranks are copied once, out of the receiving
    buffer; parts of this rank are not copied.

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
    sizes = [[math.prod(shape) * _itemsize(kind) for _, kind, shape in of_rank] for of_rank in forms]
    found = dict(mine)
    for source, position, view in _parts_of_others(list(mine.values()), sizes):
        name, kind, shape = forms[source][position]
        found[name] = _to_tensor(view, kind, shape) if kind else bytes(view)
    return cast("dict[str, Part]", found)


def send_parts(parts: Mapping[str, Tensor], to: Mapping[str, int]) -> dict[str, Tensor]:
    """Send each part to one rank, and return the parts that this rank is sent, by name, on the CPU.

    All ranks call it, with parts or without. Only names and shapes go to every rank. Values are received
    where they stay, without a buffer between.

    Args:
        parts: tensors of this rank by name; no two ranks may use the same name.
        to: the rank that each part is for, another one than this.

    Raises:
        RankLost: a rank died or did not answer within ``trainer.rank_timeout``.
    """
    mine = {name: _on_cpu(part).contiguous() for name, part in parts.items()}
    header = json.dumps([(name, to[name], *_type_and_shape(part)) for name, part in mine.items()]).encode()
    found: dict[str, Tensor] = {}
    works: list[tuple[dist.Work | None, int]] = []
    for source, of_rank in enumerate(gather_bytes(header)):
        for tag, (name, target, kind, shape) in enumerate(json.loads(of_rank)):
            if target == rank():
                found[name] = torch.empty(shape, dtype=getattr(torch, kind))
                works.append((_start(dist.irecv, found[name], source, tag), source))
            elif source == rank():
                works.append((_start(dist.isend, mine[name], target, tag), target))
    for work, other in works:
        _wait(work, other)
    return found


def sum_over_ranks(integers: Tensor) -> Tensor:
    """Return the sum of every rank's integers ``[P]``, on every rank; int64, in place of ``integers``.

    Each rank receives about 16 bytes a value: its own share of every other rank, then the sums of the others.

    Raises:
        RankLost: a rank died or did not answer within ``trainer.rank_timeout``.
    """
    if world_size() > 1 and len(integers):
        with _lost_rank_errors("some rank"):
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


def _lengths(length: int) -> list[int]:
    """Return the ``length`` of every rank in order of ranks."""
    slots = torch.full((world_size(),), length).split(1)
    works = [_broadcast(slot, source) for source, slot in enumerate(slots)] if len(slots) > 1 else []
    for source, work in enumerate(works):
        _wait(work, source)
    return [int(slot) for slot in slots]


def _parts_of_others(
    parts: Sequence[bytes | Tensor], sizes: Sequence[Sequence[int]]
) -> Iterator[tuple[int, int, memoryview]]:
    """Yield source rank, position and bytes of each part of the other ranks, in order for each source.

    The bytes are valid until the next part is requested.

    Args:
        parts: parts of this rank.
        sizes: bytes of each part of every rank.
    """
    plans = [_frames(of_rank) for of_rank in sizes] if len(sizes) > 1 else []
    turns = [
        (source, frame)
        for frames in zip_longest(*plans, fillvalue=[])
        for source, frame in enumerate(frames)
        if frame
    ]
    works = _start_broadcasts(parts, sizes, turns)
    # ``pairwise`` starts the next broadcast before the current frame is read
    for (source, frame, buffer, work), _ in pairwise(chain(works, [None])):
        _wait(work, source)
        for part, where in _slices(frame, sizes[source]) if source != rank() else ():
            yield source, part, buffer[where]


def _start_broadcasts(
    parts: Sequence[bytes | Tensor], sizes: Sequence[Sequence[int]], turns: Sequence[tuple[int, list[int]]]
) -> Iterator[Any]:
    """Start the broadcast of each frame when it is requested; yield source, frame, buffer and broadcast.

    Two buffers are used in turn, so the broadcast before the last one must have finished by then.
    """
    lengths = [sum(sizes[source][part] for part in frame) for source, frame in turns]
    buffers = torch.empty(2, max(lengths, default=0), dtype=torch.uint8)
    for turn, (source, frame) in enumerate(turns):
        buffer = buffers[turn % 2, : lengths[turn]]
        for part, where in _slices(frame, sizes[source]) if source == rank() else ():
            buffer.numpy().data[where] = _raw(parts[part])
        yield source, frame, buffer.numpy().data, _broadcast(buffer, source)


def _frames(sizes: Sequence[int]) -> list[list[int]]:
    """Return the positions of the parts that are sent together.

    A frame holds all parts that start within the same ``FRAME_BYTES`` bytes. Parts are not split.
    """
    frames: dict[int, list[int]] = {}
    start = 0
    for position, size in enumerate(sizes):
        frames.setdefault(start // FRAME_BYTES, []).append(position)
        start += size
    return list(frames.values())


def _slices(frame: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Yield each part of a frame with its slice in the frame's bytes."""
    start = 0
    for part in frame:
        yield part, slice(start, start + sizes[part])
        start += sizes[part]


def _on_cpu(part: Tensor) -> Tensor:
    return part.detach().cpu().resolve_conj().resolve_neg()


def _type_and_shape(part: bytes | Tensor) -> tuple[str, list[int]]:
    """Return the name of the type (empty for bytes) and the shape of a part."""
    return (
        ("", [len(part)])
        if isinstance(part, bytes)
        else (str(part.dtype).removeprefix("torch."), list(part.shape))
    )


def _itemsize(kind: str) -> int:
    dtype: torch.dtype = getattr(torch, kind or "uint8")
    return dtype.itemsize


def _raw(part: bytes | Tensor) -> bytes | memoryview:
    return part if isinstance(part, bytes) else part.contiguous().view(-1).view(torch.uint8).numpy().data


def _to_tensor(view: memoryview, kind: str, shape: Sequence[int]) -> Tensor:
    """Return a tensor with memory of its own from the bytes in ``view``."""
    tensor = torch.empty(list(shape), dtype=getattr(torch, kind))
    tensor.view(-1).view(torch.uint8).numpy().data[:] = view
    return tensor


def _broadcast(buffer: Tensor, source: int) -> dist.Work | None:
    with _lost_rank_errors(source):
        return dist.broadcast(buffer, source, async_op=True) if len(buffer) else None


def _start(
    send_or_receive: Callable[..., dist.Work | None], part: Tensor, other: int, tag: int
) -> dist.Work | None:
    with _lost_rank_errors(other):
        return send_or_receive(part.view(-1).view(torch.uint8), other, tag=tag) if part.numel() else None


def _wait(work: dist.Work | None, source: int) -> None:
    with _lost_rank_errors(source):
        if work is not None:
            work.wait()


@contextmanager
def _lost_rank_errors(source: int | str) -> Iterator[None]:
    """Turn errors of torch.distributed within the block into :class:`RankLost`."""
    source = f"rank {source}" if isinstance(source, int) else source
    try:
        yield
    except RuntimeError as error:  # torch.distributed has no narrower type for lost connections and time-outs
        # a signal that arrives meanwhile (Ctrl-C, a dead child) names the cause and interrupts this sleep
        time.sleep(RANK_REPORT_SECONDS)
        reason = " ".join(str(error).split())
        raise RankLost(
            f"no answer from {source} to rank {rank()} of {world_size()} ({reason})",
            "a run needs all its processes",
            "see the log of the one that died, then continue with --ckpt_path",
        ) from error
