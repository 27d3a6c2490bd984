"""One round of federated learning."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, TypeVar

import torch
from lightning.fabric import Fabric
from torch import Tensor

from fl_lightning import evaluation, rng
from fl_lightning.client import Assignment, Client
from fl_lightning.data import FederatedData
from fl_lightning.distributed.collectives import world_size
from fl_lightning.engines import ClientResult, ClientTask, Engine, Holders, Receipt, exchange_receipts
from fl_lightning.engines.base import one_thread
from fl_lightning.engines.secure_round import sum_securely
from fl_lightning.errors import MisuseError
from fl_lightning.hooks import Callback, RoundRecord, RunFiles, reads_probabilities, stress, tell
from fl_lightning.methods import Method
from fl_lightning.methods.client_privacy import PrivateAggregation
from fl_lightning.methods.next_state import set_next_state
from fl_lightning.methods.receiving import check_upload, decode_upload
from fl_lightning.methods.summing import examples_in
from fl_lightning.methods.sums import Addend, Sums
from fl_lightning.methods.terms import require_terms
from fl_lightning.metrics import Mean
from fl_lightning.privacy.secure import SecureSum
from fl_lightning.wire import Ledger, LedgerEntry, Payload, PayloadError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger("fl_lightning")
T = TypeVar("T")


@dataclass
class Federation:
    """Everything that a round touches, and what callbacks may read of the run.

    Args:
        fabric: device and precision.
        method: the resident module and the server's state.
        data: the clients' examples.
        callbacks: stressors and meters, in the order of the configuration.
        seed: what every random draw follows from.
        max_rounds: rounds of the run.
        participation: share of the clients with training data that is sampled each round, in (0, 1].
        local_epochs: passes over its data that a client makes in a round.
        max_local_steps: bound on its local steps; None: no bound.
        secure_sum: how the server's sums are kept from it; None: it gets the single uploads.
        eval_every: rounds between evaluations; the last round is always evaluated.
        privacy: what makes the sums of a round private; None: they are exact.
        files: where figures and texts of callbacks go; None outside a run.
        states: what clients keep between rounds, by client id; of several processes, rank 0 has all, another
            rank those of the clients that it trained last.
        holders: which rank holds which client's state.
        ledger: bytes of every client and round.
        last_broadcast: identity and bytes of the last broadcast, and its payload, which keeps it comparable.
    """

    fabric: Fabric
    method: Method
    data: FederatedData
    callbacks: Sequence[Callback]
    seed: int
    max_rounds: int
    participation: float
    local_epochs: int
    eval_every: int
    max_local_steps: int | None = None
    secure_sum: SecureSum | None = None
    privacy: PrivateAggregation | None = None
    files: RunFiles | None = None
    states: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    holders: Holders = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)
    last_broadcast: tuple[tuple[object, ...], bytes, Payload] | None = None

    @property
    def cohort_size(self) -> int:
        """Clients that are sampled each round."""
        return max(1, math.floor(self.participation * len(self.data.active) + 0.5))

    @property
    def run_dir(self) -> Path:
        """The directory of the run."""
        return self._files.run_dir

    def log_figure(self, name: str, figure: Figure) -> None:
        """Save ``figures/<name>.png`` and ``.pdf`` and hand them to the loggers."""
        self._files.log_figure(name, figure)

    def log_text(self, name: str, text: str) -> None:
        """Save ``figures/<name>`` and hand it to the loggers."""
        self._files.log_text(name, text)

    @property
    def _files(self) -> RunFiles:
        assert self.files is not None, "there is no run directory before on_setup"
        return self.files


def run_round(fed: Federation, engine: Engine, round: int) -> RoundRecord:
    """Sample, broadcast, train, collect, aggregate, evaluate: Algorithm 1 of McMahan et al. (2017), with
    stressors in between."""
    started = perf_counter()
    record = RoundRecord(round)
    with one_thread(fed.method.device):  # sums are rounded off as on a client, and no core of theirs is taken
        train_round(fed, engine, record)
    if round % fed.eval_every == 0 or round == fed.max_rounds:
        evaluate(fed, engine, record)
    record.metrics["time/round"] = perf_counter() - started
    return record


def train_round(fed: Federation, engine: Engine, record: RoundRecord) -> None:
    """Train one round's cohort and make the server's next state of the uploads that count."""
    started, round = perf_counter(), record.round
    fed.method.round = round
    cohort = stress(fed.callbacks, "change_cohort", sample_cohort(fed, round), round=round, context=fed)
    fed.method.cohort = len(cohort)
    tell(fed.callbacks, "on_cohort", cohort, round, fed)
    trained = [assignment for assignment in cohort if assignment.trains]
    fed.method.served = [assignment.client.id for assignment in trained]
    tasks = make_tasks(fed, round, trained)
    uploads: dict[int, Payload] = {}
    receipts = train_clients(fed, engine, trained, tasks, uploads)
    losses: dict[str, Mean] = {}
    for receipt in receipts:
        losses = add_means(losses, receipt.losses)
    ended = iter(receipts)
    entries = [
        next(ended).entry if assignment.trains else LedgerEntry(round, assignment.client.id, "dropped")
        for assignment in cohort
    ]
    record.metrics["time/train"] = perf_counter() - started
    if losses:
        require_terms(fed.method.active_terms(), losses, type(fed.method).__name__)
    returned = {
        receipt.client.id: receipt.examples for receipt in receipts if receipt.entry.status == "trained"
    }
    if fed.secure_sum is not None:
        entries = aggregate_securely(fed, fed.secure_sum, engine, record, cohort, entries, uploads)
    # of a private round noise hides also that nobody returned
    elif (returned or fed.privacy is not None) and not aggregate(fed, round, uploads, returned):
        entries = [entry.unused() for entry in entries]
    for entry in entries:
        fed.ledger.add(entry)
    record.metrics |= summarise(fed, entries, losses)


def train_clients(
    fed: Federation,
    engine: Engine,
    assignments: Sequence[Assignment],
    tasks: Sequence[ClientTask],
    uploads: dict[int, Payload],
) -> list[Receipt]:
    """Train clients, put the uploads that count into ``uploads``, and return what came of each, in the order
    of the tasks.

    Where the server needs sums alone, uploads stay with the process that trained the client: they are
    checked and added up there.
    """
    apart = fed.method.is_sum
    receipts: dict[int, Receipt] = {}
    # results come one by one, while workers train the clients that follow
    for position, result in engine.train_own(tasks) if apart else enumerate(engine.train(tasks)):
        if result.unanswered is None:
            end_client(fed, result.client, tasks[position].round)
            entry = receive_upload(fed, assignments[position], tasks[position], result, uploads)
        else:
            task = tasks[position]
            entry = LedgerEntry(task.round, task.client.id, "dropped", result.unanswered)
            fed.method.served = [id for id in fed.method.served if id != task.client.id]
        counted = uploads.get(result.client.id)
        examples = examples_in(counted) if apart and counted is not None else 0
        receipts[position] = Receipt(result.client, entry, result.losses, examples)
    if not apart or world_size() == 1:
        return [receipts[position] for position in range(len(tasks))]
    everybody = exchange_receipts(receipts, tasks, fed.holders)
    for position, receipt in enumerate(everybody):
        if position not in receipts:
            end_client(fed, receipt.client, tasks[position].round)
    return everybody


def end_client(fed: Federation, client: Client, round: int) -> None:
    """Remember what a client keeps until it is next sampled, and tell the callbacks; one that keeps nothing
    leaves no entry."""
    if client.state:
        fed.states[client.id] = client.state
    else:
        fed.states.pop(client.id, None)
    tell(fed.callbacks, "on_client_end", client, round, fed)


def sample_cohort(fed: Federation, round: int) -> list[Assignment]:
    """Draw the round's clients, uniformly among those that have training data, and return them in order of
    id. Who knows a cohort gets less privacy from the draw, so in a private deployment no seed tells it."""
    randomness = rng.stream if fed.privacy is None else fed.privacy.randomness
    ids = randomness(fed.seed, "cohort", round, 0).choice(
        fed.data.active, fed.cohort_size, replace=False, shuffle=False
    )
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
    payload = fed.method.broadcast(client)
    identity = payload.identity()
    if fed.last_broadcast is None or identity != fed.last_broadcast[0]:
        fed.last_broadcast = identity, payload.to_bytes(), payload
    return fed.last_broadcast[1]


def add_means(one: Mapping[str, Mean], other: Mapping[str, Mean]) -> dict[str, Mean]:
    """Return the mean of each term over what both were taken of."""
    return {**one, **{name: one.get(name, Mean()) + mean for name, mean in other.items()}}


def receive_upload(
    fed: Federation,
    assignment: Assignment,
    task: ClientTask,
    result: ClientResult,
    uploads: dict[int, Payload],
) -> LedgerEntry:
    """Decode and check one client's upload, put it into ``uploads`` if it counts, and say what it cost.

    Under a secure sum the client itself does that, and sends nothing yet.
    """
    if result.kept:  # and on its own machine
        return LedgerEntry(task.round, assignment.client.id, result.kept, len(task.message))
    client, status, size = assignment.client, "lost", len(result.upload)
    data: bytes | None = result.upload
    if fed.secure_sum is None:
        data = stress_upload(fed, task, "change_bytes", result.upload) if assignment.returns else None
    if data is not None:
        try:
            decoded = decode_upload(fed.method, data, client, verified=data is result.verified)
            size, upload = len(data), stress_upload(fed, task, "change_upload", decoded)
            if upload is not None:
                if upload is not decoded:
                    size = upload.nbytes
                check_upload(fed.method, upload, client, uploads)
                uploads[client.id], status = upload, "trained"
        except PayloadError as error:
            status = "rejected"
            log.warning("round %d: upload of client %d rejected: %s", task.round, client.id, error)
    if fed.secure_sum is not None:
        size = 0
    wasted = 0 if status == "trained" else size
    return LedgerEntry(task.round, client.id, status, len(task.message), size, wasted)


def stress_upload(fed: Federation, task: ClientTask, hook: str, upload: T) -> T | None:
    """Pass an upload through the stressors; None when it is lost."""
    return stress(fed.callbacks, hook, upload, client=task.client, round=task.round, context=fed)


def aggregate_securely(
    fed: Federation,
    settings: SecureSum,
    engine: Engine,
    record: RoundRecord,
    cohort: Sequence[Assignment],
    entries: Sequence[LedgerEntry],
    uploads: Mapping[int, Payload],
) -> list[LedgerEntry]:
    """Make the server's next state of a secure sum, and return the ledger's entries with all its messages.

    Args:
        engine: what trained the clients, and has them mask and send their vectors.
        cohort: the round's clients.
        entries: what happened to each of them until it would have sent its upload.
        uploads: those of this process.
    """
    method, by_id = fed.method, {assignment.client.id: assignment for assignment in cohort}

    def deliver(id: int, message: bytes) -> bytes | None:
        details = {"client": by_id[id].client, "round": record.round, "context": fed}
        return stress(fed.callbacks, "change_bytes", message, **details) if by_id[id].returns else None

    def addends(id: int, upload: Payload) -> dict[str, Addend]:
        return secure_addends(fed, upload, id, record.round)

    result = sum_securely(
        settings, method, record.round, cohort, entries, uploads, addends, deliver, engine.add_under_masks
    )
    record.metrics |= result.metrics
    sums: Sums | None = result.sums
    if sums is None:
        log.warning("round %d is void, and the model stays: %s", record.round, result.void)
    elif fed.privacy is not None:
        counted = sum(entry.status == "trained" for entry in result.entries)
        sums = fed.privacy.finished(sums, method, uploads, counted, record.round)
    if sums is None:
        return [entry.unused() for entry in result.entries]
    set_next_state(method, record.round, partial(method.next_state, sums))
    return result.entries


def secure_addends(fed: Federation, upload: Payload, client: int, round: int) -> dict[str, Addend]:
    """Return what a client adds under a secure sum: with privacy its clipped message, with its share of the
    noise where clients add it."""
    if fed.privacy is not None:
        return fed.privacy.message(fed.method, upload, client, round)
    return fed.method.addends(upload, client, examples_in(upload))


def aggregate(fed: Federation, round: int, uploads: dict[int, Payload], returned: dict[int, int]) -> bool:
    """Make the server's next state of the uploads, and return whether it could.

    Args:
        uploads: those that this process has.
        returned: client id -> n_k of all clients whose uploads count, wherever they are.
    """
    method = fed.method
    if fed.privacy is not None:
        private = fed.privacy.sums(method, uploads, len(returned), round)
        if private is None:
            return False
        set_next_state(method, round, partial(method.next_state, private))
    elif method.is_sum:
        sums = method.add_up(uploads, returned)
        sums.merge_ranks()
        set_next_state(fed.method, round, partial(method.next_state, sums))
    else:
        set_next_state(fed.method, round, partial(method.aggregate, uploads))
    return True


def summarise(
    fed: Federation, entries: Sequence[LedgerEntry], losses: Mapping[str, Mean]
) -> dict[str, float]:
    """Return a round's counts, bytes, losses and what the server says of its state."""
    counted = sum(entry.status == "trained" for entry in entries)
    rejected = sum(entry.status == "rejected" for entry in entries)
    return {
        **{f"train/{name}": mean.value for name, mean in losses.items()},
        **Ledger.totals(entries),
        "clients/sampled": len(entries),
        "clients/dropped": len(entries) - counted - rejected,
        "clients/rejected": rejected,
        "clients/trained": counted,
        **fed.method.server_metrics(),
    }


