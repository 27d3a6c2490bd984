"""FedMosaic: layers, what travels, what stays, who helps whom."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from mosaics import (
    LARGE,
    REFERENCE,
    SMALL,
    Nobody,
    built,
    digits,
    mosaic,
    mosaic_on_points,
    point_client,
)
from safetensors.torch import load_file
from torch import nn
from toy import CENTRES, Points, run, run_for_nothing, sgd

from fl_lightning import rng
from fl_lightning.aggregation.receiving import check_upload
from fl_lightning.data import FederatedImages, Shards
from fl_lightning.data.test_owners import deal_test_set
from fl_lightning.hooks import Meter, Stressor
from fl_lightning.methods import FedMosaic
from fl_lightning.models import build_network
from fl_lightning.wire import Payload, PayloadError


def test_two_of_six(tmp_path):
    """Who took part is known, with what it sent; each is helped by the other, the rest by the plain
    mean of the two."""
    data, method = digits(6), mosaic()
    trainer = run(method, data, tmp_path, max_rounds=1, participation=2 / 6)
    cohort = [
        int(line.split(",")[1])
        for line in (trainer.run_dir / "ledger.csv").read_text().splitlines()[1:]
    ]
    assert method.server["ids"].tolist() == cohort
    first, second = method.server["adapters"]
    assert not torch.equal(first, second)
    for id in range(6):
        sent = method.broadcast(data.client(id)).tensor("adapters")
        expected = {cohort[0]: second, cohort[1]: first}.get(id, (first + second) / 2)
        torch.testing.assert_close(sent, expected)


def test_a_client_that_was_not_sampled_still_helps_and_its_row_is_replaced_by_its_newest(tmp_path):
    data, method = digits(6), mosaic()
    run(method, data, tmp_path, max_rounds=6, participation=2 / 6)
    ids = method.server["ids"].tolist()
    assert len(ids) > 2
    assert ids == sorted(set(ids))


def uploads(count: int = 5) -> dict[int, Payload]:
    generator = torch.Generator().manual_seed(0)
    return {
        id: Payload(
            {
                "adapters": torch.randn(3, 4, 5, generator=generator),
                "sketch": torch.randn(1020, generator=generator),
            }
        )
        for id in range(count)
    }


def test_the_order_of_uploads_changes_nothing():
    given = uploads()
    one, other = built(mosaic()), built(mosaic())
    one.aggregate(given)
    other.aggregate({id: given[id] for id in (3, 0)})
    other.aggregate({id: given[id] for id in (4, 2, 1, 0)})
    for name, value in one.server.items():
        assert torch.equal(value, other.server[name])
    for id in range(6):
        assert torch.equal(
            one.broadcast(point_client(id)).tensor("adapters"),
            other.broadcast(point_client(id)).tensor("adapters"),
        )


def test_renamed_clients_get_the_same_models():
    """A permutation of the clients permutes what they are sent."""
    given, names = uploads(), [3, 1, 4, 0, 2]
    one, other = built(mosaic()), built(mosaic())
    one.aggregate(given)
    other.aggregate({names[id]: upload for id, upload in given.items()})
    for id in range(5):
        sent = other.broadcast(point_client(names[id])).tensor("adapters")
        torch.testing.assert_close(one.broadcast(point_client(id)).tensor("adapters"), sent)


def test_infinite_tau_is_the_plain_mean_of_the_others_and_include_self_adds_the_client():
    given = uploads(3)
    for include_self, others in ((False, [1, 2]), (True, [0, 1, 2])):
        method = built(mosaic(tau=float("inf"), include_self=include_self))
        method.aggregate(given)
        expected = torch.stack([given[id].tensor("adapters") for id in others]).mean(0)
        torch.testing.assert_close(method.broadcast(point_client(0)).tensor("adapters"), expected)


def test_the_server_knows_only_what_was_sent(tmp_path):
    class Zero(Stressor):
        def change_upload(self, upload, *, client, round, context):
            return Payload({name: value * 0 for name, value in upload.items()})

    data, method = digits(), mosaic()
    run(method, data, tmp_path, max_rounds=2, callbacks=[Zero()])
    assert method.broadcast(data.client(0)).tensor("adapters").abs().max() == 0
    assert all(value.abs().max() == 0 for name, value in method.server.items() if name != "ids")

    method.aggregate(uploads(3))
    clean = method.broadcast(point_client(0)).to_bytes()
    assert (
        method.broadcast(
            point_client(0, trained=torch.ones(9), gradient=torch.ones(10, 256))
        ).to_bytes()
        == clean
    )


def test_bytes_equal_the_hand_formula(tmp_path):
    """Header 19, an entry 3 + name + 4 per dimension; 3 blocks of rank 4; 0.4 of 256 feature rows,
    10 classes each."""
    adapters = 3 + len("adapters") + 12 + 4 * 3 * 4 * (4 + 1)
    sketch = 3 + len("sketch") + 4 + 4 * 102 * 10
    trainer = run(mosaic(), digits(), tmp_path, max_rounds=2)
    ledger = [
        line.split(",") for line in (trainer.run_dir / "ledger.csv").read_text().splitlines()[1:]
    ]
    assert {(int(row[3]), int(row[4])) for row in ledger} == {
        (19 + adapters, 19 + adapters + sketch)
    }


@pytest.mark.parametrize(
    "bad",
    [
        {"adapters": torch.zeros(2, 4, 5)}, {"sketch": torch.zeros(3)},
    ],
)  # fmt: skip
def test_uploads_that_do_not_fit_are_refused(bad):
    with pytest.raises(PayloadError):
        check_upload(built(mosaic()), Payload({**uploads(1)[0], **bad}), point_client(0), ())


def test_a_client_that_diverges_is_rejected_and_starts_again_from_what_it_kept(tmp_path):
    class Explode(FedMosaic):
        def task_loss(self, outputs, target):
            loss = super().task_loss(outputs, target)
            return (
                loss * float("nan")
                if self.round == 2 and self.network is self.families[0]
                else loss
            )

    data, method = (
        digits(),
        Explode(
            networks=[SMALL, LARGE], reference=REFERENCE, rank=4, num_blocks=3, optimizer=sgd()
        ),
    )
    trainer = run(method, data, tmp_path, max_rounds=3)
    ledger = [
        line.split(",")[:3]
        for line in (trainer.run_dir / "ledger.csv").read_text().splitlines()[1:]
    ]
    assert [(row[0], row[1]) for row in ledger if row[2] == "rejected"] == [
        ("2", "0"),
        ("2", "2"),
        ("2", "4"),
    ]
    assert all(value.isfinite().all() for value in method.server.values())
    assert all(np.isfinite(float(v)) for v in last_row(trainer).values() if v)


def resident(method: FedMosaic) -> dict[str, torch.Tensor]:
    """Every parameter and buffer once; ``network`` is the family that was last in use."""
    return {
        name: value
        for name, value in method.state_dict().items()
        if not name.startswith("network.")
    }


def test_frozen_things_do_not_move(tmp_path):
    """Only P, Q, g and the head are trained; Pg and Qg are received; statistics of BatchNorm are
    part of the base."""

    def normed(classes: int) -> nn.Module:
        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(3072, 8),
            nn.BatchNorm1d(8),
            nn.Linear(8, 8),
            nn.Linear(8, 8),
            nn.Linear(8, classes),
        )

    settings = {"networks": [SMALL, normed]}
    before = copy.deepcopy(resident(built(mosaic(**settings))))
    method = mosaic(**settings)
    run(method, digits(), tmp_path, max_rounds=2)
    after = resident(method)
    assert before.keys() == after.keys()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    allowed = (".P", ".Q", ".gate", ".global_P", ".global_Q")
    heads = ("families.0.classifier.", "families.1.5.")
    assert moved
    assert all(name.endswith(allowed) or name.startswith(heads) for name in moved), moved
    assert not any("base" in name or "reference" in name or "running" in name for name in moved)


def test_before_anyone_has_trained_every_model_is_its_family_s_base():
    data = digits()
    method = built(mosaic(), data)
    images, _ = next(data.test_batches())
    with rng.torch_stream(0, "weights"):
        build_network(REFERENCE, 10, (3, 32, 32))
        plain = build_network(SMALL, 10, (3, 32, 32))
    assert torch.equal(method.deploy(data.client(0))(images), plain(images))
    assert torch.equal(method.deploy(data.client(2))(images), plain(images))
    assert method.deploy(data.client(1))(images).shape == plain(images).shape
    assert method.deploy() is not None  # a newcomer's


def test_clients_do_not_leak_into_each_other(tmp_path):
    data, states = digits(), {}

    class Keep(Meter):
        def on_client_end(self, client, round, context):
            states[client.id] = client.state

    method = mosaic()
    run(method, data, tmp_path, max_rounds=2, callbacks=[Keep()])
    images, _ = next(data.test_batches())
    with torch.no_grad():
        alone = {id: method.deploy(data.client(id, states[id]))(images) for id in (0, 2, 4)}
        for id in (4, 0, 2):
            assert torch.equal(method.deploy(data.client(id, states[id]))(images), alone[id])
    assert not torch.equal(alone[0], alone[2])
    assert set(states[0]) == {"trained", "gradient"}


@pytest.mark.parametrize("gate", ["scalar", "input"])
def test_each_client_reaches_its_own_optimum(gate, tmp_path):
    states = {}

    class Keep(Meter):
        def on_client_end(self, client, round, context):
            states[client.id] = client.state

    data, method = Points((3, 1, 2)), mosaic_on_points(gate=gate)
    run(method, data, tmp_path, max_rounds=80, callbacks=[Keep()])
    for id in range(3):
        network = method.deploy(data.client(id, states[id]))
        torch.testing.assert_close(
            network(torch.ones(1, 1))[0].detach(), CENTRES[id], rtol=0, atol=1e-2
        )


def test_an_empty_federation_is_still_evaluated(tmp_path):
    class AllDrop(Stressor):
        def change_cohort(self, cohort, *, round, context):
            from dataclasses import replace

            return [replace(assignment, trains=False, returns=False) for assignment in cohort]

    for stressor in (AllDrop(), Nobody()):
        method = mosaic()
        trainer = run_for_nothing(method, digits(), tmp_path, max_rounds=2, callbacks=[stressor])
        assert len(method.server["ids"]) == 0
        assert 0 <= float(last_row(trainer)["val/accuracy"]) <= 1


def test_a_client_with_one_example(tmp_path):
    class Lopsided(Shards):
        def __call__(self, labels, num_clients, seed):
            return [np.array([0]), np.arange(1, len(labels))]

    data = FederatedImages(num_clients=2, partition=Lopsided(), batch_size=64)
    method = mosaic()
    run(method, data, tmp_path, max_rounds=2)
    assert method.server["ids"].tolist() == [0, 1]
    assert all(value.isfinite().all() for value in method.server.values())


def last_row(trainer) -> dict[str, str]:
    lines = (trainer.run_dir / "metrics.csv").read_text().splitlines()
    return dict(zip(lines[0].split(","), lines[-1].split(","), strict=True))


def test_a_run_killed_in_mid_round_ends_like_one_that_was_not(tmp_path):
    class Kill(Meter):
        def on_client_end(self, client, round, context):
            if round == 3:
                raise KeyboardInterrupt

    settings = {"max_rounds": 5, "participation": 0.5}
    whole, method = run(mosaic(), digits(), tmp_path / "a", **settings), mosaic()
    with pytest.raises(KeyboardInterrupt):
        run(mosaic(), digits(), tmp_path / "b", callbacks=[Kill()], **settings)
    resumed = run(
        method,
        digits(),
        tmp_path / "b",
        ckpt_path="last",
        callbacks=[Meter()],
        allow_changed=True,
        **settings,
    )
    for kind in ("server", "clients"):
        newest = [
            max((trainer.run_dir / "checkpoints").glob("round_*")) for trainer in (whole, resumed)
        ]
        ends = [load_file(folder / f"{kind}.safetensors") for folder in newest]
        assert ends[0].keys() == ends[1].keys() != set()
        assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    rows = [
        {k: v for k, v in last_row(trainer).items() if not k.startswith("time/")}
        for trainer in (whole, resumed)
    ]
    assert rows[0] == rows[1]
    assert whole.journal.metadata["weights_sha256"] == resumed.journal.metadata["weights_sha256"]


@pytest.fixture(scope="module")
def by_default(tmp_path_factory) -> dict[str, torch.Tensor]:
    """What two rounds of one local epoch end with, without a setting."""
    return ended(mosaic(), tmp_path_factory.mktemp("default"))


def ended(method: FedMosaic, folder: Path) -> dict[str, torch.Tensor]:
    run(method, digits(), folder, max_rounds=2, local_epochs=1, eval_every=2)
    return method.server


@pytest.mark.slow
@pytest.mark.essential
@pytest.mark.parametrize(
    "settings",
    [
        {"tau": 0.1}, {"include_self": True}, {"gate": "input"}, {"full_gradient": False}, {"head": "frozen"}, {"scale": 2.0},
        {"ema": 1.0}, {"sigma": 0.1}, {"sketch_rows": 0.1}, {"sketch_batches": 1}, {"networks": [LARGE, SMALL]},
        {"networks": None, "network": LARGE}, {"head": "frozen", "gate": "input"}, {"rank": 2}, {"num_blocks": 1},
    ],
    ids=str,
)  # fmt: skip
def test_every_option_changes_the_result_and_stays_finite(settings, by_default, tmp_path):
    found = ended(mosaic(**settings), tmp_path)
    assert all(value.isfinite().all() for value in found.values())
    assert any(not torch.equal(by_default[name], found[name]) for name in by_default)


def test_personalised_metrics(tmp_path):
    trainer = run(mosaic(), digits(), tmp_path, max_rounds=6)
    row = {name: float(value) for name, value in last_row(trainer).items()}
    assert row["val/accuracy"] > 0.7  # of two or three classes each; chance is below 0.5
    assert 0 <= row["val/accuracy_worst_decile"] <= row["val/accuracy"]
    assert row["val/accuracy_std"] >= 0
    assert row["test/accuracy"] > 0.6


def test_the_test_set_is_dealt_to_those_who_hold_its_classes():
    data = digits(8)
    built(mosaic(), data)
    owner, counts = deal_test_set(data), data.group_counts()
    assert owner.shape == data.test_target.shape
    assert (counts[owner, data.test_target.numpy()] > 0).all()
    assert (owner == deal_test_set(data)).all()
    assert len(np.unique(owner)) == 8


def test_a_personalised_test_asks_each_owner_and_keeps_the_order(tmp_path):
    from lightning.fabric import Fabric

    from fl_lightning.evaluation import on_test_set as evaluate

    class Sign(FedMosaic):
        """Client k answers class k % 10, always."""

        def deploy(self, client=None):
            class Constant(nn.Module):
                def forward(self, images):
                    return torch.eye(10)[torch.full((len(images),), client.id % 10)]

            return Constant()

    data = digits(8)
    method = built(Sign(networks=[SMALL], reference=REFERENCE, num_blocks=3), data)
    metrics, (probs, target) = evaluate(Fabric(accelerator="cpu"), method, data)
    assert torch.equal(target, data.test_target)
    assert (probs.argmax(1).numpy() == deal_test_set(data)).all()
    assert metrics["test/accuracy"] == pytest.approx(
        float((deal_test_set(data) == target.numpy()).mean())
    )
