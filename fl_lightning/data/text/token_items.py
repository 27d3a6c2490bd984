"""Items of a map-style dataset that are token ids already, and files of such items.

``L`` tokens of an item, ``T`` positions that the network sees (the context).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from fl_lightning.config.near_names import nearest_or_list
from fl_lightning.data.items import Key, checked_name, count_items, item_at, reading
from fl_lightning.data.partition import check_memory
from fl_lightning.data.text.records import JSON_SUFFIXES, json_records, read_text
from fl_lightning.data.text.tokens import Sequences, TooLong
from fl_lightning.errors import InputError, require
from fl_lightning.metrics.text import IGNORED

IDS, LABELS, LOSS_MASK, TEXT_MASK = "input_ids", "labels", "loss_mask", "attention_mask"
"""The names of an item's parts; all but the first may be missing."""
PARTS = (IDS, LABELS, LOSS_MASK, TEXT_MASK)


class TokenItem(NamedTuple):
    """One sequence without padding.

    Args:
        ids: int64 ``[L]``.
        labelled: whether each token is to be learnt, bool ``[L]``; the first token never is.
        client: whose it is; None: the item does not say.
        group: its group; None: the item does not say.
        place: name of the dataset that it is of, for messages.
        number: its number in this dataset; None: the place is that of the item.
    """

    ids: np.ndarray
    labelled: np.ndarray
    client: Any
    group: Any
    place: str
    number: int | None = None

    @property
    def where(self) -> str:
        """The name of the item in messages."""
        return self.place if self.number is None else f"{self.place}, item {self.number}"


class TokenFile(Dataset):
    """Token ids of a file: a JSON object on each line, a Parquet file, or a folder of
    ``save_to_disk`` of Hugging Face ``datasets``.

    An item has ``input_ids``, and perhaps ``labels`` or ``loss_mask``, ``attention_mask`` and other
    values.

    Args:
        path: the ``.jsonl`` or ``.parquet`` file, or the folder; of a folder with several splits
            the folder of one of them, such as ``tokens/train``.

    Raises:
        InputError: it cannot be read.
    """

    def __init__(self, path: str) -> None:
        file = Path(path)
        if file.is_file() and file.suffix in JSON_SUFFIXES:
            self.rows: Any = [entry for entry, _ in json_records(file, read_text(file))]
            return
        require(
            file.exists(),
            f"{path}",
            "there is no such file or folder",
            "write a .jsonl file, a .parquet file, or a folder of save_to_disk",
        )
        from fl_lightning.data.hugging_face import load

        found = load(path, None)
        if file.is_file():  # the library names the rows of a single file "train"
            found = found["train"]
        if isinstance(found, dict):
            raise InputError(
                f"{path}",
                f"it has the splits {', '.join(found)}",
                f"write {file / next(iter(found))}",
            )
        self.rows = found

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]


def read_token_items(
    dataset: Any, place: str, split: str, vocab_size: int, client: Key | None, group: Key | None
) -> list[TokenItem]:
    """Read all items of a dataset: ids, ``(ids, labels)`` or a dictionary of :data:`PARTS` and
    others.

    Labels are those of transformers: as long as the ids, each the token itself or -100 where it is
    not learnt. Instead a loss mask says 1 or 0 of each token; with neither, all tokens are learnt.
    Where the attention mask is 0, on either side, there is padding, which is left out. Random
    numbers are those of :func:`~fl_lightning.data.items.reading`.

    Args:
        dataset: a map-style dataset.
        place: its name, for messages.
        split: ``train``, ``val`` or ``test``.
        vocab_size: number of tokens; all ids are below it.
        client: name or position of whose an item is; None: items do not say.
        group: name or position of an item's group; None: items do not say.

    Raises:
        InputError: an item cannot be read or is no sequence of tokens.
    """
    with reading(split):
        return [
            TokenItem(
                *_token_item(item_at(dataset, number, where), where, vocab_size, client, group),
                place,
                number,
            )
            for number in range(count_items(dataset, place))
            for where in (f"{place}, item {number}",)
        ]


def _token_item(
    item: Any, where: str, vocab_size: int, client: Key | None, group: Key | None
) -> tuple[np.ndarray, np.ndarray, Any, Any]:
    """Return the ids of an item, which of them are learnt, and its client and group."""
    parts = _parts(item, where)
    ids = _whole_numbers(parts[IDS], IDS, where)
    outside = (ids < 0) | (ids >= vocab_size)
    require(
        not outside.any(),
        f"{where}, token {ids[outside][:1].tolist()}",
        f"ids are 0 to {vocab_size - 1} with a vocabulary of {vocab_size} tokens",
        "write the vocab_size or the tokenizer that the ids are of",
    )
    labelled = _labelled(parts, ids, where)
    if TEXT_MASK in parts:
        text = _mask(parts[TEXT_MASK], TEXT_MASK, len(ids), where)
        present = np.flatnonzero(text)
        require(len(present), where, f"its {TEXT_MASK} is 0 everywhere", "leave it out")
        first, last = int(present[0]), int(present[-1]) + 1
        require(
            text[first:last].all(),
            where,
            f"its {TEXT_MASK} has a 0 between ones",
            "padding stands at one end of a sequence",
        )
        ids, labelled = ids[first:last], labelled[first:last].copy()
    require(
        labelled[1:].any(),
        f"{where} of {len(ids)} tokens",
        "none of its tokens after the first is to be learnt",
        "label some (the labels are the token ids, -100 where nothing is learnt), or leave it out",
    )
    labelled[0] = False  # nothing stands before it, from which it could be predicted
    owner, kind = (
        None if key is None else checked_name(_value(item, key, where), name, where)
        for name, key in (("client", client), ("group", group))
    )
    return ids, labelled, owner, kind


