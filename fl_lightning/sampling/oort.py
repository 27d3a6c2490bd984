"""Oort (Lai et al., OSDI 2021): clients whose examples are badly learned, if they are not slow."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np

from fl_lightning.config.constraints import at_least, within
from fl_lightning.hooks import Context
from fl_lightning.sampling.base import Sampler, ServerView
from fl_lightning.wire import LedgerEntry

SHARE = within("[0, 1]", "a share lies in [0, 1]", 0.3)
PERCENT = within("[0, 100]", "a percentile lies in [0, 100]", 30)
FLAT, SHARP = 0.1, 5.0
"""Relative changes of what was gained between two windows, up to which the pacer is relaxed, and
from which on it is tightened."""
LEAST_RANGE = 1e-4
LEAST_SCORE = 1e-9


class Oort(Sampler):
    """Algorithm 1 of the paper, with the constants of its authors' code.

    The statistical utility of a client is U = n_k sqrt(mean over its examples of loss^2), of the
    model that it was sent, when it last took part, in round L, and took t seconds. In round R its
    score is

        (min(U, quantile ``clip`` of U) - min U) / (max U - min U) + sqrt(0.1 ln R / L)

    times (T / t)^``penalty`` where t > T. T is the ``pace``-th percentile of all t; every
    ``window`` rounds the pacer compares what was gained in this window and in the one before, and
    moves ``pace`` by ``step``: up where it changed by a tenth or less, down where by five times or
    more. Of a cohort the share max(``explore_least``, ``explore`` x ``decay``^R) are clients that
    were never used: of the ``breadth`` times as many with most examples, each as likely as it has
    examples. The others are drawn by score from those with at least ``cut_off`` times the score of
    the last that fits, ``widen`` times as many as are needed or more.

    The server knows n_k, the losses that clients send (a message that the ledger counts) and when
    uploads arrive. Of a client that was never used it knows no speed: the authors' simulator tells
    it. One that was late or lost, or whose loss is not finite, counts as used, with the time that
    it took and the utility that it had before, at first the mean of the others'.

    Args:
        explore, decay, explore_least: share of the cohort that was never used.
        pace, step, window: percentile of T at first, what it is moved by, and rounds between moves.
        penalty: exponent of the penalty for slow clients, 0 or more.
        clip: quantile beyond which a utility is no larger.
        cut_off: share of the last score that fits; 0.95 in the paper's text.
        widen: how many times as many are candidates at least; 1 in the paper's text.
        breadth: how many times as many are candidates among those never used.
    """

    goes_by_clock = reads_losses = True

    def __init__(
        self,
        explore: Annotated[float, SHARE] = 0.9,
        decay: Annotated[float, SHARE] = 0.98,
        explore_least: Annotated[float, SHARE] = 0.3,
        pace: Annotated[float, PERCENT] = 30.0,
        step: Annotated[float, PERCENT] = 5.0,
        window: Annotated[int, at_least(1)] = 20,
        penalty: Annotated[float, within("[0, inf)", "an exponent is 0 or more", 2.0)] = 2.0,
        clip: Annotated[float, SHARE] = 0.9,
        cut_off: Annotated[float, SHARE] = 0.05,
        widen: Annotated[int, at_least(1)] = 10,
        breadth: Annotated[int, at_least(1)] = 5,
    ) -> None:
        self.explore, self.decay, self.explore_least = explore, decay, explore_least
        self.pace, self.step, self.window, self.penalty = pace, step, window, penalty
        self.clip, self.cut_off, self.widen, self.breadth = clip, cut_off, widen, breadth
        self._forget()

    def _forget(self) -> None:
        self.known: dict[int, tuple[float, int, float]] = {}  # utility, last round, seconds
        self.percentile, self.exploited = self.pace, list[int]()
        self.gained: list[float] = []
        self.sizes: Mapping[int, int] | np.ndarray = {}

    def on_check(self, context: Context) -> None:
        """Forget what a fit before this one has learned."""
        self._forget()
        self.sizes = context.data.sizes

    def state_dict(self) -> dict[str, Any]:
        known = [[id, *entry] for id, entry in self.known.items()]
        return {"known": known, "percentile": self.percentile, "gained": self.gained}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.known = {int(id): (float(u), int(last), float(t)) for id, u, last, t in state["known"]}
        self.percentile, self.gained = float(state["percentile"]), list(state["gained"])

    def draw(self, view: ServerView, among: np.ndarray, count: int) -> list[int]:
        draws, is_known = view.stream(), np.isin(among, list(self.known))
        used, fresh = among[is_known], among[~is_known]
        share = max(self.explore_least, self.explore * self.decay**view.round)
        exploiting = min(int(count * (1 - share) + 1e-9), len(used))
        exploring = min(count - exploiting, len(fresh))
        exploiting = min(count - exploring, len(used))
        self.exploited = []
        if exploiting:
            scores = self.scores(view.round, used)
            order = np.lexsort((used, -scores))
            last = scores[order[exploiting - 1]]
            near = int((scores >= self.cut_off * last).sum())
            order = order[: max(near, min(self.widen * exploiting, len(used)))]
            self.exploited = _drawn(draws, used[order], scores[order], exploiting)
        explored = []
        if exploring:
            order = np.lexsort((fresh, -view.sizes[fresh]))[: self.breadth * exploring]
            explored = _drawn(
                draws, fresh[order], view.sizes[fresh[order]].astype(float), exploring
            )
        return self.exploited + explored

    def scores(self, round: int, clients: np.ndarray) -> np.ndarray:
        """Return the scores of clients that were used before, ``[K]``."""
        utility, last, seconds = np.array([self.known[id] for id in clients.tolist()]).T
        low, high = utility.min(), utility.max()
        clipped = np.minimum(utility, np.quantile(utility, self.clip))
        scores = (clipped - low) / max(high - low, LEAST_RANGE) + np.sqrt(
            0.1 * math.log(round) / last
        )
        limit = self.preferred_seconds()
        slow = np.maximum(seconds / limit, 1.0) if limit else np.ones(len(seconds))
        return scores * slow**-self.penalty

    def preferred_seconds(self) -> float:
        """Return T: infinity at the 100th percentile."""
        if self.percentile >= 100 or not self.known:
            return math.inf
        times = sorted(seconds for _, _, seconds in self.known.values())
        return times[min(int(len(times) * self.percentile / 100), len(times) - 1)]

    def learn(
        self, round: int, entries: Sequence[LedgerEntry], losses: Mapping[int, float]
    ) -> None:
        took = {
            entry.client: entry.ended - entry.started
            for entry in entries
            if entry.started is not None and entry.ended is not None and entry.status != "asked"
        }
        told = {id: float(self.sizes[id]) * loss for id, loss in losses.items() if id in took}
        utility = {id: one[0] for id, one in self.known.items()}
        utility |= {id: value for id, value in told.items() if math.isfinite(value)}
        mean = sum(utility.values()) / max(len(utility), 1)
        for id, seconds in took.items():
            self.known[id] = (utility.get(id, mean), round, seconds)
        used = [self.known[id][0] for id in self.exploited if id in losses]
        self.gained.append(sum(used) / len(used) if used else 0.0)
        self.gained = self.gained[-2 * self.window :]
        if round >= 2 * self.window and round % self.window == 0:
            before, now = sum(self.gained[: -self.window]), sum(self.gained[-self.window :])
            if abs(now - before) <= FLAT * before:
                self.percentile = min(100.0, self.percentile + self.step)
            elif abs(now - before) >= SHARP * before:
                self.percentile = max(self.step, self.percentile - self.step)


def _drawn(
    draws: np.random.Generator, clients: np.ndarray, weights: np.ndarray, count: int
) -> list[int]:
    weights = np.maximum(weights, LEAST_SCORE)
    return draws.choice(
        clients, count, replace=False, p=weights / weights.sum(), shuffle=False
    ).tolist()
