"""Uploads that are received and added up in the process that trained their clients, a worker of the
server's machine."""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch

from fl_lightning.aggregation.intake import Uploads
from fl_lightning.aggregation.receiving import check_upload, decode_upload
from fl_lightning.aggregation.server import SummingServer, examples_in
from fl_lightning.client import Client
from fl_lightning.wire import LedgerEntry, Payload, PayloadError

log = logging.getLogger("fl_lightning")


class Received(NamedTuple):
    """What became of an upload in the process that trained its client, which is not the server's.

    Args:
        size: its bytes.
        examples: n_k if it counts; else 0.
        refusal: why it was refused; empty where it counts, or is lost on its way.
    """

    size: int
    examples: int = 0
    refusal: str = ""


def receive_here(method: SummingServer, data: bytes, client: Client, uploads: Uploads) -> Received:
    """Check an upload that has not left this machine's memory, give it to ``uploads`` if it counts,
    and say what became of it."""
    try:
        upload = decode_upload(method, data, client, verified=True)
        check_upload(method, upload, client, uploads)
    except PayloadError as error:
        return Received(len(data), refusal=str(error))
    uploads.take(client.id, upload)  # others may be added up with it
    return Received(len(data), examples_in(upload))


def entry_of(
    received: Received, round: int, client: int, sent: int, uploads: Uploads
) -> LedgerEntry:
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
