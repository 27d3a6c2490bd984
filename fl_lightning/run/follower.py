"""The run directory as ranks other than 0 have it: they know where it is, and leave it as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_lightning.run.checkpoint import Tensors
from fl_lightning.run.directory import RunDirectory
from fl_lightning.run.tables import Mark, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Follower(RunDirectory):
    """Writes nothing."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.tables = {name: _Unwritten(*table.paths) for name, table in self.tables.items()}

    def lock(self) -> None:
        pass

    def rewind(self, round: int, marks: Mapping[str, Mark], *, changed: bool) -> None:
        pass

    def save_checkpoint(self, round: int, tensors: Tensors, documents: Mapping[str, object]) -> None:
        pass

    def prune(self, keep: int, best: int) -> None:
        pass

    def write(self, name: str, text: str) -> None:
        pass

    def save_figure(self, name: str, figure: Figure) -> list[Path]:
        return []


class _Unwritten(Table):
    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        pass

    def sync(self) -> None:
        pass
