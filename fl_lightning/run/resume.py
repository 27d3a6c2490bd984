"""The choice of the run to continue and of its checkpoint, and the check of its configuration."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fl_lightning.config.recorded import not_recorded
from fl_lightning.config.settings import (
    changed_settings,
    config_of,
    flatten,
    is_free,
    listed_changes,
)
from fl_lightning.data.hashes import hashes_of
from fl_lightning.distributed import collectives
from fl_lightning.errors import InputError, require
from fl_lightning.federation import Federation
from fl_lightning.models.constants import other_constants, what_never_travels
from fl_lightning.run.checkpoint import CheckpointError
from fl_lightning.run.directory import RunName, free_name, numbered
from fl_lightning.run.paths import checkpoints_in, rounds_kept, run_and_checkpoints, short_path
from fl_lightning.run.snapshot import IDENTITY, Checkpoint

log = logging.getLogger("fl_lightning")

RUN_NAME = "trainer.run_name"


@dataclass(frozen=True)
class Start:
    """The point from which ``--ckpt_path`` or ``--trainer.auto_resume`` starts a run.

    Args:
        run: the run directory to continue in; None for a new run.
        checkpoint: the checkpoint to continue from; None for the first round, as in a run that was
            stopped before its first checkpoint.
        new_name: the name that a new run must get, since ``auto_resume`` found no run to continue.
            If it is taken by the time the run is created, another process has started the same run.
            Empty if any name will do.
        newest: round of the newest checkpoint that the run had then, whole or damaged; -1: none.
    """

    run: Path | None = None
    checkpoint: Checkpoint | None = None
    new_name: str = ""
    newest: int = -1

    @property
    def name(self) -> str:
        """The path with which :func:`find_start` finds the same start; empty for a new run."""
        return str(self.checkpoint.path if self.checkpoint else self.run or "")


def find_start(ckpt_path: str, experiment: Path, run_name: str | None = None) -> Start:
    """Read the checkpoint that ``--ckpt_path`` names.

    A damaged checkpoint is reported in a warning, and the one before it is used.

    Args:
        ckpt_path: a checkpoint, a run directory, or ``last``, the run of this experiment that was
            written last.
        experiment: the folder of the experiment.
        run_name: the name that ``last`` must have, with or without a number after it; None for any
            name.

    Raises:
        InputError: there is no such run or checkpoint, or none of its checkpoints can be read.
    """
    run, candidates = checkpoints_of(ckpt_path, experiment, run_name)
    newest = newest_round(run)
    if not candidates:
        return Start(run, newest=newest)
    for candidate in candidates:
        try:
            return Start(run, Checkpoint.read(candidate), newest=newest)
        except (CheckpointError, KeyError, TypeError, AttributeError) as error:
            log.warning(
                "checkpoint refused: %s",
                error if isinstance(error, CheckpointError) else f"{candidate} ({error!r})",
            )
    raise InputError(
        f"--ckpt_path {ckpt_path}",
        f"none of its {len(candidates)} checkpoints can be used",
        "start the run anew without it",
    )


def newest_round(run: Path) -> int:
    """Return the round of a run's newest checkpoint; -1 if it has none."""
    return next(iter(rounds_kept(run)), -1)


def checkpoints_of(
    ckpt_path: str, experiment: Path, run_name: str | None = None
) -> tuple[Path, list[Path]]:
    """Return the run that ``--ckpt_path`` names, and its checkpoints, newest first; the arguments
    are those of :func:`find_start`.

    Raises:
        InputError: there is no such run or checkpoint.
    """
    require(ckpt_path, "--ckpt_path ''", "it names no run", "write a run's directory, or last")
    named = str(_last_run(experiment, run_name)) if ckpt_path == "last" else ckpt_path
    return run_and_checkpoints(named)


def _last_run(experiment: Path, name: str | None) -> Path:
    """Return the run of an experiment, of this name if one is given, that was written last."""
    runs = [
        path.parent
        for path in experiment.glob("*/config.yaml")
        if not path.parent.name.startswith(".")
    ]
    if name is not None:
        runs = [
            path
            for path in numbered(experiment, name)
            if path in runs and (path.name == name or _asked_name(path) == name)
        ]
    if not runs:
        called = f"called {name} " if name else ""
        raise InputError(
            "--ckpt_path last",
            f"there is no run {called}under {short_path(experiment)}",
            "leave --ckpt_path out to start one",
        )

    def written(run: Path) -> int:
        marks = [
            run / "metadata.json",
            run / "config.yaml",
            *checkpoints_in(run / "checkpoints")[:1],
        ]
        return max(path.stat().st_mtime_ns for path in marks if path.exists())

    return max(runs, key=written).absolute()


def _asked_name(run: Path) -> str | None:
    """Return the ``run_name`` that a run was started with; None if its configuration cannot be
    read.

    The folder does not tell: ``exp-2`` may be the second run of ``exp``, or a run that was named
    ``exp-2``.
    """
    try:
        return config_of(run).get(RUN_NAME)
    except InputError:
        return None


def choose_start(
    ckpt_path: str | None,
    experiment: Path,
    name: RunName,
    config: Mapping[str, Any],
    *,
    auto_resume: bool,
) -> Start:
    """Return, on every rank, the start that rank 0 finds for what the user asks for.

    Args:
        ckpt_path: ``--ckpt_path``; None: the run is new, or the one that ``auto_resume`` finds.
        experiment: the folder of the experiment.
        name: that a new run gets.
        config: the configuration, nested.
        auto_resume: ``--trainer.auto_resume``.

    Raises:
        InputError: ``ckpt_path`` leads to no run that can be continued.
    """
    start = Start()
    if collectives.rank() == 0 and ckpt_path is not None:
        start = find_start(ckpt_path, experiment, name.asked)
    elif collectives.rank() == 0 and auto_resume:
        start = find_same(experiment, name, config)
    path = collectives.from_rank_zero(start.name)
    return start if collectives.rank() == 0 or not path else find_start(path, Path())


