"""``examples`` is a client's weight in every average: nobody may claim more of it than the server
can know."""

from __future__ import annotations

import csv
from itertools import pairwise

import numpy as np
import pytest
import torch
from clocked import Loses
from hypothesis import given
from hypothesis import strategies as st
from ranks_program import fit
from refusals import refused
from ten import TEN

from callbacks import ByzantineClients
from fl_lightning.aggregation.averages import capped
from fl_lightning.aggregation.receiving import check_examples
from fl_lightning.client import Client
from fl_lightning.wire import Payload, PayloadError

HUGE = 2**62


def statuses(trainer) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    with (trainer.run_dir / "ledger.csv").open() as file:
        for row in csv.DictReader(file):
            found.setdefault(int(row["client"]), set()).add(row["status"])
    return found


# which weighs nobody by n_k
@pytest.mark.parametrize("name", [name for name in TEN if name != "FedMosaic"])
def test_a_client_that_claims_more_than_it_enrolled_with_is_refused_by_every_method(name, tmp_path):
    liars = ByzantineClients(clients=1 / 6, attack="sign_flip", strength=1.0, claimed_examples=HUGE)
    trainer = fit(name, tmp_path, max_rounds=1, participation=1.0, callbacks=[liars])
    (liar,) = liars.attackers(trainer)
    assert statuses(trainer) == {id: {"rejected" if id == liar else "trained"} for id in range(6)}


def test_a_lie_about_n_k_moves_the_mean_no_more_than_an_upload_that_is_lost(tmp_path):
    """With a claim of 2**62 one of six used to be the average."""
    liars = ByzantineClients(clients=1 / 6, attack="sign_flip", strength=1.0, claimed_examples=HUGE)
    lied = fit("FedAvg", tmp_path / "lied", participation=1.0, callbacks=[liars])
    liar = set(liars.attackers(lied))
    without = fit(
        "FedAvg", tmp_path / "lost", participation=1.0, callbacks=[Loses({1: liar, 2: liar})]
    )
    assert torch.equal(lied.method.server["weights"], without.method.server["weights"])


def test_the_claim_is_bounded_by_the_training_examples_of_that_client():
    client = Client(3, np.arange(5), np.arange(2))
    check_examples(Payload({"examples": torch.tensor(5)}), client)
    check_examples(Payload({"examples": torch.tensor(1)}), client)  # less is no gain
    check_examples(Payload({"weights": torch.ones(2)}), client)
    for claimed in (6, 2**31 - 1, HUGE, 2**63 - 1):
        with pytest.raises(PayloadError, match="enrolled with 5 training examples"):
            check_examples(Payload({"examples": torch.tensor(claimed)}), client)


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=12), st.floats(0.01, 1.0))
def test_capped_shares(examples, largest):
    shares = [n / sum(examples) for n in examples]
    found = capped(shares, largest)
    assert sum(found) == pytest.approx(1)
    assert max(found) <= max(largest, 1 / len(shares)) + 1e-12
    in_order = [share for _, share in sorted(zip(shares, found, strict=True))]
    assert all(after > before - 1e-12 for before, after in pairwise(in_order))
    if max(shares) <= largest:
        assert found == shares


def test_a_largest_share_bounds_what_a_large_client_weighs(tmp_path):
    """Without the bound the first client has 20 / 24 of the weight, with it one half."""
    from toy import CENTRES, Points, on_points, run, sgd

    from fl_lightning.methods import FedAvg

    found = {}
    for largest in (1.0, 0.5):
        method = on_points(FedAvg(max_share=largest))
        method.optimizer_spec = sgd(1.0)
        run(
            method,
            Points((20, 2, 2)),
            tmp_path / str(largest),
            max_rounds=1,
            local_epochs=1,
            participation=1.0,
            engine="sequential",
        )
        found[largest] = method.server["weights"]
    torch.testing.assert_close(found[1.0], (20 * CENTRES[0] + 2 * CENTRES[1] + 2 * CENTRES[2]) / 24)
    torch.testing.assert_close(found[0.5], CENTRES[0] / 2 + CENTRES[1] / 4 + CENTRES[2] / 4)


@pytest.mark.parametrize("claim", [0, -1, 2**63])
def test_a_claim_that_cannot_be_sent(claim):
    with refused("claimed_examples=", "write claimed_examples: "):
        ByzantineClients(claimed_examples=claim)