def evaluate(fed: Federation, engine: Engine, record: RoundRecord) -> None:
    """Measure what the method deploys, here and where the clients are, and tell the callbacks."""
    started = perf_counter()
    task, asked = fed.data.task, any(map(reads_probabilities, fed.callbacks))
    subject = fed.fabric, fed.method, fed.data, fed.states, fed.holders
    elsewhere = engine.evaluate_clients(record.round)
    metrics, answers = evaluation.on_test_set(*subject, answers=asked, sums=elsewhere.test)
    record.metrics |= metrics
    record.clients = validated = evaluation.validate(*subject, sums=elsewhere.validation)
    record.metrics |= evaluation.spread_over_clients(fed.data, validated)
    if answers:
        tell(fed.callbacks, "on_evaluate", *answers, record, fed)
    tell(fed.callbacks, "on_validate", validated.get(task.primary, {}), record, fed)
    record.metrics["time/evaluate"] = perf_counter() - started


def weights_hash(fed: Federation) -> str:
    """SHA-256 of the server's state as one float64 vector, its tensors in order of name."""
    weights = torch.cat(
        [
            torch.empty(0),
            *(fed.method.server[name].reshape(-1).double() for name in sorted(fed.method.server)),
        ]
    )
    return sha256(weights.numpy().tobytes()).hexdigest()
