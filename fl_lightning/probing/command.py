"""The ``test`` command: choose a checkpoint of a run, load it, run the probes and write the
results."""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from inspect import isclass, signature
from pathlib import Path
from pydoc import locate
from shlex import quote
from typing import Any

import numpy as np
import torch
from lightning.fabric.loggers import Logger
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fl_lightning.config.recorded import imported
from fl_lightning.config.settings import (
    changed_settings,
    flatten,
    is_under,
    listed_changes,
    settings_hash,
)
from fl_lightning.errors import InputError, RunStopped, as_bad_input, error_reason, require
from fl_lightning.federation import Federation, weights_hash
from fl_lightning.hooks import Stressor
from fl_lightning.probing import Finding, ProbedModel, probe, select_probes
from fl_lightning.probing.probed_model import Protection
from fl_lightning.run.checkpoint import CheckpointError
from fl_lightning.run.directory import RunDirectory, checkpoint_name
from fl_lightning.run.metadata import code_of_model, git_state, is_tracked_elsewhere, now, versions
from fl_lightning.run.paths import short_path
from fl_lightning.run.resume import changed_identity, checkpoints_of, identity_of
from fl_lightning.run.snapshot import Checkpoint, restore
from fl_lightning.run.tables import numbers
from fl_lightning.support.user_code import changed_code
from fl_lightning.topology.exchange import Peers
from fl_lightning.tracking.runs import add_to_run
from fl_lightning.wire import Ledger

log = logging.getLogger("fl_lightning")

RESULTS_FILE = "test.json"
RELEVANT_SETTINGS = ("seed_everything", "model", "data", "trainer.precision")
"""Settings that change test results; others (rounds, participation, stressors ...) change only
training."""
IDENTITY_KEYS = ("checkpoint", "weights_sha256", "settings_sha256", "versions", "git", "machine")
"""Entries that must be equal for the results of two tests to be merged into one file."""
SHARES = ("accuracy", "exact_match", "rouge_l")
MAX_DIFFERENCE = 1e-6  # between a result of the test and of training; a larger one is reported


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
    """Probe a checkpoint, write ``test.json``, print the results and add them to the tracked run.

    Args:
        prepare: makes the federation; it is called after the checkpoint was read.
        ckpt_path: the run, as given by the user, see :func:`choose_checkpoint`.
        experiment: folder of the experiment, in which ``last`` is searched.
        checkpoint: name of the checkpoint, ``last`` or ``best``; None: ``last``.
        probes: comma-separated names of probes; None: all.
        settings: the configuration, nested.
        allow_changed: whether the configuration may differ from the run's.
        logger: where the run is tracked.

    Returns:
        The metrics of the checkpoint by name.

    Raises:
        InputError: a request cannot be met; nothing was written.
        RunStopped: the run's folder cannot be written; the results were printed all the same.
    """
    names = select_probes(probes)
    place, which = parse_request(ckpt_path, checkpoint)
    saved = choose_checkpoint(place, which, experiment)
    run = RunDirectory(saved.path.parent.parent)
    run.lock()
    try:
        fed = prepare()
        found = probe(load_model(fed, saved, settings, allow_changed), names)
        results = {
            "chosen": which,
            "settings_sha256": settings_hash(relevant_settings(settings)),
            **make_report(fed, saved, found),
        }
        try:
            results = write_results(run, results)
        except OSError as error:
            print_results(results, found)
            file, reason = run.path / RESULTS_FILE, error_reason(error)
            raise RunStopped(
                f"test of {run.path}",
                f"the results above could not be kept in {file} ({reason})",
                "make room, or the folder writable, and test it again",
            ) from error
    finally:
        run.unlock()
    print_results(results, found)
    written = f"written to {run.path / RESULTS_FILE}"
    Console().print(written, markup=False, highlight=False, soft_wrap=True)
    metadata = run.read_json("metadata.json")
    tracked = logger and metadata.get("tracking_run_id")
    if tracked and is_tracked_elsewhere(metadata, run.path):
        original = metadata["tracking_run_dir"]
        log.info("%s is a copy of %s, whose record it leaves alone", run.path, original)
    elif tracked:
        # what training has recorded stays, as it was computed there
        metrics, known = results["metrics"], results["recorded"]
        new = {name: value for name, value in metrics.items() if name not in known}
        add_to_run(
            logger,
            tracked,
            {**new, **results["timings"]},
            results["round"],
            [run.path / RESULTS_FILE],
        )
    return results["metrics"]


