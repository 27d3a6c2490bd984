"""Rounds without a common start: a round is one version of the server's model.

At most ``concurrency`` clients are at work at any time. One that ends is replaced by a free one,
drawn at random, once everything that arrives at the same instant has arrived; so a buffer as large
as the concurrency, with equal devices, is FedAvg.
"""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from bisect import insort
from collections.abc import Callable, Container, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from fl_lightning.aggregation.base import Receipt
from fl_lightning.aggregation.exact_sum import MAX_MAGNITUDE, largest
from fl_lightning.aggregation.receiving import declared_limits
from fl_lightning.clock.clock import Clock
from fl_lightning.clock.devices import SameDevice
from fl_lightning.clock.reach import Pool, Reach
from fl_lightning.clock.rounds import Rounds
from fl_lightning.clock.staleness import Polynomial, Staleness
from fl_lightning.clock.trained import Draw, Train, Trained
from fl_lightning.config.constraints import at_least, within
from fl_lightning.errors import InputError, require
from fl_lightning.hooks import Context
from fl_lightning.wire import LedgerEntry, Payload

log = logging.getLogger("fl_lightning")

EVERYBODY = Reach(Clock(devices=SameDevice()), 0)
IN_FLIGHT = WEIGHTS, START, EXAMPLES = "flight/weights", "flight/start", "flight/examples"
"""What is kept with a client whose upload is on its way: the upload, what it started from, and
n_k."""


class Asynchronous(Rounds):
    """What FedBuff and FedAsync have in common.

    Args:
        concurrency: M, how many clients are at work at a time.
        buffer: K, how many uploads make a version.
        staleness: weight of an update by the versions since its download. Default:
            ``Polynomial(0.5)``.
        max_staleness: versions beyond which an upload is not used. Default: all are.
    """

    goes_by_clock = has_versions = True

    def __init__(
        self, concurrency: int, buffer: int, staleness: Staleness | None, max_staleness: int | None
    ) -> None:
        self.concurrency, self.buffer = concurrency, buffer
        self.staleness, self.max_staleness = staleness or Polynomial(), max_staleness

    def invited(self, cohort: int) -> int:
        return self.concurrency

    def exchanges(self, cohort: int) -> int:
        return self.buffer

    def limited(self, clients: int | None) -> Asynchronous:
        """Return the same rounds with at most so many clients at work; None: these."""
        if clients is None:
            return self
        few = copy(self)
        few.concurrency, few.buffer = min(self.concurrency, clients), min(self.buffer, clients)
        return few

    @abstractmethod
    def present(
        self, upload: Tensor, start: Tensor, now: Tensor, versions: int, trained: int
    ) -> Tensor:
        """Return the weights that a stale upload stands for beside the server's present ones.

        Args:
            upload: the client's weights, ``[P]``.
            start: those that it started from, ``[P]``.
            now: the server's, ``[P]``.
            versions: that the server has made in between.
            trained: how many of the P are trained; the others are statistics of BatchNorm.
        """

    def check(self, context: Context) -> None:
        """Refuse a run that cannot have such rounds.

        Raises:
            InputError: the federation is too small, its server needs more than weights, or clients
                keep something.
        """
        given = f"--trainer.rounds {type(self).__name__}"
        method = context.method
        clients = context.data.active
        for name in ("concurrency", "buffer"):
            require(
                getattr(self, name) <= len(clients),
                f"--trainer.rounds.{name} {getattr(self, name)}",
                f"there are {len(clients)} clients with training data",
                f"write {len(clients)} or less",
            )
        if len(clients) < self.concurrency + self.buffer - 1:
            log.warning(
                "%s: nobody is drawn twice for a version; of %d clients fewer than %d are at work at times",
                given,
                len(clients),
                self.concurrency,
            )
        if not method.average.is_sum and self.buffer < 3 >= method.average.fewest:
            log.warning(
                "%s with --model.average %s: of %d uploads in a version none can be an outlier; "
                "write --trainer.rounds FedBuff with a buffer of 3 or more",
                given,
                type(method.average).__name__,
                self.buffer,
            )
        sends = declared_limits(method, context.data.client(int(clients[0])))
        others = method.personalised or method.keeps_state
        if sends is None or {*sends} != {"examples", "weights"} or others:
            rule = "a stale update is weighed, and its clients send or keep more than weights"
            raise InputError(
                f"{given} with --model {type(method).__name__}",
                rule,
                "write --model FedAvg, without personal and finetune",
            )


