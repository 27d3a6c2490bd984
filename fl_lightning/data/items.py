"""Items of a map-style dataset, read once into tensors.

``N`` items. An item is a pair of input and target, or a dictionary with them and with whatever else
is known.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable, Mapping, Sequence, Sized
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import IterableDataset

from fl_lightning.config.near_names import nearest_or_list
from fl_lightning.data.arrays import (
    ArrayData,
    Examples,
    Names,
    check_names,
    class_numbers,
    in_test,
    number_names,
    numbers_by_name,
)
from fl_lightning.data.partition import check_memory
from fl_lightning.data.pixels import is_deep
from fl_lightning.errors import InputError, require
from fl_lightning.rng import torch_stream
from fl_lightning.support.user_code import is_bug_of_user

log = logging.getLogger("fl_lightning")

Key = int | str

CHANNELS = (1, 3, 4)
"""Numbers of channels by which it is known where an image has them."""


@dataclass(frozen=True)
class Keys:
    """Where the parts of an item are: positions in a tuple, or names in a dictionary.

    Args:
        input: the input; a list of names makes a dictionary of inputs. None: position 0, or all
            names of a dictionary that are nothing else.
        target: the target; None: position 1.
        group: what partitions deal the items out by; None: the class.
        client: whose an item is; None: the items say nothing of it.
    """

    input: Key | Sequence[str] | None = None
    target: Key | None = None
    group: Key | None = None
    client: Key | None = None


@dataclass(frozen=True)
class Items:
    """The items of one dataset.

    Args:
        place: name of the dataset, for messages.
        inputs: a tensor ``[N, ...]`` or a dictionary of tensors.
        target: as the items have it, one for each.
        group: name of each item's group; None: there are none.
        client: name of each item's client; None: there are none.
    """

    place: str
    inputs: Any
    target: list[Any]
    group: list[Any] | None = None
    client: list[Any] | None = None

    def part(self, chosen: np.ndarray) -> Items:
        """Return the items that are marked, bool ``[N]``."""
        where = np.flatnonzero(chosen).tolist()
        index = torch.tensor(where, dtype=torch.int64)

        def some(values: list[Any] | None) -> list[Any] | None:
            return None if values is None else [values[position] for position in where]

        return replace(
            self,
            inputs=tree_map(lambda leaf: leaf[index], self.inputs),
            target=[self.target[position] for position in where],
            group=some(self.group),
            client=some(self.client),
        )


def reading(split: str) -> AbstractContextManager[None]:
    """Seed what a dataset draws from global generators while its items are read: the same random
    numbers in every run, and other ones in each split."""
    return torch_stream(0, "data/read" if split == "train" else f"data/read/{split}")


def read_items(dataset: Any, keys: Keys, place: str, split: str) -> Items:
    """Read all items of a dataset into memory, with the random numbers of :func:`reading`.

    Args:
        dataset: a map-style dataset.
        keys: where the parts of an item are.
        place: its name, for messages.
        split: ``train`` or ``test``.

    Raises:
        InputError: it is not map-style, has no items, or they have not all the same form and shape.
    """
    count = count_items(dataset, place)
    _check_pairs(dataset, count, place)
    inputs: Any = None
    known: dict[str, list[Any]] = {"target": [], "group": [], "client": []}
    with reading(split):
        for number in range(count):
            where = f"{place}, item {number}"
            item = item_at(dataset, number, where)
            parts = _parts(item, keys, where)
            if number == 0:
                _warn_of_unread(item, keys, place)
            given = parts.pop("input")  # no tree_map here: it would take a list of numbers apart
            leaves = (
                {str(key): _tensor(value, where) for key, value in given.items()}
                if isinstance(given, Mapping)
                else _tensor(given, where)
            )
            if inputs is None:
                size = sum(leaf.nbytes for leaf in tree_leaves(leaves))
                check_memory(f"{place} with {count} items", size * count)
                inputs = tree_map(
                    lambda leaf: torch.empty(count, *leaf.shape, dtype=leaf.dtype), leaves
                )
            if isinstance(inputs, dict) and isinstance(leaves, dict) and {*inputs} == {*leaves}:
                leaves = {key: leaves[key] for key in inputs}
            _put(inputs, number, leaves, where)
            for name, value in parts.items():
                known[name].append(value)
    for leaf in filter(torch.is_floating_point, tree_leaves(inputs)):
        bad = ~leaf.isfinite().reshape(count, -1).all(1)
        require(
            not bad.any(),
            f"{place}, item {int(bad.long().argmax())}",
            "its input has values that are not finite",
            "correct it or leave it out",
        )
    return Items(
        place,
        inputs,
        known["target"],
        known["group"] if keys.group is not None else None,
        known["client"] if keys.client is not None else None,
    )


def _check_pairs(dataset: Any, count: int, place: str) -> None:
    """Refuse a dataset of torchvision whose files have another number of labels than of images: it
    pairs them from the beginning, and looks at no rest."""
    if type(dataset).__module__.startswith("torchvision."):
        images, labels = (getattr(dataset, name, None) for name in ("data", "targets"))
        if isinstance(images, Sized) and isinstance(labels, Sized) and len(images) == count:
            require(
                len(labels) == count,
                place,
                f"its files have {count} images and {len(labels)} labels",
                "delete them and get them again",
            )


def to_examples(
    data: ArrayData, train: Items, test: Items | None
) -> tuple[Examples, Examples, Names]:
    """Return the examples of both splits, and the names of classes, groups and clients in sorted
    order.

    Args:
        data: whose they are; its task says whether targets are classes.
        train: the training items, of which ``test_fraction`` is for the test if there are no test
            items.
        test: the test items; None: there are none.

    Raises:
        InputError: a target is not that of the task, a class of the test is unknown, or two
            classes, clients or groups are written alike.
    """
    classifies, form = data.task.has_classes, data.run_form
    if classifies:
        train = replace(train, target=_class_names(train))
    if test is None:
        labels = (
            np.array([str(name) for name in train.target])
            if classifies
            else np.zeros(len(train.target))
        )
        chosen = in_test(labels, data.test_fraction, form)
        train, test = train.part(~chosen), train.part(chosen)
    elif classifies:
        test = replace(test, target=_class_names(test))
    _check_same_form(train, test)
    if classifies:
        check_names([*train.target, *test.target], "class", train.place)
        classes = class_numbers(train.target, form, train.place)
        unknown = [name for name in test.target if name not in classes]
        require(
            not unknown,
            f"{test.place}",
            f"its class {unknown[:1]} is not among the training items",
            "leave it out, or give training items of that class",
        )
        targets = [torch.tensor([classes[name] for name in some.target]) for some in (train, test)]
    else:
        classes, targets = {}, [_numbers(some) for some in (train, test)]
    for name in ("client", "group"):
        check_names(
            [*(getattr(train, name) or []), *(getattr(test, name) or [])], name, train.place
        )
    groups = number_names([*(train.group or []), *(test.group or [])])
    clients = number_names(train.client or [])
    first, second = (
        Examples(
            some.inputs,
            target,
            numbers_by_name(some.group, groups),
            numbers_by_name(some.client, clients),
        )
        for some, target in zip((train, test), targets, strict=True)
    )
    return first, second, Names(list(classes), list(groups), list(clients))


def item_at(dataset: Any, number: int, where: str) -> Any:
    """Return an item of a dataset.

    A bug in the dataset's own code keeps its type, and ``failed_at`` of the exception says at which
    item.

    Args:
        dataset: a map-style dataset.
        number: position of the item.
        where: name of the dataset and the item, for messages.

    Raises:
        InputError: a library cannot read it, or the dataset's code refuses it with a ``raise``.
    """
    try:
        return dataset[number]
    except InputError:
        raise
    except Exception as error:
        # a file that is missing is no bug
        if is_bug_of_user(error) and not isinstance(error, OSError):
            error.failed_at = where  # type: ignore[attr-defined]
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(
            where, f"it cannot be read ({reason})", "correct it or leave it out"
        ) from error


def count_items(dataset: Any, place: str) -> int:
    """Return the number of items.

    Raises:
        InputError: the dataset is not map-style or has none.
    """
    map_style = hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset)
    try:
        count = len(dataset) if map_style else None
    except (TypeError, NotImplementedError):
        count = None
    if count is None:
        raise InputError(
            place,
            f"{type(dataset).__name__} has no length or no items by position",
            "give a map-style torch.utils.data.Dataset, with __len__ and __getitem__",
        )
    require(count, place, "it has no items", "give some")
    return count


def _positions(keys: Keys) -> dict[str, Any]:
    """Return the positions in a tuple of what is read of it."""
    return {
        "input": 0 if keys.input is None else keys.input,
        "target": 1 if keys.target is None else keys.target,
        "group": keys.group,
        "client": keys.client,
    }


def _warn_of_unread(item: Any, keys: Keys, place: str) -> None:
    """Say which positions of items that are tuples nobody reads."""
    if isinstance(item, Mapping):
        return
    read = [*_positions(keys).values()]
    if unread := [str(at) for at in range(len(item)) if at not in read]:
        log.warning(
            "%s: items are tuples of %d, and what is at position %s is left out; a batch is "
            "(input, target), and an input may be a dictionary of tensors",
            place,
            len(item),
            ", ".join(unread),
        )


def _parts(item: Any, keys: Keys, where: str) -> dict[str, Any]:
    """Return the input, target, group and client of an item, those that there are."""
    if isinstance(item, Mapping):
        return _parts_of_dictionary(item, keys, where)
    if not (isinstance(item, (tuple, list)) and len(item) >= 2):
        raise InputError(
            where,
            f"an item is (input, target) or a dictionary, and this is a {type(item).__name__}",
            "return both from __getitem__",
        )
    found = {}
    for name, place in _positions(keys).items():
        if place is None:
            continue
        if not (isinstance(place, int) and 0 <= place < len(item)):
            raise InputError(
                f"{name}={place}",
                f"{where} is a tuple of {len(item)}",
                f"write a position from 0 to {len(item) - 1}",
            )
        found[name] = item[place]
    names = {
        name: checked_name(found[name], name, where)
        for name in ("group", "client")
        if name in found
    }
    return found | names


def _parts_of_dictionary(item: Mapping[Any, Any], keys: Keys, where: str) -> dict[str, Any]:
    named = {"target": keys.target, "group": keys.group, "client": keys.client}
    found: dict[str, Any] = {}
    require(
        keys.target is not None,
        where,
        f"it is a dictionary with {', '.join(map(str, item))}, and nothing says which is the target",
        "write target: NAME",
    )
    for name, key in named.items():
        if key is not None:
            _require_key(key, item, name, where)
            found[name] = item[key] if name == "target" else checked_name(item[key], name, where)
    if isinstance(keys.input, (int, str)):
        wanted: list[Any] = [keys.input]
    else:
        wanted = (
            [key for key in item if key not in named.values()]
            if keys.input is None
            else [*keys.input]
        )
    for key in wanted:
        _require_key(key, item, "input", where)
    require(wanted, where, "it has nothing beside the target", "give it an input")
    single = len(wanted) == 1 and not isinstance(keys.input, list)
    return found | {"input": item[wanted[0]] if single else {key: item[key] for key in wanted}}


def _require_key(key: Any, item: Mapping[Any, Any], name: str, where: str) -> None:
    if key not in item:
        instead = f"write {nearest_or_list(key, item)}"
        raise InputError(f"{name}={key}", f"{where} has no such name", instead)


def checked_name(value: Any, name: str, where: str) -> Any:
    """Return whose an item is, or its group.

    Args:
        value: what the item says.
        name: ``client`` or ``group``.
        where: name of the dataset and the item, for messages.

    Raises:
        InputError: it is no number or text.
    """
    found = plain(value)
    require(
        _is_name(found),
        f"{where}, {name} {found}",
        f"a {name} is a number or a text, and none is missing",
        "say whose it is, or leave the item out"
        if name == "client"
        else "give it one, or leave it out",
    )
    return found


def _is_name(value: Any) -> bool:
    """Return whether a value, or each of a tuple's, can be told from others."""
    if isinstance(value, tuple):
        return all(map(_is_name, value))
    single = isinstance(value, Hashable) and not isinstance(value, Tensor)
    return single and value is not None and bool(value == value)


