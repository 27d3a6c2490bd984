"""Graphs of peers and their mixing matrices W: in a round x_i <- sum_j W_ij y_j.

Undirected graphs have Metropolis weights, W_ij = 1 / (1 + max(degree_i, degree_j)) (Xiao, Boyd and
Lall, 2005), which need no degree but the neighbours' and make W symmetric and doubly stochastic.
Weights are fractions, so that sums over neighbours can be exact. Peers are numbered 0 to n - 1, in
the order of the clients' ids.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from fractions import Fraction
from hashlib import sha256
from numbers import Rational
from pathlib import Path
from typing import Annotated

from fl_lightning.config.constraints import at_least
from fl_lightning.config.recorded import Recorded
from fl_lightning.errors import MisuseError, as_bad_input, require
from fl_lightning.rng import stream

Mixing = dict[int, dict[int, Fraction]]
"""W by row: what peer i gives to the model of peer j, by i and j; zeros are left out."""
Edge = tuple[int, int]
MOST_DIGITS = 18
"""Digits of a peer's number."""


class Graph(Recorded, ABC):
    """Who hears whom, and how much of whom each peer takes."""

    settings_shown = ("--trainer.topology.graph.{name} {value}",) * 2
    stays: bool = False
    """Whether it is the same in every round."""
    symmetric: bool = True
    """Whether W is symmetric: who hears is heard. Of another W the mean of all models moves, unless
    peers push their masses too."""
    content_sha256: str = ""
    """SHA-256 of what :meth:`check` has read from a file; empty where there is none."""

    def check(self, peers: int) -> None:
        """Refuse a number of peers that there is no such graph of."""

    @abstractmethod
    def mixing(self, peers: int, seed: int, round: int) -> Mixing:
        """Return W, whose rows add up to 1.

        Args:
            peers: n.
            seed: of the run.
            round: its number, from 1.
        """

    def checked(self, peers: int, seed: int, round: int) -> Mixing:
        """Return W as :meth:`mixing` does.

        Raises:
            MisuseError: it is none, or not symmetric where ``symmetric`` says so.
        """
        mixing, name = self.mixing(peers, seed, round), type(self).__name__
        if type(self).mixing.__module__ == __name__:  # proven by tests; of many peers it takes long
            return mixing
        given = f"{name}.mixing of {peers} peers in round {round}"
        try:
            rows = {id(row): row for row in mixing.values()}  # peers of a group share theirs
            valid = (
                mixing.keys() == {*range(peers)}
                and all(row.keys() <= mixing.keys() for row in rows.values())
                and all(isinstance(w, Rational) for row in rows.values() for w in row.values())
                and all(sum(row.values()) == 1 and min(row.values()) > 0 for row in rows.values())
            )
        except (AttributeError, TypeError):
            valid = False
        if not valid:
            rule = (
                "W has a row for each peer, of weights above 0 by peer, fractions that add up to 1"
            )
            raise MisuseError(
                given, rule, "return {i: {j: Fraction(..)}}, as graphs.metropolis does"
            )
        if self.symmetric:
            odd = [
                (i, j) for i, row in mixing.items() for j, w in row.items() if mixing[j].get(i) != w
            ]
            if odd:
                i, j = odd[0]
                rule = f"peer {i} takes of peer {j} what {j} does not take of {i}, and W is not symmetric"
                raise MisuseError(given, rule, f"write symmetric = False in {name}")
        return mixing

    def among(self, mixing: Mixing, present: Collection[int], push: bool) -> Mixing:
        """Return W among those who are there, see :func:`of_present`.

        Args:
            mixing: W among all.
            present: those who are there.
            push: whether what was meant for one who is away stays with its sender.
        """
        return of_present(mixing, present, push)


class Ring(Graph):
    """Each peer hears the one before and the one after: W_ij = 1/3."""

    stays = True

    def mixing(self, peers: int, seed: int, round: int) -> Mixing:
        return metropolis(peers, ((i, (i + 1) % peers) for i in range(peers)))


class Torus(Graph):
    """Peers are placed row by row on a grid, as near to a square as their number allows, that is
    closed in both directions: each hears four others, and W_ij = 1/5."""

    stays = True

    def check(self, peers: int) -> None:
        require(
            self.rows(peers) > 1,
            f"--trainer.topology.graph Torus of {peers} peers",
            "a torus has several rows of one length, and this number is a prime",
            "write Ring, or another number of clients",
        )

    @staticmethod
    def rows(peers: int) -> int:
        """Return the largest divisor of the number of peers up to its square root."""
        return next(rows for rows in range(math.isqrt(peers), 0, -1) if peers % rows == 0)

    def mixing(self, peers: int, seed: int, round: int) -> Mixing:
        width = peers // self.rows(peers)
        right = ((i, i - i % width + (i + 1) % width) for i in range(peers))
        below = ((i, (i + width) % peers) for i in range(peers))
        return metropolis(peers, [*right, *below])