def _parts(item: Any, where: str) -> Mapping[str, Any]:
    """Return the parts of an item by their names."""
    if isinstance(item, Mapping):
        require(IDS in item, where, f"it has no {IDS}", f"write {nearest_or_list(IDS, item)}")
        require(
            LABELS not in item or LOSS_MASK not in item,
            where,
            f"it has {LABELS} and a {LOSS_MASK}",
            "give one of them",
        )
        return {name: item[name] for name in PARTS if name in item}
    if isinstance(item, tuple) and item and _array(item[0]).ndim == 1:
        return dict(zip((IDS, LABELS), item, strict=False))
    return {IDS: item}


def _value(item: Any, key: Key, where: str) -> Any:
    """Return what an item says of its client or its group."""
    if isinstance(item, Mapping):
        names = [name for name in item if name not in PARTS]
        require(
            key in item,
            f"{key}",
            f"{where} has no such name",
            f"write {nearest_or_list(key, names or item)}",
        )
    else:
        there = isinstance(item, tuple) and isinstance(key, int) and 0 <= key < len(item)
        require(there, f"{key}", f"{where} has no such position", "write the position in the tuple")
    return item[key]


def _array(values: Any) -> np.ndarray:
    """Return values as an array; of what is none, such as lists of several lengths, an empty
    one."""
    try:
        return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    except (TypeError, ValueError):
        return np.empty((0, 0))


def _whole_numbers(values: Any, name: str, where: str) -> np.ndarray:
    """Return a row of whole numbers, int64 ``[L]``."""
    found = _array(values)
    is_row = found.ndim == 1 and (found.dtype.kind in "iu" or not len(found))
    require(
        is_row,
        where,
        f"its {name} are no row of whole numbers",
        "give the ids of one sequence, such as [256, 72, 105, 257]; of text, see TextFiles",
    )
    require(len(found), where, f"its {name} are empty", "leave it out")
    return found.astype(np.int64)


def _labelled(parts: Mapping[str, Any], ids: np.ndarray, where: str) -> np.ndarray:
    """Return which tokens are to be learnt, bool ``[L]``."""
    if LOSS_MASK in parts:
        return _mask(parts[LOSS_MASK], LOSS_MASK, len(ids), where).copy()
    if LABELS not in parts:
        return np.ones(len(ids), bool)
    labels = _whole_numbers(parts[LABELS], LABELS, where)
    _check_length(labels, LABELS, len(ids), where)
    labelled = labels != IGNORED
    wrong = np.flatnonzero(labelled & (labels != ids))
    if TEXT_MASK in parts:  # padding may have any label
        wrong = wrong[_mask(parts[TEXT_MASK], TEXT_MASK, len(ids), where)[wrong]]
    label, token = labels[wrong[:1]].tolist(), ids[wrong[:1]].tolist()
    require(
        not len(wrong),
        f"{where}, label {label} of the token {token} at {wrong[:1].tolist()}",
        "a label is the token at its own place, or -100; the shift by one is made here",
        "give labels as transformers has them, or a loss_mask of 0 and 1",
    )
    return labelled


def _mask(values: Any, name: str, length: int, where: str) -> np.ndarray:
    found = _array(values)
    _check_length(found, name, length, where)
    require(
        np.isin(found, (0, 1)).all(),
        where,
        f"its {name} has values other than 0 and 1",
        "write 0 or 1",
    )
    return found.astype(bool)


def _check_length(values: np.ndarray, name: str, length: int, where: str) -> None:
    require(
        values.shape == (length,),
        f"{where}, {name} {list(values.shape)}",
        f"it has one for each of the {length} tokens",
        "give both the same length",
    )


def token_sequences(
    items: Sequence[TokenItem], pad: int, context: int, too_long: TooLong
) -> Sequences:
    """Return items as sequences. The last token is only a target, so L tokens take L - 1 positions.

    Args:
        items: the items.
        pad: id of the padding.
        context: T, the largest number of positions.
        too_long: what is done with an item of more positions. refuse: an error; cut: its end is
            left out, and ``Sequences.cut`` counts it.

    Raises:
        InputError: an item is too long, or of one that is cut nothing is left to learn.
    """
    check_memory(f"{len(items)} items of context={context}", 16 * len(items) * context)
    input_ids = torch.full((len(items), context), pad, dtype=torch.int64)
    target = torch.full((len(items), context), IGNORED, dtype=torch.int64)
    length = torch.zeros(len(items), dtype=torch.int64)
    cut = 0
    for number, item in enumerate(items):
        ids, labelled = item.ids, item.labelled
        count = min(len(ids) - 1, context)
        if count < len(ids) - 1:
            given = f"{item.where} of {len(ids)} tokens"
            require(
                too_long == "cut",
                given,
                f"it takes {len(ids) - 1} positions of a context of {context}",
                f"write context: {len(ids) - 1}, or too_long: cut",
            )
            rule = f"none of its first {context + 1} tokens is to be learnt"
            require(
                labelled[: count + 1].any(), given, rule, "write a larger context, or leave it out"
            )
            cut += 1
        input_ids[number, :count] = torch.from_numpy(ids[:count])
        learnt = np.where(labelled, ids, IGNORED)[1 : count + 1]
        target[number, :count], length[number] = torch.from_numpy(learnt), count
    return Sequences(input_ids, target, length, cut)
