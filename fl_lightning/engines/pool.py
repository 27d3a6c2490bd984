"""Worker processes on one machine's CPU: forks of this process that train the clients of a round side by
side.

Each worker has one thread. A fork has the data and the module without copying them, so it costs milliseconds,
and it computes what this process would: a task holds all that a client may know. Large messages go through
memory that both sides share.
"""

from __future__ import annotations

import ctypes
import math
import multiprocessing
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from mmap import mmap
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from fl_lightning.data import FederatedData
from fl_lightning.engines.base import ClientResult, ClientTask, Engine, Units
from fl_lightning.engines.ranks import work
from fl_lightning.errors import RankLost
from fl_lightning.methods import Method
from fl_lightning.metrics import Mean

MIN_SHARED_BYTES = 2**26
"""Bytes of each of a worker's shared memories (one down, two up), at least; only what is used is taken. What
is larger is piped."""
AHEAD_BYTES = 2**27
"""Results come in any order and are handed on in that of the tasks: at most twice so many bytes wait, or the
uploads of four clients a worker."""
MAX_WAIT_SECONDS = (
    1.0  # seconds of one wait for an answer, so that a pause of the whole program counts as one of them
)
PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>
POLL_SECONDS = 0.002  # seconds between looks at who has finished, while there are results to hand on


