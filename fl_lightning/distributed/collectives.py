"""What processes tell each other: bytes, tensors, one line of text. No pickle. With one process everything is
the identity.

Only bytes on the CPU travel (gloo, whatever the device): no gradient is ever reduced between processes, and
sums are taken by every process for itself, in the order of the cohort. Everybody first hears how long
everything is; then all of it goes through two small buffers in turn.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, pairwise, zip_longest
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from fl_lightning.errors import RankLost

# seconds for whoever watches the processes to say which one died, before a broken connection is reported as
# such
PATIENCE = 5.0
FRAME = 4 * 2**20
# bytes that travel together: through two buffers of about that size, as fresh memory costs more than
# sending

Part = TypeVar("Part", bound=bytes | Tensor)


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def gather_bytes(data: bytes) -> list[bytes]:
    """What each rank gave, by rank, on every rank.

    Raises:
        RankLost: a rank is gone, or did not answer within ``trainer.rank_timeout``.
    """
    found = [data] * world_size()
    for source, _, view in _others([data], [[length] for length in _lengths(len(data))]):
        found[source] = bytes(view)
    return found


def gather_parts(parts: Mapping[str, Part]) -> dict[str, Part]:
    """Bytes and tensors of all ranks, by name, on every rank: tensors on the CPU where there are several; no
    two ranks give the same name.

    What others gave is copied once, out of the buffer that it came through; what this rank gave is not
    copied.

    Raises:
        RankLost: as :func:`gather_bytes`.
    """
    if world_size() == 1:
        return dict(parts)
    mine: dict[str, bytes | Tensor] = {
        name: part.detach().cpu().resolve_conj().resolve_neg() if isinstance(part, Tensor) else part
        for name, part in parts.items()
    }
    header = json.dumps([(name, *_form(part)) for name, part in mine.items()]).encode()
    forms = [json.loads(header) for header in gather_bytes(header)]
    sizes = [[math.prod(shape) * _itemsize(kind) for _, kind, shape in of_rank] for of_rank in forms]
    found = dict(mine)
    for source, position, view in _others(list(mine.values()), sizes):
        name, kind, shape = forms[source][position]
        found[name] = _tensor(view, kind, shape) if kind else bytes(view)
    return cast("dict[str, Part]", found)


def from_rank_zero(text: str) -> str:
    """Rank 0's text, on every rank."""
    return gather_bytes(text.encode() if rank() == 0 else b"")[0].decode()


def barrier() -> None:
    """Wait until every rank is here."""
    gather_bytes(b"")


def _lengths(length: int) -> list[int]:
    """What each rank gave, by rank."""
    slots = torch.full((world_size(),), length).split(1)
    works = [_broadcast(slot, source) for source, slot in enumerate(slots)] if len(slots) > 1 else []
    for source, work in enumerate(works):
        _wait(work, source)
    return [int(slot) for slot in slots]


def _others(
    parts: Sequence[bytes | Tensor], sizes: Sequence[Sequence[int]]
) -> Iterator[tuple[int, int, memoryview]]:
    """Source, position and bytes of each part of the other ranks, a source's in order. The bytes stay until
    the next are asked for.

    Args:
        parts: of this rank.
        sizes: in bytes, of the parts of every rank.
    """
    plans = [_frames(of_rank) for of_rank in sizes] if len(sizes) > 1 else []
    turns = [
        (source, frame)
        for frames in zip_longest(*plans, fillvalue=[])
        for source, frame in enumerate(frames)
        if frame
    ]
    works = _started(parts, sizes, turns)
    for (source, frame, buffer, work), _ in pairwise(
        chain(works, [None])
    ):  # while one is read, the next is on its way
        _wait(work, source)
        for part, where in _places(frame, sizes[source]) if source != rank() else ():
            yield source, part, buffer[where]


def _started(
    parts: Sequence[bytes | Tensor], sizes: Sequence[Sequence[int]], turns: Sequence[tuple[int, list[int]]]
) -> Iterator[Any]:
    """Source, frame, buffer and broadcast of each turn, begun when it is asked for: the one before the last
    must be over by then."""
    lengths = [sum(sizes[source][part] for part in frame) for source, frame in turns]
    buffers = torch.empty(2, max(lengths, default=0), dtype=torch.uint8)
    for turn, (source, frame) in enumerate(turns):
        buffer = buffers[turn % 2, : lengths[turn]]
        for part, where in _places(frame, sizes[source]) if source == rank() else ():
            buffer.numpy().data[where] = _raw(parts[part])
        yield source, frame, buffer.numpy().data, _broadcast(buffer, source)


def _frames(sizes: Sequence[int]) -> list[list[int]]:
    """Positions of the parts that travel together: whole ones, those that start within the same ``FRAME``
    bytes."""
    frames: dict[int, list[int]] = {}
    start = 0
    for position, size in enumerate(sizes):
        frames.setdefault(start // FRAME, []).append(position)
        start += size
    return list(frames.values())


def _places(frame: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Each part of a frame, and where it lies in it."""
    start = 0
    for part in frame:
        yield part, slice(start, start + sizes[part])
        start += sizes[part]


def _form(part: bytes | Tensor) -> tuple[str, list[int]]:
    """Type, empty for bytes, and shape."""
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


def _tensor(view: memoryview, kind: str, shape: Sequence[int]) -> Tensor:
    """Of its own memory."""
    tensor = torch.empty(list(shape), dtype=getattr(torch, kind))
    tensor.view(-1).view(torch.uint8).numpy().data[:] = view
    return tensor


def _broadcast(buffer: Tensor, source: int) -> dist.Work | None:
    with _answers(source):
        return dist.broadcast(buffer, source, async_op=True) if len(buffer) else None


def _wait(work: dist.Work | None, source: int) -> None:
    with _answers(source):
        if work is not None:
            work.wait()


@contextmanager
def _answers(source: int) -> Iterator[None]:
    try:
        yield
    except (
        RuntimeError
    ) as error:  # torch.distributed has no narrower type for a closed connection or a time-out
        time.sleep(
            PATIENCE
        )  # a signal that is on its way (Ctrl-C, a dead child) knows more, and interrupts this
        reason = " ".join(str(error).split())
        raise RankLost(
            f"no answer while rank {source} was to be heard by rank {rank()} of {world_size()} ({reason})",
            "a run needs all its processes",
            "see the log of the one that died, then continue with --ckpt_path",
        ) from error
