"""Hostile clients lie about what methods send beside weights: such uploads are rejected, with a
reason, and the run goes on."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from all_methods import METHODS
from outcomes import rows_of
from refusals import refused
from test_hostile import Entries
from toy import run, sgd

from fl_lightning import methods
from fl_lightning.aggregation.exact_sum import MAX_MAGNITUDE, fraction_bits
from fl_lightning.conformance.toy import images, small_group_network, small_network
from fl_lightning.hooks import Stressor
from fl_lightning.methods import (
    SCAFFOLD,
    CenteredClipping,
    CoordinateMedian,
    FedCM,
    FedDC,
    FedDyn,
    FedNova,
    Krum,
    Method,
    MoFedSAM,
    WeightedMean,
)
from fl_lightning.privacy.secure import SecureSum
from fl_lightning.wire import Codes, Payload, PayloadError

NAN, INF = float("nan"), float("inf")
OF_VALUES = {
    "an axis before": lambda value: value.unsqueeze(0),
    "an axis behind": lambda value: value.unsqueeze(-1),
    "nothing in it": lambda value: value.flatten()[:0],
    "shorter": lambda value: value[..., :-1] if value.ndim else value.repeat(2),
    "codes": lambda value: Codes(torch.zeros(value.shape, dtype=torch.int32), 4),
    "1e300": lambda value: torch.full(value.shape, 1e300, dtype=torch.float64),
    "float64": lambda value: value.double(),
    "float16": lambda value: value.half(),
    "int64": lambda value: value.long(),
    "2**62 in int64": lambda value: torch.full(value.shape, 2**62),
    **{
        f"{number:g}": partial(lambda number, value: torch.full(value.shape, number), number)
        for number in (NAN, INF, -INF, 2.0**62, MAX_MAGNITUDE, -MAX_MAGNITUDE)
    },
}
OF_NUMBERS = {
    "negative": lambda value: -value - 1,
    "halves": lambda value: value + 0.5,
    "more than there are": lambda value: value + 1,
}
OF_ENTRY = {"steps": OF_NUMBERS | {"none": torch.zeros_like}, "counts": OF_NUMBERS}


def attacks(entries):
    """By name, what is done to an upload with these entries."""

    def change(entry, forge, upload):
        return {**upload, entry: forge(upload[entry])}

    def leave_out(entry, upload):
        return {name: value for name, value in upload.items() if name != entry}

    found = {"one entry more": lambda upload: {**upload, "more": torch.zeros(1)}}
    for entry in entries:
        found[f"no {entry}"] = partial(leave_out, entry)
        for name, forge in (OF_VALUES | OF_ENTRY.get(entry, {})).items():
            if (entry, name) != ("examples", "int64"):  # it is an integer
                found[f"{entry}: {name}"] = partial(change, entry, forge)
    return found


class InTurn(Entries):
    """The first attack in round 1, the second in round 2, and so on."""

    def __init__(self, attacks) -> None:
        super().__init__(None)
        self.attacks, self.victims = list(attacks.values()), []

    def change_cohort(self, cohort, *, round, context):
        super().change_cohort(cohort, round=round, context=context)
        self.attack = self.attacks[round - 1]
        self.victims.append(self.victim)
        return cohort


class Seen(Stressor):
    def change_upload(self, upload, *, client, round, context):
        self.entries = list(upload)
        return upload


ONE_ROUND = {"max_local_steps": 1, "participation": 0.5, "eval_every": 10**6, "checkpoint_every": 0}
MADE = {
    "SCAFFOLD": SCAFFOLD,
    "SCAFFOLD with a personal part": partial(SCAFFOLD, personal="norm"),
    "FedNova with momentum": partial(
        FedNova, mu=0.1, server_momentum=0.5, optimizer=sgd(0.05, momentum=0.9)
    ),
    "FedDC under a median": partial(FedDC, average=CoordinateMedian()),
    "APFL": partial(methods.APFL, network=small_group_network),
    **{
        name: getattr(methods, name)
        for name in ("Ditto", "FedALA", "FedCM", "FedDyn", "FedProto", "FedRep")
    },
    **{name: getattr(methods, name) for name in ("FedRoD", "FedSpeed", "MoFedSAM")},
}


@pytest.mark.quick("SCAFFOLD", "FedRep", "FedDC under a median")
@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_every_lie_is_rejected_with_a_reason_and_ends_nothing(make, tmp_path, caplog):
    """One round for each lie, of which the others' uploads count."""

    def method():
        return make(
            **{"network": small_network, "optimizer": sgd(0.05), **getattr(make, "keywords", {})}
        )

    seen = Seen()
    run(method(), images(), tmp_path, max_rounds=1, callbacks=[seen], **ONE_ROUND)
    lies = attacks(seen.entries)
    assert len(lies) >= 33
    liar = InTurn(lies)
    trainer = run(method(), images(), tmp_path, max_rounds=len(lies), callbacks=[liar], **ONE_ROUND)
    ledger = rows_of(trainer.run_dir / "ledger.csv")
    for round, (lie, victim) in enumerate(zip(lies, liar.victims, strict=True), start=1):
        statuses = [row["status"] for row in ledger if row["round"] == str(round)]
        assert statuses == ["rejected", "trained", "trained"], lie
        assert f"round {round}: upload of client {victim} rejected: " in caplog.text, lie
    assert all(bool(torch.isfinite(tensor).all()) for tensor in trainer.method.server.values())


