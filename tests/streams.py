"""A card's streams on a CPU: who reads and writes what on which of them, and whether anything says that it
comes in this order.

Operations happen at once, as ever on a CPU, so results say nothing. But each is noted with the stream that it
would be queued on, and with what that stream has waited for by then (a vector clock: Lamport, 1978; Fidge,
1988). ``races`` names every operation that meets another one which it has not waited for: on one tensor, or
on memory that torch's allocator would give away a second time: that of a tensor which nobody holds any more,
to the next one who asks on the stream on which it was made.

Seen are operations on tensors. What is read through ``.numpy()`` or ``.tolist()`` is not.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Clock = dict  # stream -> operations of it that are known to be done before what comes next


def merge(one: Clock, other: Clock) -> None:
    for stream, count in other.items():
        one[stream] = max(one.get(stream, 0), count)


class Stream:
    def __init__(self, card):
        self.card, self.device, self.clock = card, torch.device("cpu"), {}
        card.streams.append(self)

    def wait_stream(self, other):
        merge(self.clock, card_clock(other))

    def wait_event(self, event):
        merge(self.clock, event.clock)

    def synchronize(self):
        merge(self.card.host, self.clock)


def card_clock(stream: Stream) -> Clock:
    return {**stream.card.host, **stream.clock}


class Event:
    def __init__(self, card):
        self.card, self.clock = card, {}

    def record(self):
        self.clock = card_clock(self.card.now)


class Memory:
    """A storage: the stream that it was made on, its last write and the reads since, each as stream -> its
    count then."""

    def __init__(self, ref: StorageWeakRef, stream: Stream | None):
        self.ref, self.stream = ref, stream
        self.writes, self.reads = {}, {}

    def uses(self) -> Clock:
        both = dict(self.writes)
        merge(both, self.reads)
        return both


class Card(TorchDispatchMode):
    def __init__(self, monkeypatch):
        super().__init__()
        self.streams, self.host, self.races = [], {}, []
        self.now = self.default = Stream(self)
        self.memory: dict[int, Memory] = {}
        self.lent: dict[Stream, dict[int, Memory]] = defaultdict(
            dict
        )  # made on this stream, used on another one too
        self.operations = defaultdict(set)
        monkeypatch.setattr(torch.cuda, "Stream", lambda *_: Stream(self))
        monkeypatch.setattr(torch.cuda, "Event", lambda *_: Event(self))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: self.now)
        monkeypatch.setattr(torch.cuda, "stream", self.current)

    @contextmanager
    def current(self, stream):
        before, self.now = self.now, stream
        try:
            yield
        finally:
            self.now = before

    def synchronize(self):
        for stream in self.streams:
            stream.synchronize()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = operation(*args, **kwargs)
        read, written = given(operation, args, kwargs)
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        known = {key(tensor) for tensor in [*read, *written]}
        if operation.namespace == "profiler" or (not written and made and all(key(t) in known for t in made)):
            return out  # a view: nobody looks at the values
        stream = self.now
        merge(stream.clock, self.host)
        stream.clock[stream] = stream.clock.get(stream, 0) + 1
        self.operations[stream].add(str(operation))
        for tensor in read:
            self._meet(stream, operation, self._of(tensor), write=False)
        for tensor in written:
            self._meet(stream, operation, self._of(tensor), write=True)
        for tensor in made:
            if key(tensor) not in known:
                self._ask(stream, operation)
                self._meet(stream, operation, self._of(tensor, stream), write=True)
        if any(isinstance(leaf, (bool, int, float)) for leaf in tree_leaves(out)):
            stream.synchronize()
        return out

    def _of(self, tensor: Tensor, stream: Stream | None = None) -> Memory:
        ref = StorageWeakRef(
            tensor.untyped_storage()
        )  # while it is held no other storage gets the same address
        return self.memory.setdefault(ref.cdata, Memory(ref, stream))

    def _meet(self, stream: Stream, operation: object, memory: Memory, write: bool) -> None:
        self._compare(
            stream, memory.uses() if write else memory.writes, f"{operation} meets another on one tensor"
        )
        if memory.stream not in (stream, None):
            self.lent[memory.stream][memory.ref.cdata] = memory
        if write:
            memory.writes, memory.reads = {stream: stream.clock[stream]}, {}
        else:
            memory.reads[stream] = stream.clock[stream]

    def _ask(self, stream: Stream, operation: object) -> None:
        """Memory on this stream: any of it that is free by now may be what it gets."""
        for address, memory in list(self.lent[stream].items()):
            if memory.ref.expired():
                del self.lent[stream][address]
                self._compare(stream, memory.uses(), f"{operation} gets memory that another still uses")

    def _compare(self, stream: Stream, uses: Clock, what: str) -> None:
        if any(stream.clock.get(other, 0) < count for other, count in uses.items()):
            self.races.append(what)


def key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def given(operation, args, kwargs) -> tuple[list[Tensor], list[Tensor]]:
    """Tensors that an operation reads, and those that it writes to."""
    read, written = [], []
    for number, argument in enumerate(operation._schema.arguments):
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        writes = argument.alias_info is not None and argument.alias_info.is_write
        (written if writes else read).extend(leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
    return read, written
