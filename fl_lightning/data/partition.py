"""Partitions: rules that assign the training examples to clients.

``N`` examples, ``K`` clients, ``C`` classes. The result of a partition is ``K`` sorted, disjoint
int64 arrays of indices that together cover ``0 .. N - 1``.
"""

from __future__ import annotations

import logging
import math
import os
import resource
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import ArrayLike

from fl_lightning.config.constraints import within
from fl_lightning.config.recorded import Recorded, with_settings
from fl_lightning.data.holdings import Holdings
from fl_lightning.errors import InputError, require
from fl_lightning.rng import stream

log = logging.getLogger("fl_lightning")

MAX_DRAWS = 1000
QUOTAS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Files with the bytes that a container may have: of version 2 of Linux' control groups, and of
version 1."""


def check_memory(given: str, size: int) -> None:
    """Refuse data that cannot fit into the memory of this machine, or into what of it a container
    or a limit leaves to this process.

    Args:
        given: the setting, for the message.
        size: lower bound of the memory that it needs, in bytes.
    """
    memory = min(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *_limits())
    require(
        size <= memory,
        given,
        f"they take {size:,} bytes and this process may have {memory:,}",
        "write fewer or smaller ones",
    )


def _limits() -> Iterator[int]:
    """Yield the bytes that a container and the process's own limit allow, where they are numbers."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    yield sys.maxsize if limit == resource.RLIM_INFINITY else limit
    for path in map(Path, QUOTAS):
        with suppress(OSError, ValueError):  # there is no such file, or it says max
            yield int(path.read_text())


BETA = within(
    "(0, inf]",
    "the Dirichlet concentration is a positive number",
    "write e.g. 0.1 (skewed) or .inf (IID)",
    given="beta={value}",
)
MIN_SIZE = within(
    "[0, inf)", "a client holds at least 0 examples", "write 0 or more", given="min_size={value}"
)


def check_clients(num_clients: int) -> None:
    """Refuse a federation without clients."""
    require(
        num_clients >= 1,
        f"num_clients={num_clients}",
        "a federation has at least one client",
        "write 1 or more",
    )


def members_of(label: np.ndarray) -> list[np.ndarray]:
    """Return the examples of each class, in the order of the data."""
    return [np.flatnonzero(label == value) for value in np.unique(label)]


def share_of_each(label: np.ndarray, share: float, rng: np.random.Generator) -> np.ndarray:
    """Draw a share of the examples of each class, rounded; mark them, bool ``[N]``."""
    chosen = np.zeros(len(label), bool)
    for members in members_of(label):
        chosen[rng.permutation(members)[: round(share * len(members))]] = True
    return chosen


def _draw(
    by_class: list[np.ndarray],
    num_clients: int,
    beta: float,
    rng: np.random.Generator,
    *,
    capped: bool = True,
) -> tuple[np.ndarray, np.ndarray]:
    """Draw once; return the owner of every example ``[N]`` and the number of examples per client
    ``[K]``."""
    total = sum(map(len, by_class))
    owner, held = np.empty(total, np.int64), np.zeros(num_clients, np.int64)
    for members in by_class:
        share = rng.dirichlet(np.full(num_clients, min(beta, 1e12)))
        below_mean = (held * num_clients < total) | (not capped)  # fewer than N / K, in integers
        share[~below_mean] = 0.0
        # with a small beta the shares of most clients underflow to zero; once all clients with a
        # share are full, the others get equal shares
        cumulative = np.cumsum(share if share.sum() > 0 else below_mean.astype(float))
        # the division by the last value keeps rounding from giving the last example to a client
        # without share
        cuts = np.floor(cumulative / cumulative[-1] * len(members)).astype(np.int64)
        owners = np.searchsorted(cuts, np.arange(len(members)), side="right")
        owner[rng.permutation(members)] = owners
        held += np.bincount(owners, minlength=num_clients)
    return owner, held


def dirichlet_partition(
    labels: ArrayLike, num_clients: int, beta: float = 0.5, seed: int = 0, min_size: int = 1
) -> list[np.ndarray]:
    """Partition by label skew: for each class, the clients' shares follow Dirichlet(beta).

    Source: Yurochkin et al., ICML 2019. A client that already holds ``N / K`` examples or more gets
    none of the following classes. The draw is repeated, at most 1000 times, until every client has
    ``min_size`` examples.

    Args:
        labels: class of every training example, ``[N]``.
        num_clients: number of clients, ``K``.
        beta: concentration; 0.1 is strongly skewed, 0.5 mildly, infinity is :class:`IID`.
        seed: seed of the run.
        min_size: fewest examples of a client; 0 allows empty clients.

    Raises:
        InputError: an argument is out of range, or no draw gave every client ``min_size`` examples.

    >>> [part.tolist() for part in dirichlet_partition([0, 0, 1, 1], num_clients=1)]
    [[0, 1, 2, 3]]
    """
    return dirichlet_holdings(np.asarray(labels), num_clients, float(beta), seed, min_size).parts()


