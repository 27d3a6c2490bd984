"""Which data a node trains on: those of now, those of the server, and in a run that goes on those of before."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import yaml
from deploy_transports import InProcess
from own_leaves import config, own_nodes
from own_leaves import deployed as deployed_on_own_data
from test_deploy import RULES, KilledInRoundThree, nodes_in, weights

from fl_lightning.cli.parser import FederatedCLI
from fl_lightning.deploy.node.build import builder
from fl_lightning.deploy.node.node import Node, NodeSettings
from fl_lightning.deploy.server.server import deploy_over
from fl_lightning.errors import InputError, RunStopped


def table(path: Path, *, flipped: bool = False, rows: int = 40) -> Path:
    """A table of as many rows whichever labels it has."""
    rng = np.random.default_rng(0)
    lines = ["size,weight,kind"]
    for _ in range(rows):
        kind = int(rng.integers(2))
        lines.append(f"{rng.normal() + 2 * kind:.4f},{rng.normal():.4f},{1 - kind if flipped else kind}")
    path.write_text("\n".join(lines))
    return path


def run_of(folder: Path, name: str, train: Path, model: str = "FedAvg", **trainer: object) -> FederatedCLI:
    data = {"train": str(train), "test": str(table(folder / "test.csv")), "target": "kind", "num_clients": 4}
    data |= {"partition": {"class_path": "IID"}, "batch_size": 4, "val_fraction": 0.0}
    return config(folder, name, {"class_path": "TableData", "init_args": data}, model, **trainer)


def deployed(cli: FederatedCLI, nodes: Mapping[str, Node]) -> FederatedCLI:
    deploy_over(cli.trainer, yaml.safe_load(cli.config_text), InProcess(nodes), RULES)
    cli.start()
    return cli


@pytest.mark.parametrize("own", [False, True])
def test_the_next_run_reads_a_file_that_was_changed(own, tmp_path):
    """The same node processes have the weights of nodes that were started again."""
    train = table(tmp_path / "train.csv", flipped=True)

    def nodes(folder: Path) -> dict[str, Node]:
        return own_nodes(folder, {0: train}, 1) if own else nodes_in(folder)

    def run(name: str, on: Mapping[str, Node]) -> str:
        if own:
            cli = run_of(tmp_path, name, table(tmp_path / "test.csv"))
            return weights(deployed_on_own_data(cli, on, 1))
        return weights(deployed(run_of(tmp_path, name, train), on))

    kept = nodes(tmp_path / "kept")
    before = run("before", kept)
    table(train)
    assert run("after", kept) == run("fresh", nodes(tmp_path / "fresh")) != before


@pytest.mark.parametrize("other", ["seed", "data", "partition"])
def test_a_node_with_another_file_seed_or_partition_is_refused_by_name(other, tmp_path):
    """Each has as many examples of each client as the server's."""
    train, flipped = table(tmp_path / "train.csv"), table(tmp_path / "other.csv", flipped=True)
    holders = tmp_path / "holders.json"
    holders.write_text(json.dumps([list(range(k, 40, 4)) for k in range(4)]))
    differs, names = {
        "seed": ({"seed_everything": 7}, ["seed", "SHA-256 of who holds which example"]),
        "data": ({"data": {"init_args": {"train": str(flipped)}}}, ["SHA-256 of the data"]),
        "partition": (
            {
                "data": {
                    "init_args": {
                        "partition": {"class_path": "FromFile", "init_args": {"path": str(holders)}}
                    }
                }
            },
            ["SHA-256 of who holds which example"],
        ),
    }[other]
    overlay = tmp_path / "overlay.yaml"
    overlay.write_text(yaml.safe_dump(differs))
    node = Node(NodeSettings(tmp_path / "node", name="n0"), builder([overlay]))
    with pytest.raises(InputError, match="node n0; ") as caught:
        deployed(run_of(tmp_path, "server", train), {"node0": node})
    assert [part.split(":")[0] for part in caught.value.rule.split("; ")] == names
    assert not (tmp_path / "server").exists()


@pytest.mark.parametrize("changed", [False, True])
def test_what_a_client_kept_is_not_taken_up_with_other_data_of_its_node(changed, tmp_path, caplog):
    """The table has as many rows as before; with the same one the run comes to its end."""
    train = table(tmp_path / "train.csv")
    nodes = own_nodes(tmp_path, {0: train}, 1)
    cli = run_of(tmp_path, "server", tmp_path / "test.csv", "LocalOnly", max_rounds=3)
    deploy_over(cli.trainer, yaml.safe_load(cli.config_text), KilledInRoundThree(nodes), RULES, own_data=True)
    with pytest.raises(KeyboardInterrupt):
        cli.start()
    table(train, flipped=changed)
    words = ["--config", str(tmp_path / "server.yaml"), f"--ckpt_path={cli.trainer.run_dir}"]
    again = FederatedCLI("fit", words)
    if not changed:
        assert weights(deployed_on_own_data(again, nodes, 1))
        return
    with pytest.raises(RunStopped, match="what clients 0 kept is on none of the connected nodes"):
        deployed_on_own_data(again, nodes, 1)
    assert "the node had other data of its own then; put those back, or start the run anew" in caplog.text