class PoolEngine(Engine):
    """Deals the tasks of ``engine`` to worker processes.

    :meth:`start` comes before any thread of this process holds a lock.

    Args:
        timeout: seconds without any answer after which the workers at work are given up.

    Raises (from :meth:`train`):
        RankLost: a worker died, or none of those at work has answered for ``timeout`` seconds.
    """

    def __init__(
        self, engine: Engine, method: Method, data: FederatedData, workers: int, timeout: float = math.inf
    ) -> None:
        self.engine, self.method, self.data, self.size, self.timeout = engine, method, data, workers, timeout
        self.name = engine.name
        self.workers: list[Worker] = []

    def start(self) -> None:
        for _ in range(self.size):
            self.workers.append(Worker(self.engine, self.method, self.workers))

    def units(self, tasks: Sequence[ClientTask]) -> Units:
        return self.engine.units(tasks)

    def train(self, tasks: Sequence[ClientTask], units: Units | None = None) -> Iterator[ClientResult]:
        ahead = self._ahead(tasks)
        waiting = self._portions(tasks, self.units(tasks) if units is None else units, ahead)
        done: dict[int, ClientResult] = {}
        busy: dict[Worker, Units] = {}
        given, looked = 0, 0.0
        if not self.workers:
            raise RuntimeError(
                "the worker processes have ended, or were never started; a round needs them; call start()"
            )
        try:
            self._hand_out(waiting, tasks, busy, 2 * ahead)
            while given < len(tasks):
                if (
                    given not in done or monotonic() - looked > POLL_SECONDS
                ):  # who asks for results may take long with each
                    for worker in self._answering(busy, wait_for_it=given not in done):
                        portion = [at for unit in busy.pop(worker) for at in unit]
                        answer = worker.hear()
                        self._hand_out(waiting, tasks, busy, given + 2 * ahead)  # while results are read
                        done |= zip(portion, worker.take(answer, [tasks[at] for at in portion]), strict=True)
                    looked = monotonic()
                if given in done:
                    yield done.pop(given)
                    given += 1
                    self._hand_out(waiting, tasks, busy, given + 2 * ahead)
        finally:
            if busy:  # someone raised: what they are at is of no use
                self.close()

    def _hand_out(
        self, waiting: list[Units], tasks: Sequence[ClientTask], busy: dict[Worker, Units], end: int
    ) -> None:
        """Give portions that begin before the task at ``end`` to workers that have none."""
        for worker in self.workers:
            if waiting and worker not in busy and min(map(min, waiting[0])) < end:
                busy[worker] = waiting.pop(0)
                worker.give([[tasks[at] for at in unit] for unit in busy[worker]])

    def _ahead(self, tasks: Sequence[ClientTask]) -> int:
        """Return half of how many clients may be handed out from the one on whose turn it is."""
        largest = max([1, *(len(task.message) for task in tasks)])
        return max(2 * self.size, AHEAD_BYTES // largest)

    def _portions(self, tasks: Sequence[ClientTask], units: Units, ahead: int) -> list[Units]:
        """Return the units in portions, of each ``ahead`` tasks in turn the most work first, and each portion
        smaller than the one before: so the workers end together with what is left (guided self-scheduling,
        Polychronopoulos & Kuck, 1987). Messages of a portion have no more than ``MIN_SHARED_BYTES``."""
        efforts = {id(unit): sum(work(tasks[at], self.data.batch_size) for at in unit) for unit in units}
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
        """Return the workers that have answered; wait until one has if ``wait_for_it``.

        Raises:
            RankLost: none had for ``timeout`` seconds. Time in which this process was stopped itself does not
                count.
        """
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

    def close(self) -> None:
        for worker in self.workers:
            worker.end()
        self.workers.clear()


class Worker:
    """A worker process as its parent sees it.

    Args:
        engine: trains what it is given.
        others: forks that exist already; this one lets go of their pipes, so that each notices when this
            process is gone.
    """

    def __init__(self, engine: Engine, method: Method, others: Sequence[Worker]) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, there = context.Pipe()
        room = shared_bytes(method)
        self.down, self.ups = mmap(-1, room), (mmap(-1, room), mmap(-1, room))
        self.message = b""
        pipes = [self.pipe, *(other.pipe for other in others)]
        arguments = (engine, method, there, self.down, self.ups, pipes, os.getpid())
        self.process = context.Process(target=_serve, args=arguments, daemon=True)
        with warnings.catch_warnings():
            # Python 3.12 warns of threads that hold locks; torch's, the only ones by now, are not used by a
            # single-threaded fork
            warnings.simplefilter("ignore", DeprecationWarning)
            self.process.start()
        there.close()

    def give(self, units: Sequence[Sequence[ClientTask]]) -> None:
        messages = list({id(task.message): task.message for unit in units for task in unit}.values())
        index = {id(message): at for at, message in enumerate(messages)}
        same = len(messages) == 1 and messages[0] is self.message
        self.message = messages[0] if len(messages) == 1 else b""
        packed = [
            (
                [
                    (
                        o.client.id,
                        _pack(o.client.state),
                        index[id(o.message)],
                        len(o.labels),
                        o.round,
                        o.epochs,
                        o.steps,
                    )
                    for o in unit
                ],
                _joined([o.labels for o in unit]),
            )
            for unit in units
        ]
        self._say((None if same else _write(self.down, messages), packed))

    def hear(self) -> Answer:
        """Wait for the answer to the portion that was given last, and return it.

        Raises:
            RankLost: it died.
            Exception: what its clients' work raised.
        """
        try:
            answer = self.pipe.recv()
        except (EOFError, OSError):
            raise self._lost() from None
        if isinstance(answer, Answer):
            return answer
        error, where = answer
        raise error from RuntimeError(f"in a worker process:\n{where}")

    def take(self, answer: Answer, tasks: Sequence[ClientTask]) -> list[ClientResult]:
        """Return the results in an answer.

        Its memory is written to again in the portion after the next, so it is read before that one is given.
        """
        results = []
        uploads = _read(self.ups[answer.memory], answer.places)
        for task, upload, (kept, losses, steps) in zip(tasks, uploads, answer.kept, strict=True):
            state = _unpack(kept)
            client = replace(task.client, state=state)
            results.append(ClientResult(client, upload, state, losses, steps, verified=upload))
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
            f"was killed by {signal.Signals(-code).name}" if code and code < 0 else f"ended with code {code}"
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


class Answer(NamedTuple):
    """The results of one portion.

    Args:
        memory: which of the two memories for uploads it lies in.
        places: of each upload there.
        kept: of each client: its state, losses, steps.
    """

    memory: int
    places: list[tuple[int, int] | bytes]
    kept: list[tuple[bytes, dict[str, Mean], int]]


def _serve(
    engine: Engine,
    method: Method,
    pipe: Connection,
    down: mmap,
    ups: Sequence[mmap],
    pipes: Sequence[Connection],
    parent: int,
) -> None:
    """Answer portions until the pipe closes.

    Signals are ignored: the parent handles them and ends its workers, and they end with it.
    """
    end_with(parent)
    torch.set_num_threads(1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL if number == signal.SIGCHLD else signal.SIG_IGN)
    for other in pipes:
        other.close()
    data: FederatedData = engine.data  # type: ignore[attr-defined]
    messages: list[bytes] = []
    memory = 0
    answer: Answer | tuple[Exception, str]
    while True:
        try:
            blobs, packed = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)
        messages = messages if blobs is None else _read(down, blobs)
        try:
            results: list[ClientResult] = []
            for unit, labels in packed:
                each = _parted(labels, [length for *_, length, _, _, _ in unit])
                tasks = [
                    ClientTask(data.client(id, _unpack(state)), round, messages[at], own, epochs, steps)
                    for (id, state, at, _, round, epochs, steps), own in zip(unit, each, strict=True)
                ]
                results += engine.train(tasks, [list(range(len(tasks)))])
            kept = [(_pack(result.state), result.losses, result.steps) for result in results]
            memory = 1 - memory
            answer = Answer(memory, _write(ups[memory], [result.upload for result in results]), kept)
            results = []  # or they are held until the next portion has been trained
        except Exception as error:
            answer = _sendable(error), "".join(traceback.format_exception(error))
        sys.stdout.flush()
        try:
            pipe.send(answer)
        except OSError:  # the parent is gone
            os._exit(0)


