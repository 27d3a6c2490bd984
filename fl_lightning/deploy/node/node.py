"""What a node does with a message: it checks that it fits a run, and trains its own clients. Free
of Flower.

A node builds method and data from its own installed packages and the run's configuration. The
configuration travels, code never does: :mod:`fl_lightning.deploy.protocol.gate` says what a
configuration may name, and nothing else is imported. What a client keeps stays on the node's disk.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_lightning.cli.import_gate import only_imports
from fl_lightning.compatibility import Run, check_run
from fl_lightning.deploy.node.evaluating import evaluate_here
from fl_lightning.deploy.node.states import StateFolder, run_id
from fl_lightning.deploy.node.told import told
from fl_lightning.deploy.protocol.answers import MAX_REASON
from fl_lightning.deploy.protocol.gate import check_config
from fl_lightning.deploy.protocol.identity import describe
from fl_lightning.deploy.protocol.messages import Message, MessageError, printable, refusal
from fl_lightning.deploy.protocol.private import take_up
from fl_lightning.deploy.protocol.server_state import take_over
from fl_lightning.engines import ClientResult, ClientTask, SequentialEngine
from fl_lightning.engines.determinism import deterministic
from fl_lightning.errors import InputError, LostStateError, ThreePartError, require
from fl_lightning.federation import Federation
from fl_lightning.privacy import NoisySums, Randomness, from_system
from fl_lightning.support import disk
from fl_lightning.wire import Payload

if TYPE_CHECKING:  # it needs the extra privacy
    from fl_lightning.deploy.node.secure import SecureRounds

log = logging.getLogger("fl_lightning")

Build = Callable[[Path], Federation]
"""Returns the federation that a configuration file describes: data dealt out, network built,
nothing trained."""

Count = Callable[[Path], dict[str, Any]]
"""Returns how many examples of its own a node has for the run of a configuration file, and their
form."""

UID = re.compile(rb"[0-9a-f]{32}")


@dataclass(frozen=True)
class NodeSettings:
    """What a node is.

    Args:
        folder: where configurations and what clients keep lie.
        partition_id, num_partitions: it has the clients whose id leaves the remainder
            ``partition_id`` when divided by ``num_partitions``.
        name: its name in logs and in ``metadata.json``; default: the machine's name.
        allow: further packages whose classes a run may name.
    """

    folder: Path
    partition_id: int = 0
    num_partitions: int = 1
    name: str = field(default_factory=socket.gethostname)
    allow: Collection[str] = ()

    def clients(self, num_clients: int) -> range:
        """Return the ids of the node's clients in a federation of so many."""
        return range(self.partition_id, num_clients, self.num_partitions)