class FedBuff(Asynchronous):
    """Buffered asynchronous aggregation (Nguyen et al., AISTATS 2022, Algorithm 1):

        x <- x + mean over K uploads of s(d) (y - x_start)

    The mean is the method's ``average``, by its weights; ``--model.weigh_by clients`` is the
    paper's, and a ``server_optimizer`` has its learning rate. Statistics of BatchNorm are averaged
    as they are sent.

    Args:
        concurrency: M, clients at work at a time.
        buffer: K, uploads that make a version.
        staleness: s. Default: ``Polynomial(0.5)``.
        max_staleness: largest d that is used. Default: all are.
    """

    def __init__(
        self,
        concurrency: Annotated[int, at_least(1)] = 10,
        buffer: Annotated[int, at_least(1)] = 5,
        staleness: Staleness | None = None,
        max_staleness: Annotated[int | None, at_least(0)] = None,
    ) -> None:
        super().__init__(concurrency, buffer, staleness, max_staleness)

    def present(
        self, upload: Tensor, start: Tensor, now: Tensor, versions: int, trained: int
    ) -> Tensor:
        weight = self.staleness.checked(versions)
        if versions == 0 and weight == 1:
            return upload
        moved = _float64(upload).sub_(start).mul_(weight).add_(now)
        found = moved.to(upload.dtype)
        found[trained:] = upload[trained:]
        return found


class FedAsync(Asynchronous):
    """Every upload makes a version (Xie et al., 2019, Algorithm 1): x <- (1 - a s(d)) x + a s(d) y.

    Args:
        concurrency: M, clients at work at a time.
        alpha: a, in (0, 1].
        staleness: s. Default: ``Polynomial(0.5)``.
        max_staleness: largest d that is used. Default: all are.
    """

    def __init__(
        self,
        concurrency: Annotated[int, at_least(1)] = 10,
        alpha: Annotated[float, within("(0, 1]", "a mixing weight lies in (0, 1]", 0.6)] = 0.6,
        staleness: Staleness | None = None,
        max_staleness: Annotated[int | None, at_least(0)] = None,
    ) -> None:
        self.alpha = alpha
        super().__init__(concurrency, 1, staleness, max_staleness)

    def present(
        self, upload: Tensor, start: Tensor, now: Tensor, versions: int, trained: int
    ) -> Tensor:
        share = self.alpha * self.staleness.checked(versions)
        return _float64(now).mul_(1 - share).add_(_float64(upload).mul_(share)).to(upload.dtype)


def forget_flights(states: dict[int, dict[str, Tensor]], flying: Container[int]) -> None:
    """Forget uploads on their way of which a run knows nothing: other rounds have left them.

    Args:
        states: what clients keep, by id; brought up to date.
        flying: the clients whose upload is on its way.
    """
    for id in [id for id in states if id not in flying]:
        left = {name: kept for name, kept in states[id].items() if name not in IN_FLIGHT}
        if len(left) < len(states[id]):
            states.pop(id)
            if left:
                states[id] = left


def _float64(vector: Tensor) -> Tensor:
    """Return a copy, which is changed in place: three vectors of float64 would take twice the time
    of one."""
    return vector.to(torch.float64, copy=True)


class Flight(NamedTuple):
    """A client at work: events are in the order of time and id.

    Args:
        ended: virtual seconds at which its upload arrives.
        client: its id.
        version: of the server's model that it started from.
        started: virtual seconds of its start.
        status, download, upload, wasted: what the ledger will say of it.
        offline: whether it goes offline then, before its upload has arrived.
    """

    ended: float
    client: int
    version: int
    started: float
    status: str
    download: int
    upload: int
    wasted: int
    offline: bool = False

    def entry(self, round: int) -> LedgerEntry:
        """Return the ledger's entry of an upload that arrives in a round."""
        sizes = self.download, self.upload, self.wasted
        return LedgerEntry(round, self.client, self.status, *sizes, self.started, self.ended)


IN_ORDER = attrgetter("ended", "client")

Seconds = Callable[[Mapping[int, int], LedgerEntry], float]
"""How long a client takes, of examples by id and its bytes."""


