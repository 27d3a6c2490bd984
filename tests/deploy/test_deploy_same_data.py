"""Which data a node trains on: those of now, those of the server, and in a run that goes on those
of before."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import yaml
from deploy_transports import InProcess
from own_leaves import SIZES, config, leaf, leaf_file, own_nodes
from own_leaves import deployed as deployed_on_own_data
from test_deploy import RULES, KilledInRoundThree, nodes_in, weights

from fl_lightning.cli.parser import FederatedCLI
from fl_lightning.data import FederatedData, FederatedImages
from fl_lightning.data.text.tokens import ByteTokenizer
from fl_lightning.deploy.node.build import builder
from fl_lightning.deploy.node.node import Node, NodeSettings
from fl_lightning.deploy.protocol.messages import Message
from fl_lightning.deploy.server.server import deploy_over
from fl_lightning.errors import InputError, RunStopped
from fl_lightning.methods import LocalOnly, hest

IID = {"class_path": "IID"}
SGD = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.3}}


def table(path: Path, *, flipped: bool = False, rows: int = 40) -> Path:
    """A table of as many rows whichever labels it has."""
    rng = np.random.default_rng(0)
    lines = ["size,weight,kind"]
    for _ in range(rows):
        kind = int(rng.integers(2))
        lines.append(
            f"{rng.normal() + 2 * kind:.4f},{rng.normal():.4f},{1 - kind if flipped else kind}"
        )
    path.write_text("\n".join(lines))
    return path


def run_of(
    folder: Path,
    name: str,
    train: Path,
    model: str = "FedAvg",
    partition: object = IID,
    **trainer: object,
) -> FederatedCLI:
    data = {
        "train": str(train),
        "test": str(table(folder / "test.csv")),
        "target": "kind",
        "num_clients": 4,
    }
    data |= {"partition": partition, "batch_size": 4, "val_fraction": 0.0}
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


def holders(path: Path, first: int) -> str:
    """A file of who holds which of 40 rows, the row ``first`` first."""
    order = [(first + row) % 40 for row in range(40)]
    path.write_text(json.dumps([order[k::4] for k in range(4)]))
    return str(path)


@pytest.mark.parametrize("other", ["data", "partition"])
def test_a_node_with_other_files_is_refused_by_name(other, tmp_path):
    """Each has as many examples of each client as the server's."""
    train, flipped = table(tmp_path / "train.csv"), table(tmp_path / "other.csv", flipped=True)
    here = {"class_path": "FromFile", "init_args": {"path": holders(tmp_path / "here.json", 0)}}
    there = {"partition": {"init_args": {"path": holders(tmp_path / "there.json", 1)}}}
    settings = {"train": str(flipped)} if other == "data" else there
    overlay = tmp_path / "overlay.yaml"
    overlay.write_text(yaml.safe_dump({"data": {"init_args": settings}}))
    node = Node(NodeSettings(tmp_path / "node", name="n0"), builder([overlay]))
    with pytest.raises(InputError, match="node n0; ") as caught:
        deployed(run_of(tmp_path, "server", train, partition=here), {"node0": node})
    names = {"data": "SHA-256 of the data", "partition": "SHA-256 of who holds which example"}
    assert [part.split(":")[0] for part in caught.value.rule.split("; ")] == [names[other]]
    assert not (tmp_path / "server").exists()


class Elsewhere(Node):
    """A node on whose machine something else is read."""

    def __init__(self, settings: NodeSettings, change: Callable[[pytest.MonkeyPatch], None]):
        super().__init__(settings, builder([]))
        self.change = change

    def _check(self, message: Message) -> bytes:
        with pytest.MonkeyPatch.context() as patch:
            self.change(patch)
            return super()._check(message)


def other_tokens(patch: pytest.MonkeyPatch) -> None:
    """A tokeniser that takes letters for others, of which there are as many."""
    patch.setattr(ByteTokenizer, "encode", lambda self, text: [*text.swapcase().encode()])


def other_public(patch: pytest.MonkeyPatch) -> None:
    hold = FederatedImages.hold
    patch.setattr(
        FederatedImages,
        "hold",
        lambda data, train, test, public: hold(data, train, test, public ^ 1),
    )


def other_owners(patch: pytest.MonkeyPatch) -> None:
    said = property(lambda data: data._test_owner[::-1].copy())
    patch.setattr(FederatedData, "test_owner", said)


