"""Messages between the server and its nodes: a JSON header and parts of bytes, on any transport.

A message is ``FLD1``, the length of the header as 4 bytes (big endian), the header, and the parts
one after another; the header's entry ``parts`` has their lengths. Payloads travel as parts,
untouched. Nothing in a message is code, and nothing in one is ever executed.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MAGIC = b"FLD1"
HEAD = struct.Struct(">4sI")
MAX_HEADER_BYTES = 2**26
HEADER_BYTES, CLIENT_BYTES = 2**20, 400
"""Most bytes in the header of an answer: without its clients, and for one client's result and
losses."""
FORM_BYTES = 4096
"""More of a client's result where it names the sums that its masked vector is of."""
MAX_NAME = 100  # characters of a name


class MessageError(ValueError):
    """Bytes that are no message, or a message that is not what it has to be."""


def printable(value: object, most: int = MAX_NAME) -> str:
    """Return what a node has sent as text of one line, without characters that a terminal acts on,
    of at most so many characters."""
    text = " ".join(str(value)[: 4 * most].split())
    shown = "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode()
        for each in text[:most]
    )
    return shown if len(shown) <= most and len(text) <= most else f"{shown[: most - 3]}..."


def longest_header(clients: int, *, forms: bool = False) -> int:
    """Return how many bytes the header of an answer may have, which is read as a whole.

    Args:
        clients: clients that a node may have.
        forms: whether their results name the sums of masked vectors.
    """
    return min(MAX_HEADER_BYTES, HEADER_BYTES + clients * (CLIENT_BYTES + FORM_BYTES * forms))


@dataclass(frozen=True)
class Message:
    """A message that has been read.

    Args:
        header: its entries. ``kind`` says what it is: ``census``, ``check``, ``train``,
            ``evaluate``, ``phase`` or ``echo`` to a node, ``counted``, ``checked``, ``trained``,
            ``kept``, ``evaluated``, ``phase``, ``echoed`` or ``refused`` from one.
        parts: payloads that the header refers to by position.
    """

    header: Mapping[str, Any]
    parts: Sequence[bytes] = field(default_factory=tuple)

    @property
    def kind(self) -> str:
        return str(self.header.get("kind", ""))

    def to_bytes(self) -> bytes:
        """Return the message as bytes."""
        header = json.dumps({**self.header, "parts": [len(part) for part in self.parts]}).encode()
        return b"".join([HEAD.pack(MAGIC, len(header)), header, *self.parts])

    @classmethod
    def from_bytes(cls, data: bytes, longest: int = MAX_HEADER_BYTES) -> Message:
        """Read a message.

        Args:
            data: the message.
            longest: bytes that its header may have, of which nothing is read where it has more:
                JSON takes some twenty times its length in memory.

        Raises:
            MessageError: the bytes are no message, or not all of one.
        """
        try:
            magic, length = HEAD.unpack_from(data)
            if magic != MAGIC:
                raise ValueError(f"it begins with {data[: HEAD.size]!r}")
            if length > longest:
                raise ValueError(f"its header has {length} bytes, above {longest}")
            header = json.loads(data[HEAD.size : HEAD.size + length])
            sizes = header.pop("parts")
            if not isinstance(sizes, list) or any(
                type(size) is not int or size < 0 for size in sizes
            ):
                raise ValueError("lengths of parts that are none")
            ends = HEAD.size + length + sum(sizes)
        # a header may be nested more deeply than Python reads
        except (
            struct.error,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            RecursionError,
        ) as error:
            raise MessageError(f"{len(data)} bytes that are no message ({error})") from error
        if ends != len(data):
            raise MessageError(f"{len(data)} bytes that are no message, or not all of one")
        parts, at = [], HEAD.size + length
        for size in sizes:
            parts.append(data[at : at + size])
            at += size
        return cls(header, tuple(parts))


def cut(data: bytes, longest: int) -> list[bytes]:
    """Return bytes cut into pieces of at most so many."""
    return [data[at : at + longest] for at in range(0, len(data), longest)]


def cut_in_parts(data: bytes, longest: int) -> list[bytes]:
    """Return a message cut into its header and its parts, and these into pieces of at most so many
    bytes.

    Nodes whose messages have a part in common have pieces in common.

    Raises:
        MessageError: the bytes are no message.
    """
    parts = Message.from_bytes(data).parts
    header = data[: len(data) - sum(map(len, parts))]
    return [piece for each in (header, *parts) for piece in cut(each, longest)]


def refusal(reason: str, **entries: Any) -> bytes:
    """Return the answer of a node that does not do what it is asked, with the reason in one
    line."""
    return Message({"kind": "refused", "reason": reason, **entries}).to_bytes()