@dataclass
class Flights:
    """The clients at work, and the virtual time.

    Args:
        rounds: the form of the rounds.
        now: virtual seconds since the start of the run.
        flying: in the order of events.
    """

    rounds: Asynchronous
    now: float = 0.0
    flying: list[Flight] = field(default_factory=list)

    def as_json(self) -> list[Any]:
        """Return the clients at work for a checkpoint."""
        return [[*flight] for flight in self.flying]

    def collect(
        self,
        context: Any,
        round: int,
        train: Train,
        draw: Draw,
        seconds: Seconds,
        reach: Reach = EVERYBODY,
    ) -> Trained:
        """Let time pass until a version is complete, or nobody is left to wait for.

        A client whose upload arrived in this round is not drawn again in it. Where clients are
        missing at work and nobody is online, the next that comes online is asked.

        Args:
            context: the federation, whose ``states`` keep uploads on their way.
            round: number of the version that is made, from 1.
            train, draw, seconds: train clients, choose them, and say how long they take.
            reach: who is online.

        Raises:
            RunStopped: nobody is at work any more, and nobody comes online again.
        """
        found, draws, rounds = Trained(), 0, self.rounds
        weights = context.method.starts()["weights"]  # which change between two versions alone
        free = Pool(context.data.active).leave_out([flight.client for flight in self.flying])
        while len(found.uploads) < rounds.buffer:
            if not (self.flying and self.flying[0].ended <= self.now):
                vacant, asked, later = rounds.concurrency - len(self.flying), list[int](), math.inf
                if vacant > 0:
                    asked, draws, later = reach.draw_online(free, vacant, self.now, draw, draws)
                if asked:
                    self._start(context, round, weights, train(asked), seconds, found, reach)
                    free.leave_out(asked)  # they are at work, or have never begun
                    continue
                if later < (self.flying[0].ended if self.flying else math.inf):
                    self.now = later
                    continue
                if not self.flying:
                    if not (found.cohort or found.receipts):
                        reach.first_online(context.data.active, self.now)
                    break
            flight = self.flying.pop(0)
            self.now = max(self.now, flight.ended)
            self._land(context, round, weights, flight, found)
        # who started last is not known to a run that is continued
        context.method.cohort = rounds.buffer
        return found

    def _start(
        self,
        context: Any,
        round: int,
        weights: Tensor,
        started: Trained,
        seconds: Seconds,
        found: Trained,
        reach: Reach,
    ) -> None:
        """Put clients to work."""
        found.started += started.receipts
        found.cohort += started.cohort
        for receipt in started.receipts:
            id, entry = receipt.client.id, receipt.entry
            if id not in started.examples:
                found.receipts.append(receipt)
                continue
            if receipt.client.state:
                name = type(context.method).__name__
                given = f"--trainer.rounds {type(self.rounds).__name__} with --model {name}"
                rule = (
                    "its clients keep something between rounds, which a stale upload would not fit"
                )
                raise InputError(given, rule, "write --model FedAvg")
            ended, until = self.now + seconds(started.examples, entry), reach.until(id, self.now)
            lost = reach.lost(entry.timed(self.now, ended)) if ended > until else None
            entry = lost or entry
            if id in started.uploads and entry.status == "trained":
                sent = started.uploads[id]
                upload, examples = sent.tensor("weights"), sent.tensor("examples")
                context.states[id] = {WEIGHTS: upload, START: weights, EXAMPLES: examples}
            sizes = entry.download, entry.upload, entry.wasted
            flight = Flight(
                min(ended, until), id, round - 1, self.now, entry.status, *sizes, lost is not None
            )
            insort(self.flying, flight, key=IN_ORDER)

    def _land(
        self, context: Any, round: int, weights: Tensor, flight: Flight, found: Trained
    ) -> None:
        """Take what arrives into a version."""
        id, limit = flight.client, self.rounds.max_staleness
        kept = context.states.pop(id, {})
        entry = flight.entry(round)
        versions = round - 1 - flight.version
        examples, found.offline = 0, found.offline + flight.offline
        if flight.status == "trained" and limit is not None and versions > limit:
            entry = entry.unused()
            found.late += 1
        elif flight.status == "trained":
            sent, start, trained = kept[WEIGHTS], kept[START], context.method.trained_values
            moved = self.rounds.present(sent, start, weights, versions, trained)
            if largest(moved) < MAX_MAGNITUDE:
                found.uploads[id] = Payload({"weights": moved, "examples": kept[EXAMPLES]})
                found.staleness.append(versions)
                examples = int(kept[EXAMPLES])
            else:
                log.warning(
                    "round %d: upload of client %d rejected: moved here, it is too large", round, id
                )
                entry = replace(entry, status="rejected", wasted=entry.upload)
        found.receipts.append(Receipt(context.data.client(id), entry, {}, examples))
