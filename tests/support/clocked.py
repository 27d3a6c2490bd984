"""Runs in virtual time: devices that take what the test says, traces as files, and the tables of a
run."""

from __future__ import annotations

import json
from pathlib import Path

from outcomes import rows_of

from fl_lightning.clock import AvailabilityTrace
from fl_lightning.clock.devices import Devices
from fl_lightning.hooks import Stressor


class Fixed(Devices):
    """Each client takes its own time, whatever it has to do."""

    def __init__(self, *times: float) -> None:
        self.times = times

    def seconds(self, seed: int, round: int, client: int, examples: int) -> float:
        return self.times[client % len(self.times)]


class Loses(Stressor):
    """Loses the uploads of these clients by round, after they have trained."""

    def __init__(self, late: dict[int, set[int]]) -> None:
        self.late = late

    def change_upload(self, upload, *, client, round, context):
        return None if client.id in self.late.get(round, ()) else upload


def trace(folder: Path, *spans: list[list[float]], length: float = 100.0) -> AvailabilityTrace:
    """The times online of client 0, of client 1 and so on, repeated every ``length`` seconds."""
    entries = {
        f"phone{k}": {"trace_start": 0, "trace_end": length, "ready_time": s}
        for k, s in enumerate(spans)
    }
    path = folder / f"{len(list(folder.iterdir()))}.json"
    path.write_text(json.dumps(entries))
    return AvailabilityTrace(str(path))


def rows(trainer, name: str) -> list[dict[str, str]]:
    """A table of a run."""
    return rows_of(trainer.run_dir / name)


def column(trainer, name: str) -> list[float]:
    """A metric of every round."""
    return [float(row[name]) for row in rows(trainer, "metrics.csv")]
