"""An engine whose tasks travel as messages: the loop stays as it is, and clients train on their
nodes."""

from __future__ import annotations

import logging
import math
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import yaml

from fl_lightning.aggregation.adapters.plain_weights import AS_THEY_ARE
from fl_lightning.aggregation.masked_round import MaskedRound
from fl_lightning.aggregation.sum_form import SumForm
from fl_lightning.deploy.protocol.answers import (
    MAX_RUN_LOSSES,
    Trained,
    phase_parts,
    reason_of,
    results_of,
    seconds_of,
)
from fl_lightning.deploy.protocol.mail import Mail, Transport
from fl_lightning.deploy.protocol.messages import Message, MessageError, longest_header
from fl_lightning.deploy.protocol.server_state import beside_broadcast
from fl_lightning.deploy.server.deployable import check_deployable
from fl_lightning.deploy.server.evaluating import ask_nodes, is_measured_on_nodes
from fl_lightning.deploy.server.lost import LostStates
from fl_lightning.deploy.server.roster import Roster, RoundRules
from fl_lightning.deploy.server.wall_clock import WallTiming
from fl_lightning.engines import ClientResult, ClientTask, Engine
from fl_lightning.engines.base import ClientSums, Units
from fl_lightning.errors import InputError
from fl_lightning.federation import Federation
from fl_lightning.metrics import Mean
from fl_lightning.privacy import Randomness, from_system
from fl_lightning.run.paths import rounds_kept

if TYPE_CHECKING:  # it needs the extra privacy
    from fl_lightning.privacy.secure.simulation import Outcome

log = logging.getLogger("fl_lightning")