def plain(value: Any) -> Any:
    """Return a number or a text, of a tensor of one value its value."""
    single = isinstance(value, (Tensor, np.ndarray, np.generic)) and math.prod(value.shape) == 1
    return value.item() if single else value


def _tensor(value: Any, where: str) -> Tensor:
    """Return an input as a tensor: images as uint8 ``[3, H, W]``, real numbers as float32, others
    int64."""
    if hasattr(value, "convert") and hasattr(value, "getbands"):  # an image of PIL
        rule = f"an image in mode {value.mode} has more than 8 bits a channel"
        require(
            not is_deep(value),
            where,
            rule,
            "give the dataset a transform that makes tensors of them",
        )
        return torch.from_numpy(np.array(value.convert("RGB"))).permute(2, 0, 1)
    try:
        found = (
            value.detach().cpu().to_dense()
            if isinstance(value, Tensor)
            else torch.as_tensor(np.array(value))
        )
    except (TypeError, ValueError):
        raise InputError(
            where,
            f"an input is a tensor, an array, an image or numbers, and this is a {type(value).__name__}",
            "write tokens in place of text, see TextFiles; or give the dataset a transform",
        ) from None
    require(
        not found.is_complex(), where, "an input is of real numbers", "give the dataset a transform"
    )
    if found.is_floating_point() or found.dtype == torch.bool:
        return found.float()
    if found.dtype != torch.uint8 or found.ndim != 3:
        return found.long()
    require(
        found.shape[0] in CHANNELS or found.shape[-1] not in CHANNELS,
        f"{where}, input uint8 {list(found.shape)}",
        "an image of bytes is [C, H, W]",
        "give the dataset a transform that puts channels first, such as .permute(2, 0, 1)",
    )
    return found


