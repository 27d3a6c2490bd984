"""Where a run stands, as a checkpoint holds it, and how a run is continued from one."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from fl_lightning.checkpoint import CheckpointError, checkpoints_in, load_checkpoint, save_checkpoint
from fl_lightning.errors import InputError
from fl_lightning.hooks import RoundRecord
from fl_lightning.loop import Federation
from fl_lightning.run_directory import RunDirectory, checkpoint_name, numbered
from fl_lightning.tables import Mark

log = logging.getLogger("fl_lightning")

FORMAT = 2
FREE_KEYS = ("trainer.devices", "trainer.strategy", "trainer.num_nodes", "trainer.rank_timeout", "trainer.engine",
             "trainer.accelerator", "trainer.logger",
             "trainer.default_root_dir", "trainer.experiment", "trainer.run_name", "trainer.checkpoint_every",
             "trainer.keep_checkpoints", "trainer.allow_changed", "trainer.auto_resume", "data.root", "data.init_args.root",
             "data.download", "data.init_args.download", "ckpt_path", "config")  # fmt: skip
"""Settings that may differ on resume: they do not change what is computed."""


@dataclass(frozen=True)
class Snapshot:
    """A run at the end of ``round``: an interrupted round leaves no trace. Made anew each round, so that it is never half of two.

    Args:
        server, states: server tensors, and kept client tensors by client id. Shared, not copied: methods replace them.
        callbacks: class and state (JSON) of each callback.
        tables: where ``metrics.csv`` and ``ledger.csv`` stood.
        best_round: the first round with the highest validation accuracy, 0 before any.
    """

    round: int = 0
    server: Mapping[str, Tensor] = field(default_factory=dict)
    states: Mapping[int, Mapping[str, Tensor]] = field(default_factory=dict)
    callbacks: tuple[tuple[str, str], ...] = ()
    tables: Mapping[str, Mark] = field(default_factory=dict)
    best_round: int = 0
    best_accuracy: float = float("-inf")

    def after(self, fed: Federation, record: RoundRecord, tables: Mapping[str, Mark]) -> Snapshot:
        """The next one, when a round is done."""
        accuracy = record.metrics.get("val/accuracy", float("-inf"))
        better = accuracy > self.best_accuracy
        return Snapshot(
            round=record.round,
            server=dict(fed.method.server),
            states={id: dict(state) for id, state in fed.states.items() if state},
            callbacks=tuple((_class(callback), json.dumps(callback.state_dict())) for callback in fed.callbacks),
            tables=tables,
            best_round=record.round if better else self.best_round,
            best_accuracy=accuracy if better else self.best_accuracy,
        )

    def save(self, folder: Path, config: Mapping[str, Any], partition: str) -> None:
        """Write it as a checkpoint; ``partition`` is the hash of who holds which examples."""
        clients = {f"{id}/{name}": tensor for id, state in self.states.items() for name, tensor in state.items()}
        progress = {
            "format": FORMAT,
            "round": self.round,
            "callbacks": self.callbacks,
            "tables": self.tables,
            "best_round": self.best_round,
            "best_accuracy": self.best_accuracy,
            "partition": partition,
            "on_device": [name for name, tensor in clients.items() if tensor.device.type != "cpu"],
            "config": flatten(config),
        }
        save_checkpoint(folder / checkpoint_name(self.round), {"server": self.server, "clients": clients}, {"progress": progress})


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that has been read and found whole, and whose run still has the rows of its rounds."""

    path: Path
    tensors: dict[str, dict[str, Tensor]]
    progress: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> Checkpoint:
        """Raises:
        CheckpointError: it is not whole, of another format, or its run's files do not hold its rounds any more.
        """
        tensors, documents = load_checkpoint(path)
        progress = documents.get("progress")
        if not isinstance(progress, dict) or progress.get("format") != FORMAT or not {"server", "clients"} <= tensors.keys():
            raise CheckpointError(f"{path} is foreign or of another release; this one reads format {FORMAT}; name another")
        run = RunDirectory(path.parent.parent)
        for name, mark in progress["tables"].items():
            run.tables[name].until(mark)
        return cls(path, tensors, progress)


@dataclass(frozen=True)
class Start:
    """What ``--ckpt_path`` and ``--trainer.auto_resume`` found.

    Args:
        run: the run directory to continue in; None: a new one.
        checkpoint: where to continue; None: from the first round, since the run was stopped before its first checkpoint.
    """

    run: Path | None = None
    checkpoint: Checkpoint | None = None

    @property
    def name(self) -> str:
        """What ``find_start`` takes to find the same; empty for a new run."""
        return str(self.checkpoint.path if self.checkpoint else self.run or "")


def find_start(ckpt_path: str, experiment: Path) -> Start:
    """Read the checkpoint that ``--ckpt_path`` means; a damaged one is named in a warning and the one before it is used.

    Args:
        ckpt_path: a checkpoint, a run directory, or ``last``: the run of this experiment that was written last.

    Raises:
        InputError: there is none, or none is whole.
    """
    path = _last_run(experiment) if ckpt_path == "last" else Path(ckpt_path).absolute()
    if path.name.startswith("round_") and path.parent.name == "checkpoints":
        run, candidates = path.parent.parent, [c for c in checkpoints_in(path.parent) if c.name <= path.name]
        if not path.exists():
            raise InputError(f"--ckpt_path {ckpt_path}; there is no such checkpoint; name the run directory, or last")
    else:
        run, candidates = path, checkpoints_in(path / "checkpoints")
    if not (run / "config.yaml").exists() and not candidates:
        raise InputError(f"--ckpt_path {ckpt_path}; it is neither a run directory nor a checkpoint in one; name one, or last")
    if not candidates:
        return Start(run)
    for candidate in candidates:
        try:
            return Start(run, Checkpoint.read(candidate))
        except (CheckpointError, KeyError, TypeError, AttributeError) as error:
            log.warning("checkpoint refused: %s", error if isinstance(error, CheckpointError) else f"{candidate} ({error!r})")
    raise InputError(
        f"--ckpt_path {ckpt_path}; none of its {len(candidates)} checkpoints can be used; start the run anew without it"
    )


