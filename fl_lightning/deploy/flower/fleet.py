"""A node's own connection to a SuperLink, in the place of a SuperNode.

A SuperNode starts a process for each message, which imports the app that its SuperLink hands it,
and looks for work every three seconds. A node of this package knows what to do with a message, so
it speaks the SuperLink's Fleet API itself, with the connection that Flower's SuperNode is made of:
its registration, keys, TLS, heartbeats and retries. It never loads an app, so no code reaches it,
and a message costs milliseconds.

The names that this file imports from ``flwr`` are those of versions 1.41 and 1.42, and Flower does
not promise them; ``--connection supernode`` needs none of them.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from fl_lightning.deploy.flower import PART_WAITS, next_look, packed_answer, unpacked
from fl_lightning.deploy.flower.addresses import check_handshake, not_found, require_no_tls
from fl_lightning.deploy.flower.launch import environment
from fl_lightning.errors import InputError, RunStopped, as_bad_input

log = logging.getLogger("fl_lightning")

RECONNECT_SECONDS = 5.0  # between attempts to reach a SuperLink that went away
LET_IN_SECONDS = 90.0  # that a node with a key tries to be let in
"""A node that was killed counts as connected for a minute, and one with the same key is not let in
until then."""

NOT_YET = (
    "not let in yet: its key is not registered there, or its connection from before has not ended"
)

Answer = Callable[[bytes], bytes]


class NotLetInError(Exception):
    """A SuperLink does not let this node in, for the reason that Flower gives."""


def serve(
    address: str,
    answer: Answer,
    home: Path,
    *,
    name: str,
    root_certificates: str | None = None,
    private_key: str | None = None,
    goes_on: Callable[[], bool] = lambda: True,
) -> None:
    """Answer the messages of a SuperLink until ``goes_on`` says otherwise; it is asked before each
    look.

    A SuperLink that goes away is waited for: once it is back, the node is there again, as a new one
    if it has been forgotten. So is a place that a node with the same key has not left yet.

    Args:
        address: host and port of the SuperLink.
        answer: makes the answer to a message; it raises nothing.
        home: folder of Flower's own files.
        name: of the node, for the log.
        root_certificates: file with the certificate that signed the SuperLink's; None: no TLS.
        private_key: file with the node's key, in OpenSSH form; None: one that is made for this
            process.

    Raises:
        InputError: the key cannot be read, the SuperLink's certificate does not hold, or this
            version of Flower is another.
        RunStopped: the SuperLink does not let this node in.
    """
    os.environ.update(environment(home))
    connect = _connector(address, root_certificates, private_key)
    connected, started, told = False, time.monotonic(), False
    log.info("node %s looks for the SuperLink at %s", name, address)
    while goes_on():
        if reason := not_found(address):
            if not told:
                log.warning(
                    "%s: its host is not found (%s); the node goes on looking for it",
                    address,
                    reason,
                )
            told = True
            time.sleep(RECONNECT_SECONDS)
            continue
        told = False
        check_handshake(address, root_certificates, "--root_certificates")
        why = "connection lost"
        try:
            with connect() as calls:
                log.info("node %s is connected to %s as SuperNode %s", name, address, calls[0])
                connected = True
                _work(calls, answer, goes_on)
        except NotLetInError as error:
            known = private_key is not None and time.monotonic() < started + LET_IN_SECONDS
            if not connected:
                require_no_tls(address, root_certificates, "--root_certificates")
            if not (connected or known):
                raise RunStopped(
                    f"no connection to the SuperLink at {address} ({error})",
                    "it must run there, and know this node's key where it asks for keys",
                    "put that right, and start the node again",
                ) from None
            why = f"not let in ({error})" if connected else f"{NOT_YET} ({error})"
        if goes_on():
            log.warning("%s: %s; trying again", address, why)
            time.sleep(RECONNECT_SECONDS)


def _connector(
    address: str, root_certificates: str | None, private_key: str | None
) -> Callable[[], AbstractContextManager[tuple[Any, ...]]]:
    given = f"--connection direct with flwr {version('flwr')}"
    instead = "write --connection supernode, or install flwr 1.42"
    with as_bad_input(given, "its connection is another than that of 1.42", instead, ImportError):
        from flwr.supercore.retry import http_retry
        from flwr.supernode import fleet_http_connection
        from flwr.supernode.fleet_http_connection import http_request_response
    fleet_http_connection.flwr_exit = _refuse
    # of ``os`` both use getpid and kill alone, to end a process that a SuperLink does not know (any
    # more)
    http_retry.os = SimpleNamespace(getpid=os.getpid, kill=_forgotten)
    fleet_http_connection.os = SimpleNamespace(getpid=os.getpid, kill=_end_heartbeats)
    keys = None if private_key is None else _keys(Path(private_key))
    return partial(
        http_request_response, address, root_certificates is None, root_certificates, keys
    )


def _refuse(code: int, message: str = "", **details: Any) -> NoReturn:
    """Stand in for Flower's exit, which five seconds later ends the process, whoever catches it."""
    raise NotLetInError(" ".join(f"{message} exit code {code} of Flower".split()))


