"""Runs with a secure sum against plain ones: the same weights, bit for bit, whoever drops out
when."""

from __future__ import annotations

import csv
import json
import logging
from itertools import product
from pathlib import Path

import pytest
import yaml
from outcomes import rows_of
from refusals import refused
from secure_methods import METHODS
from ten import make
from toy import run, run_for_nothing

from callbacks import ByzantineClients, SecureDropout, StragglerDropout
from fl_lightning.compatibility import methods_with, why_not
from fl_lightning.conformance.toy import images
from fl_lightning.hooks import Stressor
from fl_lightning.methods import CoordinateMedian, FedAvg, NormClipping
from fl_lightning.privacy.secure import PHASES, SecureSum

pytest.importorskip("Crypto")

SECURE = SecureSum(threshold=0.6)  # 4 of 6 clients
OF_EACH_KIND = {
    "FedAvg",
    "SCAFFOLD",
    "APFL",
    "QFedAvg",
    "FedPQ",
    "FedMPQKD",
    "FedBN",
    "NormClipping",
}
OPTIMISED = {"FedAvgM", "FedAdam", "FedYogi", "FedAdagrad", "FedExP", "FedACG"}
"""FedAvg with a server optimiser."""


class Leaves(Stressor):
    """Drops the first clients of the cohort out before a phase, as many as it is told."""

    def __init__(self, clients: int, phase: str) -> None:
        self.clients, self.phase = clients, phase

    def change_cohort(self, cohort, *, round, context):
        return (
            SecureDropout(1.0, self.phase).change_cohort(
                cohort[: self.clients], round=round, context=context
            )
            + cohort[self.clients :]
        )


def outcome(folder: Path, name: str = "FedAvg", **settings) -> tuple[str, list[dict], list[dict]]:
    """SHA-256 of the weights, rows of the metrics and of the ledger."""
    kind = "FedAvg" if name == "NormClipping" else name
    method = make(kind, **METHODS[name])
    trainer = run(method, images(), folder, **{"max_rounds": 2, "local_epochs": 1, **settings})
    metadata = json.loads((trainer.run_dir / "metadata.json").read_text())
    tables = []
    for table in ("metrics", "ledger"):
        tables.append(rows_of(trainer.run_dir / f"{table}.csv"))
    return metadata["weights_sha256"], *tables


def statuses(ledger: list[dict]) -> list[str]:
    return [row["status"] for row in ledger]


@pytest.mark.quick("FedAvg", "FedMPQKD", "FedRep", "SCAFFOLD", "NormClipping")
@pytest.mark.parametrize("name", METHODS)
def test_a_secure_sum_is_the_plain_one(name, tmp_path):
    plain, _, ledger = outcome(tmp_path / "plain", name)
    secure, metrics, masked = outcome(tmp_path / "secure", name, secure_sum=SECURE)
    assert secure == plain
    assert statuses(masked) == statuses(ledger) == ["trained"] * 12
    assert all(row["secure/void"] == "0" for row in metrics)


@pytest.mark.parametrize(
    ("name", "phase"), [*(("FedAvg", phase) for phase in PHASES), ("FedMPQ", "masked")]
)
def test_so_it_is_where_clients_drop_out(name, phase, tmp_path):
    everybody, *_ = outcome(tmp_path / "everybody", name)
    check_dropouts(name, phase, 2, everybody, tmp_path)  # as many as the threshold allows


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.essential if name in OF_EACH_KIND else [])
        for name in METHODS
    ],
)
def test_so_it_is_for_every_method_and_phase(name, tmp_path):
    everybody, *_ = outcome(tmp_path / "everybody", name)
    for clients, phase in product((1, 2), PHASES):
        if (name, clients) == ("FedAvg", 2):
            continue  # the test above has them
        check_dropouts(name, phase, clients, everybody, tmp_path / f"{clients}-{phase}")


