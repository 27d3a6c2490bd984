"""The state of a run at the end of a round, how a checkpoint holds it, and how it is restored."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from fl_lightning.aggregation.adapters.moving_base import MOVED
from fl_lightning.config.recorded import import_path
from fl_lightning.config.settings import flatten
from fl_lightning.errors import InputError, MisuseError
from fl_lightning.federation import Federation
from fl_lightning.hooks import RoundRecord
from fl_lightning.models.constants import is_pairs
from fl_lightning.run.checkpoint import CheckpointError, load_checkpoint
from fl_lightning.run.clients import ClientValues, from_json, is_json_of, keep
from fl_lightning.run.directory import RunDirectory, checkpoint_name
from fl_lightning.run.tables import Mark

log = logging.getLogger("fl_lightning")

FORMAT = 2  # version of the checkpoints' layout
IDENTITY = {
    "partition": "the clients' examples",
    "content": "the data",
    "tokens": "the tokens of the text",
    "test_owners": "the clients or groups of test examples",
    "public": "the public set",
    "frozen": "the network's frozen weights",
    "clock": "files of trainer.clock",
    "topology": "files of trainer.topology",
    "costs": "tables of model.costs",
}
"""What a run's results rest on beside its settings, in words, by the names of the SHA-256 that
checkpoints have of it; those of before may lack some."""

OF_NODES = re.compile(r"(peer|edge)/|public$")
"""Entries of a server's state that a topology adds to the method's, and another leaves behind."""


@dataclass(frozen=True)
class Snapshot:
    """The state of a run at the end of a round.

    A new snapshot is made after each round and never changed, so an interrupted round is in none of
    them.

    Args:
        round: the round, counted from 1; 0 before the first.
        server: the server's tensors by name. They are shared and not copied: methods replace
            tensors and do not write to them.
        states: the tensors that each client keeps, by client id and name; shared as well.
        callbacks: class path and state (JSON) of each callback.
        tables: where ``metrics.csv`` and ``ledger.csv`` stood.
        best_round: the first round with the best validation, by the task's primary metric; 0 if
            there is none.
        best_value: that metric; None if there is none.
        clients: each client's validation in the best and in the last evaluated round, by round.
        mover: what adds to the frozen weights under adapters; empty: nothing.
    """

    round: int = 0
    server: Mapping[str, Tensor] = field(default_factory=dict)
    states: Mapping[int, Mapping[str, Tensor]] = field(default_factory=dict)
    callbacks: tuple[tuple[str, str], ...] = ()
    tables: Mapping[str, Mark] = field(default_factory=dict)
    best_round: int = 0
    best_value: float | None = None
    clients: Mapping[int, ClientValues] = field(default_factory=dict)
    mover: str = ""

    def after(self, fed: Federation, record: RoundRecord, tables: Mapping[str, Mark]) -> Snapshot:
        """Return the snapshot after one more round, whose rows are in the tables already."""
        task = fed.data.task
        value = record.metrics.get(f"val/{task.primary}", math.nan)
        better = task.is_better(value, self.best_value)
        best_round = record.round if better else self.best_round
        return Snapshot(
            round=record.round,
            server=dict(fed.method.server),
            states={id: dict(state) for id, state in fed.states.items() if state},
            callbacks=tuple(
                (import_path(type(callback)), _json_of(callback)) for callback in fed.callbacks
            ),
            tables=tables,
            best_round=best_round,
            best_value=value if better else self.best_value,
            clients=keep(self.clients, record.round, record.clients, best_round),
            mover=fed.method.adapters.mover,
        )

    def save(
        self, run: RunDirectory, config: Mapping[str, Any], identity: Mapping[str, Any]
    ) -> None:
        """Write the snapshot as a checkpoint.

        Args:
            run: the directory of the run.
            config: the configuration, nested.
            identity: SHA-256 of what the results rest on beside the configuration, by name.
        """
        clients = {
            f"{id}/{name}": tensor
            for id, state in self.states.items()
            for name, tensor in state.items()
        }
        progress = {
            "format": FORMAT,
            "round": self.round,
            "callbacks": self.callbacks,
            "tables": self.tables,
            "best_round": self.best_round,
            "best_value": self.best_value,
            "clients": self.clients,
            "mover": self.mover,
            **identity,
            "on_device": [name for name, tensor in clients.items() if tensor.device.type != "cpu"],
            "config": flatten(config),
        }
        run.save_checkpoint(
            self.round, {"server": self.server, "clients": clients}, {"progress": progress}
        )


def _json_of(callback: Any) -> str:
    state = callback.state_dict()
    try:
        _check_keys(state)
        return json.dumps(state)
    except TypeError as error:
        raise MisuseError(
            f"{type(callback).__name__}.state_dict",
            f"it returns numbers, texts, lists and dictionaries of them by text ({error})",
            "write tensors and arrays as lists, and keys as texts",
        ) from error


def _check_keys(value: Any) -> None:
    """Refuse keys that JSON makes texts of, which ``load_state_dict`` would get."""
    if isinstance(value, dict):
        if odd := [key for key in value if not isinstance(key, str)]:
            raise TypeError(f"the key {odd[0]!r} is no text")
        value = value.values()
    elif not isinstance(value, list | tuple):
        return
    for each in value:
        _check_keys(each)


def best_value(progress: Mapping[str, Any]) -> Any:
    """Return the best validation of a checkpoint's ``progress``; release 0.1 called it
    ``best_accuracy``, and minus infinity stood for none."""
    if "best_value" in progress:
        return progress["best_value"]
    before = progress.get("best_accuracy", "")
    return None if before == float("-inf") else before


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that has been read and checked against its manifest and its run's tables.

    Args:
        path: the folder of the checkpoint.
        tensors: the groups ``server`` and ``clients``, each by name.
        progress: the document ``progress.json``.
    """

    path: Path
    tensors: dict[str, dict[str, Tensor]]
    progress: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> Checkpoint:
        """Read a checkpoint and check it.

        Raises:
            CheckpointError: it is damaged or of another format, or its run's tables do not hold the
                rows of its rounds any more.
        """
        tensors, documents = load_checkpoint(path)
        progress = documents.get("progress")
        if (
            not isinstance(progress, dict)
            or progress.get("format") != FORMAT
            or not {"server", "clients"} <= tensors.keys()
        ):
            raise CheckpointError(
                f"{path} is foreign or of another release",
                f"this one reads format {FORMAT}",
                "name another",
            )
        if problem := _problem(progress, tensors["clients"], path.name):
            raise CheckpointError(
                f"{path / 'progress.json'} has {problem}",
                "it was not written by this program",
                "name another",
            )
        read = cls(path, tensors, progress)
        for name in RunDirectory(path.parent.parent).tables:
            read.table(name)
        return read

    def table(self, name: str) -> str:
        """Return the text of a table of the run up to this checkpoint.

        Raises:
            CheckpointError: the table does not hold it any more.
        """
        run = RunDirectory(self.path.parent.parent)
        return run.tables[name].until(self.progress["tables"][name]).decode()


