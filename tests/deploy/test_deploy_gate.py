"""What a hostile server sends as a configuration: it is refused by the name of the setting, and
before anything is imported, called or written. Each case is an attack that once worked, or a cousin
of one."""

from __future__ import annotations

import copy
import os
import sys
from pathlib import Path

import pytest
import yaml
from test_deploy import command_line

from fl_lightning.cli.import_gate import only_imports
from fl_lightning.deploy.node.build import builder, counter
from fl_lightning.deploy.node.node import Node, NodeSettings
from fl_lightning.deploy.node.own_data import OwnData
from fl_lightning.deploy.node.told import told
from fl_lightning.deploy.protocol.gate import check_config, config_for_nodes, names_in
from fl_lightning.deploy.protocol.messages import Message
from fl_lightning.errors import InputError
from fl_lightning.models import build_network

SECRET = "-----BEGIN-SECRET-KEY"
PACKAGE = """
import os, pathlib
import torch
pathlib.Path(os.environ["EVIL_MARK"]).write_text("imported")
class Thing: pass
class Network(torch.nn.Sequential):
    def __init__(self, num_classes):
        super().__init__(torch.nn.Flatten(), torch.nn.LazyLinear(num_classes))
def net(num_classes):
    return Network(num_classes)
"""


@pytest.fixture(scope="module")
def honest(tmp_path_factory) -> dict:
    cli = command_line("fedavg", tmp_path_factory.mktemp("honest"), "--data.num_clients=4")
    return config_for_nodes(yaml.safe_load(cli.config_text))


@pytest.fixture
def mark(tmp_path, monkeypatch) -> Path:
    """The file that says that the package was imported."""
    folder = tmp_path / "packages" / "evilpkg"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(folder.parent)
    monkeypatch.setenv("EVIL_MARK", str(tmp_path / "mark"))
    monkeypatch.delitem(sys.modules, "evilpkg", raising=False)
    yield tmp_path / "mark"
    sys.modules.pop("evilpkg", None)


def changed(config: dict, path: str, value: object) -> dict:
    """A configuration with one setting that is another; the path is written with slashes."""
    config = copy.deepcopy(config)
    *groups, last = path.split("/")
    group = config
    for name in groups:
        group = group[name]
    group[last] = value
    return config


def node_in(folder: Path, **more) -> Node:
    return Node(NodeSettings(folder / "node", name="n0", **more), builder())


def ask(node: Node, config: object, kind: str = "check") -> Message:
    data = config if isinstance(config, bytes) else yaml.safe_dump(config, sort_keys=False).encode()
    return Message.from_bytes(node.answer(Message({"kind": kind}, (data,)).to_bytes()))


def refused(tmp_path: Path, config: object, *allow: str) -> str:
    """The reason of a node that keeps nothing."""
    answer = ask(node_in(tmp_path, allow=allow), config)
    assert answer.kind == "refused"
    assert not [path for path in (tmp_path / "node").rglob("*") if path.is_file()]
    return answer.header["reason"]


def test_an_honest_configuration_is_built(honest, tmp_path):
    answer = ask(node_in(tmp_path), honest)
    assert answer.kind == "checked", answer.header


IMPORTS = {
    "data": "evilpkg.Thing",
    "model": "evilpkg.Thing",
    "data.class_path": "evilpkg.Thing",
    "model.class_path": "evilpkg.Thing",
    "model.init_args.network": "evilpkg.net",
    "data/class_path": "evilpkg.Thing",
    "model/class_path": "evilpkg.Thing\n",
    "data/init_args/partition": "evilpkg.Thing",
    "data/init_args/partition/class_path": "evilpkg.Thing",
    "model/init_args/network": "evilpkg.net\n",
    "model/init_args/optimizer": "evilpkg.Thing",
    "model/init_args/scheduler": {"class_path": "evilpkg.Thing"},
    "model/init_args/average": "{class_path: evilpkg.Thing}",
    "model/init_args.network": "evilpkg.net",
    "model/dict_kwargs": {"anything": ["evilpkg.net"]},
    "trainer/callbacks": ["evilpkg.Thing"],
    "trainer/logger": "evilpkg.Thing",
    "trainer/engine": "evilpkg.Thing",
    "trainer/privacy": "evilpkg.Thing",
    "trainer/accelerator": "evilpkg.Thing",
}