def _forgotten(pid: int, number: int) -> NoReturn:
    """Stand in for the signal with which Flower ends a process that its SuperLink does not know any
    more, so that the node connects anew: a SuperLink that was started without its database knows no
    node.
    """
    raise NotLetInError("the SuperLink does not know this node any more")


def _end_heartbeats(pid: int, number: int) -> NoReturn:
    """Stand in for the same signal in the thread of heartbeats, which ends; the next look for work
    finds the same."""
    raise SystemExit


def _keys(path: Path) -> tuple[Any, Any]:
    """Return a private key and its public one."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    given = f"{path}, the file of --private_key"
    with as_bad_input(given, "it cannot be read", "let this user read it"):
        content = path.read_bytes()
    rule = "it is a private key of an elliptic curve in OpenSSH form"
    instead = "make one: python -m fl_lightning.deploy.certificates certs --nodes 1"
    with as_bad_input(given, rule, instead, ValueError, UnsupportedAlgorithm):
        key = load_ssh_private_key(content, None)
    if not isinstance(key, EllipticCurvePrivateKey):
        raise InputError(given, rule, instead)
    return key, key.public_key()


def _work(calls: tuple[Any, ...], answer: Answer, goes_on: Callable[[], bool]) -> None:
    """Answer messages until the connection ends."""
    from flwr.supercore.run import RunNotRunningException

    heard = time.monotonic()
    while goes_on():
        try:
            if _answer_next(calls, answer):
                heard = time.monotonic()
                continue
        except RunNotRunningException:
            log.warning("the run has ended; its message is not answered")
        time.sleep(next_look(time.monotonic() - heard))


def _answer_next(calls: tuple[Any, ...], answer: Answer) -> bool:
    """Answer the next message; return whether there was one."""
    from flwr.app import Message
    from flwr.supercore.inflatable.inflatable_object import (
        get_all_nested_objects,
        get_object_tree,
        no_object_id_recompute,
    )
    from flwr.supercore.inflatable.inflatable_utils import (
        pull_and_inflate_object_from_tree,
        push_objects,
    )

    _, receive, send, _, _, pull, push, confirm = calls
    received = receive()
    if received is None:
        return False
    started = time.monotonic()
    head, tree = received
    run = head.metadata.run_id
    message = pull_and_inflate_object_from_tree(
        tree, partial(pull, run), partial(confirm, run), return_type=Message, **PART_WAITS
    )
    message.metadata.__dict__["_message_id"] = tree.object_id  # which is not in its own content
    reply = Message(packed_answer(answer(unpacked(message.content))), reply_to=message)
    with no_object_id_recompute():  # else each look at an id hashes the whole answer
        reply.metadata.__dict__["_message_id"] = reply.object_id
        wanted, session = send(reply, get_object_tree(reply), time.monotonic() - started)
        push_objects(
            get_all_nested_objects(reply), partial(push, run, session), object_ids_to_push=wanted
        )
    return True
