"""Attacks of clients that know the honest uploads of the round, and flipped labels."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor
from toy import CENTRES, Points, on_points, run, sgd

from callbacks import ByzantineClients
from callbacks.stressors.byzantine_clients import hiding_quantile, min_max_length
from fl_lightning.client import Client
from fl_lightning.compatibility import Run, check_run
from fl_lightning.data import IID, FederatedImages
from fl_lightning.errors import InputError
from fl_lightning.hooks import Stressor, sees_uploads
from fl_lightning.methods import FedAvg, Krum, MultiKrum, QFedAvg
from fl_lightning.privacy import ClientPrivacy
from fl_lightning.tasks import Regression
from fl_lightning.wire import Layout, Payload

JOINT = ("alie", "ipm", "min_max")
CLIENTS = 10


class Data:
    """Ten clients with two examples each."""

    sizes, num_classes = np.full(CLIENTS, 2), 10

    def client(self, id: int) -> Client:
        return Client(id, np.arange(2), np.arange(0))


def context(start: Tensor) -> SimpleNamespace:
    method = SimpleNamespace(
        server={"weights": start}, layout=Layout({"w": start}), entry_starts=lambda upload: {}
    )
    return SimpleNamespace(seed=0, max_rounds=5, method=method, data=Data())


def attacked(
    attack: str, rows: Tensor, start: Tensor, now: int = 1, **settings
) -> tuple[Tensor, list[int]]:
    """What reaches the server of uploads ``rows`` in round ``now``, and who attacked."""
    byzantine = ByzantineClients(clients=0.4, attack=attack, **settings)
    fed = context(start)
    uploads = {
        id: Payload({"examples": torch.tensor(2), "weights": row}) for id, row in enumerate(rows)
    }
    changed = byzantine.change_uploads(uploads, round=now, context=fed)
    assert list(changed) == list(uploads)
    return torch.stack([one.tensor("weights") for one in changed.values()]), sorted(
        byzantine.attackers(fed)
    )


def test_where_nobody_is_honest_it_is_said_that_nobody_attacks(caplog):
    rows = torch.arange(4.0).expand(CLIENTS, 4)
    byzantine = ByzantineClients(clients=1.0, attack="alie")
    uploads = {
        id: Payload({"examples": torch.tensor(2), "weights": row}) for id, row in enumerate(rows)
    }
    assert byzantine.change_uploads(uploads, round=1, context=context(rows[0])) == uploads
    assert "all 10 uploads are hostile, and alie follows honest ones: nobody attacks" in caplog.text


@pytest.mark.parametrize("attack", JOINT)
def test_attackers_send_one_update_made_of_the_honest_ones(attack):
    generator = torch.Generator().manual_seed(1)
    start, rows = torch.randn(6, generator=generator), torch.randn(CLIENTS, 6, generator=generator)
    sent, hostile = attacked(attack, rows, start, strength=0.1)
    honest = [id for id in range(CLIENTS) if id not in hostile]
    assert len(hostile) == 4
    assert torch.equal(sent[honest], rows[honest])
    assert all(torch.equal(sent[id], sent[hostile[0]]) for id in hostile)
    others = rows.clone()
    others[hostile] += 5  # their own work plays no part
    assert torch.equal(attacked(attack, others, start, strength=0.1)[0][hostile], sent[hostile])

    updates, bad = (rows[honest] - start).numpy(), (sent[hostile[0]] - start).numpy()
    mean, spread = updates.mean(axis=0), updates.std(axis=0)
    if attack == "ipm":
        np.testing.assert_allclose(bad, -0.1 * mean, atol=1e-6)
    elif attack == "alie":  # n 10, f 4: 2 of 6 honest clients are needed, Phi(z) = 4 / 6
        np.testing.assert_allclose(bad, mean - 0.4307273 * spread, atol=1e-6)
    else:
        apart = max(np.linalg.norm(a - b) for a in updates for b in updates)
        assert max(np.linalg.norm(bad - update) for update in updates) == pytest.approx(
            apart, rel=1e-5
        )
        ratio = (mean - bad) / spread
        np.testing.assert_allclose(ratio, ratio[0], rtol=1e-4)
        assert ratio[0] > 0


@pytest.mark.parametrize(
    ("count", "hostile", "expected"),
    [(50, 12, 0.336038), (10, 4, 0.430727), (10, 1, 0.0), (4, 3, 0.0), (25, 5, 0.253347)],
)
def test_z_of_alie(count, hostile, expected):
    assert hiding_quantile(count, hostile) == pytest.approx(expected, abs=1e-5)


def test_equal_honest_updates_leave_min_max_their_mean():
    rows = torch.ones(3, 4, dtype=torch.float64)
    assert min_max_length(rows, rows.mean(dim=0), rows.std(dim=0, correction=0)) == 0


def test_nobody_attacks_before_the_round_or_where_nobody_is_honest():
    rows, start = torch.randn(CLIENTS, 3), torch.zeros(3)
    assert torch.equal(attacked("ipm", rows, start, round=2)[0], rows)
    changed, hostile = attacked("ipm", rows, start, now=2, round=2)
    assert not (changed == rows)[hostile].any()
    alone = {id: Payload({"weights": rows[id]}) for id in hostile}
    byzantine = ByzantineClients(clients=0.4, attack="ipm")
    assert byzantine.change_uploads(alone, round=1, context=context(start)) is alone


def fitted(average, attack, folder, **settings) -> Tensor:
    """Where FedAvg ends if two of seven attack and all have client 0's optimum."""
    method = on_points(FedAvg(**({} if average is None else {"average": average})))
    byzantine = ByzantineClients(clients=2 / 7, attack=attack, **settings)
    run(
        method, Points((2,) * 7, labels=(0,) * 7), folder, max_rounds=10, local_epochs=12,
        callbacks=[byzantine],
    )  # fmt: skip
    return method.server["weights"]


