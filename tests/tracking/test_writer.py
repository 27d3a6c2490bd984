"""A writer keeps the order, gathers rows, loses nothing, and tries again what failed. Clocks are
set by hand; gates open and close."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from itertools import chain

import pytest

from fl_lightning.tracking import writer as module
from fl_lightning.tracking.writer import AwakeTimer, Writer


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(module, "MAX_RETRY_SECONDS", 0.02)
    monkeypatch.setattr(module, "HURRIED_RETRY_SECONDS", 0.01)


def wait_for(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


class Recorder:
    """What is written, in the calls it came in; ``gate`` holds the first write back."""

    def __init__(self, *, max_rows: int = 100, pause: float = 0.0, limit: float = 20.0) -> None:
        self.calls: list[list[int | str]] = []
        self.errors: list[str] = []
        self.gate = threading.Event()
        self.fails: set[int] = set()  # rows that are refused
        self.writer: Writer[int] = Writer(
            self.write,
            lambda error: self.errors.append(str(error)),
            lambda: self.errors.append("works again"),
            limit=limit,
            max_rows=max_rows,
            pause=pause,
        )

    def write(self, rows) -> None:
        assert self.gate.wait(20)
        if self.fails & {*rows}:
            raise OSError("disk quota exceeded")
        self.calls.append(list(rows))

    def mark(self, name: str) -> None:
        self.writer.call(lambda: self.calls.append([name]))


def test_rows_gather_and_nothing_overtakes():
    it = Recorder(max_rows=4)
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


def test_what_failed_is_tried_again_in_its_order():
    it = Recorder(max_rows=1)
    it.gate.set()
    it.fails = {2}
    it.writer.start()
    for row in range(6):
        it.writer.put(row)
    it.mark("end")
    assert not it.writer.flush()
    assert (it.calls, it.errors, it.writer.waiting) == ([[0], [1]], ["disk quota exceeded"], 4)
    it.fails = set()
    it.writer.put(6)
    assert it.writer.close()
    assert it.calls == [[0], [1], [2], [3], [4], [5], ["end"], [6]]
    assert it.errors == ["disk quota exceeded", "works again"]
    assert it.writer.waiting == 0


def test_the_opening_is_tried_again_too():
    it, tries = Recorder(), []

    def open_store():
        tries.append(1)
        if len(tries) < 4:
            raise ConnectionError("refused")

    it.gate.set()
    it.writer.start((open_store, 1.0))
    it.writer.put(1)
    wait_for(lambda: it.calls == [[1]])
    assert it.errors == ["refused", "works again"]


def test_an_optional_call_holds_up_nothing_and_gets_another_chance():
    it, missing = Recorder(), [True]

    def copy():
        if missing:
            raise FileNotFoundError("gone")
        it.calls.append(["copied"])

    it.gate.set()
    it.writer.start()
    it.writer.call(copy, optional=True)
    it.writer.put(1)
    assert it.writer.flush()
    assert (it.calls, it.errors, it.writer.put_aside) == ([[1]], [], 1)
    missing.clear()
    assert it.writer.close()
    assert (it.calls, it.writer.put_aside) == ([[1], ["copied"]], 0)


def test_who_waits_for_a_dead_store_waits_for_one_more_try(monkeypatch: pytest.MonkeyPatch):
    """Not for the pause between the tries, and not for all that was given to be tried one by
    one."""
    monkeypatch.setattr(module, "FIRST_RETRY_SECONDS", 1000.0)
    monkeypatch.setattr(module, "MAX_RETRY_SECONDS", 1000.0)
    monkeypatch.setattr(module, "HURRIED_RETRY_SECONDS", 0.4)
    tries: list[int] = []

    def write(rows) -> None:
        tries.append(len(rows))
        raise OSError("dead")

    errors: list[BaseException] = []
    writer: Writer[int] = Writer(write, errors.append, limit=20.0, max_rows=1)
    writer.start()
    for row in range(50):
        writer.put(row)
    wait_for(lambda: len(tries) == 1)
    assert not writer.flush()
    assert len(tries) == 2
    assert not writer.close()
    assert len(tries) <= 4
    assert len(errors) == 1
    assert writer.waiting == 50
    writer.put(50)
    assert len(tries) <= 4, "after the end nothing is tried any more"


def test_a_slow_call_is_named_and_loses_nothing():
    it = Recorder(limit=0.2)
    it.writer.start()
    it.writer.put(0)
    assert not it.writer.flush()
    it.writer.put(1)  # the owner goes on
    assert it.errors == ["no answer in 0.2 s"]
    it.gate.set()  # it answers after all
    assert it.writer.close()
    assert list(chain(*it.calls)) == [0, 1]
    assert it.errors == ["no answer in 0.2 s", "works again"]


def test_one_that_never_answers_keeps_nobody():
    it = Recorder(limit=0.2)
    it.writer.start()
    it.writer.put(0)
    it.writer.put(1)
    assert not it.writer.close()
    it.writer.put(2)
    assert not it.writer.close() or it.calls == []
    assert it.errors == ["no answer in 0.2 s"]
    it.gate.set()


def test_a_pause_of_the_process_is_not_the_stores(monkeypatch: pytest.MonkeyPatch):
    now = [0.0]
    monkeypatch.setattr(module, "monotonic", lambda: now[0])
    timer = AwakeTimer(step=1.0)
    for _ in range(5):
        now[0] += 0.5
        timer.seconds()
    now[0] += 3600
    assert timer.seconds() == 3.5
    it = Recorder(limit=30.0)
    it.writer.start()
    for row in range(4):
        it.writer.put(row)
        wait_for(lambda: it.writer._at_work)
        now[0] += 65  # Ctrl-Z while the first call is at work
    assert it.errors == []
    for row in range(4, 12):  # it really is slow: the owner sees time pass
        it.writer.put(row)
        now[0] += 4
    assert it.errors == ["no answer in 30 s"]
    it.gate.set()
    wait_for(lambda: it.writer.waiting == 0)
    assert it.writer.close()
    assert list(chain(*it.calls)) == list(range(12))


STOPPED = """
import sys, time
from fl_lightning.tracking.writer import Writer
def call(rows):
    print("at work", flush=True)
    time.sleep(2.0)
writer = Writer(call, lambda error: print("failed", error), limit=3.0)
writer.start()
writer.put(1)
print(writer.close(), writer.waiting, flush=True)
"""


@pytest.mark.slow
@pytest.mark.essential
def test_a_process_that_is_stopped_while_a_call_is_at_work():
    process = subprocess.Popen([sys.executable, "-c", STOPPED], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    assert process.stdout.readline() == "at work\n"
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(4.0)
    os.kill(process.pid, signal.SIGCONT)
    assert process.communicate(timeout=60)[0] == "True 0\n"


def test_an_owner_who_is_far_ahead_waits(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MAX_WAITING_JOBS", 10)
    it = Recorder(max_rows=1)
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
