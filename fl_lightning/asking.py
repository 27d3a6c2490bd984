"""What clients are asked: to train, from which broadcast, with which labels and for how many steps; and how
large their loss is, where a sampler goes by that."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from fl_lightning.client import Assignment, Client
from fl_lightning.engines import ClientTask
from fl_lightning.engines.asking import local_losses
from fl_lightning.errors import MisuseError
from fl_lightning.federation import Federation
from fl_lightning.hooks import stress, tell
from fl_lightning.wire import LedgerEntry, Payload


def assignments(fed: Federation, ids: Iterable[int]) -> list[Assignment]:
    """Ask clients to do all their work, in order of id."""
    # copies: what a client keeps counts once it is done, so that an interrupted round leaves no trace in the
    # checkpoint
    return [Assignment(fed.data.client(int(id), dict(fed.states.get(int(id), {})))) for id in sorted(ids)]


def make_tasks(fed: Federation, round: int, assignments: Sequence[Assignment]) -> list[ClientTask]:
    """Say what each client is to do: with which labels, from which broadcast, for how many steps."""
    tasks, epochs = [], fed.local_epochs
    own = fed.data.labels_of([assignment.client for assignment in assignments])
    for assignment, labels in zip(assignments, own, strict=True):
        client = assignment.client
        labels = stress(fed.callbacks, "change_labels", labels, client=client, round=round, context=fed)
        if len(labels) != len(client.train):
            raise MisuseError(
                f"change_labels of a stressor gave {len(labels)} labels for client {client.id}",
                f"each of its {len(client.train)} training examples has one",
                "return a new tensor as long as the one given",
            )
        steps = max(1, math.ceil(assignment.work * asked_steps(fed, client)))
        message = encode_broadcast(fed, client)
        tell(fed.callbacks, "on_client_start", client, message, labels, round, fed)
        tasks.append(ClientTask(client, round, message, labels, epochs, steps))
    return tasks


def asked_steps(fed: Federation, client: Client) -> int:
    """Return the local steps of a client that does all its work: its epochs, within the bound."""
    steps = fed.data.num_steps(client, fed.local_epochs)
    return steps if fed.max_local_steps is None else min(steps, fed.max_local_steps)


def encode_broadcast(fed: Federation, client: Client) -> bytes:
    """Return what the client is sent. A broadcast that equals the last one is not encoded again."""
    with fed.aggregation.serving(client):
        payload = fed.method.broadcast(client)
    identity = payload.identity()
    if fed.last_broadcast is None or identity != fed.last_broadcast[0]:
        fed.last_broadcast = identity, payload.to_bytes(), payload
    return fed.last_broadcast[1]


def ask(fed: Federation, round: int, ids: Iterable[int]) -> dict[int, float]:
    """Send clients the server's model, and return the mean loss that each of them answers with, by id."""
    tasks = [
        ClientTask(one.client, round, encode_broadcast(fed, one.client), fed.labels_of(one.client), 1, 1)
        for one in assignments(fed, ids)
    ]
    losses = local_losses(fed.fabric, fed.method, fed.data, tasks, fed.holders)
    answers = {id: loss_message(loss.mean) for id, loss in losses.items()}
    entries = [
        LedgerEntry(round, task.client.id, "asked", len(task.message), answers[task.client.id].nbytes)
        for task in tasks
    ]
    if fed.timing is not None:
        entries = fed.timing.ask(fed, entries)
    fed.asked = {entry.client: entry for entry in entries}
    return {entry.client: float(answers[entry.client].tensor("loss")) for entry in entries if entry.upload}


def tell_losses(fed: Federation, tasks: Sequence[ClientTask]) -> dict[int, Payload]:
    """Return what each client that trains sends of its losses beside its upload, by id."""
    losses = local_losses(fed.fabric, fed.method, fed.data, tasks, fed.holders)
    return {id: loss_message(loss.root_mean_square) for id, loss in losses.items()}


def loss_message(loss: float) -> Payload:
    """Return the message in which a client says a loss, as a float32."""
    return Payload({"loss": torch.tensor(loss, dtype=torch.float32)})


def with_asked(entries: Sequence[LedgerEntry], asked: Mapping[int, LedgerEntry]) -> list[LedgerEntry]:
    """Return a round's entries with what was sent to clients that were asked for a loss, and by them.

    Who was taken then has the model already.
    """
    taken = {entry.client for entry in entries}
    found = [
        replace(
            entry,
            download=max(entry.download, asked[entry.client].download),
            upload=entry.upload + asked[entry.client].upload,
        )
        if entry.client in asked
        else entry
        for entry in entries
    ]
    return found + [entry for id, entry in asked.items() if id not in taken]
