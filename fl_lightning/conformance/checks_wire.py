"""Checks of the payloads: their lengths, that the server uses nothing else, and what it
broadcasts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product

import torch

from fl_lightning.aggregation.exact_sum import MAX_MAGNITUDE
from fl_lightning.aggregation.intake import AddedUploads
from fl_lightning.aggregation.receiving import (
    check_upload,
    declared_limits,
    declares_shapes,
    decode_upload,
)
from fl_lightning.aggregation.undeclared import UndeclaredUploads
from fl_lightning.conformance.bench import Bench, Value, expect_same_server
from fl_lightning.conformance.declarations import declared
from fl_lightning.conformance.formulas import coded_sizes
from fl_lightning.conformance.verdicts import NotApplicable, Violation, expect, not_finite
from fl_lightning.conformance.watch import client_without_data
from fl_lightning.methods import Method
from fl_lightning.methods.quantized import QuantizedMethod
from fl_lightning.quantization import average_bits
from fl_lightning.wire import Codes, Payload, PayloadError

MAX_ROUNDING_ERROR = 1e-5
"""Largest difference of float32 sums that are taken in another order, relative to the largest
value."""


def bytes_on_the_wire(bench: Bench) -> str:
    """Payload, ledger and hand formula agree on the number of bytes."""
    run, subject = bench.everyone, bench.subject
    ledger = {(entry.round, entry.client): (entry.upload, entry.download) for entry in run.ledger}
    for at, sent in run.log.uploads.items():
        received = run.log.broadcasts[at]
        lengths = len(sent), len(received)
        payloads = Payload.from_bytes(sent), Payload.from_bytes(received)
        announced = tuple(payload.nbytes for payload in payloads)
        seen = f"client {at[1]} sent and received {lengths} bytes in round {at[0]}"
        expect(announced == lengths, f"{seen}, but its payloads announce {announced}")
        expect(ledger[at] == lengths, f"{seen}, but the ledger has {ledger[at]}")
        run.method.round = at[0]
        for kind, formula, payload, length in zip(
            ("upload", "broadcast"), (subject.up, subject.down), payloads, lengths, strict=True
        ):
            expected = length if formula is None else formula(run.method, payload)
            expect(
                length == expected,
                f"the {kind} in round {at[0]} has {length} bytes, but {expected} by hand formula",
            )
    known = "as by hand formula" if subject.up and subject.down else "no hand formula is known"
    return f"{_range(run.log.uploads)} bytes up, {_range(run.log.broadcasts)} down, {known}"


def _range(payloads: dict[tuple[int, int], bytes]) -> str:
    least, most = min(map(len, payloads.values())), max(map(len, payloads.values()))
    return f"{least}" if least == most else f"{least} to {most}"


def server_reads_uploads_only(bench: Bench) -> None:
    """A server that never trained computes the same from the same uploads."""
    run = bench.two_of_six
    states = [*run.log.servers[1:], dict(run.method.server)]
    for round, (before, after) in enumerate(zip(run.log.servers, states, strict=True), start=1):
        cohort = run.log.cohorts[round - 1]
        other = bench.untrained(round, before, cohort)
        for client in cohort:
            alike = (
                other.broadcast(client_without_data(client)).to_bytes()
                == run.log.broadcasts[round, client]
            )
            expect(
                alike,
                f"the broadcast to client {client} in round {round} depends on more than uploads",
            )
        other.aggregate(run.log.uploads_of(round))
        cause = "aggregate or next_state reads what training sets, or an attribute that is not in self.server"
        expect_same_server(after, other.server, "computed from the payloads alone", cause)


def shapes_of_entries(bench: Bench) -> str:
    """An upload is refused where an entry has one axis more, or axes (1, n)."""
    return _forge(
        bench, "has an axis more", lambda value: [_with_axis(value, axis) for axis in (0, -1)]
    )


def hostile_entries(bench: Bench) -> str:
    """No upload ends the run whose entry is missing, of another type, NaN, or as large as it may
    be."""
    if declared_limits(bench.untrained(), bench.data.client(0)) is None:
        raise NotApplicable("it does not declare what its uploads hold, in upload_limits")
    return _forge(bench, "is missing, of another type or out of range", _hostile)


def _forge(bench: Bench, what: str, forge: Callable[[Value], Sequence[Value | None]]) -> str:
    """Change the entries of each client's upload one by one; each must be refused or harmless.

    Args:
        bench: of the method.
        what: is wrong with the entry, in words.
        forge: returns what comes in place of an entry; None: nothing.

    Returns:
        How many were refused, and how many were not.
    """
    run, refused, harmless = bench.everyone, 0, 0
    cohort, uploads = run.log.cohorts[0], run.log.uploads_of(1)
    method = bench.untrained(1, run.log.servers[0], cohort)
    forged = [
        (id, name, value)
        for id, name in product(cohort, uploads[cohort[0]])
        if name in uploads[id]
        for value in forge(uploads[id][name])
    ]
    for id, name, value in forged:
        rest = {each: sent for each, sent in uploads[id].items() if each != name}
        upload = Payload(rest if value is None else {**uploads[id], name: value})
        server = bench.untrained(1, run.log.servers[0], cohort)
        try:
            received = _received(bench, method, {**uploads, id: upload}, id)
            if received is None:
                refused += 1
                continue
            server.aggregate(received)
        except Exception as error:
            raise Violation(
                f"an upload whose entry {name!r} {what} is not refused and ends the run "
                f"({type(error).__name__}: {error}); declare the shapes of all entries in upload_limits, and "
                "read each in check"
            ) from error
        where = not_finite(server=server.server)
        expect(not where, f"an upload whose entry {name!r} {what} is not refused; after it {where}")
        harmless += 1
    return f"{refused} refused" + (f", {harmless} are harmless" if harmless else "")


def _received(
    bench: Bench, method: Method, uploads: Mapping[int, Payload], id: int
) -> dict[int, Payload] | None:
    """Return the uploads of a round as its server reads them; None if it refuses that of client
    ``id``."""
    client = bench.data.client(id)
    undeclared = None if declares_shapes(method, client) else UndeclaredUploads()
    try:
        read = decode_upload(method, uploads[id].to_bytes(), client, verified=True)
        received = {**uploads, id: read}
        for each in [id] if undeclared is None else received:
            check_upload(method, received[each], bench.data.client(each), (), undeclared)
    except PayloadError:
        return None
    return None if undeclared and id in undeclared.odd_ones() else received


def _hostile(value: Value) -> list[Value | None]:
    """Return nothing, an entry of the other kind, and in place of a tensor NaN, infinities, values
    at the limit and beyond, and other types of numbers."""
    if isinstance(value, Codes):
        return [None, value.values.float()]
    limit = MAX_MAGNITUDE - 1
    return [
        None,
        Codes(torch.zeros(value.shape, dtype=torch.int32), 4),
        *(
            torch.full(value.shape, each)
            for each in (math.nan, math.inf, -math.inf, 2.0**62, limit, -limit)
        ),
        torch.full(value.shape, 1e300, dtype=torch.float64),
        torch.full(value.shape, 2**62),
        *(value.to(kind) for kind in (torch.float64, torch.float16, torch.int64)),
    ]


def _with_axis(value: Value, axis: int) -> Value:
    """Return an entry with one more axis of size 1, the first or the last one."""
    if isinstance(value, Codes):
        return replace(value, values=value.values.unsqueeze(axis))
    return value.unsqueeze(axis)


def order_of_uploads(bench: Bench) -> None:
    """Where the server needs sums alone, the order in which uploads arrive changes nothing."""
    if not bench.untrained().is_sum:
        raise NotApplicable("its server needs the single uploads")
    run = bench.everyone
    before, uploads = run.log.servers[0], run.log.uploads_of(1)
    states = []
    for ids in (list(uploads), list(reversed(uploads)), [*list(uploads)[2:], *list(uploads)[:2]]):
        other = bench.untrained(1, before, run.log.cohorts[0])
        _aggregate(other, {id: uploads[id] for id in ids})
        states.append(other.server)
    for state in states[1:]:
        expect_same_server(states[0], state, "after the same uploads in another order")


def _aggregate(server: Method, uploads: Mapping[int, Payload]) -> None:
    """Make the server's next state of uploads that arrive in this order, as in a run, where each is
    added up as it comes if the method allows that."""
    taken = server.intake()
    if not isinstance(taken, AddedUploads):
        server.aggregate(uploads)
        return
    for id, upload in uploads.items():
        taken.take(id, upload)
    server.take_sums(taken.added())


def broadcast(bench: Bench) -> None:
    """The broadcast after uploads of 2 of 6 clients follows the hand formula."""
    run, sent = bench.two_of_six, bench.subject.sent
    if sent is None:
        raise NotApplicable("no hand formula is known")
    history = [run.log.uploads_of(round) for round in range(1, len(run.log.cohorts))]
    alike = declared(run.method).uniform_clients
    weights = [min(size, 1) for size in run.sizes] if alike else run.sizes
    for round in range(2, len(run.log.cohorts) + 1):
        before = bench.untrained(round - 1, run.log.servers[round - 2])
        for client in run.log.cohorts[round - 1]:
            message = Payload.from_bytes(run.log.broadcasts[round, client])
            if "w0" in message:
                raise NotApplicable("the broadcast holds codes of weights")
            if sent.entry not in message:
                raise NotApplicable(f"at these settings the broadcast has no {sent.entry!r}")
            found = message.tensor(sent.entry).double()
            expected = sent.formula(history[: round - 1], weights, before, client).double()
            difference = float((found - expected).abs().max()) / max(
                1.0, float(expected.abs().max())
            )
            expect(
                difference <= MAX_ROUNDING_ERROR,
                f"the broadcast to client {client} in round {round} differs by {difference:.3g}",
            )


def budget(bench: Bench) -> None:
    """No client receives or sends more bits per weight than its budget."""
    if not isinstance(bench.subject.make(), QuantizedMethod):
        raise NotApplicable("it has no budgets")
    for bits in (1, 4, [1, 2, 3, 4, 6, 8]):
        run = bench.run(method=bench.subject.make(bits=bits), max_rounds=3)
        sizes, budgets = coded_sizes(run.method), bits if isinstance(bits, list) else [bits] * 6
        for payloads, verb in ((run.log.uploads, "sends"), (run.log.broadcasts, "is given")):
            for client, used in _bits(payloads.items(), sizes):
                allowed = budgets[client]
                expect(
                    used <= allowed,
                    f"client {client} with a budget of {allowed} bits {verb} {used:.3f}",
                )


def _bits(
    payloads: Iterable[tuple[tuple[int, int], bytes]], sizes: list[int]
) -> Iterable[tuple[int, float]]:
    """Yield each client and the bits per weight that its payload states.

    Payloads without an entry ``bits`` are left out.
    """
    for (_, client), data in payloads:
        payload = Payload.from_bytes(data)
        if "bits" in payload:
            yield client, average_bits(sizes, payload.codes("bits").values.tolist())
