"""A process that has imported torch, Lightning and MLflow, and forks one job after another: each
begins at once, and not after the seconds that these imports take.

``python -m fl_lightning.study.execute.fork_server`` reads a line of JSON for each job from its
standard input and writes a line with the exit code of each to its standard output. A job leads a
session of its own and reads from a pipe that ends with the server, as the server's ends with the
pool: whatever ends one of them ends the jobs too, as after SIGTERM, each with its checkpoint.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from fl_lightning.study.execute.worker import leave_with_parent
from fl_lightning.support.disk import open_own
from fl_lightning.support.imports import import_quickly
from fl_lightning.tracking import mlflow_store

ANSWER_SECONDS = 10.0
"""Seconds that a server has to end, or to end a job."""
NO_MLFLOW = "--trainer.logger=false"


class ForkServer:
    """The pool's half.

    Args:
        environment: variables of the server and of its jobs.
        held: file descriptors that it and its jobs keep open.
        log: the file that its own errors go to.
    """

    def __init__(self, environment: Mapping[str, str], held: Sequence[int], log: IO[bytes]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=dict(environment),
            start_new_session=True,
            pass_fds=held,
        )
        self.jobs: list[ForkedJob] = []
        self.unread = b""

    def start(self, args: Sequence[str], log: Path) -> ForkedJob:
        """Fork a job.

        Args:
            args: the command line after ``python -m fl_lightning``.
            log: the file that its output is appended to.
        """
        job = ForkedJob(self, len(self.jobs))
        self.jobs.append(job)
        self.tell({"job": job.number, "args": [*args], "log": str(log.absolute())})
        return job

    def tell(self, request: Mapping[str, Any]) -> None:
        """Write a line to the server; one that is gone is noticed when it is listened to."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass

    def listen(self, seconds: float) -> None:
        """Wait at most so long for an answer, and take the exit codes that there are."""
        assert self.process.stdout is not None
        pipe = self.process.stdout.fileno()
        while select.select([pipe], [], [], seconds)[0]:
            answer = os.read(pipe, 1 << 16)
            if not answer:
                code = self.process.wait() or 1
                for job in self.jobs:
                    job.returncode = code if job.returncode is None else job.returncode
                return
            *lines, self.unread = (self.unread + answer).split(b"\n")
            for line in lines:
                ended = json.loads(line)
                self.jobs[ended["job"]].returncode = ended["code"]
            seconds = 0.0

    def close(self) -> None:
        """End the server, one that does not answer too; jobs that still run stop."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):  # it is gone
            self.process.stdin.close()
        try:
            self.process.wait(ANSWER_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


class ForkedJob:
    """A job of a server, as :class:`subprocess.Popen` shows a process.

    Args:
        server: the server that forks it.
        number: its number there.
    """

    def __init__(self, server: ForkServer, number: int) -> None:
        self.server, self.number = server, number
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return its exit code, minus the signal's number if one ended it; None while it runs."""
        if self.returncode is None:
            self.server.listen(0.0)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Return its exit code once it has ended.

        Raises:
            subprocess.TimeoutExpired: it still runs after so many seconds.
        """
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired(f"job {self.number}", timeout)
            self.server.listen(left)
        assert self.returncode is not None
        return self.returncode

    def terminate(self) -> None:
        """Tell it to stop."""
        self.server.tell({"job": self.number, "signal": signal.SIGTERM})

    def kill(self) -> None:
        """End it and all processes of its session; if the server does not answer, end the server,
        with which its jobs stop."""
        self.server.tell({"job": self.number, "signal": signal.SIGKILL})
        try:
            self.wait(ANSWER_SECONDS)
        except subprocess.TimeoutExpired:
            self.server.process.kill()


def serve() -> list[str] | None:
    """Fork jobs until the standard input ends; return the command line in the process of a job, and
    None in the server's."""
    import_quickly("fl_lightning.cli.parser")
    gc.freeze()  # pages that no collection touches are shared with the jobs
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    pids: dict[int, int] = {}
    """Process of each job that runs, by its number."""
    pipes: dict[int, int] = {}
    """The end of its pipe that is held here."""
    unread = b""
    while True:
        ready = select.select([0, woken], [], [])[0]
        if woken in ready:
            os.read(woken, 1 << 16)
        for number, pid in list(pids.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del pids[number]
                os.close(pipes.pop(number))
                _answer({"job": number, "code": os.waitstatus_to_exitcode(status)})
        if 0 not in ready:
            continue
        asked = os.read(0, 1 << 16)
        if not asked:
            return None
        *lines, unread = (unread + asked).split(b"\n")
        for request in map(json.loads, lines):
            number = request["job"]
            if "signal" in request:
                _tell(pids.get(number), request["signal"])
                continue
            if NO_MLFLOW not in request["args"]:
                mlflow_store.prepare_with_database()
            its_end, pipes[number] = os.pipe()
            with warnings.catch_warnings():
                # the threads of a BLAS library know forks
                warnings.simplefilter("ignore", DeprecationWarning)
                pids[number] = os.fork()
            if pids[number] == 0:
                for other in (woken, wake, *pipes.values()):
                    os.close(other)
                _become(request["log"], its_end)
                return list(request["args"])
            os.close(its_end)


def _answer(ended: Mapping[str, int]) -> None:
    os.write(1, json.dumps(ended).encode() + b"\n")


def _tell(pid: int | None, number: int) -> None:
    # it may have ended by itself; a process that was not waited for keeps its number
    if pid is not None:
        (os.killpg if number == signal.SIGKILL else os.kill)(pid, number)


def _become(log: str, pipe: int) -> None:
    """Give this process, just forked, what one that was started has of its own."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    with open_own(Path(log), "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.dup2(pipe, 0)
    os.close(pipe)
    gc.unfreeze()
    threading.Thread(target=leave_with_parent, args=[0], daemon=True, name="parent").start()


if __name__ == "__main__":
    command = serve()
    if command is not None:
        sys.argv[1:] = command
        runpy.run_module("fl_lightning", run_name="__main__", alter_sys=True)