@pytest.mark.parametrize("path", IMPORTS)
def test_a_package_that_was_not_allowed_is_not_imported_from_anywhere(path, honest, mark, tmp_path):
    reason = refused(tmp_path, changed(honest, path, IMPORTS[path]))
    assert path.replace("/", ".").rpartition(".class_path")[0] in reason
    assert not mark.exists()
    assert "evilpkg" not in sys.modules


@pytest.mark.parametrize(
    "network",
    [
        "' evilpkg.net'",
        "evilpkg.json",
        "os.system",
        "torch.os.system",
        "torch.hub.load",
        "torch.nn.functional.relu",
        "torchmetrics.text.BERTScore",
        "torchmetrics.functional.f1_score",
        "torchvision.datasets.folder.default_loader.json",
        "fl_lightning.cli.parser.os.system",
        "fl_lightning.deploy.flower.launch.start_node",
        "fl_lightning.aggregation.private.Sampler",
        "pandas.read_pickle",
        "__main__.anything",
    ],
)
def test_no_function_of_elsewhere_is_a_network(network, honest, mark, tmp_path):
    assert "model.init_args.network" in refused(
        tmp_path, changed(honest, "model/init_args/network", network)
    )
    assert not mark.exists()


def test_a_configuration_that_is_a_pickle_is_not_kept(honest, tmp_path, monkeypatch):
    """Two messages that once ran a command: the first leaves a pickle on the node, the second has
    it read."""
    monkeypatch.chdir(tmp_path)
    bomb = f"cos\nsystem\n(S'touch {tmp_path}/OWNED'\ntR.".encode()
    assert "no mapping in the form" in refused(tmp_path, bomb)
    assert "no mapping in the form" in refused(
        tmp_path, yaml.safe_dump(honest).encode() + b"\n# " + bomb
    )
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "x.yaml").write_bytes(bomb)
    given = {
        "root": "folder",
        "loader": "pandas.read_pickle",
        "extensions": [".yaml"],
        "allow_empty": True,
    }
    reads = {"class_path": "torchvision.datasets.DatasetFolder", "init_args": given}
    data = {
        "class_path": "fl_lightning.data.DatasetData",
        "init_args": {"train": reads, "num_clients": 1},
    }
    assert "data.init_args.train.class_path" in refused(tmp_path, changed(honest, "data", data))
    reads["class_path"] = "torchvision.datasets.EuroSAT"
    assert "data.init_args.train.init_args.loader" in refused(
        tmp_path, changed(honest, "data", data)
    )
    assert not (tmp_path / "OWNED").exists()


@pytest.mark.parametrize(
    "key", ["config", "base", "ckpt_path", "print_config", "help", "model.help"]
)
def test_no_file_of_a_node_is_read_as_a_configuration(key, honest, tmp_path):
    (tmp_path / "key").write_text(f"{SECRET}\nabc\n")
    reason = refused(tmp_path, {**honest, key: str(tmp_path / "key")})
    assert reason.startswith(f"{key}:")
    assert SECRET not in reason


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("default_root_dir", "/tmp/outside"),
        ("logger", {"class_path": "lightning.pytorch.loggers.MLFlowLogger"}),
        ("logger", 0),
        ("workers", 10000),
        ("workers", True),
        ("engine", "pool"),
        ("callbacks", []),
        ("tags", {}),
        ("secure_sum", "/etc/passwd"),
        ("ckpt_path", "/etc/passwd"),
    ],
)
def test_settings_of_the_trainer_are_those_that_servers_send(setting, value, honest, tmp_path):
    assert f"trainer.{setting}:" in refused(tmp_path, changed(honest, f"trainer/{setting}", value))


def test_a_node_fixes_what_a_server_leaves_out(honest, tmp_path):
    trainer = {name: value for name, value in honest["trainer"].items() if name != "engine"}
    assert "trainer.engine:" in refused(tmp_path, {**honest, "trainer": trainer})


