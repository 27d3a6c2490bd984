import csv
import io
import struct
from contextlib import suppress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fl_lightning.wire import Codes, Ledger, LedgerEntry, Payload, PayloadError, encode_rows
from fl_lightning.wire.codes import pack, unpack
from fl_lightning.wire.payload import DTYPES, HEADER, _checksum

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@st.composite
def entries(draw):
    shape = draw(shapes)
    if draw(st.booleans()):
        bits = draw(st.integers(1, 16))
        return Codes(
            torch.randint(
                0, 2**bits, shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))
            ),
            bits,
        )
    dtype = draw(st.sampled_from(DTYPES))
    tensor = (
        torch.randn(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))) * 50
    )
    if dtype.is_floating_point and tensor.numel() and draw(st.booleans()):
        tensor.view(-1)[0] = draw(st.sampled_from([float("nan"), float("inf"), -0.0]))
    return tensor.abs().to(dtype) if dtype == torch.uint8 else tensor.to(dtype)


def raw(tensor: torch.Tensor) -> bytes:
    return (
        tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    )


payloads = st.dictionaries(st.text(min_size=1, max_size=8), entries(), max_size=4)


@given(payloads)
def test_round_trip_and_size(contents):
    data = Payload(contents).to_bytes()
    assert Payload(contents).nbytes == len(data)
    back = Payload.from_bytes(data)
    assert list(back) == list(contents)
    for name, sent in contents.items():
        received = back[name]
        if isinstance(sent, Codes):
            assert received.bits == sent.bits
            assert torch.equal(received.values, sent.values.int())
        else:
            assert received.dtype == sent.dtype
            assert received.shape == sent.shape
            assert raw(received) == raw(sent)


stacks = st.dictionaries(
    st.text(min_size=1, max_size=8),
    entries().filter(lambda entry: not isinstance(entry, Codes)),
    min_size=1,
)


@given(stacks, st.integers(1, 3))
def test_rows_are_the_payloads_of_each(contents, count):
    rows = [{name: tensor + at for name, tensor in contents.items()} for at in range(count)]
    stacked = {name: torch.stack([row[name] for row in rows]) for name in contents}
    assert encode_rows(stacked) == [Payload(row).to_bytes() for row in rows]


@given(payloads, st.data())
def test_damage_is_refused(contents, data):
    whole = Payload(contents).to_bytes()
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(PayloadError):
        Payload.from_bytes(whole[:cut])
    position, bit = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(0, 7))
    damaged = bytearray(whole)
    damaged[position] ^= 1 << bit
    with pytest.raises(PayloadError):
        Payload.from_bytes(bytes(damaged))


@given(st.binary(max_size=200))
def test_no_bytes_do_anything_but_raise_payload_error(body):
    for data in (body, HEADER.pack(b"FLPW", 1, 1, len(body), _checksum(1, body)) + body):
        with suppress(PayloadError):
            Payload.from_bytes(data)


def test_a_huge_announced_shape_allocates_nothing():
    body = struct.pack("<B1sBB2I", 1, b"x", 0, 2, 2**31, 2**31)
    with pytest.raises(PayloadError, match="are left"):
        Payload.from_bytes(HEADER.pack(b"FLPW", 1, 1, len(body), _checksum(1, body)) + body)


def test_codes_are_packed_without_padding():
    codes = Codes(torch.arange(1000) % 32, bits=5)
    assert Payload({"w": codes}).nbytes == HEADER.size + (3 + 1 + 4) + 625  # 1000 weights of 5 bits
    with pytest.raises(ValueError, match="4 bits cannot hold it"):
        Payload({"w": Codes(torch.tensor([16]), bits=4)}).to_bytes()


@pytest.mark.parametrize("bits", range(1, 17))
@pytest.mark.parametrize("count", [0, 1, 7, 8, 1003])
def test_codes_are_the_bits_of_one_long_number(bits, count):
    values = torch.randint(
        0, 2**bits, (count,), generator=torch.Generator().manual_seed(count), dtype=torch.int32
    )
    number = sum(int(value) << at * bits for at, value in enumerate(values))
    data = pack(Codes(values, bits))
    assert data == number.to_bytes((count * bits + 7) // 8, "little")
    assert torch.equal(unpack(data, count, bits), values)


@pytest.mark.parametrize("bits", [1, 3, 4, 5, 8, 12, 16])
def test_codes_of_another_length_are_refused(bits):
    data = pack(Codes(torch.ones(9, dtype=torch.int32), bits))
    for wrong in (data[:-1], data + b"\0"):
        with pytest.raises(ValueError, match="9 codes"):
            unpack(wrong, 9, bits)


def test_missing_entries_are_named():
    payload = Payload({"w": torch.ones(1), "c": Codes(torch.ones(1, dtype=torch.int32), 1)})
    with pytest.raises(PayloadError, match="'v'"):
        payload.tensor("v")
    with pytest.raises(PayloadError, match="holds codes"):
        payload.tensor("c")
    with pytest.raises(PayloadError, match="holds a tensor"):
        payload.codes("w")


def test_ledger_sums_and_csv():
    ledger = Ledger(
        [
            LedgerEntry(1, 0, "trained", 10, 5),
            LedgerEntry(1, 3, "lost", 10, 7, 7),
            LedgerEntry(1, 4, "dropped"),
        ]
    )
    assert Ledger.totals(ledger.entries) == {
        "comm/upload_bytes": 12,
        "comm/download_bytes": 20,
        "comm/wasted_bytes": 7,
        "comm/total_bytes": 32,
    }
    timed = LedgerEntry(2, 3, "trained", 10, 7, started=0.1, ended=2.5)
    for entries in (ledger.entries, [*ledger.entries, timed]):
        text, columns = io.StringIO(), entries[-1].row().keys()
        writer = csv.DictWriter(text, columns, restval="")
        writer.writeheader()
        writer.writerows(entry.row() for entry in entries)
        assert Ledger.from_csv(text.getvalue()).entries == entries
    for wrong in ("round,client\n1,2\n", f"{','.join(columns)}\n1,2,trained\n"):
        with pytest.raises(ValueError, match="no line of a ledger"):
            Ledger.from_csv(wrong)


def test_codes_say_whether_they_are_indices():
    """It travels in the type of the entry, and costs no byte."""
    values = torch.tensor([0, 3, 1], dtype=torch.int32)
    numbers, indices = (
        Payload({"x": Codes(values, 2)}),
        Payload({"x": Codes(values, 2, are_indices=True)}),
    )
    assert numbers.nbytes == indices.nbytes == len(indices.to_bytes())
    for sent in (numbers, indices):
        received = Payload.from_bytes(sent.to_bytes()).codes("x")
        assert received.are_indices == sent.codes("x").are_indices
        assert torch.equal(received.values, values)
