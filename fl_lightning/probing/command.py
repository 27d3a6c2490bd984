"""The ``test`` command: which checkpoint of a run is probed, that it is loaded exactly, and what is written
about it."""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.loggers import Logger
from rich.console import Console
from rich.table import Table

from fl_lightning.errors import InputError
from fl_lightning.loop import Federation, weights_hash
from fl_lightning.probing import Finding, Subject, chosen, probe
from fl_lightning.run.checkpoint import CheckpointError, checkpoints_in
from fl_lightning.run.directory import RunDirectory, checkpoint_name
from fl_lightning.run.metadata import git_state, now, versions
from fl_lightning.run.resume import find_start
from fl_lightning.run.snapshot import Checkpoint, restore
from fl_lightning.run.tables import numbers
from fl_lightning.settings import changed_settings, flatten, is_under, settings_hash
from fl_lightning.tracking.runs import add_to_run
from fl_lightning.wire import Ledger

log = logging.getLogger("fl_lightning")

FILE = "test.json"
BEARING = ("seed_everything", "model", "data", "trainer.precision")
"""Settings that a test rests on; the others (rounds, participation, stressors ...) are training's."""
SAME = ("checkpoint", "weights_sha256", "settings_sha256", "versions", "git", "machine")
"""What two tests have in common whose results stand side by side in one file."""
DIGITS = 1e-6  # a test result that is further from the one recorded in training is another result


def examine(
    prepare: Callable[[], Federation],
    ckpt_path: str | None,
    experiment: Path,
    *,
    checkpoint: str | None,
    probes: str | None,
    settings: Mapping[str, Any],
    allow_changed: bool,
    logger: bool | Logger | list[Logger],
) -> dict[str, float]:
    """Probe a checkpoint, write ``test.json``, show it and give it to the run's MLflow record.

    Args:
        prepare: makes the federation; called when the checkpoint is there and whole.
        ckpt_path, checkpoint, probes: as the user gave them.
        experiment: folder of the experiment, where ``last`` is looked for.
        settings: the configuration, nested.
        allow_changed: whether it may differ from the run's.
        logger: where the run is tracked.

    Raises:
        InputError: nothing was written.
    """
    names = chosen(probes)
    place, which = asked_for(ckpt_path, checkpoint)
    saved = choose_checkpoint(place, which, experiment)
    run = RunDirectory(saved.path.parent.parent)
    run.lock()
    try:
        fed = prepare()
        found = probe(load(fed, saved, settings, allow_changed), names)
        results = write(
            run,
            {
                "chosen": which,
                "settings_sha256": settings_hash(bearing(settings)),
                **report(fed, saved, found),
            },
        )
    finally:
        run.unlock()
    show(run, results, found)
    tracked = run.read_json("metadata.json").get("tracking_run_id")
    if tracked and logger:
        add_to_run(
            logger, tracked, {**results["metrics"], **results["timings"]}, results["round"], [run.path / FILE]
        )
    return results["metrics"]


def asked_for(ckpt_path: str | None, checkpoint: str | None) -> tuple[str, str]:
    """The run, and which of its checkpoints: ``last`` unless one is named, by either flag.

    Raises:
        InputError: no run is named, or a checkpoint is named twice.
    """
    if not ckpt_path:
        raise InputError(
            "test without --ckpt_path",
            "the run to be tested is needed",
            "write --ckpt_path and its directory, or last",
        )
    path = Path(ckpt_path)
    if path.parent.name != "checkpoints" or not path.name.startswith("round_"):
        return ckpt_path, checkpoint or "last"
    if checkpoint not in (None, path.name):
        raise InputError(
            f"--checkpoint {checkpoint} with --ckpt_path {ckpt_path}",
            "that names a checkpoint",
            "leave one of them out",
        )
    return str(path.absolute().parent.parent), path.name


