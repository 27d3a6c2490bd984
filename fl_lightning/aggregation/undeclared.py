"""Uploads of a round whose shapes their method does not declare.

What is wrong with one of them, those of the other clients say. An upload that the method cannot
read is its client's fault where its shapes are none that the method has read in this round, and a
bug of the method otherwise. Of those that it can read, most add vectors of the same lengths; others
cannot be added to these.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from fl_lightning.aggregation.base import Receipt
from fl_lightning.aggregation.exact_sum import MAX_MAGNITUDE, largest
from fl_lightning.aggregation.server import SummingServer, examples_in
from fl_lightning.aggregation.sums import Addend
from fl_lightning.client import Client
from fl_lightning.distributed.collectives import gather_bytes
from fl_lightning.wire import Codes, Payload, PayloadError

log = logging.getLogger("fl_lightning")

Shapes = str
"""The name, kind and shape of each entry; or of the addends, name and length."""


class Seen(NamedTuple):
    """The shapes of an upload, those of its addends, and whether the method raised an error."""

    shapes: Shapes
    addends: Shapes
    failed: bool


class UndeclaredUploads:
    """The uploads of one round whose shapes are not declared."""

    def __init__(self) -> None:
        self.seen: dict[int, Seen] = {}
        self.errors: dict[int, Exception] = {}

    def take(self, id: int, upload: Payload, read: Callable[[], Mapping[str, Addend]]) -> None:
        """Have the method read an upload; an error is kept for :meth:`odd_ones`.

        Args:
            id: of the client.
            upload: what it sent.
            read: checks the upload and returns what it adds.

        Raises:
            PayloadError: the method refuses it.
        """
        addends: Mapping[str, Addend] = {}
        try:
            addends = read()
        except PayloadError:
            raise
        except Exception as error:  # whose fault it is, is known when all uploads are there
            self.errors[id] = error
        lengths = ", ".join(
            f"{name} {len(addend.values)}" for name, addend in sorted(addends.items())
        )
        self.seen[id] = Seen(shapes_of(upload), lengths, id in self.errors)

    def odd_ones(self) -> dict[int, PayloadError]:
        """Return the uploads of this process that are not as others are, with the reason; of
        several processes, all call it.

        Raises:
            Exception: what the method raised for an upload whose shapes it could read of another
                client.
            RankLost: a process died or did not answer in time.
        """
        own = json.dumps([[id, *seen] for id, seen in self.seen.items()])
        everybody = {
            id: Seen(*seen)
            for of_rank in gather_bytes(own.encode())
            for id, *seen in json.loads(of_rank)
        }
        good = {id: everybody[id] for id in sorted(everybody) if not everybody[id].failed}
        odd = {}
        for id, error in self.errors.items():
            if not good or self.seen[id].shapes in {seen.shapes for seen in good.values()}:
                raise error
            odd[id] = PayloadError(
                f"entries {self.seen[id].shapes}, which the method cannot read ({_in_words(error)})",
                f"others sent {next(iter(good.values())).shapes}",
                "send that, and declare shapes in upload_limits",
            )
        counts = Counter(seen.addends for seen in good.values())
        most = max(counts, key=lambda addends: counts[addends], default="")
        for id, seen in self.seen.items():
            if not seen.failed and seen.addends != most:
                odd[id] = PayloadError(
                    f"entries {seen.shapes}, which add {seen.addends} values to the sums",
                    f"others add {most}",
                    "send the shapes that the method has, and declare them in upload_limits",
                )
        return odd


def read_upload(method: SummingServer, upload: Payload, client: Client) -> dict[str, Addend]:
    """Check an upload whose shapes are not declared, and return what it adds to the server's sums;
    nothing where the server needs no sums.

    Raises:
        PayloadError: the method refuses it, or it cannot be added up.
    """
    method.check(upload, client)
    addends = method.addends(upload, client.id, examples_in(upload)) if method.is_sum else {}
    check_addends(addends)
    return addends


def check_addends(addends: Mapping[str, Addend]) -> None:
    """Refuse what one upload adds where it could not be added up.

    Raises:
        PayloadError: an addend is no vector of values of sane size, as long as its start and of a
            weight within its bound.
    """
    for name, addend in addends.items():
        values, start = addend.values, addend.start
        if values.ndim != 1 or (start is not None and values.shape != start.shape):
            raise PayloadError(
                f"an entry that adds {tuple(values.shape)} to the sum {name!r}",
                "sums are of vectors of one length",
                "send the shape that the method has",
            )
        if not (largest(values) < MAX_MAGNITUDE and 0 < addend.weight <= addend.most):
            raise PayloadError(
                f"an entry that adds values or a weight out of range to the sum {name!r}",
                f"values are finite and below {MAX_MAGNITUDE:g}, weights from 1 to {addend.most}",
                "lower the lr",
            )


def reject_odd_ones(
    undeclared: UndeclaredUploads, uploads: dict[int, Payload], receipts: dict[int, Receipt]
) -> None:
    """Reject the uploads of a method without declared shapes that are not as those of other clients
    are."""
    odd = undeclared.odd_ones()
    for position, receipt in receipts.items():
        if reason := odd.get(receipt.client.id):
            entry, id = receipt.entry, receipt.client.id
            log.warning("round %d: upload of client %d rejected: %s", entry.round, id, reason)
            entry = replace(entry, status="rejected", wasted=entry.upload)
            receipts[position] = replace(receipt, entry=entry, examples=0)
            del uploads[id]


def shapes_of(upload: Payload) -> Shapes:
    """Return the name, kind and shape of each entry, in words."""
    return ", ".join(
        f"{name} {'codes' if isinstance(value, Codes) else str(value.dtype).removeprefix('torch.')} "
        f"{list((value.values if isinstance(value, Codes) else value).shape)}"
        for name, value in upload.items()
    )


def _in_words(error: Exception) -> str:
    """Return the type and text of an error, and the line of code that raised it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code if trace is not None else None
    where = (
        f" in {code.co_name}, line {trace.tb_lineno}"
        if code is not None and trace is not None
        else ""
    )
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}{where}"
