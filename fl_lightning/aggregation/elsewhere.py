"""Uploads that are received and added up in the process that trained their clients, a worker of the server's
machine."""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch

from fl_lightning.aggregation.intake import AddedUploads, Uploads
from fl_lightning.aggregation.receiving import check_upload, decode_upload
from fl_lightning.aggregation.server import SummingServer, examples_in
from fl_lightning.client import Client
from fl_lightning.wire import LedgerEntry, Payload, PayloadError

log = logging.getLogger("fl_lightning")
GIVEN = ("server", "steps_asked", "served")
"""Attributes that the round gives a method; they grow with the cohort. ``server`` is looked at entry by
entry."""
MOST_MARKED = 1000


class Received(NamedTuple):
    """What became of an upload in the process that trained its client, which is not the server's.

    Args:
        size: its bytes.
        examples: n_k if it counts; else 0.
        refusal: why it was refused; empty where it counts, or is lost on its way.
        changed: what the server's half wrote to meanwhile, which the server has to know: it receives the
            upload itself. Empty: nothing, as with most methods.
    """

    size: int
    examples: int = 0
    refusal: str = ""
    changed: str = ""


def receive_here(method: SummingServer, data: bytes, client: Client, uploads: AddedUploads) -> Received:
    """Check an upload that has not left this machine's memory, give it to ``uploads`` if it counts and the
    server's half has written nothing, and say what became of it. A value that is replaced by itself counts as
    not written."""
    before, found = _marks(method), Received(len(data))
    try:
        upload = decode_upload(method, data, client, verified=True)
        check_upload(method, upload, client, uploads)
        addends = uploads.addends(upload, client.id)
    except PayloadError as error:
        found = found._replace(refusal=str(error))
    after = _marks(method)
    if changed := [name for name in {**before, **after} if _differ(before.get(name), after.get(name))]:
        return found._replace(changed=", ".join(changed))
    if not found.refusal:
        uploads.keep(client.id, upload, addends)
        found = found._replace(examples=examples_in(upload))
    return found


class _Mark(NamedTuple):
    """What a value was: its parts, which stay alive so that no other object gets their place, and the version
    of a tensor."""

    parts: tuple[object, ...]
    version: int = 0


def _marks(method: SummingServer) -> dict[str, _Mark]:
    """Return what the server's half can write to, as it is now, by name: entries of ``server``, attributes,
    and what lists, sets and dictionaries of up to ``MOST_MARKED`` values hold."""
    values = {name: value for name, value in vars(method).items() if name not in GIVEN}
    return {name: _mark(value) for name, value in values.items()} | {
        f"server[{name!r}]": _mark(value) for name, value in method.server.items()
    }


def _mark(value: object) -> _Mark:
    if isinstance(value, torch.Tensor):
        return _Mark((value,), value._version)
    if isinstance(value, (list, set, dict)) and len(value) <= MOST_MARKED:
        return _Mark((value, *value, *(value.values() if isinstance(value, dict) else ())))
    return _Mark((value,))


def _differ(one: _Mark | None, other: _Mark | None) -> bool:
    if one is None or other is None or one.version != other.version or len(one.parts) != len(other.parts):
        return True
    return any(before is not after for before, after in zip(one.parts, other.parts, strict=True))


def entry_of(received: Received, round: int, client: int, sent: int, uploads: Uploads) -> LedgerEntry:
    """Return what an upload has cost, and note n_k in ``uploads`` if it counts.

    Args:
        received: what became of it.
        round, client: whose it is, by number and id.
        sent: bytes of the broadcast.
        uploads: what the sums over such uploads are added to.
    """
    if received.refusal:
        log_rejected(round, client, received.refusal)
        return LedgerEntry(round, client, "rejected", sent, received.size, received.size)
    if not received.examples:
        return LedgerEntry(round, client, "lost", sent, received.size, received.size)
    uploads[client] = Payload({"examples": torch.tensor(received.examples)})
    return LedgerEntry(round, client, "trained", sent, received.size, 0)


def log_rejected(round: int, client: int, reason: object) -> None:
    log.warning("round %d: upload of client %d rejected: %s", round, client, reason)
