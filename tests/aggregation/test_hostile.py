"""Clients that are hostile, broken or unlucky: rejected or survived, counted, in the log and in the
ledger."""

from __future__ import annotations

import json
import struct
from contextlib import nullcontext, suppress
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from all_methods import METHODS
from hypothesis import given
from hypothesis import strategies as st
from outcomes import rows_of
from ranks_program import Dropped, data_of, fit, method_of
from ten import TEN
from toy import sgd

from fl_lightning import methods, rng
from fl_lightning.aggregation.base import Receipt, Round
from fl_lightning.aggregation.choice import choose_aggregation
from fl_lightning.aggregation.exact_sum import MAX_MAGNITUDE
from fl_lightning.aggregation.receiving import (
    check_examples,
    check_upload,
    check_values,
    declared_limits,
    max_undeclared,
)
from fl_lightning.aggregation.server import examples_in
from fl_lightning.aggregation.sums import Addend
from fl_lightning.aggregation.undeclared import UndeclaredUploads
from fl_lightning.client import Assignment, Client
from fl_lightning.engines import SequentialEngine
from fl_lightning.errors import RunStopped
from fl_lightning.hooks import Stressor
from fl_lightning.methods import FedAvg
from fl_lightning.privacy.secure import SecureSum
from fl_lightning.wire import Codes, LedgerEntry, Payload, PayloadError
from fl_lightning.wire.payload import HEADER, MAGIC, VERSION, _checksum, entry_head

MUTATIONS = 500  # of each method: 5 000 in all
by_method = pytest.mark.parametrize("name", TEN)


def rows(trainer, name: str) -> list[dict[str, str]]:
    return rows_of(trainer.run_dir / name)


class First(Stressor):
    """Does something to the upload of the first client of each round."""

    def __init__(self, attack) -> None:
        self.attack, self.victim = attack, None

    def change_cohort(self, cohort, *, round, context):
        self.victim = cohort[0].client.id
        return cohort


class Bytes(First):
    def change_bytes(self, upload, *, client, round, context):
        return self.attack(upload) if client.id == self.victim else upload


class Entries(First):
    def change_upload(self, upload, *, client, round, context):
        return Payload(self.attack(dict(upload))) if client.id == self.victim else upload


