"""What every method must do. Each check runs toy federations and raises :class:`Violation` with what it saw."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from fl_lightning import rng
from fl_lightning.client import Assignment, Client
from fl_lightning.conformance.toy import CENTRES, Points, images, on_images, on_points, pull, run
from fl_lightning.data import FederatedData
from fl_lightning.hooks import Context, Meter, Stressor
from fl_lightning.methods import FedAvg, Method
from fl_lightning.quantization import average_bits
from fl_lightning.trainer import FederatedTrainer
from fl_lightning.wire import Ledger, LedgerEntry, Payload


class Violation(AssertionError):
    """The method broke a rule."""


class NotApplicable(Exception):
    """The rule does not concern this method."""


@dataclass(frozen=True)
class Subject:
    """A method under test, and what is known of it.

    Args:
        make: a new instance; keywords override its settings.
        least_step: least local step relative to SGD's of the same lr, in (0, 1]; the known bias of a two-client optimum follows from it.
        noise: largest deviation that rounding of uploads may cause on weights of size 5.
        neutral: settings under which it equals FedAvg bit for bit.
        upload_bytes: its upload in bytes by a hand formula, of (values in the weights, sizes of the weight tensors); None: not known.
    """

    make: Callable[..., Method]
    least_step: float = 1.0
    noise: float = 1e-4
    neutral: dict[str, Any] | None = None
    upload_bytes: Callable[[Method], int] | None = None


def known_optimum(subject: Subject, folder: Path) -> None:
    """Two clients of 3 and 1 examples, |w - c_k|^2: nothing pulls at the end, weighted by n_k."""
    method, counts = _with_points(subject), (3, 1)
    run(method, Points(counts), folder, max_rounds=80)
    low, high = pull(method.server["weights"], counts, [0, 1], subject.least_step)
    _require(
        bool((low <= subject.noise).all() and (high >= -subject.noise).all()), f"it ends at {_show(method.server['weights'])}"
    )


def agreement(subject: Subject, folder: Path) -> None:
    """One client: its optimum is reached."""
    method = _with_points(subject)
    run(method, Points((3,)), folder, max_rounds=150)
    distance = float((method.server["weights"] - CENTRES[0]).abs().max())
    _require(distance <= 2 * subject.noise, f"it ends {distance:.3g} away from the optimum")


def partial_participation(subject: Subject, folder: Path) -> None:
    """2 of 6 a round: only they are averaged, with weights that add up to one."""
    counts = (1, 2, 3, 4, 5, 6)
    log = _Log()
    method = _with_points(subject)
    run(method, Points(counts), folder, max_rounds=1, participation=2 / 6, local_epochs=1, callbacks=[log])
    low, high = pull(log.servers[0]["weights"], counts, log.cohorts[0], subject.least_step)
    moved = method.server["weights"] - log.servers[0]["weights"]
    inside = (moved >= 0.1 * low - subject.noise).all() and (moved <= 0.1 * high + subject.noise).all()
    _require(bool(inside), f"a step of lr 0.1 moved it by {_show(moved)}, outside [{_show(0.1 * low)}, {_show(0.1 * high)}]")


def permutation(subject: Subject, folder: Path) -> None:
    """Numbering the clients otherwise changes nothing."""
    order = [2, 0, 1]
    ends = []
    for counts, centres in (((3, 1, 2), CENTRES), ((2, 3, 1), CENTRES[order])):
        method = _with_points(subject, centres)
        run(method, Points(counts), folder, max_rounds=3)
        ends.append(method.server["weights"])
    difference = float((ends[0] - ends[1]).abs().max())
    _require(difference <= subject.noise, f"the weights differ by {difference:.3g}")


def neutral(subject: Subject, folder: Path) -> None:
    """At its neutral setting it is FedAvg, bit for bit."""
    if subject.neutral is None:
        raise NotApplicable("no neutral setting is known")
    ends = []
    for method in (on_images(subject.make(**subject.neutral)), on_images(FedAvg())):
        run(method, images(), folder, max_rounds=2, participation=0.5)
        ends.append(method.server["weights"])
    _require(
        torch.equal(*ends),
        f"with {subject.neutral} its weights differ by {float((ends[0] - ends[1]).abs().max()):.3g} from FedAvg's",
    )


def resume(subject: Subject, folder: Path) -> None:
    """Two rounds, a checkpoint, two more: the same server as four in one go."""
    whole, halves = (on_images(subject.make()) for _ in range(2))
    run(whole, images(), folder, max_rounds=4, participation=0.5)
    half = run(on_images(subject.make()), images(), folder, max_rounds=2, participation=0.5)
    run(halves, images(), folder, max_rounds=4, participation=0.5, ckpt_path=str(half.run_dir), allow_changed=True)
    _same_server(whole.server, halves.server, "after the resume")


def determinism(subject: Subject, folder: Path) -> None:
    """The same seed gives the same server, whatever the global generators hold."""
    servers = []
    for poison in (1, 2):
        torch.manual_seed(poison)
        method = on_images(subject.make())
        run(method, images(), folder, max_rounds=2, participation=0.5)
        servers.append(method.server)
    _same_server(servers[0], servers[1], "in a second run")


def bytes_on_the_wire(subject: Subject, folder: Path) -> None:
    """A payload is as long as it says, survives encoding, and is what the ledger counts."""
    log = _Log()
    method = on_images(subject.make())
    trainer = run(method, images(), folder, max_rounds=2, callbacks=[log])
    counted = {(entry.round, entry.client): entry.upload for entry in _ledger(trainer)}
    for at, upload in log.uploads.items():
        payload = Payload.from_bytes(upload)
        _require(
            payload.nbytes == len(payload.to_bytes()) == len(upload),
            f"client {at[1]} sent {len(upload)} bytes, {payload.nbytes} announced",
        )
        _require(counted[at] == len(upload), f"client {at[1]} sent {len(upload)} bytes and the ledger has {counted[at]}")
    if subject.upload_bytes is not None:
        expected = subject.upload_bytes(method)
        largest = max(map(len, log.uploads.values()))
        _require(largest == expected, f"an upload has {largest} bytes, by hand formula {expected}")


def server_reads_uploads_only(subject: Subject, folder: Path) -> None:
    """A server that never trained, given the same bytes, comes to the same state."""
    log = _Log()
    method = on_images(subject.make())
    trainer = run(method, images(), folder, max_rounds=2, callbacks=[log])
    states = [*log.servers[1:], dict(method.server)]
    for round, (before, after) in enumerate(zip(log.servers, states, strict=True), start=1):
        other = _untrained(subject, trainer)
        other.server, other.round = dict(before), round
        other.aggregate({client: Payload.from_bytes(data) for (r, client), data in log.uploads.items() if r == round})
        _same_server(after, other.server, "computed from the payloads alone")


def no_stale_state(subject: Subject, folder: Path) -> None:
    """What a client sends does not depend on who trained before it in this process."""
    alone, after = _Log(), _Log()
    run(on_images(subject.make()), images(), folder, max_rounds=1, callbacks=[_Only(4), alone])
    run(on_images(subject.make()), images(), folder, max_rounds=1, callbacks=[after])
    _require(alone.uploads[1, 4] == after.uploads[1, 4], "client 4 sends something else when others trained before it")


def finite(subject: Subject, folder: Path) -> None:
    """Everything the server holds stays finite, BatchNorm statistics and a client with one example included."""
    method = on_images(subject.make())
    run(method, images(), folder, max_rounds=3)
    for name, value in method.server.items():
        _require(not value.is_floating_point() or bool(torch.isfinite(value).all()), f"server[{name!r}] is not finite")


def empty_round(subject: Subject, folder: Path) -> None:
    """All clients dropped: the server is as before."""
    log = _Log()
    method = on_images(subject.make())
    run(method, images(), folder, max_rounds=2, callbacks=[_Only(), log])
    _same_server(log.servers[0], method.server, "after an empty round")


def diverged_client(subject: Subject, folder: Path) -> None:
    """A client whose loss is NaN is rejected, reported, and never averaged."""
    method = on_images(subject.make())
    _poison(method, client=0)
    trainer = run(method, images(), folder, max_rounds=2)
    fates = {entry.client: entry.status for entry in _ledger(trainer)}
    _require(fates[0] == "rejected", f"the ledger says {fates[0]!r} of the client whose loss is NaN")
    _require(all(bool(torch.isfinite(v).all()) for v in method.server.values() if v.is_floating_point()), "the server holds NaN")


def budget(subject: Subject, folder: Path) -> None:
    """No client is ever given, or sends, more bits than its budget."""
    if not hasattr(subject.make(), "budgets"):
        raise NotApplicable("it has no budgets")
    for bits in (1, 4, [1, 2, 3, 4, 6, 8]):
        log = _Log()
        method, data = on_images(subject.make(bits=bits)), images()
        run(method, data, folder, max_rounds=3, callbacks=[log])
        codec: Any = method.codec
        sizes, budgets = codec.sizes, bits if isinstance(bits, list) else [bits] * 6
        for (_, client), sent in log.uploads.items():
            used = average_bits(sizes, Payload.from_bytes(sent).codes("bits").values.tolist())
            _require(used <= budgets[client], f"client {client} with a budget of {budgets[client]} bits sends {used:.3f}")
        for client in range(6):
            message = method.broadcast(data.client(client))
            given = average_bits(sizes, message.codes("bits").values.tolist()) if "bits" in message else 0.0
            _require(given <= budgets[client], f"client {client} with a budget of {budgets[client]} bits is given {given:.3f}")


CHECKS: tuple[Callable[[Subject, Path], None], ...] = (
    known_optimum, agreement, partial_participation, permutation, neutral, resume, determinism, bytes_on_the_wire,
    server_reads_uploads_only, no_stale_state, finite, empty_round, diverged_client, budget,
)  # fmt: skip


class _Log(Stressor, Meter):
    """Notes cohorts, uploads as bytes, and the server at the start of each round."""

    def __init__(self) -> None:
        self.cohorts: list[list[int]] = []
        self.uploads: dict[tuple[int, int], bytes] = {}
        self.servers: list[dict[str, Tensor]] = []

    def on_round_start(self, round: int, context: Context) -> None:
        self.servers.append({name: value.clone() for name, value in context.method.server.items()})

    def on_cohort(self, cohort: list[Assignment], round: int, context: Context) -> None:
        self.cohorts.append([assignment.client.id for assignment in cohort])

    def change_upload(self, upload: Payload, *, client: Client, round: int, context: Context) -> Payload:
        self.uploads[round, client.id] = upload.to_bytes()
        return upload


class _Only(Stressor):
    """Everyone else drops before training."""

    def __init__(self, *clients: int) -> None:
        self.clients = clients

    def change_cohort(self, cohort: list[Assignment], *, round: int, context: Context) -> list[Assignment]:
        return [a if a.client.id in self.clients else replace(a, trains=False, returns=False) for a in cohort]


def _with_points(subject: Subject, centres: Tensor = CENTRES) -> Method:
    """The method on the quadratic, if it trains the network that it is given."""
    method = on_points(subject.make(), centres)
    data: FederatedData = Points()
    data.setup("fit")
    data.distribute(0, torch.device("cpu"))
    try:
        method.build(data)
    except ValueError as error:
        raise NotApplicable(f"it cannot be built on points: {error}") from error
    if method.server.get("weights", torch.empty(0)).numel() != CENTRES.shape[1]:
        raise NotApplicable("its server does not average the network's weights")
    return on_points(subject.make(), centres)


def _ledger(trainer: FederatedTrainer) -> list[LedgerEntry]:
    return Ledger.from_csv((trainer.run_dir / "ledger.csv").read_text()).entries


def _untrained(subject: Subject, trainer: FederatedTrainer) -> Method:
    method = on_images(subject.make())
    method.seed = trainer.seed
    with rng.torch_stream(trainer.seed, "weights"):
        method.build(trainer.data)
    return method


def _poison(method: Method, client: int) -> None:
    """The loss of one client becomes NaN."""
    receive, loss = method.receive, method.task_loss

    def received(self: Method, message: Payload, who: Client) -> None:
        self.poisoned = who.id == client  # type: ignore[assignment]
        receive(message, who)

    def poisoned_loss(self: Method, outputs: Tensor, target: Tensor) -> Tensor:
        return loss(outputs, target) * (float("nan") if self.poisoned else 1.0)

    method.receive = MethodType(received, method)  # type: ignore[method-assign]
    method.task_loss = MethodType(poisoned_loss, method)  # type: ignore[method-assign]


def _same_server(expected: dict[str, Tensor], found: dict[str, Tensor], when: str) -> None:
    _require(set(expected) == set(found), f"{when} the server holds {sorted(found)} instead of {sorted(expected)}")
    for name, value in expected.items():
        _require(torch.equal(value, found[name]), f"server[{name!r}] is another {when}")


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Violation(otherwise)


def _show(tensor: Tensor) -> str:
    return "[" + ", ".join(f"{value:.3g}" for value in tensor.flatten().tolist()) + "]"