def dirichlet_holdings(
    label: np.ndarray,
    num_clients: int,
    beta: float,
    seed: int,
    min_size: int,
    *,
    capped: bool = True,
) -> Holdings:
    """Return the holdings of :func:`dirichlet_partition`; not ``capped``: a client gets its share
    of a class however many examples it holds."""
    check_clients(num_clients)
    BETA.check(beta)
    MIN_SIZE.check(min_size)
    require(
        min_size * num_clients <= len(label),
        f"data.num_clients {num_clients} with min_size {min_size}",
        f"{len(label)} training examples cannot give each client {min_size}",
        f"write data.num_clients {len(label) // max(min_size, 1)} or less, or data.partition.min_size "
        f"{len(label) // num_clients}" + " or less" * (len(label) >= num_clients),
    )
    if math.isinf(beta):
        return IID().holdings(label, num_clients, seed)
    by_class, fewest = members_of(label), 0
    for attempt in range(MAX_DRAWS):
        rng = stream(seed, "partition", round=attempt)
        owner, held = _draw(by_class, num_clients, beta, rng, capped=capped)
        if held.min() >= min_size:
            return Holdings.by_owner(owner, num_clients)
        fewest = max(fewest, int(held.min()))
    raise InputError(
        f"min_size={min_size} with beta={beta}, num_clients={num_clients}",
        f"{MAX_DRAWS} draws left a client with fewer (at best {fewest})",
        f"write min_size {fewest} or less, fewer clients, or a larger beta",
    )


class Partition(Recorded, ABC):
    """A rule that assigns examples to clients: a pure function of its arguments."""

    @abstractmethod
    def __call__(self, labels: np.ndarray, num_clients: int, seed: int) -> list[np.ndarray]:
        """Return one sorted int64 array of indices for each client.

        The arrays are disjoint and cover all examples.

        Args:
            labels: class of every example, int64 ``[N]``.
            num_clients: K.
            seed: seed of the run.
        """

    def with_tests(
        self, labels: np.ndarray, num_clients: int, seed: int, fraction: float
    ) -> Holdings:
        """Return the examples of each client, of which those for its test are held out.

        Args:
            labels, num_clients, seed: as of a call.
            fraction: share of each client's examples that is for its test, in (0, 1).
        """
        return make_holdings(self, labels, num_clients, seed).hold_out(fraction, seed, "local_test")

    __repr__ = with_settings


class IndexPartition(Partition):
    """A partition that returns the examples of all clients as :class:`Holdings`.

    It needs no separate array for each client. Subclasses implement :meth:`holdings`.
    """

    @abstractmethod
    def holdings(self, labels: np.ndarray, num_clients: int, seed: int) -> Holdings:
        """Return the examples of each client in order; the arguments are those of a call."""

    def __call__(self, labels: np.ndarray, num_clients: int, seed: int) -> list[np.ndarray]:
        return self.holdings(labels, num_clients, seed).parts()


def make_holdings(
    partition: Partition, labels: np.ndarray, num_clients: int, seed: int
) -> Holdings:
    """Return the result of ``partition(labels, num_clients, seed)`` as :class:`Holdings`."""
    if (
        isinstance(partition, IndexPartition)
        and type(partition).__call__ is IndexPartition.__call__
    ):
        return partition.holdings(labels.copy(), num_clients, seed)
    given = f"partition {type(partition).__name__}"
    found = partition(labels.copy(), num_clients, seed)  # theirs to change: they may be the targets
    form = "return a sorted array of int64 for each"
    require(
        len(found) == num_clients,
        given,
        f"it has {len(found)} parts for {num_clients} clients",
        form,
    )
    parts = [np.asarray(part) for part in found]
    for client, part in enumerate(parts):
        numbers = part.ndim == 1 and (part.dtype.kind in "iu" or not len(part))
        require(numbers, given, f"the part of client {client} is no array of example numbers", form)
    owner = np.repeat(np.arange(num_clients), [len(part) for part in parts])
    index = np.concatenate(parts).astype(np.int64)
    nobodys = int((times_held(given, index, owner, len(labels)) == 0).sum())
    if nobodys:
        log.warning("%s gives %d of %d examples to nobody", given, nobodys, len(labels))
    return Holdings.of(parts)


