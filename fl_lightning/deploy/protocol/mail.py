"""Messages to nodes and their answers, on any transport, and what they cost."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fl_lightning.deploy.protocol.messages import Message, MessageError, longest_header

log = logging.getLogger("fl_lightning")


class Transport(Protocol):
    """What carries messages to nodes and their answers back."""

    name: str

    def nodes(self) -> Sequence[str]:
        """Return the keys of the nodes that are connected now."""

    def registered(self) -> Mapping[str, float]:
        """Return when nodes that are connected now were registered, in seconds since 1970, by key;
        a node that is not in it may have been at any time.

        A key that is registered beforehand stays that of its node. A node without one registers
        itself each time that it connects, under another key.
        """

    def exchange(
        self, messages: Mapping[str, bytes], timeout: float
    ) -> Iterator[tuple[str, bytes]]:
        """Send one message to each node, and yield node and answer as answers come.

        A node that fails, leaves or does not answer within ``timeout`` seconds yields nothing, and
        nothing that it sends later is ever yielded.
        """

    def close(self) -> None:
        """Let go of the nodes; it can be called twice."""


@dataclass
class Traffic:
    """What a deployment has cost beside its training, since the server was started.

    Args:
        sent, received: bytes of messages with their headers, as the transport was given them.
        answers: orders of a round that a node has answered.
        beside_training: seconds from the first order of a round to a node's answer in which this
            node did not train: for each round the mean over its answers, 0 without any, and the
            phases of its secure sum.
    """

    sent: int = 0
    received: int = 0
    answers: int = 0
    beside_training: list[float] = field(default_factory=list)


@dataclass
class Mail:
    """Sends messages and reads answers.

    Args:
        transport: carries the messages.
        longest_header: bytes that the header of an answer may have.
        traffic: what they have cost so far.
        name_of: returns the name of a node for the log, given its key.
    """

    transport: Transport
    longest_header: int = longest_header(0)
    traffic: Traffic = field(default_factory=Traffic)
    name_of: Callable[[str], str] = str

    def exchange(
        self, messages: Mapping[str, bytes], seconds: float, *, refuses: bool = False
    ) -> Iterator[tuple[str, Message]]:
        """Send one message to each node, and yield node and answer of the answers that can be read.

        Args:
            messages: one for each node, by its key.
            seconds: that answers are waited for.
            refuses: yield an answer that cannot be read too, as a refusal that says so.
        """
        if not messages:
            return
        self.traffic.sent += sum(map(len, messages.values()))
        silent, begun = dict.fromkeys(messages), time.monotonic()
        for node, data in self.transport.exchange(messages, seconds):
            self.traffic.received += len(data)
            silent.pop(node, None)
            try:
                answer = Message.from_bytes(data, self.longest_header)
            except MessageError as error:
                reason = f"its answer cannot be read: {error}"
                if not refuses:
                    log.warning("node %s: %s", self.name_of(node), reason)
                    continue
                answer = Message({"kind": "refused", "reason": reason})
            yield node, answer
        if silent:
            names, took = ", ".join(map(self.name_of, silent)), time.monotonic() - begun
            log.warning("no answer after %.0f seconds, %g at most: %s", took, seconds, names)
