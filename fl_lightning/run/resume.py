"""Which run is continued, from which of its checkpoints, and whether it still is the same run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fl_lightning.distributed import collectives
from fl_lightning.errors import InputError
from fl_lightning.run.checkpoint import CheckpointError, checkpoints_in
from fl_lightning.run.directory import free_name, numbered
from fl_lightning.run.snapshot import Checkpoint
from fl_lightning.settings import changed_settings, config_of, flatten, is_free
from fl_lightning.support.recorded import not_recorded

log = logging.getLogger("fl_lightning")

RUN_NAME = "trainer.run_name"
MAX_SHOWN = 8  # changed settings in an error


@dataclass(frozen=True)
class Start:
    """What ``--ckpt_path`` and ``--trainer.auto_resume`` found.

    Args:
        run: the run directory to continue in; None: a new one.
        checkpoint: where to continue; None: from the first round, since the run was stopped before its first
            checkpoint.
        free: the name that a new run was to get when ``auto_resume`` found none to continue. If it is taken
            by the time the run is created, another process has started the same run. Empty: any name will do.
    """

    run: Path | None = None
    checkpoint: Checkpoint | None = None
    free: str = ""

    @property
    def name(self) -> str:
        """What ``find_start`` takes to find the same; empty for a new run."""
        return str(self.checkpoint.path if self.checkpoint else self.run or "")


def find_start(ckpt_path: str, experiment: Path, run_name: str | None = None) -> Start:
    """Read the checkpoint that ``--ckpt_path`` means; a damaged one is named in a warning and the one before
    it is used.

    Args:
        ckpt_path: a checkpoint, a run directory, or ``last``: the run of this experiment that was written
            last.
        experiment: the folder of the experiment.
        run_name: the name that ``last`` has to have, a number after it or not; None: any.

    Raises:
        InputError: there is none, or none is whole.
    """
    path = _last_run(experiment, run_name) if ckpt_path == "last" else Path(ckpt_path).absolute()
    if path.name.startswith("round_") and path.parent.name == "checkpoints":
        run, candidates = path.parent.parent, [c for c in checkpoints_in(path.parent) if c.name <= path.name]
        if not path.exists():
            raise InputError(
                f"--ckpt_path {ckpt_path}", "there is no such checkpoint", "name the run directory, or last"
            )
    else:
        run, candidates = path, checkpoints_in(path / "checkpoints")
    if not (run / "config.yaml").exists() and not candidates:
        raise InputError(
            f"--ckpt_path {ckpt_path}",
            "it is neither a run directory nor a checkpoint in one",
            "name one, or last",
        )
    if not candidates:
        return Start(run)
    for candidate in candidates:
        try:
            return Start(run, Checkpoint.read(candidate))
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


def _last_run(experiment: Path, name: str | None) -> Path:
    runs = [path.parent for path in experiment.glob("*/config.yaml") if not path.parent.name.startswith(".")]
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
            f"there is no run {called}under {experiment}",
            "leave --ckpt_path out to start one",
        )

    def written(run: Path) -> int:
        marks = [run / "metadata.json", run / "config.yaml", *checkpoints_in(run / "checkpoints")[:1]]
        return max(path.stat().st_mtime_ns for path in marks if path.exists())

    return max(runs, key=written).absolute()


def _asked_name(run: Path) -> str | None:
    """The ``run_name`` that a run was started with: ``exp-2`` is the second run of ``exp``, or one that
    somebody called so."""
    try:
        return config_of(run).get(RUN_NAME)
    except InputError:
        return None


def everywhere(choose: Callable[[], Start]) -> Start:
    """What rank 0 chooses, on every rank."""
    start = choose() if collectives.rank() == 0 else Start()
    path = collectives.from_rank_zero(start.name)
    return start if collectives.rank() == 0 or not path else find_start(path, Path())


def find_same(experiment: Path, name: str, config: Mapping[str, Any]) -> Start:
    """For ``auto_resume``: the latest run of this name whose configuration is the same in what counts;
    nothing when there is none."""
    asked = flatten(config)
    free = free_name(experiment, name)
    for run in numbered(experiment, name):
        if not (run / "config.yaml").exists():
            continue
        try:
            before = config_of(run)
            same = before.get(RUN_NAME) == asked.get(RUN_NAME) and not changed_settings(before, asked)
        except InputError as error:
            log.warning("%s; the run is left alone", error)
            continue
        if same:
            return find_start(str(run), experiment)
    return Start(free=free)


def check_same(start: Start, config: Mapping[str, Any], partition: str, allow_changed: bool) -> bool:
    """Whether the run is continued with another configuration.

    Raises:
        InputError: it differs in a key that changes results, or the data do, and ``allow_changed`` is false.
    """
    assert start.run is not None
    saved: Mapping[str, Any] = (
        start.checkpoint.progress
        if start.checkpoint
        else {"config": config_of(start.run), "partition": partition}
    )
    settings = flatten(config)
    changed = changed_settings(saved["config"], settings)
    if not saved["config"]:
        changed = ["its settings, which were not recorded"]
    elif unknown := sorted(
        {key for key in not_recorded({**saved["config"], **settings}) if not is_free(key)}
    ):
        changed = [
            f"{key}, which cannot be recorded ({settings.get(key, 'not set')})" for key in unknown
        ] + changed
    if saved["partition"] != partition and not changed:
        changed = [
            f"the clients' examples: {saved['partition'][:12]} -> {partition[:12]} (hash of the partition)"
        ]
    if changed and not allow_changed:
        raise InputError(
            f"--ckpt_path {start.run}",
            f"it was written with another configuration ({_shown(changed)})",
            "give the same one, or --trainer.allow_changed true",
        )
    if changed:
        log.warning("resuming with a changed configuration: %s", ", ".join(changed))
    return bool(changed)


def _shown(changed: Sequence[str]) -> str:
    """The first of many changes, and how many there are."""
    more = len(changed) - MAX_SHOWN
    return ", ".join([*changed[:MAX_SHOWN], *([f"and {more} more"] if more > 0 else [])])
