"""The ranks of test_collectives.py: processes that check for themselves, or say how they failed."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fl_lightning.client import Client
from fl_lightning.distributed import collectives, frames
from fl_lightning.engines import ClientTask, ranks
from fl_lightning.errors import InputError
from fl_lightning.run.resume import require_one_identity


def serve(rank: int, size: int, what: str, folder: Path) -> None:
    """Rank ``rank`` of ``size``; what it raises is written to ``folder``."""
    frames.RANK_REPORT_SECONDS, frames.FRAME_BYTES = 0.0, 1000
    seconds = 60 if what != "silent" else 3
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=seconds),
    )
    try:
        globals()[what](rank, size)
    except (RuntimeError, InputError) as error:
        (folder / f"rank{rank}").write_text(f"{type(error).__name__}: {error}")
    else:
        # as launch._leave does: gloo's threads may outlive the interpreter, and end the process
        # with SIGABRT
        dist.destroy_process_group()


def parts(rank: int, seed: int) -> dict[str, bytes | Tensor]:
    """Of every form, around the length of a frame; rank 1 has nothing to give."""
    random, generator = (
        np.random.default_rng([rank, seed]),
        torch.Generator().manual_seed(10 * rank + seed),
    )
    given: dict[str, bytes | Tensor] = {
        str(n): random.bytes(n) for n in (0, 1, 998, 1, 1000, 1001, 0, 5000)
    }
    for dtype in (
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.uint8,
        torch.int64,
        torch.bool,
    ):
        # not contiguous
        given[str(dtype)] = (torch.randn(7, 30, generator=generator) * 50).abs().to(dtype).T
    given |= {
        "scalar": torch.tensor(float("nan")),
        "empty": torch.empty(0, 4),
        "large": torch.randn(3000, generator=generator),
    }
    given |= {f"{at}": torch.tensor([at + seed]) for at in range(300)}
    return {f"{rank}/{name}": part for name, part in given.items()} if rank != 1 else {}


def raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def exchange(rank: int, size: int) -> None:
    found = [collectives.gather_parts(parts(rank, seed)) for seed in range(2)]
    # the first are as they were: no views of a buffer that others went through
    for seed in range(2):
        expected = {
            name: part for source in range(size) for name, part in parts(source, seed).items()
        }
        assert found[seed].keys() == expected.keys()
        for name, part in expected.items():
            other = found[seed][name]
            assert type(other) is type(part), name
            if isinstance(part, Tensor) and isinstance(other, Tensor):
                assert (other.dtype, other.shape) == (part.dtype, part.shape), name
                part, other = raw(part), raw(other)
            assert other == part, name
    # each part of ranks 0 and 2 to one other rank; nothing arrives elsewhere
    tensors = {name: part for name, part in parts(rank, 0).items() if isinstance(part, Tensor)}
    to = {name: (rank + 1 + at % 2) % size for at, name in enumerate(tensors)}
    given = collectives.gather_parts({f"{to[name]}/{name}": part for name, part in tensors.items()})
    for name, part in collectives.send_parts(tensors, to).items():
        other = given.pop(f"{rank}/{name}")
        assert (part.dtype, part.shape) == (other.dtype, other.shape), name
        assert raw(part) == raw(other), name
    assert all(int(name.split("/")[0]) != rank for name in given)
    assert collectives.send_parts({}, {}) == {}
    given = [b"", bytes(5000), b"x", b"yy"][:size]
    assert collectives.gather_bytes(given[rank]) == given
    assert collectives.gather_parts({}) == {}
    assert collectives.from_rank_zero(f"from {rank}, \u00e4") == "from 0, \u00e4"
    collectives.barrier()


def silent(rank: int, size: int) -> None:
    time.sleep(5) if rank == 1 else collectives.gather_bytes(b"here")


def killed(rank: int, size: int) -> None:
    """After all have heard how much there is to come, with the half of it sent."""
    raw = frames._raw

    def die(part):
        return os.kill(os.getpid(), signal.SIGKILL) if part is last else raw(part)

    last = b"last"
    if rank == 1:
        frames._raw = die
    collectives.gather_parts({f"{rank}/first": bytes(5000), f"{rank}/last": last})


def disagree(rank: int, size: int) -> None:
    ranks.require_agreement(
        [
            ClientTask(
                Client(7, np.arange(3), np.arange(0)),
                1,
                b"message",
                torch.tensor([0, 1, rank]),
                1,
                1,
            )
        ]
    )


def other_data(rank: int, size: int) -> None:
    require_one_identity({"partition": "held", **({"public": "p"} if rank == 0 else {})})


def other_tokens(rank: int, size: int) -> None:
    require_one_identity({"partition": "held", "tokens": str(rank)})