def parse_request(ckpt_path: str | None, checkpoint: str | None) -> tuple[str, str]:
    """Return the run and the name of the checkpoint; that is ``last`` if neither flag names one.

    Raises:
        InputError: no run is named, or a checkpoint is named twice.
    """
    if not ckpt_path:
        raise InputError(
            "test without --ckpt_path",
            "the run to be tested is needed",
            "write --ckpt_path and its directory, or last",
        )
    path = Path(os.path.expanduser(ckpt_path))
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
    """Read the requested checkpoint; never fall back to another one.

    Args:
        ckpt_path: a run directory, or ``last`` for the latest run of the experiment.
        which: ``last``, ``best`` or a checkpoint's name.
        experiment: folder of the experiment.

    Raises:
        InputError: there is no such checkpoint, it is damaged, or the run has finished with a later
            round than that of its newest one.
    """
    run, found = checkpoints_of(ckpt_path, experiment)
    there = [path.name for path in found]
    directory = RunDirectory(run)
    finished = directory.read_json("metadata.json").get("status") == "finished"
    if not there:
        given = f"--ckpt_path {ckpt_path}"
        if finished:
            copy = "copy its folder checkpoints to it, or run it again"
            raise InputError(given, "the run has finished, and its checkpoints are not here", copy)
        raise InputError(given, "the run has no checkpoint yet", "let it run for a round")
    if which not in ("last", "best"):
        return _read(run, which, there)
    newest, rounds = _read(run, there[0], there), directory.tables["metrics"].rows_there
    place = quote(str(short_path(run)))
    require(
        not finished or rounds <= newest.progress["round"],
        f"--checkpoint {which}",
        f"the run has finished with round {rounds}, and its newest checkpoint is {there[0]}",
        f"make the later rounds anew with fit --config {place}/config.yaml --ckpt_path {place}, "
        f"or write --checkpoint {there[0]}",
    )
    if which == "last":
        return newest
    require(
        newest.progress["best_round"],
        "--checkpoint best",
        "no round of this run was validated (data.val_fraction)",
        "write --checkpoint last",
    )
    best = checkpoint_name(newest.progress["best_round"])
    gone = f"{best}, which was best in validation, is not in {run}"
    require(best in there, "--checkpoint best", gone, "write --checkpoint last")
    return newest if best == there[0] else _read(run, best, there)


def _read(run: Path, name: str, there: Sequence[str]) -> Checkpoint:
    if name not in there:
        raise InputError(
            f"--checkpoint {name}",
            f"{run} holds {', '.join(there)}",
            "write one of these, last or best",
        )
    others = ", ".join(f"--checkpoint {other}" for other in there if other != name)
    instead = f"restore its files, or write {others}" if others else "restore its files"
    damage = (KeyError, TypeError, AttributeError)
    with as_bad_input(
        f"--checkpoint {name}", "it cannot be used", instead, CheckpointError, *damage
    ):
        return Checkpoint.read(run / "checkpoints" / name)