def _last_run(experiment: Path) -> Path:
    runs = [path.parent for path in experiment.glob("*/config.yaml") if not path.parent.name.startswith(".")]
    if not runs:
        raise InputError(f"--ckpt_path last; there is no run under {experiment}; leave --ckpt_path out to start one")

    def written(run: Path) -> int:
        marks = [run / "metadata.json", run / "config.yaml", *checkpoints_in(run / "checkpoints")[:1]]
        return max(path.stat().st_mtime_ns for path in marks if path.exists())

    return max(runs, key=written).absolute()


def find_same(experiment: Path, name: str, config: Mapping[str, Any]) -> Start:
    """For ``auto_resume``: the latest run of this name whose configuration is the same in what counts; nothing when there is none."""
    for run in numbered(experiment, name):
        if (run / "config.yaml").exists() and not changed_settings(config_of(run), flatten(config)):
            return find_start(str(run), experiment)
    return Start()


def config_of(run: Path) -> dict[str, Any]:
    """The configuration that a run began with, with dotted keys."""
    try:
        return flatten(yaml.safe_load((run / "config.yaml").read_text()) or {})
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise InputError(f"{run / 'config.yaml'}; it cannot be read ({error}); mend it, or start a new run") from None


def check_same(start: Start, config: Mapping[str, Any], partition: str, allow_changed: bool) -> bool:
    """Whether the run is continued with another configuration.

    Raises:
        InputError: it differs in a key that changes results, or the data do, and ``allow_changed`` is false.
    """
    assert start.run is not None
    saved: Mapping[str, Any] = (
        start.checkpoint.progress if start.checkpoint else {"config": config_of(start.run), "partition": partition}
    )
    changed = changed_settings(saved["config"], flatten(config))
    if saved["partition"] != partition and not changed:
        changed = [f"the clients' examples: {saved['partition'][:12]} -> {partition[:12]} (hash of the partition)"]
    if changed and not allow_changed:
        raise InputError(
            f"--ckpt_path {start.run}; it was written with another configuration ({', '.join(changed)}); "
            "give the same one, or --trainer.allow_changed true"
        )
    if changed:
        log.warning("resuming with a changed configuration: %s", ", ".join(changed))
    return bool(changed)


def restore(fed: Federation, checkpoint: Checkpoint) -> Snapshot:
    """Bring the federation to where the checkpoint was written.

    Raises:
        InputError: its tensors are not this method's and network's.
    """
    saved, server = checkpoint.progress, checkpoint.tensors["server"]
    for name, tensor in fed.method.server.items():
        fixed = slice(int(name in fed.method.growing), None)
        if name not in server or server[name].shape[fixed] != tensor.shape[fixed] or server[name].dtype != tensor.dtype:
            there = f"{tuple(server[name].shape)} {server[name].dtype}" if name in server else "missing"
            raise InputError(
                f"--ckpt_path {checkpoint.path}; its server tensor {name!r} is {there} and this method's is "
                f"{tuple(tensor.shape)} {tensor.dtype}; use the method and network that wrote it"
            )
    fed.method.server = dict(server)
    fed.states = {}
    on_device = set(saved["on_device"])
    for name, tensor in checkpoint.tensors["clients"].items():
        id, key = name.split("/", 1)
        fed.states.setdefault(int(id), {})[key] = tensor.to(fed.fabric.device) if name in on_device else tensor
    _restore_callbacks(fed, saved["callbacks"])
    return Snapshot(
        round=saved["round"],
        server=dict(fed.method.server),
        states={id: dict(state) for id, state in fed.states.items()},
        callbacks=tuple((name, state) for name, state in saved["callbacks"]),
        tables=saved["tables"],
        best_round=saved["best_round"],
        best_accuracy=saved["best_accuracy"],
    )


def _restore_callbacks(fed: Federation, saved: list[list[str]]) -> None:
    """By class, and among those of one class by order: a changed list of callbacks keeps what it has in common with the old one."""
    left = [(name, json.loads(state)) for name, state in saved]
    for callback in fed.callbacks:
        match = next((entry for entry in left if entry[0] == _class(callback)), None)
        if match is None:
            log.warning("%s joins the run; it has no state of the rounds before", _class(callback))
            continue
        left.remove(match)
        callback.load_state_dict(match[1])


def _class(callback: object) -> str:
    return f"{type(callback).__module__}.{type(callback).__qualname__}"


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings and lists as one mapping with dotted keys."""
    if isinstance(config, Mapping):
        items = [(str(key), value) for key, value in config.items()]
    elif isinstance(config, list):
        items = [(str(index), value) for index, value in enumerate(config)]
    else:
        return {prefix: config if isinstance(config, (bool, int, float, str, type(None))) else str(config)}
    return {key: value for name, item in items for key, value in flatten(item, f"{prefix}.{name}" if prefix else name).items()}


def changed_settings(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """``key: before -> after`` for each setting that differs and can change a result."""
    keys = [key for key in {**before, **after} if not any(key == free or key.startswith(f"{free}.") for free in FREE_KEYS)]

    def shown(settings: Mapping[str, Any], key: str) -> str:
        return json.dumps(settings[key]) if key in settings else "not set"  # as text: NaN equals itself

    return [f"{key}: {shown(before, key)} -> {shown(after, key)}" for key in keys if shown(before, key) != shown(after, key)]
