"""The exchange with the clients of a round. Down: who trains, from which broadcast, with which
labels and for how many steps. Up: stress, bytes, decoding, checks, and what it cost."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from fl_lightning.aggregation.base import Receipt
from fl_lightning.aggregation.elsewhere import entry_of, log_rejected
from fl_lightning.aggregation.intake import Uploads
from fl_lightning.aggregation.receiving import check_upload, decode_upload
from fl_lightning.aggregation.undeclared import UndeclaredUploads
from fl_lightning.client import Assignment, Client
from fl_lightning.engines import ClientResult, ClientTask
from fl_lightning.errors import MisuseError
from fl_lightning.federation import Federation
from fl_lightning.hooks import sees_one_upload, sees_uploads, stress, tell
from fl_lightning.wire import LedgerEntry, Payload, PayloadError

log = logging.getLogger("fl_lightning")
T = TypeVar("T")


def assignments(fed: Federation, ids: Iterable[int]) -> list[Assignment]:
    """Ask clients to do all their work, in order of id."""
    # copies: an interrupted round leaves no trace of what a client keeps in the checkpoint
    return [
        Assignment(fed.data.client(int(id), dict(fed.states.get(int(id), {}))))
        for id in sorted(ids)
    ]


def make_cohort(fed: Federation, ids: Iterable[int], round: int) -> list[Assignment]:
    """Ask clients to do all their work, as far as stressors let them.

    Raises:
        MisuseError: a stressor makes of it what is no cohort.
    """
    asked = assignments(fed, ids)
    cohort = [*stress(fed.callbacks, "change_cohort", asked, round=round, context=fed)]
    given, those = "change_cohort of a stressor", {one.client.id for one in asked}
    if not all(isinstance(one, Assignment) for one in cohort):
        raise MisuseError(given, "a cohort is a list of assignments", "return the list, or a part")
    found = [one.client.id for one in cohort]
    if len({*found} & those) < len(found):
        rule = f"it gave the clients {found}, of {sorted(those)}, who were drawn"
        raise MisuseError(given, rule, "give each of them one assignment, or none")
    for one in cohort:
        if one.trains and not 0 < one.work <= 1:
            rule = f"client {one.client.id} has work {one.work}, which is a share in (0, 1]"
            raise MisuseError(given, rule, "write trains=False for a client that makes no step")
    return cohort


def make_tasks(fed: Federation, round: int, assignments: Sequence[Assignment]) -> list[ClientTask]:
    """Say what each client is to do: which labels, from which broadcast, for how many steps."""
    tasks, epochs = [], fed.local_epochs
    own = fed.data.labels_of([assignment.client for assignment in assignments])
    for assignment, labels in zip(assignments, own, strict=True):
        client = assignment.client
        labels = stress(
            fed.callbacks, "change_labels", labels, client=client, round=round, context=fed
        )
        steps = asked_steps(fed, client, assignment.work)
        message = encode_broadcast(fed, client)
        tell(fed.callbacks, "on_client_start", client, message, labels.clone(), round, fed)
        tasks.append(ClientTask(client, round, message, labels, epochs, steps, assignment.returns))
    return tasks


def asked_steps(fed: Federation, client: Client, work: float = 1.0) -> int:
    """Return the local steps of a client that does this share of its epochs, within the bound."""
    steps = fed.data.num_steps(client, fed.local_epochs)
    steps = steps if fed.max_local_steps is None else min(steps, fed.max_local_steps)
    return max(1, math.ceil(work * steps - 1e-9))


def encode_broadcast(fed: Federation, client: Client) -> bytes:
    """Return what the client is sent. A broadcast that equals the last one is not encoded again."""
    with fed.aggregation.serving(client):
        payload = fed.method.broadcast(client)
    identity = payload.identity()
    if fed.last_broadcast is None or identity != fed.last_broadcast[0]:
        fed.last_broadcast = identity, payload.to_bytes(), payload
    return fed.last_broadcast[1]


def receive(
    fed: Federation,
    assignment: Assignment,
    task: ClientTask,
    result: ClientResult,
    uploads: Uploads,
    undeclared: UndeclaredUploads | None = None,
) -> LedgerEntry:
    """Decode and check one client's upload, give it to ``uploads`` if it counts, and say what it
    cost.

    Where uploads do not leave the clients, each of them checks its own and has sent nothing yet.
    """
    client = assignment.client
    sent = len(task.message) if result.download is None else result.download
    if result.status:
        return LedgerEntry(task.round, client.id, result.status, sent)
    if result.received is not None:
        return entry_of(result.received, task.round, client.id, sent, uploads)
    status, size, leaves = "lost", len(result.upload), fed.aggregation.uploads_leave_clients
    data: bytes | None = result.upload
    upload: Payload | None = None
    if leaves:
        data = deliver(fed, task.round, client, result.upload) if assignment.returns else None
    if data is not None:
        try:
            decoded = decode_upload(fed.method, data, client, verified=data is result.verified)
            upload = stress_upload(fed, task.round, client, "change_upload", decoded)
            size = len(data)
            if upload is not None:
                if upload is not decoded:
                    size = upload.nbytes
                check_upload(fed.method, upload, client, uploads, undeclared)
                status = "trained"
        except PayloadError as error:
            status = "rejected"
            log_rejected(task.round, client.id, error)
    if upload is not None and status == "trained":  # others may be added up with it
        uploads.take(client.id, upload)
    size = size if leaves else 0
    wasted = 0 if status == "trained" else size
    return LedgerEntry(task.round, client.id, status, sent, size, wasted)


def intake(fed: Federation, declared: bool) -> Uploads:
    """Return what takes the uploads of a round: they are kept until it is closed where somebody
    asks for them again before, a stressor that knows all of them, a clock that leaves late ones
    out, or the comparison of those whose shapes are not declared."""
    again = fed.timing is not None or not declared or any(map(sees_uploads, fed.callbacks))
    uploads = Uploads() if again else fed.aggregation.intake()
    uploads.adds_anywhere &= not any(map(sees_one_upload, fed.callbacks))
    return uploads


def change_uploads(fed: Federation, round: int, uploads: Uploads, receipts: list[Receipt]) -> None:
    """Pass uploads through stressors that know all of them, and check what they changed."""
    changed = stress(fed.callbacks, "change_uploads", dict(uploads), round=round, context=fed)
    for position, receipt in enumerate(receipts):
        id, entry = receipt.client.id, receipt.entry
        if uploads.pop(id, None) is None:
            continue
        try:
            after = changed.get(id)
            if after is not None:  # a stressor may have changed it in place
                check_upload(fed.method, after, receipt.client, uploads)
                uploads[id] = after
            else:
                entry = entry.unused()
        except PayloadError as error:
            log_rejected(round, id, error)
            entry = replace(entry, status="rejected", wasted=entry.upload)
        receipts[position] = replace(receipt, entry=entry)


def stress_upload(fed: Federation, round: int, client: Client, hook: str, upload: T) -> T | None:
    """Pass an upload through the stressors; None when it is lost."""
    return stress(fed.callbacks, hook, upload, client=client, round=round, context=fed)


def deliver(fed: Federation, round: int, client: Client, message: bytes) -> bytes | None:
    """Return what reaches the server of bytes that a client sends; None: nothing."""
    return stress_upload(fed, round, client, "change_bytes", message)
