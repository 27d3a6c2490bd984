"""Messages over a Unix socket: a node that stays, and those who bring it messages from the same
machine.

A message is its length as 8 bytes (big endian) and then its bytes, in both directions; one
connection carries one message and its answer. The socket is a file that only its owner can open.
This file needs neither torch nor Flower: a process that only carries a message starts fast.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger("fl_lightning")
LENGTH = struct.Struct(">Q")
CHUNK_BYTES = 2**20
MAX_MESSAGE_BYTES = 2**36  # 64 GiB; a longer one is no message
MAX_PATH_BYTES = 100  # what Linux takes as the name of a socket, less a margin


def ask(path: Path, message: bytes, timeout: float) -> bytes:
    """Return a node's answer to a message.

    Args:
        timeout: seconds that each step of the connection may take without any byte.

    Raises:
        OSError: nobody listens, nothing came in time (TimeoutError), or the node went away.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout)
        connection.connect(str(path))
        send(connection, message)
        return receive(connection)


def listens(path: Path) -> bool:
    """Return whether a node listens there."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(1.0)
            connection.connect(str(path))
            return True
    except OSError:
        return False


def serve(
    path: Path, answer: Callable[[bytes], bytes], goes_on: Callable[[], bool] = lambda: True
) -> None:
    """Answer messages, one at a time, until ``goes_on`` says otherwise; it is asked every second.

    Raises:
        OSError: another process listens there, or the socket cannot be made.
    """
    if listens(path):
        raise OSError(f"{path}: another node listens there")
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        before = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
        listener.listen(64)
        listener.settimeout(1.0)
        while goes_on():
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            with connection:
                connection.settimeout(60.0)
                try:
                    message = receive(connection)
                except OSError:  # somebody who only looked whether this node listens
                    continue
                try:
                    send(connection, answer(message))
                except OSError as error:
                    log.warning("the answer was not wanted any more (%s)", error)


def send(connection: socket.socket, message: bytes) -> None:
    connection.sendall(LENGTH.pack(len(message)))
    connection.sendall(message)


def receive(connection: socket.socket) -> bytes:
    """Return the next message.

    Raises:
        OSError: the connection ended before it was whole, or it is none.
    """
    (length,) = LENGTH.unpack(_exactly(connection, LENGTH.size))
    if length > MAX_MESSAGE_BYTES:
        raise OSError(f"a message of {length} bytes is none")
    return _exactly(connection, length)


def _exactly(connection: socket.socket, length: int) -> bytes:
    found = bytearray()
    while len(found) < length:
        more = connection.recv(min(CHUNK_BYTES, length - len(found)))
        if not more:
            raise ConnectionError("the connection ended")
        found += more
    return bytes(found)
