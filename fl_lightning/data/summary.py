"""What ``partition.json`` says of the clients. A million of them, one by one, would be 100 MB.

With more than 1000 clients their examples are left out, with more than 10 000 also how many of which class
each one holds: there are then numbers of clients by number of examples, and by number of classes.
``left_out`` says so, and the hash stands for all of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fl_lightning.data.holdings import Holdings

LISTED, COUNTED = 1000, 10_000
"""Most clients whose examples, and whose numbers of examples, are written."""


def summarise(holdings: Holdings, label: np.ndarray, num_classes: int) -> dict[str, Any]:
    """As above, ready for JSON; ``label`` ``[N]`` of every example."""
    clients, counts = len(holdings), holdings.class_counts(label, num_classes)
    summary: dict[str, Any]
    if clients <= COUNTED:
        summary = {
            "sizes": holdings.sizes.tolist(),
            "classes_per_client": np.concatenate(list(counts)).tolist(),
        }
    else:
        classes = np.concatenate([np.count_nonzero(some, axis=1) for some in counts])
        summary = {"clients_by_size": _tally(holdings.sizes), "clients_by_number_of_classes": _tally(classes)}
    if clients <= LISTED:
        halves = map(holdings.client, range(clients))
        summary["clients"] = [{"train": train.tolist(), "val": val.tolist()} for train, val in halves]
    else:
        left_out = "clients" if clients <= COUNTED else "clients, sizes, classes_per_client"
        summary["left_out"] = f"{left_out} of {clients} clients; sha256 stands for them"
    return summary


def _tally(values: np.ndarray) -> dict[str, int]:
    """How often each value occurs, by value."""
    return {
        str(value): int(count) for value, count in zip(*np.unique(values, return_counts=True), strict=True)
    }
