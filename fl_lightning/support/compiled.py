"""A C++ file of this package as a library: compiled once for this machine, where it has a compiler,
and kept.

The file needs no header of torch, so the compiler takes a fraction of a second where torch's own
loader takes tens of them, and ctypes loads what it makes. Whoever uses it has the same in Python,
for where there is none.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
from contextlib import suppress
from functools import cached_property
from pathlib import Path

import torch

COMPILER = "c++"
FLAGS = ("-O3", "-shared", "-fPIC", "-ffp-contract=off")
FLAGS_BY_CAPABILITY = {
    "AVX2": ("-mavx2",),
    "AVX512": ("-mavx2", "-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl"),
}
"""What else a processor can do, as torch names it."""
MAX_BUILD_SECONDS = 60


class CompiledLibrary:
    """The library of a C++ file, if this machine has it or can make it once that pays.

    Args:
        source: the file.
        work_per_build: the library is built once so much work was done without it, in any unit,
            which took about as long as the compiler will: no short run waits for one.
    """

    def __init__(self, source: Path, work_per_build: int) -> None:
        self.source, self.work_per_build, self.work_without = source, work_per_build, 0

    @cached_property
    def command(self) -> list[str]:
        """The compiler, what this processor can do, and the file."""
        flags = FLAGS_BY_CAPABILITY.get(torch.backends.cpu.get_cpu_capability(), ())
        return [COMPILER, *FLAGS, *flags, str(self.source)]

    @cached_property
    def path(self) -> Path:
        """Where the library is, or will be."""
        flags, text = self.command[1:-1], self.source.read_text(encoding="utf-8")
        key = " ".join((platform.machine(), *flags, text))
        digest = hashlib.sha256(key.encode()).hexdigest()[:16]
        return folder() / f"fl_lightning_{self.source.stem}_{digest}.so"

    @cached_property
    def found(self) -> ctypes.CDLL | None:
        """The library as it was built before this process needed it first, or by this process."""
        return self.load()

    def load(self) -> ctypes.CDLL | None:
        """Return the library if it was built before, by whatever process; else None."""
        with suppress(OSError):
            return ctypes.CDLL(str(self.path)) if self.path.exists() else None
        return None

    def build(self) -> bool:
        """Compile the file, and return whether that is done. It is not where there is no compiler
        or no folder to write to, where the compiler fails, or where another process is at it."""
        if shutil.which(COMPILER) is None or os.name != "posix":
            return False
        import fcntl  # there is none on Windows

        aside = self.path.with_suffix(f".{os.getpid()}")
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(self.path.with_suffix(".lock"), "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                command = [*self.command, "-o", str(aside)]
                subprocess.run(command, check=True, capture_output=True, timeout=MAX_BUILD_SECONDS)
                aside.replace(self.path)
        except (OSError, subprocess.SubprocessError):
            with suppress(OSError):
                aside.unlink()
            return False
        return True

    def library(self, work: int) -> ctypes.CDLL | None:
        """Return the library where it is there.

        A process tries to build it once. If another one is at it, its library is used when it is
        there.

        Args:
            work: what is to be done.
        """
        if self.found is None:
            before, self.work_without = self.work_without, self.work_without + work
            if self.work_without >= self.work_per_build:
                self.found = self.load()
            due = before < self.work_per_build <= self.work_without
            if self.found is None and due and self.build():
                self.found = self.load()
        return self.found


def folder() -> Path:
    """Return the folder in which torch keeps what it compiles."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path(cache) / "torch_extensions")
