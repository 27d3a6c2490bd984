"""The entries of ``partition.json`` about the clients. A million clients, listed one by one, would
be 100 MB.

With more than 1000 clients the examples of each client are left out. With more than 10 000 clients
their class counts are left out too; the file then has the number of clients by number of examples
and by number of classes. ``left_out`` names what is missing, and the hash covers all of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fl_lightning.data.holdings import Holdings

MAX_LISTED_CLIENTS, MAX_COUNTED_CLIENTS = 1000, 10_000
"""Largest numbers of clients for which the examples, and the class counts, of each one are
written."""


def summarise_clients(holdings: Holdings, label: np.ndarray, num_classes: int) -> dict[str, Any]:
    """Return the summary of all clients, ready for JSON.

    Args:
        holdings: the examples of every client.
        label: class of every example, int64 ``[N]``.
        num_classes: C.
    """
    clients, counts = len(holdings), holdings.class_counts(label, num_classes)
    summary: dict[str, Any]
    if clients <= MAX_COUNTED_CLIENTS:
        summary = {
            "sizes": holdings.sizes.tolist(),
            "classes_per_client": np.concatenate(list(counts)).tolist(),
        }
    else:
        classes = np.concatenate([np.count_nonzero(some, axis=1) for some in counts])
        summary = {
            "clients_by_size": _tally(holdings.sizes),
            "clients_by_number_of_classes": _tally(classes),
        }
    if clients <= MAX_LISTED_CLIENTS:
        halves = map(holdings.client, range(clients))
        summary["clients"] = [
            {"train": train.tolist(), "val": val.tolist()} for train, val in halves
        ]
    else:
        left_out = (
            "clients" if clients <= MAX_COUNTED_CLIENTS else "clients, sizes, classes_per_client"
        )
        summary["left_out"] = f"{left_out} of {clients} clients; sha256 stands for them"
    return summary


def _tally(values: np.ndarray) -> dict[str, int]:
    """Return how often each value occurs."""
    return {
        str(value): int(count)
        for value, count in zip(*np.unique(values, return_counts=True), strict=True)
    }
