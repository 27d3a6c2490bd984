"""Settings for error messages: which ones exist, their types in words, near names, and valid examples."""

from __future__ import annotations

import inspect
import re
from argparse import Action
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from jsonargparse import ArgumentParser
from jsonargparse.typing import restricted_number_type
from lightning.pytorch import LightningDataModule, LightningModule
from torch.utils.data import Dataset

from fl_lightning.data.map_style import DataModuleCallable, DatasetCallable
from fl_lightning.data.text.tokens import Tokenizer
from fl_lightning.support.import_gate import may_import

Seed = restricted_number_type("Seed", int, [(">=", 0), ("<", 2**63)], docstring="An int >= 0 and below 2^63")

TYPE_WORDS: dict[Any, str] = {
    int: "an int",
    float: "a number",
    bool: "true or false",
    str: "text",
    NoneType: "null",
    Seed: "an int >= 0 and below 2^63",
    LightningModule: "the import path of a LightningModule",
    DatasetCallable: "the import path of a torch.utils.data.Dataset",
    DataModuleCallable: "the import path of a LightningDataModule",
    Tokenizer: "the import path of a tokeniser",
}
TYPE_EXAMPLES: dict[Any, str] = {
    int: "1",
    float: "0.5",
    bool: "true",
    Seed: "0",
    Path: "FOLDER",
    LightningModule: "my_package.LitClassifier",
    DatasetCallable: "torchvision.datasets.FakeData",
    DataModuleCallable: "my_package.MyDataModule",
    Tokenizer: "fl_lightning.data.text.tokens.HuggingFaceTokenizer",
}
MAX_LISTED_CLASSES = 15  # names that a message lists


def settings_of(target: ArgumentParser | Callable[..., Any]) -> Mapping[str, Action]:
    """Return every setting of a parser, or every argument of a class or function, by its name."""
    if not isinstance(target, ArgumentParser):
        return _arguments_of(target)
    return {
        action.dest: action
        for action in target._actions
        if re.fullmatch(r"(?!help$)[\w.]+(?<!\.help)", action.dest)
    }


@cache
def _arguments_of(target: Callable[..., Any]) -> Mapping[str, Action]:
    parser = ArgumentParser(exit_on_error=False)
    add = parser.add_class_arguments if inspect.isclass(target) else parser.add_function_arguments
    add(target, fail_untyped=False)
    return {name: action for name, action in settings_of(parser).items() if name != "params"}


def hint_of(action: Any) -> Any:
    """Return the type of a setting; None if it has none."""
    return getattr(action, "_typehint", None) or getattr(action, "type", None)


def import_class(class_path: str) -> Any:
    """Return what a class path names; None if it cannot be imported."""
    if not may_import(class_path):
        return None
    module, _, name = class_path.rpartition(".")
    try:
        return getattr(__import__(module, fromlist=[name]), name)
    except (ImportError, AttributeError, ValueError):
        return None


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """Return the valid name closest to ``name``; None if none is close.

    Whole names are compared first, then the last parts of dotted names.

    >>> nearest("max_round", ["trainer.max_rounds", "seed_everything"])
    'trainer.max_rounds'
    """
    valid = list(valid)
    leaf = name.rpartition(".")[2].lower()
    lowered = {option.lower(): option for option in valid}
    leaves = {option.rpartition(".")[2].lower(): option for option in reversed(valid)}
    for written, options in ((name.lower(), lowered), (leaf, leaves)):
        if near := get_close_matches(written, options, n=5, cutoff=0.75):
            swapped = [option for option in near if sorted(option) == sorted(written)]  # letters swapped
            return options[(swapped or near)[0]]
    return None


FOREIGN_NAMES = {
    "seed": "seed_everything",
    "random_seed": "seed_everything",
    "random_state": "seed_everything",
    "lr": "model.optimizer.lr",
    "learning_rate": "model.optimizer.lr",
    "momentum": "model.optimizer.momentum",
    "weight_decay": "model.optimizer.weight_decay",
    "batch": "data.batch_size",
    "data.alpha": "data.partition.beta",
    "dirichlet_alpha": "data.partition.beta",
    "clients": "data.num_clients",
    "n_clients": "data.num_clients",
    "num_users": "data.num_clients",
    "method": "model",
    "algorithm": "model",
    "rounds": "trainer.max_rounds",
    "num_rounds": "trainer.max_rounds",
    "n_rounds": "trainer.max_rounds",
    "fraction": "trainer.participation",
    "client_fraction": "trainer.participation",
    "gpu": "trainer.devices",
    "gpus": "trainer.devices",
    "num_gpus": "trainer.devices",
    "device": "trainer.accelerator",
    "num_workers": "trainer.workers",
    "name": "trainer.run_name",
    "output": "trainer.default_root_dir",
    "output_dir": "trainer.default_root_dir",
    "save_dir": "trainer.default_root_dir",
    "resume": "ckpt_path",
    "resume_from_checkpoint": "ckpt_path",
    "checkpoint": "ckpt_path",
}
"""The name of a setting here, by the name that other programs give it (the whole or its last part)."""
EPOCH_NAMES = ("epochs", "max_epochs", "num_epochs", "n_epochs", "max_epoch")


