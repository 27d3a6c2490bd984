"""Label skew by Dirichlet draws, in the two other forms that papers mean by it.

:class:`~fl_lightning.data.Dirichlet` draws the clients' shares of each class, and lets nobody grow
far beyond ``N / K`` examples. ``N`` examples, ``K`` clients, ``C`` classes.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np

from fl_lightning.config.constraints import within
from fl_lightning.data.holdings import Holdings
from fl_lightning.data.partition import (
    Dirichlet,
    IndexPartition,
    check_clients,
    dirichlet_holdings,
    members_of,
)
from fl_lightning.errors import require
from fl_lightning.rng import stream

FINITE_BETA = within(
    "(0, inf)",
    "the Dirichlet concentration is a positive number",
    "write e.g. 0.5, or the partition IID",
    given="beta={value}",
)


class UncappedDirichlet(Dirichlet):
    """Label skew: for each class, the clients' shares follow Dirichlet(beta), whatever they hold
    already.

    So the numbers of examples are skewed as well. It is the form of Flower's
    ``DirichletPartitioner`` as long as it does not balance.

    Args:
        beta: concentration; 0.1 is strongly skewed, 0.5 mildly, .inf is IID.
        min_size: fewest examples of a client; 0 allows empty clients.
    """

    def holdings(self, labels: np.ndarray, num_clients: int, seed: int) -> Holdings:
        return dirichlet_holdings(labels, num_clients, self.beta, seed, self.min_size, capped=False)


class DirichletPerClient(IndexPartition):
    """Label skew: the classes of each client's examples follow a Dirichlet(beta) draw of its own.

    All clients have equally many examples, or one more. Source: Hsu et al., arXiv 1909.06335, 2019,
    in the form of its authors' code: a client's distribution q over classes is drawn from the
    symmetric Dirichlet(beta), and its examples from q without replacement. A class that is used up
    leaves q, and where all classes of q are used up, the client takes what is left, so the last
    clients are less skewed.

    Args:
        beta: concentration for each class; 0.1 is strongly skewed. The paper's alpha is C beta.
    """

    def __init__(self, beta: Annotated[float, FINITE_BETA] = 0.5) -> None:
        self.beta = float(beta)

    def holdings(self, labels: np.ndarray, num_clients: int, seed: int) -> Holdings:
        """Return the examples of each client.

        Raises:
            InputError: there are fewer examples than clients.
        """
        check_clients(num_clients)
        require(
            num_clients <= len(labels),
            f"num_clients={num_clients}",
            f"{len(labels)} examples do not give each client one",
            f"write {len(labels)} or less",
        )
        rng = stream(seed, "partition")
        members = [rng.permutation(examples) for examples in members_of(labels)]
        used, size = np.zeros(len(members), np.int64), np.array([*map(len, members)])
        owner = np.empty(len(labels), np.int64)
        for client in range(num_clients):
            count = len(labels) // num_clients + (client < len(labels) % num_clients)
            share = rng.dirichlet(np.full(len(members), self.beta))
            taken = _take(share, count, size - used, rng)
            for number in np.flatnonzero(taken):
                owner[members[number][used[number] : used[number] + taken[number]]] = client
            used += taken
        return Holdings.by_owner(owner, num_clients)


def _take(share: np.ndarray, count: int, left: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw how many of ``count`` examples are of each class, int64 ``[C]``.

    Args:
        share: q.
        count: number of examples, at most those that are left.
        left: how many examples of each class are left, int64 ``[C]``.
    """
    taken = np.zeros_like(left)
    while (missing := count - taken.sum()) > 0:  # each turn fills the client or uses up a class
        there = left > taken
        weight = share * there
        if not weight.sum() > 0:
            weight = (left - taken).astype(float)
        taken = np.minimum(taken + rng.multinomial(missing, weight / weight.sum()), left)
    return taken
