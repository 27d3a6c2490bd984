"""How parts get from each of several processes to all others: through two small buffers in turn,
once all ranks have exchanged the lengths of their parts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, pairwise, zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fl_lightning.errors import RankLost
from fl_lightning.support.tensor_bytes import raw_bytes

RANK_REPORT_SECONDS = 5.0
"""Time for the watch of processes to report which rank died, before a broken connection is
reported."""
FRAME_BYTES = 4 * 2**20
"""Bytes that are sent together, through two buffers of about this size: allocating memory costs
more than sending."""


def lengths_of_ranks(length: int) -> list[int]:
    """Return the ``length`` of every rank in order of ranks."""
    slots = torch.full((dist.get_world_size(),), length).split(1)
    works = [_broadcast(slot, source) for source, slot in enumerate(slots)]
    for source, work in enumerate(works):
        wait_for(work, source)
    return [int(slot) for slot in slots]


def parts_of_others(
    parts: Sequence[bytes | Tensor], sizes: Sequence[Sequence[int]]
) -> Iterator[tuple[int, int, memoryview]]:
    """Yield source rank, position and bytes of each part of the other ranks, in order for each
    source.

    The bytes are valid until the next part is requested.

    Args:
        parts: parts of this rank.
        sizes: bytes of each part of every rank.
    """
    plans = [_frames(of_rank) for of_rank in sizes]
    turns = [
        (source, frame)
        for frames in zip_longest(*plans, fillvalue=[])
        for source, frame in enumerate(frames)
        if frame
    ]
    works = _start_broadcasts(parts, sizes, turns)
    # ``pairwise`` starts the next broadcast before the current frame is read
    for (source, frame, buffer, work), _ in pairwise(chain(works, [None])):
        wait_for(work, source)
        for part, where in _slices(frame, sizes[source]) if source != dist.get_rank() else ():
            yield source, part, buffer[where]


def _start_broadcasts(
    parts: Sequence[bytes | Tensor],
    sizes: Sequence[Sequence[int]],
    turns: Sequence[tuple[int, list[int]]],
) -> Iterator[Any]:
    """Start the broadcast of each frame when it is requested; yield source, frame, buffer and
    broadcast.

    Two buffers are used in turn, so the broadcast before the last one must have finished by then.
    """
    lengths = [sum(sizes[source][part] for part in frame) for source, frame in turns]
    buffers = torch.empty(2, max(lengths, default=0), dtype=torch.uint8)
    for turn, (source, frame) in enumerate(turns):
        buffer = buffers[turn % 2, : lengths[turn]]
        for part, where in _slices(frame, sizes[source]) if source == dist.get_rank() else ():
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


def _raw(part: bytes | Tensor) -> bytes | memoryview:
    return part if isinstance(part, bytes) else raw_bytes(part.contiguous()).numpy().data


def _broadcast(buffer: Tensor, source: int) -> dist.Work | None:
    with lost_rank_errors(source):
        return dist.broadcast(buffer, source, async_op=True) if len(buffer) else None


def transfer(
    send_or_receive: Callable[..., dist.Work | None], part: Tensor, other: int, tag: int
) -> dist.Work | None:
    """Begin to send the bytes of a tensor to another rank, or to receive them into it.

    Args:
        send_or_receive: ``dist.isend`` or ``dist.irecv``.
        part: contiguous; of an empty one nothing goes.
        other: the rank on the other side.
        tag: tells transfers between the same ranks from each other.

    Raises:
        RankLost: the other rank is gone.
    """
    with lost_rank_errors(other):
        return send_or_receive(raw_bytes(part), other, tag=tag) if part.numel() else None


def wait_for(work: dist.Work | None, source: int) -> None:
    """Wait until a transfer with rank ``source`` has ended; None: there is none.

    Raises:
        RankLost: that rank is gone.
    """
    with lost_rank_errors(source):
        if work is not None:
            work.wait()


@contextmanager
def lost_rank_errors(source: int | str) -> Iterator[None]:
    """Turn errors of torch.distributed within the block into :class:`RankLost`."""
    source = f"rank {source}" if isinstance(source, int) else source
    try:
        yield
    except RuntimeError as error:
        # torch.distributed has no narrower type for lost connections and time-outs
        # a signal that arrives meanwhile (Ctrl-C, a dead child) names the cause and interrupts this
        # sleep
        time.sleep(RANK_REPORT_SECONDS)
        reason = " ".join(str(error).split())
        raise RankLost(
            f"no answer from {source} to rank {dist.get_rank()} of {dist.get_world_size()} ({reason})",
            "a run needs all its processes",
            "see the log of the one that died, then continue with --ckpt_path",
        ) from error
