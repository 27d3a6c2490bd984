"""Payloads between client and server: named arrays and packed codes, encoded as bytes.

Layout, little endian::

    header  b"FLPW", version u8, entries u16, body length u64, CRC-32 of all the rest u32        19 bytes
    entry   name length u8, name, type u8, dimensions u8, u32 each, then the data     3 + name + 4 ndim + data

A type below 32 is an index into ``DTYPES``; 32 + b is a stream of b-bit codes without padding
between them, 64 + b one of codes that are indices into a table. Both sides know the model, so
methods send few, long entries (all fp32 values as one vector), and names take hardly any bytes.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import ItemsView, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor

from fl_lightning.errors import MisuseError, ThreePartError
from fl_lightning.support.tensor_bytes import raw_bytes
from fl_lightning.wire.codes import Codes, pack, packed_nbytes, unpack

MAGIC, VERSION = b"FLPW", 1
HEADER = struct.Struct("<4sBHQI")
DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
)
TYPE_NUMBERS = {dtype: kind for kind, dtype in enumerate(DTYPES)}
CODES_TYPE, INDICES_TYPE = 32, 64
# values of an entry: ``identity`` compares larger ones by their memory only
MAX_COMPARED_VALUES = 4096

Axis: TypeAlias = int | range
"""Size of an axis, or the sizes that it may have."""
Shape: TypeAlias = tuple[Axis, ...]


class OptionalShape(tuple[Axis, ...]):
    """The shape of an entry that may be left out; one that is declared as a plain tuple has to be
    there."""

    __slots__ = ()


Limit: TypeAlias = int | Shape
"""What is declared of an entry: its shape; or an integer, its largest number of values in any
shape, and it may be left out."""


class PayloadError(ThreePartError, ValueError):
    """An upload that must be refused: its bytes are no payload, or its entries are not those of the
    method.

    ``Method.check`` and ``decode`` raise it. The parts of the message after the first are optional.
    """

    def __init__(self, given: str, rule: str = "", instead: str = "") -> None:
        super().__init__(given, rule, instead)


class Payload(Mapping[str, "Tensor | Codes"]):
    """An immutable set of named entries, each a CPU tensor or :class:`Codes`.

    >>> sent = Payload({"weights": torch.ones(3)})
    >>> received = Payload.from_bytes(sent.to_bytes())
    >>> received["weights"].tolist(), sent.nbytes == len(sent.to_bytes())
    ([1.0, 1.0, 1.0], True)
    """

    def __init__(self, entries: Mapping[str, Tensor | Codes]) -> None:
        self._entries = {name: _on_cpu(name, value) for name, value in entries.items()}

    def __getitem__(self, name: str) -> Tensor | Codes:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def items(self) -> ItemsView[str, Tensor | Codes]:
        return self._entries.items()

    def tensor(self, name: str) -> Tensor:
        """Return the tensor in entry ``name``.

        Raises:
            PayloadError: there is no such entry, or it holds codes.
        """
        value = self._required(name)
        if isinstance(value, Codes):
            raise PayloadError(
                f"entry {name!r} holds codes",
                "a tensor is needed",
                f"read it with .codes({name!r})",
            )
        return value

    def codes(self, name: str) -> Codes:
        """Return the codes in entry ``name``.

        Raises:
            PayloadError: there is no such entry, or it holds a tensor.
        """
        value = self._required(name)
        if not isinstance(value, Codes):
            raise PayloadError(
                f"entry {name!r} holds a tensor",
                "codes are needed",
                f"read it with .tensor({name!r})",
            )
        return value

    def _required(self, name: str) -> Tensor | Codes:
        if name not in self:
            raise PayloadError(
                f"a payload with {sorted(self)}",
                f"it needs an entry {name!r}",
                "check who encoded it",
            )
        return self[name]

    @property
    def nbytes(self) -> int:
        """Length of :meth:`to_bytes` including the header, computed without encoding."""
        return HEADER.size + sum(
            _entry_nbytes(name, value) for name, value in self._entries.items()
        )

    def to_bytes(self) -> bytes:
        """Encode the payload.

        Raises:
            MisuseError: a code does not fit into its bits.
        """
        parts = [
            part
            for name, value in self._entries.items()
            for part in (entry_head(name, value), _entry_data(value))
        ]
        length = sum(len(part) for part in parts)
        return b"".join(
            [HEADER.pack(MAGIC, VERSION, len(self), length, _checksum(len(self), *parts)), *parts]
        )

    def identity(self) -> tuple[object, ...]:
        """Return a key by which two payloads can be compared without encoding them.

        Payloads with equal keys have equal entries, as long as the first one is alive. Payloads
        with different keys may still be equal: an entry of more than ``MAX_COMPARED_VALUES`` values
        enters the key by its memory and version counter, so only the same tensor, not written to
        since, gives the same key.
        """
        return tuple((name, *_entry_identity(value)) for name, value in self.items())

    def require_within(self, limits: Mapping[str, Limit]) -> None:
        """Check the entries against what is declared of each.

        Raises:
            PayloadError: ``limits`` does not name an entry or allows another shape or fewer values,
                or an entry is missing that has to be there.
        """
        for name, value in self._entries.items():
            require_allowed(
                name, (value.values if isinstance(value, Codes) else value).shape, limits
            )
        for name, limit in limits.items():
            if (
                name not in self
                and isinstance(limit, tuple)
                and not isinstance(limit, OptionalShape)
            ):
                self._required(name)

    @classmethod
    def from_bytes(
        cls,
        data: bytes | memoryview,
        *,
        verified: bool = False,
        limits: Mapping[str, Limit] | None = None,
        max_values: int | None = None,
    ) -> Payload:
        """Decode a payload; refuse entries beyond the limits before memory is allocated for them.

        Args:
            data: the bytes.
            verified: whether to skip the checksum, because these bytes were checked before or never
                left this machine's memory.
            limits: names of the allowed entries, with the shape of each or its largest number of
                values; None: no limits.
            max_values: largest number of values of all entries together; None: no limit.

        Raises:
            PayloadError: the bytes are no payload, have another version, are truncated or damaged
                (CRC-32), or exceed the limits.
        """
        if len(data) < HEADER.size or data[:4] != MAGIC:
            raise PayloadError(
                f"{len(data)} bytes that do not start with {MAGIC!r}",
                "a payload starts so",
                "send Payload.to_bytes()",
            )
        _, version, count, length, checksum = HEADER.unpack_from(data)
        if version != VERSION:
            raise PayloadError(
                f"a payload of version {version}",
                f"this build reads version {VERSION}",
                "use the same release on both sides",
            )
        body = memoryview(data)[HEADER.size :]
        if len(body) != length or not (verified or _checksum(count, body) == checksum):
            raise PayloadError(
                f"a payload of {len(body)} bytes",
                f"its header states {length} bytes and their CRC-32",
                "send it again",
            )
        reader, entries = _Reader(body, limits, max_values), {}  # type: _Reader, dict[str, Tensor | Codes]
        try:
            for _ in range(count):
                name, value = reader.entry()
                if name in entries:
                    raise PayloadError(
                        f"a payload with two entries {name!r}",
                        "names are unique",
                        "encode it again",
                    )
                entries[name] = value
        except (struct.error, UnicodeDecodeError, RuntimeError, IndexError) as error:
            raise PayloadError(
                "a payload with a damaged entry",
                f"every entry must be readable ({error})",
                "encode it again",
            ) from error
        if reader.offset != length:
            raise PayloadError(
                f"a payload with {length - reader.offset} bytes after its last entry",
                "it ends there",
                "encode it again",
            )
        decoded = cls.__new__(cls)
        decoded._entries = entries
        return decoded


class _Reader:
    """Reads one entry after another from the body of a payload."""

    def __init__(
        self, body: memoryview, limits: Mapping[str, Limit] | None, max_values: int | None
    ) -> None:
        self.body, self.offset, self.limits = body, 0, limits
        # codes have at least one bit
        self.left = 8 * len(body) if max_values is None else max_values

    def take(self, count: int) -> memoryview:
        """Return the next ``count`` bytes.

        Raises:
            PayloadError: fewer bytes are left.
        """
        taken = self.body[self.offset : self.offset + count]
        if len(taken) < count:
            raise PayloadError(
                f"a payload whose entry needs {count} bytes",
                f"{len(taken)} are left",
                "encode it again",
            )
        self.offset += count
        return taken

    def entry(self) -> tuple[str, Tensor | Codes]:
        """Return name and value of the next entry.

        Raises:
            PayloadError: the entry is damaged or beyond the limits.
        """
        (length,) = self.take(1)
        if not length:
            raise PayloadError(
                "an entry without a name", "names have 1 to 255 bytes", "encode it again"
            )
        name = str(self.take(length), "utf-8")
        kind, ndim = self.take(2)
        shape = struct.unpack(f"<{ndim}I", self.take(4 * ndim))
        count = math.prod(shape)
        if self.limits is not None:
            require_allowed(name, shape, self.limits)
        if count > self.left:
            raise PayloadError(
                f"entry {name!r} of {count} values",
                f"{self.left} are left to this upload",
                "send fewer, or declare them in upload_limits",
            )
        self.left -= count
        if kind > CODES_TYPE:
            are_indices = kind > INDICES_TYPE
            bits = kind - (INDICES_TYPE if are_indices else CODES_TYPE)
            if bits > 16:
                raise PayloadError(
                    f"entry {name!r} has codes of {bits} bits", "1 to 16 exist", "encode it again"
                )
            return name, Codes(
                unpack(self.take(packed_nbytes(count, bits)), count, bits).reshape(shape),
                bits,
                are_indices,
            )
        if kind >= len(DTYPES):
            raise PayloadError(
                f"entry {name!r} has type {kind}",
                "this release does not know it",
                "encode it with this release",
            )
        dtype = DTYPES[kind]
        data = bytearray(self.take(count * dtype.itemsize))
        value = torch.frombuffer(data, dtype=dtype) if count else torch.empty(0, dtype=dtype)
        return name, value if ndim == 1 else value.reshape(shape)


def require_allowed(name: str, shape: Sequence[int], limits: Mapping[str, Limit]) -> None:
    """Check the shape of one entry against what is declared of it.

    Raises:
        PayloadError: nothing is, or another shape, or fewer values.
    """
    if name not in limits:
        raise PayloadError(
            f"an entry {name!r}", f"this method's uploads hold {', '.join(limits)}", "send these"
        )
    limit, count = limits[name], math.prod(shape)
    if isinstance(limit, tuple):
        if len(shape) != len(limit) or not all(map(_is_size, shape, limit)):
            raise PayloadError(
                f"entry {name!r} of shape {tuple(shape)}",
                f"this method's has {_says(limit)}",
                "use one network and one set of settings on both sides",
            )
    elif count > limit:
        raise PayloadError(
            f"entry {name!r} of {count} values",
            f"this method's has {limit} at most",
            "send no more",
        )


def _is_size(size: int, axis: Axis) -> bool:
    return size in axis if isinstance(axis, range) else size == axis


def _says(shape: Shape) -> str:
    """Return a declared shape in words: ``(3, 1 to 8)``."""
    axes = [f"{axis[0]} to {axis[-1]}" if isinstance(axis, range) else str(axis) for axis in shape]
    return f"({', '.join(axes)})"


def checksum_of_header(count: int) -> int:
    """Return the CRC-32 of version and number of entries, with which the checksum of the body
    starts."""
    return zlib.crc32(struct.pack("<BH", VERSION, count))


def _checksum(count: int, *body: bytes | memoryview) -> int:
    checksum = checksum_of_header(count)
    for part in body:
        checksum = zlib.crc32(part, checksum)
    return checksum


def _on_cpu(name: str, value: Tensor | Codes) -> Tensor | Codes:
    if not 1 <= len(name.encode()) <= 255:
        raise MisuseError(
            f"an entry name of {len(name.encode())} bytes", "names have 1 to 255", "shorten it"
        )
    if isinstance(value, Codes):
        return replace(value, values=value.values.detach().to("cpu", torch.int32))
    if value.dtype not in TYPE_NUMBERS:
        raise MisuseError(
            f"entry {name!r} is {value.dtype}",
            f"the wire carries {', '.join(map(str, DTYPES))}",
            "convert it first",
        )
    return value.detach() if value.device.type == "cpu" else value.detach().cpu()


def entry_head(name: str, value: Tensor | Codes) -> bytes:
    """Return the bytes of an entry before its data: name, type and shape."""
    kind, shape = (
        ((INDICES_TYPE if value.are_indices else CODES_TYPE) + value.bits, value.values.shape)
        if isinstance(value, Codes)
        else (TYPE_NUMBERS[value.dtype], value.shape)
    )
    encoded = name.encode()
    return struct.pack(
        f"<B{len(encoded)}sBB{len(shape)}I", len(encoded), encoded, kind, len(shape), *shape
    )


def _entry_data(value: Tensor | Codes) -> bytes | memoryview:
    if isinstance(value, Codes):
        return pack(value)
    return raw_bytes(value.contiguous()).numpy().data if value.numel() else b""


def _entry_identity(value: Tensor | Codes) -> tuple[object, ...]:
    if isinstance(value, Codes):
        return (value.bits, value.are_indices, *_entry_identity(value.values))
    if value.numel() <= MAX_COMPARED_VALUES:
        return value.dtype, value.shape, bytes(_entry_data(value))
    return value.dtype, value.shape, value.stride(), value.data_ptr(), value._version


def _entry_nbytes(name: str, value: Tensor | Codes) -> int:
    if isinstance(value, Codes):
        shape, data = value.values.shape, packed_nbytes(value.values.numel(), value.bits)
    else:
        shape, data = value.shape, value.numel() * value.dtype.itemsize
    return 3 + len(name.encode()) + 4 * len(shape) + data
