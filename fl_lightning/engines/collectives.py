"""What processes tell each other: bytes, tensors, one line of text. No pickle. With one process everything is the identity.

Only bytes on the CPU travel (gloo, whatever the device): no gradient is ever reduced between processes, and sums are taken by every
process for itself, in the order of the cohort.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor

from fl_lightning.errors import RankLost

PATIENCE = 5.0  # seconds for whoever watches the processes to say which one died, before a broken connection is reported as such


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def gather_bytes(data: bytes) -> list[bytes]:
    """What each rank gave, by rank, on every rank.

    Raises:
        RankLost: a rank is gone, or did not answer within ``trainer.rank_timeout``.
    """
    return (
        [data] if world_size() == 1 else [_broadcast(data if source == rank() else b"", source) for source in range(world_size())]
    )


def gather_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of all ranks, by name, on every rank: on the CPU where there are several; no two ranks give the same name."""
    if world_size() == 1:
        return dict(tensors)
    # clones: safetensors refuses tensors that share memory
    mine = save({name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()})
    return {name: tensor for data in gather_bytes(mine) for name, tensor in load(data).items()}


def from_rank_zero(text: str) -> str:
    """Rank 0's text, on every rank."""
    return text if world_size() == 1 else _broadcast(text.encode(), 0).decode()


def barrier() -> None:
    """Wait until every rank is here."""
    gather_bytes(b"")


def _broadcast(data: bytes, source: int) -> bytes:
    with _answers(source):
        length = torch.tensor([len(data)])
        dist.broadcast(length, source)
        if source == rank():
            buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        else:
            buffer = torch.empty(int(length), dtype=torch.uint8)
        if len(buffer):
            dist.broadcast(buffer, source)
    return data if source == rank() else buffer.numpy().tobytes()


@contextmanager
def _answers(source: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch.distributed has no narrower type for a closed connection or a time-out
        time.sleep(PATIENCE)  # a signal that is on its way (Ctrl-C, a dead child) knows more, and interrupts this
        reason = " ".join(str(error).split())
        raise RankLost(
            f"no answer while rank {source} was to be heard by rank {rank()} of {world_size()} ({reason}); a run needs all its "
            "processes; see the log of the one that died, then continue with --ckpt_path"
        ) from error
