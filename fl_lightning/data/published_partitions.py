"""Partitions of the field's benchmarks, with the assignment of their published code, example by
example.

A run of seed s deals out the examples as the published code does at seed s. That code draws from
NumPy's and Python's old generators, and so do these partitions: their streams are frozen. What it
would leave to chance is refused here: a loop without end, a class that nobody holds.

- NIID-Bench: Li, Diao, Chen, He: Federated Learning on Non-IID Data Silos, ICDE 2022;
  ``partition_data`` in ``utils.py`` of Xtra-Computing/NIID-Bench at 61b901a, after its
  ``--init_seed``.
- PFLlib: Zhang et al., JMLR 2025; ``separate_data`` in ``dataset/utils/dataset_utils.py`` of
  TsingZ0/PFLlib at d832e76, which is always at seed 1. It deals out the training and the test
  images together, and ``split_data`` then takes a quarter of each client's for its test:
  ``local_test_fraction 0.25`` of the data.

``N`` examples, ``K`` clients, ``C`` classes.
"""

from __future__ import annotations

import math
import random
from typing import Annotated, NamedTuple

import numpy as np

from fl_lightning.config.constraints import within
from fl_lightning.data.dirichlet_forms import FINITE_BETA
from fl_lightning.data.holdings import Holdings
from fl_lightning.data.partition import (
    MAX_DRAWS,
    MIN_SIZE,
    IndexPartition,
    check_clients,
    members_of,
)
from fl_lightning.errors import InputError, require

LABELS = within("[1, inf)", "a client has at least one class", "write e.g. 2")
TEST_BATCH = within("[1, inf)", "a batch has at least one example", "write 10")
TEST_SHARE = 0.25  # of each client's examples, by PFLlib
DRAWN_AT = within(
    "[0, inf)", "a seed is 0 or more", "write 1, which is PFLlib's, or null for the run's"
)


def _generator(seed: int) -> np.random.RandomState:
    """Return NumPy's old generator, after ``np.random.seed(seed)``."""
    return np.random.RandomState(seed % 2**32)


def _no_draw(partition: IndexPartition, num_clients: int, min_size: int, total: int) -> InputError:
    given = f"{partition} for num_clients={num_clients}"
    if min_size * num_clients > total:
        rule = f"{total} examples are too few for {min_size} each"
        return InputError(given, rule, "write fewer clients, or a smaller min_size")
    rule = f"{MAX_DRAWS} draws left a client with fewer than {min_size} examples"
    if min_size == 0:
        rule = "a beta so near to 0 draws shares that are no numbers"
    return InputError(given, rule, "write fewer clients, or a larger beta")


class DealtOut(NamedTuple):
    """What the published code deals out.

    Args:
        owner: client that holds each example, int64 ``[N]``.
        listed: the examples in the order in which they were dealt out, int64 ``[N]``.
        rng: the generator, as the draws have left it.
    """

    owner: np.ndarray
    listed: np.ndarray
    rng: np.random.RandomState

    def with_tests(self, num_clients: int, fraction: float) -> Holdings:
        """Return the holdings with the test examples that PFLlib's ``split_data`` draws next: of
        each client in turn, the first of its shuffled examples; the others are rounded down."""
        order = self.listed[np.argsort(self.owner[self.listed], kind="stable")]
        for_test = np.zeros(len(order), bool)
        for mine in np.split(order, np.cumsum(np.bincount(self.owner, minlength=num_clients))[:-1]):
            count = len(mine) - math.floor((1 - fraction) * len(mine))
            for_test[mine[self.rng.permutation(len(mine))[:count]]] = True
        return Holdings.by_owner(self.owner, num_clients).hold_out_marked(for_test)


class NIIDBenchIID(IndexPartition):
    """The shuffled examples in equal parts, as NIID-Bench cuts them (``homo``); it is also what its
    feature noise is added to."""

    def holdings(self, labels: np.ndarray, num_clients: int, seed: int) -> Holdings:
        check_clients(num_clients)
        owner = np.empty(len(labels), np.int64)
        owner[_generator(seed).permutation(len(labels))] = _equal_parts(
            np.arange(num_clients), len(labels)
        )
        return Holdings.by_owner(owner, num_clients)


def _equal_parts(holders: np.ndarray, count: int) -> np.ndarray:
    """Return the owners of ``count`` examples in order; the first holders have one more where it
    must be."""
    each, more = divmod(count, len(holders))
    return np.repeat(holders, each + (np.arange(len(holders)) < more))


