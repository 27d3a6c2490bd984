"""Data that only nodes have: the weights are those of a simulation in which one data module has
them all, and nodes whose data do not fit are refused by name.

The data module of the simulation reads the same files, all of them; the server's reads its test set
alone.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from deploy_transports import InProcess
from outcomes import rows_of
from own_leaves import SIZES, config, deployed, leaf, leaf_file, own_nodes
from PIL import Image

from fl_lightning import __version__
from fl_lightning.aggregation.server_optimizers import Extrapolation
from fl_lightning.cli.parser import FederatedCLI
from fl_lightning.data import (
    CorpusData,
    ImageFolder,
    NaturalInstructions,
    PreferenceFiles,
    TableData,
    TokenData,
)
from fl_lightning.data.form import Form
from fl_lightning.deploy import command
from fl_lightning.deploy.node import own_data
from fl_lightning.deploy.node.build import builder
from fl_lightning.deploy.node.node import Node, NodeSettings
from fl_lightning.deploy.node.own_data import OwnData
from fl_lightning.deploy.protocol.messages import Message
from fl_lightning.deploy.server.census import NAMES, Census
from fl_lightning.deploy.server.roster import RoundRules
from fl_lightning.deploy.server.server import deploy_over
from fl_lightning.errors import InputError


def metadata(cli: FederatedCLI) -> dict:
    return json.loads((cli.trainer.run_dir / "metadata.json").read_text())


def logged(cli: FederatedCLI) -> list[dict[str, float]]:
    rows = rows_of(cli.trainer.run_dir / "metrics.csv")
    kinds = ("test/", "val/", "train/", "clients/", "bytes/")
    return [{key: float(row[key]) for key in row if key.startswith(kinds)} for row in rows]


@pytest.fixture
def leaves(tmp_path: Path) -> tuple[Path, Path, dict[int, Path]]:
    """The file with all four clients, the server's test file, and the file of each node."""
    whole = leaf_file(tmp_path / "whole.json", SIZES)
    test = leaf_file(tmp_path / "test.json", {"t": 30})
    each = {
        number: leaf_file(tmp_path / f"own{number}.json", {user: SIZES[user]})
        for number, user in enumerate(SIZES)
    }
    return whole, test, each


def test_four_nodes_with_one_client_each_give_the_weights_of_one_data_module_with_all(
    leaves, tmp_path, caplog
):
    caplog.set_level("INFO")
    whole, test, each = leaves
    simulated = config(tmp_path, "simulated", leaf(whole, test))
    simulated.start()
    cli = deployed(config(tmp_path, "server", leaf(test, test)), own_nodes(tmp_path, each))
    found = metadata(cli)
    assert found["weights_sha256"] == metadata(simulated)["weights_sha256"]
    assert found["deployment"]["nodes"] == {
        f"n{number} (node{number})": [number] for number in range(4)
    }
    held_out = {"a": 2, "b": 3, "c": 4, "d": 2}  # a fifth of each, rounded
    sizes = {str(number): SIZES[user] - held_out[user] for number, user in enumerate(SIZES)}
    assert found["deployment"]["examples"] == sizes
    assert "node n2: client 2 has 16 training and 4 validation examples" in caplog.text
    for here, there in zip(logged(cli), logged(simulated), strict=True):
        assert here.keys() == there.keys()
        assert here == pytest.approx(there, rel=1e-6)
    partition = json.loads((cli.trainer.run_dir / "partition.json").read_text())
    assert partition["sizes"] == list(SIZES.values())
    assert "clients" not in partition


def test_a_node_with_the_data_of_two_clients_has_two_clients(leaves, tmp_path):
    """Its ids are its partition and the one that follows in steps of num_partitions."""
    whole, test, _ = leaves
    data = {
        0: leaf_file(tmp_path / "even.json", {"a": SIZES["a"], "c": SIZES["c"]}),
        1: leaf_file(tmp_path / "odd.json", {"b": SIZES["b"], "d": SIZES["d"]}),
    }
    figures = [{"class_path": "callbacks.PartitionFigure"}]
    simulated = config(
        tmp_path, "simulated", leaf(whole, test), participation=0.5, callbacks=figures
    )
    simulated.start()
    server = config(tmp_path, "server", leaf(test, test), participation=0.5, callbacks=figures)
    cli = deployed(server, own_nodes(tmp_path, data, step=2), count=2)
    drawn = [
        one.trainer.run_dir.joinpath("figures", "partition.png").exists()
        for one in (simulated, cli)
    ]
    assert drawn == [True, False], "nodes do not say of which classes their examples are"
    assert metadata(cli)["weights_sha256"] == metadata(simulated)["weights_sha256"]
    assert metadata(cli)["deployment"]["nodes"] == {"n0 (node0)": [0, 2], "n1 (node1)": [1, 3]}


