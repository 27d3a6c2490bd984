"""A node's own data: its clients' examples, and their numbers for the server."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

from fl_lightning.cli.types import import_class
from fl_lightning.config.documents import refuse_odd_numbers
from fl_lightning.data import FederatedData
from fl_lightning.data.apart import own_holdings
from fl_lightning.data.form import Form
from fl_lightning.deploy.protocol.identity import facts
from fl_lightning.errors import InputError, require

log = logging.getLogger("fl_lightning")
COMMON = ("batch_size", "val_fraction")
"""Settings of the run's data that data of another class take over where their owner does not write
them."""
MEASURED = ("metrics", "primary")
"""Those that they take over too where the run names metrics."""


class OwnData:
    """The data of a node.

    Args:
        given: a folder or file, which takes the place of ``train`` in the run's data, of Hugging
            Face data of ``path``; or a YAML file with ``class_path`` and ``init_args`` of a data
            module.
        first, step: ids of the node's clients: the first, and how far they are apart.
    """

    def __init__(self, given: str, first: int, step: int) -> None:
        self.given, self.first, self.step = Path(given), first, step
        require(
            self.given.exists(),
            f"--data {given}",
            "there is no such file or folder",
            "name another",
        )
        empty = self.given.is_dir() and not any(self.given.iterdir())
        require(not empty, f"--data {given}", "it is an empty folder", "name another")

    def config(self, run: Mapping[str, Any]) -> dict[str, Any]:
        """Return the run's configuration with this node's data.

        Raises:
            InputError: the file is not of this form.
        """
        data = run["data"]
        given = {name: value for name, value in data["init_args"].items() if value is not None}
        names = COMMON + (MEASURED if given.get("metrics") else ())
        common = {name: given[name] for name in names if name in given}
        if self.given.suffix not in (".yaml", ".yml"):
            own = getattr(import_class(data["class_path"]), "own_setting", "train")
            here = {
                own: str(self.given.absolute()),
                "test": None,
                "num_clients": 1,
                "partition": None,
            }
            return {**run, "data": {**data, "init_args": {**data["init_args"], **here}}}
        try:
            text = self.given.read_text()
            refuse_odd_numbers(self.given, yaml.compose(text))
            own = yaml.safe_load(text)
        except (OSError, yaml.YAMLError) as error:
            log.error("--data %s cannot be read: %s", self.given, error)
            raise InputError(
                f"--data {self.given}", "it cannot be read as YAML", "correct it"
            ) from None
        if not isinstance(own, dict) or "class_path" not in own:
            raise InputError(
                f"--data {self.given}",
                "it has no class_path",
                "write class_path: ImageFolder, and init_args",
            )
        return {**run, "data": {**own, "init_args": {**common, **(own.get("init_args") or {})}}}

    def deal(self, sizes: Mapping[str, int]) -> Any:
        """Return what deals out this node's data among clients of other machines.

        Args:
            sizes: training examples of all clients, by id.
        """

        def deal(data: FederatedData, seed: int, device: torch.device) -> None:
            counts = {int(id): (int(train), 0) for id, train in sizes.items()}
            data.distribute_apart(
                own_holdings(data, counts, self.first, self.step, seed), seed, device
            )

        return deal

    def census(self, data: FederatedData, seed: int) -> dict[str, Any]:
        """Return the numbers of examples of the node's clients, and what the data are.

        Args:
            data: that have been set up.
        """
        held = own_holdings(data, {}, self.first, self.step, seed)
        clients = {}
        for id in range(self.first, len(held), self.step):
            train, val = held.client(id)
            clients[str(id)] = [len(train), len(val)]
        return {"kind": "counted", "clients": clients, "facts": facts(data)}


def form_of(entry: Mapping[str, Any]) -> Form:
    """Return the form in a run's configuration."""
    return Form(**entry["form"])
