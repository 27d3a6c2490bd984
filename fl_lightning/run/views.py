"""What Python code and notebooks see of a trainer's run: its directory, history and figures."""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING

from fl_lightning.config.recorded import Recorded, arguments_of
from fl_lightning.data import FederatedData
from fl_lightning.errors import MisuseError
from fl_lightning.methods import Method
from fl_lightning.run.directory import RunDirectory
from fl_lightning.run.journal import Journal
from fl_lightning.run.paths import short_path
from fl_lightning.run.progress import Progress
from fl_lightning.support.notebook import Pictures, table

if TYPE_CHECKING:
    from pandas import DataFrame


class RunViews(Recorded):
    """The part of a trainer that shows its run; the other parts make the run.

    Attributes:
        journal: where the run is written; there is none before the first run, and a fit that was
            refused leaves that of the run before.
        progress: its rounds.
        fitted: its method, data and seed.
        seed: that a fit was given last.
        max_rounds: rounds that it shall have.
    """

    journal: Journal
    progress: Progress
    fitted: tuple[Method, FederatedData, int]
    seed: int
    max_rounds: int

    def _show(self, journal: Journal, method: Method, data: FederatedData) -> None:
        """Show this run from here on."""
        self.journal, self.progress = journal, journal.progress
        self.fitted = method, data, self.seed

    @property
    def run(self) -> RunDirectory:
        """The directory of the run that goes on, or of the last one.

        Raises:
            MisuseError: there is none yet.
        """
        if not self._has_run:
            raise MisuseError(
                "the run of a trainer", "it has none before its first fit", "call fit first"
            )
        return self.journal.run

    @property
    def run_dir(self) -> Path:
        """Its path."""
        return self.run.path

    @property
    def history(self) -> DataFrame:
        """The metrics of the rounds so far, one row for each, by round; empty before the first."""
        from pandas import DataFrame  # slow to import, and a run does without

        rows = self.progress.history if hasattr(self, "progress") else []
        return DataFrame(rows, columns=None if rows else ["round"]).set_index("round")

    @property
    def figures(self) -> Pictures:
        """The figures in the run directory by name, which a notebook shows inline."""
        return Pictures(self.run.figures if self._has_run else None)

    @property
    def _has_run(self) -> bool:
        """Whether there is a run directory: of the run that goes on, or of the last one."""
        return hasattr(self, "journal")

    @property
    def _own_run(self) -> str | None:
        """The directory of the last run, as ``ckpt_path`` names it; None where it is not there."""
        return str(self.run_dir) if self._has_run and self.run_dir.exists() else None

    def _seed_of(self, seed: int | None, ckpt_path: str | None) -> int:
        """Return the seed that was given, or that of the run which is taken without a path, or 0."""
        if seed is not None:
            return seed
        return 0 if ckpt_path or not self._own_run else self.fitted[2]

    def _repr_html_(self) -> str:
        """Return what a notebook shows: where the run is, how far it is, and its last metrics."""
        if not self._has_run:
            defaults, rows = signature(type(self)).parameters, {"max_rounds": str(self.max_rounds)}
            for name, value in arguments_of(self).items():
                if value != defaults[name].default:
                    rows[name] = str(value)
            return table(rows.items(), "FederatedTrainer, before its first run")
        done, task = self.progress.done.round, self.progress.task
        rows = {
            "run directory": str(short_path(self.run_dir)),
            "rounds": f"{done} of {self.max_rounds}",
        }
        last = self.progress.history[-1] if self.progress.history else {}
        for name in (f"test/{task.primary}", f"val/{task.primary}", "test/loss", "train/loss"):
            if name in last:
                rows[name] = f"{last[name]:.6g}"
        return table(rows.items(), self.run_dir.name)