@pytest.mark.parametrize(
    "data",
    [
        b"a: &a [x]\nb: *a\n",
        b"a: &a\n  b: *a\n",
        b"just text",
        b"",
        b"\xff\xfe",
        b"[" * 5000,
        b"a: {b: !!python/object/apply:os.getcwd []}\n",
        b"? [1]\n: 2\n",
        b"a: &a ["
        + b"x," * 50
        + b"]\n"
        + b"".join(
            b"a%d: &a%d [%s]\n" % (n, n, b"*a%s," * 9 % ((b"%d" % (n - 1) if n else b"",) * 9))
            for n in range(9)
        ),
    ],
    ids=["alias", "recursive", "text", "nothing", "utf-16", "deep", "tag", "key", "laughs"],
)
def test_what_is_no_configuration_is_not_kept(data, tmp_path):
    assert refused(tmp_path, data)


@pytest.mark.parametrize("setting", ["data/init_args/partition", "model/init_args/optimizer"])
def test_a_refusal_has_no_content_and_no_path_of_a_file(setting, honest, tmp_path, caplog):
    secret = tmp_path / "secret"
    secret.write_text(f"{SECRET}: 1\n")
    answer = ask(node_in(tmp_path), changed(honest, setting, str(secret)))
    assert answer.kind == "refused"
    reason = answer.header["reason"]
    assert setting.split("/")[0] in reason
    assert SECRET not in reason
    assert str(tmp_path) not in reason


@pytest.mark.parametrize(
    ("name", "init_args"),
    [
        ("TableData", {"target": "kind"}),
        ("TextFiles", {}),
        ("LeafData", {}),
        ("ImageFolder", {}),
        ("HuggingFaceData", {}),
    ],
)
def test_readers_of_data_do_not_tell_what_they_read(name, init_args, honest, tmp_path):
    from fl_lightning import data

    if not hasattr(data, name):
        pytest.skip(f"no {name}")
    for ending in ("csv", "txt", "json", "jsonl"):
        secret = tmp_path / f"secret.{ending}"
        secret.write_text(f"{SECRET},{SECRET}2\n{SECRET},x\n")
        settings = {"train": str(secret), "num_clients": 2, **init_args}
        given = {"class_path": f"fl_lightning.data.{name}", "init_args": settings}
        answer = ask(node_in(tmp_path), changed(honest, "data", given))
        assert SECRET not in str(answer.header)
        assert str(tmp_path) not in str(answer.header)


def test_the_owners_packages_are_imported_by_name_or_with_allow(honest, mark, tmp_path):
    """In files of the owner's own they need no ``--allow``, and the run may not name them for
    that."""
    run = changed(honest, "model/init_args/network", "evilpkg.net")
    overlay = tmp_path / "overlay.yaml"
    overlay.write_text("model: {init_args: {network: evilpkg.Network}}")
    node = Node(NodeSettings(tmp_path / "node"), builder([overlay]))
    assert ask(node, run).kind == "refused"
    assert not mark.exists()
    assert "--overlays of this node (model.init_args.network" in ask(node, honest).header["reason"]
    assert mark.exists()
    answer = ask(node_in(tmp_path / "other", allow=("evilpkg",)), run)
    assert answer.kind == "checked", answer.header
    older = refused(
        tmp_path / "older", changed(honest, "model/init_args/network", "evilpkg.New"), "evilpkg"
    )
    assert "may import its package; it has no such class there" in older
    run = changed(honest, "model/init_args/network", "evilpkg.os.system")
    assert "evilpkg.os.system" in refused(tmp_path / "third", run)


def test_a_configuration_that_was_changed_on_the_disk_is_not_built(honest, tmp_path):
    node = node_in(tmp_path)
    assert ask(node, honest).kind == "checked"
    (kept,) = (tmp_path / "node" / "configs").iterdir()
    kept.write_bytes(kept.read_bytes() + b"#")
    order = Message({"kind": "train", "config": kept.stem, "orders": []}).to_bytes()
    answer = Message.from_bytes(node_in(tmp_path).answer(order))
    assert "has not checked it" in answer.header["reason"]
    assert ask(node_in(tmp_path), honest).kind == "checked"  # it is written again
    assert not kept.read_bytes().endswith(b"#")


def test_a_name_of_files_is_not_imported(honest, mark, tmp_path, caplog):
    """It is data's own setting that may be a class too, and the parser asks before it imports."""
    given = {"train": "evilpkg.Thing", "num_clients": 2}
    data = {"class_path": "fl_lightning.data.DatasetData", "init_args": given}
    assert ask(node_in(tmp_path), changed(honest, "data", data)).kind == "refused"
    assert "evilpkg.Thing" in caplog.text
    assert not mark.exists()
    assert "evilpkg" not in sys.modules


