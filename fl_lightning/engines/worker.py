"""What a worker process does: it trains the clients that its parent hands it, and says what they
gave.

Where the server needs sums alone, it also receives their uploads as the server would, and adds them
up until its parent asks for the sums. Messages down, uploads and sums up lie in memory that both
processes share. A message to all clients and the server's state lie in memory that all workers
share.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Collection, Sequence
from dataclasses import replace
from mmap import mmap
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from fl_lightning.aggregation.elsewhere import Received, receive_here
from fl_lightning.aggregation.exact_sum import ExactSum
from fl_lightning.aggregation.intake import AddedUploads
from fl_lightning.client import Client
from fl_lightning.data import FederatedData
from fl_lightning.engines.base import ClientResult, ClientTask, Engine
from fl_lightning.methods import Method
from fl_lightning.metrics import Mean
from fl_lightning.support.memory import keep_freed_memory
from fl_lightning.support.tensor_bytes import raw_bytes, separate

MIN_SHARED_BYTES = 2**26
"""Bytes of each of a worker's shared memories (one down, two up), at least; only what is used is
taken. What is larger is piped."""
PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>
DIFFERS = object()
"""The value of an attribute that workers may have in different ways."""
ALIGNMENT = 64  # bytes, at which blobs begin in a shared memory: tensors of any type can lie there


Place: TypeAlias = "tuple[int, int] | bytes"
"""Where bytes begin and end in a shared memory, or the bytes."""


class ByValue(ForkingPickler):
    """What the pipes of ``multiprocessing`` write objects with, but tensors are copied and not
    shared."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return NotImplemented
        flat = value.detach().cpu().contiguous()
        return tensor_of, (bytearray(bytes_of(flat)), flat.dtype, flat.shape)


class Opening(NamedTuple):
    """What a worker is told of the method when a round begins.

    Args:
        adds: whether it adds up the uploads of its clients, as the server's half would.
        attributes: those of the method, less ``server``, that were set since the workers were
            forked, such as ``cohort``: by name, as a pipe between processes takes them.
        removed: names of attributes that the method had then and has no more.
        entries: of the server's state, if it adds: name, type and shape of each.
        places: of their values, in the memory that all workers share.
    """

    adds: bool
    attributes: bytes
    removed: list[str]
    entries: list[tuple[str, torch.dtype, torch.Size]]
    places: list[Place]

    @classmethod
    def of(
        cls,
        method: Method,
        forked: dict[str, Any],
        board: mmap | None,
        without: Collection[str] = (),
    ) -> Opening:
        """Return it for the present round of the server's half of a method.

        Args:
            forked: the method's attributes as all workers have them. Those that are found to differ
                are marked, and sent in every round from then on: one that is set back has to
                arrive too, and a worker without clients hears nothing of a round.
            board: what all workers read the server's state from, if they add; it is written there.
            without: attributes that stay what they are in the workers.

        Raises:
            Exception: an attribute that was set since cannot be sent.
        """
        found = {
            name: value
            for name, value in vars(method).items()
            if name not in {"server", *without} and forked.get(name, DIFFERS) is not value
        }
        removed = [name for name in forked if name not in vars(method)]
        forked |= dict.fromkeys([*found, *removed], DIFFERS)
        attributes = bytes(ByValue.dumps(found))
        if board is None:
            return cls(False, attributes, removed, [], [])
        server = {name: tensor.contiguous() for name, tensor in method.server.items()}
        entries = [(name, tensor.dtype, tensor.shape) for name, tensor in server.items()]
        places = write(board, [bytes_of(tensor) for tensor in server.values()])
        return cls(True, attributes, removed, entries, places)


def unsendable(method: Method, forked: dict[str, Any]) -> list[str]:
    """Return which of a method's attributes that workers may have in different ways no pipe between
    processes takes."""
    found = []
    for name in [name for name in vars(method) if forked.get(name) is DIFFERS]:
        try:
            ByValue.dumps(vars(method)[name])
        except Exception:  # whatever an attribute raises that somebody has set
            found.append(name)
    return found


def exchanged_examples(client: Client, data: FederatedData) -> dict[str, np.ndarray]:
    """Return the examples of a client where a stressor has put others in place of those that it was
    dealt, as fields of a client."""
    dealt = data.client(client.id)
    given = {"train": client.train, "val": client.val}
    # a sixteenth of the time of array_equal, for each client of each round
    return {n: held for n, held in given.items() if held.tobytes() != getattr(dealt, n).tobytes()}