def check_dropouts(name: str, phase: str, clients: int, everybody: str, folder: Path) -> None:
    callbacks = [Leaves(clients, phase)]
    plain, *_ = outcome(folder / "plain", name, callbacks=callbacks)
    secure, _, ledger = outcome(folder / "secure", name, callbacks=callbacks, secure_sum=SECURE)
    assert secure == plain
    assert (plain == everybody) == (phase == "unmask")  # or nobody dropped out
    gone = {"keys": "dropped", "shares": "dropped", "masked": "lost", "unmask": "trained"}[phase]
    assert statuses(ledger) == [*[gone] * clients, *["trained"] * (6 - clients)] * 2
    for row in ledger:
        assert (int(row["upload"]) > 0) == (row["status"] != "dropped" or phase == "shares")
        assert row["wasted"] == ("0" if row["status"] == "trained" else row["upload"])


@pytest.mark.parametrize("phase", PHASES)
def test_below_the_threshold_a_round_is_void(phase, tmp_path, caplog):
    trainer = run_for_nothing(
        make("FedAvg"),
        images(),
        tmp_path,
        max_rounds=1,
        callbacks=[Leaves(3, phase)],
        secure_sum=SECURE,
    )
    assert "round 1 is void, and the model stays: 3 of 6 clients" in caplog.text
    ledger = rows_of(trainer.run_dir / "ledger.csv")
    assert {row["status"] for row in ledger} <= {"dropped", "lost"}
    assert all(row["upload"] == row["wasted"] for row in ledger)
    with (trainer.run_dir / "metrics.csv").open() as file:
        (metrics,) = csv.DictReader(file)
    assert metrics["secure/void"] == "1"
    assert sum(int(row["upload"]) for row in ledger) == int(metrics["comm/wasted_bytes"]) > 0


def test_a_void_round_changes_no_weight(tmp_path):
    class LeaveInRound2(Leaves):
        def change_cohort(self, cohort, *, round, context):
            return (
                super().change_cohort(cohort, round=round, context=context)
                if round == 2
                else cohort
            )

    one, *_ = outcome(tmp_path / "one", max_rounds=1, secure_sum=SECURE)
    two, metrics, _ = outcome(
        tmp_path / "two", callbacks=[LeaveInRound2(3, "unmask")], secure_sum=SECURE
    )
    assert one == two
    assert [row["secure/void"] for row in metrics] == ["0", "1"]


class Damaged(Stressor):
    """Flips one bit of what clients 1 and 4 send: their uploads, or their masked vectors."""

    def change_bytes(self, upload, *, client, round, context):
        return upload[:-1] + bytes([upload[-1] ^ 1]) if client.id in (1, 4) else upload


@pytest.mark.parametrize(
    "stressor",
    [
        *(
            Damaged(),
            StragglerDropout(0.2, "after"),
            ByzantineClients(0.2),
            ByzantineClients(0.3, "noise"),
        ),
        ByzantineClients(0.2, claimed_examples=1000),
    ],
    ids=lambda stressor: type(stressor).__name__,
)
def test_stressors_do_the_same_to_both(stressor, tmp_path):
    plain, _, ledger = outcome(tmp_path / "plain", "QFedAvg", callbacks=[stressor])
    secure, _, masked = outcome(
        tmp_path / "secure", "QFedAvg", callbacks=[stressor], secure_sum=SECURE
    )
    assert secure == plain
    assert statuses(masked) == statuses(ledger)
    for row in masked:  # a client that refuses its own upload sends no vector
        sends_vector = int(row["upload"]) > 10_000
        assert sends_vector == (row["status"] != "rejected" or isinstance(stressor, Damaged))


@pytest.mark.parametrize(
    "engine", [{"workers": 2}, {"engine": "batched"}], ids=["workers", "batched"]
)
def test_engines_do_not_matter(engine, tmp_path):
    plain, *_ = outcome(tmp_path / "plain", **engine)
    secure, *_ = outcome(tmp_path / "secure", secure_sum=SecureSum(neighbours=2), **engine)
    assert secure == plain