class Complete(Graph):
    """Everybody hears everybody: W_ij = 1/n. One averaging is the mean."""

    stays = True

    def mixing(self, peers: int, seed: int, round: int) -> Mixing:
        return in_groups([range(peers)])


class Exponential(Graph):
    """One peer a round: x_i <- (y_i + y_j) / 2 with j = i + 2^s mod n, s = round - 1 mod ceil(log2
    n) (Assran et al., ICML 2019; Ying et al., NeurIPS 2021). Of n = 2^k peers k rounds make the
    exact mean. It is directed: who hears is not heard."""

    symmetric = False

    def mixing(self, peers: int, seed: int, round: int) -> Mixing:
        hops = max(1, (peers - 1).bit_length())
        jump = 2 ** ((round - 1) % hops)
        half = Fraction(1, 2)
        if jump % peers == 0:
            return {i: {i: Fraction(1)} for i in range(peers)}
        return {i: {i: half, (i + jump) % peers: half} for i in range(peers)}


class RandomGraph(Graph):
    """Random neighbours: the union of degree / 2 cycles through all peers in random order, and of a
    random matching where the degree is odd; a neighbour that is drawn twice counts once.

    Args:
        degree: neighbours of a peer, at least 1.
        redraw: whether they are drawn anew in every round; else once, by the seed.
    """

    def __init__(self, degree: Annotated[int, at_least(1)] = 4, redraw: bool = True) -> None:
        self.degree, self.redraw = degree, redraw
        self.stays = not redraw

    def check(self, peers: int) -> None:
        require(
            self.degree < peers,
            f"--trainer.topology.graph.degree {self.degree} of {peers} peers",
            "a peer has fewer neighbours than there are peers",
            f"write {max(1, peers - 1)} or less",
        )
        require(
            self.redraw or self.degree > 1 or peers == 2,
            f"--trainer.topology.graph.degree {self.degree} with --trainer.topology.graph.redraw false",
            "the same pairs for ever never hear of each other, and never agree",
            "write --trainer.topology.graph.degree 2",
        )

    def mixing(self, peers: int, seed: int, round: int) -> Mixing:
        edges: list[Edge] = []
        draws = stream(seed, "topology/graph", round if self.redraw else 0)
        for _ in range(self.degree // 2):
            order = draws.permutation(peers).tolist()
            edges += zip(order, [*order[1:], order[0]], strict=True)
        if self.degree % 2:
            order = draws.permutation(peers).tolist()
            edges += zip(order[::2], order[1::2], strict=False)
        return metropolis(peers, edges)


class RandomGroups(Graph):
    """Every round the peers are dealt to groups of equal size, which take the mean of those who are
    there. With N peers in r groups, and nobody away, the expected distance from consensus falls to
    (r - 1) / (N - 1) of what it was. Ryabinin et al. (NeurIPS 2021) analyse groups of random size.

    Args:
        groups: r, at least 1.
    """

    def __init__(self, groups: Annotated[int, at_least(1)] = 4) -> None:
        self.groups = groups

    def check(self, peers: int) -> None:
        require(
            self.groups < peers,
            f"--trainer.topology.graph.groups {self.groups} of {peers} peers",
            "a group of one hears nobody",
            f"write {peers // 2} or less" if peers > 1 else "write --trainer.topology Star",
        )

    def mixing(self, peers: int, seed: int, round: int) -> Mixing:
        order = stream(seed, "topology/groups", round).permutation(peers).tolist()
        return in_groups(order[group :: self.groups] for group in range(self.groups))

    def among(self, mixing: Mixing, present: Collection[int], push: bool) -> Mixing:
        there = {*present}
        return in_groups([*(mixing[i].keys() & there)] for i in sorted(there))


class GraphFile(Graph):
    """Edges from a text file: two numbers of peers a line, from 0; what follows a ``#`` is left
    out. Edges are undirected.

    Args:
        path: of the file.
    """

    stays = True

    def __init__(self, path: str) -> None:
        self.path = path
        self._edges: list[Edge] = []

    def check(self, peers: int) -> None:
        given = f"--trainer.topology.graph.path {self.path}"
        with as_bad_input(
            given, "it cannot be read as text", "name a text file", OSError, ValueError
        ):
            lines = Path(self.path).read_text("utf-8-sig").splitlines()
        self._edges = []
        for number, line in enumerate(lines, 1):
            words = line.partition("#")[0].replace(",", " ").split()
            if not words:
                continue
            require(
                len(words) == 2 and all(is_below(word, peers) for word in words),
                f"{given}, line {number}: {line.strip()[:40]}",
                f"an edge is two numbers of peers, from 0 to {peers - 1}",
                "write such as: 0 3",
            )
            self._edges.append((int(words[0]), int(words[1])))
        reached, fresh, near = {0}, [0], neighbours(peers, self._edges)
        while fresh:
            fresh = [j for j in {j for i in fresh for j in near[i]} if j not in reached]
            reached |= {*fresh}
        self.content_sha256 = sha256(
            repr([(i, sorted(near[i])) for i in near]).encode()
        ).hexdigest()
        alone = sorted({*range(peers)} - reached)
        require(
            not alone,
            f"{given}, in which no path leads from peer 0 to {alone[0] if alone else 0}",
            "peers who never hear of each other never agree",
            "add an edge",
        )

    def mixing(self, peers: int, seed: int, round: int) -> Mixing:
        return metropolis(peers, self._edges)


def is_below(word: str, peers: int) -> bool:
    """Return whether a word is the number of a peer; Python reads no number of thousands of
    digits."""
    return word.isdecimal() and len(word) <= MOST_DIGITS and int(word) < peers


def neighbours(peers: int, edges: Iterable[Edge]) -> dict[int, set[int]]:
    """Return the neighbours of each peer in an undirected graph, without itself."""
    near: dict[int, set[int]] = {i: set() for i in range(peers)}
    for i, j in edges:
        if i != j:
            near[i].add(j)
            near[j].add(i)
    return near


def metropolis(peers: int, edges: Iterable[Edge]) -> Mixing:
    """Return the Metropolis weights of an undirected graph.

    >>> metropolis(3, [(0, 1), (1, 2)])[0]
    {0: Fraction(2, 3), 1: Fraction(1, 3)}
    """
    near, mixing = neighbours(peers, edges), {}
    for i, others in near.items():
        row = {j: Fraction(1, 1 + max(len(others), len(near[j]))) for j in others}
        row[i] = 1 - sum(row.values(), start=Fraction(0))
        mixing[i] = dict(sorted(row.items()))
    return {i: {j: weight for j, weight in row.items() if weight} for i, row in mixing.items()}


def in_groups(groups: Iterable[Collection[int]]) -> Mixing:
    """Return the mixing of peers that take the mean of their group.

    >>> in_groups([[0, 2], [1]])[2]
    {0: Fraction(1, 2), 2: Fraction(1, 2)}
    """
    mixing: Mixing = {}
    for group in groups:
        row = {j: Fraction(1, len(group)) for j in sorted(group)}
        mixing |= dict.fromkeys(group, row)
    return mixing


def shares_given(mixing: Mapping[int, Mapping[int, Fraction]]) -> Mixing:
    """Return P of push-sum, whose column j is how peer j divides its mass among those who hear it:
    the columns of W divided by their sums. Of a W whose columns add up to 1 it is W.

    Raises:
        MisuseError: a peer keeps nothing, so that it would be left without a model when those it
            hears are away.

    >>> shares_given({0: {0: Fraction(1)}, 1: {0: Fraction(1, 2), 1: Fraction(1, 2)}})[1]
    {0: Fraction(1, 3), 1: Fraction(1, 1)}
    """
    sums = dict.fromkeys(mixing, Fraction(0))
    for i, row in mixing.items():
        if i not in row:
            raise MisuseError(
                f"a directed graph in which peer {i} takes nothing of itself, with push_sum",
                "each peer keeps a share of its mass (Assran et al., ICML 2019)",
                "give it a weight of its own in W, or write --trainer.topology.push_sum false",
            )
        for j, weight in row.items():
            sums[j] += weight
    return {i: {j: weight / sums[j] for j, weight in row.items()} for i, row in mixing.items()}


def of_present(
    mixing: Mapping[int, Mapping[int, Fraction]], present: Collection[int], push: bool
) -> Mixing:
    """Return the mixing of those who are there, of the mixing of all; who is away keeps what it
    has.

    Args:
        mixing: of all peers.
        present: those who are there.
        push: what a peer would have given to one who is away it keeps (columns add up to 1, as
            they do in ``mixing``); else what a peer would have taken from one who is away it takes
            from itself (rows do). Of a symmetric W both are the same.
    """
    there = {*present}
    if len(there) == len(mixing):
        return {i: dict(row) for i, row in mixing.items()}
    kept = {i: {j: w for j, w in mixing[i].items() if j in there and j != i} for i in sorted(there)}
    own = {i: 1 - sum(row.values(), start=Fraction(0)) for i, row in kept.items()}
    if push:
        own = dict.fromkeys(kept, Fraction(1))
        for row in kept.values():
            for j, weight in row.items():
                own[j] -= weight
    found = {i: dict(sorted({**row, i: own[i]}.items())) for i, row in kept.items()}
    return {i: {j: weight for j, weight in row.items() if weight} for i, row in found.items()}
