"""Who holds what, as index arrays: 8 bytes an example and 16 a client. A million clients are no million
objects.

``N`` examples, ``K`` clients, ``C`` classes, ``h`` validation examples of one client. Loops over all clients
run over blocks of them, so that what they need beside the arrays does not grow with the population.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from fl_lightning.rng import streams

BLOCK = 2**15
"""Clients that are looked at together; twice as many can be told apart in 16 bits, which numpy sorts by in
linear time."""


@dataclass(frozen=True)
class Holdings:
    """The examples of every client, one client after another.

    Args:
        index: examples, int64 ``[N]``; of each client its validation examples first, each part in order.
        starts: where each client's begin in ``index``, and N, int64 ``[K + 1]``.
        held_out: validation examples of every client, int64 ``[K]``.
    """

    index: np.ndarray
    starts: np.ndarray
    held_out: np.ndarray

    @classmethod
    def of_sizes(cls, index: np.ndarray, sizes: np.ndarray) -> Holdings:
        """Client after client has so many of the examples ``index``; no validation examples yet."""
        return cls(
            index.astype(np.int64, copy=False),
            np.concatenate([[0], np.cumsum(sizes)]),
            np.zeros(len(sizes), np.int64),
        )

    @classmethod
    def of(cls, parts: Sequence[np.ndarray]) -> Holdings:
        """From an array of examples for each client."""
        return cls.of_sizes(np.concatenate(parts), np.array([len(part) for part in parts], np.int64))

    @classmethod
    def by_owner(cls, owner: np.ndarray, num_clients: int) -> Holdings:
        """From the owner of every example ``[N]``."""
        return cls.of_sizes(np.argsort(owner, kind="stable"), np.bincount(owner, minlength=num_clients))

    def __len__(self) -> int:
        return len(self.held_out)

    def parts(self) -> list[np.ndarray]:
        """The examples of each client."""
        return [self.index[a:b] for a, b in pairwise(self.starts.tolist())]

    def client(self, id: int) -> tuple[np.ndarray, np.ndarray]:
        """Training and validation examples of one client."""
        start, middle, end = self.starts[id], self.starts[id] + self.held_out[id], self.starts[id + 1]
        return self.index[middle:end], self.index[start:middle]

    @cached_property
    def sizes(self) -> np.ndarray:
        """Training and validation examples of every client, int64 ``[K]``."""
        return np.diff(self.starts)

    def of_examples(self, examples: np.ndarray | None) -> Holdings:
        """The same of other examples: ``index`` are positions in ``examples``; None: as they are."""
        return self if examples is None else replace(self, index=examples[self.index])

    def hold_out(self, fraction: float, seed: int) -> Holdings:
        """Draw the validation examples: ``fraction`` of each client's, rounded, at least one when it has two,
        and never all."""
        n = self.sizes
        held_out = (
            np.clip(np.rint(fraction * n), 1, np.maximum(n - 1, 1)).astype(np.int64)
            * (n >= 2)
            * (fraction > 0)
        )
        chosen = np.zeros(len(self.index), bool)
        position, drawn = np.arange(n.max(initial=0)), held_out.nonzero()[0]
        places = zip(*(array[drawn].tolist() for array in (self.starts, n, held_out)), strict=True)
        for (start, size, first), rng in zip(
            places, streams(seed, "validation", drawn.tolist()), strict=True
        ):
            chosen[start + rng.permutation(position[:size])[:first]] = True
        index = np.concatenate([self._in_order(block, chosen) for block in self.blocks()])
        return Holdings(index, self.starts, held_out)

    def _in_order(self, clients: slice, first: np.ndarray) -> np.ndarray:
        """The examples of ``clients``: of each, those that are ``first``, bool ``[N]``, then the others, each
        part in order."""
        part = slice(self.starts[clients.start], self.starts[clients.stop])
        held, n = self.index[part], self.sizes[clients]
        group = np.repeat(np.arange(0, 2 * len(n), 2, dtype=np.uint16), n) + ~first[part]
        if not np.all((held[1:] > held[:-1]) | (group[1:] // 2 > group[:-1] // 2)):
            return held[np.lexsort((held, group))]
        return (
            held[np.argsort(group, kind="stable")] if first[part].any() else held
        )  # as most partitions have it

    def blocks(self) -> Iterator[slice]:
        """All clients, some at a time."""
        return (slice(first, min(first + BLOCK, len(self))) for first in range(0, len(self), BLOCK))

    def validation(self) -> tuple[np.ndarray, np.ndarray]:
        """Validation examples of all clients and the client of each, int64 ``[sum h]``."""
        return self.index[_ranges(self.starts[:-1], self.held_out)], np.repeat(
            np.arange(len(self)), self.held_out
        )

    def class_counts(self, label: np.ndarray, num_classes: int) -> Iterator[np.ndarray]:
        """Examples (training and validation) of each client and class, int64 ``[., C]``, some clients at a
        time; ``label`` ``[N]``."""
        for block in self.blocks():
            n, held = self.sizes[block], self.index[self.starts[block.start] : self.starts[block.stop]]
            cell = np.repeat(np.arange(len(n)), n) * num_classes + label[held]
            yield np.bincount(cell, minlength=len(n) * num_classes).reshape(len(n), num_classes)

    def sha256(self) -> str:
        """Over the training examples of each client and their number, then its validation examples and
        theirs, as ``<i8``."""
        digest = hashlib.sha256()
        for block in self.blocks():
            starts, held, n = self.starts[block], self.held_out[block], self.sizes[block]
            begins = np.cumsum(n + 2) - (n + 2)  # in what is hashed
            line = np.empty(int(n.sum()) + 2 * len(n), "<i8")
            line[begins], line[begins + 1 + n - held] = n - held, held
            line[_ranges(begins + 1, n - held)] = self.index[_ranges(starts + held, n - held)]
            line[_ranges(begins + 2 + n - held, held)] = self.index[_ranges(starts, held)]
            digest.update(line.data)
        return digest.hexdigest()


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """``starts[k] .. starts[k] + lengths[k] - 1`` of every k, one after another.

    >>> _ranges(np.array([10, 0, 20]), np.array([2, 0, 3])).tolist()
    [10, 11, 20, 21, 22]
    """
    begins = np.cumsum(lengths) - lengths
    return np.repeat(starts - begins, lengths) + np.arange(int(lengths.sum()))
