"""What a run leaves on disk: ``config.yaml metadata.json metrics.csv ledger.csv partition.json checkpoints/
figures/``."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_lightning.errors import InputError
from fl_lightning.run.checkpoint import Tensors, checkpoints_in, remove_checkpoint, save_checkpoint
from fl_lightning.run.tables import Mark, Table
from fl_lightning.support.disk import replace

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# bytes; file systems allow 255, and a name gets a number, or ".PID.creating" while its folder is made
LONGEST_NAME = 200


class RunDirectory:
    """``<root>/<experiment>/<name>/``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.figures = path / "figures"
        self.tables = {
            name: Table(path / f"{name}.csv", self.checkpoints / f"{name}.csv")
            for name in ("metrics", "ledger")
        }
        self._lock: int | None = None

    @classmethod
    def create(
        cls, root: Path, experiment: str, name: str, files: Mapping[str, str], *, only: str = ""
    ) -> RunDirectory:
        """A new directory with these files in it, made aside and renamed: a run that can be seen has its
        configuration.

        A name that exists gets a number: nothing is overwritten. Of two processes that want the same name,
        one gets it.

        Args:
            only: the one name, number included, that will do; empty: any.

        Raises:
            InputError: another process has taken ``only``.
        """
        folder = root / experiment
        aside = folder / f".{name}.{os.getpid()}.creating"
        shutil.rmtree(aside, ignore_errors=True)
        try:
            for part in ("checkpoints", "figures"):
                (aside / part).mkdir(parents=True)
            for file, text in files.items():
                replace(aside / file, text.encode())
            run = cls(_claim(aside, folder, name, only))
        except (OSError, InputError):
            shutil.rmtree(aside, ignore_errors=True)
            raise
        run.lock()
        return run

    @property
    def created(self) -> float:
        """When the run was made, seconds since 1970."""
        path = self.path / "partition.json"  # written once
        return (path if path.exists() else self.path).stat().st_mtime

    def lock(self) -> None:
        """Keep other processes from continuing this run until this process ends.

        The folder itself is locked, and not by ``filelock``: that would leave a file of its own in every run.

        Raises:
            InputError: another process holds the lock.
        """
        try:
            import fcntl

            self._lock = os.open(self.path, os.O_RDONLY)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.unlock()
            raise InputError(
                f"{self.path}", "another process is writing this run", "wait for it, or start a new run"
            ) from None
        except (ImportError, OSError):  # a platform or a file system without locks
            self.unlock()

    def unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def rewind(self, round: int, marks: Mapping[str, Mark], *, changed: bool) -> None:
        """Go back to the end of ``round``.

        Where that leaves later checkpoints behind, or the configuration has changed, they and the records as
        they were go to
        ``superseded_<n>/``: nothing is lost.
        """
        self.figures.mkdir(exist_ok=True)
        self.checkpoints.mkdir(exist_ok=True)
        for leftover in self.checkpoints.glob(".*ing"):
            shutil.rmtree(leftover, ignore_errors=True)
        later = [path for path in checkpoints_in(self.checkpoints) if path.name > checkpoint_name(round)]
        if later or changed:
            aside = self._new_folder("superseded")
            for file in ("config.yaml", "metadata.json", "metrics.csv", "ledger.csv"):
                if (self.path / file).exists():
                    shutil.copy2(self.path / file, aside / file)
            for checkpoint in later:
                checkpoint.rename(aside / checkpoint.name)
        for name, table in self.tables.items():
            table.rewind(marks.get(name))

    def _new_folder(self, name: str) -> Path:
        number = 1
        while (path := self.path / f"{name}_{number}").exists():
            number += 1
        path.mkdir()
        return path

    def save_checkpoint(self, round: int, tensors: Tensors, documents: Mapping[str, object]) -> None:
        save_checkpoint(self.checkpoints / checkpoint_name(round), tensors, documents)

    def prune(self, keep: int, best: int) -> None:
        """Remove all checkpoints but the ``keep`` newest and that of round ``best``."""
        for old in checkpoints_in(self.checkpoints)[keep:]:
            if old.name != checkpoint_name(best):
                remove_checkpoint(old)

    def write(self, name: str, text: str) -> None:
        replace(self.path / name, text.encode())

    def write_json(self, name: str, document: object) -> None:
        self.write(name, to_json(document))

    def read_json(self, name: str) -> dict[str, Any]:
        """As :func:`read_json`."""
        return read_json(self.path / name)

    def save_figure(self, name: str, figure: Figure) -> list[Path]:
        """As ``figures/<name>.png`` and ``.pdf``."""
        paths = [self.figure(f"{name}.{suffix}") for suffix in ("png", "pdf")]
        for path in paths:
            data = BytesIO()
            figure.savefig(data, dpi=150, format=path.suffix[1:])
            replace(path, data.getvalue())
        return paths

    def figure(self, name: str) -> Path:
        """Where a figure's file goes.

        Raises:
            ValueError: the name leads out of the run directory.
        """
        if not is_plain_name(name):
            raise InputError(
                f"figure {name!r}", "it names one file inside figures/", "write a name without '/'"
            )
        return self.figures / name


