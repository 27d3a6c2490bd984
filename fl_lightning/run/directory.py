"""The directory of a run and the names in it.

It holds ``config.yaml metadata.json metrics.csv ledger.csv clients.csv partition.json`` and the
folders ``checkpoints/ figures/``.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fl_lightning.errors import InputError
from fl_lightning.run.checkpoint import Tensors, remove_checkpoint, save_checkpoint
from fl_lightning.run.paths import checkpoints_in, round_of
from fl_lightning.run.tables import CsvTable, Mark
from fl_lightning.support.disk import replace

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# in bytes: file systems allow 255, and a number or ".PID.creating" may be added to a name
LONGEST_NAME = 200


class RunDirectory:
    """The directory ``<root>/<experiment>/<name>/`` of one run.

    Args:
        path: the directory.
        writes: False on ranks other than 0, which know the directory and leave it as it is:
            whatever would write to it does nothing.
    """

    def __init__(self, path: Path, *, writes: bool = True) -> None:
        self.path = path
        self.writes = writes
        self.checkpoints = path / "checkpoints"
        self.figures = path / "figures"
        self.tables = {
            name: CsvTable(path / f"{name}.csv", self.checkpoints / f"{name}.csv", self.may_write)
            for name in ("metrics", "ledger")
        }
        self._lock: int | None = None

    @classmethod
    def create(
        cls, root: Path, experiment: str, name: str, files: Mapping[str, str], *, only: str = ""
    ) -> RunDirectory:
        """Create the directory of a new run.

        It is made under a hidden name and renamed, so a run that can be seen has its configuration.
        Nothing is overwritten: where ``name`` exists, the run gets ``name-2``, ``name-3`` and so
        on. Where two processes ask for the same name at once, they get different ones.

        Args:
            root: the folder of all experiments.
            experiment: the folder of the experiment in it.
            name: the name that the run is to have.
            files: text of each file that the new directory holds, by name.
            only: the name, number included, that the run must get; empty: any number will do.

        Raises:
            InputError: another process has taken ``only``.
            OSError: the folder cannot be written.
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
        """The time at which the run was made, in seconds since 1970."""
        path = self.path / "partition.json"  # this file is written once
        return (path if path.exists() else self.path).stat().st_mtime

    def lock(self) -> None:
        """Keep other processes from continuing this run until this process ends.

        The folder itself is locked, and not by ``filelock``: that would leave a file of its own in
        every run.

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
                f"{self.path}",
                "another process is writing this run",
                "wait for it, or start a new run",
            ) from None
        except (ImportError, OSError):  # a platform or a file system without locks
            self.unlock()

    def unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def may_write(self) -> bool:
        """Return whether this process writes to the directory.

        Raises:
            OSError: the folder that it has locked is not at this path any more.
        """
        if self._lock is not None and not os.path.samestat(os.fstat(self._lock), self.path.stat()):
            raise OSError(f"{self.path} is another folder, in the place of the one of this run")
        return self.writes

    def rewind(self, round: int, marks: Mapping[str, Mark], *, changed: bool) -> None:
        """Take the tables and the checkpoints back to the end of a round.

        If there are later checkpoints, or the configuration has changed, nothing is lost: the
        checkpoints are moved to ``superseded_<n>/``, and the configuration, the metadata, the
        partition, the tables and ``clients.csv`` are copied there first.

        Args:
            round: the last round that stays.
            marks: where each table stood at the end of that round, by name.
            changed: whether the configuration has changed.
        """
        if not self.may_write():
            return
        self.figures.mkdir(exist_ok=True)
        self.checkpoints.mkdir(exist_ok=True)
        for leftover in self.checkpoints.glob(".*ing"):
            shutil.rmtree(leftover, ignore_errors=True)
        later = [path for path in checkpoints_in(self.checkpoints) if round_of(path) > round]
        if later or changed:
            folders = (self.path / f"superseded_{number}" for number in count(1))
            aside = next(folder for folder in folders if not folder.exists())
            aside.mkdir()
            for file in (
                "config.yaml",
                "metadata.json",
                "metrics.csv",
                "ledger.csv",
                "clients.csv",
                "partition.json",
            ):
                if (self.path / file).exists():
                    shutil.copy2(self.path / file, aside / file)
            for checkpoint in later:
                checkpoint.rename(aside / checkpoint.name)
        for name, table in self.tables.items():
            table.rewind(marks.get(name))

    def save_checkpoint(
        self, round: int, tensors: Tensors, documents: Mapping[str, object]
    ) -> None:
        """Write the checkpoint of a round, see
        :func:`fl_lightning.run.checkpoint.save_checkpoint`."""
        if self.may_write():
            save_checkpoint(self.checkpoints / checkpoint_name(round), tensors, documents)

    def prune(self, keep: int, best: int) -> None:
        """Remove all checkpoints but the ``keep`` newest and that of round ``best``."""
        if not self.may_write():
            return
        for old in checkpoints_in(self.checkpoints)[keep:]:
            if old.name != checkpoint_name(best):
                remove_checkpoint(old)

    def write(self, name: str, text: str) -> None:
        """Write or replace one file of the directory, as a whole."""
        if self.may_write():
            replace(self.path / name, text.encode())

    def write_json(self, name: str, document: object) -> None:
        """Write or replace one JSON file of the directory, as a whole."""
        self.write(name, to_json(document))

    def read_json(self, name: str) -> dict[str, Any]:
        """Return the mapping in a JSON file of the directory, see :func:`read_json`."""
        return read_json(self.path / name)

    def save_figure(self, name: str, figure: Figure) -> list[Path]:
        """Write a figure as ``figures/<name>.png`` and ``.pdf``, and return these paths.

        Raises:
            InputError: the name leads out of ``figures/``.
        """
        if not self.may_write():
            return []
        paths = [self.figure(f"{name}.{suffix}") for suffix in ("png", "pdf")]
        layout = figure.get_layout_engine()
        for path in paths:
            data = BytesIO()
            figure.savefig(data, dpi=150, format=path.suffix[1:])
            replace(path, data.getvalue())
            figure.set_layout_engine(None)  # the second file has the first one's layout
        figure.set_layout_engine(layout)
        return paths

    def figure(self, name: str) -> Path:
        """Return the path of a file in ``figures/``.

        Raises:
            InputError: the name leads out of ``figures/``.
        """
        if not is_plain_name(name):
            raise InputError(
                f"figure {name!r}", "it names one file inside figures/", "write a name without '/'"
            )
        return self.figures / name


def _claim(aside: Path, folder: Path, name: str, only: str) -> Path:
    """Rename the folder ``aside`` to the first free name of a run, and return its path."""
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


class RunName(NamedTuple):
    """The name of a run.

    Args:
        asked: the one that the user gave; None: it has a default one, of the other parts.
        start: method, its module if it has one, and data set.
        changed: what flags change in the configuration files.
        end: the seed.
    """

    asked: str | None
    start: str
    changed: Sequence[str]
    end: str

    def __str__(self) -> str:
        return self.asked or "-".join([self.start, *self.changed, self.end])


def free_name(folder: Path, name: str) -> str:
    """Return the first of ``name``, ``name-2``, ``name-3`` ... that does not exist in
    ``folder``."""
    number, free = 1, name
    while os.path.lexists(folder / free):
        number += 1
        free = f"{name}-{number}"
    return free


def checkpoint_name(round: int) -> str:
    """Return the name of a round's checkpoint folder."""
    return f"round_{round:06d}"


