"""Settings for error messages: which ones exist, their types in words, and valid examples."""

from __future__ import annotations

import inspect
import re
import sys
from argparse import Action
from collections import abc
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import is_dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from jsonargparse import ArgumentParser, Namespace
from jsonargparse.typing import restricted_number_type
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchmetrics import Metric

from fl_lightning.cli.description import Description
from fl_lightning.cli.refusals import Setting
from fl_lightning.config.constraints import Constraint, constraints_of
from fl_lightning.config.import_gate import may_import
from fl_lightning.data.map_style import DataModuleCallable, DatasetCallable
from fl_lightning.data.text.tokens import Tokenizer
from fl_lightning.metrics.named import MetricOfClasses

Seed = restricted_number_type(
    "Seed", int, [(">=", 0), ("<", 2**63)], docstring="An int >= 0 and below 2^63"
)

TYPE_WORDS: dict[Any, str] = {
    int: "an int",
    float: "a number",
    bool: "true or false",
    str: "text",
    NoneType: "null",
    Seed: "an int >= 0 and below 2^63",
    LightningModule: "the import path of a LightningModule",
    Path: "a path",
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
    MetricOfClasses: "torchmetrics.classification.MulticlassF1Score",
    Tokenizer: "fl_lightning.data.text.tokens.HuggingFaceTokenizer",
}
MAPPINGS = (dict, Mapping)  # whose first type is that of names
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
    """Return the class C of ``C``, ``list[C]`` or ``Callable[..., C]``, whose subclasses may be
    named."""
    if get_origin(hint) is list:
        hint = get_args(hint)[0]
    elif get_origin(hint) is not None and get_args(hint) and get_origin(hint) is not Literal:
        hint = get_args(hint)[-1]
    return hint if inspect.isclass(hint) and hint is not Any and hint not in TYPE_WORDS else None


def choices(hint: Any) -> list[str]:
    """Return the names that may be written for a setting: literals and short class names."""
    names: dict[str, None] = {}
    for member in members(hint):
        if get_origin(member) is Literal:
            names.update(dict.fromkeys(map(str, get_args(member))))
        # of these no subclass is listed: the known ones are methods, federations and parts of
        # libraries
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
    for one in _all_subclasses(cls):
        if not inspect.isabstract(one) and not one.__name__.startswith("_"):
            yield one


def subclasses_of(cls: type) -> list[type]:
    """Return the classes that name ``cls``, which may be a metaclass, as a base."""
    return list(type.__subclasses__(cls))


def type_in_words(hint: Any) -> str:
    """Return the values that a type allows, in words.

    >>> type_in_words(Literal["a", "b"] | None)
    'a, b or null'
    """
    words: dict[str, None] = {}
    for member in sorted(members(hint), key=lambda member: get_origin(member) is list):
        if member is Tensor and words:  # torch's own way to write a number
            continue
        cls = _class_of(member)
        names = choices(member)
        has_names = any(get_origin(other) is Literal for other in members(hint))
        if cls not in (None, NoneType) and (
            len(names) > MAX_LISTED_CLASSES or (has_names and names)
        ):
            names = [f"a class of {cls.__name__}"]
        if get_origin(member) is list:
            names = [f"a list of {', '.join(names) or type_in_words(get_args(member)[0])}"]
        elif get_origin(member) in MAPPINGS and not names:
            names = ["a mapping of names to texts" if _is_of_texts(member) else "a mapping"]
        words.update(
            dict.fromkeys(
                [TYPE_WORDS[member]]
                if member in TYPE_WORDS
                else names or [getattr(member, "__name__", str(member))]
            )
        )
    *most, last = words
    return f"{', '.join(most)} or {last}" if most else last


def _is_of_texts(mapping: Any) -> bool:
    return get_args(mapping)[1:] == (str,)


def example_of(action: Any) -> str:
    """Return a valid value for a setting: its default, or an example of its type."""
    return _plain_example(action) or next(iter(choices(hint_of(action))), "VALUE")


def _plain_example(action: Any) -> str:
    """Return the default of a setting, or an example of a type that has no choices; empty without
    one."""
    default = getattr(action, "default", None)
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, int | float | str) and default != "==SUPPRESS==":
        return str(default)
    kinds = list(members(hint_of(action)))
    kinds += [
        item for kind in kinds if get_origin(kind) is list for item in members(get_args(kind)[0])
    ]
    return next(filter(None, map(_example_of_type, kinds)), "")


def _example_of_type(kind: Any) -> str:
    if get_origin(kind) not in MAPPINGS:
        return TYPE_EXAMPLES.get(kind, "")
    return """'{NAME: "TEXT"}'""" if _is_of_texts(kind) else "'{NAME: VALUE}'"


def describe(action: Any, constraint: Constraint | None = None) -> Setting:
    """Return what a refusal says about a setting of the parser, or about None for one that is not
    known."""
    hint = hint_of(action)
    return Setting(
        words=None if hint is None else type_in_words(hint),
        example=example_of(action),
        choices=tuple(choices(hint)),
        is_list=is_list(hint),
        is_group=getattr(action, "metavar", None) == "CONFIG",
        has_example=bool(_plain_example(action)),
        takes=tuple(taken(hint)),
        required=bool(getattr(action, "required", False)),
        default_class=_default_class(action),
        constraint=constraint,
    )