def other_costs(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(hest, "known_by", lambda devices: {"sha256": "f" * 64})


TEXT = {"class_path": "InstructionData", "init_args": {"num_clients": 4, "examples_per_client": 8}}
IMAGES = {"dataset": "digits", "num_clients": 4, "public_dataset": "synthetic"}
IMAGES |= {"synthetic_examples": 30, "synthetic_test_examples": 10, "public_examples": 20}
OTHERS = {
    "the tokens of the text": (TEXT, "FedAvg", "llama_tiny", other_tokens),
    "the public set": (
        {"class_path": "FederatedImages", "init_args": IMAGES},
        "FedAvg",
        "mlp",
        other_public,
    ),
    "the clients or groups of test examples": ({}, "FedAvg", "mlp", other_owners),
    "the tables of joules": (TEXT, "HEST", "llama_tiny", other_costs),
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_node_that_reads_something_else_is_refused_by_name(what, tmp_path):
    """And of that alone; where both read the same, the node fits."""
    data, method, network, change = OTHERS[what]
    train = leaf_file(tmp_path / "train.json", SIZES)
    data = data or leaf(train, leaf_file(tmp_path / "test.json", {"a": 3, "b": 5}))
    settings = {"network": network}
    cli = config(tmp_path, "server", data, method, settings, max_rounds=1, max_local_steps=1)
    node = Elsewhere(NodeSettings(tmp_path / "node", name="n0"), change)
    with pytest.raises(InputError, match="node n0; ") as caught:
        deployed(cli, {"node0": node})
    said = [part.split(":")[0] for part in caught.value.rule.split("; ")]
    assert said == [f"SHA-256 of {what}"]
    node.change = lambda patch: None
    deployed(config(tmp_path, "again", data, method, settings, max_rounds=1), {"node0": node})


def test_a_node_whose_clients_begin_with_other_weights_is_refused(tmp_path):
    """No message of LocalOnly has them."""
    train = leaf_file(tmp_path / "train.json", SIZES)
    data = leaf(train, leaf_file(tmp_path / "test.json", {"a": 3, "b": 5}))
    build = LocalOnly.build

    def other(method, given):
        build(method, given)
        method.first["weights"] += 1

    cli = config(tmp_path, "server", data, "LocalOnly", {"network": "mlp"}, max_rounds=1)
    changed = lambda patch: patch.setattr(LocalOnly, "build", other)  # noqa: E731
    node = Elsewhere(NodeSettings(tmp_path / "node", name="n0"), changed)
    with pytest.raises(InputError, match="the network has other weights that clients begin with"):
        deployed(cli, {"node0": node})


@pytest.mark.parametrize("changed", [False, True])
def test_what_a_client_kept_is_not_taken_up_with_other_data_of_its_node(changed, tmp_path, caplog):
    """The table has as many rows as before; with the same one the run comes to its end."""
    train = table(tmp_path / "train.csv")
    nodes = own_nodes(tmp_path, {0: train}, 1)
    cli = run_of(tmp_path, "server", tmp_path / "test.csv", "LocalOnly", max_rounds=3)
    deploy_over(
        cli.trainer,
        yaml.safe_load(cli.config_text),
        KilledInRoundThree(nodes),
        RULES,
        own_data=True,
    )
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
    assert (
        "the node had other data of its own then; put those back, or start the run anew"
        in caplog.text
    )


@pytest.mark.slow
@pytest.mark.essential
@pytest.mark.parametrize(
    ("overlay", "says"),
    [
        (
            {"model": {"init_args": {"optimizer": SGD}}},
            r"model.init_args.optimizer.init_args.lr: not set -> 0.3[;)]",
        ),
        ({"trainer": {"precision": "bf16-mixed"}}, "trainer.precision"),
        ({"data": {"init_args": {"batch_size": 7}}}, "data.init_args.batch_size: 4 -> 7"),
        ({"seed_everything": 7}, "seed_everything: 0 -> 7"),
    ],
)
@pytest.mark.parametrize("own", [False, True])
def test_overlays_that_change_what_clients_compute_are_refused_by_name(
    own, overlay, says, tmp_path
):
    """Those that say where its data lie and on which device it trains are what they are for."""
    train = table(tmp_path / "train.csv")

    def run(name: str, settings: object) -> str:
        path = tmp_path / f"{name}-overlay.yaml"
        path.write_text(yaml.safe_dump(settings))
        if own:
            cli = run_of(tmp_path, name, table(tmp_path / "test.csv"))
            return weights(
                deployed_on_own_data(cli, own_nodes(tmp_path / name, {0: train}, 1, [path]), 1)
            )
        return weights(
            deployed(
                run_of(tmp_path, name, train),
                nodes_in(tmp_path / name, build=partial(builder, [path])),
            )
        )

    if own and "data" in overlay:
        pytest.skip("of its own data a node says what they are")
    with pytest.raises(InputError, match=says):
        run("other", overlay)
    elsewhere = {"train": str(shutil.copy(train, tmp_path / "copy.csv"))}
    place = {
        "trainer": {"accelerator": "cpu"},
        **({} if own else {"data": {"init_args": elsewhere}}),
    }
    assert run("place", place) == run("plain", {})
