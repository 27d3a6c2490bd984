"""Uploads of a round as they come: kept until it is closed, or added to the sums and dropped.

Sums of integers depend neither on the order of uploads nor on how many are added at once
(:mod:`fl_lightning.aggregation.exact_sum`), so both ways give the same bits. What is dropped needs
no memory: a round then takes the server's state and a few uploads, whatever its cohort.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from fl_lightning.aggregation.sums import Addend, Sums, add_all
from fl_lightning.wire import Payload

AddendsOf: TypeAlias = Callable[[Payload, int], Mapping[str, Addend]]
WAITING_UPLOADS, WAITING_BYTES = 2, 2**24
"""So many uploads, of so many bytes together, are added at once: each time reads and writes the
sums."""


class Uploads(dict[int, Payload]):
    """Uploads that count and that this process has, by client id."""

    adds_anywhere: bool = False
    """Whether other processes may add some of them up and hand over their sums."""

    def take(self, id: int, upload: Payload) -> None:
        """Take one more client's upload, which has been checked."""
        self[id] = upload


class AddedUploads(Uploads):
    """Uploads that are added up as they come, here or elsewhere; ``examples`` stays of each.

    Args:
        sums: what they are added to.
        addends: what the upload of a client adds, by name.
        anywhere: whether other processes may add some of them.
    """

    def __init__(self, sums: Sums, addends: AddendsOf, anywhere: bool) -> None:
        super().__init__()
        self.addends, self.cohort, self._sums, self.adds_anywhere = (
            addends,
            sums.cohort,
            sums,
            anywhere,
        )
        self._waiting, self._bytes = dict[int, Payload](), 0

    def take(self, id: int, upload: Payload) -> None:
        self[id] = Payload({"examples": upload.tensor("examples")})
        self._waiting[id] = upload
        self._bytes += upload.nbytes
        if len(self._waiting) >= WAITING_UPLOADS and self._bytes >= WAITING_BYTES:
            self._add()

    def added(self) -> Sums:
        """Return the sums over all uploads that this process has or has been given."""
        self._add()
        return self._sums

    def _add(self) -> None:
        add_all(self._sums, [self.addends(upload, id) for id, upload in self._waiting.items()])
        self._waiting, self._bytes = {}, 0
