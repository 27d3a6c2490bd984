"""Random streams as a pure function of (seed, purpose, round, client).

No stream has a state that outlives its use, so nothing about randomness needs saving: a resumed round draws what
the interrupted one drew, a cohort is the same for every method, and the order in which clients run cannot matter.
Streams are counter based (Philox, Salmon et al., SC 2011), keyed by a hash of the four names.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

import numpy as np
import torch


def key(seed: int, purpose: str, round: int = 0, client: int = 0) -> int:
    """128-bit key of one stream."""
    name = f"{seed}/{purpose}/{round}/{client}".encode()
    return int.from_bytes(blake2b(name, digest_size=16).digest(), "little")


def stream(seed: int, purpose: str, round: int = 0, client: int = 0) -> np.random.Generator:
    """NumPy generator for one purpose of one client in one round (0: not bound to a round, or to a client).

    >>> int(stream(1, "cohort", round=3).integers(100)) == int(stream(1, "cohort", round=3).integers(100))
    True
    """
    return np.random.Generator(np.random.Philox(key=key(seed, purpose, round, client)))


@contextmanager
def torch_stream(seed: int, purpose: str, round: int = 0, client: int = 0) -> Iterator[None]:
    """Within the block torch's global generators (initial weights, dropout) follow this stream; after it they are as before."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(key(seed, purpose, round, client) % 2**63)
        yield