@pytest.mark.parametrize("name", METHODS)
def test_every_method_declares_its_uploads(name):
    """Or an entry more and other shapes would be found out by those of other clients alone."""
    kind = getattr(methods, name)
    declares = next(cls for cls in kind.__mro__ if {"upload", "upload_limits"} & vars(cls).keys())
    assert "upload_limits" in vars(declares)


class Largest(Entries):
    """In round 1 an entry of one client is as large as an upload may be."""

    def __init__(self, entry) -> None:
        super().__init__(
            lambda sent: {**sent, entry: torch.full_like(sent[entry], MAX_MAGNITUDE - 1)}
        )

    def change_upload(self, upload, *, client, round, context):
        if round > 1:
            return upload
        return super().change_upload(upload, client=client, round=round, context=context)


@pytest.mark.parametrize("make", [FedCM, MoFedSAM, SCAFFOLD], ids=lambda make: make.__name__)
def test_a_step_beyond_all_uploads_is_not_made(make, tmp_path, caplog):
    """Ten times a mean of large weights: no upload of the next round could be as large."""
    method = make(network=small_network, optimizer=sgd(0.05), server_lr=10.0)
    trainer = run(
        method, images(), tmp_path, max_rounds=3, callbacks=[Largest("weights")], local_epochs=1
    )
    assert "round 1: the server's next weights would reach 1.04858e+06" in caplog.text
    assert [row["clients/trained"] for row in rows_of(trainer.run_dir / "metrics.csv")] == [
        "0",
        "6",
        "6",
    ]
    assert float(method.server["weights"].abs().max()) < 10


def test_work_that_is_nearly_nothing_divides_no_large_update(tmp_path, caplog):
    """Momentum takes a_i of six steps back to 0.06; an update is divided by that."""
    method = FedNova(network=small_network, optimizer=sgd(0.9, momentum=0.95), mu=1.0)
    trainer = run(
        method,
        images(),
        tmp_path,
        max_rounds=1,
        callbacks=[Largest("weights")],
        max_local_steps=6,
        local_epochs=9,
    )
    assert 0 < method.work_of(6) < 0.07
    assert "an update that is too large for work of 0.06" in caplog.text
    assert [row["status"] for row in rows_of(trainer.run_dir / "ledger.csv")].count("trained") == 5


