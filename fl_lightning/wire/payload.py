"""What travels between client and server: named arrays and packed codes, as bytes.

Layout, little endian::

    header  b"FLPW", version u8, entries u16, body length u64, CRC-32 of all the rest u32        19 bytes
    entry   name length u8, name, type u8, dimensions u8, u32 each, then the data     3 + name + 4 ndim + data

A type below 32 is an index into ``DTYPES``; 32 + b is a stream of b-bit codes without padding between them,
64 + b one of codes that are indices into a table.
Both sides know the model, so methods send few, long entries (all fp32 values as one vector) and names cost
next to nothing.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import ItemsView, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fl_lightning.errors import InputError, ThreePartError
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
KINDS = {dtype: kind for kind, dtype in enumerate(DTYPES)}
CODES, INDICES = 32, 64
GLANCE = 4096  # values that are compared rather than encoded again


class PayloadError(ThreePartError, ValueError):
    """An upload that must not count: its bytes are no payload, or its entries not what the method expects.

    ``Method.check`` and ``decode`` raise it; the parts after the first may be left out.
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
        """The entry ``name``, which must be there and a tensor.

        Raises:
            PayloadError: it is not.
        """
        value = self._required(name)
        if isinstance(value, Codes):
            raise PayloadError(
                f"entry {name!r} holds codes", "a tensor is needed", f"read it with .codes({name!r})"
            )
        return value

    def codes(self, name: str) -> Codes:
        """The entry ``name``, which must be there and codes.

        Raises:
            PayloadError: it is not.
        """
        value = self._required(name)
        if not isinstance(value, Codes):
            raise PayloadError(
                f"entry {name!r} holds a tensor", "codes are needed", f"read it with .tensor({name!r})"
            )
        return value

    def _required(self, name: str) -> Tensor | Codes:
        if name not in self:
            raise PayloadError(
                f"a payload with {sorted(self)}", f"it needs an entry {name!r}", "check who encoded it"
            )
        return self[name]

    @property
    def nbytes(self) -> int:
        """Length of :meth:`to_bytes`, header included, without encoding."""
        return HEADER.size + sum(_entry_nbytes(name, value) for name, value in self._entries.items())

    def to_bytes(self) -> bytes:
        """The bytes on the wire."""
        parts = [
            part for name, value in self._entries.items() for part in (entry_head(name, value), _data(value))
        ]
        length = sum(len(part) for part in parts)
        return b"".join(
            [HEADER.pack(MAGIC, VERSION, len(self), length, _checksum(len(self), *parts)), *parts]
        )

    def identity(self) -> tuple[object, ...]:
        """Equal for two payloads with the same entries, while the first one is alive; where many values would
        have to be compared, only if they are the same tensors, not written to since."""
        return tuple((name, *_identity(value)) for name, value in self.items())

    def require_within(self, limits: Mapping[str, int]) -> None:
        """Raises:
        PayloadError: an entry that ``limits`` does not name, or with more values than it allows.
        """
        for name, value in self._entries.items():
            _require_allowed(name, (value.values if isinstance(value, Codes) else value).numel(), limits)

    @classmethod
    def from_bytes(
        cls,
        data: bytes,
        *,
        verified: bool = False,
        limits: Mapping[str, int] | None = None,
        max_values: int | None = None,
    ) -> Payload:
        """Decode. What ``limits`` and ``max_values`` forbid is refused before memory is taken for it.

        Args:
            verified: the checksum of these very bytes has been found right before, or nothing can have
                happened to them.
            limits: the entries that may occur, and the largest number of values of each. None: any.
            max_values: largest number of values of all entries together. None: any.

        Raises:
            PayloadError: not a payload, another version, truncated, damaged (CRC-32), or beyond the limits.
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
                f"a payload of {len(body)} bytes that announced {length}, or damaged (CRC-32); send it again"
            )
        reader, entries = _Reader(body, limits, max_values), {}  # type: _Reader, dict[str, Tensor | Codes]
        try:
            for _ in range(count):
                name, value = reader.entry()
                if name in entries:
                    raise PayloadError(
                        f"a payload with two entries {name!r}", "names are unique", "encode it again"
                    )
                entries[name] = value
        except (struct.error, UnicodeDecodeError, RuntimeError, IndexError) as error:
            raise PayloadError(
                f"a payload whose entries cannot be read ({error}); encode it again"
            ) from error
        if reader.offset != length:
            raise PayloadError(
                f"a payload with {length - reader.offset} bytes after its last entry; encode it again"
            )
        decoded = cls.__new__(cls)
        decoded._entries = entries
        return decoded


class _Reader:
    def __init__(self, body: memoryview, limits: Mapping[str, int] | None, max_values: int | None) -> None:
        self.body, self.offset, self.limits = body, 0, limits
        self.left = 8 * len(body) if max_values is None else max_values  # the shortest codes have one bit

    def take(self, count: int) -> memoryview:
        taken = self.body[self.offset : self.offset + count]
        if len(taken) < count:
            raise PayloadError(
                f"a payload whose entry needs {count} bytes where {len(taken)} are left; encode it again"
            )
        self.offset += count
        return taken

    def entry(self) -> tuple[str, Tensor | Codes]:
        (length,) = self.take(1)
        if not length:
            raise PayloadError("an entry without a name", "names have 1 to 255 bytes", "encode it again")
        name = str(self.take(length), "utf-8")
        kind, ndim = self.take(2)
        shape = struct.unpack(f"<{ndim}I", self.take(4 * ndim))
        count = math.prod(shape)
        if self.limits is not None:
            _require_allowed(name, count, self.limits)
        if count > self.left:
            raise PayloadError(
                f"entry {name!r} of {count} values where {self.left} are left to this upload; send "
                "fewer, or declare them in upload_limits"
            )
        self.left -= count
        if kind > CODES:
            are_indices = kind > INDICES
            bits = kind - (INDICES if are_indices else CODES)
            if bits > 16:
                raise PayloadError(
                    f"entry {name!r} has codes of {bits} bits", "1 to 16 exist", "encode it again"
                )
            return name, Codes(
                unpack(self.take(packed_nbytes(count, bits)), count, bits).reshape(shape), bits, are_indices
            )
        if kind >= len(DTYPES):
            raise PayloadError(f"entry {name!r} has the unknown type {kind}; encode it with this release")
        dtype = DTYPES[kind]
        data = bytearray(self.take(count * dtype.itemsize))
        value = torch.frombuffer(data, dtype=dtype) if count else torch.empty(0, dtype=dtype)
        return name, value if ndim == 1 else value.reshape(shape)


def _require_allowed(name: str, count: int, limits: Mapping[str, int]) -> None:
    if name not in limits:
        raise PayloadError(
            f"an entry {name!r}", f"this method's uploads hold {', '.join(limits)}", "send these"
        )
    if count > limits[name]:
        raise PayloadError(
            f"entry {name!r} of {count} values", f"this method's has {limits[name]} at most", "send no more"
        )


def checksum_of_header(count: int) -> int:
    """Where the checksum of a payload of ``count`` entries starts."""
    return zlib.crc32(struct.pack("<BH", VERSION, count))


def _checksum(count: int, *body: bytes | memoryview) -> int:
    checksum = checksum_of_header(count)
    for part in body:
        checksum = zlib.crc32(part, checksum)
    return checksum


def _on_cpu(name: str, value: Tensor | Codes) -> Tensor | Codes:
    if not 1 <= len(name.encode()) <= 255:
        raise InputError(f"an entry name of {len(name.encode())} bytes", "names have 1 to 255", "shorten it")
    if isinstance(value, Codes):
        return replace(value, values=value.values.detach().to("cpu", torch.int32))
    if value.dtype not in KINDS:
        raise InputError(
            f"entry {name!r} is {value.dtype}",
            f"the wire carries {', '.join(map(str, DTYPES))}",
            "convert it first",
        )
    return value.detach() if value.device.type == "cpu" else value.detach().cpu()


def entry_head(name: str, value: Tensor | Codes) -> bytes:
    """What an entry says of itself."""
    kind, shape = (
        ((INDICES if value.are_indices else CODES) + value.bits, value.values.shape)
        if isinstance(value, Codes)
        else (KINDS[value.dtype], value.shape)
    )
    encoded = name.encode()
    return struct.pack(f"<B{len(encoded)}sBB{len(shape)}I", len(encoded), encoded, kind, len(shape), *shape)


def _data(value: Tensor | Codes) -> bytes | memoryview:
    if isinstance(value, Codes):
        return pack(value)
    return value.contiguous().view(-1).view(torch.uint8).numpy().data if value.numel() else b""


def _identity(value: Tensor | Codes) -> tuple[object, ...]:
    if isinstance(value, Codes):
        return (value.bits, *_identity(value.values))
    if value.numel() <= GLANCE:
        return value.dtype, value.shape, bytes(_data(value))
    return value.dtype, value.shape, value.stride(), value.data_ptr(), value._version


def _entry_nbytes(name: str, value: Tensor | Codes) -> int:
    if isinstance(value, Codes):
        shape, data = value.values.shape, packed_nbytes(value.values.numel(), value.bits)
    else:
        shape, data = value.shape, value.numel() * value.dtype.itemsize
    return 3 + len(name.encode()) + 4 * len(shape) + data