def choose_checkpoint(ckpt_path: str, which: str, experiment: Path) -> Checkpoint:
    """Read the checkpoint that is meant, and no other.

    Args:
        ckpt_path: a run directory, or ``last``, the run of this experiment that was written last.
        which: ``last``, ``best`` or a checkpoint's name.
        experiment: folder of the experiment.

    Raises:
        InputError: there is none such, or it is damaged.
    """
    start = find_start(ckpt_path, experiment)
    if start.run is None or start.checkpoint is None:
        raise InputError(
            f"--ckpt_path {ckpt_path}", "the run has no checkpoint yet", "let it run for a round"
        )
    if which == "last":
        return start.checkpoint
    name = which
    if which == "best":
        if not start.checkpoint.progress["best_round"]:
            raise InputError(
                "--checkpoint best",
                "no round of this run was validated (data.val_fraction)",
                "write --checkpoint last",
            )
        name = checkpoint_name(start.checkpoint.progress["best_round"])
    return _read(start.run, name)


def _read(run: Path, name: str) -> Checkpoint:
    there = [path.name for path in checkpoints_in(run / "checkpoints")]
    if name not in there:
        raise InputError(
            f"--checkpoint {name}", f"{run} holds {', '.join(there)}", "write one of these, last or best"
        )
    try:
        return Checkpoint.read(run / "checkpoints" / name)
    except (CheckpointError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"--checkpoint {name}", f"it cannot be used ({error})", f"write one of {', '.join(there)}"
        ) from error


def load(
    fed: Federation, checkpoint: Checkpoint, settings: Mapping[str, Any], allow_changed: bool
) -> Subject:
    """Bring the federation to the checkpoint and make it the subject of probes.

    Raises:
        InputError: it was trained with other data, another method or another seed, and ``allow_changed`` is
            false.
    """
    saved = checkpoint.progress
    changed = changed_settings(bearing(saved["config"]), bearing(settings))
    if saved["partition"] != fed.data.partition_hash and not changed:
        changed = [
            (
                f"the clients' examples: {saved['partition'][:12]} -> {fed.data.partition_hash[:12]} "
                "(hash of the partition)"
            )
        ]
    if changed and not allow_changed:
        more = f" and {len(changed) - 4} more" if len(changed) > 4 else ""
        raise InputError(
            f"--ckpt_path {checkpoint.path}",
            f"it was trained with another configuration ({', '.join(changed[:4])}{more})",
            "leave out --config, which then is the run's own, or write --trainer.allow_changed true",
        )
    if changed:
        log.warning("testing with a changed configuration: %s", ", ".join(changed))
    fed.callbacks = ()  # they belong to training
    done = restore(fed, checkpoint)
    fed.method.round = done.round
    uploads = _mean_upload(RunDirectory(checkpoint.path.parent.parent), done.round)
    return Subject(fed.fabric, fed.method, fed.data, fed.states, fed.seed, uploads)