class LabelsPerClient(IndexPartition):
    """Each client holds examples of so many classes, and a class is cut evenly among those that
    hold it.

    This is ``#C = k`` of NIID-Bench: client i holds class i modulo C, and others that are drawn.

    Args:
        labels: classes of a client, k.
    """

    def __init__(self, labels: Annotated[int, LABELS] = 2) -> None:
        self.labels = labels

    def holdings(self, labels: np.ndarray, num_clients: int, seed: int) -> Holdings:
        """Return the examples of each client.

        Raises:
            InputError: the data have fewer classes, or nobody holds one of them.
        """
        check_clients(num_clients)
        members, rng, classes = members_of(labels), _generator(seed), random.Random(seed)
        require(
            self.labels <= len(members),
            f"labels={self.labels}",
            f"the data have {len(members)} classes",
            f"write {len(members)} or less",
        )
        holds = np.zeros((num_clients, len(members)), bool)
        for client in range(num_clients):
            own = {client % len(members)}
            while len(own) < self.labels:
                own.add(classes.randint(0, len(members) - 1))
            holds[client, [*own]] = True
        owner = np.empty(len(labels), np.int64)
        for number, examples in enumerate(members):
            holders = np.flatnonzero(holds[:, number])
            require(
                len(holders),
                f"labels={self.labels} for num_clients={num_clients}",
                f"nobody holds one of the {len(members)} classes, and a partition covers all examples",
                f"write num_clients {len(members)} or more, or more labels",
            )
            rng.shuffle(examples)
            owner[examples] = _equal_parts(holders, len(examples))
        return Holdings.by_owner(owner, num_clients)


class Quantity(IndexPartition):
    """Quantity skew: the clients' shares of the shuffled examples follow Dirichlet(beta).

    This is ``q ~ Dir(beta)`` of NIID-Bench. The shares are drawn until every client's is
    ``min_size`` examples, at most 1000 times.

    Args:
        beta: concentration; 0.1 is strongly skewed.
        min_size: smallest share of a client in examples, before it is rounded.
    """

    def __init__(
        self, beta: Annotated[float, FINITE_BETA] = 0.5, min_size: Annotated[int, MIN_SIZE] = 10
    ) -> None:
        self.beta, self.min_size = float(beta), min_size

    def holdings(self, labels: np.ndarray, num_clients: int, seed: int) -> Holdings:
        """Return the examples of each client; of ``labels`` only their number counts.

        Raises:
            InputError: no draw gave every client its examples.
        """
        check_clients(num_clients)
        rng, total = _generator(seed), len(labels)
        shuffled = rng.permutation(total)
        for _ in range(MAX_DRAWS):
            share = rng.dirichlet(np.repeat(self.beta, num_clients))
            share = share / share.sum()
            if np.min(share * total) >= self.min_size:
                break
        else:
            raise _no_draw(self, num_clients, self.min_size, total)
        owner = np.empty(total, np.int64)
        owner[shuffled] = _cut(share, total)
        return Holdings.by_owner(owner, num_clients)


def _cut(share: np.ndarray, count: int) -> np.ndarray:
    """Return the owners of ``count`` examples, int64, by the clients' shares; what rounding leaves
    over goes to the last client."""
    cuts = (np.cumsum(share) * count).astype(int)[:-1]
    return np.searchsorted(cuts, np.arange(count), side="right")


class NIIDBenchDirichlet(IndexPartition):
    """Label skew as NIID-Bench draws it: :class:`~fl_lightning.data.Dirichlet`, with the same cap,
    from the stream and with the rounding of the published code.

    Args:
        beta: concentration; 0.1 is strongly skewed, 0.5 mildly.
        min_size: fewest examples of a client; the draw is repeated, at most 1000 times, until all
            have them.
    """

    def __init__(
        self, beta: Annotated[float, FINITE_BETA] = 0.5, min_size: Annotated[int, MIN_SIZE] = 10
    ) -> None:
        self.beta, self.min_size = float(beta), min_size

    def fewest(self, total: int, num_clients: int) -> int:
        """Return the fewest examples of a client."""
        return self.min_size

    def holdings(self, labels: np.ndarray, num_clients: int, seed: int) -> Holdings:
        """Return the examples of each client.

        Raises:
            InputError: no draw gave every client its examples.
        """
        return Holdings.by_owner(self.deal_out(labels, num_clients, seed).owner, num_clients)

    def deal_out(self, labels: np.ndarray, num_clients: int, seed: int) -> DealtOut:
        """Return what the published code deals out; arguments and errors as of :meth:`holdings`."""
        check_clients(num_clients)
        rng, fewest = _generator(seed), self.fewest(len(labels), num_clients)
        for _ in range(MAX_DRAWS):
            members = members_of(labels)
            owner = self._draw(members, num_clients, rng)
            if owner is not None and np.bincount(owner, minlength=num_clients).min() >= fewest:
                return DealtOut(owner, np.concatenate([np.empty(0, np.int64), *members]), rng)
        raise _no_draw(self, num_clients, fewest, len(labels))

    def _draw(
        self, by_class: list[np.ndarray], num_clients: int, rng: np.random.RandomState
    ) -> np.ndarray | None:
        """Draw the owner of every example once, and shuffle those of each class in place; None
        where the clients with a share are all full."""
        total = sum(map(len, by_class))
        owner, held = np.empty(total, np.int64), np.zeros(num_clients, np.int64)
        for members in by_class:
            rng.shuffle(members)
            share = rng.dirichlet(np.repeat(self.beta, num_clients)) * (held < total / num_clients)
            if not share.sum() > 0:  # the published code divides by zero here
                return None
            owners = _cut(share / share.sum(), len(members))
            owner[members] = owners
            held += np.bincount(owners, minlength=num_clients)
        return owner


