"""Run directories in the form that a run leaves, made in milliseconds: accuracies rise along a line
to the one that is given."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.metrics import final_summary
from fl_lightning.run.directory import to_json
from fl_lightning.run.metadata import task_of
from fl_lightning.tasks import Classification, Task

CLASSIFICATION = Classification()
Level = tuple[tuple[str, str], ...]


def history_of(
    accuracy: float,
    *,
    rounds: int = 5,
    every: int = 1,
    upload: int = 1000,
    seconds: float = 0.1,
    task: Task = CLASSIFICATION,
    **more: float,
) -> list[dict[str, float]]:
    """A row a round, evaluated every so many; ``more`` is the same in all of them. What is better
    when it is less falls as 1 / round, and its validation is best in round 3."""
    up, name = task.higher_is_better, task.primary
    rows = [
        {
            "round": r, "train/loss": 2.0 / r, "comm/upload_bytes": upload, "comm/download_bytes": 2 * upload, "comm/wasted_bytes": 0,
            "comm/total_bytes": 3 * upload, "clients/trained": 4, "bits/average": 4.0, "time/train": seconds / 2,
            f"test/{name}": accuracy * r / rounds if up else accuracy * rounds / r, "test/ece": 0.1,
            f"val/{name}": 0.5 + 0.01 * r if up else 9 + abs(r - 3), f"val/{name}_std": 0.2,
            "time/round": seconds * (1 + 9 * (r <= 3)), **more,
        }
        for r in range(1, rounds + 1)
    ]  # fmt: skip
    return [
        {key: row[key] for key in row if row["round"] % every == 0 or "/" + name not in key}
        for row in rows
    ]


def make_run(
    folder: Path,
    label: str,
    seed: int,
    accuracy: float,
    *,
    levels: Mapping[str, str] | None = None,
    name: str | None = None,
    status: str = "finished",
    dataset: str = "digits",
    partition: str | None = None,
    content: str | None = None,
    tested: Mapping[str, float] | None = None,
    config: Mapping[str, Any] | None = None,
    tagged: bool = True,
    tags: Mapping[str, str] | None = None,
    chosen: str = "last",
    tested_round: int | None = None,
    guess: float | None = None,
    emitters: Sequence[Any] = (),
    **history: Any,
) -> Path:
    """One run; ``emitters`` declare metrics, ``history`` goes to :func:`history_of`."""
    levels = dict(levels or {})
    name = name or "-".join(
        [label, *(f"{axis}={level}" for axis, level in levels.items()), f"seed{seed}"]
    )
    path = folder / name
    path.mkdir(parents=True)
    rows, task = history_of(accuracy, **history), history.get("task", CLASSIFICATION)
    metadata = {
        "seed": seed,
        "method": label.split()[0],
        "dataset": dataset,
        "git": {"commit": "0" * 40, "dirty": False},
        "versions": {"python": "3.11"},
        "command_line": ["python", "-m", "fl_lightning", "fit", "--seed_everything", str(seed)],
        "device": "cpu",
        "processes": 1,
        "threads": 1,
        "precision": "32-true",
        "started": "2026-01-01T00:00:00+00:00",
        "partition_sha256": partition or sha256(str(seed).encode()).hexdigest(),
        **({"content_sha256": content} if content else {}),
        "weights_sha256": f"{seed:064x}",
        "status": status,
        "tracking_run_id": None,
        "tags": {"study": folder.name, "label": label, **levels, **(tags or {})} if tagged else {},
    }
    if guess is not None:
        metadata["constant_guess"] = guess
    if task is not CLASSIFICATION or emitters:  # runs of release 0.1 do not say it
        metadata["task"] = task_of(task, emitters)
    if status == "finished":
        up, share = task.higher_is_better, task.primary in task.shares
        summary = final_summary(rows, task.primary, higher_is_better=up, is_share=share)
        metadata |= {"finished": "2026-01-01T01:00:00+00:00", **summary}
    (path / "metadata.json").write_text(to_json(metadata))
    (path / "config.yaml").write_text(yaml.safe_dump({"seed_everything": seed, **(config or {})}))
    with (path / "metrics.csv").open("w") as file:
        writer = csv.DictWriter(file, rows[-1], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    if tested is not None:
        (path / "test.json").write_text(
            to_json({"chosen": chosen, "round": tested_round or len(rows), "metrics": tested})
        )
    return path


def make_study(
    root: Path,
    accuracies: Mapping[str, Mapping[int, float] | Mapping[Level, Mapping[int, float]]],
    name: str = "study",
    task: Task = CLASSIFICATION,
    run: Mapping[str, Any] | None = None,
    **keys: Any,
) -> Path:
    """A folder of runs with its ``study.yaml``.

    Args:
        accuracies: label -> seed -> final accuracy; with a grid label -> levels -> seed ->
            accuracy. Of another task, its primary metric.
        task: the task of the runs.
        run: arguments of every :func:`make_run`.
        keys: of the study file.

    Returns:
        The folder.
    """
    folder = root / name
    by_level = {
        label: found if isinstance(next(iter(found)), tuple) else {(): found}
        for label, found in accuracies.items()
    }
    seeds = sorted(
        {seed for found in by_level.values() for values in found.values() for seed in values}
    )
    folder.mkdir(parents=True, exist_ok=True)
    document = {
        "study": name,
        "seeds": seeds,
        "methods": {label: {} for label in accuracies},
        **keys,
    }
    if task is CLASSIFICATION and not {"selection", "metric"} & {*keys}:
        document["selection"] = "last"  # the accuracy that was given
    (folder / "study.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
    for label, found in by_level.items():
        for levels, values in found.items():
            for seed, accuracy in values.items():
                make_run(
                    folder, label, seed, accuracy, levels=dict(levels), task=task, **(run or {})
                )
    return folder
