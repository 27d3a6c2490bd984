"""What becomes of the uploads of a round: one object, chosen once, where the trainer is set up.

There are four ways from uploads to the server's next state, each a file: :class:`SingleUploads`
where the server reads them one by one, :class:`PlainSum` where it needs sums alone,
:class:`PrivateSum` where those get noise, and :class:`MaskedSum` around one of the two where the
server may not see what it adds up.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from fl_lightning import rng
from fl_lightning.aggregation.intake import Uploads
from fl_lightning.aggregation.masked_round import AddUnderMasks
from fl_lightning.aggregation.private import PrivateAggregation
from fl_lightning.aggregation.server import SummingServer, examples_in
from fl_lightning.aggregation.sums import Addend
from fl_lightning.client import Assignment, Client
from fl_lightning.metrics import Mean
from fl_lightning.privacy import Randomness
from fl_lightning.privacy.secure.settings import SecureSum
from fl_lightning.wire import LedgerEntry, Payload


@dataclass(frozen=True, slots=True)
class Receipt:
    """What came of one client of the cohort, once its upload has been received where it was made.

    Args:
        client: the client, with what it keeps where that is known.
        entry: its bytes and whether its upload counts.
        losses: the mean of each loss term.
        examples: n_k of its upload if that counts, else 0.
    """

    client: Client
    entry: LedgerEntry
    losses: dict[str, Mean] = field(default_factory=dict)
    examples: int = 0


@dataclass(frozen=True, slots=True)
class Round:
    """A round whose clients have trained.

    Args:
        number: counted from 1.
        cohort: its clients, and what was asked of each.
        deliver: what becomes of bytes that a client sends, on their way to the server; None: they
            are lost.
        add_under_masks: has the clients mask and send their vectors; the engine's.
        metrics: takes what the aggregation measures.
        named: takes the ids of clients that broke the rules of the aggregation.
        links: takes the ledger's entries of links that are no client's, such as those between
            servers.
    """

    number: int
    cohort: Sequence[Assignment]
    deliver: Callable[[Client, bytes], bytes | None]
    add_under_masks: AddUnderMasks
    metrics: dict[str, float] = field(default_factory=dict)
    named: set[int] = field(default_factory=set)
    links: list[LedgerEntry] = field(default_factory=list)


class Aggregation(ABC):
    """Makes the server's next state of the uploads that count.

    Args:
        method: the resident module, as the server's half of a method.
    """

    single: bool = False
    """Whether the server reads single uploads, so that every process of the run needs all of them;
    else each process adds up those of the clients that it trained."""
    uploads_leave_clients: bool = True
    """Whether what a client uploads is sent as it is; under masks it is not, and the ledger counts
    the messages of the masks instead."""
    masks: SecureSum | None = None
    """How the sums are kept from the server that adds them up; None: it sees what it adds up."""
    privacy: PrivateAggregation | None = None
    """What makes the sums private; None: they are exact."""
    content_sha256: str = ""
    """SHA-256 of what is read from a file of ``trainer.topology``; empty where there is none."""

    def __init__(self, method: SummingServer) -> None:
        self.method = method

    @property
    def randomness(self) -> Randomness:
        """What a cohort is drawn from: streams of the run's seed, unless nobody may know the
        cohort."""
        return rng.stream

    @contextmanager
    def serving(self, client: Client) -> Iterator[None]:
        """Let the method's server be the one that this client has, within the block: there may be
        several."""
        yield

    def addends(self, upload: Payload, client: int, round: int) -> dict[str, Addend]:
        """Return what a client's upload adds to the server's sums, by name."""
        return self.method.acted_on(upload, client, examples_in(upload))

    def intake(self) -> Uploads:
        """Return what takes the uploads of a round that begins, where nobody asks for them again
        before it is closed."""
        return Uploads()

    def link_of(self, client: int) -> int | None:
        """Return the ledger's number of the link over which a sum with a client's upload goes on,
        below 0; None where its upload has arrived once a server has it."""
        return None

    def planned(
        self, round: int, entries: Sequence[LedgerEntry], uploads: Collection[int]
    ) -> list[LedgerEntry]:
        """Return the entries of a round with all that clients would send and get if none of them
        went offline.

        Args:
            round: its number.
            entries: with the bytes that clients have exchanged with a server.
            uploads: ids of the clients whose uploads count.
        """
        return [*entries]

    @abstractmethod
    def close(
        self, round: Round, uploads: Uploads, receipts: Sequence[Receipt]
    ) -> list[LedgerEntry]:
        """Make the server's next state, where the round has one, and return the ledger's entries.

        Args:
            round: what is closed.
            uploads: those that count and that this process has.
            receipts: one for each client of the cohort, wherever it was trained.
        """


def examples_of(receipts: Sequence[Receipt]) -> dict[int, int]:
    """Return n_k of the clients whose uploads count, by id."""
    return {
        receipt.client.id: receipt.examples
        for receipt in receipts
        if receipt.entry.status == "trained"
    }