class Portion(NamedTuple):
    """Clients that are trained one after another, in units.

    Args:
        messages: the broadcasts.
        shared: whether they lie where all workers read them.
        units: of each unit its tasks, less the labels, and these as a few arrays.
        opening: of the round, if this is its first portion here.
    """

    messages: list[Place]
    shared: bool
    units: list[tuple[list[tuple[Any, ...]], list[np.ndarray]]]
    opening: Opening | None = None


class Answer(NamedTuple):
    """The results of one portion.

    Args:
        memory: which of the two memories for uploads it lies in.
        places: of each upload there; none where uploads are added up here.
        kept: of each client: its state, losses, steps, and what became of its upload here.
    """

    memory: int
    places: list[Place]
    kept: list[tuple[bytes, dict[str, Mean], int, Received | None]]


class AddedHere(NamedTuple):
    """The sums over the uploads that a worker has added up, as :meth:`Sums.merged` yields them.

    Args:
        parts: of each its name, the number of clients, their weight and the largest weight of one.
        places: of their integers in the first of the memories for uploads.
    """

    parts: list[tuple[str, int, int, int]]
    places: list[Place]


class Receiver:
    """The server's half of a round in a worker process.

    Args:
        method: the worker's own, whose server's state is brought up to date.
        board: the server's state is read there.
        up: the sums are made there, for the parent to read.
    """

    def __init__(self, method: Method, board: mmap, up: mmap) -> None:
        self.method, self.board, self.up = method, board, up
        self.uploads: AddedUploads | None = None
        self.places: dict[int, tuple[int, int]] = {}  # of sums, by address

    def open(self, opening: Opening) -> None:
        """Begin a round."""
        for name, value in ByValue.loads(opening.attributes).items():
            setattr(self.method, name, value)
        for name in opening.removed:
            vars(self.method).pop(name, None)
        self.uploads = None
        if not opening.adds:
            return
        found = zip(opening.entries, opening.places, strict=True)
        self.method.server = {
            name: tensor_at(self.board, place, dtype, shape)
            for (name, dtype, shape), place in found
        }
        uploads = self.method.intake()
        assert isinstance(uploads, AddedUploads), "it is one in the parent's process"
        self.uploads, self.places = uploads, {}
        uploads.added().empty = self._empty

    def _empty(self, size: int, cohort: int) -> ExactSum:
        """Return a sum that nothing has been added to, in the shared memory if there is room."""
        begin = _aligned(max([0, *(end for _, end in self.places.values())]))
        place = begin, begin + 8 * size
        if place[1] > len(self.up):
            return ExactSum(size, cohort)
        integers = tensor_at(self.up, place, torch.int64).zero_()
        self.places[integers.data_ptr()] = place
        return ExactSum.of(integers, cohort)

    def receive(self, result: ClientResult, returns: bool) -> Received:
        """Take one client's upload."""
        assert self.uploads is not None, "open comes first"
        if not returns:
            return Received(len(result.upload))
        return receive_here(self.method, result.upload, result.client, self.uploads)

    def close(self) -> AddedHere:
        """End the round, and return its sums."""
        uploads, self.uploads = self.uploads, None
        assert uploads is not None, "open comes first"
        parts, places = [], []
        for name, total, weight, most in uploads.added().merged():
            parts.append((name, total.count, weight, most))
            place: Place | None = self.places.get(total.integers.data_ptr())
            places.append(bytes(bytes_of(total.integers)) if place is None else place)
        return AddedHere(parts, places)


def serve(
    engine: Engine,
    method: Method,
    pipe: Connection,
    boards: tuple[mmap, mmap],
    down: mmap,
    ups: Sequence[mmap],
    pipes: Sequence[Connection],
    parent: int,
) -> None:
    """Answer portions, and None with the sums of a round, until the pipe closes.

    Signals are ignored: the parent handles them and ends its workers, and they end with it.
    """
    end_with(parent)
    torch.set_num_threads(1)
    keep_freed_memory()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL if number == signal.SIGCHLD else signal.SIG_IGN)
    for other in pipes:
        other.close()
    data: FederatedData = engine.data  # type: ignore[attr-defined]
    common, board = boards
    memory, receiver = 0, Receiver(method, board, ups[0])
    answer: Answer | AddedHere | tuple[BaseException, str]
    while True:
        try:
            portion: Portion | None = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)
        try:
            if portion is None:
                answer = receiver.close()
            else:
                if portion.opening is not None:
                    receiver.open(portion.opening)
                memory = 1 - memory
                source = common if portion.shared else down
                messages = [view(source, place) for place in portion.messages]
                answer = _trained(engine, data, portion, messages, receiver, memory, ups[memory])
        except (
            BaseException
        ) as error:  # sys.exit in a client's work ends the run, as in one process
            answer = sendable(error), "".join(traceback.format_exception(error))
        sys.stdout.flush()
        try:
            pipe.send(answer)
        except OSError:  # the parent is gone
            os._exit(0)