def bearing(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a test rests on, with dotted keys."""
    return {key: value for key, value in flatten(settings).items() if is_under(key, BEARING)}


def _mean_upload(run: RunDirectory, round: int) -> float | None:
    """Bytes of an upload of this round that counted, on average."""
    try:
        entries = Ledger.from_csv(run.tables["ledger"].path.read_text()).entries
    except (OSError, ValueError, StopIteration):
        return None
    sizes = [entry.upload for entry in entries if entry.round == round and entry.status == "trained"]
    return sum(sizes) / len(sizes) if sizes else None


def report(fed: Federation, checkpoint: Checkpoint, found: Mapping[str, Finding]) -> dict[str, Any]:
    """What ``test.json`` holds."""
    recorded = _recorded(checkpoint)
    metrics = {name: value for finding in found.values() for name, value in finding.metrics.items()}
    for name in ("test/accuracy", "test/loss"):
        if name in metrics and name in recorded and not abs(metrics[name] - recorded[name]) <= DIGITS:
            log.warning(
                "%s: %.9g, in training %.9g; another device, precision or data?",
                name,
                metrics[name],
                recorded[name],
            )
    return {
        "checkpoint": checkpoint.path.name,
        "round": checkpoint.progress["round"],
        "method": type(fed.method).__name__,
        "dataset": fed.data.dataset,
        "seed": fed.seed,
        "weights_sha256": weights_hash(fed),
        "partition_sha256": fed.data.partition_hash,
        "tested": now(),
        "git": git_state(),
        "versions": versions(),
        "metrics": metrics,
        "recorded": {name: recorded[name] for name in metrics if name in recorded},
        "timings": {name: value for finding in found.values() for name, value in finding.timings.items()},
        "machine": _machine(fed),
        "probes": {name: finding.details for name, finding in found.items()},
        "skipped": {name: finding.skipped for name, finding in found.items() if finding.skipped},
    }


def _recorded(checkpoint: Checkpoint) -> dict[str, float]:
    """The metrics of the checkpoint's round, as training wrote them."""
    table = RunDirectory(checkpoint.path.parent.parent).tables["metrics"]
    rows = numbers(table.until(checkpoint.progress["tables"]["metrics"]))
    return rows[-1] if rows else {}


def _machine(fed: Federation) -> dict[str, Any]:
    """Whose the timings are."""
    device = fed.fabric.device
    return {
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{device.type} {platform.machine()}",
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "precision": fed.fabric.strategy.precision.precision,
    }


def write(run: RunDirectory, new: dict[str, Any]) -> dict[str, Any]:
    """Write ``test.json``, with what other probes found before in the same circumstances; a test in others is
    kept beside it."""
    before = run.read_json(FILE)
    if before and all(before.get(name) == new[name] for name in SAME):
        parts = ("metrics", "recorded", "timings", "probes")
        skipped = {name: said for name, said in before["skipped"].items() if name not in new["probes"]}
        new = {
            **new,
            **{part: {**before[part], **new[part]} for part in parts},
            "skipped": {**skipped, **new["skipped"]},
        }
    elif before:
        run.write_json(f"test_{before.get('checkpoint', 'before')}.json", before)
    run.write_json(FILE, new)
    return new


def show(run: RunDirectory, new: Mapping[str, Any], found: Mapping[str, Finding]) -> None:
    """The results as a table on stdout, and below it what was left out."""
    grid = Table()
    for column, justify in (("probe", "left"), ("metric", "left"), ("value", "right")):
        grid.add_column(column, justify=justify)  # type: ignore[arg-type]
    for name, finding in found.items():
        label = f"{name} ({finding.details['source']})" if "source" in finding.details else name
        rows = [
            *((k, _shown(k, v)) for k, v in finding.metrics.items()),
            *((k, _shown(k, v)) for k, v in finding.timings.items()),
        ]
        for number, (metric, value) in enumerate(rows or [("-", "left out")]):
            grid.add_row("" if number else label, metric, value, end_section=number == max(len(rows), 1) - 1)
    console = Console()
    title = f"{new['method']} on {new['dataset']}, seed {new['seed']}, {new['checkpoint']}"
    console.print(title, style="bold", highlight=False)
    console.print(grid)
    for name, finding in found.items():
        for sentence in finding.skipped:
            console.print(f"{name}: {sentence}", style="yellow", markup=False, highlight=False)
    console.print(f"timings and memory are of this machine: {new['machine']}", markup=False, highlight=False)
    console.print(f"written to {run.path / FILE}", markup=False, highlight=False, soft_wrap=True)


def _shown(name: str, value: float) -> str:
    if name.startswith("latency/"):
        return f"{1000 * value:.3f} ms"
    if name == "cost/flops":
        return f"{value / 1e6:.2f} MFLOP"
    if "bytes" in name:
        return f"{value / 1e6:.3f} MB"
    return f"{100 * value:.2f} %" if "accuracy" in name or name.startswith("corrupted/") else f"{value:.4f}"
