"""Deployments without Flower: the same messages, answered in this process or by processes of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from fl_lightning.cli.parser import FederatedCLI
from fl_lightning.deploy.build import builder
from fl_lightning.deploy.engine import RoundRules
from fl_lightning.deploy.node import Node, NodeSettings
from fl_lightning.deploy.server import deploy_over
from fl_lightning.deploy.transport_local import InProcess

ROOT = Path(__file__).parent.parent
COMMON = [
    "--trainer.logger=false",
    "--trainer.max_rounds=3",
    "--trainer.callbacks=[]",
    "--trainer.participation=0.5",
    "--trainer.accelerator=cpu",
    "--trainer.engine=sequential",
    "--trainer.workers=1",
    "--data.num_clients=8",
    "--data.partition=Shards",
    "--data.partition.classes_per_client=3",
]
RULES = RoundRules(wait_seconds=5, round_seconds=60)


def command_line(config: str, folder: Path, *more: str) -> FederatedCLI:
    words = ["--config", str(ROOT / "configs" / f"{config}.yaml"), *COMMON]
    return FederatedCLI("fit", [*words, f"--trainer.default_root_dir={folder}", *more])


def metadata_of(cli: FederatedCLI) -> dict:
    return json.loads((cli.trainer.run_dir / "metadata.json").read_text())


def simulated(config: str, folder: Path, *more: str) -> dict:
    cli = command_line(config, folder / "simulated", *more)
    cli.start()
    return metadata_of(cli)


def nodes_in(folder: Path, count: int = 3) -> InProcess:
    """New nodes on the same folders are nodes that were started again."""
    nodes = {}
    for number in range(count):
        settings = NodeSettings(folder / f"node{number}", number, count, name=f"n{number}")
        nodes[f"node{number}"] = Node(settings, builder())
    return InProcess(nodes)


def deployed(config: str, folder: Path, transport, *more: str, rules: RoundRules = RULES) -> FederatedCLI:
    cli = command_line(config, folder / "deployed", *more)
    deploy_over(cli.trainer, yaml.safe_load(cli.config_text), transport, rules)
    cli.start()
    return cli


@pytest.mark.parametrize("config", ["fedavg", "kd_default", "fedkd", "fedmosaic_digits"])
def test_a_deployment_gives_the_weights_of_the_simulation(config, tmp_path):
    cli = deployed(config, tmp_path, nodes_in(tmp_path))
    assert metadata_of(cli)["weights_sha256"] == simulated(config, tmp_path)["weights_sha256"]
