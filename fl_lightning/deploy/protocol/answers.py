"""What a server reads from the answers of its nodes: one reader for each kind, which takes nothing
on trust.

A reader gives values of the types and within the bounds that it names, or raises a ``MessageError``
whatever the answer is; text of a node is made printable and cut before it is logged, raised or
stored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fl_lightning.aggregation.sum_form import SumForm
from fl_lightning.deploy.protocol.messages import MAX_NAME, Message, MessageError, printable
from fl_lightning.metrics import Mean

T = TypeVar("T", list, dict)

MAX_ID = 2**31 - 1  # of a client; a roster knows how many there are
# of a client in a census: everybody's arrays have an entry for each smaller one
MAX_COUNTED_ID = 2**20 - 1
MAX_EXAMPLES = 2**31 - 1  # of one client
MAX_SECONDS = 1e9
MAX_LOSSES, MAX_LOSS, MAX_WEIGHT = 64, 1e100, 2**53
MAX_RUN_LOSSES = 256  # names of all clients' losses in all rounds
MAX_SUMS = 2**16  # in the form of one client's vector
MAX_SUMS_BEGUN = 2**31 - 1
MAX_REASON = 1000  # characters
METRIC_NAME = re.compile(r"\w+([-./: ]\w+)*", re.ASCII)
"""Names of losses and metrics: columns of tables and files of trackers are named by them."""
TOKEN = re.compile(r"[0-9a-f]{8,64}")


@contextmanager
def reading() -> Iterator[None]:
    """Read something of a node within the block.

    Raises:
        MessageError: in place of any exception there, such as the RecursionError of deeply nested
            lists.
    """
    try:
        yield
    except MessageError:
        raise
    except Exception as error:
        raise MessageError(f"{type(error).__name__}: {printable(error)}") from error


def whole(value: object, what: str, most: int, least: int = 0) -> int:
    """Return a whole number of ``least`` to ``most``."""
    if type(value) is not int or not least <= value <= most:
        raise MessageError(
            f"{what}: {printable(value)}, and not a whole number from {least} to {most}"
        )
    return value


def collection(value: object, what: str, kind: type[T], most: int | None = None) -> T:
    """Return a list or a mapping of at most so many entries."""
    if not isinstance(value, kind):
        raise MessageError(f"{what}: {printable(value)}, and not a {kind.__name__}")
    if most is not None and len(value) > most:
        raise MessageError(f"{what}: {len(value)} entries, and not at most {most}")
    return value


def ids(value: object, what: str) -> list[int]:
    """Return ids of clients, each of which is there once."""
    found = [whole(id, what, MAX_ID) for id in collection(value, what, list)]
    if len(set(found)) != len(found):
        raise MessageError(f"{what}: a client is there twice")
    return found


def name_of(answer: Message, otherwise: str) -> str:
    """Return the name that a node gives itself, or another one where it gives none."""
    name = answer.header.get("node")
    return printable(name) if isinstance(name, str) and name.strip() else otherwise


def reason_of(header: Mapping[str, Any]) -> str:
    """Return why a node does not do what it was asked."""
    return printable(header.get("reason") or "it gave no reason", MAX_REASON)


def epoch_of(answer: Message) -> str:
    """Return what a node's process has drawn when it started; empty where it says nothing of
    use."""
    epoch = answer.header.get("epoch")
    return epoch if isinstance(epoch, str) and TOKEN.fullmatch(epoch) else ""


def _token(header: Mapping[str, Any], what: str) -> str:
    value = header.get(what)
    if not (isinstance(value, str) and TOKEN.fullmatch(value)):
        raise MessageError(f"{what}: {printable(value)}, and not 8 to 64 hexadecimal digits")
    return value


@dataclass(frozen=True)
class Checked:
    """A node that has built the run.

    Args:
        uid: what tells its folder from others.
        epoch: what its process has drawn when it started.
        clients: ids of its clients.
        identity: what it has built; only compared.
        noisy_sums: those of a private run that it has taken part in.
    """

    uid: str
    epoch: str
    clients: Sequence[int]
    identity: Mapping[str, Any]
    noisy_sums: int = 0

    @classmethod
    def from_answer(cls, answer: Message) -> Checked:
        """Read the answer to a check."""
        with reading():
            header = answer.header
            identity = collection(header.get("identity"), "identity", dict)
            for name in ("layout", "examples"):
                collection(identity.get(name), name, dict)
            clients = ids(header.get("clients"), "clients")
            sums = whole(header.get("noisy_sums", 0), "noisy_sums", MAX_SUMS_BEGUN)
            return cls(_token(header, "uid"), _token(header, "epoch"), clients, identity, sums)


@dataclass(frozen=True)
class Counted:
    """What a node says in a census.

    Args:
        clients: numbers of training and of validation examples, by client.
        facts: what its data are; only compared.
    """

    clients: Mapping[int, tuple[int, int]]
    facts: Mapping[str, Any]

    @classmethod
    def from_answer(cls, answer: Message) -> Counted:
        """Read the answer to a census."""
        with reading():
            clients = {}
            for id, counts in collection(answer.header.get("clients"), "clients", dict).items():
                what = f"client {printable(id)}"
                number = whole(
                    int(id) if id.isdecimal() and len(id) < 19 else id, what, MAX_COUNTED_ID
                )
                train, val = collection(counts, what, list)
                clients[number] = whole(train, what, MAX_EXAMPLES), whole(val, what, MAX_EXAMPLES)
            return cls(clients, collection(answer.header.get("facts"), "facts", dict))


@dataclass(frozen=True)
class Trained:
    """What a node says of one client that it was to train.

    Args:
        client: its id.
        reason: why it was not trained; empty where it was.
        upload: its upload; empty under a secure sum.
        steps: optimiser steps.
        losses: the mean of each loss; None where one of them is not finite, as after a round that
            diverged: all are then left out of the mean over clients.
        form: of the vector that it has kept for a secure sum.
        keeps: whether it keeps something between rounds.
        lost: whether it was not trained since what it kept is not on its node.
    """

    client: int
    reason: str = ""
    upload: bytes = b""
    steps: int = 0
    losses: Mapping[str, Mean] | None = field(default_factory=dict)
    form: SumForm | None = None
    keeps: bool = False
    lost: bool = False

    @classmethod
    def from_entry(cls, entry: object, parts: Sequence[bytes], *, secure: bool) -> Trained:
        """Read one of the results in an answer to an order.

        Args:
            entry: one of :func:`results_of`.
            parts: of the answer.
            secure: whether the client has kept its upload for a secure sum.
        """
        with reading():
            header = collection(entry, "a result", dict)
            client = whole(header.get("client"), "client", MAX_ID)
            if "reason" in header:
                return cls(client, reason_of(header), lost=header.get("lost") is True)
            keeps = header.get("keeps") is True
            if secure:
                return cls(client, form=_form(header.get("form")), keeps=keeps)
            upload = parts[whole(header.get("upload"), "upload", len(parts) - 1)]
            steps = whole(header.get("steps"), "steps", MAX_EXAMPLES)
            return cls(client, "", upload, steps, _losses(header.get("losses")), keeps=keeps)


def results_of(answer: Message, most: int) -> list[Any]:
    """Return the results in the answer to an order, none of which has been read.

    Args:
        most: clients that were ordered to be trained.

    Raises:
        MessageError: there is no list of so many at most.
    """
    return collection(answer.header.get("results"), "results", list, most)


def seconds_of(answer: Message) -> float:
    """Return the seconds that a node says its training took; 0 where it says nothing of use."""
    seconds: Any = answer.header.get("seconds")
    return float(seconds) if type(seconds) in (int, float) and 0 <= seconds <= MAX_SECONDS else 0.0


def _losses(value: object) -> dict[str, Mean] | None:
    losses = {}
    finite = True
    for name, mean in collection(value, "losses", dict, MAX_LOSSES).items():
        total, weight = collection(mean, "a loss", list)
        if len(name) > MAX_NAME or not METRIC_NAME.fullmatch(name):
            raise MessageError(f"{printable(name)} is no name of a loss")
        if type(total) not in (int, float) or type(weight) not in (int, float):
            raise MessageError(f"loss {name}: {printable(mean)}, and not two numbers")
        if not 0 < weight <= MAX_WEIGHT:
            raise MessageError(f"loss {name}: a weight of {printable(weight)}")
        finite &= -MAX_LOSS <= total <= MAX_LOSS  # false for NaN too
        losses[name] = Mean(float(total) if finite else math.nan, weight)
    return losses if finite else None


def _form(value: object) -> SumForm:
    parts = collection(value, "form", list, MAX_SUMS)
    for part in parts:
        name, size, most = collection(part, "form", list)
        whole(size, "size of a sum", MAX_EXAMPLES)
        whole(most, "largest weight of a sum", 2**63 - 1, 1)
        if not isinstance(name, str) or len(name) > MAX_REASON:
            raise MessageError(f"{printable(name)} is no name of a sum")
    return SumForm.from_json(parts)


def left_out_of(answer: Message) -> set[int]:
    """Return the clients that a node could not evaluate."""
    return set(ids(answer.header.get("left_out", []), "left_out"))


def phase_parts(answer: Message) -> dict[int, bytes]:
    """Return the messages of clients in the answer to a phase of a secure sum, by id."""
    return dict(zip(ids(answer.header.get("clients"), "clients"), answer.parts, strict=False))