@pytest.mark.slow
@pytest.mark.essential
def test_resume_is_exact(tmp_path):
    settings = {
        "callbacks": [SecureDropout(0.15, phase) for phase in PHASES],
        "secure_sum": SECURE,
        "participation": 1.0,
        "local_epochs": 1,
    }
    whole = run(make("FedMPQ"), images(), tmp_path / "whole", max_rounds=4, **settings)
    first = run(make("FedMPQ"), images(), tmp_path / "parts", max_rounds=2, **settings)
    again = run(
        make("FedMPQ"), images(), tmp_path / "parts", max_rounds=4, ckpt_path=str(first.run_dir),
        allow_changed=True, **settings,
    )  # fmt: skip
    assert (again.run_dir / "ledger.csv").read_text() == (whole.run_dir / "ledger.csv").read_text()
    hashes = [
        json.loads((t.run_dir / "metadata.json").read_text())["weights_sha256"]
        for t in (whole, again)
    ]
    assert hashes[0] == hashes[1]


@pytest.mark.parametrize(
    ("name", "settings", "given", "instead"),
    [
        *((name, {}, f"--model {name}", "FedAvg, APFL") for name in ("FedKD", "FedMosaic", "LocalOnly", "Centralised", "Oracle")),
        ("FedAvg", {"average": CoordinateMedian()}, "--model.average CoordinateMedian", "NormClipping"),
        (
            *("AQFL", {"average": NormClipping(1.0), "download": "quantised"}),
            *("--model.average NormClipping and --model.download quantised", "download full"),
        ),
        ("FedAvg", {"max_share": 0.5}, "--model.max_share 0.5", "max_share 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_needs_single_uploads_is_refused(name, settings, given, instead, tmp_path):
    method = make(name, **settings)
    with refused(f"--trainer.secure_sum with {given}", instead):
        run(method, images(), tmp_path / "runs", max_rounds=1, secure_sum=SECURE)
    assert not (tmp_path / "runs").exists()


def test_a_method_of_ones_own_is_refused_where_it_reads_uploads():
    class Reads(FedAvg):
        def aggregate(self, uploads):
            pass

    assert "aggregate" in why_not(Reads(), "secure_sum")
    assert "aggregate" in why_not(Reads, "secure_sum")
    others = {"FedAdaLoRA", "FedVEMoE", "HEST", "HESTLadder"} | OPTIMISED
    assert {*methods_with("secure_sum")} == {*METHODS} - {"NormClipping"} | others


@pytest.mark.parametrize(
    "settings", [{"threshold": 0.5}, {"threshold": 1.1}, {"neighbours": 3}, {"neighbours": 0}]
)
def test_bad_settings(settings):
    ((name, value),) = settings.items()
    with refused(f"--trainer.secure_sum.{name} {value}", f"--trainer.secure_sum.{name}"):
        SecureSum(**settings)


def test_one_client_alone_is_refused(tmp_path):
    with refused("1 client in a round", "participation"):
        run(make("FedAvg"), images(), tmp_path, max_rounds=1, participation=0.1, secure_sum=SECURE)


def test_without_the_extra_one_line_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr("fl_lightning.privacy.secure.settings.find_spec", lambda name: None)
    with refused("cryptography and pycryptodome", 'pip install "fl_lightning[privacy]"'):
        run(make("FedAvg"), images(), tmp_path, max_rounds=1, secure_sum=SECURE)


def test_a_run_from_python_has_the_settings_of_the_command_line(tmp_path):
    trainer = run(
        make("FedAvg"), images(), tmp_path, max_rounds=1, secure_sum=SecureSum(neighbours=4)
    )
    written = yaml.safe_load((trainer.run_dir / "config.yaml").read_text())
    assert written["trainer"]["secure_sum"] == {"threshold": 0.67, "neighbours": 4}


def test_the_log_says_once_that_keys_are_no_secrets(tmp_path, caplog):
    caplog.set_level(logging.INFO, "fl_lightning")
    outcome(tmp_path, secure_sum=SECURE)
    assert caplog.text.count("no secrets") == 1
