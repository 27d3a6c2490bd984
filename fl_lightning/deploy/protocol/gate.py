"""What a node takes from a server as a configuration: settings of known names, and classes that do
no harm.

A node does not count on what an honest server sends. It checks the bytes before it writes or builds
anything. Their shape is fixed: seed, method, data and settings of local training, in the form in
which :func:`config_for_nodes` writes it. Then every text in them, at whichever setting, that could
be an import path must name a class of the project, of torch's optimisers and layers, a metric of
torchmetrics, or a data set or network of torchvision; or anything from a package that the node's
owner allows. Nothing else is imported, here and later (:mod:`fl_lightning.cli.import_gate`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from importlib import import_module
from inspect import isclass, isfunction, ismodule
from typing import Any

import yaml

from fl_lightning.config.documents import MAX_DEPTH, check_size
from fl_lightning.config.recorded import imported
from fl_lightning.config.settings import is_under
from fl_lightning.deploy.protocol.messages import printable
from fl_lightning.errors import InputError, require

KEY = "own_data"
"""Key of a run's configuration that says what the nodes' own data have in common."""
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
"""Settings of the trainer that nodes are sent: those that local training reads. Callbacks, loggers
and folders are the server's own."""
WORDS = ("accelerator", "precision", "gradient_clip_algorithm", "engine", "deterministic")
"""Those whose values are words."""
CLASS = ("class_path", "init_args", "dict_kwargs")
"""What the mapping of a class has."""
FIXED = {"engine": "sequential", "workers": 1, "logger": False}
"""Settings of the trainer that are the same on all nodes."""
MAX_BYTES = 2**24
MAX_SHOWN = 80  # characters of what the server sent, in a refusal
ROOMS = tuple(
    f"fl_lightning.{room}"
    for room in (
        "aggregation",
        "data",
        "methods",
        "metrics",
        "models",
        "privacy",
        "quantization",
        "tasks",
    )
)
"""Parts of the project whose classes a run may name."""
DATASETS = (
    *(
        "MNIST",
        "FashionMNIST",
        "KMNIST",
        "EMNIST",
        "CIFAR10",
        "CIFAR100",
        "SVHN",
        "STL10",
        "USPS",
        "GTSRB",
    ),
    *("DTD", "Food101", "Flowers102", "OxfordIIITPet", "EuroSAT", "FakeData"),
)
"""Data sets of torchvision whose files are images, or have known checksums."""
METRICS = ("torchmetrics.classification", "torchmetrics.regression", "torchmetrics.text.perplexity")
"""Where metrics are defined that are functions of outputs and targets; others load networks."""
READER = "torchvision.datasets.folder.default_loader"
"""The function that reads images, a default of several of them."""
FILES = (
    "csv",
    "gz",
    "json",
    "jsonl",
    "npy",
    "npz",
    "parquet",
    "safetensors",
    "tsv",
    "txt",
    "yaml",
    "yml",
)
NAMES = {
    "model": ("personal", "targets", "ala_names", "gguf_file"),
    "data": (
        *("train", "test", "root", "name"),
        *("target", "client", "group", "input", "text", "features", "categorical"),
    ),
}
"""Settings of models and data whose texts are names of layers, files and columns. They may have
dots; the parser still imports nothing that they name."""
DOTTED = re.compile(r"\W*([^\W\d]\w*(?:\.[^\W\d]\w*)+)\W*")
Place = tuple[str, ...]


def config_for_nodes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what nodes need of a run's whole configuration: seed, method, data and local
    training."""
    trainer = {name: config["trainer"][name] for name in SENT if name in config["trainer"]}
    return {
        "seed_everything": config["seed_everything"],
        "trainer": {**trainer, **FIXED},
        "model": config["model"],
        "data": config["data"],
    }


def check_config(data: bytes, allow: Collection[str] = ()) -> frozenset[str]:
    """Check a configuration from a server, and return the dotted names that it needs imported.

    Args:
        data: as they came.
        allow: packages from which the node's owner allows everything.

    Raises:
        InputError: the configuration has another shape, or names what the node does not import. The
            message has nothing of the node's own.
    """
    config = _read(data)
    _check_shape(config)
    names = {*ROOMS, "torch.nn", "torch.optim", *allow}
    for place, text in _texts({key: value for key, value in config.items() if key != KEY}, ()):
        _check_text(place, text, allow, names)
    return frozenset(names)


def names_in(config: object) -> set[str]:
    """Return the packages that a trusted configuration, of the node's owner, names."""
    found = set()
    for _, text in _texts(config, (), strict=False):
        if (match := DOTTED.fullmatch(text)) and not _is_file(text):
            found.add(match[1].split(".")[0])
    return found


