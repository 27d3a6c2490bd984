"""Several processes that each train their share of the cohort; each ends up with all results, in the tasks'
order."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from torch import Tensor

from fl_lightning.data import FederatedData
from fl_lightning.distributed.collectives import gather_bytes, gather_parts, rank, world_size
from fl_lightning.engines.base import ClientResult, ClientTask, Engine, Units
from fl_lightning.metrics import Mean
from fl_lightning.wire.payload import HEADER

CLIENT_OVERHEAD_BATCHES = 0.25  # of a batch: what a client costs beside its training


class RankedEngine(Engine):
    """Deals the tasks of ``engine`` to the ranks and exchanges what they gave: uploads, kept states, losses.

    Uploads stay the bytes that the client made, so the server of every rank computes the same next state from
    the same bytes.
    """

    def __init__(self, engine: Engine, data: FederatedData) -> None:
        self.engine, self.data, self.name = engine, data, engine.name

    def start(self) -> None:
        self.engine.start()

    def close(self) -> None:
        self.engine.close()

    def units(self, tasks: Sequence[ClientTask]) -> Units:
        return self.engine.units(tasks)

    def train(self, tasks: Sequence[ClientTask], units: Units | None = None) -> Iterator[ClientResult]:
        if world_size() == 1:
            yield from self.engine.train(tasks, units)
            return
        require_agreement(tasks)
        units, works = (
            self.units(tasks) if units is None else units,
            [work(task, self.data.batch_size) for task in tasks],
        )
        mine = [
            units[at] for at in deal([sum(works[at] for at in unit) for unit in units], world_size())[rank()]
        ]
        share = [at for unit in mine for at in unit]
        place = {at: here for here, at in enumerate(share)}
        results = self.engine.train(
            [tasks[at] for at in share], [[place[at] for at in unit] for unit in mine]
        )
        parts: dict[str, bytes | Tensor] = {}
        for index, result in zip(share, results, strict=True):
            parts |= {f"{index}/{name}": part for name, part in _pack(result).items()}
        everything: list[dict[str, bytes | Tensor]] = [{} for _ in tasks]
        for key, part in gather_parts(parts).items():
            at, name = key.split("/", 1)
            everything[int(at)][name] = part
        for task, packed in zip(tasks, everything, strict=True):
            yield _unpack(packed, task)


def work(task: ClientTask, batch_size: int) -> float:
    """Return what a task costs, in examples: those of its steps, and something for the client itself."""
    return (
        min(task.steps * batch_size, task.epochs * len(task.client.train))
        + CLIENT_OVERHEAD_BATCHES * batch_size
    )


def deal(works: Sequence[float], size: int) -> list[list[int]]:
    """Deal work to ranks and return the positions of each: longest first, to the rank with least (Graham,
    1969).

    >>> deal([1, 5, 2, 2], 2)
    [[1], [0, 2, 3]]
    """
    loads, shares = [0.0] * size, [[] for _ in range(size)]  # type: tuple[list[float], list[list[int]]]
    for index in sorted(range(len(works)), key=lambda index: (-works[index], index)):
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


def _pack(result: ClientResult) -> dict[str, bytes | Tensor]:
    losses = {name: [mean.total, mean.weight] for name, mean in result.losses.items()}
    report = json.dumps({"losses": losses, "steps": result.steps})
    kept = {f"state/{name}": tensor for name, tensor in result.state.items()}
    return {"upload": result.upload, "report": report.encode(), **kept}


def _unpack(packed: dict[str, Any], task: ClientTask) -> ClientResult:
    report = json.loads(packed["report"])
    state = {
        name.removeprefix("state/"): tensor for name, tensor in packed.items() if name.startswith("state/")
    }
    losses = {name: Mean(*mean) for name, mean in report["losses"].items()}
    return ClientResult(replace(task.client, state=state), packed["upload"], state, losses, report["steps"])
