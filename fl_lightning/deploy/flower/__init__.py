"""The apps that Flower runs: a ServerApp for the server's half, a ClientApp that brings messages to
a node.

Flower (``flwr``, the extra ``deploy``) is imported by this file and
:mod:`fl_lightning.deploy.flower.fleet` alone, and only when an app is asked for or a node connects.

The ClientApp is for nodes behind a SuperNode of Flower. It is a process per message, which Flower
starts: it hands the message to the node's own process, which stays, and so starts no torch. In
Flower's own simulation it is the node (:mod:`fl_lightning.deploy.flower.simulated`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cache, partial
from pathlib import Path
from typing import Any

from fl_lightning.deploy.flower import simulated
from fl_lightning.deploy.node import sockets
from fl_lightning.deploy.protocol.messages import cut, cut_in_parts, printable, refusal

log = logging.getLogger("fl_lightning")

RECORD, ENTRY = "fl_lightning", "message"
"""Where a message of ours lies in one of Flower's: in ConfigRecords of this name and a number,
under this key."""
# of a message in one record; Flower sends each record by itself, and none above 2 GiB
PART_BYTES = 2**26
MESSAGE_TYPE = "train"
FIRST_LOOK_SECONDS, LAST_LOOK_SECONDS = 0.1, 1.0  # between looks for messages, at first and at most
LOOK_SHARE = 0.1  # of the time without a message that passes until the next look
PART_WAITS = {"initial_backoff": 0.05, "backoff_cap": 0.5, "max_concurrent_pulls": 1}
"""Seconds between looks for a part of a message that is on its way, one part at a time; Flower
waits 1, 2, 4 ... seconds and looks for two at once."""
ANSWER_WAITS = {**PART_WAITS, "backoff_cap": 0.1}  # of the server, which alone looks for answers
NODE_SECONDS = 43_200.0  # that a node may take for an answer; Flower keeps messages as long
# that a message lives longer than its answer is waited for; clocks may differ by some
EXTRA_SECONDS = 60.0


def __getattr__(name: str) -> Any:
    """Return ``server_app`` or ``client_app``, made when it is first asked for.

    Raises:
        AttributeError: it is neither.
    """
    makers = {"server_app": _server_app, "client_app": _client_app}
    if name not in makers:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = app = makers[name]()
    return app


def _server_app() -> Any:
    from flwr.serverapp import ServerApp

    server_app = ServerApp()  # under this name, for which Flower searches the text of this file

    @server_app.main()
    def main(grid: Any, context: Any) -> None:
        from fl_lightning.deploy.server.job import run_job

        logging.getLogger("flwr").addFilter(RefusalFilter())
        run_job(Path(str(context.run_config["job"])), GridTransport(grid))

    return server_app


def _client_app() -> Any:
    from flwr.app import Message
    from flwr.clientapp import ClientApp

    client_app = ClientApp()  # as above

    @client_app.train()
    def bring(message: Any, context: Any) -> Any:
        return Message(packed_answer(_answer(unpacked(message.content), context)), reply_to=message)

    return client_app


class RefusalFilter(logging.Filter):
    """Has Flower's log say a refusal in one line: where in the code it was raised helps nobody, nor
    does what Flower says of unhandled exceptions."""

    refused = False

    def filter(self, record: logging.LogRecord) -> bool:
        from fl_lightning.deploy.server.job import RunRefused

        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, RunRefused):
            self.refused = True
            record.msg, record.args, record.exc_info = f"the run ended: {error}", (), None
        return not (self.refused and record.getMessage().startswith("Exit Code: "))


def packed(messages: Iterable[Iterable[bytes]]) -> list[Any]:
    """Return messages of ours, each in pieces, as contents of Flower's messages, each a
    ``RecordDict``.

    A record is two more requests to the SuperLink, and is sent once however many messages have it:
    orders are cut so that a broadcast is a record by itself, and answers only where they are too
    long for one. Flower hashes each record object, so messages share those of the pieces that they
    have in common.
    """
    from flwr.app import ConfigRecord, RecordDict

    record = cache(lambda piece: ConfigRecord({ENTRY: piece}))
    return [
        RecordDict({f"{RECORD}.{number}": record(piece) for number, piece in enumerate(pieces)})
        for pieces in messages
    ]


def packed_answer(message: bytes) -> Any:
    """Return a node's answer as the content of one of Flower's messages."""
    (content,) = packed([cut(message, PART_BYTES)])
    return content


def unpacked(content: Any) -> bytes:
    """Return the message of ours in the content of one of Flower's; no bytes where there is
    none."""
    try:
        return b"".join(content[f"{RECORD}.{number}"][ENTRY] for number in range(len(content)))
    except (KeyError, TypeError):  # whoever is let in by the SuperLink can send anything
        return b""


def next_look(waited: float) -> float:
    """Return the seconds until the next look for a message, after so many seconds without one.

    A look costs the SuperLink 7 ms of a core and the one who looks 2 ms, which clients that train
    then lack.
    """
    return min(max(FIRST_LOOK_SECONDS, LOOK_SHARE * waited), LAST_LOOK_SECONDS)


def _answer(message: bytes, context: Any) -> bytes:
    """Return the node's answer.

    Args:
        context: Flower's; its ``node_config`` has the ``socket`` where the node's process listens,
            or of a simulated node its number.
    """
    config = context.node_config
    if simulated.in_worker():
        job = context.run_config["job"]
        number = config["partition-id"]
        of = config["num-partitions"]
        return simulated.answer(message, Path(str(job)), int(number), int(of))
    path = config.get("socket")
    if path is None:
        return refusal(
            "this SuperNode has no socket in its --node-config; start it with fl_lightning node"
        )
    try:
        return sockets.ask(Path(str(path)), message, NODE_SECONDS)
    except OSError as error:
        log.error("the node's process does not answer at %s: %s", path, error)
        return refusal("the node's process does not answer; start it again")


class GridTransport:
    """Carries messages through Flower's grid: the SuperLink, and the SuperNodes that ask it for
    work.

    A node that its SuperLink has not heard of for a minute is not connected.
    """

    name = "flower"

    def __init__(self, grid: Any) -> None:
        self.grid = grid
        _wait_briefly_for_parts()

    def nodes(self) -> Sequence[str]:
        return [str(id) for id in self.grid.get_node_ids()]

    def registered(self) -> Mapping[str, float]:
        if not hasattr(self.grid, "get_nodes"):  # not in every version of Flower
            return {}
        found = {}
        for node in self.grid.get_nodes():
            with suppress(ValueError):
                found[str(node.node_id)] = datetime.fromisoformat(node.registered_at).timestamp()
        return found

    def exchange(
        self, messages: Mapping[str, bytes], timeout: float
    ) -> Iterator[tuple[str, bytes]]:
        from flwr.app import Message

        ends = time.monotonic() + timeout
        waiting: dict[str, str] = {}
        # Flower drops what is older than its time to live: no node trains what nobody waits for any
        # more
        ttl = timeout + EXTRA_SECONDS
        contents = packed(cut_in_parts(data, PART_BYTES) for data in messages.values())
        sent = [
            Message(content, int(node), MESSAGE_TYPE, ttl=ttl)
            for node, content in zip(messages, contents, strict=True)
        ]
        for node, id in zip(messages, self.grid.push_messages(sent), strict=True):
            if id:
                waiting[id] = node
        heard = time.monotonic()
        while waiting:
            replies = self.grid.pull_messages(list(waiting))
            for reply in replies:
                node = waiting.pop(str(reply.metadata.reply_to_message_id), "")
                if not node:
                    continue
                if reply.has_error():
                    log.warning(
                        "node %s: %s (%d)", node, printable(reply.error.reason), reply.error.code
                    )
                else:
                    yield node, unpacked(reply.content)
                heard = time.monotonic()
            now = time.monotonic()
            if waiting and now >= ends:
                return
            if waiting and not replies:
                time.sleep(min(next_look(now - heard), ends - now))

    def close(self) -> None:
        pass


def _wait_briefly_for_parts() -> None:
    """Have the grid of this process look sooner for the parts of an answer, which is announced
    before they are sent. Where Flower has changed its inside, answers take a second longer."""
    try:
        from flwr.supercore.inflatable.inflatable_utils import pull_objects
        from flwr.superlink.grid import http_grid
    except ImportError:
        return
    if hasattr(http_grid, "pull_objects"):
        http_grid.pull_objects = partial(pull_objects, **ANSWER_WAITS)
