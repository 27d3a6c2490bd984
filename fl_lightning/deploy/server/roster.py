"""Which nodes take part in a deployment, and which clients each of them has."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from fl_lightning.config.constraints import at_least, check_fields, within
from fl_lightning.deploy.protocol.answers import Checked, epoch_of, name_of, reading, reason_of
from fl_lightning.deploy.protocol.identity import describe, mismatches
from fl_lightning.deploy.protocol.mail import Mail
from fl_lightning.deploy.protocol.messages import Message, MessageError
from fl_lightning.deploy.protocol.private import uncounted
from fl_lightning.errors import RunStopped
from fl_lightning.federation import Federation

log = logging.getLogger("fl_lightning")
POLL_SECONDS = 0.5  # between looks at which nodes are connected, while there are too few
NEWCOMER_SECONDS = 60.0  # of a check that enough nodes wait for; each further one has twice as long
REST = 10  # times that long a node that has not answered its check is asked nothing


@dataclass(frozen=True)
class RoundRules:
    """How long a round waits, and for whom.

    Args:
        min_nodes: nodes that fit the run before a round begins, at least 1.
        wait_seconds: seconds that a round waits for so many, and that a check of a node may take
            while there are fewer. With enough nodes a newcomer's first check may take a minute.
        round_seconds: seconds after which a round goes on without the clients that have not
            answered.
    """

    settings_shown: ClassVar = ("--deploy.{name} {value}",) * 2

    min_nodes: Annotated[int, at_least(1)] = 1
    wait_seconds: Annotated[float, within("[1, inf]", "at least 1 is needed", 1)] = 300.0
    round_seconds: Annotated[float, within("[1, inf]", "at least 1 is needed", 1)] = 600.0

    def __post_init__(self) -> None:
        check_fields(self)


class Roster:
    """The nodes that fit a run: each has built it, and what it built is what the server has.

    Args:
        fed: the federation of the server.
        config: the configuration that nodes build from, as YAML.
        rules: how many nodes a round begins with.
        mail: reaches the nodes.
        run: id of the run among the nodes.
    """

    def __init__(
        self, fed: Federation, config: bytes, rules: RoundRules, mail: Mail, run: str = ""
    ) -> None:
        self.fed, self.config, self.rules, self.mail, self.run = fed, config, rules, mail, run
        self.names: dict[str, str] = {}  # of the nodes that take part, by key
        self.node_of: dict[int, str] = {}  # key of the node that has a client
        self.uids: dict[str, str] = {}
        # by uid: its node, and when that was asked for it
        self.places: dict[str, tuple[str, float]] = {}
        self.epochs: dict[str, str] = {}  # of the processes that were checked
        self.here: set[str] = set()  # nodes that were connected at the last look
        self.refused: dict[str, tuple[str, str]] = {}  # names and reasons, by key
        self.displaced: set[str] = set()  # those of them whose place another node has
        self.homeless: set[int] = set()  # clients that have no node, as was last said
        # connections that were replaced or did not answer a check, and when they are asked again
        self.left_out: dict[str, float] = {}
        self.waited: dict[str, float] = {}  # seconds for an answer to a check that did not come
        # nodes that were started again in a round that went on before they could be checked
        self.restarted: set[str] = set()
        mail.name_of = self.name
        # what nodes build: rounds go on to change the network and what the server has
        self.built = describe(fed, [])

    def name(self, node: str) -> str:
        """Return the name of a node, or its key where it takes no part."""
        return self.names.get(node, node)

    def clients(self) -> dict[str, list[int]]:
        """Return the clients of each node, by its name and key."""
        found: dict[str, list[int]] = {}
        for id, node in sorted(self.node_of.items()):
            found.setdefault(f"{self.names[node]} ({node})", []).append(id)
        return found

    def gather(self, *, first: bool = False) -> None:
        """Wait until enough nodes that fit the run are connected.

        Args:
            first: the run has not begun, and a node that does not fit ends the wait.

        Raises:
            RunStopped: they were not in time.
        """
        ends, is_said, before = time.monotonic() + self.rules.wait_seconds, first, {*self.names}
        asked: set[str] = set()
        while True:
            self.here = here = set(self.mail.transport.nodes())
            for node in [node for node in self.names if node not in here]:
                self.forget(node)
            for node in sorted(self.restarted):
                self.forget(node, "was started again")
            for kept in (self.left_out, self.waited, self.refused):
                for node in kept.keys() - here:
                    kept.pop(node)
            new = here - self.names.keys() - self.refused.keys()
            new -= {node for node in self.left_out if node in asked or self._rests(node)}
            asked |= new
            self._check(sorted(new))
            if len(self.names) >= self.rules.min_nodes or (first and self.refused):
                break
            if time.monotonic() >= ends:
                refused = "".join(
                    f"; node {name}: {reason}" for name, reason in self.refused.values()
                )
                raise RunStopped(
                    f"{len(self.names)} nodes are connected that fit the run{refused}",
                    f"a round begins with {self.rules.min_nodes}, for which it waits "
                    f"{self.rules.wait_seconds:g} seconds",
                    f"start nodes, then {'the run again' if first else 'continue with --ckpt_path'}",
                )
            if not is_said:
                log.warning(
                    "%d of the %d nodes that a round begins with are here; waiting %g s",
                    len(self.names),
                    self.rules.min_nodes,
                    self.rules.wait_seconds,
                )
                is_said = True
            time.sleep(POLL_SECONDS)
        if {*self.names} != before:
            self._name_homeless()

    def _rests(self, node: str) -> bool:
        """Return whether a node that is left out is not asked again now: it was replaced, or has
        not answered lately and enough others are here."""
        if len(self.names) < self.rules.min_nodes:
            return self.left_out[node] == math.inf
        return self.left_out[node] > time.monotonic()

    def exchange(
        self, orders: Mapping[str, bytes], seconds: float, *, until: float = math.inf
    ) -> Iterator[tuple[str, Message]]:
        """Send orders to nodes that take part, and yield node and answer.

        A node that was started again since it was checked may have other data now: what its new
        process has done counts once this process has been checked, after the others have answered.
        Where the caller waits for no more answers, it is checked before the next round.

        Args:
            orders: one for each node, by its key.
            seconds: that answers are waited for.
            until: that such checks end within so many seconds from now too.
        """
        started_again, ends = [], time.monotonic() + until
        for node, answer in self.mail.exchange(orders, seconds):
            if answer.kind != "refused" and epoch_of(answer) != self.epochs.get(node):
                started_again.append((node, answer))
                self.restarted |= {node} & self.names.keys()
            else:
                yield node, answer
        for node, answer in started_again:
            if node in self.names:
                log.info(
                    "node %s (%s) was started again: it is checked again", self.names[node], node
                )
                self._leave(node)
                left = max(0.0, ends - time.monotonic())
                if left:
                    self._check([node], min(left, self.rules.wait_seconds))
            if node in self.names and epoch_of(answer) == self.epochs[node]:
                yield node, answer
            else:
                log.warning(
                    "node %s: its answer is that of a process that was not checked", self.name(node)
                )

    def _check(self, nodes: Sequence[str], seconds: float | None = None) -> None:
        """Have new nodes build the run, and take those whose answer fits.

        Args:
            nodes: keys of the nodes.
            seconds: that their answers are waited for; None: by how many nodes are here, and by how
                long these were waited for before.
        """
        private = self.run and self.fed.aggregation.privacy is not None
        about = {"kind": "check", **({"run": self.run} if private else {})}
        order = Message(about, (self.config,)).to_bytes()
        if seconds is None:
            seconds = self.rules.wait_seconds
            if len(self.names) >= self.rules.min_nodes:
                longest = max((self.waited.get(node, 0.0) for node in nodes), default=0.0)
                seconds = min(seconds, max(NEWCOMER_SECONDS, 2 * longest))
        until = time.monotonic() + REST * seconds
        self.left_out.update(dict.fromkeys(nodes, until))
        self.waited.update(dict.fromkeys(nodes, seconds))
        asked = time.time()
        orders = dict.fromkeys(nodes, order)
        for node, answer in self.mail.exchange(orders, seconds, refuses=True):
            self.left_out.pop(node, None)
            self.waited.pop(node, None)
            name = name_of(answer, node)
            try:
                reason = reason_of(answer.header) if answer.kind != "checked" else ""
                found = None if reason else Checked.from_answer(answer)
                if found is not None:
                    reason = self._not_its_own(node, found)
                    if not reason and (reason := self._replaced(found) or self._taken(found)):
                        self.displaced.add(node)
                    reason = reason or self._misfit(found)
                    reason = reason or uncounted(self.fed.aggregation.privacy, found.noisy_sums)
            except MessageError as error:
                found, reason = None, f"its answer cannot be read: {error}"
            if reason or found is None:
                self.refused[node] = name, reason
                log.error("node %s (%s) is refused: %s", name, node, reason)
                continue
            self.names[node], self.uids[node], self.epochs[node] = name, found.uid, found.epoch
            self.places[found.uid] = node, asked
            for id in found.clients:
                self.node_of[id] = node
            count = len(found.clients)
            log.info("node %s (%s) has %d client%s", name, node, count, "" if count == 1 else "s")

    def _not_its_own(self, node: str, found: Checked) -> str:
        """Return why a node cannot have the place of the node whose uid it sends, else an empty
        text.

        A uid is what a node says of itself. Its key tells more: a node with a registered key comes
        back under that key, and one without registers itself anew when it comes back, which is
        after it was checked.
        """
        before, asked = self.places.get(found.uid, (node, 0.0))
        since = self.mail.transport.registered().get(node, math.inf) if before != node else math.inf
        if since >= asked:
            return ""
        return (
            f"it says that it is node {before}, under another key, which was registered before that node was "
            "checked; give each node a --folder of its own, and after a change of keys continue the run with "
            "--ckpt_path"
        )

    def _replaced(self, found: Checked) -> str:
        """Let a node that was started again take its own place; return why it cannot, else an empty
        text."""
        for before in [before for before, other in self.uids.items() if other == found.uid]:
            clients = [id for id, node in self.node_of.items() if node == before]
            if before in self.here and set(clients) != set(found.clients):
                return (
                    f"it has the folder of node {self.names[before]} ({before}), which is connected and has "
                    "other clients; give each node a --folder of its own"
                )
            self.forget(before, "was started again")
            self.left_out[before] = math.inf
        return ""

    def _taken(self, found: Checked) -> str:
        """Return which of a node's clients another node has, else an empty text."""
        for id in found.clients:
            if other := self.node_of.get(id):
                return f"client {id} is on node {self.names[other]} ({other}) already"
        return ""

    def _misfit(self, found: Checked) -> str:
        """Return why a node cannot take part, empty where it can."""
        wrong = [id for id in found.clients if id >= self.fed.data.num_clients]
        if wrong:
            return f"it has client {wrong[0]}, and the federation has {self.fed.data.num_clients}"
        sizes = {str(id): int(self.fed.data.sizes[id]) for id in found.clients}
        with reading():
            return "; ".join(mismatches({**self.built, "examples": sizes}, found.identity))

    def forget(self, node: str, why: str = "has left") -> None:
        """Let a node go, and say why."""
        log.warning("node %s (%s) %s", self.names[node], node, why)
        self._leave(node)

    def _leave(self, node: str) -> None:
        for known in (self.names, self.uids, self.epochs):
            known.pop(node)
        self.restarted.discard(node)
        self.node_of = {id: at for id, at in self.node_of.items() if at != node}
        for other in self.displaced:  # it may have the place now: it is checked again
            self.refused.pop(other, None)
        self.displaced.clear()

    def _name_homeless(self) -> None:
        """Warn of clients that have no node, where there are others than before."""
        without = {int(id) for id in self.fed.data.active} - self.node_of.keys()
        if without - self.homeless:
            log.warning(
                "%d clients have no node and count as dropped until one is here, the first is %d",
                len(without),
                min(without),
            )
        self.homeless = without