def _put(inputs: Any, number: int, leaves: Any, where: str) -> None:
    """Write an item's input into its row."""
    into, values = tree_leaves(inputs), tree_leaves(leaves)
    same = len(into) == len(values) and (
        not isinstance(inputs, dict) or list(inputs) == list(leaves)
    )
    require(same, where, "it has other parts than the first item", "give all items the same")
    for row, value in zip(into, values, strict=True):
        require(
            row.shape[1:] == value.shape and row.dtype == value.dtype,
            f"{where}, input {value.dtype} {list(value.shape)}",
            f"the first item's is {row.dtype} {list(row.shape[1:])}",
            "give the dataset a transform, such as torchvision.transforms.Resize, that makes all alike",
        )
        row[number] = value


def _class_names(items: Items) -> list[Any]:
    """Return the class of each item: a whole number or a text."""
    found = [plain(value) for value in items.target]
    for number, value in enumerate(found):
        whole = isinstance(value, (str, bool, int)) or (
            isinstance(value, float) and value.is_integer()
        )
        require(
            whole,
            f"{items.place}, item {number}",
            f"a class is a whole number or a text, and this is a {type(value).__name__}",
            "write task: regression, name another target, or give a Task of yours to a FederatedData",
        )
    return found


def _numbers(items: Items) -> Tensor:
    """Return the targets of a regression, float32 ``[N]`` or ``[N, D]``."""
    rows: list[np.ndarray] = []
    if not items.target:
        return torch.empty(0)
    for number, value in enumerate(items.target):
        known = value.detach().cpu() if isinstance(value, Tensor) else value
        try:
            row = np.asarray(known, dtype=np.float32)
        except (TypeError, ValueError, OverflowError):
            row = np.array(math.nan, np.float32)
        require(
            row.ndim <= 1
            and row.size
            and np.isfinite(row).all()
            and row.shape == (rows[0].shape if rows else row.shape),
            f"{items.place}, item {number}",
            "its target is not one or several finite numbers, as many as the first item's",
            "correct it, or name another target",
        )
        rows.append(row)
    return torch.from_numpy(np.stack(rows))


def _check_same_form(train: Items, test: Items) -> None:
    forms = [
        tree_map(lambda leaf: (leaf.dtype, tuple(leaf.shape[1:])), some.inputs)
        for some in (train, test)
    ]
    require(
        forms[0] == forms[1],
        f"{test.place}",
        f"its inputs are {_form(test)}, and the training items' are {_form(train)}",
        "give both the same transform",
    )


def _form(items: Items) -> str:
    parts = items.inputs if isinstance(items.inputs, dict) else {"": items.inputs}
    return ", ".join(
        f"{name} {leaf.dtype} {list(leaf.shape[1:])}".strip() for name, leaf in parts.items()
    )