def intended_setting(name: str, valid: Iterable[str]) -> str | None:
    """Return the setting that ``name`` probably means; None if there is no such setting.

    It is the one with the same last part, one that other programs call so, or the nearest name.

    >>> intended_setting("trainer.gpus", ["trainer.tags"])
    'trainer.devices'
    >>> intended_setting("batch_size", ["data.batch_size", "data"])
    'data.batch_size'
    """
    valid = list(valid)
    leaf = name.rpartition(".")[2]
    if leaf in EPOCH_NAMES:
        return (
            "trainer.max_rounds for rounds of the federation, --trainer.local_epochs for a client's "
            "passes over its data"
        )
    alike = [option for option in valid if option.rpartition(".")[2] == leaf]
    if alike:
        return alike[0]
    return FOREIGN_NAMES.get(name) or FOREIGN_NAMES.get(leaf) or nearest(name, valid)


def members(hint: Any) -> Iterator[Any]:
    """Yield the members of a union and of the unions in it, or a type that is none."""
    if get_origin(hint) in (Union, UnionType):
        for member in get_args(hint):
            yield from members(member)
    else:
        yield hint


def is_list(hint: Any) -> bool:
    """Return whether a type is a list, or a list or null."""
    return {get_origin(member) for member in members(hint) if member is not NoneType} == {list}


def _class_of(hint: Any) -> type | None:
    """Return the class C of ``C``, ``list[C]`` or ``Callable[..., C]``, whose subclasses may be named."""
    if get_origin(hint) is list:
        hint = get_args(hint)[0]
    elif get_origin(hint) is not None and get_args(hint) and get_origin(hint) is not Literal:
        hint = get_args(hint)[-1]
    return hint if inspect.isclass(hint) and hint not in TYPE_WORDS else None


def choices(hint: Any) -> list[str]:
    """Return the names that may be written for a setting: literals and short class names."""
    names: dict[str, None] = {}
    for member in members(hint):
        if get_origin(member) is Literal:
            names.update(dict.fromkeys(map(str, get_args(member))))
        # of these no subclass is listed: the known ones are methods, federations and parts of libraries
        elif (cls := _class_of(member)) is not None and cls not in (
            LightningModule,
            LightningDataModule,
            Dataset,
        ):
            subclasses = {c.__name__ for c in concrete_classes(cls) if c is not cls}
            names.update(dict.fromkeys(sorted(subclasses) or [cls.__name__]))
    return list(names)


def concrete_classes(cls: type) -> Iterator[type]:
    """Yield those of ``cls`` and its subclasses that can be built."""
    if not inspect.isabstract(cls) and not cls.__name__.startswith("_"):
        yield cls
    subclasses: list[type] = cls.__subclasses__()
    for subclass in subclasses:
        yield from concrete_classes(subclass)


def type_in_words(hint: Any) -> str:
    """Return the values that a type allows, in words.

    >>> type_in_words(Literal["a", "b"] | None)
    'a, b or null'
    """
    words: dict[str, None] = {}
    for member in sorted(members(hint), key=lambda member: get_origin(member) is list):
        cls = _class_of(member)
        names = choices(member)
        if len(names) > MAX_LISTED_CLASSES and cls is not None:
            names = [f"a class of {cls.__name__}"]
        if get_origin(member) is list:
            names = [f"a list of {', '.join(names) or type_in_words(get_args(member)[0])}"]
        words.update(
            dict.fromkeys(
                [TYPE_WORDS[member]]
                if member in TYPE_WORDS
                else names or [getattr(member, "__name__", str(member))]
            )
        )
    *most, last = words
    return f"{', '.join(most)} or {last}" if most else last


def example_of(action: Any) -> str:
    """Return a valid value for a setting: its default, or an example of its type."""
    default = getattr(action, "default", None)
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, int | float | str) and default != "==SUPPRESS==":
        return str(default)
    hint = hint_of(action)
    for member in members(hint):
        if example := TYPE_EXAMPLES.get(member) or next(iter(choices(member)), None):
            return example
    return "VALUE"
