"""What of a run must be the same however often it was stopped."""

from __future__ import annotations

import csv
import json
import sqlite3
from contextlib import closing
from pathlib import Path


def rows_of(table: Path) -> list[dict[str, str]]:
    """The rows of a CSV file, by the names in its first line."""
    with table.open() as file:
        return list(csv.DictReader(file))


def outcome(folder: Path) -> dict:
    """All that must be the same: everything but times and ids."""
    (run,) = (folder / "runs" / "fl_lightning").glob("[!.]*")
    metadata = json.loads((run / "metadata.json").read_text())
    rows = rows_of(run / "metrics.csv")
    metrics = [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]
    checkpoints = sorted((run / "checkpoints").glob("round_*"))
    progress = json.loads((checkpoints[-1] / "progress.json").read_text())
    result = {
        key: value
        for key, value in metadata.items()
        if key in ("status", "weights_sha256") or key.startswith("final/")
    }
    result |= {
        "metrics": metrics,
        "ledger": (run / "ledger.csv").read_text(),
        "clients": (run / "clients.csv").read_text(),
        "partition": (run / "partition.json").read_text(),
    }
    result |= {
        "callbacks": progress["callbacks"],
        "best": (progress["best_round"], progress["best_value"]),
    }
    result |= {
        "checkpoints": [c.name for c in checkpoints],
        "tensors": (checkpoints[-1] / "clients.safetensors").read_bytes(),
    }
    result |= {"files": sorted(path.name for path in run.iterdir())}
    if (folder / "mlflow.db").exists():
        with closing(sqlite3.connect(folder / "mlflow.db")) as database:
            ids = database.execute(
                "select run_uuid from runs where experiment_id in (select experiment_id from "
                "experiments where name = 'fl_lightning')"
            ).fetchall()
            assert [metadata["tracking_run_id"]] == [id for (id,) in ids]
            query = (
                "select key, step, value from metrics where run_uuid = ? and key not like 'time/%' "
                "order by key, step"
            )
            result["mlflow"] = database.execute(query, ids[0]).fetchall()
            result["steps"] = database.execute(
                (
                    "select count(*), count(distinct step) from metrics where run_uuid = ? and key = "
                    "'time/round'"
                ),
                ids[0],
            ).fetchall()
            result["state"] = database.execute(
                "select status from runs where run_uuid = ?", ids[0]
            ).fetchall()
    return result


def differences(found: dict, wanted: dict) -> list[str]:
    return [key for key in wanted if found.get(key) != wanted[key]]