class RemoteEngine(Engine):
    """Trains clients on the nodes that have their data.

    Each task becomes an order: client, epochs, steps and the round whose kept state the client goes
    on from; a node gets one message with the orders of all its clients, and each different
    broadcast in it once, its bytes untouched. No label travels, and what a client keeps stays on
    its node. A client whose node is not there, fails or is late counts as dropped, and its state is
    as it was before the round.

    Under a secure sum no upload and no loss travels: nodes keep what their clients would send, and
    the phases of the sum are further messages, one for each node and phase. Each phase waits as
    long as a round.

    Args:
        transport: carries the messages.
        fed: the federation of the server.
        config: the configuration that nodes build from.
        rules: how long a round waits.
        run: id of the run, under which nodes keep states; a run that is continued has the one from
            before.
        since: of a run that is continued, the last round of each client whose upload counted.
        keeps: of a run that is continued, whether a client has kept something; None: nobody knows.
        deterministic: whether nodes use deterministic algorithms.
        on_begin: is called with the run directory before the first round.
        randomness: what the rings of secure sums are drawn from; those of a run without privacy
            follow from a secret that it keeps where this is the operating system's.

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
        keeps: bool | None = None,
        deterministic: bool = True,
        on_begin: Callable[[Path], None] | None = None,
        randomness: Randomness = from_system,
    ) -> None:
        self.fed, self.rules = fed, rules or RoundRules()
        longest = longest_header(fed.data.num_clients, forms=fed.aggregation.masks is not None)
        self.mail = Mail(transport, longest)
        self.config = yaml.safe_dump(dict(config), sort_keys=False).encode()
        self.digest = sha256(self.config).hexdigest()
        self.run = run or uuid.uuid4().hex
        self.deterministic, self.on_begin = deterministic, on_begin
        self.randomness = randomness
        self.roster = Roster(fed, self.config, self.rules, self.mail, self.run)
        # of what nodes keep for the round's secure sum, by client
        self.forms: dict[int, SumForm] = {}
        # a client whose upload did not count goes on from the state before, whatever its node did
        # since
        self.since = dict(since or {})
        self.keeps, self.lost = keeps, LostStates()
        # a method of the package declares whether its clients keep something; adapters may
        method = fed.method
        theirs = not type(method).__module__.startswith("fl_lightning.")
        theirs |= method.adapters is not AS_THEY_ARE
        self.may_keep = theirs or method.keeps_state or method.personalised
        # nodes that said that a client keeps something; the empty one, that some did before
        self.keepers = {""} if keeps else set[str]()
        # those of the method are counted whatever else nodes name
        terms = {f"loss_{term.name}" for term in fed.method.active_terms()}
        self.loss_names = {"loss", "loss_task", *terms}
        self.refused: set[int] = set()  # clients whose node lacks their state in this round

    def start(self) -> None:
        check_deployable(self.fed)
        if self.fed.aggregation.masks is not None:
            log.info(
                "secure_sum: keys are drawn by the nodes' operating systems, anew in each round"
            )
        self.roster.gather(first=True)
        if self.roster.refused:
            name, reason = next(iter(self.roster.refused.values()))
            raise InputError(f"node {name}", reason, "put that right, or leave the node out")

    def train(
        self, tasks: Sequence[ClientTask], units: Units | None = None
    ) -> Iterator[ClientResult]:
        self.forms, self.refused = {}, set()
        if tasks:
            if self.on_begin is not None:
                self.on_begin(self.fed.run_dir)
                self.on_begin = None
            self.roster.gather()
        terms: dict[str, Any] = {}
        if (privacy := self.fed.aggregation.privacy) is not None:
            # also where nobody trains: the noise on an empty sum hides that
            terms["noisy_sum"] = privacy.begin_sum(self.fed.method.round, self.fed.run_dir)
        if not tasks:
            self.mail.traffic.beside_training.append(0.0)
            return
        messages = self._messages(tasks, terms)
        found: dict[int, ClientResult] = {}
        by_id = {task.client.id: task for task in tasks}
        # one that refuses is forgotten at once
        sent_to = {id: self.roster.node_of[id] for id in by_id if id in self.roster.node_of}
        ordered = {node: dict[int, ClientTask]() for node in messages}
        for id, node in sent_to.items():
            ordered[node][id] = by_id[id]
        silent, beside = set(messages), list[float]()
        wall, seconds, enough, longest = self._wall, self.rules.round_seconds, math.inf, math.inf
        alone = self._of_one_client(messages, by_id)  # of nodes that may be forgotten meanwhile
        if wall is not None:
            longest, enough = wall.rounds.patience(self.fed.cohort_size)
            seconds = min(seconds, longest)
            wall.measure_lines(alone, self.roster.exchange, seconds)
            wall.begin()
        started = time.monotonic()  # after the probes of the lines, which are in no order
        for node, answer in self.roster.exchange(messages, seconds, until=longest):
            silent.discard(node)
            beside.append(max(0.0, time.monotonic() - started - seconds_of(answer)))
            results = list(self._results(node, answer, ordered[node]))
            found |= {result.client.id: result for result in results}
            if wall is not None:
                took = seconds_of(answer) if node in alone else None
                wall.note([one.client.id for one in results], took)
            if len(found) >= enough:
                break
        self.mail.traffic.answers += len(beside)
        self.mail.traffic.beside_training.append(fmean(beside) if beside else 0.0)
        node_of, lost = self.roster.node_of, "dropped" if wall is None else "late"
        for node in sorted(silent):
            name = self.roster.name(node)
            log.warning(
                "round %d: no answer of node %s: its clients count as %s",
                tasks[0].round,
                name,
                lost,
            )
        if wall is not None:
            wall.close([id for id in by_id if node_of.get(id) in silent])
        asked = {id for id in by_id if node_of.get(id) in messages}
        self.lost.after_round(asked, self.refused, found.keys(), node_of.keys())
        for task in tasks:
            id = task.client.id
            if id in found:
                yield found[id]
            else:
                sent = len(task.message) if id in sent_to else 0
                yield ClientResult(task.client, b"", {}, {}, 0, status="dropped", download=sent)

    def _of_one_client(
        self, messages: Mapping[str, bytes], ids: Collection[int]
    ) -> dict[str, tuple[int, bytes]]:
        """Return client and order of the nodes that have one client of a round."""
        found: dict[str, list[int]] = {}
        for id in ids:
            found.setdefault(self.roster.node_of.get(id, ""), []).append(id)
        return {
            node: (found[node][0], sent) for node, sent in messages.items() if len(found[node]) == 1
        }

    @property
    def _wall(self) -> WallTiming | None:
        """The time of rounds that leave late clients out; None: they wait for ``round_seconds``."""
        return self.fed.timing if isinstance(self.fed.timing, WallTiming) else None

    def acknowledge(self, round: int, clients: Sequence[int]) -> None:
        self.since.update(dict.fromkeys(clients, round))

    def add_under_masks(self, asked: MaskedRound) -> tuple[SumForm, Outcome]:
        from fl_lightning.deploy.server.secure import add_up_on_nodes

        def ask(phase: str, messages: Mapping[int, bytes]) -> Iterator[tuple[int, bytes]]:
            return self._ask(asked.round, phase, messages)

        started, keeps_ring = time.monotonic(), self.randomness is from_system
        # a repeated private round has no second sum, and of all neighbours there is no ring
        keeps_ring &= self.fed.aggregation.privacy is None and asked.settings.neighbours != "all"
        run_dir = self.fed.run_dir if keeps_ring else None
        added = add_up_on_nodes(asked, self.forms, ask, self.randomness, run_dir)
        self.mail.traffic.beside_training[-1] += time.monotonic() - started
        return added

    def evaluate_clients(self, round: int) -> ClientSums:
        if not is_measured_on_nodes(self.fed):
            return ClientSums()
        about = {
            "run": self.run,
            "config": self.digest,
            "round": round,
            "deterministic": self.deterministic,
        }
        return ask_nodes(self.roster, about, self.since, self.rules.round_seconds)

    def notes(self) -> dict[str, Any]:
        """Return the run's id among the nodes and its directory, which node has which clients,
        whether they keep something, what messages have cost, and what a private run has spent: its
        last round says less where later ones were taken back."""
        about: dict[str, Any] = {
            "transport": self.mail.transport.name,
            "run": self.run,
            "directory": str(self.fed.run_dir.absolute()),
            "nodes": self.roster.clients(),
            "clients_keep": self.keeps,
        }
        if (privacy := self.fed.aggregation.privacy) is not None:
            epsilon = privacy.epsilon if privacy.settings.noise_multiplier else None
            about["privacy"] = {"noisy_sums": privacy.releases, "epsilon": epsilon}
        if self.fed.data.apart:
            sizes = self.fed.data.sizes
            about["examples"] = {str(id): int(size) for id, size in enumerate(sizes) if size}
        return {"deployment": {**about, "messages": asdict(self.mail.traffic)}}

    def close(self) -> None:
        self.lost.warn()
        self.mail.transport.close()

    def _messages(self, tasks: Sequence[ClientTask], terms: Mapping[str, Any]) -> dict[str, bytes]:
        """Return the message of each node that has clients of this round, with what a private one
        adds."""
        orders: dict[str, list[dict[str, int]]] = {}
        parts: dict[str, dict[bytes, int]] = {}
        states: dict[bytes, bytes] = {}
        for task in tasks:
            id = task.client.id
            node = self.roster.node_of.get(id)
            if node is None:
                continue
            mine = parts.setdefault(node, {})
            order = {
                "client": id,
                "epochs": task.epochs,
                "steps": task.steps,
                "since": self.since.get(id, 0),
            }
            message = bytes(task.message)  # itself, where it is no view
            order["message"] = mine.setdefault(message, len(mine))
            if self.fed.aggregation.masks is not None:
                if message not in states:
                    states[message] = beside_broadcast(self.fed.method, message)
                order["state"] = mine.setdefault(states[message], len(mine))
            orders.setdefault(node, []).append(order)
        privacy = self.fed.aggregation.privacy
        about = {
            "kind": "train",
            "run": self.run,
            "config": self.digest,
            "round": tasks[0].round,
            "seed": self.fed.seed,
            "cohort": self.fed.method.cohort,
            "checkpoints": [] if self.fed.files is None else rounds_kept(self.fed.files.run_dir),
            "deterministic": self.deterministic,
            "clip_norm": None if privacy is None else privacy.clip_norm,
            **terms,
        }
        return {
            node: Message({**about, "orders": each}, tuple(parts[node])).to_bytes()
            for node, each in orders.items()
        }

    def _results(
        self, node: str, answer: Message, tasks: Mapping[int, ClientTask]
    ) -> Iterator[ClientResult]:
        """Yield the results in an answer that are of the clients which the node was to train."""
        name = self.roster.name(node)
        secure = self.fed.aggregation.masks is not None
        if answer.kind != ("kept" if secure else "trained"):
            log.warning("node %s did not train: %s", name, reason_of(answer.header))
            if node in self.roster.names:
                self.roster.forget(node, "is checked again before the next round")
            return
        try:
            entries = results_of(answer, len(tasks))
        except MessageError as error:
            log.warning(
                "node %s: its answer cannot be read (%s): its clients count as dropped", name, error
            )
            return
        unread: list[MessageError] = []
        for entry in entries:
            try:
                read = Trained.from_entry(entry, answer.parts, secure=secure)
            except MessageError as error:
                unread.append(error)
                continue
            mine = read.client in tasks and self.roster.node_of.get(read.client) == node
            if read.reason:
                log.warning("node %s: client %d: %s", name, read.client, read.reason)
                if mine and read.lost and self._may_be_lost(node, read.client):
                    self.refused.add(read.client)
                continue
            if not mine:
                log.warning("node %s: client %d was not asked of it", name, read.client)
                continue
            keeps = read.keeps and self.may_keep
            self.keeps = bool(self.keeps) or keeps
            self.keepers |= {node} if keeps else set()
            if read.form is not None:
                self.forms[read.client] = read.form
                client = tasks[read.client].client
                yield ClientResult(
                    client, b"", {}, {}, 0, status="trained" if read.form.parts else "rejected"
                )
            elif missing := self._missing_terms(read):
                log.warning(
                    "node %s: client %d has no %s: it is dropped", name, read.client, missing[0]
                )
            else:
                if read.losses is None:
                    log.warning(
                        "node %s: client %d: a loss is not finite and not counted",
                        name,
                        read.client,
                    )
                client, losses = tasks[read.client].client, self._losses(name, read)
                yield ClientResult(client, read.upload, {}, losses, read.steps)
        if unread:
            more = f", nor {len(unread) - 1} more" if len(unread) > 1 else ""
            log.warning("node %s: a result cannot be read (%s)%s", name, unread[0], more)

    def _losses(self, name: str, read: Trained) -> dict[str, Mean]:
        """Return the losses of a client that are counted: each name is a column of the run's
        tables, so one node cannot add names for ever."""
        losses = dict(read.losses or {})
        if len(self.loss_names | losses.keys()) <= MAX_RUN_LOSSES:
            self.loss_names |= losses.keys()
        elif new := losses.keys() - self.loss_names:
            log.warning(
                "node %s: client %d: %d losses are not counted: a run has %d names of them at most",
                name,
                read.client,
                len(new),
                MAX_RUN_LOSSES,
            )
        return {loss: mean for loss, mean in losses.items() if loss in self.loss_names}

    def _may_be_lost(self, node: str, client: int) -> bool:
        """Return whether a client can have lost what it kept: its upload has counted, and clients
        keep something, as the method declares or another node has shown."""
        method = self.fed.method
        keeps = method.keeps_state or method.personalised or bool(self.keepers - {node})
        return keeps and self.since.get(client, 0) > 0

    def _missing_terms(self, read: Trained) -> list[str]:
        """Return the losses of the method's terms that a client with losses lacks."""
        wanted = (
            [f"loss_{term.name}" for term in self.fed.method.active_terms()] if read.losses else []
        )
        return [name for name in wanted if name not in (read.losses or {})]

    def _ask(
        self, round: int, phase: str, messages: Mapping[int, bytes]
    ) -> Iterator[tuple[int, bytes]]:
        """Send the messages of one phase of a secure sum to clients, by id, and yield client and
        answer."""
        about = {"kind": "phase", "run": self.run, "round": round, "phase": phase}
        asked: dict[str, list[int]] = {}
        for id in sorted(messages.keys() & self.roster.node_of.keys()):
            asked.setdefault(self.roster.node_of[id], []).append(id)
        orders = {
            node: Message({**about, "clients": ids}, tuple(messages[id] for id in ids)).to_bytes()
            for node, ids in asked.items()
        }
        for node, answer in self.roster.exchange(orders, self.rules.round_seconds):
            header = answer.header
            if any(header.get(name) != value for name, value in about.items()):
                log.warning(
                    "node %s leaves the secure sum: %s", self.roster.name(node), reason_of(header)
                )
                continue
            try:
                found = phase_parts(answer)
            except MessageError as error:
                name = self.roster.name(node)
                log.warning(
                    "node %s leaves the secure sum: its answer cannot be read: %s", name, error
                )
                continue
            yield from ((id, found[id]) for id in asked[node] if id in found)
