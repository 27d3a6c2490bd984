"""Worker processes on one machine's CPU: forks of this process that train the clients of a round
side by side.

Each worker has one thread. A fork has the data and the module without copying them, so it costs
milliseconds, and it computes what this process would: a task holds all that a client may know.
Large messages go through memory that both sides share.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import signal
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from mmap import mmap
from multiprocessing.connection import wait
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

import torch

from fl_lightning.aggregation.exact_sum import ExactSum
from fl_lightning.aggregation.intake import AddedUploads, Uploads
from fl_lightning.data import FederatedData
from fl_lightning.engines.base import ClientResult, ClientTask, Engine, Units
from fl_lightning.engines.ranks import work
from fl_lightning.engines.worker import (
    MIN_SHARED_BYTES,
    AddedHere,
    Answer,
    Opening,
    Place,
    Portion,
    exchanged_examples,
    joined,
    pack,
    read,
    serve,
    shared_bytes,
    tensor_at,
    unpack,
    unsendable,
    write,
)
from fl_lightning.errors import RankLost
from fl_lightning.methods import Method

log = logging.getLogger("fl_lightning")
T = TypeVar("T")
AHEAD_BYTES = 2**27
"""Results come in any order and are handed on in that of the tasks: at most twice so many bytes
wait, or the uploads of four clients a worker."""
MAX_WAIT_SECONDS = 1.0
"""Seconds of one wait for an answer, at most: a pause of the whole program then counts as one such
wait."""
# seconds between looks at who has finished, while there are results to hand on
POLL_SECONDS = 0.002


class PoolEngine(Engine):
    """Deals the tasks of ``engine`` to worker processes.

    :meth:`start` comes before any thread of this process holds a lock.

    Args:
        timeout: seconds without any answer after which the workers at work are given up.

    Raises (from :meth:`train`):
        RankLost: a worker died, or none of those at work has answered for ``timeout`` seconds.
    """

    def __init__(
        self,
        engine: Engine,
        method: Method,
        data: FederatedData,
        workers: int,
        timeout: float = math.inf,
    ) -> None:
        self.engine, self.method, self.data, self.size, self.timeout = (
            engine,
            method,
            data,
            workers,
            timeout,
        )
        self.name = engine.name
        self.workers: list[Worker] = []
        self.forked: dict[str, Any] = {}  # the method's attributes as all workers have them
        self.told_unsendable = False

    def start(self) -> None:
        self.forked = dict(vars(self.method))
        room = shared_bytes(self.method)
        self.boards = mmap(-1, room), mmap(-1, room)  # a message to all; the server's state
        for _ in range(self.size):
            self.workers.append(Worker(self.engine, self.method, self.boards, self.workers))

    def units(self, tasks: Sequence[ClientTask]) -> Units:
        return self.engine.units(tasks)

    def train(
        self, tasks: Sequence[ClientTask], units: Units | None = None
    ) -> Iterator[ClientResult]:
        yield from (result for _, result in self.train_own(tasks, units))

    def train_own(
        self, tasks: Sequence[ClientTask], units: Units | None = None, into: Uploads | None = None
    ) -> Iterator[tuple[int, ClientResult]]:
        if not self.workers:
            raise RuntimeError(
                "the worker processes have ended, or were never started; a round needs them; call start()"
            )
        opening = self._opening(isinstance(into, AddedUploads) and into.adds_anywhere)
        ahead = self._ahead(tasks)
        waiting = self._portions(tasks, self.units(tasks) if units is None else units, ahead)
        done: dict[int, ClientResult] = {}
        busy: dict[Worker, Units] = {}
        hand_out = partial(self._hand_out, waiting, tasks, busy, self._common(tasks), opening)
        given, looked = 0, 0.0
        try:
            hand_out(2 * ahead)
            while given < len(tasks):
                # who asks for results may take long with each
                if given not in done or monotonic() - looked > POLL_SECONDS:
                    for worker in self._answering(busy, wait_for_it=given not in done):
                        portion = [at for unit in busy.pop(worker) for at in unit]
                        answer = worker.hear()
                        # and then read
                        hand_out(given + 2 * ahead)
                        done |= zip(
                            portion, worker.take(answer, [tasks[at] for at in portion]), strict=True
                        )
                    looked = monotonic()
                if given in done:
                    yield given, done.pop(given)
                    given += 1
                    hand_out(given + 2 * ahead)
            if isinstance(into, AddedUploads) and opening.adds:
                self._add_up(into, opening)
        finally:
            if busy:  # someone raised: what they are at is of no use
                self.close()

    def _opening(self, adds: bool) -> Opening:
        """Return what workers are told of the method in this round. Where a part of it cannot be
        sent, which is said once, their uploads come back.

        Args:
            adds: whether they are to add up the uploads of their clients.
        """
        try:
            return Opening.of(self.method, self.forked, self.boards[1] if adds else None)
        except Exception as error:  # whatever an attribute raises that somebody has set
            without = unsendable(self.method, self.forked)
            if not self.told_unsendable:
                log.warning(
                    "workers do not see what was set on the method since they began, which cannot be sent to "
                    "them: %s (%s)",
                    ", ".join(without),
                    error,
                )
            self.told_unsendable = True
            return Opening.of(self.method, self.forked, None, without)

    def _common(self, tasks: Sequence[ClientTask]) -> Place | None:
        """Write the message of all tasks where all workers read it; return None where they have
        several."""
        if len({id(task.message) for task in tasks}) != 1:
            return None
        return write(self.boards[0], [tasks[0].message])[0]

    def _hand_out(
        self,
        waiting: list[Units],
        tasks: Sequence[ClientTask],
        busy: dict[Worker, Units],
        common: Place | None,
        opening: Opening,
        end: int,
    ) -> None:
        """Give portions that begin before the task at ``end`` to workers that have none."""
        for worker in self.workers:
            if waiting and worker not in busy and min(map(min, waiting[0])) < end:
                busy[worker] = waiting.pop(0)
                units = [[tasks[at] for at in unit] for unit in busy[worker]]
                worker.give(units, common, opening)

    def _add_up(self, into: AddedUploads, opening: Opening) -> None:
        """Give ``into`` what the workers have added up in this round."""
        # who had a portion; of a round that was not added up others may still have the opening
        adding = [worker for worker in self.workers if worker.opening is opening]
        for worker in adding:
            worker.ask_for_sums()
        for worker in adding:
            self._answering({worker: []}, wait_for_it=True)
            for name, total, weight, most in worker.take_sums(into.cohort):
                into.added().add_merged(name, total, weight, most)

    def _ahead(self, tasks: Sequence[ClientTask]) -> int:
        """Return half of how many clients may be handed out from the one on whose turn it is."""
        largest = max([1, *(len(task.message) for task in tasks)])
        return max(2 * self.size, AHEAD_BYTES // largest)

    def _portions(self, tasks: Sequence[ClientTask], units: Units, ahead: int) -> list[Units]:
        """Return the units in portions, of each ``ahead`` tasks in turn the most work first, and
        each portion smaller than the one before: so the workers end together with what is left
        (guided self-scheduling, Polychronopoulos & Kuck, 1987). Messages of a portion have no more
        than ``MIN_SHARED_BYTES``."""
        efforts = {
            id(unit): sum(work(tasks[at], self.data.batch_size) for at in unit) for unit in units
        }
        left, portions, room = sum(efforts.values()), [], 0.0  # type: tuple[float, list[Units], float]
        memory = 0
        for unit in sorted(units, key=lambda unit: (min(unit) // ahead, -efforts[id(unit)], unit)):
            size = sum(len(tasks[at].message) for at in unit)
            if room <= 0 or size > memory:
                portions.append([])
                room, memory = left / (2 * self.size), MIN_SHARED_BYTES
            portions[-1].append(unit)
            room, memory = room - efforts[id(unit)], memory - size
            left -= efforts[id(unit)]
        return portions

    def _answering(self, busy: dict[Worker, Units], wait_for_it: bool) -> list[Worker]:
        """Return the workers that have answered; wait until one has if ``wait_for_it``."""
        pipes, waited = [worker.pipe for worker in busy], 0.0
        ready = wait(pipes, 0)
        while wait_for_it and busy and not ready:
            if waited >= self.timeout:
                raise RankLost(
                    f"{', '.join(worker.state() for worker in busy)}: no answer for {waited:.0f} seconds",
                    "a round needs all its workers",
                    "continue with --ckpt_path, with a longer --trainer.rank_timeout if they were still "
                    "training",
                )
            pause = min(MAX_WAIT_SECONDS, self.timeout - waited)
            ready = wait(pipes, pause)
            waited += pause
        return [worker for worker in busy if worker.pipe in ready]

    def rest(self) -> None:
        self.close()

    def close(self) -> None:
        for worker in self.workers:
            worker.end()
        self.workers.clear()


class Worker:
    """A worker process as its parent sees it.

    Args:
        engine: trains what it is given.
        boards: memories that all workers read: a message to all clients, and the server's state.
        others: forks that exist already; this one lets go of their pipes, so that each notices when
            this process is gone.
    """

    def __init__(
        self, engine: Engine, method: Method, boards: tuple[mmap, mmap], others: Sequence[Worker]
    ) -> None:
        self.data: FederatedData = engine.data  # type: ignore[attr-defined]
        context = multiprocessing.get_context("fork")
        self.pipe, there = context.Pipe()
        room = shared_bytes(method)
        self.down, self.ups = mmap(-1, room), (mmap(-1, room), mmap(-1, room))
        self.opening: Opening | None = None
        pipes = [self.pipe, *(other.pipe for other in others)]
        arguments = (engine, method, there, boards, self.down, self.ups, pipes, os.getpid())
        self.process = context.Process(target=serve, args=arguments, daemon=True)
        with warnings.catch_warnings():
            # Python 3.12 warns of threads that hold locks; torch's, the only ones by now, are not
            # used by a single-threaded fork
            warnings.simplefilter("ignore", DeprecationWarning)
            self.process.start()
        there.close()

    def give(
        self,
        units: Sequence[Sequence[ClientTask]],
        common: Place | None = None,
        opening: Opening | None = None,
    ) -> None:
        """Hand clients out.

        Args:
            units: their tasks.
            common: of the message to all clients, which all workers read; None: there are several.
            opening: of the round; None: there is nothing to tell.
        """
        messages = list(
            {id(task.message): task.message for unit in units for task in unit}.values()
        )
        index = {id(message): at for at, message in enumerate(messages)}
        packed = [
            (
                [
                    (
                        o.client.id,
                        exchanged_examples(o.client, self.data),
                        pack(o.client.state),
                        index[id(o.message)],
                        len(o.labels),
                        o.round,
                        o.epochs,
                        o.steps,
                        o.returns,
                    )
                    for o in unit
                ],
                joined([o.labels for o in unit]),
            )
            for unit in units
        ]
        begins = opening is not None and opening is not self.opening
        self.opening = opening
        places = write(self.down, messages) if common is None else [common]
        self._say(Portion(places, common is not None, packed, opening if begins else None))

    def ask_for_sums(self) -> None:
        """Have it end the round, and answer with the sums of the uploads that it was to add up."""
        self.opening = None
        self._say(None)

    def take_sums(self, cohort: int) -> Iterator[tuple[str, ExactSum, int, int]]:
        """Yield the sums that were asked for, as :meth:`Sums.merged` does, in memory that the next
        round is added up in.

        Args:
            cohort: clients that were asked in the round.

        Raises:
            RankLost: it died.
            Exception: what adding up raised.
        """
        answer = self._hear(AddedHere)
        for (name, count, weight, most), place in zip(answer.parts, answer.places, strict=True):
            integers = tensor_at(self.ups[0], place, torch.int64)
            yield name, ExactSum.of(integers, cohort, count), weight, most

    def hear(self) -> Answer:
        """Wait for the answer to the portion that was given last, and return it.

        Raises:
            RankLost: it died.
            Exception: what its clients' work raised.
        """
        return self._hear(Answer)

    def _hear(self, kind: type[T]) -> T:
        try:
            answer = self.pipe.recv()
        except (EOFError, OSError):
            raise self._lost() from None
        if isinstance(answer, kind):
            return answer
        error, where = answer
        raise error from RuntimeError(f"in a worker process:\n{where}")

    def take(self, answer: Answer, tasks: Sequence[ClientTask]) -> list[ClientResult]:
        """Return the results in an answer.

        Its memory is written to again in the portion after the next, so it is read before that one
        is given.
        """
        results = []
        uploads = read(self.ups[answer.memory], answer.places or [b""] * len(tasks))
        for task, upload, (kept, losses, steps, received) in zip(
            tasks, uploads, answer.kept, strict=True
        ):
            state = unpack(kept)
            client = replace(task.client, state=state)
            result = ClientResult(
                client, upload, state, losses, steps, verified=upload, received=received
            )
            results.append(result)
        return results

    def state(self) -> str:
        """Return the process in words: its id, and whether somebody has stopped it."""
        with suppress(OSError):
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
            if fields[0] in "Tt":
                return (
                    f"worker process {self.process.pid} is stopped (kill -CONT {self.process.pid} lets "
                    "it go on)"
                )
        return f"worker process {self.process.pid}"

    def _say(self, message: Any) -> None:
        try:
            self.pipe.send(message)
        except OSError:
            raise self._lost() from None

    def _lost(self) -> RankLost:
        self.process.join(5)
        code = self.process.exitcode
        how = (
            f"was killed by {signal.Signals(-code).name}"
            if code and code < 0
            else f"ended with code {code}"
        )
        return RankLost(
            f"worker process {self.process.pid} {how}",
            "a round needs all its workers",
            "continue with --ckpt_path, with fewer --trainer.workers if memory ran out",
        )

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()