def _read(data: bytes) -> dict[str, Any]:
    """Return a configuration that is a mapping, written as servers write it: then no other program,
    such as a reader of pickles, has another use for the file."""
    require(
        len(data) <= MAX_BYTES,
        "the configuration",
        f"it has at most {MAX_BYTES} bytes",
        "send less",
    )
    try:
        text = data.decode()
        if "*" in text:  # an alias: so few bytes can stand for many
            check_size(text, "the configuration")
        config = yaml.safe_load(text)
        whole = isinstance(config, dict) and yaml.safe_dump(config, sort_keys=False) == text
    except (ValueError, yaml.YAMLError, RecursionError, MemoryError):
        whole = False
    require(
        whole,
        "the configuration",
        "it is no mapping in the form that servers send",
        "send it with the same version",
    )
    return config


def _check_shape(config: Mapping[str, Any]) -> None:
    """Refuse settings that an honest server does not send."""
    wanted = ("seed_everything", "trainer", "model", "data")
    _check_keys(config, (), (*wanted, KEY))
    for key in wanted:
        require(key in config, f"{key}:", "the configuration lacks it", "send it")
    seed = config["seed_everything"]
    require(type(seed) is int, "seed_everything:", "it is a whole number", "send one")
    for group, keys in (("model", CLASS), ("data", CLASS), ("trainer", (*SENT, *FIXED))):
        require(
            isinstance(config[group], dict), f"{group}:", "it is a mapping", "send its settings"
        )
        _check_keys(config[group], (group,), keys)
    for name, value in FIXED.items():
        given = config["trainer"].get(name)
        same = type(given) is type(value) and given == value
        require(
            same, f"trainer.{name}:", f"on a node it is {value!r}".lower(), "leave it to the node"
        )
    for name in config["trainer"]:
        plain = name in WORDS or not isinstance(config["trainer"][name], (str, list))
        require(
            plain, f"trainer.{name}:", "it is no text and no list", "send its value or its settings"
        )
    for group in ("model", "data"):
        named = isinstance(config[group].get("class_path"), str)
        require(named, f"{group}.class_path:", "it is the import path of a class", "send one")
        for name in ("init_args", "dict_kwargs"):
            settings = isinstance(config[group].get(name, {}), dict)
            require(settings, f"{group}.{name}:", "it is a mapping", "send its settings")
    if config.get(KEY) is not None:
        own = config[KEY]
        require(isinstance(own, dict), f"{KEY}:", "it is a mapping", "send form and sizes")
        _check_keys(own, (KEY,), ("form", "sizes"))


def _check_keys(group: Mapping[Any, Any], place: Place, known: Collection[str]) -> None:
    for key in group:
        require(
            key in known,
            f"{_name((*place, printable(key, MAX_SHOWN)))}:",
            "servers do not send this setting to nodes",
            f"send {', '.join(known)} alone",
        )


def _texts(node: object, place: Place, *, strict: bool = True) -> Iterator[tuple[Place, str]]:
    """Yield every text of a configuration and where it stands.

    Args:
        strict: refuse names of settings with dots, and values that are no plain ones.
    """
    require(
        len(place) <= MAX_DEPTH,
        "the configuration",
        f"it has at most {MAX_DEPTH} levels",
        "send less",
    )
    if isinstance(node, Mapping):
        for key, value in node.items():
            plain = isinstance(key, int) or (isinstance(key, str) and re.fullmatch(r"[\w -]*", key))
            require(
                plain or not strict,
                f"{_name((*place, printable(key, MAX_SHOWN)))}:",
                "the name of a setting has letters, digits, _ and -",
                "nest the settings",
            )
            yield from _texts(value, (*place, str(key)), strict=strict)
    elif isinstance(node, list):
        for value in node:
            yield from _texts(value, (*place, "[]"), strict=strict)
    elif isinstance(node, str):
        yield place, node
    elif strict and type(node) not in (int, float, bool, type(None)):
        raise InputError(f"{_name(place)}:", f"a value is no {type(node).__name__}", "send a text")