def _problem(progress: Mapping[str, Any], clients: Mapping[str, Tensor], folder: str) -> str:
    """Name the entries of a checkpoint's ``progress`` that have a wrong form; return "" if none
    has."""

    def is_count(value: object) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value >= 0

    def is_mark(mark: object) -> bool:
        return (
            isinstance(mark, dict)
            and is_count(mark.get("rows"))
            and is_count(mark.get("bytes"))
            and isinstance(mark.get("sha256"), str)
            and _is_list(mark.get("columns"), str)
        )

    def is_callback(entry: object) -> bool:
        return _is_list(entry, str) and len(entry) == 2 and _is_json(entry[1])  # type: ignore[arg-type, index]

    tables = progress.get("tables")
    rules = {
        "round": is_count(progress.get("round")) and folder == checkpoint_name(progress["round"]),
        "best_round": is_count(progress.get("best_round")),
        "best_value": isinstance(best_value(progress), (int, float, type(None))),
        **{name: isinstance(progress.get(name, ""), str) for name in IDENTITY},
        "partition": isinstance(progress.get("partition"), str),
        "mover": isinstance(progress.get("mover", ""), str),
        "constants": is_pairs(progress.get("constants", {})),
        "config": isinstance(progress.get("config"), dict),
        "tables": isinstance(tables, dict)
        and all(is_mark(tables.get(name)) for name in ("metrics", "ledger")),
        "callbacks": isinstance(progress.get("callbacks"), list)
        and all(map(is_callback, progress["callbacks"])),
        "on_device": _is_list(progress.get("on_device"), str),
        "clients": is_json_of(progress.get("clients", {}))
        and all(re.fullmatch(r"\d{1,18}/.+", name) for name in clients),
    }
    return ", ".join(f"an odd {name!r}" for name, holds in rules.items() if not holds)