def load_model(
    fed: Federation, checkpoint: Checkpoint, settings: Mapping[str, Any], allow_changed: bool
) -> ProbedModel:
    """Restore the federation from the checkpoint and return its model for the probes.

    Raises:
        InputError: it was trained with other data, another method, another version of its files
            or another seed, and ``allow_changed`` is false.
    """
    saved, asked = checkpoint.progress, relevant_settings(settings)
    changed = changed_settings(_written_out(relevant_settings(saved["config"]), asked), asked)
    instead = "leave out --config, which then is the run's own, use the version that trained it,"
    if not changed:
        changed = changed_identity(saved, identity_of(fed))
        instead = "give the data, the files and the network of then,"
    run = RunDirectory(checkpoint.path.parent.parent)
    metadata = run.read_json("metadata.json")
    if not changed:
        known, own = metadata.get("code") or {}, code_of_model(fed)
        code = {name: sha for name, sha in known.items() if name in own}  # not of callbacks
        changed = [f"the code of {name}" for name in changed_code(code)]
        instead = "restore the files of then,"
    if changed and not allow_changed:
        raise InputError(
            f"--ckpt_path {checkpoint.path}",
            f"it was trained with another configuration ({listed_changes(changed)})",
            f"{instead} or write --trainer.allow_changed true",
        )
    if changed:
        log.warning(
            "this is not the configuration that it was trained with: %s", ", ".join(changed)
        )
    reads = fed.method.finetuner or fed.method.labels_of  # the labels that stressors change
    fed.callbacks = tuple(one for one in fed.callbacks if reads and isinstance(one, Stressor))
    done = restore(fed, checkpoint)
    fed.method.round = done.round
    ledger = Ledger.from_csv(checkpoint.table("ledger"))
    entries = [entry for entry in ledger.entries if entry.status == "trained"]
    deployed = "deployment" in metadata
    sizes = [entry.upload for entry in entries if entry.round == done.round]
    trained_on = frozenset(entry.client for entry in entries)
    return ProbedModel(
        fed.fabric,
        fed.method,
        fed.data,
        fed.states,
        fed.seed,
        uploads=_mean_upload(fed, sizes),
        cohort=fed.cohort_size,
        protection=_protection(fed),
        trained_on=None if fed.method.pools_examples else trained_on or None,
        newcomers=fed.method.personalised and deployed and not checkpoint.tensors["clients"],
    )


def _mean_upload(fed: Federation, sizes: Sequence[int]) -> float | str:
    """Return the mean bytes of uploads, or why there is no such number."""
    if isinstance(fed.aggregation, Peers):
        return "the ledger has all that a peer sends to its neighbours"
    return sum(sizes) / len(sizes) if sizes else "no upload of this round counted"


def _protection(fed: Federation) -> Protection:
    """Return what protects the run's updates; C is that of the configuration."""
    secure, privacy = fed.aggregation.masks is not None, fed.aggregation.privacy
    if privacy is None:
        return Protection(secure)
    settings, cohort = privacy.settings, fed.cohort_size
    noise = settings.message_multiplier(cohort) * settings.clip_norm
    share = noise / settings.least_returned(cohort) ** 0.5 if settings.is_distributed else 0.0
    return Protection(secure, settings.clip_norm, noise, share)


def relevant_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that change test results, with dotted keys."""
    return {
        key: value for key, value in flatten(settings).items() if is_under(key, RELEVANT_SETTINGS)
    }


def _written_out(before: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of a run that was made from Python with each class as a configuration file
    has it: under the path that is ``asked`` for, with its defaults."""
    found = dict(before)
    for key, path in asked.items():
        name = key.removesuffix(".class_path")
        given = before.get(key, before.get(name))  # it may have been given by itself
        if name == key or not isinstance(given, str) or not _is_same_class(given, path):
            continue
        found.pop(name, None)
        found[key] = path
        try:
            parameters = signature(locate(path)).parameters.values()  # type: ignore[arg-type]
        except (TypeError, ValueError):  # it cannot be imported, or does not say
            continue
        defaults = {
            f"{name}.init_args.{one.name}": one.default
            for one in parameters
            if one.default is not one.empty
        }
        found |= {
            one: asked[one] if value == asked[one] else value  # 0 is 0.0
            for one, value in flatten(defaults).items()
            if one in asked and one not in found
        }
    return found


def _is_same_class(path: str, other: str) -> bool:
    return path == other or (isclass(found := imported(path)) and found is imported(other))


