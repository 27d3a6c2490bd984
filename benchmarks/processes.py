"""A program in a process of its own: what it printed, and the most memory that it and all its
descendants held."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
SHARE = 0.01
"""Of one core, at most, goes into looking at memory."""


@dataclass(frozen=True)
class Done:
    """Args:
    code: exit code; None: it did not end in time.
    peak_mib: largest sum over its processes seen at one time, where a page that k of them share
        counts 1/k in each; None: not known on this system.
    """

    code: int | None
    stdout: str
    stderr: str
    peak_mib: float | None


def run(command: list[str], *, folder: Path, environment: dict[str, str], timeout: float) -> Done:
    """Run to the end, or until ``timeout`` seconds have passed; then it is killed with everything
    that it started."""
    files = folder / "stdout", folder / "stderr"
    with files[0].open("w") as out, files[1].open("w") as err:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=out, stderr=err, start_new_session=True
        )
        peak, end = 0.0, time.monotonic() + timeout
        try:
            while process.poll() is None and time.monotonic() < end:
                started = time.monotonic()
                peak = max(peak, sum(map(memory, descendants(process.pid))))
                pause = max(0.2, (time.monotonic() - started) / SHARE)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(min(pause, max(end - time.monotonic(), 0.01)))
            code = process.poll()
            if code is None:
                peak = max(peak, sum(map(memory, descendants(process.pid))))
        finally:
            if process.poll() is None:
                for pid in descendants(process.pid):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                process.wait()
    stdout, stderr = (file.read_text(errors="replace") for file in files)
    return Done(code, stdout, stderr, peak or None)


def cores_in_use(seconds: float = 0.5) -> float | None:
    """Cores that the whole machine keeps busy during the next ``seconds``; None: not known on this
    system."""
    before, started = busy(), time.monotonic()
    time.sleep(seconds)
    after = busy()
    return (
        None if before is None or after is None else (after - before) / (time.monotonic() - started)
    )


def busy() -> float | None:
    """Seconds of all cores since the start that were not idle."""
    try:
        ticks = [int(part) for part in (PROC / "stat").read_text().splitlines()[0].split()[1:9]]
    except OSError:
        return None
    # less idle and waiting for a disk
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def descendants(root: int) -> set[int]:
    """``root`` and everything that it started, directly or not."""
    children = defaultdict(list)
    for file in PROC.glob("[0-9]*/stat"):
        with suppress(OSError):
            children[int(file.read_text().rpartition(")")[2].split()[1])].append(
                int(file.parent.name)
            )
    found, new = set(), [root]
    while new:
        found.update(new)
        new = [child for parent in new for child in children[parent]]
    return found


def memory(pid: int) -> float:
    """Its proportional set size in MiB."""
    with suppress(OSError):
        for line in (PROC / str(pid) / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    return 0.0