@pytest.mark.parametrize("named", [False, True])
def test_personal_models_are_validated_on_nodes_with_data_of_their_own(named, leaves, tmp_path):
    """A node that names its data's class and its file has the run's metrics too."""
    whole, test, each = leaves
    each = {number: described(path) if named else path for number, path in each.items()}
    metrics = [{"class_path": "torchmetrics.classification.MulticlassF1Score"}]
    simulated = config(tmp_path, "simulated", leaf(whole, test, metrics=metrics), "LocalOnly")
    simulated.start()
    server = config(tmp_path, "server", leaf(test, test, metrics=metrics), "LocalOnly")
    cli = deployed(server, own_nodes(tmp_path, each))
    assert {"val/f1_score", "val/f1_score_std", "test/f1_score"} < logged(cli)[-1].keys()
    for here, there in zip(logged(cli), logged(simulated), strict=True):
        assert {key: here[key] for key in here if key.startswith("val/")} == pytest.approx(
            {key: there[key] for key in there if key.startswith("val/")}, rel=1e-6
        )


@pytest.mark.parametrize(
    ("here", "there", "fits"),
    [("one", "one", True), ("one", "other", False), ("one", "", True), ("", "other", True)],
)
def test_tokenisers_of_server_and_node_are_compared_where_both_have_one(here, there, fits):
    """Tokens that are on the disk need none."""
    known, theirs = (
        dict.fromkeys(NAMES, 1) | ({"tokenizer": one} if one else {}) for one in (here, there)
    )
    answer = {"kind": "counted", "name": "n0", "clients": {"0": [3, 1]}, "facts": theirs}
    census = Census(InProcess({}), {}, RoundRules())
    if fits:
        census._take("node0", Message(answer), known)
        assert census.counts == {0: (3, 1)}
    else:
        with pytest.raises(InputError, match="SHA-256 of the tokeniser: other there, one here"):
            census._take("node0", Message(answer), known)


def test_a_model_is_validated_on_nodes_that_its_server_has_since_the_first_round(
    leaves, tmp_path, monkeypatch
):
    """An optimiser that evaluates other weights once it has made a step, and no earlier."""
    start = Extrapolation.start
    monkeypatch.setattr(
        Extrapolation, "start", lambda self, given: replace(start(self, given), evaluated=None)
    )
    whole, test, each = leaves
    step = {"server_optimizer": {"class_path": "Extrapolation"}}
    simulated = config(tmp_path, "simulated", leaf(whole, test), init=step)
    simulated.start()
    cli = deployed(
        config(tmp_path, "server", leaf(test, test), init=step), own_nodes(tmp_path, each)
    )
    for here, there in zip(logged(cli), logged(simulated), strict=True):
        assert here == pytest.approx(there, rel=1e-6)


def described(path: Path) -> Path:
    """A file that names the class of a node's data."""
    data = {"class_path": "fl_lightning.data.LeafData", "init_args": {"train": str(path)}}
    path.with_suffix(".yaml").write_text(yaml.safe_dump(data))
    return path.with_suffix(".yaml")


def test_a_node_named_by_a_class_path_has_the_same_weights(leaves, tmp_path):
    """Its owner names the class, which needs no leave; the node reads its file with it."""
    whole, test, each = leaves
    given = {number: described(path) for number, path in each.items()}
    simulated = config(tmp_path, "simulated", leaf(whole, test))
    simulated.start()
    cli = deployed(config(tmp_path, "server", leaf(test, test)), own_nodes(tmp_path, given))
    assert metadata(cli)["weights_sha256"] == metadata(simulated)["weights_sha256"]


def refusal_of(tmp_path: Path, test: Path, given: Path | str) -> str:
    cli = config(tmp_path, "server", leaf(test, test))
    with pytest.raises(InputError) as caught:
        deployed(cli, own_nodes(tmp_path, {0: given}), 1)
    assert not (tmp_path / "server").exists()
    return str(caught.value)


