"""Nodes on this machine: in this process, or processes of their own behind Unix sockets. They
answer the same messages as over a network, and need no Flower."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from queue import Empty, Queue
from threading import Thread

from fl_lightning.deploy.node import sockets
from fl_lightning.deploy.node.node import Node

log = logging.getLogger("fl_lightning")


class InProcess:
    """Nodes that are objects of this process and answer one after another; they are never late.

    Args:
        nodes: by key.
    """

    name = "in process"

    def __init__(self, nodes: Mapping[str, Node]) -> None:
        self.by_key = dict(nodes)

    def nodes(self) -> Sequence[str]:
        return list(self.by_key)

    def registered(self) -> Mapping[str, float]:
        return {}

    def exchange(
        self, messages: Mapping[str, bytes], timeout: float
    ) -> Iterator[tuple[str, bytes]]:
        for key, message in messages.items():
            if key in self.by_key:
                yield key, self.by_key[key].answer(message)

    def close(self) -> None:
        pass


class Sockets:
    """Nodes that are processes of this machine, each behind a Unix socket.

    Args:
        paths: sockets of the nodes; one where nobody listens is a node that is not connected.
    """

    name = "sockets"

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = {str(path): path for path in paths}

    def nodes(self) -> Sequence[str]:
        return [key for key, path in self.paths.items() if sockets.listens(path)]

    def registered(self) -> Mapping[str, float]:
        return {}

    def exchange(
        self, messages: Mapping[str, bytes], timeout: float
    ) -> Iterator[tuple[str, bytes]]:
        answers: Queue[tuple[str, bytes | None]] = Queue()
        for key, message in messages.items():
            # a thread that nobody waits for any more ends with its own timeout, or with the process
            Thread(target=self._ask, args=(key, message, timeout, answers), daemon=True).start()
        waiting, ends = set(messages), time.monotonic() + timeout
        while waiting:
            try:
                key, answer = answers.get(timeout=max(0.0, ends - time.monotonic()))
            except Empty:
                return
            waiting.discard(key)
            if answer is not None:
                yield key, answer

    def _ask(
        self, key: str, message: bytes, timeout: float, answers: Queue[tuple[str, bytes | None]]
    ) -> None:
        answer = None
        try:
            answer = sockets.ask(self.paths[key], message, timeout)
        except OSError as error:
            log.warning("node %s did not answer (%s)", key, error)
        answers.put((key, answer))

    def close(self) -> None:
        pass