def times_held(given: str, index: np.ndarray, owner: np.ndarray, count: int) -> np.ndarray:
    """Return how often each example is held, 0 or 1, int64 ``[count]``.

    Args:
        given: what lists them, for messages.
        index: the examples of all clients, int64.
        owner: the client of each.
        count: how many examples the data have.

    Raises:
        InputError: an example does not exist, or is held twice.
    """
    outside = (index < 0) | (index >= count)
    if outside.any():
        place = int(outside.argmax())
        raise InputError(
            f"{given}, client {owner[place]}",
            f"there is no example {index[place]}: the data has {count}, counted from 0",
            f"write 0 to {count - 1}, or the data that it was made for",
        )
    times = np.bincount(index, minlength=count)
    if (times > 1).any():
        example = int((times > 1).argmax())
        one, other, *_ = owner[index == example].tolist()
        raise InputError(
            given,
            f"example {example} is listed twice, by the clients {one} and {other}",
            "leave it in one list",
        )
    return times


class Dirichlet(IndexPartition):
    """Label skew: for each class, the clients' shares follow Dirichlet(beta).

    Args:
        beta: concentration; 0.1 is strongly skewed, 0.5 mildly, .inf is IID.
        min_size: fewest examples of a client; 0 allows empty clients.
    """

    def __init__(
        self, beta: Annotated[float, BETA] = 0.1, min_size: Annotated[int, MIN_SIZE] = 1
    ) -> None:
        self.beta, self.min_size = float(beta), min_size

    def holdings(self, labels: np.ndarray, num_clients: int, seed: int) -> Holdings:
        return dirichlet_holdings(labels, num_clients, self.beta, seed, self.min_size)


class IID(IndexPartition):
    """The shuffled examples in equal parts: all clients draw from one distribution.

    The numbers of examples of two clients differ by at most one.
    """

    def holdings(self, labels: np.ndarray, num_clients: int, seed: int) -> Holdings:
        check_clients(num_clients)
        shuffled = stream(seed, "partition").permutation(len(labels))
        # client k gets the shuffled examples k, k + K, k + 2 K and so on
        # the first ``more`` clients have one example more
        turns, more = divmod(len(labels), num_clients)
        by_turn = shuffled[: turns * num_clients].reshape(turns, num_clients)
        index, cut = np.empty(len(labels), np.int64), more * (turns + 1)
        larger = index[:cut].reshape(more, turns + 1)
        smaller = index[cut:].reshape(num_clients - more, turns)
        larger[:, :turns] = by_turn[:, :more].T
        larger[:, turns:] = shuffled[turns * num_clients :, None]
        smaller[:] = by_turn[:, more:].T
        larger.sort(axis=1)
        smaller.sort(axis=1)
        return Holdings.of_sizes(index, np.repeat([turns + 1, turns], [more, num_clients - more]))


class Shards(IndexPartition):
    """Examples sorted by label and cut into equal shards, the same number of shards for every
    client.

    Source: McMahan et al., AISTATS 2017.

    Args:
        classes_per_client: shards of one client; about the number of classes that it sees.
    """

    def __init__(
        self,
        classes_per_client: Annotated[
            int, within("[1, inf)", "a client gets at least one shard", "write 1 or more")
        ] = 2,
    ) -> None:
        self.classes_per_client = classes_per_client

    def holdings(self, labels: np.ndarray, num_clients: int, seed: int) -> Holdings:
        check_clients(num_clients)
        shards, total = num_clients * self.classes_per_client, len(labels)
        require(
            shards <= total,
            f"classes_per_client={self.classes_per_client} for num_clients={num_clients}",
            f"{total} examples cannot be cut into {shards} shards",
            "write fewer clients or fewer classes_per_client",
        )
        rng = stream(seed, "partition")
        shuffled = rng.permutation(total)
        by_label = shuffled[np.argsort(np.asarray(labels)[shuffled], kind="stable")]
        owner = np.empty(total, np.int64)
        owner[by_label] = (rng.permutation(shards) // self.classes_per_client)[
            np.arange(total) * shards // total
        ]
        return Holdings.by_owner(owner, num_clients)


def check_owners(owner: np.ndarray) -> None:
    """Refuse training examples without an owner, int64 ``[N]``."""
    rule = "every training example has a client in [0, K), and one has a number below 0"
    require(owner.min(initial=0) >= 0, "train_owner", rule, "leave it out, or say whose it is")


class Natural(IndexPartition):
    """Every client holds what it wrote: the examples whose owner it is in the data."""

    def holdings(self, labels: np.ndarray, num_clients: int, seed: int) -> Holdings:
        """Return the examples of each client; ``labels`` are the owners, int64 ``[N]`` in [0, K).

        Raises:
            InputError: the data has more owners than there are clients, or an example without one.
        """
        check_owners(labels)
        owners = int(labels.max(initial=-1)) + 1
        require(
            owners <= num_clients,
            f"num_clients={num_clients} with the natural partition",
            f"the data has {owners} clients of its own",
            f"write num_clients: {owners}, or another partition",
        )
        return Holdings.by_owner(labels, num_clients)
