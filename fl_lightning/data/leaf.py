"""JSON files in the form of LEAF (Caldas et al. 2018, arXiv 1812.01097), in which FEMNIST is
published.

``N`` examples, ``D`` numbers of an example.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch

from fl_lightning.config.constraints import path_to
from fl_lightning.data.arrays import ArrayData, Examples, Names, name_from
from fl_lightning.data.items import Items, to_examples
from fl_lightning.data.json_text import read_json
from fl_lightning.data.partition import check_memory
from fl_lightning.errors import InputError, require

EXPECTED = (
    'write {"users": ["a"], "num_samples": [1], "user_data": {"a": {"x": [[0.5]], "y": [1]}}}'
)

LEAF = path_to(
    "any", "there is no such file", "write a .json file in LEAF's form, or a folder of them"
)


class LeafData(ArrayData):
    """Users' examples from LEAF's JSON, each user a client.

    A file is ``{"users": [...], "num_samples": [...], "user_data": {user: {"x": [...], "y":
    [...]}}}``, and a folder has such files for different users. An ``x`` is a list of numbers,
    which may be nested.

    Args:
        train: a file, or a folder whose ``.json`` files are read in the order of their names.
        test: a file or folder of the test examples; null: ``test_fraction`` of ``train``.
        images: whether an ``x`` holds the grey levels of a square, as in FEMNIST; the network then
            sees three equal channels, ``[3, side, side]``.
        settings: those of all data in memory, see :class:`~fl_lightning.data.arrays.ArrayData`.
    """

    examplewise = True
    natural = True

    def __init__(
        self,
        train: Annotated[str, LEAF],
        test: Annotated[str | None, LEAF] = None,
        images: bool = False,
        **settings: Any,
    ) -> None:
        self.dataset, self.has_test = name_from(train), test is not None
        super().__init__(**settings)
        self.train_path, self.test_path = Path(train), Path(test) if test else None
        self.images = images

    def prepare_data(self) -> None:
        """Check that the files are there.

        Raises:
            InputError: a file is missing, or a folder has none.
        """
        for path in filter(None, (self.train_path, self.test_path)):
            leaf_files(path)

    def read(self) -> tuple[Examples, Examples, Names]:
        """Read the files.

        Raises:
            InputError: a file cannot be read or has another form.
        """
        train = read_leaf(self.train_path, images=self.images)
        test = read_leaf(self.test_path, images=self.images) if self.test_path else None
        return to_examples(self, train, test)


def leaf_files(path: Path) -> list[Path]:
    """Return a file, or the ``.json`` files of a folder in the order of their names.

    Raises:
        InputError: there is none.
    """
    LEAF.check(path)
    found = sorted(path.glob("*.json")) if path.is_dir() else [path]
    LEAF.require(found, path, "this folder has no .json files")
    return found


def read_leaf(path: Path, *, images: bool) -> Items:
    """Return the examples of all users of a file or folder, one user after another.

    Raises:
        InputError: a file cannot be read, has another form, or a user is in two files.
    """
    files = leaf_files(path)
    check_memory(f"{path}", sum(file.stat().st_size for file in files))
    inputs: list[np.ndarray] = []
    target: list[Any] = []
    client: list[str] = []
    seen: dict[str, Path] = {}
    for file in files:
        for user, x, y in _users(file):
            require(
                user not in seen,
                f"{file}, user {user}",
                f"the user is in {seen.get(user)} too",
                "join the two",
            )
            seen[user] = file
            if not y:
                continue
            rows = _rows(x, f"{file}, user {user}")
            rows = _as_images(rows, f"{file}, user {user}") if images else rows
            first = inputs[0].shape[1:] if inputs else rows.shape[1:]
            require(
                rows.shape[1:] == first,
                f"{file}, user {user}",
                f"its x are of shape {list(rows.shape[1:])}, and the first user's of {list(first)}",
                "give all the same shape",
            )
            inputs.append(rows)
            target += y
            client += [user] * len(y)
    require(target, f"{path}", "it has no examples", "give some")
    return Items(f"{path}", torch.from_numpy(np.concatenate(inputs)), target, client=client)


def _users(file: Path) -> list[tuple[str, list[Any], list[Any]]]:
    """Return name, inputs and targets of each user of a file."""
    content = read_json(file, EXPECTED)
    form = isinstance(content, dict) and isinstance(content.get("users"), list)
    form = form and isinstance(content.get("user_data"), dict)
    require(form, f"{file}", "it is not in LEAF's form", EXPECTED)
    users, data = content["users"], content["user_data"]
    sizes = content.get("num_samples", [None] * len(users))
    require(
        isinstance(sizes, list) and len(sizes) == len(users),
        f"{file}",
        f"num_samples has not one number for each of {len(users)} users",
        "correct it, or leave it out",
    )
    found = []
    for user, size in zip(users, sizes, strict=True):
        place = f"{file}, user {user}"
        entry = data.get(user) if isinstance(user, str) else None
        x, y = (entry.get("x"), entry.get("y")) if isinstance(entry, dict) else (None, None)
        if not (isinstance(x, list) and isinstance(y, list)):
            raise InputError(place, "user_data has no lists x and y of it", EXPECTED)
        require(
            len(x) == len(y), place, f"it has {len(x)} x and {len(y)} y", "give one y for each x"
        )
        require(
            size is None or size == len(y),
            place,
            f"num_samples says {size} and it has {len(y)} examples",
            "correct it, or leave num_samples out",
        )
        found.append((user, x, y))
    left_out = sorted(set(data) - set(map(str, users)))
    require(
        not left_out,
        f"{file}",
        f"the list users lacks {', '.join(left_out[:3])}, and user_data has {len(left_out)} such",
        "name all of them in users",
    )
    return found


def _rows(x: list[Any], place: str) -> np.ndarray:
    """Return a user's inputs, float32 ``[n, ...]``."""
    if any(isinstance(value, str) for value in x):
        raise InputError(place, "its x are texts", "see TextFiles for text, and write JSON lines")
    try:
        rows = np.array(x, dtype=np.float32)
    except (TypeError, ValueError, OverflowError):
        raise InputError(
            place, "its x are not lists of numbers, all of one length", "correct them"
        ) from None
    require(
        rows.ndim >= 2,
        place,
        "an x is a list of numbers, and these are single numbers",
        "write [[0.5]]",
    )
    bad = ~np.isfinite(rows).reshape(len(rows), -1).all(axis=1)
    require(
        not bad.any(),
        f"{place}, example {int(bad.argmax())}",
        "its x is not finite",
        "correct or remove it",
    )
    return rows


def _as_images(rows: np.ndarray, place: str) -> np.ndarray:
    """Return grey levels as float32 ``[n, 3, side, side]``."""
    count = rows[0].size
    side = math.isqrt(count)
    require(
        side * side == count,
        f"{place}, images: true",
        f"an x has {count} numbers, which are no square",
        "write images: false",
    )
    return rows.reshape(len(rows), 1, side, side).repeat(3, axis=1)
