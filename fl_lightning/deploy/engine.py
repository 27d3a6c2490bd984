"""An engine whose tasks travel as messages: the loop stays as it is, and clients train on their nodes."""

from __future__ import annotations

import logging
import math
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Protocol

import yaml

from fl_lightning.deploy.identity import describe, mismatches
from fl_lightning.deploy.messages import Message, MessageError
from fl_lightning.deploy.server_state import beside_broadcast
from fl_lightning.distributed.collectives import world_size
from fl_lightning.engines import ClientResult, ClientTask, Engine
from fl_lightning.engines.base import Units
from fl_lightning.engines.secure_round import MaskedSum
from fl_lightning.errors import InputError, RunStopped, require
from fl_lightning.hooks import Stressor
from fl_lightning.loop import Federation
from fl_lightning.methods.secure import SumForm, check_secure_sum
from fl_lightning.metrics import Mean
from fl_lightning.support.overriding import overrides

if TYPE_CHECKING:  # it needs the extra privacy
    from fl_lightning.privacy.secure.simulation import Outcome

log = logging.getLogger("fl_lightning")
ON_NODES = {"change_labels": "labels", "change_upload": "uploads before they are masked"}
POLL_SECONDS = 0.5  # between looks at which nodes are connected, while there are too few


class Transport(Protocol):
    """What carries messages to nodes and their answers back."""

    name: str

    def nodes(self) -> Sequence[str]:
        """Return the keys of the nodes that are connected now."""

    def exchange(self, messages: Mapping[str, bytes], timeout: float) -> Iterator[tuple[str, bytes]]:
        """Send one message to each node, and yield node and answer as answers come.

        A node that fails, leaves or does not answer within ``timeout`` seconds yields nothing, and nothing
        that it sends later is ever yielded.
        """

    def close(self) -> None:
        """Let go of the nodes; it can be called twice."""


@dataclass(frozen=True)
class RoundRules:
    """How long a round waits, and for whom.

    Args:
        min_nodes: nodes that fit the run before a round begins, at least 1.
        wait_seconds: seconds that a round waits for so many, and that a check of a node may take.
        round_seconds: seconds after which a round goes on without the clients that have not answered.
    """

    min_nodes: int = 1
    wait_seconds: float = 300.0
    round_seconds: float = 600.0

    def __post_init__(self) -> None:
        for name, value, least in (
            ("min_nodes", self.min_nodes, 1),
            ("wait_seconds", self.wait_seconds, 1),
            ("round_seconds", self.round_seconds, 1),
        ):
            require(
                value >= least,
                f"--deploy.{name} {value}",
                f"at least {least} is needed",
                f"write --deploy.{name} {least}",
            )


@dataclass
class Traffic:
    """What a deployment has cost beside its training, since the server was started.

    Args:
        sent, received: bytes of messages with their headers, as the transport was given them.
        answers: orders of a round that a node has answered.
        beside_training: seconds from the first order of a round to a node's answer in which this node did not
            train, added up over answers.
    """

    sent: int = 0
    received: int = 0
    answers: int = 0
    beside_training: float = 0.0