def describe_settings(
    parser: ArgumentParser,
    of_classes: Iterable[str] = (),
    groups: Mapping[str, type] = MappingProxyType({}),
) -> Description:
    """Return what a parser takes, with every class that can be named and the settings of each.

    Args:
        parser: the parser.
        of_classes: dotted settings of classes that may be named, to suggest after a typo.
        groups: the class of each group of settings.
    """
    of_groups = {
        f"{group}.{name}": one
        for group, cls in groups.items()
        for name, one in constraints_of(cls).items()
    }
    settings = _described(parser, of_groups)
    bases: dict[str, dict[str, str]] = {}
    classes: dict[str, dict[str, Setting]] = {}
    left = [*map(hint_of, settings_of(parser).values())]
    while left:
        hint = left.pop()
        left += get_args(hint) if get_origin(hint) is list else ()
        for member in members(hint):
            if get_origin(member) is list:
                left.append(get_args(member)[0])
            if is_dataclass(member) and inspect.isclass(member):
                classes[_path_of(member)] = _described(member)
                left += map(hint_of, settings_of(member).values())
            base = _named_base(member)
            if base is None or _path_of(base) in bases:
                continue
            called_with = len(get_args(member)[0]) if get_origin(member) is abc.Callable else 0
            names = bases[_path_of(base)] = {}
            if _is_ours(base):  # its own settings count where no class is named
                classes[_path_of(base)] = _described(base)
            buildable = {
                cls for cls in concrete_classes(base) if base not in _OF_OTHERS or _is_ours(cls)
            }
            for cls in _all_subclasses(base):
                known = cls.__name__ in names or cls not in buildable
                names[cls.__name__] = "" if known else _path_of(cls)
                if cls in buildable:
                    names |= dict.fromkeys(_import_paths(cls), _path_of(cls))
                if cls in buildable and _path_of(cls) not in classes:
                    described = _described(cls, constraints_of(cls))
                    for name in list(described)[:called_with]:
                        described[name] = replace(described[name], takes=(), required=False)
                    classes[_path_of(cls)] = described
                    left += map(hint_of, settings_of(cls).values())
    all_settings = [one for own in (settings, *classes.values()) for one in own.values()]
    sources = {one.constraint.names_from for one in all_settings if one.constraint} - {""}
    names_of = {source: tuple(import_class(source.replace(":", "."))()) for source in sources}
    return Description(settings, tuple(of_classes), bases, classes, names=names_of)


def _described(
    target: ArgumentParser | type, constraints: Mapping[str, Constraint] = MappingProxyType({})
) -> dict[str, Setting]:
    return {
        name: describe(action, constraints.get(name))
        for name, action in settings_of(target).items()
    }


# of their thousands of subclasses only the project's are described; the parser alone knows the
# others
_OF_OTHERS = (LightningModule, LightningDataModule, Dataset, Metric, nn.Module, Tensor)


def _is_ours(cls: type) -> bool:
    return cls.__module__.startswith("fl_lightning.")


def _path_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _import_paths(cls: type) -> Iterator[str]:
    """Yield the dotted names by which a class can be imported from its module and the packages
    around it."""
    parts = cls.__module__.split(".")
    for end in range(len(parts), 0, -1):
        module = ".".join(parts[:end])
        if getattr(sys.modules.get(module), cls.__name__, None) is cls:
            yield f"{module}.{cls.__name__}"


def _all_subclasses(cls: type) -> Iterator[type]:
    yield cls
    for subclass in subclasses_of(cls):
        yield from _all_subclasses(subclass)


def _named_base(member: Any) -> type | None:
    """Return the class whose subclasses may be named for a type that is a class or a callable that
    returns one; None for dataclasses, which are given by their fields."""
    if not (inspect.isclass(member) or get_origin(member) is abc.Callable):
        return None
    cls = _class_of(member)
    return None if cls is None or is_dataclass(cls) or cls.__module__ == "builtins" else cls


def taken(hint: Any) -> Iterator[Any]:
    """Yield what each member of a type takes, as ``early.py`` reads it; ``?`` where only the parser
    knows."""
    for member in members(hint):
        if member in _PLAIN:
            yield _PLAIN[member]
        elif get_origin(member) is Literal:
            yield {"literal": [str(value) for value in get_args(member)]}
        elif get_origin(member) is list:
            yield {"list": list(taken(get_args(member)[0]))}
        elif get_origin(member) in (dict, abc.Mapping, abc.Sequence) or get_args(member)[1:] == (
            ...,
        ):
            yield {"of": list(taken(get_args(member)[get_origin(member) in (dict, abc.Mapping)]))}
        elif (base := _named_base(member)) is not None:
            yield {"class": _path_of(base)}
        elif is_dataclass(member) and inspect.isclass(member):
            yield {"fields": _path_of(member)}
        else:
            yield "?"


_PLAIN: dict[Any, str] = {
    int: "int", float: "float", bool: "bool", str: "str", NoneType: "null", Seed: "seed", Path: "path",
}  # fmt: skip


def _default_class(action: Any) -> str:
    default = getattr(action, "default", None)
    given = default.get("class_path") if isinstance(default, Mapping | Namespace) else None
    cls = import_class(given) if isinstance(given, str) else None
    return _path_of(cls) if inspect.isclass(cls) else ""
