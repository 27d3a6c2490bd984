"""Clients that lie in a secure sum: sums that no honest clients can have made are void by name, and
who gives wrong shares in two rounds is left out."""

from __future__ import annotations

import csv
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from liars import LIAR, clients_with_a_liar, more
from outcomes import rows_of
from ten import make
from toy import run

from fl_lightning.aggregation.exact_sum import MAX_MAGNITUDE, fraction_bits
from fl_lightning.aggregation.sum_form import SumForm
from fl_lightning.client import Client
from fl_lightning.conformance.toy import images
from fl_lightning.hooks import Stressor
from fl_lightning.methods import FedAvg
from fl_lightning.privacy import ClientPrivacy
from fl_lightning.privacy.secure import SecureSum
from fl_lightning.wire import Payload, PayloadError

pytest.importorskip("Crypto")

from fl_lightning.privacy.secure.client import SecureClient
from fl_lightning.privacy.secure.complaints import convicted
from fl_lightning.privacy.secure.server import SecureServer

SECURE = SecureSum(threshold=0.6)


def random_integers(vector):
    return torch.from_numpy(np.random.default_rng(0).integers(-(2**63), 2**63 - 1, len(vector)))


def fit(folder: Path, method, **settings):
    """The server's tensors, and the metrics of each round."""
    trainer = run(method, images(), folder, **{"max_rounds": 2, "local_epochs": 1, **settings})
    return trainer.method.server, rows_of(trainer.run_dir / "metrics.csv")


