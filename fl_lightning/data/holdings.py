"""The examples of all clients as index arrays: 8 bytes for each example, up to 24 for each client.

``N`` examples, ``K`` clients, ``C`` classes, ``h`` validation examples of one client. Loops over
all clients run over blocks of clients, so that their extra memory does not grow with the
population.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from fl_lightning.rng import streams

CLIENTS_PER_BLOCK = 2**15
"""Clients that are handled at once. Two groups for each of them fit into 16 bits, which numpy sorts
in linear time."""


@dataclass(frozen=True)
class Holdings:
    """The examples of every client, one client after another.

    Args:
        index: examples, int64 ``[N]``; for each client first its validation examples, then its
            training examples, each part sorted.
        starts: position of each client's first example in ``index``, then N, int64 ``[K + 1]``.
        held_out: number of validation examples of every client, int64 ``[K]``.
        divided: whether the partition itself says which examples are for validation.
    """

    index: np.ndarray
    starts: np.ndarray
    held_out: np.ndarray
    divided: bool = False

    @classmethod
    def of_sizes(cls, index: np.ndarray, sizes: np.ndarray) -> Holdings:
        """Return holdings where client k has the next ``sizes[k]`` examples of ``index``, none held
        out."""
        return cls(
            index.astype(np.int64, copy=False),
            np.concatenate([[0], np.cumsum(sizes)]),
            np.zeros(len(sizes), np.int64),
        )

    @classmethod
    def of(cls, parts: Sequence[np.ndarray]) -> Holdings:
        """Return holdings from an array of examples for each client."""
        return cls.of_sizes(
            np.concatenate(parts), np.array([len(part) for part in parts], np.int64)
        )

    @classmethod
    def by_owner(cls, owner: np.ndarray, num_clients: int) -> Holdings:
        """Return holdings from the owner of every example, int64 ``[N]``."""
        return cls.of_sizes(
            np.argsort(owner, kind="stable"), np.bincount(owner, minlength=num_clients)
        )

    @classmethod
    def of_halves(
        cls, halves: Sequence[tuple[np.ndarray, np.ndarray]], *, divided: bool = False
    ) -> Holdings:
        """Return holdings from the sorted training and validation examples of each client."""
        whole = cls.of([np.concatenate([val, train]) for train, val in halves])
        held_out = np.array([len(val) for _, val in halves], np.int64)
        return replace(whole, held_out=held_out, divided=divided)

    def __len__(self) -> int:
        return len(self.held_out)

    def parts(self) -> list[np.ndarray]:
        """Return the examples of each client."""
        return [self.index[a:b] for a, b in pairwise(self.starts.tolist())]

    def client(self, id: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the training and the validation examples of one client."""
        mine = self.index[self.starts[id] : self.starts[id + 1]]
        return mine[self.held_out[id] :], mine[: self.held_out[id]]

    @cached_property
    def sizes(self) -> np.ndarray:
        """Number of training and validation examples of every client, int64 ``[K]``."""
        return np.diff(self.starts)

    def of_examples(self, examples: np.ndarray | None) -> Holdings:
        """Return holdings of the examples ``examples[index]``; None: these holdings themselves."""
        return self if examples is None else replace(self, index=examples[self.index])

    def hold_out(self, fraction: float, seed: int, purpose: str = "validation") -> Holdings:
        """Draw the validation examples of each client and return the new holdings.

        Args:
            fraction: share of each client's examples, rounded. A client with two or more examples
                gives at least one if the share is positive, and never all of them.
            seed: seed of the run.
            purpose: name of the random stream.
        """
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
            places, streams(seed, purpose, drawn.tolist()), strict=True
        ):
            chosen[start + rng.permutation(position[:size])[:first]] = True
        index = np.concatenate([self._in_order(block, chosen) for block in self.blocks()])
        return Holdings(index, self.starts, held_out)

    def hold_out_marked(self, held_out: np.ndarray) -> Holdings:
        """Return holdings whose validation examples are the marked ones, whoever holds them.

        Args:
            held_out: marks validation examples, bool ``[N]`` by example.
        """
        owner, marked = np.repeat(np.arange(len(self)), self.sizes), held_out[self.index]
        order = np.lexsort((self.index, ~marked, owner))
        return Holdings(
            self.index[order], self.starts, np.bincount(owner[marked], minlength=len(self))
        )

    def without_held_out(self) -> Holdings:
        """Return holdings of the other examples, of which none is held out."""
        kept = np.ones(len(self.index), bool)
        kept[_ranges(self.starts[:-1], self.held_out)] = False
        return Holdings.of_sizes(self.index[kept], self.sizes - self.held_out)

    def _in_order(self, clients: slice, first: np.ndarray) -> np.ndarray:
        """Return the examples of ``clients``: for each client those marked in ``first``, then the
        others.

        Args:
            clients: a block of clients.
            first: marks examples by their position in ``index``, bool ``[N]``.
        """
        part = slice(self.starts[clients.start], self.starts[clients.stop])
        held, n = self.index[part], self.sizes[clients]
        group = np.repeat(np.arange(0, 2 * len(n), 2, dtype=np.uint16), n) + ~first[part]
        if not np.all((held[1:] > held[:-1]) | (group[1:] // 2 > group[:-1] // 2)):
            return held[np.lexsort((held, group))]
        # most partitions list the examples of a client in order: a stable sort by group is enough
        return held[np.argsort(group, kind="stable")] if first[part].any() else held

    def blocks(self) -> Iterator[slice]:
        """Yield all clients in blocks, as slices of ids."""
        return (
            slice(first, min(first + CLIENTS_PER_BLOCK, len(self)))
            for first in range(0, len(self), CLIENTS_PER_BLOCK)
        )

    def validation(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the validation examples of all clients, and the owner of each, int64 ``[sum
        h]``."""
        return self.index[_ranges(self.starts[:-1], self.held_out)], np.repeat(
            np.arange(len(self)), self.held_out
        )

    def class_counts(self, label: np.ndarray, num_classes: int) -> Iterator[np.ndarray]:
        """Yield the number of examples by client and class, int64 ``[block, C]``, block by block.

        Args:
            label: class of every example, int64 ``[N]``.
            num_classes: C.
        """
        for block in self.blocks():
            n = self.sizes[block]
            held = self.index[self.starts[block.start] : self.starts[block.stop]]
            cell = np.repeat(np.arange(len(n)), n) * num_classes + label[held]
            yield np.bincount(cell, minlength=len(n) * num_classes).reshape(len(n), num_classes)

    def sha256(self) -> str:
        """Return the SHA-256 of the holdings.

        For each client it covers the number of training examples, these examples, the number of
        validation examples and these examples, all as ``<i8``.
        """
        digest = hashlib.sha256()
        for block in self.blocks():
            starts, held, n = self.starts[block], self.held_out[block], self.sizes[block]
            begins = np.cumsum(n + 2) - (n + 2)  # positions in the hashed array
            line = np.empty(int(n.sum()) + 2 * len(n), "<i8")
            line[begins], line[begins + 1 + n - held] = n - held, held
            line[_ranges(begins + 1, n - held)] = self.index[_ranges(starts + held, n - held)]
            line[_ranges(begins + 2 + n - held, held)] = self.index[_ranges(starts, held)]
            digest.update(line.data)
        return digest.hexdigest()


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return ``starts[k] .. starts[k] + lengths[k] - 1`` for every k, one after another.

    >>> _ranges(np.array([10, 0, 20]), np.array([2, 0, 3])).tolist()
    [10, 11, 20, 21, 22]
    """
    begins = np.cumsum(lengths) - lengths
    return np.repeat(starts - begins, lengths) + np.arange(int(lengths.sum()))