def _claim(aside: Path, folder: Path, name: str, only: str) -> Path:
    """Give ``aside`` the first free name."""
    while True:
        path = folder / free_name(folder, name)
        if only and path.name != only:
            raise InputError(
                f"--trainer.auto_resume, while another process has just started {folder / only}",
                "one run is one process",
                "wait for it, or write another --trainer.run_name",
            )
        try:
            return aside.rename(path)
        except OSError:  # another process was faster, and its directory is not empty
            if not os.path.lexists(path):
                raise


def free_name(folder: Path, name: str) -> str:
    """``name`` if there is no such file in ``folder``, else the first of ``name-2``, ``name-3`` ... that is
    free."""
    number, free = 1, name
    while os.path.lexists(folder / free):
        number += 1
        free = f"{name}-{number}"
    return free


def checkpoint_name(round: int) -> str:
    return f"round_{round:06d}"


def check_name(name: str, given: str) -> None:
    """Refuse what cannot name a run or an experiment.

    Args:
        name: the name.
        given: how the user gave it, for the message.

    Raises:
        ValueError: it is no plain name, no UTF-8, or longer than ``LONGEST_NAME``.
    """
    if not is_plain_name(name):
        raise InputError(
            f"{given}", "it names one folder inside default_root_dir", "write a name without '/', in UTF-8"
        )
    if (size := len(name.encode())) > LONGEST_NAME:
        raise InputError(
            f"{given[:60]}... ({size} bytes)",
            f"a name has at most {LONGEST_NAME} bytes",
            "write a shorter one",
        )


def is_plain_name(name: str) -> bool:
    """Whether ``name`` is UTF-8 that names a file or a folder in the folder that it is put in, and nothing
    else; not a hidden one."""
    if any("\ud800" <= character <= "\udfff" for character in name):  # what Python makes of other bytes
        return False
    return name != "" and Path(name).name == name and not re.search(r"^\.|[\\\x00-\x1f\x7f]", name)


def read_json(path: Path) -> dict[str, Any]:
    """The mapping in a file; empty when there is none, or it cannot be read."""
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def to_json(document: object) -> str:
    return json.dumps(document, indent=1, default=str) + "\n"


def numbered(folder: Path, name: str) -> list[Path]:
    """The runs called ``name``, ``name-2``, ``name-3`` ... in ``folder``, latest first."""
    pattern = re.compile(rf"{re.escape(name)}(?:-(\d+))?")
    found = [
        (int(match[1] or 1), path)
        for path in folder.glob("*")
        if path.is_dir() and (match := pattern.fullmatch(path.name))
    ]
    return [path for _, path in sorted(found, reverse=True)]
