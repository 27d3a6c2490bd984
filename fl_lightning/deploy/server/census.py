"""Data that only nodes have: what the server asks before it builds its run.

The server's data module has the test set, and says what all data have in common: the names of
classes and the constants of preprocessing (:class:`~fl_lightning.data.form.Form`). Its training
examples are not trained on. Nodes answer with the numbers of their examples, and everybody builds a
federation of clients of such sizes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

import torch
import yaml

from fl_lightning.data import FederatedData
from fl_lightning.data.apart import holdings_apart
from fl_lightning.deploy.protocol.answers import Counted, name_of, reason_of
from fl_lightning.deploy.protocol.gate import KEY
from fl_lightning.deploy.protocol.identity import facts
from fl_lightning.deploy.protocol.mail import Mail, Transport
from fl_lightning.deploy.protocol.messages import Message, MessageError, printable
from fl_lightning.deploy.server.roster import POLL_SECONDS, RoundRules
from fl_lightning.errors import InputError, RunStopped, require

log = logging.getLogger("fl_lightning")
NAMES = {
    "version": "version of fl_lightning",
    "task": "task",
    "num_classes": "number of classes",
    "example_shape": "shape of an example",
    "batch_size": "batch_size",
    "val_fraction": "val_fraction",
    "form": "classes or constants of preprocessing",
}
SAID_BY_SOME = {"tokenizer": "SHA-256 of the tokeniser"}
"""Compared where both say it: who has tokens on the disk needs no tokeniser."""
STAND_INS = (100, 2**16)  # clients, as nobody knows yet whether there are few or many
MAX_LISTED = 3  # clients that one line names
MAX_TOTAL_EXAMPLES = 2**28  # of all clients together: every machine has 8 bytes in memory for each


class Census:
    """Asks nodes which clients they have, in the place of dealing out the server's data.

    Args:
        transport: reaches the nodes.
        config: the configuration that nodes build from.
        rules: with how many nodes the run begins, and how long they are waited for.
        validates: whether clients say how many validation examples they have, and are asked to
            evaluate.
    """

    def __init__(
        self,
        transport: Transport,
        config: Mapping[str, Any],
        rules: RoundRules,
        *,
        validates: bool = True,
    ) -> None:
        self.mail, self.rules, self.validates = Mail(transport), rules, validates
        self.config = dict(config)
        self.counts: dict[int, tuple[int, int]] = {}
        self.node_of: dict[int, str] = {}

    def deal(self, data: FederatedData, seed: int, device: torch.device) -> None:
        """Wait for the nodes, and give the data the clients that they have.

        Raises:
            InputError: a node's data do not fit the run, or no client has a training example.
            RunStopped: too few nodes answered in time.
        """
        known = facts(data)
        self.config[KEY] = {"form": known["form"], "sizes": {}}
        ends, asked, answered = time.monotonic() + self.rules.wait_seconds, set[str](), 0
        while answered < self.rules.min_nodes:
            new = sorted(set(self.mail.transport.nodes()) - asked)
            asked |= set(new)
            text = yaml.safe_dump(self.config, sort_keys=False).encode()
            order = Message({"kind": "census"}, (text,)).to_bytes()
            orders = dict.fromkeys(new, order)
            for node, answer in self.mail.exchange(orders, self.rules.wait_seconds, refuses=True):
                self._take(node, answer, known)
                answered += 1
            if answered < self.rules.min_nodes:
                if time.monotonic() >= ends:
                    raise RunStopped(
                        f"{answered} nodes have said what data they have",
                        f"the run begins with {self.rules.min_nodes} nodes, for which it waits "
                        f"{self.rules.wait_seconds:g} seconds",
                        "start nodes, then start the run again",
                    )
                time.sleep(POLL_SECONDS)
        require(
            any(train for train, _ in self.counts.values()),
            "the data of the nodes",
            "no client has a training example",
            "give the nodes data",
        )
        self.config[KEY]["sizes"] = {
            str(id): train for id, (train, _) in sorted(self.counts.items())
        }
        data.distribute_apart(holdings_apart(self.counts), seed, device)

    def _take(self, node: str, answer: Message, known: Mapping[str, Any]) -> None:
        """Take the clients of a node."""
        name = name_of(answer, node)
        given, instead = f"node {name} ({node})", "put that right, or leave the node out"
        if answer.kind != "counted":
            raise InputError(given, reason_of(answer.header), instead)
        try:
            counted = Counted.from_answer(answer)
        except MessageError as error:
            raise InputError(given, f"its answer cannot be read: {error}", instead) from None
        theirs, clients = counted.facts, counted.clients
        wrong = [
            f"{label}: {_short(theirs.get(key))} there, {_short(known[key])} here"
            for key, label in {**NAMES, **SAID_BY_SOME}.items()
            if (key in NAMES or key in theirs.keys() & known.keys())
            and theirs.get(key) != known[key]
        ]
        wrong += [
            f"client {id} is on node {self.node_of[id]} already"
            for id in clients
            if id in self.node_of
        ][:MAX_LISTED]
        wrong += ["its data have no examples"] if not any(map(sum, clients.values())) else []
        total = sum(map(sum, [*self.counts.values(), *clients.values()]))
        wrong += (
            [f"with it there are {total} examples, above {MAX_TOTAL_EXAMPLES}"]
            if total > MAX_TOTAL_EXAMPLES
            else []
        )
        if wrong:
            raise InputError(given, "; ".join(wrong), instead)
        for id, (train, val) in clients.items():
            self.counts[id], self.node_of[id] = (train, val if self.validates else 0), name
            used = self.counts[id]
            log.info(
                "node %s: client %d has %d training and %d validation examples", name, id, *used
            )


def stand_in(data: FederatedData, seed: int, device: torch.device, *, clients: int) -> None:
    """Deal out clients of one example each: to try a run out before its nodes are there."""
    data.distribute_apart(holdings_apart(dict.fromkeys(range(clients), (1, 0))), seed, device)


def _short(value: object) -> str:
    return printable(value, 80)