def _is_list(value: object, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(item, kind) for item in value)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def restore(fed: Federation, checkpoint: Checkpoint) -> Snapshot:
    """Bring the federation to the state that a checkpoint holds, and return that state.

    Raises:
        InputError: the checkpoint's tensors are not those of this method and network, or have
            another meaning.
    """
    saved, server = checkpoint.progress, checkpoint.tensors["server"]
    for name, tensor in fed.method.server.items():
        fixed = slice(int(name in fed.method.growing), None)
        if (
            name not in server
            or server[name].shape[fixed] != tensor.shape[fixed]
            or server[name].dtype != tensor.dtype
        ):
            there = (
                f"{tuple(server[name].shape)} {server[name].dtype}" if name in server else "missing"
            )
            raise InputError(
                f"--ckpt_path {checkpoint.path}",
                f"its server tensor {name!r} is {there} and this method's is {tuple(tensor.shape)} "
                f"{tensor.dtype}",
                "use the method, network and --trainer.topology that wrote it",
            )
    own = fed.method.adapters.mover
    by = saved.get("mover", own)  # checkpoints of before do not say
    if MOVED in server and server[MOVED] and (by != own or not own):
        raise InputError(
            f"--ckpt_path {checkpoint.path}",
            "a part of what its adapters have learnt is in frozen weights, which "
            f"{by or 'another rule'} has moved, and this run has {own or 'nothing that reads it'}",
            "use the --model.adapter_average that wrote it",
        )
    fed.method.server = {
        name: tensor
        for name, tensor in server.items()
        if name in fed.method.server or not OF_NODES.match(name)
    }
    fed.states = {}
    on_device = set(saved["on_device"])
    for name, tensor in checkpoint.tensors["clients"].items():
        id, key = name.split("/", 1)
        fed.states.setdefault(int(id), {})[key] = (
            tensor.to(fed.fabric.device) if name in on_device else tensor
        )
    _restore_callbacks(fed, saved["callbacks"])
    same = saved["partition"] == fed.data.partition_hash  # else they are of other clients
    return Snapshot(
        round=saved["round"],
        server=dict(fed.method.server),
        states={id: dict(state) for id, state in fed.states.items()},
        callbacks=tuple((name, state) for name, state in saved["callbacks"]),
        tables=saved["tables"],
        best_round=saved["best_round"],
        best_value=best_value(saved),
        clients=from_json(saved.get("clients", {})) if same else {},  # release 0.1 kept none
        mover=own,
    )


def _restore_callbacks(fed: Federation, saved: list[list[str]]) -> None:
    """Give each callback the saved state of its class; several of one class get theirs in order.

    Callbacks that a changed configuration adds start without a state.
    """
    left = [(name, json.loads(state)) for name, state in saved]
    for callback in fed.callbacks:
        match = next((entry for entry in left if entry[0] == import_path(type(callback))), None)
        if match is None:
            log.warning(
                "%s joins the run; it has no state of the rounds before",
                import_path(type(callback)),
            )
            continue
        left.remove(match)
        callback.load_state_dict(match[1])