def find_same(experiment: Path, name: RunName, config: Mapping[str, Any]) -> Start:
    """Return the start for ``auto_resume``: the latest run of this name with the same
    configuration.

    Settings that do not change results may differ. A run that has another default name is looked at
    after those of this name: its settings may have stood in a file and not in flags, and version
    0.2 put no setting into a name. Without such a run, the start is that of a new run.

    Args:
        experiment: the folder of the experiment.
        name: the name that a new run gets.
        config: the configuration, nested.
    """
    asked = flatten(config)
    new_name = free_name(experiment, str(name))
    runs = numbered(experiment, str(name))
    if asked.get(RUN_NAME) is None:
        runs += [run for run in numbered(experiment, name.start, name.end) if run not in runs]
    for run in runs:
        if not (run / "config.yaml").exists():
            continue
        try:
            before = config_of(run)
            same = before.get(RUN_NAME) == asked.get(RUN_NAME) and not changed_settings(
                before, asked
            )
        except InputError as error:
            log.warning("%s; the run is not continued", error)
            continue
        if same:
            try:
                return find_start(str(run), experiment)
            except InputError as error:
                given = f"--trainer.auto_resume, which finds {short_path(run)}"
                instead = "write another --trainer.run_name to start anew"
                raise InputError(given, error.rule, instead) from error
    return Start(new_name=new_name)


def identity_of(fed: Federation) -> dict[str, Any]:
    """Return what a run's results rest on beside its settings, each as a SHA-256: that of
    :func:`~fl_lightning.data.hashes.hashes_of` its data, the network's weights that never travel
    (``frozen``), the files of devices and traces (``clock``) and of graphs (``topology``), and
    tables of joules (``costs``); and numbers of the network's other tensors that never travel, and
    of what clients begin with that is in no state of a server (``constants``)."""
    method = fed.method
    found: dict[str, Any] = {
        **hashes_of(fed.data),
        **what_never_travels(method.network, method.layout.shapes, method.first),
    }
    found["clock"] = "" if fed.timing is None else fed.timing.clock.content_sha256
    found["topology"] = fed.aggregation.content_sha256
    found["costs"] = method.measured_by.get("sha256", "")
    return {name: value for name, value in found.items() if value}


def changed_identity(saved: Mapping[str, Any], identity: Mapping[str, Any]) -> list[str]:
    """Return what of a run's identity is another one now, in words; a checkpoint of before may say
    less."""
    changed = [
        f"{name}: {saved[key][:12]} -> {identity.get(key, 'none')[:12]} (SHA-256)"
        for key, name in IDENTITY.items()
        if key in saved and saved[key] != identity.get(key)
    ]
    constants = other_constants(saved.get("constants", {}), identity.get("constants", {}))
    return changed + [f"the network's {name}, which is drawn anew" for name in constants]


def require_one_identity(identity: Mapping[str, Any]) -> None:
    """Refuse to begin where ranks are about to train another run than rank 0: its settings are the
    same for all, and what else the results rest on is read by each from its own disk.

    Args:
        identity: :func:`identity_of` this rank's federation.

    Raises:
        InputError: they are.
    """
    others = [json.loads(one) for one in collectives.gather_bytes(json.dumps(identity).encode())]
    first = others[0]
    for rank, other in enumerate(others):
        wrong = [name for key, name in IDENTITY.items() if first.get(key) != other.get(key)]
        constants = other_constants(first.get("constants", {}), other.get("constants", {}))
        wrong += [f"the network's {name}" for name in constants]
        require(
            not wrong,
            f"rank {rank} of {len(others)}",
            f"it has others there than rank 0: {', '.join(wrong)}; all ranks train one run",
            "give every machine the same files and packages, and draw what setup draws from a "
            "generator with a seed",
        )


def check_same(
    start: Start, config: Mapping[str, Any], identity: Mapping[str, Any], allow_changed: bool
) -> bool:
    """Return whether the run is continued with a configuration or data that change its results.

    Args:
        start: the run to continue.
        config: the configuration of this call, nested.
        identity: :func:`identity_of` the federation now.
        allow_changed: whether such a change is allowed; it is then reported in a warning.

    Raises:
        InputError: there is such a change, and ``allow_changed`` is false.
    """
    assert start.run is not None
    saved: Mapping[str, Any] = (
        start.checkpoint.progress
        if start.checkpoint
        else {"config": config_of(start.run), **identity}
    )
    settings = flatten(config)
    changed, instead = changed_settings(saved["config"], settings), "give the same one, or"
    if not saved["config"]:
        changed = ["its settings, which were not recorded"]
    elif unknown := sorted(
        {key for key in not_recorded({**saved["config"], **settings}) if not is_free(key, settings)}
    ):
        instead = "call save_hyperparameters() where that is a LightningModule, or give"
        changed = [
            f"{key}, which cannot be recorded ({settings.get(key, 'not set')})" for key in unknown
        ] + changed
    changed = changed or changed_identity(saved, identity)
    if changed and not allow_changed:
        raise InputError(
            f"--ckpt_path {start.run}",
            f"it was written with another configuration ({listed_changes(changed)})",
            f"{instead} --trainer.allow_changed true",
        )
    if changed:
        log.warning("resuming with a changed configuration: %s", ", ".join(changed))
    return bool(changed)
