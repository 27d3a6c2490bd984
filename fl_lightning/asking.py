"""How large the loss of clients is, where a sampler goes by that: some are asked before they are
taken, others tell it beside their upload."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from fl_lightning.engines import ClientTask
from fl_lightning.engines.asking import local_losses
from fl_lightning.errors import MisuseError
from fl_lightning.exchange import assignments, encode_broadcast
from fl_lightning.federation import Federation
from fl_lightning.wire import LedgerEntry, Payload


def ask(fed: Federation, round: int, ids: Iterable[int]) -> dict[int, float]:
    """Send clients the server's model, and return the mean loss that each of them answers with, by
    id.

    Raises:
        MisuseError: one of them is asked twice in the round.
    """
    ids = list(ids)
    if len({*fed.asked, *ids}) < len(fed.asked) + len(ids):
        raise MisuseError(
            f"{type(fed.sampler).__name__}.draw, which asks a client twice",
            "the answer of a round is the same, and the ledger has one",
            "keep what view.ask has returned",
        )
    tasks = [
        ClientTask(
            one.client, round, encode_broadcast(fed, one.client), fed.labels_of(one.client), 1, 1
        )
        for one in assignments(fed, ids)
    ]
    losses = local_losses(fed.fabric, fed.method, fed.data, tasks, fed.holders)
    answers = {id: loss_message(loss.mean) for id, loss in losses.items()}
    entries = [
        LedgerEntry(
            round, task.client.id, "asked", len(task.message), answers[task.client.id].nbytes
        )
        for task in tasks
    ]
    if fed.timing is not None:
        entries = fed.timing.ask(fed, entries)
    fed.asked |= {entry.client: entry for entry in entries}
    return {
        entry.client: float(answers[entry.client].tensor("loss"))
        for entry in entries
        if entry.upload
    }


def tell_losses(fed: Federation, tasks: Sequence[ClientTask]) -> dict[int, Payload]:
    """Return what each client that trains sends of its losses beside its upload, by id."""
    losses = local_losses(fed.fabric, fed.method, fed.data, tasks, fed.holders)
    return {id: loss_message(loss.root_mean_square) for id, loss in losses.items()}


def loss_message(loss: float) -> Payload:
    """Return the message in which a client says a loss, as a float32."""
    return Payload({"loss": torch.tensor(loss, dtype=torch.float32)})


def with_asked(
    entries: Sequence[LedgerEntry], asked: Mapping[int, LedgerEntry]
) -> list[LedgerEntry]:
    """Return a round's entries with what was sent to clients that were asked for a loss, and by
    them.

    Who was taken then has the model already; of one that dropped out, the times are of its answer.
    """
    taken = {entry.client for entry in entries}
    found = [
        replace(
            entry,
            download=max(entry.download, asked[entry.client].download),
            upload=entry.upload + asked[entry.client].upload,
            started=asked[entry.client].started if entry.started is None else entry.started,
            ended=asked[entry.client].ended if entry.ended is None else entry.ended,
        )
        if entry.client in asked
        else entry
        for entry in entries
    ]
    return found + [entry for id, entry in asked.items() if id not in taken]
