"""Several processes that each train their share of the cohort; each ends up with all results, in
the tasks' order."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, replace
from hashlib import blake2b
from typing import Any

from torch import Tensor

from fl_lightning.aggregation.base import Receipt
from fl_lightning.aggregation.intake import Uploads
from fl_lightning.data import FederatedData
from fl_lightning.distributed.collectives import gather_bytes, gather_parts, rank, world_size
from fl_lightning.engines.base import ClientResult, ClientTask, Engine, Units
from fl_lightning.engines.holders import (
    Holders,
    State,
    collect_states,
    fetch_states,
    preferred_rank,
)
from fl_lightning.metrics import Mean
from fl_lightning.wire import LedgerEntry
from fl_lightning.wire.payload import HEADER

CLIENT_OVERHEAD_BATCHES = 0.25  # of a batch: what a client costs beside its training


class RankedEngine(Engine):
    """Deals the tasks of ``engine`` to the ranks and exchanges what they gave: uploads and losses.

    Uploads stay the bytes that the client made, so the server of every rank computes the same next
    state from the same bytes. Kept states go to rank 0 and to ranks that train the clients next.

    Args:
        engine: trains this rank's share.
        data: the clients' examples.
        holders: which rank holds which client's state; it is kept up to date.
    """

    def __init__(self, engine: Engine, data: FederatedData, holders: Holders | None = None) -> None:
        self.engine, self.data, self.name = engine, data, engine.name
        self.holders = {} if holders is None else holders

    def start(self) -> None:
        self.engine.start()

    def rest(self) -> None:
        self.engine.rest()

    def close(self) -> None:
        self.engine.close()

    def units(self, tasks: Sequence[ClientTask]) -> Units:
        return self.engine.units(tasks)

    def train(
        self, tasks: Sequence[ClientTask], units: Units | None = None
    ) -> Iterator[ClientResult]:
        if world_size() == 1:
            yield from self.engine.train(tasks, units)
            return
        own, kept = {}, {}
        for index, result in self.train_own(tasks, units):
            own[index], kept[index] = _pack(result), result.state
        for task, packed, state in _exchange(own, kept, tasks, self.holders):
            yield _unpack(packed, task, state)

    def train_own(
        self, tasks: Sequence[ClientTask], units: Units | None = None, into: Uploads | None = None
    ) -> Iterator[tuple[int, ClientResult]]:
        """Yield position and result of this rank's share of the tasks.

        Clients of this share that keep a state have it by then.
        """
        if world_size() == 1:
            yield from self.engine.train_own(tasks, units, into)
            return
        require_agreement(tasks)
        units = self.units(tasks) if units is None else units
        works = [work(task, self.data.batch_size) for task in tasks]
        preferred = [preferred_rank([tasks[at] for at in unit], self.holders) for unit in units]
        dealt = deal([sum(works[at] for at in unit) for unit in units], world_size(), preferred)
        trainers = {
            at: here for here, share in enumerate(dealt) for unit in share for at in units[unit]
        }
        fetch_states(tasks, trainers, self.holders)
        mine = [units[at] for at in dealt[rank()]]
        share = [at for unit in mine for at in unit]
        place = {at: here for here, at in enumerate(share)}
        own_units = [[place[at] for at in unit] for unit in mine]
        for here, result in self.engine.train_own([tasks[at] for at in share], own_units, into):
            yield share[here], result


def exchange_receipts(
    own: Mapping[int, Receipt], tasks: Sequence[ClientTask], holders: Holders
) -> list[Receipt]:
    """Return the receipts of all ranks in the order of the tasks, on every rank.

    What a client keeps is in those of rank 0 and of the rank that trained it.

    Args:
        own: receipts of this rank by position of the task.
        tasks: all tasks.
        holders: which rank holds which client's state; it is kept up to date.

    Raises:
        RankLost: a rank died or did not answer in time.
    """
    packed = {
        position: _pack_parts(
            {"entry": astuple(receipt.entry), "examples": receipt.examples},
            receipt.losses,
            receipt.client.state,
        )
        for position, receipt in own.items()
    }
    kept = {position: receipt.client.state for position, receipt in own.items()}
    receipts = []
    for task, parts, state in _exchange(packed, kept, tasks, holders):
        report, losses = _unpack_report(parts)
        entry = LedgerEntry(*report["entry"])
        receipts.append(
            Receipt(replace(task.client, state=state), entry, losses, report["examples"])
        )
    return receipts


def work(task: ClientTask, batch_size: int) -> float:
    """Return what a task costs, in examples: those of its steps, and something for the client
    itself."""
    return (
        min(task.steps * batch_size, task.epochs * len(task.client.train))
        + CLIENT_OVERHEAD_BATCHES * batch_size
    )


def deal(
    works: Sequence[float], size: int, preferred: Sequence[int | None] = ()
) -> list[list[int]]:
    """Deal work to ranks and return the positions of each: longest first, to the rank with least
    (Graham, 1969).

    Work that prefers a rank gets it, longest first, while that rank has no more than the busiest
    rank of a deal without preferences. The rest is dealt as ever, so the busiest rank has at most
    one of the rest more.

    Args:
        works: cost of each piece.
        size: number of ranks.
        preferred: the rank that each piece prefers, None for any; empty: none prefers one.

    >>> deal([1, 5, 2, 2], 2)
    [[1], [0, 2, 3]]
    >>> deal([1, 1, 1, 1], 2, [1, 1, 1, None])
    [[2, 3], [0, 1]]
    """
    loads, shares = [0.0] * size, [[] for _ in range(size)]  # type: tuple[list[float], list[list[int]]]
    left = sorted(range(len(works)), key=lambda index: (-works[index], index))
    if any(wish is not None for wish in preferred):
        most = max(sum(works[index] for index in share) for share in deal(works, size))
        rest = []
        for index in left:
            wish = preferred[index]
            if wish is None or loads[wish] + works[index] > most:
                rest.append(index)
            else:
                loads[wish] += works[index]
                shares[wish].append(index)
        left = rest
    for index in left:
        least = loads.index(min(loads))
        loads[least] += works[index]
        shares[least].append(index)
    return [sorted(share) for share in shares]


def require_agreement(tasks: Sequence[ClientTask]) -> None:
    """Refuse to go on where ranks are not about to do the same round.

    Raises:
        RuntimeError: a callback or a method drew from something else than its streams.
    """
    digest = blake2b(digest_size=16)
    for task in tasks:
        digest.update(f"{task.client.id}/{task.epochs}/{task.steps}/{len(task.message)}/".encode())
        digest.update(task.message[: HEADER.size])  # holds the checksum of the rest
        digest.update(task.labels.cpu().numpy().tobytes())
    digests = gather_bytes(digest.digest())
    different = [other for other, theirs in enumerate(digests) if theirs != digests[0]]
    if different:
        raise RuntimeError(
            f"ranks {different} have other tasks for this round than rank 0; every rank computes "
            "the same round; draw what callbacks and methods draw from fl_lightning.rng.stream, and "
            "run all ranks on machines of one kind"
        )


def _exchange(
    own: Mapping[int, Mapping[str, bytes | Tensor]],
    kept: Mapping[int, State],
    tasks: Sequence[ClientTask],
    holders: Holders,
) -> Iterator[tuple[ClientTask, dict[str, bytes | Tensor], State]]:
    """Yield each task with its parts, whichever rank has them, and with what the client keeps, on
    rank 0 and on the rank that trained it; ``{}`` elsewhere.

    Args:
        own: parts of this rank's tasks, by position.
        kept: what its clients keep, by position.
        tasks: all tasks.
        holders: brought up to date.
    """
    everything = _gather(own, len(tasks))
    trainers = [json.loads(parts["report"])["keeps_on"] for parts in everything]  # type: ignore[arg-type]
    states = collect_states(kept, trainers)
    for position, (task, parts) in enumerate(zip(tasks, everything, strict=True)):
        holders.pop(task.client.id, None)
        if trainers[position] is not None:
            holders[task.client.id] = trainers[position]
        yield task, parts, states.get(position, {})


def _gather(
    own: Mapping[int, Mapping[str, bytes | Tensor]], count: int
) -> list[dict[str, bytes | Tensor]]:
    """Return the parts of each of ``count`` tasks, whichever rank has them."""
    parts = {
        f"{position}/{name}": part
        for position, of_one in own.items()
        for name, part in of_one.items()
    }
    everything: list[dict[str, bytes | Tensor]] = [{} for _ in range(count)]
    for key, part in gather_parts(parts).items():
        position, name = key.split("/", 1)
        everything[int(position)][name] = part
    return everything


def _pack(result: ClientResult) -> dict[str, bytes | Tensor]:
    return {
        "upload": result.upload,
        **_pack_parts({"steps": result.steps}, result.losses, result.state),
    }


def _unpack(packed: dict[str, Any], task: ClientTask, state: State) -> ClientResult:
    report, losses = _unpack_report(packed)
    return ClientResult(
        replace(task.client, state=state), packed["upload"], state, losses, report["steps"]
    )


def _pack_parts(
    report: dict[str, Any], losses: Mapping[str, Mean], state: State
) -> dict[str, bytes | Tensor]:
    """Return a report as bytes; it says which rank trained the client if the client keeps
    anything."""
    means = {name: [mean.total, mean.weight] for name, mean in losses.items()}
    keeps_on = rank() if state else None
    return {"report": json.dumps({**report, "losses": means, "keeps_on": keeps_on}).encode()}


def _unpack_report(packed: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Mean]]:
    report = json.loads(packed["report"])
    return report, {name: Mean(*mean) for name, mean in report["losses"].items()}
