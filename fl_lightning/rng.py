"""Random streams as a pure function of (seed, purpose, round, client).

No stream has a state that outlives its use, so nothing about randomness needs saving: a resumed
round draws what the interrupted one drew, a cohort is the same for every method, and the order in
which clients run has no effect. Streams are counter based (Philox, Salmon et al., SC 2011), keyed
by a hash of the four names.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from struct import unpack
from typing import Any

import numpy as np
import torch
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import DTypeLike


def key(seed: int, purpose: str, round: int = 0, client: int = 0) -> bytes:
    """Return the 128-bit key of one stream."""
    return blake2b(f"{seed}/{purpose}/{round}/{client}".encode(), digest_size=16).digest()


def stream(seed: int, purpose: str, round: int = 0, client: int = 0) -> np.random.Generator:
    """Return NumPy's generator for one purpose in one round for one client.

    A round or client of 0 means that the stream belongs to no particular round or client.

    >>> int(stream(1, "cohort", round=3).integers(100)) == int(stream(1, "cohort", round=3).integers(100))
    True
    """
    return np.random.Generator(np.random.Philox(_Key(key(seed, purpose, round, client))))  # type: ignore[arg-type]


class Streams:
    """:func:`stream` in a third of the time: one generator that is set anew, and is valid until
    then."""

    def __init__(self) -> None:
        self._generator = stream(0, "")
        state: dict[str, Any] = dict(self._generator.bit_generator.state)
        # NumPy reads lists faster than arrays of four values
        numbers = {"counter": state["state"]["counter"].tolist(), "key": (0, 0)}
        self._state = state | {"state": numbers, "buffer": state["buffer"].tolist()}

    def stream(
        self, seed: int, purpose: str, round: int = 0, client: int = 0
    ) -> np.random.Generator:
        """Return NumPy's generator for one purpose in one round for one client."""
        self._state["state"]["key"] = unpack("<2Q", key(seed, purpose, round, client))
        self._generator.bit_generator.state = self._state
        return self._generator


def streams(seed: int, purpose: str, clients: Iterable[int]) -> Iterator[np.random.Generator]:
    """Yield :func:`stream` of each client, in a third of the time.

    A generator is valid until the next one is requested.
    """
    reused = Streams()
    for client in clients:
        yield reused.stream(seed, purpose, client=client)


class _Key(ISeedSequence):
    """The key in the form of a NumPy seed sequence.

    ``Philox(key=...)`` would ask the system for entropy as well, which takes time.
    """

    def __init__(self, key: bytes) -> None:
        self.words = np.frombuffer(key, dtype="<u8")

    def generate_state(self, n_words: int, dtype: DTypeLike = np.uint32) -> np.ndarray:
        return self.words


@contextmanager
def torch_stream(seed: int, purpose: str, round: int = 0, client: int = 0) -> Iterator[None]:
    """Seed torch's global generators (initial weights, dropout) with this stream within the block;
    afterwards they have the state from before it.

    A user's code may draw from those of Python and NumPy, which are seeded too and go on from
    there: to put them back takes twenty times as long. :func:`generators_kept` does once.
    """
    number = int.from_bytes(key(seed, purpose, round, client), "little") % 2**63
    random.seed(number)
    np.random.seed(number % 2**32)  # noqa: NPY002
    if torch.cuda.is_initialized():
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            torch.manual_seed(number)
            yield
        return
    # without CUDA, torch.manual_seed records the whole call stack for a later start of CUDA, which
    # takes ten times as long as the rest
    before = torch.default_generator.get_state()
    torch.default_generator.manual_seed(number)
    try:
        yield
    finally:
        torch.default_generator.set_state(before)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Give Python's and NumPy's global generators back the state from before the block."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