def check_name(name: str, given: str) -> None:
    """Refuse a name that a run or an experiment cannot have.

    Args:
        name: the name.
        given: how the user gave it, for the message.

    Raises:
        InputError: it is not a plain name, not UTF-8, or longer than ``LONGEST_NAME`` bytes.
    """
    if not is_plain_name(name):
        raise InputError(
            given,
            "it names one folder inside default_root_dir",
            "write a name without '/', in UTF-8",
        )
    if (size := len(name.encode())) > LONGEST_NAME:
        raise InputError(
            f"{given[:60]}... ({size} bytes)",
            f"a name has at most {LONGEST_NAME} bytes",
            "write a shorter one",
        )


def is_plain_name(name: str) -> bool:
    """Return whether ``name`` is UTF-8 and names one visible file or folder, without leading
    elsewhere."""
    if any("\ud800" <= character <= "\udfff" for character in name):  # bytes that are not UTF-8
        return False
    return name != "" and Path(name).name == name and not re.search(r"^\.|[\\\x00-\x1f\x7f]", name)


def read_json(path: Path) -> dict[str, Any]:
    """Return the mapping in a JSON file; empty when the file is missing, unreadable or no
    mapping."""
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def to_json(document: object) -> str:
    """Return a document as indented JSON; a value that JSON does not know becomes its text."""
    return json.dumps(document, indent=1, default=str) + "\n"


def numbered(folder: Path, name: str, end: str = "") -> list[Path]:
    """Return the runs called ``name``, ``name-2``, ``name-3`` ... in ``folder``, latest first.

    With an ``end`` they are those called ``name-end``, also with more between the two.
    """
    called = re.escape(name) + (rf"(?:-.+)?-{re.escape(end)}" if end else "")
    pattern = re.compile(rf"{called}(?:-(\d+))?")
    found = [
        (int(match[1] or 1), path)
        for path in folder.glob("*")
        if path.is_dir() and (match := pattern.fullmatch(path.name))
    ]
    return [path for _, path in sorted(found, reverse=True)]