def _check_text(place: Place, text: str, allow: Collection[str], names: set[str]) -> None:
    """Refuse a text that names what this node does not import, and add to ``names`` what it
    does."""
    given = f"{_name(place)}: {printable(text, MAX_SHOWN)}"
    require(
        "class_path" not in text,
        given,
        "a class is named by a mapping",
        "send class_path and init_args",
    )
    match, is_class = DOTTED.fullmatch(text), place[-1:] == ("class_path",)
    if match is None or (_is_file(text) and not is_class and "network" not in place):
        require(not is_class, given, "a class path has dots and letters", "send the whole path")
        return
    path = match[1]
    require(
        path == text or not is_class,
        given,
        "a class path has dots and letters",
        "send the whole path",
    )
    if not is_class and "network" in place and _is_network(path):
        names.add(path)
        return
    found = _found(path, allow)
    require(
        found is not None or not is_under(path, allow),
        f"{given}: this node may import its package",
        "it has no such class there",
        "give it the package as it is now, and start it again",
    )
    if found is None and _is_name(place):
        return
    require(
        found is not None,
        given,
        f"import path {path}: this node imports classes of fl_lightning, optimisers and layers of torch, "
        "metrics of torchmetrics, and data sets and networks of torchvision by name",
        "the node's owner can add a package with --allow",
    )
    names.update((path, _defined(found)))


def _found(path: str, allow: Collection[str]) -> Any:
    """Return what a path names if the node imports it, else None. Only then its module is
    imported."""
    module, _, name = path.rpartition(".")
    if is_under(path, allow):
        found = imported(path)
        theirs = {entry.split(".")[0] for entry in allow}
        return found if _defined(found).split(".")[0] in theirs else None
    if any(part.startswith("_") for part in path.split(".")):
        return None
    if path == READER:
        return imported(path)
    if module == "fl_lightning" or is_under(module, ROOMS):
        found = imported(path)
        own = is_under(_defined(found), ROOMS) and not ismodule(found) and not isfunction(found)
        return found if own else None
    if module == "torchvision.datasets" and name in DATASETS:
        return imported(path)
    if module.split(".")[0] == "torch" and is_under(module, ("torch.nn", "torch.optim")):
        found = imported(path)
        import torch

        good = (torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
        own = (
            isclass(found)
            and issubclass(found, good)
            and is_under(_defined(found), ("torch.nn", "torch.optim"))
        )
        return found if own else None
    if module.split(".")[0] == "torchmetrics":
        found = imported(path)
        import torchmetrics

        own = (
            isclass(found)
            and issubclass(found, torchmetrics.Metric)
            and is_under(_defined(found), METRICS)
        )
        return found if own else None
    return None


def _is_network(path: str) -> bool:
    """Return whether a text is the name of a network of torchvision or timm, which is given the
    number of classes and nothing else."""
    module, _, name = path.rpartition(".")
    if module == "torchvision.models":
        from torchvision.models import list_models

        return name in list_models(import_module(module))
    if module.split(".")[0] in ("torch", "torchvision", "fl_lightning"):
        return False
    import timm

    return timm.is_model(path)


def _defined(found: Any) -> str:
    """Return where what was found is defined; of an object that is neither class nor function, its
    class."""
    if ismodule(found):
        return str(found.__name__)
    thing = found if isclass(found) or isfunction(found) else type(found)
    return f"{thing.__module__}.{thing.__qualname__}"


def _is_name(place: Place) -> bool:
    """Return whether a setting has the names of :data:`NAMES`: those of data at the top alone,
    where no class of another package has settings of its own."""
    *above, last = (part for part in place if part != "[]")
    top = above == ["data", "init_args"] if place[0] == "data" else True
    return top and last in NAMES.get(place[0], ())


def _is_file(text: str) -> bool:
    return text.rpartition(".")[2] in FILES


def _name(place: Place) -> str:
    return ".".join(place).replace(".[]", "[]") or "the configuration"