@pytest.mark.parametrize("what", ["features", "classes", "empty", "gone", "version", "batch"])
def test_data_that_do_not_fit_are_refused_by_name_and_nothing_is_created(
    what, leaves, tmp_path, monkeypatch
):
    _, test, each = leaves
    given = each[0]
    if what == "features":
        leaf_file(given, {"a": 5}, features=7)
        reason = "shape of an example: [7] there, [6] here"
    elif what == "classes":
        text = json.loads(given.read_text())
        text["user_data"]["a"]["y"][3] = 9
        given.write_text(json.dumps(text))
        reason = "its class 9 is none of the run's: 0, 1, 2"
    elif what == "empty":
        given = tmp_path / "nothing"
        given.mkdir()
        with pytest.raises(InputError, match="it is an empty folder"):
            OwnData(str(given), 0, 1)
        (given / "readme.txt").write_text("no data")
        reason = "nothing; this folder has no .json files"
    elif what == "gone":
        nodes = own_nodes(tmp_path, each)
        given.unlink()
        with pytest.raises(
            InputError, match=r"node n0 \(node0\).*own0.json; there is no such file"
        ):
            deployed(config(tmp_path, "server", leaf(test, test)), nodes)
        with pytest.raises(
            InputError, match=r"--data .*own0.json; there is no such file or folder"
        ):
            OwnData(str(given), 0, 1)
        return
    elif what == "version":
        real = own_data.facts
        monkeypatch.setattr(own_data, "facts", lambda data: {**real(data), "version": "0.9"})
        reason = f"version of fl_lightning: 0.9 there, {__version__} here"
    else:
        given = tmp_path / "own.yaml"
        described = {
            "class_path": "LeafData",
            "init_args": {"train": str(each[0]), "batch_size": 8},
        }
        given.write_text(yaml.safe_dump(described))
        reason = "batch_size: 8 there, 4 here"
    found = refusal_of(tmp_path, test, given)
    assert "node n0 (node0)" in found
    assert reason in found


def test_regression_does_not_fit_classification(leaves, tmp_path):
    _, test, each = leaves
    given = tmp_path / "own.yaml"
    described = {
        "class_path": "LeafData",
        "init_args": {"train": str(each[0]), "task": "regression"},
    }
    given.write_text(yaml.safe_dump(described))
    assert "task: Regression there, Classification here" in refusal_of(tmp_path, test, given)


def test_what_would_measure_the_examples_that_stand_for_the_nodes_own_is_refused(leaves, tmp_path):
    _, test, each = leaves
    norms = [{"class_path": "callbacks.GradientNorms"}]
    with pytest.raises(InputError, match=r"GradientNorms with FedAvg .* clients' examples, and th"):
        deployed(
            config(tmp_path, "server", leaf(test, test), callbacks=norms), own_nodes(tmp_path, each)
        )


def test_a_private_run_says_that_its_clients_measure_nothing(leaves, tmp_path, caplog):
    pytest.importorskip("dp_accounting")
    caplog.set_level("INFO")
    _, test, each = leaves
    noise, alike = {"noise_multiplier": 0.5, "clip_norm": 1.0}, {"weigh_by": "clients"}
    server = config(tmp_path, "server", leaf(test, test), init=alike, privacy=noise, max_rounds=1)
    cli = deployed(server, own_nodes(tmp_path, each))
    assert not any(name.startswith("val/") for name in logged(cli)[-1])
    assert "val/* is left out: under a secure sum or client-level privacy" in caplog.text
    assert "node n2: client 2 has 16 training and 0 validation examples" in caplog.text


DEADLINE = {"class_path": "Deadline", "init_args": {"seconds": 9.0, "least": 10}}


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ({"participation": 0.01, "secure_sum": {"threshold": 0.6}}, ""),
        ({"participation": 0.02, "rounds": DEADLINE}, ""),
        ({"participation": 1e-5, "secure_sum": {"threshold": 0.6}}, "with 1 client in a round"),
    ],
)
def test_how_many_clients_nodes_have_is_not_guessed(given, refused, leaves, tmp_path, monkeypatch):
    """Cohorts are refused before the nodes are asked where no federation has them."""
    pytest.importorskip("Crypto")
    _, test, _ = leaves
    config(tmp_path, "server", leaf(test, test), **given)
    monkeypatch.setattr(command.launch, "require_flower", lambda: None)
    ran = []
    monkeypatch.setattr(command, "_run", lambda *a: ran.append(a) or {"code": 0})
    words = ["--config", str(tmp_path / "server.yaml"), "--deploy.own_data=true"]
    cli = FederatedCLI("deploy", words)
    with pytest.raises(InputError, match=refused) if refused else nullcontext():
        command.deploy(cli)
    assert bool(ran) != bool(refused)