def make_report(
    fed: Federation, checkpoint: Checkpoint, found: Mapping[str, Finding]
) -> dict[str, Any]:
    """Return the content of ``test.json``; warn of results that differ from those of training."""
    recorded = _recorded(checkpoint)
    metrics = {name: value for finding in found.values() for name, value in finding.metrics.items()}
    for name in ("test/accuracy", "test/loss"):
        if (
            name in metrics
            and name in recorded
            and not np.isclose(
                metrics[name], recorded[name], rtol=0, atol=MAX_DIFFERENCE, equal_nan=True
            )
        ):
            log.warning(
                "%s: %.9g, but %.9g in training; compare device, precision and data",
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
        "timings": {
            name: value for finding in found.values() for name, value in finding.timings.items()
        },
        "machine": _machine(fed),
        "probes": {name: finding.details for name, finding in found.items()},
        "skipped": {name: finding.skipped for name, finding in found.items() if finding.skipped},
    }


def _recorded(checkpoint: Checkpoint) -> dict[str, float]:
    """Return the metrics of the checkpoint's round that training wrote."""
    rows = numbers(checkpoint.table("metrics").encode())
    return rows[-1] if rows else {}


def _machine(fed: Federation) -> dict[str, Any]:
    """Describe the machine on which the timings were taken."""
    device = fed.fabric.device
    return {
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{device.type} {platform.machine()}",
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "precision": fed.fabric.strategy.precision.precision,
    }


def write_results(run: RunDirectory, new: dict[str, Any]) -> dict[str, Any]:
    """Write ``test.json`` and return its content.

    Results of other probes are kept if all of ``IDENTITY_KEYS`` are equal, also those of an earlier
    test that has been kept under another name, as the present file is where it is of another
    checkpoint.
    """

    def same(document: Mapping[str, Any]) -> bool:
        return all(document.get(name) == new[name] for name in IDENTITY_KEYS)

    before, kept = run.read_json(RESULTS_FILE), run.read_json(f"test_{new['checkpoint']}.json")
    if before and not same(before) and same(kept):
        run.write_json(f"test_{before.get('checkpoint', 'before')}.json", before)
        before = kept
    if before and same(before):
        parts = ("metrics", "recorded", "timings", "probes")
        skipped = {
            name: said for name, said in before["skipped"].items() if name not in new["probes"]
        }
        new = {
            **new,
            **{part: {**before[part], **new[part]} for part in parts},
            "skipped": {**skipped, **new["skipped"]},
        }
    elif before:
        run.write_json(f"test_{before.get('checkpoint', 'before')}.json", before)
    run.write_json(RESULTS_FILE, new)
    return new


def print_results(new: Mapping[str, Any], found: Mapping[str, Finding]) -> None:
    """Print the results as a table, and below it what was left out."""
    grid = Table()
    for column, justify in (("probe", "left"), ("metric", "left"), ("value", "right")):
        grid.add_column(column, justify=justify)  # type: ignore[arg-type]
    for name, finding in found.items():
        label = f"{name} ({finding.details['source']})" if "source" in finding.details else name
        rows = [
            *((k, _format_value(k, v)) for k, v in finding.metrics.items()),
            *((k, _format_value(k, v)) for k, v in finding.timings.items()),
        ]
        for number, (metric, value) in enumerate(rows or [("-", "left out")]):
            grid.add_row(
                "" if number else escape(label),
                escape(metric),
                value,
                end_section=number == max(len(rows), 1) - 1,
            )
    console = Console()
    title = f"{new['method']} on {new['dataset']}, seed {new['seed']}, {new['checkpoint']}"
    console.print(title, style="bold", markup=False, highlight=False)
    console.print(grid)
    for name, finding in found.items():
        for sentence in finding.skipped:
            console.print(f"{name}: {sentence}", style="yellow", markup=False, highlight=False)
    machine = ", ".join(f"{name} {value}" for name, value in new["machine"].items())
    said = f"timings and memory are of this machine: {machine}"
    console.print(said, markup=False, highlight=False)


def _format_value(name: str, value: float) -> str:
    if name.startswith("latency/"):
        return f"{1000 * value:.3f} ms"
    if name == "cost/flops":
        return f"{value / 1e6:.2f} MFLOP"
    if "bytes" in name:
        return f"{value / 1e6:.3f} MB"
    if name.endswith(SHARES) or name.startswith("corrupted/"):
        return f"{100 * value:.2f} %"
    return f"{value:.4f}"