LIES = {
    "random integers": (clients_with_a_liar, {"lie": random_integers}, "6 clients weigh"),
    "one value": (clients_with_a_liar, {"lie": more(5, 2**62)}, "6 clients add up to"),
    "n_k": (clients_with_a_liar, {"lie": more(-1, 2**40)}, "6 clients weigh 6 to"),
    "no n_k": (clients_with_a_liar, {"lie": more(-1, -(2**40))}, "and it says -"),
    "mask key": (clients_with_a_liar, {"flips_key": True}, "6 clients weigh"),
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("name", ["FedAvg", "FedMPQ"])
def test_an_impossible_sum_is_void_and_changes_no_weight(name, lie, tmp_path, monkeypatch, caplog):
    make_clients, arguments, said = LIES[lie]
    before, _ = fit(tmp_path / "one", make(name), max_rounds=1, secure_sum=SECURE)
    monkeypatch.setattr(
        "fl_lightning.privacy.secure.simulation.SecureClient", make_clients(**arguments)
    )
    after, metrics = fit(tmp_path / "two", make(name), secure_sum=SECURE)
    assert [row["secure/void"] for row in metrics] == ["0", "1"]
    assert before.keys() == after.keys()
    assert all(torch.equal(before[tensor], after[tensor]) for tensor in before)
    (line,) = [record.message for record in caplog.records if "is void" in record.message]
    assert line.startswith("round 2 is void, and the model stays: its sum is impossible")
    assert said in line


@pytest.mark.parametrize("where", ["central", "distributed"])
def test_a_private_sum_is_bounded_by_the_clips_and_the_noise(where, tmp_path, monkeypatch, caplog):
    """One client adds 100 C to one value: far within the 2^20 of a plain sum."""
    pytest.importorskip("dp_accounting")
    clip = 0.3
    settings = {
        "privacy": ClientPrivacy(noise_multiplier=0.2, clip_norm=clip, where=where),
        "secure_sum": SecureSum(),
    }
    caplog.set_level(logging.WARNING, "fl_lightning")
    _, honest = fit(tmp_path / "honest", make("FedAvg", weigh_by="clients"), **settings)
    assert [row["secure/void"] for row in honest] == ["0", "0"]
    lie = more(5, round(100 * clip * 2 ** fraction_bits(6)))
    monkeypatch.setattr(
        "fl_lightning.privacy.secure.simulation.SecureClient", clients_with_a_liar(lie)
    )
    _, metrics = fit(tmp_path / "lie", make("FedAvg", weigh_by="clients"), **settings)
    assert [row["secure/void"] for row in metrics] == ["0", "1"]
    assert "6 clients add up to" in caplog.text


def test_the_bounds_are_met_exactly():
    """The largest sum that clients can make is none that is refused; one unit more is."""
    sizes, cohort = (3, 5, 10), 4
    clients = [Client(id, np.arange(size), np.arange(0)) for id, size in enumerate(sizes)]
    method = SimpleNamespace(
        cohort=cohort, client_weights=FedAvg().client_weights, largest_weight=10
    )
    method.weight_bounds = lambda *details: FedAvg.weight_bounds(method, *details)
    method.largest_value = lambda name: FedAvg.largest_value(method, name)
    form, unit = SumForm((("weights", 2, 10),)), 2 ** fraction_bits(cohort)
    most = int(sum(sizes) / 10 * MAX_MAGNITUDE * unit + len(sizes) / 2)
    for values, weight, fits in (
        ([most, -most], 18, True),
        ([most + 2**10, 0], 18, False),
        ([0, -most - 2**10], 18, False),
        ([0, 0], 3, True),
        ([0, 0], 2, False),
        ([0, 0], 19, False),
        ([-(2**63), 0], 18, False),
    ):
        total = torch.tensor([*values, weight])
        assert (form.impossible(total, method, clients) == "") is fits, (values, weight)
    private = form.impossible(
        torch.tensor([3 * unit, 0, 3]), method, clients, lambda name, count: 1.0 * count
    )
    assert private == ""
    for total in ([3 * unit + 2, 0, 3], [0, 0, 4], [0, 0, 2]):
        assert form.impossible(
            torch.tensor(total), method, clients, lambda name, count: 1.0 * count
        )


class Liars(Stressor):
    """Has a client give wrong shares in the rounds that it is told, beside a clock for the clients'
    code."""

    def __init__(self, monkeypatch, lies_in) -> None:
        self.round, honest = 0, SecureClient.unmask

        def unmask(client, message):
            answer = Payload.from_bytes(honest(client, message)).tensor("shares")
            return Payload(
                {"shares": answer ^ (client.id == LIAR and self.round in lies_in)}
            ).to_bytes()

        monkeypatch.setattr(SecureClient, "unmask", unmask)

    def change_cohort(self, cohort, *, round, context):
        self.round = round
        return cohort


def statuses(trainer) -> dict[int, str]:
    with (trainer.run_dir / "ledger.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if int(row["client"]) == LIAR]
    return {int(row["round"]): row["status"] for row in rows}


def fit_with_liar(folder: Path, monkeypatch, lies_in, rounds: int, **settings):
    with monkeypatch.context() as patch:
        callbacks = [Liars(patch, lies_in), *settings.pop("callbacks", [])]
        return run(
            make("FedAvg"),
            images(),
            folder,
            max_rounds=rounds,
            local_epochs=1,
            callbacks=callbacks,
            **settings,
        )


class WithoutLiar(Stressor):
    """What a run is compared with: the liar drops out from a round on."""

    def __init__(self, since: int) -> None:
        self.since = since

    def change_cohort(self, cohort, *, round, context):
        gone = round >= self.since
        return [
            replace(each, trains=False, returns=False, leaves_before="keys")
            if gone and each.client.id == LIAR
            else each
            for each in cohort
        ]


def test_who_is_named_twice_is_left_out_also_after_a_resume(tmp_path, monkeypatch, caplog):
    """No round is void, the sums are the plain ones, and the second naming counts in another
    process."""
    secure = {"secure_sum": SECURE, "allow_changed": True}
    whole = fit_with_liar(tmp_path / "whole", monkeypatch, {1, 2, 3}, 4, **secure)
    assert statuses(whole) == {1: "trained", 2: "trained", 3: "dropped", 4: "dropped"}
    line = "client 2 was named for wrong shares in 2 rounds, and is left out"
    assert caplog.text.count(line) == 1
    plain = run(
        make("FedAvg"),
        images(),
        tmp_path / "plain",
        max_rounds=4,
        local_epochs=1,
        callbacks=[WithoutLiar(3)],
    )
    assert torch.equal(whole.method.server["weights"], plain.method.server["weights"])
    for first in (1, 2, 3):
        folder = tmp_path / f"parts{first}"
        begun = fit_with_liar(folder, monkeypatch, {1, 2, 3}, first, **secure)
        again = fit_with_liar(
            folder, monkeypatch, {1, 2, 3}, 4, ckpt_path=str(begun.run_dir), **secure
        )
        assert statuses(again) == statuses(whole)
        assert torch.equal(again.method.server["weights"], whole.method.server["weights"])


def test_one_wrong_answer_is_forgiven(tmp_path, monkeypatch):
    trainer = fit_with_liar(tmp_path, monkeypatch, {1}, 3, secure_sum=SECURE)
    assert set(statuses(trainer).values()) == {"trained"}


@pytest.mark.parametrize("value", [-7000, 7000])
def test_planes_that_nobody_can_have_removed_void_the_round(value, tmp_path, monkeypatch, caplog):
    """FedMPQ halves a grid for each plane: 7 000 of them would leave no number."""
    method, bits = make("FedMPQ"), fraction_bits(6)

    # of bits, planes, removed, tops and weights, and five weights of clients
    def many_planes(vector):
        vector = vector.clone()
        layers = (len(vector) - 5 - method.layout.size) // 4
        vector[3 * layers] += value * 2**bits  # the first of tops
        return vector

    monkeypatch.setattr(
        "fl_lightning.privacy.secure.simulation.SecureClient", clients_with_a_liar(many_planes)
    )
    server, rows = fit(tmp_path, method, secure_sum=SecureSum(threshold=0.6))
    assert "in 'tops' values of 6 clients add up to" in caplog.text
    assert [row["secure/void"] for row in rows].count("1") == 1
    assert torch.isfinite(server["grid"]).all()


class BadSeals:
    """Has clients seal envelopes that cannot be opened, for so many of their neighbours, in some
    rounds."""

    def __init__(self, monkeypatch, spoils: dict[int, int], rounds: range) -> None:
        self.seen, honest = 0, SecureClient.shares

        def shares(client, message):
            given = Payload.from_bytes(honest(client, message))
            envelopes = given.tensor("envelopes").clone()
            if client.id == 0:  # whichever round it is, client 0 deals once
                self.seen += 1
            if self.seen in rounds:
                envelopes[: spoils.get(client.id, 0)] ^= 1
            return Payload({**dict(given.items()), "envelopes": envelopes}).to_bytes()

        monkeypatch.setattr(SecureClient, "shares", shares)


def test_who_seals_what_cannot_be_opened_is_left_out_after_two_rounds(
    tmp_path, monkeypatch, caplog
):
    BadSeals(monkeypatch, {LIAR: 5}, range(1, 9))
    trainer = run(
        make("FedAvg"), images(), tmp_path, max_rounds=4, local_epochs=1, secure_sum=SECURE
    )
    rows = trainer.progress.history
    assert [row["secure/void"] for row in rows] == [1, 1, 0, 0]
    assert statuses(trainer) == {1: "lost", 2: "lost", 3: "dropped", 4: "dropped"}
    named = "client 2 is named: envelopes between it and clients 0, 1, 3, 4, 5 cannot be opened"
    assert caplog.text.count(named) == 2
    assert (
        caplog.text.count("client 2 was named for wrong shares in 2 rounds, and is left out") == 1
    )


@pytest.mark.parametrize(("spoils", "void", "living"), [(1, 0, 5), (2, 0, 4)])
def test_who_spoils_few_envelopes_voids_nothing_and_one_complaint_names_nobody(
    spoils, void, living, tmp_path, monkeypatch, caplog
):
    BadSeals(monkeypatch, {LIAR: spoils}, range(1, 9))
    trainer = run(
        make("FedAvg"), images(), tmp_path, max_rounds=3, local_epochs=1, secure_sum=SECURE
    )
    rows = trainer.progress.history
    assert [row["secure/void"] for row in rows] == [void] * 3
    assert [row["clients/trained"] for row in rows] == ([5, 5, 5] if spoils == 1 else [4, 4, 5])
    assert (
        "client 0 cannot open the envelope that client 2 sealed: one of the two lies" in caplog.text
    ) == (spoils == 1)
    assert ("left out" in caplog.text) == (spoils > 1)


@pytest.mark.parametrize(
    ("complaints", "liars"),
    [
        ({(1, 9), (2, 9)}, {9}),
        ({(9, 1), (9, 2)}, {9}),  # one that complains of everybody
        ({(9, 1), (1, 9)}, set()),
        ({(1, 9), (2, 9), (1, 8), (2, 8)}, set()),  # 1 and 2, or 8 and 9
        ({(1, 9), (2, 9), (3, 9), (1, 8), (2, 8), (3, 8)}, {8, 9}),
        ({(1, 9), (2, 9), (3, 4)}, {9}),
        ({(1, 9), (2, 8), (3, 7)}, set()),
    ],
)
def test_complaints_convict_the_fewest_that_explain_them(complaints, liars):
    assert convicted(complaints) == liars


def test_a_complaint_of_strangers_or_of_nobody_is_no_complaint():
    server = SecureServer(SECURE, [0, 1, 2], 4)
    server.graph, server.fingerprints = {0: [1, 2], 1: [0, 2], 2: [0, 1]}, {0: b"", 1: b"", 2: b""}
    for ids in ([], [0], [7], [1, 2, 3], 1, [[1]], [[1, 2]]):
        message = Payload({"unopened": torch.tensor(ids, dtype=torch.int32)}).to_bytes()
        with pytest.raises(PayloadError):
            server.add_masked(0, message)
    assert not server.complaints
    server.add_masked(0, Payload({"unopened": torch.tensor([2], dtype=torch.int32)}).to_bytes())
    assert server.complaints == {(0, 2)}
    assert not server.living
