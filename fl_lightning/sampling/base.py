"""The contract of a sampler, and the uniform one."""

from __future__ import annotations

import reprlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fl_lightning.errors import MisuseError
from fl_lightning.hooks import Meter
from fl_lightning.wire import LedgerEntry


@dataclass(frozen=True)
class ServerView:
    """What a server knows when it draws a cohort.

    Args:
        seed: of the run.
        round: number of the round, from 1.
        number: of the draw within the round, from 0.
        sizes: how many training examples each client says it has, int64 ``[K]`` by id.
        randomness: makes the stream of a seed, a purpose, a round and a number.
        ask: sends clients the server's model, each once, which the ledger counts, and returns the
            mean losses by id; all are asked at the start of the round.
    """

    seed: int
    round: int
    number: int
    sizes: np.ndarray
    randomness: Callable[[int, str, int, int], Any]
    ask: Callable[[Sequence[int]], Mapping[int, float]]

    def stream(self) -> Any:
        """Return the stream of this draw."""
        return self.randomness(self.seed, "cohort", self.round, self.number)


class Sampler(Meter, ABC):
    """Draws the clients of a round. What it has learned is in ``state_dict``."""

    settings_shown = ("--trainer.sampler.{name} {value}",) * 2
    is_uniform: bool = False
    """Whether all clients that can be reached are as likely, whatever they have done."""
    goes_by_clock: bool = False
    """Whether it needs to know how long clients take."""
    candidates: int = 0
    """Clients that are asked for their loss before a round's are chosen of them; 0: none."""
    reads_losses: bool = False
    """Whether clients that train send beside their upload the root mean square, over their
    examples, of the loss of the model that they were sent."""

    @abstractmethod
    def draw(self, view: ServerView, among: np.ndarray, count: int) -> list[int]:
        """Return the ids of at most ``count`` clients, as a list of integers, each once.

        Args:
            view: what the server knows.
            among: sorted ids of the clients that can be reached, at least ``count``.
            count: how many are wanted.
        """

    def checked_draw(self, view: ServerView, among: Any, count: int) -> list[int]:
        """Return what :meth:`draw` returns.

        Raises:
            MisuseError: it is no such list.
        """
        if type(self).draw is Uniform.draw:  # of a sequence of ids, which need not be in memory
            return self.draw(view, among, count)
        reached = np.asarray(among)
        found = self.draw(view, reached.copy(), count)
        ids = found.tolist() if isinstance(found, np.ndarray) else found
        if isinstance(ids, list) and all(type(one) in (int, np.int64) for one in ids):
            places = np.searchsorted(reached, ids).clip(max=len(reached) - 1)
            if len({*ids}) == len(ids) <= count and (reached[places] == ids).all():
                return [*map(int, ids)]
        raise MisuseError(
            f"{type(self).__name__}.draw, which returned {reprlib.repr(found)}",
            f"it returns a list of at most {count} whole numbers, ids that can be reached, each once",
            "take them from among",
        )

    def learn(
        self, round: int, entries: Sequence[LedgerEntry], losses: Mapping[int, float]
    ) -> None:
        """Take note of a round that has ended.

        Args:
            round: its number.
            entries: the ledger's, with times where the run has a clock.
            losses: of ``reads_losses``, by id of the clients whose upload was used.
        """


class Uniform(Sampler):
    """Every client is as likely (McMahan et al., 2017)."""

    is_uniform = True

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        cls.is_uniform = vars(cls).get("is_uniform", cls.draw is Uniform.draw)

    def draw(self, view: ServerView, among: np.ndarray, count: int) -> list[int]:
        return among[view.stream().choice(len(among), count, replace=False, shuffle=False)].tolist()