def _trained(
    engine: Engine,
    data: FederatedData,
    portion: Portion,
    messages: Sequence[bytes | memoryview],
    receiver: Receiver,
    memory: int,
    up: mmap,
) -> Answer:
    """Train the clients of a portion."""
    kept, uploads = [], []
    for unit, labels in portion.units:
        each = parted(labels, [length for _, _, _, _, length, *_ in unit])
        tasks = [
            ClientTask(
                replace(data.client(id, unpack(state)), **examples),
                round,
                messages[at],
                own,
                epochs,
                steps,
                returns,
            )
            for (id, examples, state, at, _, round, epochs, steps, returns), own in zip(
                unit, each, strict=True
            )
        ]
        results = engine.train(tasks, [list(range(len(tasks)))])
        for task in tasks:
            result = next(results)
            received = (
                receiver.receive(result, task.returns) if receiver.uploads is not None else None
            )
            uploads += [result.upload] if received is None else []
            kept.append((pack(result.state), result.losses, result.steps, received))
            del result  # its upload, before the next client makes one
    return Answer(memory, write(up, uploads), kept)


def shared_bytes(method: Method) -> int:
    """Return the bytes of each memory that a worker shares: there is room for the server's state,
    or for sums over uploads as large, in int64."""
    state = sum(tensor.numel() * max(tensor.element_size(), 8) for tensor in method.server.values())
    return MIN_SHARED_BYTES + state


def end_with(parent: int) -> None:
    """Have Linux kill this process as soon as its parent is gone, however that came about and
    whatever this one is at."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before the call
        os._exit(1)


def joined(labels: Sequence[Tensor]) -> list[np.ndarray]:
    """Return one array instead of many, where they are of one kind."""
    kinds = {(each.dtype, each.shape[1:]) for each in labels}
    return [each.numpy() for each in ([torch.cat(list(labels))] if len(kinds) == 1 else labels)]


def parted(arrays: Sequence[np.ndarray], lengths: Sequence[int]) -> Sequence[Tensor]:
    tensors = [torch.from_numpy(array) for array in arrays]
    return tensors[0].split(list(lengths)) if len(tensors) == 1 else tensors


def write(memory: mmap, blobs: Sequence[bytes | memoryview]) -> list[Place]:
    """Return where each blob is in the shared memory, or the blob itself where there is no room."""
    places: list[Place] = []
    offset = 0
    for blob in blobs:
        if offset + len(blob) > len(memory):
            places.append(bytes(blob))
            continue
        memory[offset : offset + len(blob)] = blob
        places.append((offset, offset + len(blob)))
        offset += _aligned(len(blob))
    return places


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def read(memory: mmap, places: Sequence[Place]) -> list[bytes]:
    """Return copies of what lies at these places."""
    return [bytes(view(memory, place)) for place in places]


def view(memory: mmap, place: Place) -> bytes | memoryview:
    """Return what lies at a place, where it is."""
    return place if isinstance(place, bytes) else memoryview(memory)[place[0] : place[1]]


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a tensor in one piece, of any type."""
    return raw_bytes(tensor).numpy().data if tensor.numel() else memoryview(b"")


def tensor_of(
    data: bytearray | memoryview, dtype: torch.dtype, shape: Sequence[int] = (-1,)
) -> Tensor:
    """Return a tensor of these bytes, where they are."""
    flat = torch.frombuffer(data, dtype=dtype) if len(data) else torch.empty(0, dtype=dtype)
    return flat.view(shape)


def tensor_at(
    memory: mmap, place: Place, dtype: torch.dtype, shape: Sequence[int] = (-1,)
) -> Tensor:
    """Return the tensor that lies there, where it is."""
    found = view(memory, place)
    return tensor_of(bytearray(found) if isinstance(found, bytes) else found, dtype, shape)


def pack(state: dict[str, Tensor]) -> bytes:
    return save(separate(state)) if state else b""


def unpack(packed: bytes) -> dict[str, Tensor]:
    return load(packed) if packed else {}


def sendable(error: BaseException) -> BaseException:
    """Return the error if it survives the pipe, else one that says the same."""
    try:
        ForkingPickler.loads(ForkingPickler.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