class Node:
    """Answers messages, one at a time.

    Args:
        settings: what the node is.
        build: builds a federation from a configuration file of this node.
        count: counts the examples that only this node has; None: it has none.
        randomness: what its clients' noise is drawn from.
        epoch: what a server tells this process from an earlier one of the same node by, 8 to 64
            hexadecimal digits; None: it is drawn.
    """

    def __init__(
        self,
        settings: NodeSettings,
        build: Build,
        count: Count | None = None,
        randomness: Randomness = from_system,
        epoch: str | None = None,
    ) -> None:
        self.settings, self.build, self.count, self.randomness = settings, build, count, randomness
        self.about = {"node": settings.name, "epoch": epoch or uuid.uuid4().hex}  # of every answer
        self.states = StateFolder(settings.folder / "states")
        self.built: tuple[str, Federation, SequentialEngine] | None = None
        self._sums: SecureRounds | None = None

    def answer(self, data: bytes) -> bytes:
        """Return the answer to a message. Nothing is raised: a node outlives what it cannot do."""
        try:
            message = Message.from_bytes(data)
            if message.kind == "check":
                return self._check(message)
            if message.kind == "census":
                return self._census(message)
            if message.kind == "train":
                return self._train(message)
            if message.kind == "evaluate":
                return self._evaluate(message)
            if message.kind == "phase":
                header, parts = self.sums.answer(message)
                return Message({**header, **self.about}, tuple(parts)).to_bytes()
            # it is answered with nothing, so that the server learns of the line
            if message.kind == "echo":
                return Message({"kind": "echoed", **self.about}).to_bytes()
            raise MessageError(
                f"a message of the kind {message.kind!r}, which this version does not know"
            )
        except (ThreePartError, MessageError) as error:
            log.error("refused: %s", printable(error, MAX_REASON))
            return refusal(told(error), **self.about)
        except Exception as error:
            log.exception("a message could not be answered")
            return refusal(told(error), **self.about)

    @property
    def sums(self) -> SecureRounds:
        """The node's half of secure sums."""
        from fl_lightning.deploy.node.secure import SecureRounds

        if self._sums is None:
            self._sums = SecureRounds(self.settings.folder / "unmasked")
        return self._sums

    def _sums_given(self, run: str) -> NoisySums:
        """Return the noisy sums of a private run that this node has taken part in."""
        return NoisySums(self.settings.folder / "noisy_sums" / f"{run}.csv")

    def uid(self) -> str:
        """Return what tells this node from others, drawn when its folder was made: a node that is
        started again takes its own place."""
        path = self.settings.folder / "uid"
        known = path.read_bytes() if path.exists() else b""
        if not UID.fullmatch(known):  # none yet, or a damaged one
            known = uuid.uuid4().hex.encode()
            self.settings.folder.mkdir(parents=True, exist_ok=True)
            disk.replace(path, known)
        return known.decode()

    def _check(self, message: Message) -> bytes:
        """Keep the run's configuration, build what it describes, and say what that is.

        It is built anew each time: the data may have changed since a run of the same configuration.
        """
        self.built = None
        fed, _ = self._prepared(self._keep(message.parts[0]))
        if fed.aggregation.masks is not None:
            fed.aggregation.masks.check_usable(fed.cohort_size)
        clients = self.settings.clients(fed.data.num_clients)
        about: dict[str, Any] = {
            "kind": "checked",
            **self.about,
            "uid": self.uid(),
            "clients": list(clients),
        }
        if fed.aggregation.privacy is not None and "run" in message.header:
            about["noisy_sums"] = self._sums_given(run_id(message.header["run"])).count
        return Message({**about, "identity": describe(fed, clients)}).to_bytes()

    def _census(self, message: Message) -> bytes:
        """Keep a run's configuration, and say how many examples of its own this node has for it."""
        if self.count is None:
            raise InputError(
                "a run on the nodes' own data", "this node has none", "start it with --data FOLDER"
            )
        digest = self._keep(message.parts[0])
        with only_imports(self._checked(digest)):
            counted = self.count(self._config(digest))
        return Message({**counted, **self.about}).to_bytes()

    def _keep(self, config: bytes) -> str:
        """Write a run's configuration to the disk, if it is one, and return its SHA-256."""
        check_config(config, self.settings.allow)
        digest = sha256(config).hexdigest()
        path = self._config(digest)
        if not path.exists() or path.read_bytes() != config:
            path.parent.mkdir(parents=True, exist_ok=True)
            disk.replace(path, config)
        return digest

    def _touch(self, digest: str) -> None:
        """Note that a configuration is in use: one that has not been for long is removed one
        day."""
        with suppress(OSError):
            os.utime(self._config(digest))

    def _train(self, message: Message) -> bytes:
        """Train clients. Their uploads travel, or under a secure sum stay here."""
        fed, engine = self._prepared(str(message.header["config"]))
        started = time.monotonic()
        privacy, masks = fed.aggregation.privacy, fed.aggregation.masks
        if privacy is not None:
            take_up(privacy, message.header, self._sums_given(run_id(message.header["run"])))
        kept = None if masks is None else self.sums.begin(fed, masks, message)
        results: list[dict[str, Any]] = []
        uploads: list[bytes] = []
        for order in message.header["orders"]:
            try:
                result = self._train_client(fed, engine, message, order)
                broadcast = message.parts[int(order["message"])]
                form = None if kept is None else kept.keep(fed, result, broadcast)
            except Exception as error:  # the other clients of this node still count
                log.exception("client %s could not be trained", printable(order.get("client")))
                lost = {"lost": True} if isinstance(error, LostStateError) else {}
                results.append({"client": order.get("client"), "reason": told(error), **lost})
                continue
            about = {"client": result.client.id, "keeps": bool(result.state)}
            if form is not None:
                results.append({**about, "form": form})
                continue
            measured = result.losses if privacy is None else {}  # no noise is on them
            losses = {name: [mean.total, mean.weight] for name, mean in measured.items()}
            results.append(
                {**about, "steps": result.steps, "losses": losses, "upload": len(uploads)}
            )
            uploads.append(result.upload)
        header = {
            "kind": "trained" if kept is None else "kept",
            **self.about,
            "seconds": time.monotonic() - started,
            "results": results,
        }
        return Message(header, tuple(uploads)).to_bytes()

    def _evaluate(self, message: Message) -> bytes:
        """Evaluate the models of this node's clients."""
        fed, _ = self._prepared(str(message.header["config"]))
        require(
            Run.of(fed, deployed=True).is_measured_on_nodes,
            "an order to evaluate",
            "nodes measure models or data of clients' own, without secure_sum and privacy",
            "let the server evaluate its own model",
        )
        here = self.settings.clients(fed.data.num_clients)
        with deterministic(bool(message.header.get("deterministic", True))):
            header, parts = evaluate_here(fed, message, self.states, here)
        return Message({**header, **self.about}, tuple(parts)).to_bytes()

    def _train_client(
        self, fed: Federation, engine: SequentialEngine, message: Message, order: Mapping[str, Any]
    ) -> ClientResult:
        """Train one client from the state that the server names, and write what it keeps before it
        answers.
        """
        run, round = str(message.header["run"]), int(message.header["round"])
        id, since, name = int(order["client"]), int(order["since"]), self.settings.name
        if id not in self.settings.clients(fed.data.num_clients):
            raise InputError(f"client {id}", f"it is not on node {name}", "check the partitions")
        broadcast = message.parts[int(order["message"])]
        # with its checksum, which an engine in one process can skip
        payload = Payload.from_bytes(broadcast)
        if fed.aggregation.masks is not None:
            take_over(fed.method, payload, message.parts[int(order["state"])])
        state = self.states.load(run, id, since)
        client = fed.data.client(id, state or {})
        labels = fed.data.labels(client)
        task = ClientTask(
            client, round, broadcast, labels, int(order["epochs"]), int(order["steps"])
        )
        lost = LostStateError(
            f"what it kept after round {since}",
            f"it is not in {self.states.folder}",
            "put the node's folder back, or start the run anew",
        )
        try:
            with deterministic(bool(message.header.get("deterministic", True))):
                (result,) = engine.train([task])
        except LostStateError as error:
            raise lost from error
        if state is None and result.state:
            raise lost
        # a client that keeps nothing yet differs from one whose state is lost
        always = fed.method.personalised or fed.method.keeps_state
        then = [int(number) for number in message.header.get("checkpoints", ())]
        self.states.save(
            run, id, round, result.state, started_from=since, checkpoints=then, always=always
        )
        return result

    def _prepared(self, digest: str) -> tuple[Federation, SequentialEngine]:
        """Return the federation of a configuration that was checked, and what trains its
        clients."""
        self._touch(digest)
        if self.built is None or self.built[0] != digest:
            with only_imports(self._checked(digest)):
                fed = self.build(self._config(digest))
            check_run(Run.of(fed, deployed=True))
            if (privacy := fed.aggregation.privacy) is not None:
                privacy.randomness = self.randomness
                log.info(
                    "privacy: this node accounts %d of %d clients in a round, as the server says",
                    privacy.accountant.cohort, privacy.accountant.clients,
                )  # fmt: skip
            self.states.data = fed.data.content_sha256 if fed.data.apart else ""
            self.built = digest, fed, SequentialEngine(fed.fabric, fed.method, fed.data)
        return self.built[1:]

    def _checked(self, digest: str) -> frozenset[str]:
        """Check a configuration on the disk, and return what may be imported for it."""
        path = self._config(digest)
        config = path.read_bytes() if len(digest) == 64 and path.exists() else b""
        if sha256(config).hexdigest() != digest:
            raise InputError(
                f"configuration {digest[:12]}",
                "this node has not checked it",
                "check the node first",
            )
        return check_config(config, self.settings.allow)

    def _config(self, digest: str) -> Path:
        return self.settings.folder / "configs" / f"{Path(digest).name}.yaml"
