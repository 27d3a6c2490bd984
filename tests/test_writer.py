"""A writer keeps the order, gathers rows, loses nothing, and is left alone once it fails. No clock is read: gates open and close."""

from __future__ import annotations

import threading
from itertools import chain

import pytest

from fl_lightning import writer as module
from fl_lightning.writer import Writer


class Recorder:
    """What is written, in the calls it came in; ``gate`` holds the first write back."""

    def __init__(self, *, most: int = 100, pause: float = 0.0, fails_at: int | None = None, limit: float = 20.0) -> None:
        self.calls: list[list[int | str]] = []
        self.errors: list[str] = []
        self.gate = threading.Event()
        self.fails_at = fails_at
        self.writer: Writer[int] = Writer(
            self.write, lambda error: self.errors.append(str(error)), limit=limit, most=most, pause=pause
        )

    def write(self, rows) -> None:
        assert self.gate.wait(20)
        if self.fails_at in rows:
            raise OSError("disk quota exceeded")
        self.calls.append(list(rows))

    def mark(self, name: str) -> None:
        self.writer.call(lambda: self.calls.append([name]))


def test_rows_gather_and_nothing_overtakes():
    it = Recorder(most=4)
    it.writer.start((lambda: it.calls.append(["open"]), 1.0))
    it.writer.put(0)
    while it.writer._jobs.qsize():  # the first write is at the gate
        pass
    for row in range(1, 10):
        it.writer.put(row)
    it.mark("figure")
    it.writer.put(10)
    it.gate.set()
    it.writer.flush()
    assert it.calls == [["open"], [0], [1, 2, 3, 4], [5, 6, 7, 8], [9], ["figure"], [10]]


def test_what_is_given_before_the_start_comes_after_the_opening():
    it = Recorder()
    it.mark("early")
    it.writer.put(1)
    it.writer.flush()  # nobody would answer: it does not wait
    it.gate.set()
    it.writer.start((lambda: it.calls.append(["open"]), 1.0))
    it.writer.close()
    assert it.calls == [["open"], ["early"], [1]]


def test_who_waits_ends_the_pause():
    it = Recorder(pause=1000.0)
    it.gate.set()
    it.writer.start()
    for row in range(20):
        it.writer.put(row)
        if row % 5 == 0:
            it.writer.flush()
    it.writer.close()
    assert list(chain(*it.calls)) == list(range(20))
    it.writer.put(20)  # after the end: begins anew
    it.writer.close()
    assert it.calls[-1] == [20]


def test_the_first_failure_is_the_last():
    it = Recorder(most=1, fails_at=2)
    it.gate.set()
    it.writer.start()
    for row in range(6):
        it.writer.put(row)
    it.mark("figure")
    it.writer.flush()
    it.writer.put(6)
    it.writer.close()
    assert (it.calls, it.errors) == ([[0], [1]], ["disk quota exceeded"])
    assert it.writer.over


def test_one_that_hangs_is_left_behind():
    it = Recorder(limit=0.2)
    it.writer.start()
    it.writer.put(0)
    it.writer.flush()
    assert it.errors == ["no answer in 0.2 s"]
    it.gate.set()  # it answers after all: too late for what comes next
    it.writer.put(1)
    it.writer.close()
    assert [1] not in it.calls
    assert len(it.errors) == 1


def test_an_owner_who_is_far_ahead_waits(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "FULL", 10)
    it = Recorder(most=1)
    it.gate.set()
    it.writer.start()
    waiting = []
    for row in range(200):
        it.writer.put(row)
        waiting.append(it.writer._jobs.qsize())
    it.writer.close()
    assert max(waiting) <= 11
    assert it.calls == [[row] for row in range(200)]


def test_rows_and_calls_in_their_thousands():
    it = Recorder(pause=0.001)
    it.gate.set()
    it.writer.start()
    given: list[int | str] = []
    for row in range(3000):
        it.writer.put(row)
        given.append(row)
        if row % 7 == 0:
            it.mark(f"after {row}")
            given.append(f"after {row}")
    it.writer.close()
    assert list(chain(*it.calls)) == given
