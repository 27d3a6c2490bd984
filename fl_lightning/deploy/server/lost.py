"""Clients whose kept state is not on their nodes any more: nothing but somebody's hand brings them
back."""

from __future__ import annotations

import logging
from collections.abc import Collection

from fl_lightning.errors import RunStopped

log = logging.getLogger("fl_lightning")
MAX_ROUNDS = 3
"""Rounds one after another in which every client that was asked had lost its state, until the run
stops."""
MAX_NAMED = 10  # clients that a line names


class LostStates:
    """The clients that nodes refuse to train since what they kept cannot be had.

    Attributes:
        clients: their ids; one that is trained again is none of them any more.
    """

    def __init__(self) -> None:
        self.clients: set[int] = set()
        self._rounds = 0

    def after_round(
        self,
        asked: Collection[int],
        lost: Collection[int],
        trained: Collection[int],
        here: Collection[int],
    ) -> None:
        """Note what a round has shown, and stop a run that goes on for nothing.

        Args:
            asked: ids of the clients whose node was sent an order.
            lost: those of them whose state was not there.
            trained: those that were trained.
            here: all clients whose node is connected.

        Raises:
            RunStopped: no client that is connected has its state, or none has had in three rounds.
        """
        self.clients |= set(lost)
        self.clients -= set(trained)
        in_vain = bool(asked) and set(asked) <= set(lost)
        self._rounds = self._rounds + 1 if in_vain else 0
        if in_vain and (self._rounds >= MAX_ROUNDS or set(here) <= self.clients):
            named = self._named()
            self.clients.clear()  # this says it all
            raise RunStopped(
                f"what clients {named} kept is on none of the connected nodes",
                "without it their rounds are for nothing",
                "put the nodes' folders back and continue with --ckpt_path, or start the run anew",
            )

    def warn(self) -> None:
        """Say once which clients are still without their state."""
        if self.clients:
            log.warning(
                "what clients %s kept is not on their nodes any more: they count as dropped since then; put "
                "the nodes' folders back to have them again",
                self._named(),
            )
        self.clients.clear()

    def _named(self) -> str:
        ids = sorted(self.clients)
        return ", ".join(map(str, ids[:MAX_NAMED])) + (" ..." if len(ids) > MAX_NAMED else "")
