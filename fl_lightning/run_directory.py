"""What a run leaves on disk: ``config.yaml metadata.json metrics.csv ledger.csv partition.json checkpoints/ figures/``."""

from __future__ import annotations

import csv
import io
import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from fl_lightning.checkpoint import replace

PACKAGES = ("fl_lightning", "torch", "torchvision", "timm", "lightning", "torchmetrics", "jsonargparse", "mlflow", "numpy")


class RunDirectory:
    """``<root>/<experiment>/<name>/``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.figures = path / "figures"

    @classmethod
    def create(cls, root: Path, experiment: str, name: str) -> RunDirectory:
        """A new directory; a name that exists gets a number: nothing is overwritten."""
        number = 1
        while True:
            path = root / experiment / (name if number == 1 else f"{name}-{number}")
            try:
                path.mkdir(parents=True)
                break
            except FileExistsError:
                number += 1
        run = cls(path)
        run.checkpoints.mkdir()
        run.figures.mkdir()
        return run

    def write(self, name: str, text: str) -> Path:
        replace(self.path / name, text.encode())
        return self.path / name

    def write_json(self, name: str, document: object) -> Path:
        return self.write(name, json.dumps(document, indent=1, default=str) + "\n")

    def write_history(self, history: Sequence[Mapping[str, float]]) -> Path:
        """``metrics.csv``: one line per round; an empty cell where a round has no such metric."""
        text = io.StringIO()
        columns = dict.fromkeys(name for row in history for name in row)
        writer = csv.DictWriter(text, list(columns), lineterminator="\n")
        writer.writeheader()
        writer.writerows(history)
        return self.write("metrics.csv", text.getvalue())


def versions() -> dict[str, str]:
    """Of Python and of the packages that can change a result."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def git_state() -> dict[str, object]:
    """Commit of the project's checkout and whether it has uncommitted changes; both None outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent)]
    try:
        commit = subprocess.run([*command, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=True)
        status = subprocess.run([*command, "status", "--porcelain"], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "dirty": None}
    return {"commit": commit.stdout.strip(), "dirty": bool(status.stdout.strip())}