class PFLlibPractical(NIIDBenchDirichlet):
    """PFLlib's practical label skew (``dir``): NIID-Bench's, with enough examples for a batch of
    test images.

    Args:
        beta: concentration; PFLlib's is 0.1.
        batch_size: examples of a batch, by which the fewest examples of a client are counted.
        drawn_at: seed of the draws, so that all runs have one partition; PFLlib's is 1. null: the
            run's.
    """

    def __init__(
        self,
        beta: Annotated[float, FINITE_BETA] = 0.1,
        batch_size: Annotated[int, TEST_BATCH] = 10,
        drawn_at: Annotated[int | None, DRAWN_AT] = None,
    ) -> None:
        self.beta, self.batch_size, self.drawn_at = float(beta), batch_size, drawn_at

    def fewest(self, total: int, num_clients: int) -> int:
        return _least_samples(self.batch_size, total, num_clients)

    def deal_out(self, labels: np.ndarray, num_clients: int, seed: int) -> DealtOut:
        return super().deal_out(
            labels, num_clients, seed if self.drawn_at is None else self.drawn_at
        )

    def with_tests(
        self, labels: np.ndarray, num_clients: int, seed: int, fraction: float
    ) -> Holdings:
        return self.deal_out(labels, num_clients, seed).with_tests(num_clients, fraction)


def _least_samples(batch_size: int, total: int, num_clients: int) -> int:
    """Return PFLlib's fewest examples of a client: a quarter of them is a batch, or half of a fair
    share."""
    return int(min(batch_size / TEST_SHARE, total / num_clients / 2))


class PFLlibPathological(IndexPartition):
    """PFLlib's pathological label skew (``pat``): the clients in turn hold so many classes.

    The examples are dealt out in the order of the data. In classes that are not balanced, the
    numbers of all holders but the last are drawn evenly between a tenth of an equal part and an
    equal part.

    Args:
        classes_per_client: classes of a client.
        balanced: whether those that hold a class have equally many of its examples.
        batch_size: examples of a batch, by which the fewest examples of a class and client are
            counted.
        drawn_at: seed of the draws, so that all runs have one partition; PFLlib's is 1. null: the
            run's.
    """

    def __init__(
        self,
        classes_per_client: Annotated[int, LABELS] = 2,
        balanced: bool = False,
        batch_size: Annotated[int, TEST_BATCH] = 10,
        drawn_at: Annotated[int | None, DRAWN_AT] = None,
    ) -> None:
        self.classes_per_client, self.balanced = classes_per_client, balanced
        self.batch_size, self.drawn_at = batch_size, drawn_at

    def holdings(self, labels: np.ndarray, num_clients: int, seed: int) -> Holdings:
        """Return the examples of each client.

        Raises:
            InputError: a class finds no client, or has too few examples.
        """
        return Holdings.by_owner(self.deal_out(labels, num_clients, seed).owner, num_clients)

    def with_tests(
        self, labels: np.ndarray, num_clients: int, seed: int, fraction: float
    ) -> Holdings:
        return self.deal_out(labels, num_clients, seed).with_tests(num_clients, fraction)

    def deal_out(self, labels: np.ndarray, num_clients: int, seed: int) -> DealtOut:
        """Return what the published code deals out; arguments and errors as of :meth:`holdings`."""
        check_clients(num_clients)
        members = members_of(labels)
        rng = _generator(seed if self.drawn_at is None else self.drawn_at)
        require(
            self.classes_per_client <= len(members),
            f"{self} of data with {len(members)} classes",
            "a client holds each class once at most",
            f"write classes_per_client {len(members)} or less",
        )
        left = np.full(num_clients, self.classes_per_client)
        per_class = math.ceil(num_clients / len(members) * self.classes_per_client)
        least = _least_samples(self.batch_size, len(labels), num_clients) / len(members)
        owner = np.empty(len(labels), np.int64)
        for examples in members:
            holders = np.flatnonzero(left)[:per_class]
            require(
                len(holders),
                f"{self} for num_clients={num_clients}",
                f"the {len(members)} classes do not come out evenly, and nobody holds the last one",
                f"write num_clients {len(members)}, or a multiple of it",
            )
            owner[examples] = np.repeat(
                holders, self._sizes(len(examples), len(holders), least, rng)
            )
            left[holders] -= 1
        return DealtOut(owner, np.concatenate([np.empty(0, np.int64), *members]), rng)

    def _sizes(
        self, count: int, holders: int, least: float, rng: np.random.RandomState
    ) -> np.ndarray:
        """Return how many of the ``count`` examples of a class each holder gets."""
        equal = count / holders
        sizes = np.full(holders, int(equal))
        if not self.balanced:
            low, high = int(max(equal / 10, least)), int(equal)
            require(
                low < high or holders == 1,
                f"{self} for {holders} clients that hold a class of {count} examples",
                f"they have {high} each, and at least {low + 1} are needed",
                "write fewer clients, or balanced true",
            )
            sizes[:-1] = rng.randint(low, max(high, low + 1), holders - 1)
        sizes[-1] = count - sizes[:-1].sum()
        return sizes
