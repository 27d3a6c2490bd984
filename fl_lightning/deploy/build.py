"""A federation from a configuration file, on a node, and the part of a configuration that nodes are sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fl_lightning.cli.parser import FederatedCLI
from fl_lightning.deploy.node import Build
from fl_lightning.loop import Federation

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


def builder(overlays: Sequence[Path] = ()) -> Build:
    """Return what builds federations from configuration files.

    Args:
        overlays: configuration files of the node's own, layered over the run's: where its data lie, and on
            which device it trains.
    """

    def build(path: Path) -> Federation:
        files = [word for file in (path, *overlays) for word in ("--config", str(file))]
        cli: Any = FederatedCLI("fit", files)
        return cli.trainer.prepare(cli.model, cli.datamodule, seed=cli.config["seed_everything"])

    return build
