"""A federation from a configuration file, on a node, and the part of a configuration that nodes are sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.cli.parser import FederatedCLI
from fl_lightning.deploy.node import Build, Count
from fl_lightning.deploy.own_data import KEY, OwnData, form_of
from fl_lightning.errors import require
from fl_lightning.loop import Federation
from fl_lightning.support import disk

SENT = (
    "accelerator",
    "precision",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "deterministic",
    "max_rounds",
    "participation",
    "local_epochs",
    "max_local_steps",
    "secure_sum",
    "privacy",
)
"""Settings of the trainer that nodes are sent: those that local training reads. Callbacks, loggers and
folders are the server's own."""


def config_for_nodes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what nodes need of a run's whole configuration: seed, method, data and local training."""
    trainer = {name: config["trainer"][name] for name in SENT if name in config["trainer"]}
    return {
        "seed_everything": config["seed_everything"],
        "trainer": {**trainer, "engine": "sequential", "workers": 1, "logger": False},
        "model": config["model"],
        "data": config["data"],
    }


def builder(overlays: Sequence[Path] = (), own: OwnData | None = None) -> Build:
    """Return what builds federations from configuration files.

    Args:
        overlays: configuration files of the node's own, layered over the run's: where its data lie, and on
            which device it trains.
        own: the node's own data; None: it has its part of the data that the run names.
    """

    def build(path: Path) -> Federation:
        cli = _parsed(path, overlays, own)
        return cli.trainer.prepare(cli.model, cli.datamodule, seed=cli.config["seed_everything"])

    return build


def counter(overlays: Sequence[Path] = (), own: OwnData | None = None) -> Count:
    """Return what counts a node's own examples for the run of a configuration file."""

    def count(path: Path) -> dict[str, Any]:
        cli = _parsed(path, overlays, own)
        cli.datamodule.prepare_data()
        cli.datamodule.setup("fit")
        assert own is not None
        return own.census(cli.datamodule, cli.config["seed_everything"])

    return count


def _parsed(path: Path, overlays: Sequence[Path], own: OwnData | None) -> Any:
    """Return the trainer, the method and the data that a configuration describes, with the node's own data.

    Raises:
        InputError: the run deals out its data and the node has its own, or the other way round.
    """
    run = yaml.safe_load(path.read_text())
    entry = run.pop(KEY, None)
    require(
        entry is None or own is not None,
        "a run on the nodes' own data",
        "this node has none",
        "start it with --data and the folder of its data",
    )
    require(
        entry is not None or own is None,
        "a run that deals out the data that it names",
        "this node has data of its own",
        "start it without --data, or the run with --deploy.own_data true",
    )
    if own is not None:
        path = path.with_suffix(".own.yaml")
        disk.replace(path, yaml.safe_dump(own.config(run), sort_keys=False).encode())
    cli: Any = FederatedCLI("fit", [word for file in (path, *overlays) for word in ("--config", str(file))])
    if own is not None:
        cli.datamodule.run_form = form_of(entry)
        cli.trainer.deal = own.deal(entry["sizes"])
    return cli
