"""Commands of this program in processes of their own, a few at a time, and the threads and GPUs of
each.

Whatever ends the pool ends them too, each with its checkpoint.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from fl_lightning.errors import InputError
from fl_lightning.run.interrupts import Interrupts
from fl_lightning.study.execute.fork_server import ForkedJob, ForkServer
from fl_lightning.support.disk import open_own
from fl_lightning.support.redaction import redact_arguments

PROGRAM = (sys.executable, "-m", "fl_lightning.study.execute.worker")
TAIL_LINES = 5
"""Lines of a log that are shown when its job failed."""
POLL_SECONDS = 0.2
"""Seconds between two looks at the processes."""
STOP_SECONDS = 90.0
"""Seconds that a process has to write its checkpoint once it is told to stop."""


@dataclass(frozen=True)
class Job:
    """One command.

    Args:
        name: the name of its cell.
        args: the command line after ``python -m fl_lightning``.
        log: the file that its output is appended to.
        environment: its variables beside those of this process.
    """

    name: str
    args: list[str]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)

    def tail(self) -> list[str]:
        """Return the last lines of its log."""
        try:
            text = self.log.read_text(errors="replace")
        except OSError:
            return []
        return [line.rstrip() for line in text.splitlines() if line.strip(" ^~")][-TAIL_LINES:]


def fit_arguments(
    args: Sequence[str],
    *,
    root: Path,
    experiment: str,
    name: str,
    tags: Mapping[str, str],
    logger: bool,
) -> list[str]:
    """Return the command line of a ``fit`` that has a folder and a name of its own, and continues
    what is there.

    Args:
        args: arguments of ``fit``.
        root, experiment, name: the run goes to ``<root>/<experiment>/<name>``.
        tags: the tags of the run.
        logger: false: no MLflow.
    """
    own = {
        "default_root_dir": root,
        "experiment": experiment,
        "run_name": name,
        "auto_resume": "true",
        "fast_dev_run": "false",
        "tags": json.dumps(dict(tags)),
    }
    flags = [f"--trainer.{key}={value}" for key, value in own.items()]
    return ["fit", *args, *flags, *([] if logger else ["--trainer.logger=false"])]


class StartedJob:
    """A job in a process that was started for it.

    Args:
        command: the program and its arguments.
        environment: its variables.
        held: file descriptors that it keeps open.
        log: the file that its output goes to.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        held: Sequence[int],
        log: IO[bytes],
    ) -> None:
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,
            pass_fds=held,
        )

    @property
    def returncode(self) -> int | None:
        """Its exit code, minus the signal's number if one ended it; None while it runs."""
        return self.process.returncode

    def poll(self) -> int | None:
        """Return its exit code, None while it runs."""
        return None if self.process.poll() is None else self._ended()

    def wait(self, timeout: float) -> int:
        """Return its exit code once it has ended.

        Raises:
            subprocess.TimeoutExpired: it still runs after so many seconds.
        """
        self.process.wait(timeout)
        return self._ended()

    def terminate(self) -> None:
        """Tell it to stop."""
        self.process.terminate()

    def kill(self) -> None:
        """End it and all processes of its session."""
        os.killpg(self.process.pid, signal.SIGKILL)

    def _ended(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.close()
        return int(self.process.returncode)


@dataclass
class RunningJob:
    """A job at work.

    Args:
        job: the job.
        process: its process, the leader of a session of its own: Ctrl-C in the terminal reaches the
            pool alone.
        slot: the number of its slot in the pool.
        since: ``time.monotonic()`` of its start.
    """

    job: Job
    process: StartedJob | ForkedJob
    slot: int
    since: float = field(default_factory=time.monotonic)


class Pool:
    """The pool runs jobs, as many at a time as there are slots.

    Args:
        slots: the environment variables of each slot.
        held: file descriptors that every process keeps open.
        program: the program that is started with the arguments of each job, if it is not this one.
            This one's jobs are forked where that is safe, on Linux, and started elsewhere.
    """

    def __init__(
        self,
        slots: Sequence[Mapping[str, str]],
        held: Sequence[int] = (),
        program: Sequence[str] | None = None,
    ) -> None:
        self.slots, self.held = slots, held
        self.program = PROGRAM if program is None and sys.platform != "linux" else program
        self.running: list[RunningJob] = []
        self.following = deque[Job]()
        self.servers: dict[frozenset[tuple[str, str]], ForkServer] = {}

    def run(
        self,
        jobs: Iterable[Job],
        ended: Callable[[RunningJob, int], Job | None],
        look: Callable[[list[RunningJob]], None] = lambda running: None,
    ) -> None:
        """Run jobs until all have ended.

        Args:
            jobs: the jobs, in the order in which they start; each is asked for when a slot is free
                for it.
            ended: is called with every job that ended by itself and its exit code, and may return a
                job that goes next.
            look: is called at every look with the jobs that are at work.

        Raises:
            KeyboardInterrupt, SystemExit: Ctrl-C or SIGTERM, after the jobs have stopped.
        """
        others = iter(jobs)
        with Interrupts() as interrupts:
            try:
                while True:
                    with interrupts.held():
                        self._fill(others)
                    if not self.running:
                        break
                    look(self.running)
                    time.sleep(POLL_SECONDS)
                    self._collect(ended)
            finally:
                interrupts.ignore()
                self.stop()
                interrupts.release()

    def _fill(self, others: Iterator[Job]) -> None:
        taken = {running.slot for running in self.running}
        for slot in range(len(self.slots)):
            if slot not in taken:
                job = self.following.popleft() if self.following else next(others, None)
                if job is None:
                    return
                self.running.append(self._start(job, slot))

    def terminate(self) -> None:
        """Tell what still runs to stop; each run writes its checkpoint and ends as any job does.

        What would follow the jobs that have ended is not started any more.
        """
        self.following.clear()
        for running in self.running:
            running.process.terminate()

    def _start(self, job: Job, slot: int) -> RunningJob:
        job.log.parent.mkdir(parents=True, exist_ok=True)
        with open_own(job.log, "ab") as log:
            log.write(
                f"$ python -m fl_lightning {shlex.join(redact_arguments(job.args))}\n".encode()
            )
            log.flush()
            environment = {**os.environ, **self.slots[slot], **job.environment}
            if self.program is not None:
                started = StartedJob([*self.program, *job.args], environment, self.held, log)
                return RunningJob(job, started, slot)
            key = frozenset(environment.items())
            if key in self.servers and self.servers[key].process.poll() is not None:
                self.servers[key].listen(0.0)  # its jobs have ended with it: somebody has killed it
                self.servers.pop(key).close()
            if key not in self.servers:
                self.servers[key] = ForkServer(environment, self.held, log)
            return RunningJob(job, self.servers[key].start(job.args, job.log), slot)

    def _collect(self, ended: Callable[[RunningJob, int], Job | None]) -> None:
        for running in list(self.running):
            code = running.process.poll()
            if code is not None:
                self.running.remove(running)
                if job := ended(running, code):
                    self.following.appendleft(job)

    def stop(self) -> None:
        """End what still runs; a run writes its checkpoint first."""
        self.terminate()
        deadline = time.monotonic() + STOP_SECONDS
        for running in self.running:
            try:
                running.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                running.process.kill()
                running.process.wait(STOP_SECONDS)
        self.running.clear()
        for server in self.servers.values():
            server.close()
        self.servers.clear()


def cores() -> int:
    """Return the number of cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1


def threads_per_job(jobs: int, before: int = 0, environment: Mapping[str, str] = os.environ) -> int:
    """Return the threads of a cell: ``OMP_NUM_THREADS``, else those of earlier sessions, else its
    share of the cores.

    Args:
        jobs: the number of jobs that run at a time.
        before: the threads that this cell had when it was started first; 0: it was not.

    >>> threads_per_job(2, 0, {"OMP_NUM_THREADS": "3"}), threads_per_job(2, 5, {})
    (3, 5)
    """
    given = environment.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdigit() and int(given) else before or max(1, cores() // jobs)


def slots_for(
    jobs: int, devices: str, environment: Mapping[str, str] = os.environ
) -> list[dict[str, str]]:
    """Return the environment of each slot: GPUs are dealt out in turn.

    Args:
        jobs: the number of jobs that run at a time.
        devices: ``auto`` for all GPUs that are visible, ``none``, or their numbers.

    Raises:
        InputError: there is no such GPU, or no job.

    >>> slots_for(2, "none", {}), slots_for(2, "0,2", {"CUDA_VISIBLE_DEVICES": "4,5,7"})
    ([{}, {}], [{'CUDA_VISIBLE_DEVICES': '4'}, {'CUDA_VISIBLE_DEVICES': '7'}])
    """
    if jobs < 1:
        raise InputError(f"--jobs {jobs}", "at least one runs at a time", "write --jobs 1")
    if devices == "none":
        return [{} for _ in range(jobs)]
    visible = _visible(environment)
    if devices == "auto":
        chosen = visible
    else:
        numbers = [number.strip() for number in devices.split(",")]
        if not all(number.isdigit() and int(number) < len(visible) for number in numbers):
            there = f"0 to {len(visible) - 1}" if visible else "none here"
            rule = f"it is auto, none, or numbers of GPUs ({there})"
            raise InputError(f"--devices {devices}", rule, "write --devices auto")
        chosen = [visible[int(number)] for number in numbers]
    return [
        {"CUDA_VISIBLE_DEVICES": chosen[slot % len(chosen)]} if chosen else {}
        for slot in range(jobs)
    ]


def _visible(environment: Mapping[str, str]) -> list[str]:
    """Return the GPUs, by the names that ``CUDA_VISIBLE_DEVICES`` has for them."""
    if "CUDA_VISIBLE_DEVICES" in environment:
        return [
            name.strip() for name in environment["CUDA_VISIBLE_DEVICES"].split(",") if name.strip()
        ]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]