def test_a_census_is_gated_too(honest, mark, tmp_path):
    (tmp_path / "own.json").write_text("{}")
    own = OwnData(str(tmp_path / "own.json"), 0, 1)
    node = Node(NodeSettings(tmp_path / "node"), builder((), own), counter((), own))
    answer = ask(node, changed(honest, "model/init_args/network", "evilpkg.net"), "census")
    assert "model.init_args.network" in answer.header["reason"]
    assert not mark.exists()


def test_the_gate_holds_behind_the_check(mark, tmp_path):
    """What the check of texts might miss, the parser and the networks by name do not import."""
    from jsonargparse._util import import_object

    with only_imports(["fl_lightning.methods"]):
        for path in ("evilpkg.Thing", "os.system", "fl_lightning.methods.base.torch.hub.load"):
            with pytest.raises(
                Exception, match=r"not allowed|no attribute|No module|not a package"
            ):
                import_object(path)
        with pytest.raises(InputError, match=r"import path evilpkg.net"):
            build_network("evilpkg.net", 3, (3, 16, 16))
        import_object("fl_lightning.methods.FedAvg")
    assert not mark.exists()
    with pytest.raises(InputError, match="package jsonargparse"), only_imports(["jsonargparse"]):
        pass
    assert import_object("evilpkg.Thing").__name__ == "Thing"


def test_legitimate_names_pass(honest):
    def names(path: str, value: object) -> frozenset[str]:
        return check_config(yaml.safe_dump(changed(honest, path, value), sort_keys=False).encode())

    network = "model/init_args/network"
    names(network, {"class_path": "fl_lightning.models.MLP", "init_args": {"hidden": 8}})
    names("data/init_args/root", "data.d/pictures")
    names("data/init_args/train", "table.csv")
    names("data/init_args/name", "v1.en")
    names("model/init_args/ala_names", ["layer4.conv2"])
    names(
        network, {"class_path": "fl_lightning.models.MLP", "init_args": {"gguf_file": "a.Q8.gguf"}}
    )
    names("model/init_args/optimizer", {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}})
    names("model/init_args/scheduler", {"class_path": "torch.optim.lr_scheduler.StepLR"})
    assert "torchmetrics.classification.f_beta.F1Score" in names(
        "data/init_args/metrics",
        [{"class_path": "torchmetrics.F1Score"}, {"class_path": "torchmetrics.R2Score"}],
    )
    assert "torchvision.models.resnet18" in names(network, "torchvision.models.resnet18")
    assert "torchvision.datasets.mnist.MNIST" in names(
        "data/init_args/train",
        {"class_path": "torchvision.datasets.MNIST", "init_args": {"root": "files"}},
    )
    assert "mobilenetv3_small_100.lamb_in1k" in names(network, "mobilenetv3_small_100.lamb_in1k")
    plain = names("data/init_args/root", "data")
    for path, value in (
        ("model/init_args/personal", "layer4.conv2"),
        ("model/init_args/personal", "model.layers.*"),
        ("model/init_args/network", {"init_args": {"targets": ["self_attn.q_proj"]}}),
        ("data/init_args/train", "femnist.v2"),
        ("data/init_args/features", ["petal.length"]),
    ):
        assert names(path, value) == plain
    with pytest.raises(InputError, match=r"^data.init_args.partition.init_args.train: a.b;"):
        names("data/init_args/partition", {"init_args": {"train": "a.b"}})
    assert names_in({"a": ["b.C", {"class_path": "own.data.D"}], "file": "x.csv"}) == {"b", "own"}


def test_what_is_told_has_names_and_no_places(tmp_path):
    def message(*parts: str) -> str:
        try:
            raise InputError(*parts)
        except InputError as error:
            return told(error)

    hidden = message(
        f"{tmp_path}/a b.csv, row {SECRET}", f"{SECRET} is no number", "the node's log says more"
    )
    assert SECRET not in hidden
    assert str(tmp_path) not in hidden
    assert told(ValueError(SECRET)) == "ValueError; the node's log says more"
    assert os.sep not in told(OSError(2, "no such file", "/etc/passwd"))
