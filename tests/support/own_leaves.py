"""Nodes with examples of their own, in files of LEAF's form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import yaml
from deploy_transports import InProcess

from fl_lightning.cli.parser import FederatedCLI
from fl_lightning.deploy.node.build import builder, counter
from fl_lightning.deploy.node.node import Node, NodeSettings
from fl_lightning.deploy.node.own_data import OwnData
from fl_lightning.deploy.server.roster import RoundRules
from fl_lightning.deploy.server.server import deploy_over

TRAINER = {
    "logger": False,
    "max_rounds": 2,
    "participation": 1.0,
    "local_epochs": 1,
    "eval_every": 1,
    "accelerator": "cpu",
    "engine": "sequential",
    "workers": 1,
}


SIZES = {"a": 9, "b": 14, "c": 20, "d": 11}


def leaf_file(path: Path, users: Mapping[str, int], *, features: int = 6, classes: int = 3) -> Path:
    """A file in LEAF's form; the examples of a user follow from its name."""
    data = {}
    for user, size in users.items():
        rng = np.random.default_rng(list(user.encode()))
        target = rng.integers(classes, size=size)
        inputs = rng.normal(size=(size, features)) + target[:, None]
        data[user] = {"x": inputs.round(4).tolist(), "y": target.tolist()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"users": list(data), "user_data": data}))
    return path


def config(
    folder: Path,
    name: str,
    data: Mapping,
    model: str = "FedAvg",
    init: Mapping = {},
    **trainer: object,
) -> FederatedCLI:
    settings = {
        "trainer": {**TRAINER, "default_root_dir": str(folder / name), **trainer},
        "model": {"class_path": model, "init_args": {"network": "mlp", **init}},
        "data": data,
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(settings))
    return FederatedCLI("fit", ["--config", str(path)])


def leaf(train: Path, test: Path, **more: object) -> dict:
    return {
        "class_path": "LeafData",
        "init_args": {
            "train": str(train),
            "test": str(test),
            "val_fraction": 0.2,
            "batch_size": 4,
            **more,
        },
    }


def own_nodes(
    folder: Path, data: Mapping[int, Path | str], step: int = 4, overlays: Sequence[Path] = ()
) -> dict[str, Node]:
    nodes = {}
    for number, path in data.items():
        own = OwnData(str(path), number, step)
        settings = NodeSettings(folder / f"node{number}", number, step, name=f"n{number}")
        nodes[f"node{number}"] = Node(settings, builder(overlays, own), counter(overlays, own))
    return nodes


def deployed(cli: FederatedCLI, nodes: Mapping[str, Node], count: int = 4) -> FederatedCLI:
    rules = RoundRules(min_nodes=count, wait_seconds=5, round_seconds=60)
    deploy_over(
        cli.trainer, yaml.safe_load(cli.config_text), InProcess(nodes), rules, own_data=True
    )
    cli.start()
    return cli
