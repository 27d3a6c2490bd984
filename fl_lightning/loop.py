"""One round of federated learning."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from time import perf_counter
from typing import Any, TypeVar

from fl_lightning import evaluation
from fl_lightning.aggregation.base import Receipt, Round
from fl_lightning.aggregation.intake import Uploads
from fl_lightning.aggregation.receiving import declares_shapes
from fl_lightning.aggregation.server import examples_in
from fl_lightning.aggregation.undeclared import UndeclaredUploads, reject_odd_ones
from fl_lightning.asking import ask, tell_losses, with_asked
from fl_lightning.client import Assignment, Client
from fl_lightning.clock.trained import Trained
from fl_lightning.distributed.collectives import world_size
from fl_lightning.engines import ClientTask, Engine, exchange_receipts
from fl_lightning.engines.base import one_thread
from fl_lightning.exchange import change_uploads, deliver, intake, make_cohort, make_tasks, receive
from fl_lightning.federation import Federation
from fl_lightning.hooks import RoundRecord, reads_probabilities, sees_uploads, tell
from fl_lightning.methods.terms import require_terms
from fl_lightning.metrics import Mean
from fl_lightning.sampling import ServerView
from fl_lightning.wire import Ledger, LedgerEntry

T = TypeVar("T")


def run_round(fed: Federation, engine: Engine, round: int) -> RoundRecord:
    """Sample, broadcast, train, collect, aggregate, evaluate: Algorithm 1 of McMahan et al. (2017),
    with stressors in between."""
    started = perf_counter()
    record = RoundRecord(round)
    # sums are rounded off as on a client, and no core of theirs is taken
    with one_thread(fed.method.device):
        train_round(fed, engine, record)
    if fed.is_evaluated(round):
        evaluate(fed, engine, record)
    record.metrics["time/round"] = perf_counter() - started
    return record


def train_round(fed: Federation, engine: Engine, record: RoundRecord) -> None:
    """Train clients and make the server's next state of the uploads that count."""
    started, round = perf_counter(), record.round
    fed.method.round, fed.asked = round, {}
    holders, train = dict(fed.holders), partial(train_cohort, fed, engine, round)
    if fed.timing is None:
        trained = train(draw(fed, round, fed.data.active, fed.cohort_size))
    else:
        trained = fed.timing.collect(fed, round, train, partial(draw, fed, round))
    if any(map(sees_uploads, fed.callbacks)):
        change_uploads(fed, round, trained.uploads, trained.receipts)
    record.metrics["time/train"] = perf_counter() - started
    losses = mean_losses(trained.started)
    if losses and (terms := fed.method.active_terms()):
        require_terms(terms, losses, type(fed.method).__name__)
    sending = partial(deliver, fed, round)
    closing = Round(
        round, trained.cohort, sending, engine.add_under_masks, record.metrics, record.named
    )
    entries = fed.aggregation.close(closing, trained.uploads, trained.receipts)
    links = closing.links
    keep_states(fed, trained.receipts, entries, holders)
    engine.acknowledge(round, [entry.client for entry in entries if entry.status == "trained"])
    if fed.timing is not None:
        entries, links = fed.timing.end_round(fed, trained, entries, record, links)
    used = {entry.client for entry in entries if entry.status == "trained"}
    fed.sampler.learn(
        round, entries, {id: loss for id, loss in trained.losses.items() if id in used}
    )
    if fed.asked:
        entries = with_asked(entries, fed.asked)
    for entry in (*entries, *links):
        fed.ledger.add(entry)
    record.metrics |= summarise(fed, entries, losses, links)
    with record.written_by(fed.method):
        record.metrics |= fed.method.server_metrics()


def train_cohort(fed: Federation, engine: Engine, round: int, ids: Iterable[int]) -> Trained:
    """Train clients from the server's present state, as far as stressors let them."""
    cohort = make_cohort(fed, ids, round)
    fed.method.cohort = len(cohort)
    tell(fed.callbacks, "on_cohort", [*cohort], round, fed)
    at_work = [assignment for assignment in cohort if assignment.trains]
    tasks = make_tasks(fed, round, at_work)
    declared = not tasks or declares_shapes(fed.method, tasks[0].client)
    uploads, undeclared = intake(fed, declared), None if declared else UndeclaredUploads()
    fed.method.steps_asked = {task.client.id: task.steps for task in tasks}
    told = tell_losses(fed, tasks) if fed.sampler.reads_losses else {}
    ended = iter(train_clients(fed, engine, at_work, tasks, uploads, undeclared))
    receipts = [
        next(ended) if assignment.trains else dropped(assignment.client, round)
        for assignment in cohort
    ]
    receipts = [
        replace(one, entry=one.entry.with_upload(told.get(one.client.id))) for one in receipts
    ]
    sizes = {task.client.id: cycle(fed.data.epoch_sizes(task.client)) for task in tasks}
    examples = {task.client.id: sum(islice(sizes[task.client.id], task.steps)) for task in tasks}
    losses = {id: float(message.tensor("loss")) for id, message in told.items()}
    return Trained(cohort, receipts, uploads, examples, started=receipts, losses=losses)