class RemoteEngine(Engine):
    """Trains clients on the nodes that have their data.

    Each task becomes an order: client, epochs, steps and the round whose kept state the client goes on from;
    a node gets one message with the orders of all its clients, and each different broadcast in it once, its
    bytes untouched. No label travels, and what a client keeps stays on its node. A client whose node is not
    there, fails or is late counts as dropped, and its state is as it was before the round.

    Under a secure sum no upload and no loss travels: nodes keep what their clients would send, and the phases
    of the sum are further messages, one for each node and phase. Each phase waits as long as a round.

    Args:
        transport: carries the messages.
        fed: the federation of the server.
        config: the configuration that nodes build from.
        rules: how long a round waits.
        run: id of the run, under which nodes keep states; a run that is continued has the one from before.
        since: of a run that is continued, the last round of each client in which it did not drop.
        deterministic: whether nodes use deterministic algorithms.

    Raises (from :meth:`start`):
        InputError: the run cannot be deployed, or a node does not fit it.
    """

    name = "remote"

    def __init__(
        self,
        transport: Transport,
        fed: Federation,
        config: Mapping[str, Any],
        rules: RoundRules | None = None,
        run: str | None = None,
        since: Mapping[int, int] | None = None,
        deterministic: bool = True,
    ) -> None:
        self.transport, self.fed, self.rules = transport, fed, rules or RoundRules()
        self.config = yaml.safe_dump(dict(config), sort_keys=False).encode()
        self.digest = sha256(self.config).hexdigest()
        self.run = run or uuid.uuid4().hex
        self.deterministic = deterministic
        self.traffic = Traffic()
        self.names: dict[str, str] = {}
        self.node_of: dict[int, str] = {}
        self.uids: dict[str, str] = {}
        self.refused: dict[str, str] = {}
        self.forms: dict[int, SumForm] = {}  # of what nodes keep for the round's secure sum, by client
        self.left_out: set[str] = set()  # connections that were replaced, or did not answer a check
        # a client that counted as dropped goes on from the state before, whatever its node did since
        self.since = dict(since or {})

    def start(self) -> None:
        check_deployable(self.fed)
        if self.fed.secure_sum is not None:
            log.info("secure_sum: keys are drawn by the nodes' operating systems, anew in each round")
        self._gather_nodes()
        if self.refused:
            node, reason = next(iter(self.refused.items()))
            raise InputError(f"node {node}", reason, "put that right, or leave the node out")
        missing = sorted({int(id) for id in self.fed.data.active} - self.node_of.keys())
        if missing:
            log.warning(
                "%d clients have no node yet and count as dropped, the first is %d", len(missing), missing[0]
            )

    def train(self, tasks: Sequence[ClientTask], units: Units | None = None) -> Iterator[ClientResult]:
        self.forms = {}
        if not tasks:
            return
        self._gather_nodes()
        messages = self._messages(tasks)
        found: dict[int, ClientResult] = {}
        by_id = {task.client.id: task for task in tasks}
        started = time.monotonic()
        for node, answer in self._exchange(messages, self.rules.round_seconds):
            self.traffic.answers += 1
            self.traffic.beside_training += max(0.0, time.monotonic() - started - seconds_of(answer))
            for result in self._results(node, answer, by_id):
                found[result.client.id] = result
        for task in tasks:
            id = task.client.id
            if id in found:
                self.since[id] = task.round
                yield found[id]
            else:
                sent = len(task.message) if self.node_of.get(id) in messages else 0
                yield ClientResult(task.client, b"", {}, {}, 0, unanswered=sent)

    def add_under_masks(self, asked: MaskedSum) -> tuple[SumForm, Outcome]:
        from fl_lightning.deploy.secure_server import add_up_on_nodes

        def ask(phase: str, messages: Mapping[int, bytes]) -> Iterator[tuple[int, bytes]]:
            return self._ask(asked.round, phase, messages)

        started = time.monotonic()
        added = add_up_on_nodes(asked, self.forms, ask)
        self.traffic.beside_training += time.monotonic() - started
        return added

    def notes(self) -> dict[str, Any]:
        """Return the run's id among the nodes, which node has which clients, and what messages have cost."""
        clients: dict[str, list[int]] = {}
        for id, node in sorted(self.node_of.items()):
            clients.setdefault(f"{self.names[node]} ({node})", []).append(id)
        about = {"transport": self.transport.name, "run": self.run, "nodes": clients}
        return {"deployment": {**about, "messages": asdict(self.traffic)}}

    def close(self) -> None:
        self.transport.close()

    def _gather_nodes(self) -> None:
        """Wait until enough nodes that fit the run are connected.

        Raises:
            RunStopped: they were not in time.
        """
        ends = time.monotonic() + self.rules.wait_seconds
        while True:
            here = set(self.transport.nodes())
            for node in [node for node in self.names if node not in here]:
                self._forget(node)
            self.left_out &= here
            self._check(sorted(here - self.names.keys() - self.refused.keys() - self.left_out))
            if len(self.names) >= self.rules.min_nodes or (self.refused and not self.names):
                break
            if time.monotonic() >= ends:
                refused = "".join(f"; {node}: {reason}" for node, reason in self.refused.items())
                raise RunStopped(
                    f"{len(self.names)} nodes are connected that fit the run{refused}",
                    f"a round begins with {self.rules.min_nodes}, for which it waits "
                    f"{self.rules.wait_seconds:g} seconds",
                    "start nodes, then continue with --ckpt_path",
                )
            time.sleep(POLL_SECONDS)

    def _check(self, nodes: Sequence[str]) -> None:
        """Have new nodes build the run, and take those whose answer fits."""
        order = Message({"kind": "check"}, (self.config,)).to_bytes()
        self.left_out |= set(nodes)
        for node, answer in self._exchange(dict.fromkeys(nodes, order), self.rules.wait_seconds):
            self.left_out.discard(node)
            name, uid = str(answer.header.get("node", node)), str(answer.header.get("uid", node))
            for before in [before for before, other in self.uids.items() if other == uid]:
                self._forget(before)  # the same node, started again
                self.left_out.add(before)
            reason = self._misfit(answer)
            if reason:
                self.refused[node] = reason
                log.error("node %s (%s) is refused: %s", name, node, reason)
                continue
            self.names[node], self.uids[node] = name, uid
            for id in answer.header["clients"]:
                self.node_of[int(id)] = node
            log.info("node %s (%s) has %d clients", name, node, len(answer.header["clients"]))

    def _misfit(self, answer: Message) -> str:
        """Return why a node cannot take part, empty where it can."""
        if answer.kind != "checked":
            return str(answer.header.get("reason", "it gave no reason"))
        clients = [int(id) for id in answer.header["clients"]]
        wrong = [id for id in clients if not 0 <= id < self.fed.data.num_clients]
        if wrong:
            return f"it has client {wrong[0]}, and the federation has {self.fed.data.num_clients}"
        twice = [id for id in clients if id in self.node_of]
        if twice:
            return f"client {twice[0]} is on node {self.names[self.node_of[twice[0]]]} already"
        return "; ".join(mismatches(describe(self.fed, clients), answer.header["identity"]))

    def _forget(self, node: str) -> None:
        log.warning("node %s (%s) has left", self.names.pop(node), node)
        self.uids.pop(node)
        self.node_of = {id: at for id, at in self.node_of.items() if at != node}

    def _messages(self, tasks: Sequence[ClientTask]) -> dict[str, bytes]:
        """Return the message of each node that has clients of this round."""
        orders: dict[str, list[dict[str, int]]] = {}
        parts: dict[str, dict[bytes, int]] = {}
        states: dict[bytes, bytes] = {}
        for task in tasks:
            id = task.client.id
            node = self.node_of.get(id)
            if node is None:
                continue
            mine = parts.setdefault(node, {})
            order = {"client": id, "epochs": task.epochs, "steps": task.steps, "since": self.since.get(id, 0)}
            order["message"] = mine.setdefault(task.message, len(mine))
            if self.fed.secure_sum is not None:
                if task.message not in states:
                    states[task.message] = beside_broadcast(self.fed.method, task.message)
                order["state"] = mine.setdefault(states[task.message], len(mine))
            orders.setdefault(node, []).append(order)
        about = {
            "kind": "train",
            "run": self.run,
            "config": self.digest,
            "round": tasks[0].round,
            "seed": self.fed.seed,
            "cohort": self.fed.method.cohort,
            "deterministic": self.deterministic,
        }
        return {
            node: Message({**about, "orders": each}, tuple(parts[node])).to_bytes()
            for node, each in orders.items()
        }

    def _exchange(self, messages: Mapping[str, bytes], seconds: float) -> Iterator[tuple[str, Message]]:
        """Yield the answers that can be read."""
        if not messages:
            return
        self.traffic.sent += sum(map(len, messages.values()))
        for node, data in self.transport.exchange(messages, seconds):
            self.traffic.received += len(data)
            try:
                yield node, Message.from_bytes(data)
            except MessageError as error:
                log.warning("node %s: its answer cannot be read: %s", self.names.get(node, node), error)

    def _results(self, node: str, answer: Message, tasks: Mapping[int, ClientTask]) -> Iterator[ClientResult]:
        """Yield the results in an answer that belong to this round's clients of the node."""
        name = self.names.get(node, node)
        secure = self.fed.secure_sum is not None
        if answer.kind != ("kept" if secure else "trained"):
            log.warning("node %s did not train: %s", name, answer.header.get("reason", "it gave no reason"))
            if node in self.names:
                self._forget(node)  # it is checked again before the next round
            return
        for entry in answer.header["results"]:
            try:
                id = int(entry["client"])
                if "reason" in entry:
                    log.warning("node %s: client %d: %s", name, id, entry["reason"])
                elif id not in tasks or self.node_of.get(id) != node:
                    log.warning("node %s: client %d was not asked of it", name, id)
                elif secure:
                    self.forms[id] = form = SumForm.from_json(entry["form"])
                    kept = "trained" if form.parts else "rejected"
                    yield ClientResult(tasks[id].client, b"", {}, {}, 0, kept=kept)
                else:
                    losses = {
                        str(key): Mean(float(total), weight)
                        for key, (total, weight) in entry["losses"].items()
                    }
                    upload = answer.parts[int(entry["upload"])]
                    yield ClientResult(tasks[id].client, upload, {}, losses, int(entry["steps"]))
            except (KeyError, TypeError, ValueError, IndexError) as error:
                log.warning("node %s: a result cannot be read (%r)", name, error)

    def _ask(self, round: int, phase: str, messages: Mapping[int, bytes]) -> Iterator[tuple[int, bytes]]:
        """Send the messages of one phase of a secure sum to clients, by id, and yield client and answer."""
        about = {"kind": "phase", "run": self.run, "round": round, "phase": phase}
        asked: dict[str, list[int]] = {}
        for id in sorted(messages.keys() & self.node_of.keys()):
            asked.setdefault(self.node_of[id], []).append(id)
        orders = {
            node: Message({**about, "clients": ids}, tuple(messages[id] for id in ids)).to_bytes()
            for node, ids in asked.items()
        }
        for node, answer in self._exchange(orders, self.rules.round_seconds):
            header = answer.header
            if any(header.get(name) != value for name, value in about.items()):
                reason = header.get("reason", "it gave no reason")
                log.warning("node %s leaves the secure sum: %s", self.names.get(node, node), reason)
                continue
            found = dict(zip(header.get("clients", ()), answer.parts, strict=False))
            yield from ((id, found[id]) for id in asked[node] if id in found)