@pytest.mark.parametrize("average", [Krum(2), MultiKrum(2, 3)], ids=["Krum", "MultiKrum"])
def test_a_large_ipm_throws_the_mean_and_not_krum(average, tmp_path):
    far = fitted(None, "ipm", tmp_path / "mean", strength=10)
    assert (far - CENTRES[0]).norm() > 1
    near = fitted(average, "ipm", tmp_path / "robust", strength=10)
    torch.testing.assert_close(near, CENTRES[0], rtol=0, atol=1e-2)


def digits() -> FederatedImages:
    return FederatedImages(dataset="digits", num_clients=6, partition=IID())


def test_a_changed_upload_is_checked_again(tmp_path):
    class TooLarge(Stressor):
        def change_uploads(self, uploads, *, round, context):
            first, second, *_ = uploads
            broken = {
                **dict(uploads[first].items()),
                "weights": uploads[first].tensor("weights") + 2.0**21,
            }
            return {
                id: Payload(broken) if id == first else one
                for id, one in uploads.items()
                if id != second
            }

    trainer = run(
        FedAvg(optimizer=sgd(0.05)), digits(), tmp_path, max_rounds=1, callbacks=[TooLarge()]
    )
    (row,) = trainer.progress.history
    assert (row["clients/rejected"], row["clients/trained"], row["clients/dropped"]) == (1, 4, 1)
    assert row["comm/wasted_bytes"] > 0


def test_an_upload_that_is_changed_in_place_is_checked_again(tmp_path):
    class Overwrites(Stressor):
        def change_uploads(self, uploads, *, round, context):
            uploads[min(uploads)].tensor("weights").fill_(float("nan"))
            return uploads

    method = FedAvg(optimizer=sgd(0.05))
    trainer = run(method, digits(), tmp_path, max_rounds=1, callbacks=[Overwrites()])
    (row,) = trainer.progress.history
    assert (row["clients/rejected"], row["clients/trained"]) == (1, 5)
    assert method.server["weights"].isfinite().all()


@pytest.mark.slow
@pytest.mark.essential
def test_what_they_send_does_not_depend_on_the_way_of_the_sum(tmp_path):
    """The weighted mean of single uploads is that of sums, bit for bit."""
    method = FedAvg(optimizer=sgd(0.05))
    run(method, digits(), tmp_path / "sum", max_rounds=2)

    class Looks(Stressor):
        def change_uploads(self, uploads, *, round, context):
            assert context.aggregation.single
            return uploads

    other = FedAvg(optimizer=sgd(0.05))
    run(other, digits(), tmp_path / "single", max_rounds=2, callbacks=[Looks()])
    assert torch.equal(method.server["weights"], other.server["weights"])


def test_flipped_labels(tmp_path):
    labels = torch.tensor([0, 3, 9])
    byzantine, fed = ByzantineClients(clients=0.4, attack="label_flip"), context(torch.zeros(1))
    hostile = min(byzantine.attackers(fed))
    honest = min({*range(CLIENTS)} - byzantine.attackers(fed))

    def seen(id, round=1):
        return byzantine.change_labels(
            labels, client=Data().client(id), round=round, context=fed
        ).tolist()

    assert seen(hostile) == [9, 6, 0]
    assert seen(honest) == labels.tolist()
    upload = Payload({"examples": torch.tensor(2), "weights": torch.ones(1)})
    sent = byzantine.change_upload(upload, client=Data().client(hostile), round=1, context=fed)
    assert torch.equal(sent.tensor("weights"), upload.tensor("weights"))
    clean, flipped = (FedAvg(optimizer=sgd(0.05)) for _ in range(2))
    run(clean, digits(), tmp_path / "clean", max_rounds=1)
    run(flipped, digits(), tmp_path / "flipped", max_rounds=1, callbacks=[byzantine])
    assert not torch.equal(clean.server["weights"], flipped.server["weights"])


def test_hooks_are_those_of_the_attack():
    deployed = {"method": FedAvg(), "deployed": True}
    check_run(Run(**deployed, callbacks=[ByzantineClients(attack="sign_flip")]))  # as ever
    check_run(Run(**deployed, callbacks=[ByzantineClients(attack="alie")]))
    with pytest.raises(InputError, match="only nodes have them"):
        check_run(Run(**deployed, callbacks=[ByzantineClients(attack="label_flip")]))
    assert not sees_uploads(ByzantineClients(attack="noise"))


def test_labels_of_a_regression_cannot_be_flipped():
    fed = SimpleNamespace(max_rounds=3, data=SimpleNamespace(task=Regression()))
    with pytest.raises(InputError, match="turns classes"):
        ByzantineClients(attack="label_flip").on_check(fed)


@pytest.mark.parametrize("attack", JOINT)
def test_codes_and_secret_sums_are_refused(attack, tmp_path):
    byzantine = ByzantineClients(attack=attack)
    with pytest.raises(InputError, match="codes"):
        run(QFedAvg(optimizer=sgd(0.05)), digits(), tmp_path, max_rounds=1, callbacks=[byzantine])
    private = ClientPrivacy(noise_multiplier=1.0, clip_norm=1.0)
    with pytest.raises(InputError, match="nobody sees one by itself"):
        run(
            FedAvg(optimizer=sgd(0.05), weigh_by="clients"), digits(), tmp_path, max_rounds=1,
            privacy=private, callbacks=[byzantine],
        )  # fmt: skip