def test_a_rate_of_zero_leaves_a_servers_momentum(tmp_path):
    """In the last rounds of LinearLR clients stay where they are, and what the server has gathered
    is no step at that rate."""
    decay = partial(torch.optim.lr_scheduler.LinearLR, start_factor=1.0, end_factor=0.0)
    method = FedNova(
        network=small_network,
        optimizer=sgd(0.1),
        scheduler=partial(decay, total_iters=2),
        server_momentum=0.9,
    )
    trainer = run(method, images(), tmp_path, max_rounds=4, local_epochs=1)
    assert [row["clients/trained"] for row in rows_of(trainer.run_dir / "metrics.csv")] == ["6"] * 4
    assert method.server["momentum"].isfinite().all()


def test_a_rate_that_rises_beyond_a_i_says_so(tmp_path):
    rising = partial(torch.optim.lr_scheduler.LinearLR, start_factor=0.1, end_factor=1.0)
    method = FedNova(
        network=small_network,
        optimizer=sgd(0.5, momentum=0.99),
        scheduler=partial(rising, total_iters=2),
        mu=1.0,
    )
    with refused("mu 1 at a learning rate of 0.5, that of round 3", "write --model.mu 0.01"):
        run(method, images(), tmp_path, max_rounds=4, max_local_steps=8, local_epochs=9)


def test_work_below_nothing_is_refused(tmp_path):
    method = FedNova(network=small_network, optimizer=sgd(0.5, momentum=0.99), mu=1.0)
    with pytest.raises(ValueError, match="or a_i need not be above 0"):
        run(method, images(), tmp_path / "runs", max_rounds=1)


@pytest.mark.parametrize("average", [CoordinateMedian(), Krum(1), CenteredClipping(0.1)])
@pytest.mark.parametrize(("make", "vector"), [(SCAFFOLD, "c"), (FedDC, "G")])
def test_a_robust_average_guards_control_variates(make, vector, average, tmp_path):
    sizes = []
    for guard in (average, WeightedMean()):
        method = make(network=small_network, optimizer=sgd(0.05), average=guard)
        run(method, images(), tmp_path, max_rounds=1, callbacks=[Largest("change")], local_epochs=1)
        sizes.append(float(method.server[vector].norm()))
    assert 0 < sizes[0] < 10 < sizes[1] / 1000


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (FedDyn, "in 'clients' values of 6 clients add up to 6"),
        (FedNova, "in 'lengths' values of 6 clients"),
    ],
)
def test_a_secure_sum_knows_how_much_work_there_can_be(make, says, tmp_path, monkeypatch, caplog):
    """The first value of the sums is that number; 100 more of it are within the 2^20 of other
    sums."""
    pytest.importorskip("Crypto")
    from liars import clients_with_a_liar, more

    lie = clients_with_a_liar(more(0, 100 * 2 ** fraction_bits(6)))
    monkeypatch.setattr("fl_lightning.privacy.secure.simulation.SecureClient", lie)
    method: Method = make(network=small_network, optimizer=sgd(0.05))
    settings = {"max_rounds": 2, "local_epochs": 1, "secure_sum": SecureSum(threshold=0.6)}
    trainer = run(method, images(), tmp_path, **settings)
    assert [row["secure/void"] for row in rows_of(trainer.run_dir / "metrics.csv")] == ["0", "1"]
    assert says in caplog.text


def test_codes_for_a_vector_are_refused_where_it_is_checked(tmp_path):
    method = SCAFFOLD(network=small_network, optimizer=sgd(0.05))
    trainer = run(method, images(), tmp_path, max_rounds=1, local_epochs=1)
    client, P = trainer.data.client(0), method.trained.size
    sent = {**method.broadcast(client), "examples": method.examples_of(client)}
    with pytest.raises(PayloadError, match="entry 'change' holds codes"):
        method.check(
            Payload({**sent, "change": Codes(torch.zeros(P, dtype=torch.int32), 4)}), client
        )