def seconds_of(answer: Message) -> float:
    """Return the seconds that a node says its training took; 0 where it says nothing of use."""
    seconds = answer.header.get("seconds", 0.0)
    return float(seconds) if isinstance(seconds, int | float) and math.isfinite(seconds) else 0.0


def check_deployable(fed: Federation) -> None:
    """Refuse what nodes cannot do yet.

    Raises:
        InputError: the run has it.
    """
    require(
        fed.privacy is None,
        "trainer.privacy",
        "a deployment does not have it yet",
        "leave it out, or use fit",
    )
    if fed.secure_sum is not None:
        check_secure_sum(fed.secure_sum, fed.method, fed.cohort_size)
    require(world_size() == 1, "several processes of the server", "it is one", "write --trainer.devices 1")
    for callback in fed.callbacks:
        for hook, what in ON_NODES.items() if isinstance(callback, Stressor) else ():
            name = type(callback).__name__
            require(
                not overrides(callback, Stressor, hook)
                or (hook == "change_upload" and fed.secure_sum is None),
                f"callbacks.{name}",
                f"it changes {what}, and only nodes have them",
                f"leave {name} out of a deployment",
            )
    if fed.method.personalised:
        log.warning(
            "%s: the server evaluates the model of a newcomer, since what clients keep stays on their nodes; "
            "val/* and test/* are therefore not those of a simulation",
            type(fed.method).__name__,
        )
