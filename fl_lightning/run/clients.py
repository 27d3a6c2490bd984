"""``clients.csv``: the metrics of each client on its own validation examples, in the round that
validation chose and at the last evaluation."""

from __future__ import annotations

import csv
import io
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fl_lightning.data import FederatedData
from fl_lightning.data.summary import MAX_COUNTED_CLIENTS

log = logging.getLogger("fl_lightning")

FILE = "clients.csv"
ABOUT = ("round", "client", "group", "train_examples", "val_examples")
"""The columns before the metrics."""

ClientValues = Mapping[str, Mapping[int, float]]
"""Metrics of each client in one round, by name and by the client's id."""


def keep(
    kept: Mapping[int, ClientValues], round: int, values: ClientValues, best_round: int
) -> dict[int, ClientValues]:
    """Return what a run keeps after one more round, by round: the best one and the last that was
    evaluated.

    Args:
        kept: what it kept before.
        round: the round that is done.
        values: what was measured in it; empty where it was not evaluated.
        best_round: the round that validation has chosen so far.
    """
    if not values:
        return dict(kept)
    if max(map(len, values.values())) > MAX_COUNTED_CLIENTS:
        return {}
    return {best: found for best, found in kept.items() if best == best_round} | {round: values}


def clients_csv(data: FederatedData, kept: Mapping[int, ClientValues]) -> str:
    """Return the text of ``clients.csv``: one row for each kept round and validated client.

    ``group`` is the group of more than half of the client's examples; it is empty where there is no
    such group, and where the data have no groups but classes. The text is empty where nothing was
    kept.
    """
    if not kept:
        if len(data.validating) > MAX_COUNTED_CLIENTS:
            many = len(data.validating)
            log.info(
                "%s is not written: it lists up to %d clients, of %d",
                FILE,
                MAX_COUNTED_CLIENTS,
                many,
            )
        return ""
    groups, text = _groups(data), io.StringIO()
    metrics = list(dict.fromkeys(name for values in kept.values() for name in values))
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*ABOUT, *metrics])
    for round, values in sorted(kept.items()):
        for id in sorted(set().union(*values.values())):
            sizes = int(data.sizes[id]), int(data.val_sizes[id])
            found = (values.get(name, {}).get(id, "") for name in metrics)
            writer.writerow([round, id, groups[id], *sizes, *found])
    return text.getvalue()


def _groups(data: FederatedData) -> Sequence[str]:
    names = data.group_names
    if not names:
        return [""] * data.num_clients
    counts = data.group_counts()
    most = counts.argmax(1)
    has_one = 2 * counts.max(1) > counts.sum(1)
    return [
        str(names[group]) if one else "" for group, one in zip(most.tolist(), has_one, strict=True)
    ]


def from_json(kept: Mapping[str, Mapping[str, Mapping[str, float]]]) -> dict[int, ClientValues]:
    """Return what :func:`keep` gave from its JSON, whose keys are texts."""
    return {
        int(round): {
            name: {int(id): value for id, value in of.items()} for name, of in values.items()
        }
        for round, values in kept.items()
    }


def is_json_of(kept: Any) -> bool:
    """Return whether a value of JSON has the form that :func:`from_json` reads."""
    if not (_is_numbered(kept) and all(isinstance(values, dict) for values in kept.values())):
        return False
    metrics = [of for values in kept.values() for of in values.values()]
    return all(
        _is_numbered(of) and all(isinstance(value, float) for value in of.values())
        for of in metrics
    )


def _is_numbered(mapping: Any) -> bool:
    """Return whether a value is a mapping whose keys are whole numbers."""
    return isinstance(mapping, dict) and all(key.isdecimal() and len(key) < 19 for key in mapping)