def test_a_node_with_data_and_a_run_that_deals_out_its_own_refuse_each_other(leaves, tmp_path):
    whole, test, each = leaves
    cli = config(tmp_path, "server", leaf(whole, test))
    deploy_over(cli.trainer, yaml.safe_load(cli.config_text), InProcess(own_nodes(tmp_path, each)))
    with pytest.raises(InputError, match="this node has data of its own"):
        cli.start()
    plain = {"node0": Node(NodeSettings(tmp_path / "plain", name="n0"), builder())}
    with pytest.raises(
        InputError, match=r"node n0 \(node0\); .* this node has none; start it with --data"
    ):
        deployed(config(tmp_path, "server", leaf(test, test)), plain, 1)


def test_folders_of_images_take_over_the_runs_classes_and_constants(tmp_path):
    """A folder of one class, of which the run has three: its class keeps the run's number, and its
    pixels are normalised with the run's constants."""
    rng = np.random.default_rng(0)
    for name in ("cat", "dog", "owl"):
        folder = tmp_path / "run" / name
        folder.mkdir(parents=True)
        for number in range(4):
            pixels = rng.integers(256, size=(8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{number}.png")
    run = ImageFolder(str(tmp_path / "run"), size=8, num_clients=1)
    run.setup()
    form = Form(**json.loads(json.dumps(vars(run.form()))))
    own = ImageFolder(str(tmp_path / "own"), size=8, num_clients=1)
    own.run_form = form
    (tmp_path / "run" / "owl").rename(tmp_path / "owl")
    (tmp_path / "own").mkdir()
    (tmp_path / "owl").rename(tmp_path / "own" / "owl")
    own.setup()
    assert own.train_target.tolist() == [2, 2, 2, 2]
    assert len(own.test_target) == 0
    assert vars(own.form()) == {**vars(run.form()), "columns": {}}
    assert (own.train_mean, own.train_std) == (run.train_mean, run.train_std)
    (tmp_path / "own" / "owl").rename(tmp_path / "own" / "bat")
    with pytest.raises(InputError, match="its class bat is none of the run's: cat, dog, owl"):
        own.setup()
    own.run_form = Form(moments=form.moments)  # of data whose classes are numbers, such as Cifar
    with pytest.raises(InputError, match=r"own; the run's data name no classes, .* ImageFolder$"):
        own.setup()


def test_tables_take_over_the_runs_moments_and_categories(tmp_path, caplog):
    rows = ["size,colour,kind", *(f"{n},{'red' if n % 2 else 'blue'},{n % 3}" for n in range(12))]
    (tmp_path / "run.csv").write_text("\n".join(rows))
    (tmp_path / "own.csv").write_text("\n".join(["colour,kind,size", "red,1,7", "green,1,8"]))
    run = TableData(str(tmp_path / "run.csv"), "kind", str(tmp_path / "run.csv"), num_clients=1)
    run.setup()
    own = TableData(str(tmp_path / "own.csv"), "kind", num_clients=1)
    own.run_form = Form(**json.loads(json.dumps(vars(run.form()))))
    own.setup()
    inputs = own.inputs("train", torch.arange(2))
    size = (np.array([7.0, 8.0]) - np.arange(12).mean()) / np.arange(12).std()
    expected = np.column_stack([size, [0, 0], [1, 0]])  # blue and red; green is neither
    np.testing.assert_allclose(inputs, expected, rtol=1e-6)
    assert own.train_target.tolist() == [1, 1]
    assert (
        "own.csv, column colour: 1 of 2 rows have a category that the run does not know"
        in caplog.text
    )


def test_a_column_is_numbers_or_text_as_it_is_in_the_run(tmp_path):
    """A ward or a code that is a number on a node is one of the run's categories, with its zeros in
    front; text in a column of numbers is refused by its name."""

    def data(name: str, lines: list[str], **settings: object) -> TableData:
        (tmp_path / name).write_text("\n".join(["size,ward,code,postcode,kind", *lines]))
        found = TableData(
            str(tmp_path / name), "kind", num_clients=1, missing="most_frequent", **settings
        )
        found.run_form = form
        return found

    form = None
    wards, codes = ["1", "2", "B"], ["01", "02", "A3"]
    lines = [f"{n},{wards[n % 3]},{codes[n % 3]},{10 + n % 2},{n % 2}" for n in range(12)]
    run = data("run.csv", lines, test=str(tmp_path / "run.csv"), categorical=["postcode"])
    run.setup()
    form = Form(**json.loads(json.dumps(vars(run.form()))))
    own = data("own.csv", ["7,2,01,11,1", "8,,02,10,1", "9,1,02,11,0"])
    own.setup()
    expected = [[0, 1, 0, 1, 0, 0, 0, 1], [1, 0, 0, 0, 1, 0, 1, 0], [1, 0, 0, 0, 1, 0, 0, 1]]
    assert own.inputs("train", torch.arange(3))[:, 1:].tolist() == expected
    with pytest.raises(
        InputError, match=r"text.csv, row 1, column size; small is no finite number"
    ):
        data("text.csv", ["small,1,01,10,1", ",2,02,11,0"]).setup()


def test_classes_of_a_hugging_face_data_set_are_matched_by_name(tmp_path):
    """A node whose labels are numbered in another order has the same classes, and one with another
    class is refused by its name. The folder that ``save_to_disk`` wrote takes the place of
    ``path``."""
    datasets = pytest.importorskip("datasets")

    def saved(name: str, kinds: list[str], labels: list[int], split: str | None = None) -> Path:
        features = datasets.Features(
            {
                "x": datasets.Sequence(datasets.Value("float32")),
                "label": datasets.ClassLabel(names=kinds),
            }
        )
        rows = {
            "x": [[float(len(kinds[label])), n / 9] for n, label in enumerate(labels)],
            "label": labels,
        }
        made = datasets.Dataset.from_dict(rows, features=features)
        (made if split is None else datasets.DatasetDict({split: made})).save_to_disk(
            tmp_path / name
        )
        return tmp_path / name

    server = saved("server", ["ape", "zebra"], [0, 1] * 5, "train")
    run = {"class_path": "HuggingFaceData", "init_args": {"path": str(server), "val_fraction": 0.2}}
    run["init_args"] |= {"num_clients": 2, "partition": {"class_path": "IID"}, "batch_size": 4}
    nodes = {
        0: saved("own0", ["ape", "zebra"], [0, 1, 1, 0, 1]),
        1: saved("own1", ["zebra", "ape"], [1, 1, 0, 1, 1]),
    }
    made = own_nodes(tmp_path, nodes, step=2)
    cli = deployed(config(tmp_path, "run", run), made, count=2)
    assert metadata(cli)["deployment"]["examples"] == {"0": 4, "1": 4}
    for number, node in enumerate(made.values()):  # 0 is ape, 1 is zebra
        assert node.built is not None
        expected = [[0, 1, 1, 0, 1], [0, 0, 1, 0, 0]][number]
        assert node.built[1].data.train_target.tolist() == expected
    other = own_nodes(tmp_path / "other", {0: saved("own2", ["emu", "ape"], [0, 1, 1, 0])}, step=1)
    with pytest.raises(InputError, match="its class emu is none of the run's: ape, zebra"):
        deployed(config(tmp_path, "again", run), other, count=1)


class Sequences(torch.utils.data.Dataset[list[int]]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> list[int]:
        return [index + 1, 2, 3, 4]


def test_all_text_of_a_node_is_trained_on(tmp_path):
    """Nothing of a node's own text is kept back for a test set that nobody evaluates, and records
    of one category are enough."""
    pair = {"chosen": "a", "rejected": "b"}
    record = {"task_name": "code", "definition": "write python", "targets": "x"}
    rows = [{**pair, **record, "prompt": f"{n}", "inputs": f"{n}"} for n in range(20)]
    path = tmp_path / "own.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    made = [
        PreferenceFiles(str(path), context=64),
        NaturalInstructions(str(path), num_clients=1, context=128),
        TokenData(Sequences(), num_clients=1, vocab_size=100, context=16),
    ]
    for data in made:
        data.run_form = Form()
        data.setup()
        data.distribute(0, torch.device("cpu"))
        assert (len(data.train_target), len(data.test_target)) == (20, 0)
    assert [data.own_setting for data in made] == ["train", "path", "train"]
    corpus = CorpusData("packages", packages=["yaml"], context=64)
    corpus.setup()
    every = len(corpus.train_target) + len(corpus.test_target)
    corpus.run_form = Form()
    corpus.setup()
    assert (len(corpus.train_target), len(corpus.test_target)) == (every, 0)