def flip(data: bytes) -> bytes:
    """One bit in the middle."""
    return data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 4]) + data[len(data) // 2 + 1 :]


def floats(change):
    return lambda upload: {
        name: change(value)
        if isinstance(value, torch.Tensor) and value.is_floating_point()
        else value
        for name, value in upload.items()
    }


def shorter(value):
    return (
        Codes(value.values[..., :-1], value.bits)
        if isinstance(value, Codes)
        else value[..., :-1]
        if value.ndim
        else value
    )


ATTACKS = {
    "a flipped bit": Bytes(flip),
    "cut off": Bytes(lambda data: data[:-5]),
    "nothing": Bytes(lambda data: b""),
    "not a payload": Bytes(lambda data: b"\x80\x04" + data),
    "NaN": Entries(floats(lambda value: value * float("nan"))),
    "infinite": Entries(floats(lambda value: value + float("inf"))),
    "exploding": Entries(floats(lambda value: value + 1e30)),
    "wrong shapes": Entries(
        lambda upload: {name: shorter(value) for name, value in upload.items()}
    ),
    "no entries": Entries(lambda upload: {}),
    "codes for tensors": Entries(
        lambda upload: dict.fromkeys(upload, Codes(torch.zeros(3, dtype=torch.int32), 4))
    ),
}


class InTurn(Stressor):
    """The first attack in round 1, the second in round 2, and so on; notes the victims."""

    def __init__(self) -> None:
        self.victims: list[int] = []

    def change_cohort(self, cohort, *, round, context):
        attack = list(ATTACKS.values())[round - 1]
        attack.change_cohort(cohort, round=round, context=context)
        self.victims.append(attack.victim)
        return cohort

    def change_bytes(self, upload, *, client, round, context):
        return list(ATTACKS.values())[round - 1].change_bytes(
            upload, client=client, round=round, context=context
        )

    def change_upload(self, upload, *, client, round, context):
        return list(ATTACKS.values())[round - 1].change_upload(
            upload, client=client, round=round, context=context
        )


@pytest.mark.quick("FedAvg", "FedMPQKD", "FedMosaic")
@by_method
def test_every_attack_is_rejected_counted_logged_and_wasted(name, tmp_path, caplog):
    """One round for each attack, of which the others' uploads count."""
    in_turn = InTurn()
    trainer = fit(name, tmp_path, max_rounds=len(ATTACKS), callbacks=[in_turn])
    metrics, ledger = rows(trainer, "metrics.csv"), rows(trainer, "ledger.csv")
    for round, (attack, victim) in enumerate(zip(ATTACKS, in_turn.victims, strict=True), start=1):
        entries = [row for row in ledger if row["round"] == str(round)]
        assert [row["status"] for row in entries] == ["rejected", "trained", "trained"], attack
        assert f"round {round}: upload of client {victim} rejected" in caplog.text, attack
        row = metrics[round - 1]
        counts = (row["clients/rejected"], row["clients/trained"], row["clients/dropped"])
        assert counts == ("1", "2", "0"), attack
        assert row["comm/wasted_bytes"] == entries[0]["wasted"] == entries[0]["upload"], attack
        assert np.isfinite(float(row["test/loss"])), attack
    assert all(bool(torch.isfinite(tensor).all()) for tensor in trainer.method.server.values())


@pytest.mark.parametrize("says", [True, False])
def test_damage_on_the_way_of_an_engine_is_found(says, tmp_path, monkeypatch):
    """Unless the engine says of these very bytes that there was no way."""
    honest = SequentialEngine.train_client

    def damaged(engine, order):
        result = honest(engine, order)
        upload = result.upload[:-1] + bytes([result.upload[-1] ^ 1])
        return replace(result, upload=upload, **({"verified": upload} if says else {}))

    monkeypatch.setattr(SequentialEngine, "train_client", damaged)
    with nullcontext() if says else pytest.raises(RunStopped, match="3 rejected"):
        fit("FedAvg", tmp_path, max_rounds=1, engine="sequential", workers=1)
    run = SimpleNamespace(run_dir=tmp_path / "FedAvg" / "run")
    assert {row["status"] for row in rows(run, "ledger.csv")} == {"trained" if says else "rejected"}


@by_method
def test_clients_without_data_and_with_one_example(name, tmp_path):
    class Poor(Stressor):
        def change_cohort(self, cohort, *, round, context):
            first, second, *rest = (assignment.client for assignment in cohort)
            nothing, one = (
                replace(first, train=first.train[:0]),
                replace(second, train=second.train[:1]),
            )
            return [Assignment(client) for client in (nothing, one, *rest)]

    trainer = fit(name, tmp_path, max_rounds=1, callbacks=[Poor()])
    statuses = [row["status"] for row in rows(trainer, "ledger.csv")]
    assert statuses[1:] == ["trained", "trained"]
    # what has no weight n_k may come from anyone
    assert statuses[0] == ("trained" if name == "FedMosaic" else "rejected")
    assert all(bool(torch.isfinite(tensor).all()) for tensor in trainer.method.server.values())


@pytest.mark.quick("FedAvg", "FedMPQKD", "FedMosaic")
@by_method
@pytest.mark.parametrize("fate", [{"trains": False}, {"returns": False}], ids=str)
def test_a_round_without_any_upload(name, fate, tmp_path):
    class Nobody(Stressor):
        def change_cohort(self, cohort, *, round, context):
            return [replace(assignment, **fate) for assignment in cohort]

    with pytest.raises(RunStopped, match="no upload of 2 rounds was ever counted"):
        fit(name, tmp_path, max_rounds=2, callbacks=[Nobody()])
    run = SimpleNamespace(run_dir=tmp_path / name / "run")
    assert {row["status"] for row in rows(run, "ledger.csv")} == {
        "dropped" if "trains" in fate else "lost"
    }
    assert [row["clients/trained"] for row in rows(run, "metrics.csv")] == ["0", "0"]
    assert json.loads((run.run_dir / "metadata.json").read_text())["status"] == "failed"


def test_the_ledger_has_the_size_of_what_arrived(tmp_path):
    trainer = fit(
        "FedAvg",
        tmp_path,
        max_rounds=1,
        callbacks=[Entries(lambda sent: {"examples": sent["examples"]})],
    )
    (row,) = [row for row in rows(trainer, "ledger.csv") if row["status"] == "rejected"]
    arrived = Payload({"examples": torch.tensor(1, dtype=torch.int32)}).nbytes
    assert int(row["upload"]) == int(row["wasted"]) == arrived


def test_a_server_that_would_not_stay_finite_keeps_its_state(tmp_path, caplog):
    from fl_lightning.methods import FedAvg

    class Broken(FedAvg):
        def aggregate(self, uploads):
            super().aggregate(uploads)
            if self.round == 2:
                self.server["weights"] = self.server["weights"] * float("inf")

    trainer = fit("FedAvg", tmp_path, Broken(network=Dropped, optimizer=sgd(0.05)), max_rounds=2)
    assert "round 2: the server's next weights would not be finite" in caplog.text
    assert torch.isfinite(trainer.method.server["weights"]).all()
    last = [row for row in rows(trainer, "ledger.csv") if row["round"] == "2"]
    assert {row["status"] for row in last} == {"lost"}  # no upload was used
    assert all(row["wasted"] == row["upload"] for row in last)


def test_limits():
    check_values(
        Payload({"examples": torch.tensor(1), "weights": torch.tensor([MAX_MAGNITUDE / 2])})
    )
    for weights in (MAX_MAGNITUDE, -MAX_MAGNITUDE, float("nan"), float("inf")):
        with pytest.raises(PayloadError, match="NaN, infinity or"):
            check_values(Payload({"weights": torch.tensor([weights])}))
    for examples in (
        torch.tensor(0),
        torch.tensor(-1),
        torch.tensor([1, 1]),
        torch.tensor(2.0),
        torch.tensor([], dtype=torch.int32),
    ):
        with pytest.raises(PayloadError, match="examples"):
            check_examples(Payload({"examples": examples}), Client(0, np.arange(5), np.arange(0)))


def signed(count: int, body: bytes) -> bytes:
    """A payload whose checksum is right: made by someone who means it."""
    return HEADER.pack(MAGIC, VERSION, count, len(body), _checksum(count, body)) + body


@given(st.integers(0, 6), st.binary(max_size=80))
def test_any_bytes_are_a_payload_or_refused(count, body):
    for data in (body, signed(count, body)):
        with suppress(PayloadError):
            Payload.from_bytes(data)


def test_what_is_too_large_is_refused_before_memory_is_taken_for_it(monkeypatch):
    """32 MB of 1-bit codes are a gigabyte of integers."""
    monkeypatch.setattr(
        "fl_lightning.wire.payload.unpack", lambda *arguments: pytest.fail("it was decoded")
    )
    bomb = entry_head(
        "weights", Codes(torch.empty(2**28, dtype=torch.int8, device="meta"), 1)
    ) + bytes(2**25)
    unknown = entry_head("more", Codes(torch.empty(8, dtype=torch.int8, device="meta"), 1)) + bytes(
        1
    )
    limits = {"examples": 1, "weights": 1000}
    for body, allowed, rule in (
        (bomb, {"limits": limits}, "1000 at most"),
        (bomb, {"limits": {"weights": (range(1, 1001),)}}, r"this method's has \(1 to 1000\)"),
        (bomb, {"max_values": 2**20}, "1048576 are left"),
        (unknown, {"limits": limits}, "hold examples, weights"),
    ):
        with pytest.raises(PayloadError, match=rule):
            Payload.from_bytes(signed(1, body), **allowed)


@by_method
def test_entries_that_a_method_does_not_know_and_entries_that_are_too_long_are_refused(name, built):
    method, client, sent = built(name)
    limits = declared_limits(method, client)
    honest = Payload.from_bytes(sent, limits=limits)
    honest.require_within(limits)
    assert set(limits) == set(honest)
    for entry, value in honest.items():
        values = value.values if isinstance(value, Codes) else value
        first, *rest = [
            axis[-1] if isinstance(axis, range) else axis for axis in limits[entry]
        ] or [1]
        longer = values.new_zeros(first + 1, *rest)
        forged = {
            **honest,
            entry: Codes(longer, value.bits) if isinstance(value, Codes) else longer,
        }
        with pytest.raises(PayloadError, match=f"entry '{entry}' of"):
            Payload.from_bytes(Payload(forged).to_bytes(), limits=limits)
    assert not averaged_or_refused(method, client, Payload({**honest, "more": torch.zeros(1)}))


def test_a_subclass_that_sends_something_else_declares_it_or_is_bound_by_the_total_alone(built):
    class More(FedAvg):
        def upload(self, client):
            return Payload({**super().upload(client), "more": torch.zeros(1)})

    class Declared(More):
        def upload_limits(self, client):
            return {**super().upload_limits(client), "more": 1}

    method, client, _ = built("FedAvg")
    assert declared_limits(More(), client) is None
    assert max_undeclared(method) == 2**22 > 8 * method.layout.size  # 16 MiB
    declared = Declared()
    declared.layout = built("FedAvg")[0].layout
    assert set(declared_limits(declared, client)) == {"examples", "weights", "more"}


@pytest.fixture(scope="module")
def built():
    """Methods, and an upload of each."""
    made = {}
    for name in TEN:
        method, data = method_of(name), data_of(name)
        data.setup()
        data.distribute(0, torch.device("cpu"))
        with rng.torch_stream(0, "weights"):
            method.build(data)
        method.round = 1
        client = data.client(0)
        method.receive(method.broadcast(client), client)
        for step, batch in enumerate(
            method.local_batches(data, client, epochs=1, labels=data.labels(client), steps=1)
        ):
            method.train()
            method.training_step(batch, step)["loss"].backward()
        with torch.no_grad():
            made[name] = method, client, method.upload(client).to_bytes()
    return made.__getitem__


@pytest.mark.quick("FedAvg", "FedMPQKD", "FedMosaic")
@by_method
def test_a_forged_upload_is_refused_or_harmless(name, built):
    """Bytes changed at will under a right checksum: a PayloadError, or something that is averaged
    and stays finite."""
    method, client, sent = built(name)
    random = np.random.default_rng(0)
    for number in range(MUTATIONS):
        body = bytearray(sent[HEADER.size :])
        # the head is where names and shapes are
        reach = len(body) if number % 2 else min(len(body), 64)
        for where in random.integers(reach, size=random.integers(1, 4)):
            body[where] = random.integers(256)
        try:
            upload = Payload.from_bytes(signed(struct.unpack_from("<4sBH", sent)[2], bytes(body)))
        except PayloadError:
            continue
        averaged_or_refused(method, client, upload)


def averaged_or_refused(method, client, upload: Payload) -> bool:
    """Whether it is averaged; the server is finite then, and as before afterwards."""
    try:
        check_upload(method, upload, client, ())
    except PayloadError:
        return False
    before = dict(method.server)
    examples = examples_in(upload) if method.is_sum else 0
    receipt = Receipt(client, LedgerEntry(1, client.id, "trained"), examples=examples)
    closing = Round(1, [Assignment(client)], deliver=None, add_under_masks=None)
    choose_aggregation(method).close(closing, {client.id: upload}, [receipt])
    assert all(bool(torch.isfinite(tensor).all()) for tensor in method.server.values())
    method.server = before
    return True


@by_method
def test_a_valid_payload_of_another_form_is_refused(name, built):
    """Entries left out, of another rank or type, or fp32 where codes are due: refused before
    anything is averaged."""
    method, client, sent = built(name)
    upload = Payload.from_bytes(sent)
    assert averaged_or_refused(method, client, upload)
    forged = [{k: v for k, v in upload.items() if k != left_out} for left_out in upload]
    for entry, value in upload.items():
        if isinstance(value, Codes):
            forged += [
                {**upload, entry: value.values.float()},
                {**upload, entry: Codes(value.values.flatten()[:1], value.bits)},
            ]
        else:
            forged += [{**upload, entry: value.unsqueeze(0)}, {**upload, entry: value.double()}]
            forged += [{**upload, entry: value.flatten()[:0]}]
    if "bits" in upload:
        forged += [{**upload, "bits": Codes(torch.full_like(upload.codes("bits").values, 8), 4)}]
        forged += [{"examples": upload["examples"], "weights": method.server["weights"]}]
    for entries in forged:
        assert not averaged_or_refused(method, client, Payload(entries)), {
            k: getattr(v, "shape", v) for k, v in entries.items()
        }


@pytest.mark.parametrize("secure_sum", [None, SecureSum(0.6)], ids=["plain", "secure"])
@pytest.mark.parametrize("name", ["FedMPQ", "FedMPQKD"])
def test_a_shape_of_one_client_is_no_end_of_the_run(name, secure_sum, tmp_path, caplog):
    """``tops`` as a column, which all checks of values let pass and no sum can take."""

    def column(upload):
        tops = upload["tops"]
        return {**upload, "tops": replace(tops, values=tops.values.unsqueeze(1))}

    trainer = fit(name, tmp_path, callbacks=[Entries(column)], secure_sum=secure_sum)
    assert [row["status"] for row in rows(trainer, "ledger.csv")] == [
        "rejected",
        "trained",
        "trained",
    ] * 2
    assert "entry 'tops' of shape (4, 1)" in caplog.text


class WithMore(FedAvg):
    """Adds up one more vector, and declares numbers of values as before shapes could be
    declared."""

    def upload(self, client):
        return Payload({**super().upload(client), "more": torch.ones(3)})

    def upload_limits(self, client):
        return {"examples": 1, "weights": self.layout.size, "more": 3}

    def addends(self, upload, client_id, weight):
        more = upload.tensor("more")
        if more.numel() < 3:
            raise PayloadError("too short")
        return {**super().addends(upload, client_id, weight), "more": Addend(more)}


@pytest.mark.parametrize(
    "more", [torch.ones(3, 1), torch.ones(2), None], ids=["column", "short", "missing"]
)
def test_what_addends_refuse_of_a_method_without_shapes_is_a_rejection(more, tmp_path):
    def forged(upload):
        upload.pop("more")
        return upload if more is None else {**upload, "more": more}

    settings = {"network": Dropped, "optimizer": sgd(0.05)}
    trainer = fit("FedAvg", tmp_path / "forged", WithMore(**settings), callbacks=[Entries(forged)])
    assert [row["status"] for row in rows(trainer, "ledger.csv")] == [
        "rejected",
        "trained",
        "trained",
    ] * 2
    old = fit("FedAvg", tmp_path / "old", WithMore(**settings))
    new = fit("FedAvg", tmp_path / "new", FedAvg(**settings))
    assert torch.equal(old.method.server["weights"], new.method.server["weights"])


class Undeclared(FedAvg):
    """Adds up a vector of any length, and a product that needs three numbers; it declares
    nothing."""

    def upload(self, client):
        return Payload({**super().upload(client), "more": torch.ones(3), "factors": torch.ones(3)})

    def addends(self, upload, client_id, weight):
        product = torch.ones(2, 3) @ upload.tensor("factors")
        added = {"more": Addend(upload.tensor("more")), "product": Addend(product)}
        return {**super().addends(upload, client_id, weight), **added}


@pytest.mark.parametrize(
    ("entry", "said"), [("more", "others add more 3"), ("factors", "RuntimeError")]
)
@pytest.mark.parametrize("secure_sum", [None, SecureSum(0.6)], ids=["plain", "secure"])
@pytest.mark.parametrize("length", [2, 4])
def test_another_length_of_an_undeclared_entry_is_a_rejection(
    entry, said, secure_sum, length, tmp_path, caplog
):
    """The first client of each round sends it, before anybody knows what the others send."""
    forged = Entries(lambda upload: {**upload, entry: torch.ones(length)})
    method = Undeclared(network=Dropped, optimizer=sgd(0.05))
    trainer = fit("FedAvg", tmp_path, method, callbacks=[forged], secure_sum=secure_sum)
    found = rows(trainer, "ledger.csv")
    assert [row["status"] for row in found] == ["rejected", "trained", "trained"] * 2
    if secure_sum is None:
        assert [int(row["wasted"]) for row in found if row["status"] == "rejected"] == [
            int(row["upload"]) for row in found if row["status"] == "rejected"
        ]
    assert said in caplog.text
    assert f"{entry} float32 [{length}]" in caplog.text


def test_uploads_of_other_processes_say_what_is_odd_too(monkeypatch):
    """The only upload of this process is the odd one; each of the two others is on a process of its
    own."""

    def seen(id: int, entry: torch.Tensor) -> UndeclaredUploads:
        found = UndeclaredUploads()
        found.take(id, Payload({"more": entry}), lambda: {"more": Addend(torch.ones(3) * entry)})
        return found

    here, *others = [seen(0, torch.ones(4)), seen(1, torch.ones(3)), seen(2, torch.ones(3))]
    sent = []
    monkeypatch.setattr(
        "fl_lightning.aggregation.undeclared.gather_bytes", lambda data: sent.append(data) or [data]
    )
    for other in others:
        assert other.odd_ones() == {}
    monkeypatch.setattr(
        "fl_lightning.aggregation.undeclared.gather_bytes", lambda data: [data, *sent]
    )
    assert "the method cannot read (RuntimeError" in str(here.odd_ones()[0])
    assert seen(1, torch.ones(3)).odd_ones() == {}
    monkeypatch.setattr("fl_lightning.aggregation.undeclared.gather_bytes", lambda data: [data])
    with pytest.raises(RuntimeError):  # nobody says that another shape can be read
        here.odd_ones()


def test_an_error_over_shapes_that_others_have_is_a_bug(tmp_path):
    class Wrong(Undeclared):
        def addends(self, upload, client_id, weight):
            return super().addends(
                upload, [0, 1][client_id] if client_id > 1 else client_id, weight
            )

    with pytest.raises(IndexError, match="list index"):
        fit("FedAvg", tmp_path, Wrong(network=Dropped, optimizer=sgd(0.05)))


@pytest.mark.parametrize("kind", [FedAvg, WithMore])
def test_a_bug_in_addends_is_no_rejection(kind, tmp_path):
    class Wrong(kind):
        def addends(self, upload, client_id, weight):
            return {
                **super().addends(upload, client_id, weight),
                "x": Addend(upload.no_such_attribute),
            }

    with pytest.raises(AttributeError, match="no_such_attribute"):
        fit("FedAvg", tmp_path, Wrong(network=Dropped, optimizer=sgd(0.05)))


@pytest.mark.parametrize("name", METHODS)
def test_every_method_declares_shapes_beside_its_upload(name):
    kind = getattr(methods, name)
    own = next(vars(c) for c in kind.__mro__ if {"upload", "upload_limits"} & vars(c).keys())
    assert "upload_limits" in own


def test_an_upload_without_an_entry_that_is_declared_is_refused(built):
    for name in TEN:
        method, client, sent = built(name)
        limits = declared_limits(method, client)
        upload = Payload.from_bytes(sent, limits=limits)
        for left_out in upload:
            with pytest.raises(PayloadError):
                Payload({k: v for k, v in upload.items() if k != left_out}).require_within(limits)


@pytest.mark.parametrize("name", ["FedMPQ", "AQFL"])
def test_the_smallest_scales_are_no_end_of_the_run(name, tmp_path):
    """Scales of 1e-45 from everybody: the weights become zero, and can be quantised again."""

    class Tiny(Stressor):
        def change_upload(self, upload, *, client, round, context):
            return (
                Payload({**upload, "scales": torch.full_like(upload.tensor("scales"), 1e-45)})
                if round == 1
                else upload
            )

    trainer = fit(name, tmp_path, callbacks=[Tiny()])
    assert all(bool(torch.isfinite(tensor).all()) for tensor in trainer.method.server.values())


def test_a_hook_loses_an_upload(tmp_path):
    trainer = fit("FedAvg", tmp_path, max_rounds=1, callbacks=[Bytes(lambda data: None)])
    assert [row["status"] for row in rows(trainer, "ledger.csv")] == ["lost", "trained", "trained"]
    assert isinstance(trainer.data.client(0), Client)
