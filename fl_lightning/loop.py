"""One round of federated learning."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

import torch
from lightning.fabric import Fabric
from torch import Tensor

from fl_lightning import evaluation, rng
from fl_lightning.client import Assignment, Client
from fl_lightning.data import FederatedData
from fl_lightning.engines import ClientResult, Engine, Order
from fl_lightning.hooks import Callback, Context, RoundRecord, stress
from fl_lightning.methods import Method
from fl_lightning.wire import Ledger, LedgerEntry, Payload, PayloadError

log = logging.getLogger("fl_lightning")


@dataclass
class Federation:
    """Everything that a round touches.

    Args:
        participation: share of the clients with training data that is sampled each round, in (0, 1].
        local_epochs: passes over its data that a client makes in a round.
        eval_every: rounds between evaluations; the last round is always evaluated.
        states: what clients keep between rounds, by client id.
    """

    fabric: Fabric
    method: Method
    data: FederatedData
    engine: Engine
    callbacks: Sequence[Callback]
    context: Context
    seed: int
    participation: float
    local_epochs: int
    eval_every: int
    states: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)


def run_round(fed: Federation, round: int) -> RoundRecord:
    """Sample, broadcast, train, collect, aggregate, evaluate: Algorithm 1 of McMahan et al. (2017), with stressors in between."""
    started = perf_counter()
    record = RoundRecord(round)
    fed.method.round = round
    cohort = sample_cohort(fed, round)
    cohort = stress(fed.callbacks, "change_cohort", cohort, round=round, context=fed.context)
    fed.fabric.call("on_cohort", cohort, round, fed.context)
    orders = [make_order(fed, round, assignment) for assignment in cohort if assignment.trains]
    results = train(fed, round, orders)
    trained = perf_counter()
    uploads = collect(fed, round, cohort, orders, results)
    if uploads:
        fed.method.aggregate(uploads)
    record.metrics |= summarise(fed, round, cohort, results, len(uploads))
    record.metrics["time/train"] = trained - started
    if round % fed.eval_every == 0 or round == fed.context.max_rounds:
        evaluate(fed, record)
    record.metrics["time/round"] = perf_counter() - started
    return record


def sample_cohort(fed: Federation, round: int) -> list[Assignment]:
    """A uniform sample of the clients that have training data, in order of id."""
    candidates = fed.data.sizes.nonzero()[0]
    size = max(1, math.floor(fed.participation * len(candidates) + 0.5))
    ids = rng.stream(fed.seed, "cohort", round).choice(candidates, size, replace=False, shuffle=False)
    # copies: what a client keeps counts once it is done, so that an interrupted round leaves no trace in the checkpoint
    return [Assignment(fed.data.client(int(id), dict(fed.states.get(int(id), {})))) for id in sorted(ids)]


def make_order(fed: Federation, round: int, assignment: Assignment) -> Order:
    client, epochs = assignment.client, fed.local_epochs
    labels = fed.data.labels(client)
    labels = stress(fed.callbacks, "change_labels", labels, client=client, round=round, context=fed.context)
    steps = max(1, math.ceil(assignment.work * fed.data.num_steps(client, epochs)))
    return Order(client, fed.method.broadcast(client).to_bytes(), labels, epochs, steps)


def train(fed: Federation, round: int, orders: Sequence[Order]) -> list[ClientResult]:
    results = []
    for result in fed.engine.train(orders):
        fed.states[result.client.id] = result.state
        fed.fabric.call("on_client_end", result.client, round, fed.context)
        results.append(result)
    return results


def collect(
    fed: Federation, round: int, cohort: Sequence[Assignment], orders: Sequence[Order], results: Sequence[ClientResult]
) -> dict[int, Payload]:
    """The uploads that count, decoded, in cohort order; every client of the cohort gets its line in the ledger."""
    done = {order.client.id: (order, result) for order, result in zip(orders, results, strict=True)}
    uploads: dict[int, Payload] = {}
    for assignment in cohort:
        client = assignment.client
        if client.id not in done:
            fed.ledger.add(LedgerEntry(round, client.id, "dropped"))
            continue
        order, result = done[client.id]
        status, size = "lost", len(result.upload)
        upload = receive_upload(fed, round, client, result.upload) if assignment.returns else None
        if upload is not None:
            size = upload.nbytes
            try:
                fed.method.check(upload, client)
                uploads[client.id], status = upload, "trained"
            except PayloadError as error:
                status = "rejected"
                log.warning("round %d: upload of client %d rejected: %s", round, client.id, error)
        wasted = 0 if status == "trained" else size
        fed.ledger.add(LedgerEntry(round, client.id, status, len(order.message), size, wasted))
    return uploads


def receive_upload(fed: Federation, round: int, client: Client, data: bytes) -> Payload | None:
    upload = Payload.from_bytes(data)
    return stress(fed.callbacks, "change_upload", upload, client=client, round=round, context=fed.context)


def summarise(
    fed: Federation, round: int, cohort: Sequence[Assignment], results: Sequence[ClientResult], counted: int
) -> dict[str, float]:
    """Counts, bytes, and the mean of each loss term over the examples that were trained on."""
    entries = [entry for entry in fed.ledger.entries[-len(cohort) :] if entry.round == round]
    rejected = sum(entry.status == "rejected" for entry in entries)
    seen = sum(result.seen for result in results)
    terms = dict.fromkeys(name for result in results for name in result.losses)
    losses = {f"train/{name}": sum(result.losses.get(name, 0.0) for result in results) / seen for name in terms}
    return {
        **losses,
        **Ledger.totals(entries),
        "clients/sampled": len(cohort),
        "clients/dropped": len(cohort) - counted - rejected,
        "clients/rejected": rejected,
        "clients/trained": counted,
        **fed.method.server_metrics(),
    }


def evaluate(fed: Federation, record: RoundRecord) -> None:
    started = perf_counter()
    metrics, probs, target = evaluation.test(fed.fabric, fed.method, fed.data)
    record.metrics |= metrics | evaluation.validate(fed.fabric, fed.method, fed.data)
    fed.fabric.call("on_evaluate", probs, target, record, fed.context)
    record.metrics["time/evaluate"] = perf_counter() - started


def final_weights(fed: Federation) -> Tensor:
    """The server's state as one vector, in a fixed order, for its hash."""
    return torch.cat([fed.method.server[name].reshape(-1).double() for name in sorted(fed.method.server)])