def train_clients(
    fed: Federation,
    engine: Engine,
    assignments: Sequence[Assignment],
    tasks: Sequence[ClientTask],
    uploads: Uploads,
    undeclared: UndeclaredUploads | None,
) -> list[Receipt]:
    """Train clients, give the uploads that count to ``uploads``, and return what came of each, in
    the order of the tasks.

    Where the server needs sums alone, uploads stay with the process that trained the client: they
    are checked and added up there.
    """
    single = fed.aggregation.single
    receipts: dict[int, Receipt] = {}
    trained = enumerate(engine.train(tasks)) if single else engine.train_own(tasks, into=uploads)
    for position, result in trained:  # one by one, while workers train the clients that follow
        task, client = tasks[position], result.client
        if result.status != "dropped":
            tell(fed.callbacks, "on_client_end", client, task.round, fed)
        with fed.aggregation.serving(client):
            entry = receive(fed, assignments[position], task, result, uploads, undeclared)
        examples = examples_in(uploads[client.id]) if not single and client.id in uploads else 0
        receipts[position] = Receipt(client, entry, result.losses, examples)
    if undeclared is not None:
        reject_odd_ones(undeclared, uploads, receipts)
    if single or world_size() == 1:
        return [receipts[position] for position in range(len(tasks))]
    everybody = exchange_receipts(receipts, tasks, fed.holders)
    for position, receipt in enumerate(everybody):
        if position not in receipts:
            tell(fed.callbacks, "on_client_end", receipt.client, tasks[position].round, fed)
    return everybody


def dropped(client: Client, round: int) -> Receipt:
    """Return what came of a client that dropped out before it trained."""
    return Receipt(client, LedgerEntry(round, client.id, "dropped"))


def keep_states(
    fed: Federation,
    receipts: Sequence[Receipt],
    entries: Sequence[LedgerEntry],
    holders: Mapping[int, int],
) -> None:
    """Remember what clients keep until they are next sampled; one that keeps nothing leaves no
    entry.

    It counts where the client's upload counts. A client whose upload was lost, rejected or not used
    goes on from what it kept before, or the server and its clients would not agree on the rounds
    that have been.

    Args:
        holders: which process had which client's state before the round.
    """
    for receipt, entry in zip(receipts, entries, strict=True):
        id, state = receipt.client.id, receipt.client.state
        if entry.status == "trained":
            _put(fed.states, id, state or None)
        else:
            _put(fed.holders, id, holders.get(id))


def _put(table: dict[int, T], id: int, value: T | None) -> None:
    if value is None:
        table.pop(id, None)
    else:
        table[id] = value


def draw(fed: Federation, round: int, among: Any, count: int, number: int = 0) -> list[int]:
    """Draw clients among these ids, in a round's draw of this number, counted from 0."""
    way, asking = fed.aggregation, partial(ask, fed, round)
    view = ServerView(fed.seed, round, number, fed.data.sizes, way.randomness, asking)
    return fed.sampler.checked_draw(view, among, count)


def mean_losses(receipts: Sequence[Receipt]) -> dict[str, Mean]:
    """Return the mean of each loss term over what all clients took it of."""
    found: dict[str, Mean] = {}
    for receipt in receipts:
        for name, mean in receipt.losses.items():
            found[name] = found.get(name, Mean()) + mean
    return found


def summarise(
    fed: Federation,
    entries: Sequence[LedgerEntry],
    losses: Mapping[str, Mean],
    links: Sequence[LedgerEntry] = (),
) -> dict[str, float]:
    """Return a round's counts, bytes, of clients and of links that are no client's, and losses."""
    status = [entry.status for entry in entries]
    asked, counted, rejected = map(status.count, ("asked", "trained", "rejected"))
    return {
        **{f"train/{name}": mean.value for name, mean in losses.items()},
        **Ledger.totals([*entries, *links]),
        **({"clients/asked": len(fed.asked)} if fed.asked else {}),
        "clients/sampled": len(entries) - asked,
        "clients/dropped": len(entries) - asked - counted - rejected,
        "clients/rejected": rejected,
        "clients/trained": counted,
    }


def evaluate(fed: Federation, engine: Engine, record: RoundRecord) -> None:
    """Measure what the method deploys, here and where the clients are, and tell the callbacks."""
    started = perf_counter()
    task, asked = fed.data.task, any(map(reads_probabilities, fed.callbacks))
    subject = fed.fabric, fed.method, fed.data, fed.states, fed.holders
    elsewhere = engine.evaluate_clients(record.round)
    metrics, answers = evaluation.on_test_set(*subject, answers=asked, elsewhere=elsewhere)
    record.clients, of_clients = evaluation.validate(*subject, elsewhere)
    record.metrics |= metrics | of_clients
    if answers:
        tell(fed.callbacks, "on_evaluate", *answers, record, fed)
    tell(fed.callbacks, "on_validate", record.clients.get(task.primary, {}), record, fed)
    record.metrics["time/evaluate"] = perf_counter() - started