def shared_bytes(method: Method) -> int:
    """Return the bytes of each memory that a worker shares."""
    state = sum(tensor.numel() * tensor.element_size() for tensor in method.server.values())
    return MIN_SHARED_BYTES + state


def end_with(parent: int) -> None:
    """Have Linux kill this process as soon as its parent is gone, however that came about and whatever this
    one is at."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before the call
        os._exit(1)


def _joined(labels: Sequence[Tensor]) -> list[np.ndarray]:
    """Return one array instead of many, where they are of one kind."""
    kinds = {(each.dtype, each.shape[1:]) for each in labels}
    return [each.numpy() for each in ([torch.cat(list(labels))] if len(kinds) == 1 else labels)]


def _parted(arrays: Sequence[np.ndarray], lengths: Sequence[int]) -> Sequence[Tensor]:
    tensors = [torch.from_numpy(array) for array in arrays]
    return tensors[0].split(list(lengths)) if len(tensors) == 1 else tensors


def _write(memory: mmap, blobs: Sequence[bytes]) -> list[tuple[int, int] | bytes]:
    """Return where each blob is in the shared memory, or the blob itself where there is no room."""
    places: list[tuple[int, int] | bytes] = []
    offset = 0
    for blob in blobs:
        if offset + len(blob) > len(memory):
            places.append(blob)
            continue
        memory[offset : offset + len(blob)] = blob
        places.append((offset, offset + len(blob)))
        offset += len(blob)
    return places


def _read(memory: mmap, places: Sequence[tuple[int, int] | bytes]) -> list[bytes]:
    return [place if isinstance(place, bytes) else memory[place[0] : place[1]] for place in places]


def _pack(state: dict[str, Tensor]) -> bytes:
    return save({name: tensor.detach().contiguous() for name, tensor in state.items()}) if state else b""


def _unpack(packed: bytes) -> dict[str, Tensor]:
    return load(packed) if packed else {}


def _sendable(error: Exception) -> Exception:
    """Return the error if it survives the pipe, else one that says the same."""
    try:
        ForkingPickler.loads(ForkingPickler.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
