"""A partition from a file of indices, such as the ``partition.json`` of another run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fl_lightning.data.holdings import Holdings
from fl_lightning.data.json_text import read_json
from fl_lightning.data.partition import IndexPartition, times_held
from fl_lightning.errors import InputError, require


class FromFile(IndexPartition):
    """Every client holds the training examples that a JSON file lists for it, counted from 0.

    The file is ``{"clients": [{"train": [0, 4], "val": [2]}, ...]}``, as ``partition.json`` of a
    run, whose validation examples it takes over; or a list of a list for each client, ``[[0, 4, 2],
    ...]``, of which ``val_fraction`` is then held out. Every training example is in one list.

    Args:
        path: the file.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def holdings(self, labels: np.ndarray, num_clients: int, seed: int) -> Holdings:
        """Return the examples of each client; of ``labels`` only the number N counts, and no seed.

        Raises:
            InputError: the file cannot be read, lists another number of clients, or an example
                twice, not at all, or outside 0 .. N - 1.
        """
        clients = self._read()
        require(
            len(clients) == num_clients,
            f"num_clients={num_clients}",
            f"{self.path} lists {len(clients)} clients",
            f"write num_clients: {len(clients)}",
        )
        divided = any(isinstance(client, dict) for client in clients)
        halves = [self._halves(client, id) for id, client in enumerate(clients)]
        found = Holdings.of_halves(halves, divided=divided)
        self._check(found.index, np.repeat(np.arange(len(found)), found.sizes), len(labels))
        return found

    def _read(self) -> list[Any]:
        given, form = f"{self.path}", 'write {"clients": [{"train": [0], "val": []}]}'
        content = read_json(Path(self.path), form, find="write the path of a JSON file")
        if isinstance(content, dict) and "left_out" in content:
            raise InputError(
                given,
                f"it leaves out the clients' examples ({content['left_out']})",
                "use the partition and the seed of that run",
            )
        clients = content.get("clients") if isinstance(content, dict) else content
        if not (isinstance(clients, list) and clients):
            raise InputError(given, "it lists no clients", form)
        return clients

    def _halves(self, client: Any, id: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the sorted training and validation examples of a client."""
        if isinstance(client, dict):
            unknown = sorted(set(client) - {"train", "val"})
            require(
                "train" in client and not unknown,
                f"{self.path}, client {id}",
                f"it has the lists train and val, and not {unknown or 'val alone'}",
                'write {"train": [0, 4], "val": [2]}',
            )
            lists = [client["train"], client.get("val", [])]
        else:
            lists = [client, []]
        for some in lists:
            whole = isinstance(some, list) and all(type(place) is int for place in some)
            small = whole and all(abs(place) < 2**63 for place in some)
            require(
                small,
                f"{self.path}, client {id}",
                "examples are a list of whole numbers",
                "write e.g. [0, 4, 2]",
            )
        train, val = (np.sort(np.array(some, np.int64)) for some in lists)
        return train, val

    def _check(self, index: np.ndarray, owner: np.ndarray, count: int) -> None:
        """Refuse lists that do not cover all examples once."""
        times = times_held(f"{self.path}", index, owner, count)
        if (times == 0).any():
            raise InputError(
                f"{self.path}",
                f"{int((times == 0).sum())} of {count} examples are in no list, such as "
                f"{int((times == 0).argmax())}",
                "give each to a client",
            )
