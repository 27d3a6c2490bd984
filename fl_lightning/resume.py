"""Where a run stands, as a checkpoint holds it, and how a run is continued from one."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from fl_lightning.checkpoint import CheckpointError, checkpoints_in, load_checkpoint
from fl_lightning.errors import InputError
from fl_lightning.hooks import RoundRecord
from fl_lightning.loop import Federation
from fl_lightning.wire import Ledger, LedgerEntry

log = logging.getLogger("fl_lightning")

FORMAT = 1
FREE_KEYS = ("trainer.devices", "trainer.strategy", "trainer.num_nodes", "trainer.engine", "trainer.accelerator", "trainer.logger",
             "trainer.default_root_dir", "trainer.experiment", "trainer.run_name", "trainer.checkpoint_every",
             "trainer.keep_checkpoints", "trainer.allow_changed", "trainer.auto_resume", "ckpt_path", "config")  # fmt: skip
"""Settings that may differ on resume: they do not change what is computed."""


@dataclass
class Progress:
    """What is done. Everything in it is as it was at the end of ``round``: an interrupted round leaves no trace.

    Args:
        server, states, callbacks: server tensors, kept client tensors by client id, and callback states at the end of ``round``.
        history: one row of metrics per round.
        best_round: the first round with the highest validation accuracy, 0 before any.
        run_id: of the tracking store.
    """

    round: int = 0
    server: dict[str, Tensor] = field(default_factory=dict)
    states: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    callbacks: list[dict[str, Any]] = field(default_factory=list)
    history: list[dict[str, float]] = field(default_factory=list)
    ledger: list[LedgerEntry] = field(default_factory=list)
    best_round: int = 0
    best_accuracy: float = float("-inf")
    run_id: str | None = None

    def advance(self, fed: Federation, record: RoundRecord) -> None:
        """Take in a finished round. Tensors are shared, not copied: methods replace server and client tensors, never write into them."""
        self.round = record.round
        self.server = dict(fed.method.server)
        self.states = dict(fed.states)
        self.callbacks = [callback.state_dict() for callback in fed.callbacks]
        self.history.append({"round": record.round, **record.metrics})
        self.ledger = list(fed.ledger.entries)
        accuracy = record.metrics.get("val/accuracy", float("-inf"))
        if accuracy > self.best_accuracy:
            self.best_round, self.best_accuracy = record.round, accuracy

    def snapshot(self, config: Mapping[str, Any]) -> tuple[dict[str, dict[str, Tensor]], dict[str, object]]:
        """Tensors and documents of a checkpoint."""
        clients = {f"{id}/{name}": tensor for id, state in self.states.items() for name, tensor in state.items()}
        progress = {
            "format": FORMAT,
            "round": self.round,
            "callbacks": self.callbacks,
            "clients": sorted(self.states),
            "best_round": self.best_round,
            "best_accuracy": self.best_accuracy,
            "run_id": self.run_id,
        }
        ledger = [list(asdict(entry).values()) for entry in self.ledger]
        documents = {"progress": progress, "history": self.history, "ledger": ledger, "config": flatten(config)}
        return {"server": self.server, "clients": clients}, documents


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that has been read and found whole."""

    path: Path
    tensors: dict[str, dict[str, Tensor]]
    documents: dict[str, Any]


def find_checkpoint(ckpt_path: str, experiment: Path) -> Checkpoint:
    """Read the checkpoint that ``--ckpt_path`` means; a damaged one is named in a warning and the one before it is used.

    Args:
        ckpt_path: a checkpoint, a run directory, or ``last``: the run of this experiment that was written last.

    Raises:
        InputError: there is none, or none is whole.
    """
    path = Path(ckpt_path)
    if ckpt_path == "last":
        runs = [checkpoints[0] for run in experiment.glob("*/checkpoints") if (checkpoints := checkpoints_in(run))]
        if not runs:
            raise InputError(f"--ckpt_path last; no run under {experiment} has a checkpoint; leave --ckpt_path out to start one")
        path = max(runs, key=lambda checkpoint: checkpoint.stat().st_mtime).parent.parent
    candidates = [path] if (path / "manifest.json").exists() else checkpoints_in(path / "checkpoints")
    if path.name.startswith("round_"):
        candidates = [c for c in checkpoints_in(path.parent) if c.name <= path.name] or [path]
    if not candidates:
        raise InputError(f"--ckpt_path {ckpt_path}; it is neither a checkpoint nor a run directory with one; name one, or last")
    for candidate in candidates:
        try:
            tensors, documents = load_checkpoint(candidate)
            if documents["progress"]["format"] != FORMAT:  # type: ignore[index]
                raise CheckpointError(f"{candidate} has another format; this release reads format {FORMAT}")
            return Checkpoint(candidate, tensors, documents)
        except (CheckpointError, KeyError, TypeError) as error:
            log.warning("checkpoint refused: %s", error)
    raise InputError(f"--ckpt_path {ckpt_path}; none of its {len(candidates)} checkpoints is whole; start the run anew")


def restore(fed: Federation, checkpoint: Checkpoint, config: Mapping[str, Any], allow_changed: bool) -> Progress:
    """Bring the federation to where the checkpoint was written.

    Raises:
        InputError: the configuration differs in a key that changes results, and ``allow_changed`` is false.
    """
    documents = checkpoint.documents
    changed = _changed(documents["config"], flatten(config))
    if changed and not allow_changed:
        raise InputError(
            f"--ckpt_path {checkpoint.path}; it was written with another configuration ({'; '.join(changed)}); "
            "give the same one, or --trainer.allow_changed true"
        )
    if changed:
        log.warning("resuming with a changed configuration: %s", "; ".join(changed))
    saved = documents["progress"]
    fed.method.server = dict(checkpoint.tensors["server"])
    fed.states = {int(id): {} for id in saved["clients"]}
    for name, tensor in checkpoint.tensors["clients"].items():
        id, key = name.split("/", 1)
        fed.states[int(id)][key] = tensor
    for callback, state in zip(fed.callbacks, saved["callbacks"], strict=not changed):
        callback.load_state_dict(state)
    fed.ledger = Ledger(LedgerEntry(*entry) for entry in documents["ledger"])
    return Progress(
        round=saved["round"],
        server=dict(fed.method.server),
        states=dict(fed.states),
        callbacks=saved["callbacks"],
        history=documents["history"],
        ledger=list(fed.ledger.entries),
        best_round=saved["best_round"],
        best_accuracy=saved["best_accuracy"],
        run_id=saved["run_id"],
    )


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings and lists as one mapping with dotted keys."""
    if isinstance(config, Mapping):
        items = [(str(key), value) for key, value in config.items()]
    elif isinstance(config, list):
        items = [(str(index), value) for index, value in enumerate(config)]
    else:
        return {prefix: config if isinstance(config, (bool, int, float, str, type(None))) else str(config)}
    return {key: value for name, item in items for key, value in flatten(item, f"{prefix}.{name}" if prefix else name).items()}


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    keys = [key for key in {**before, **after} if not any(key == free or key.startswith(f"{free}.") for free in FREE_KEYS)]
    missing = object()
    return [f"{k}: {before.get(k)} -> {after.get(k)}" for k in keys if before.get(k, missing) != after.get(k, missing)]
