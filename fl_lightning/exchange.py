"""The way of an upload from its client to the server: stress, bytes, decoding, checks, and what it cost."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TypeVar

from fl_lightning.aggregation.base import Receipt
from fl_lightning.aggregation.intake import Uploads
from fl_lightning.aggregation.receiving import check_upload, decode_upload
from fl_lightning.aggregation.undeclared import UndeclaredUploads
from fl_lightning.client import Assignment, Client
from fl_lightning.engines import ClientResult, ClientTask
from fl_lightning.federation import Federation
from fl_lightning.hooks import sees_uploads, stress
from fl_lightning.wire import LedgerEntry, PayloadError

log = logging.getLogger("fl_lightning")
T = TypeVar("T")


def receive(
    fed: Federation,
    assignment: Assignment,
    task: ClientTask,
    result: ClientResult,
    uploads: Uploads,
    undeclared: UndeclaredUploads | None = None,
) -> LedgerEntry:
    """Decode and check one client's upload, give it to ``uploads`` if it counts, and say what it cost.

    Where uploads do not leave the clients, each of them checks its own and has sent nothing yet.
    """
    client, sent = assignment.client, len(task.message) if result.download is None else result.download
    if result.status:
        return LedgerEntry(task.round, client.id, result.status, sent)
    status, size, leaves = "lost", len(result.upload), fed.aggregation.uploads_leave_clients
    data: bytes | None = result.upload
    if leaves:
        data = deliver(fed, task.round, client, result.upload) if assignment.returns else None
    if data is not None:
        try:
            decoded = decode_upload(fed.method, data, client, verified=data is result.verified)
            size, upload = len(data), stress_upload(fed, task.round, client, "change_upload", decoded)
            if upload is not None:
                if upload is not decoded:
                    size = upload.nbytes
                check_upload(fed.method, upload, client, uploads, undeclared)
                uploads.take(client.id, upload)
                status = "trained"
        except PayloadError as error:
            status = "rejected"
            log.warning("round %d: upload of client %d rejected: %s", task.round, client.id, error)
    size = size if leaves else 0
    wasted = 0 if status == "trained" else size
    return LedgerEntry(task.round, client.id, status, sent, size, wasted)


def intake(fed: Federation, declared: bool) -> Uploads:
    """Return what takes the uploads of a round: they are kept until it is closed where somebody asks for them
    again before, a stressor that knows all of them, a clock that leaves late ones out, or the comparison of
    those whose shapes are not declared."""
    again = fed.timing is not None or not declared or any(map(sees_uploads, fed.callbacks))
    return Uploads() if again else fed.aggregation.intake()


def change_uploads(fed: Federation, round: int, uploads: Uploads, receipts: list[Receipt]) -> None:
    """Pass the uploads that count through stressors that know all of them, and check what they changed."""
    changed = stress(fed.callbacks, "change_uploads", dict(uploads), round=round, context=fed)
    for position, receipt in enumerate(receipts):
        id, entry = receipt.client.id, receipt.entry
        before = uploads.pop(id, None)
        if before is None:
            continue
        try:
            after = changed.get(id)
            if after is not None and after is not before:
                check_upload(fed.method, after, receipt.client, uploads)
            if after is not None:
                uploads[id] = after
            else:
                entry = entry.unused()
        except PayloadError as error:
            log.warning("round %d: upload of client %d rejected: %s", round, id, error)
            entry = replace(entry, status="rejected", wasted=entry.upload)
        receipts[position] = replace(receipt, entry=entry)


def stress_upload(fed: Federation, round: int, client: Client, hook: str, upload: T) -> T | None:
    """Pass an upload through the stressors; None when it is lost."""
    return stress(fed.callbacks, hook, upload, client=client, round=round, context=fed)


def deliver(fed: Federation, round: int, client: Client, message: bytes) -> bytes | None:
    """Return what reaches the server of bytes that a client sends; None: nothing."""
    return stress_upload(fed, round, client, "change_bytes", message)
