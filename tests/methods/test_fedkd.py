"""FedKD: what travels, what stays, whose mean it is. References share no code with the package."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from refusals import refused
from torch import nn
from toy import CENTRES, Points, on_points, point_network, run, run_for_nothing, sgd

from fl_lightning import rng
from fl_lightning.aggregation.receiving import check_upload
from fl_lightning.data import IID, Dirichlet, FederatedImages
from fl_lightning.errors import InputError
from fl_lightning.hooks import Stressor
from fl_lightning.methods import FedAvg, FedKD
from fl_lightning.methods.fedkd import soft_label_loss
from fl_lightning.models import SmallCNN
from fl_lightning.wire import Payload, PayloadError

HEADER, P, C = 19, 5, len(CENTRES)


def public_points(counts: tuple[int, ...] = (3, 1), size: int = P) -> Points:
    """Points and a public set of ``size`` points, all the same too."""
    return Points(counts, public=size)


def quadratic(**settings) -> FedKD:
    """Local loss |w - c_k|^2 / 2; the logits are w, whatever the input."""
    return on_points(FedKD(**settings))


class Watch(Stressor):
    """Notes every upload; drops it, changes its soft labels, or keeps it."""

    def __init__(self, change=lambda soft_labels: soft_labels) -> None:
        self.change, self.seen = change, {}

    def change_upload(self, upload, *, client, round, context):
        self.seen[round, client.id] = upload
        if self.change is None:
            return None
        return Payload({**upload, "soft_labels": self.change(upload.tensor("soft_labels"))})


def evenly(soft_labels: torch.Tensor) -> torch.Tensor:
    return torch.full_like(soft_labels, 1 / C)


def rows(trainer) -> list[list[str]]:
    return [
        line.split(",") for line in (trainer.run_dir / "ledger.csv").read_text().splitlines()[1:]
    ]


def start_of(trainer_seed: int = 0) -> torch.Tensor:
    with rng.torch_stream(trainer_seed, "weights"):
        return point_network(C).weight.detach().flatten()


def pulled(weights: torch.Tensor, id: int, steps: int = 2) -> torch.Tensor:
    """After full-batch steps of lr 0.1 on client ``id``'s quadratic."""
    return CENTRES[id] + 0.9**steps * (weights - CENTRES[id])


def distilled(
    weights: torch.Tensor, soft_labels: torch.Tensor, temperature: float, epochs: int
) -> torch.Tensor:
    """The gradient of T^2 KL(p || softmax(z / T)) in z is T (softmax(z / T) - p); one batch an
    epoch."""
    for _ in range(epochs):
        weights = weights - 0.1 * temperature * (
            torch.softmax(weights / temperature, 0) - soft_labels
        )
    return weights


@pytest.mark.parametrize("sharpen", [None, 0.1])
def test_two_clients_by_hand_over_two_rounds(sharpen, tmp_path):
    """Soft labels weighted 3 : 1, the student, and what each client keeps, in closed form."""
    method, watch, temperature = (
        quadratic(temperature=2.0, distill_epochs=3, server_epochs=4, sharpen=sharpen),
        Watch(),
        2.0,
    )
    run(method, public_points((3, 1)), tmp_path, max_rounds=2, callbacks=[watch])
    kept, student, p = [start_of(), start_of()], start_of(), None
    for round in (1, 2):
        if p is not None:
            kept = [distilled(w, p, temperature, 3) for w in kept]
        kept = [pulled(w, id) for id, w in enumerate(kept)]
        sent = [torch.softmax(w / temperature, 0) for w in kept]
        for id in (0, 1):
            torch.testing.assert_close(
                watch.seen[round, id].tensor("soft_labels"), sent[id].expand(P, C)
            )
        p = 0.75 * sent[0] + 0.25 * sent[1]
        p = p if sharpen is None else torch.exp(p / sharpen) / torch.exp(p / sharpen).sum()
        student = distilled(student, p, temperature, 4)
    torch.testing.assert_close(method.server["soft_labels"], p.expand(P, C))
    torch.testing.assert_close(method.server["weights"], student)
    assert not torch.allclose(student, start_of(), atol=0.01)


def test_two_of_six_take_part_and_the_others_do_not(tmp_path):
    counts, method, watch = (1, 2, 3, 4, 5, 6), quadratic(), Watch()
    trainer = run(
        method,
        public_points(counts),
        tmp_path,
        max_rounds=1,
        participation=2 / 6,
        callbacks=[watch],
    )
    cohort = [int(row[1]) for row in rows(trainer)]
    assert len(cohort) == 2
    assert sorted(watch.seen) == [(1, id) for id in cohort]
    share = torch.tensor([counts[id] for id in cohort]) / sum(counts[id] for id in cohort)
    sent = torch.stack([torch.softmax(pulled(start_of(), id), 0) for id in cohort])
    torch.testing.assert_close(method.server["soft_labels"], (share @ sent).expand(P, C))


def test_the_server_knows_only_what_was_sent(tmp_path):
    honest, silent = quadratic(), quadratic()
    run(honest, public_points(), tmp_path, max_rounds=1)
    run(silent, public_points(), tmp_path, max_rounds=1, callbacks=[Watch(evenly)])
    torch.testing.assert_close(silent.server["soft_labels"], torch.full((P, C), 1 / C))
    torch.testing.assert_close(
        silent.server["weights"], distilled(start_of(), torch.full((C,), 1 / C), 1.0, 1)
    )
    assert not torch.allclose(honest.server["weights"], silent.server["weights"], atol=1e-3)
    assert not torch.allclose(honest.server["weights"], start_of(), atol=1e-3)


def test_an_empty_round_leaves_p_and_a_first_one_leaves_nothing(tmp_path):
    class Late(Watch):
        def change_upload(self, upload, **where):
            return upload if where["round"] == 2 else None

    nobody, late, once = quadratic(), quadratic(), quadratic()
    trainer = run_for_nothing(
        nobody, public_points(), tmp_path, max_rounds=2, callbacks=[Watch(None)]
    )
    assert not nobody.server["aggregated"]
    torch.testing.assert_close(nobody.server["weights"], start_of())
    assert {row[3] for row in rows(trainer)} == {str(HEADER)}
    run(late, public_points(), tmp_path, max_rounds=3, callbacks=[Late()])
    run(once, public_points(), tmp_path, max_rounds=2, callbacks=[Late()])
    assert torch.equal(late.server["soft_labels"], once.server["soft_labels"])
    assert torch.equal(late.server["weights"], once.server["weights"])


def test_a_client_that_diverges_is_rejected_and_comes_back(tmp_path, caplog):
    method = quadratic()
    distance = method.task_loss

    def diverge(outputs, target):
        loss = distance(outputs, target)
        return loss * float("nan") if method.round == 1 and int(target[0]) == 0 else loss

    method.task_loss = diverge
    trainer = run(method, public_points(), tmp_path, max_rounds=2, engine="sequential", workers=1)
    assert "upload of client 0 rejected" in caplog.text
    assert [row[2] for row in rows(trainer)] == ["rejected", "trained", "trained", "trained"]
    assert method.server["weights"].isfinite().all()


@pytest.mark.parametrize(
    "change",
    [
        torch.zeros_like,
        torch.ones_like,
        lambda p: 2 * p,
        lambda p: p * (1 + 2e-3),
        lambda p: torch.tensor([-0.5, 1.0, 0.5, 0, 0, 0]).expand(P, C),
        lambda p: torch.tensor([1.5, -0.25, -0.25, 0, 0, 0]).expand(P, C),
        lambda p: torch.cat([p[1:], torch.zeros(1, C)]),  # one row of many
        lambda p: torch.full_like(p, float("nan")),
        torch.log,
    ],
)
def test_soft_labels_that_are_no_probabilities_are_rejected(change, tmp_path, caplog):
    method = quadratic()
    trainer = run_for_nothing(
        method, public_points(), tmp_path, max_rounds=1, callbacks=[Watch(change)]
    )
    assert [row[2] for row in rows(trainer)] == ["rejected", "rejected"]
    assert "upload of client 0 rejected: " in caplog.text
    assert not method.server["aggregated"]


@pytest.mark.parametrize(
    "change", [lambda p: p * (1 - 5e-4), lambda p: torch.eye(C)[[0, 1, 2, 0, 5]], evenly]
)
def test_rounded_and_certain_probabilities_count(change, tmp_path):
    trainer = run(quadratic(), public_points(), tmp_path, max_rounds=1, callbacks=[Watch(change)])
    assert [row[2] for row in rows(trainer)] == ["trained", "trained"]


def test_bytes_of_the_published_case_are_40_million(tmp_path):
    """|P| = 50 000, C = 100: 2 |P| C 4 bytes, two entries (3 + 11 + 8) and headers, and n_k (3 + 8
    + 4) on the way up."""
    method = FedKD(network=lambda classes: nn.Linear(1, 100, bias=False), optimizer=sgd())
    method.logits = False
    data = public_points((3,), size=50_000)
    data.setup()
    data.distribute(0, torch.device("cpu"))
    method.build(data)
    client = data.client(0)
    assert method.broadcast(client).nbytes == HEADER
    upload = method.upload(client)
    method.check(upload, client)
    method.aggregate({0: upload})
    down = method.broadcast(client)
    assert (down.nbytes, upload.nbytes) == (HEADER + 22 + 20_000_000, HEADER + 22 + 15 + 20_000_000)
    assert len(down.to_bytes()) == down.nbytes
    with refused("(3, 100)", kind=PayloadError):
        check_upload(method, Payload({**upload, "soft_labels": torch.ones(3, 100)}), client, ())


def digits(num_clients: int = 4, **settings) -> FederatedImages:
    settings = {"partition": IID(), "public_examples": 40, "batch_size": 32, **settings}
    return FederatedImages(dataset="digits", num_clients=num_clients, **settings)


def after(method, data, tmp_path, **settings):
    trainer = run(method, data, tmp_path, **{"max_rounds": 2, "participation": 0.5, **settings})
    return {name: tensor.clone() for name, tensor in method.server.items()}, trainer


def small(**settings) -> FedKD:
    return FedKD(
        network=lambda classes: SmallCNN(classes, norm="batch", width=4),
        optimizer=sgd(0.05),
        **settings,
    )


def same(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_ledger_counts_both_directions(tmp_path):
    _, trainer = after(small(), digits(), tmp_path)
    labels = 22 + 4 * 40 * 10
    assert [(int(row[3]), int(row[4])) for row in rows(trainer)] == [
        (HEADER, HEADER + 15 + labels)
    ] * 2 + [(HEADER + labels, HEADER + 15 + labels)] * 2
    _, trainer = after(small(average_weights=True), digits(), tmp_path)
    weights = 3 + len("weights") + 4 + 4 * small_size()
    assert {int(row[4]) for row in rows(trainer)} == {HEADER + 15 + labels + weights}
    assert [int(row[3]) for row in rows(trainer)] == [HEADER + weights] * 2 + [
        HEADER + weights + labels
    ] * 2


def test_a_network_in_bfloat16_sends_as_many_bytes_after_the_student_has_trained(tmp_path):
    """The student of round 1 is what round 2 broadcasts."""

    class Narrow(SmallCNN):
        def forward(self, images):
            return super().forward(images.bfloat16())

    method = FedKD(
        network=lambda classes: Narrow(classes, width=4).bfloat16(),
        optimizer=sgd(0.05),
        average_weights=True,
    )
    server, trainer = after(method, digits(), tmp_path)
    assert server["weights"].dtype == torch.bfloat16
    labels = 22 + 4 * 40 * 10
    first, _, third, _ = (int(row[3]) for row in rows(trainer))
    assert third == first + labels


def small_size() -> int:
    state = SmallCNN(10, norm="batch", width=4).state_dict()
    return sum(value.numel() for name, value in state.items() if "num_batches" not in name)


@pytest.mark.slow
@pytest.mark.essential
def test_same_seed_same_bits_other_settings_other_bits(tmp_path):
    default, _ = after(small(), digits(), tmp_path)
    torch.manual_seed(7)
    again, _ = after(small(), digits(), tmp_path)
    assert same(default, again)
    for settings in (
        {"temperature": 3.0},
        {"distill_epochs": 2},
        {"server_epochs": 2},
        {"sharpen": 0.1},
        {"average_weights": True},
    ):
        changed, _ = after(small(**settings), digits(), tmp_path)
        assert not torch.equal(default["weights"], changed["weights"])
        assert all(tensor.isfinite().all() for tensor in changed.values())


def test_averaged_weights_without_distillation_are_fedavg(tmp_path):
    network = lambda classes: SmallCNN(classes, norm="batch", width=4)  # noqa: E731
    plain, _ = after(FedAvg(network=network, optimizer=sgd(0.05)), digits(), tmp_path)
    neutral, _ = after(
        small(average_weights=True, distill_epochs=0, server_epochs=0), digits(), tmp_path
    )
    assert torch.equal(plain["weights"], neutral["weights"])


@pytest.mark.slow
def test_continued_from_a_checkpoint_it_equals_uninterrupted(tmp_path):
    whole, _ = after(small(), digits(), tmp_path / "a", max_rounds=4)
    _, half = after(small(), digits(), tmp_path / "b", max_rounds=2)
    resumed, _ = after(
        small(),
        digits(),
        tmp_path / "b",
        max_rounds=4,
        ckpt_path=str(half.run_dir),
        allow_changed=True,
    )
    assert same(whole, resumed)


@pytest.mark.slow
@pytest.mark.essential
def test_interrupted_in_mid_round_it_equals_uninterrupted(tmp_path):
    """After a client of round 3 has already trained."""
    whole, trainer = after(small(), digits(), tmp_path / "a", max_rounds=4)

    class Pull(Stressor):
        last = 2

        def change_upload(self, upload, *, client, round, context):
            if round > self.last:
                raise KeyboardInterrupt
            return upload

    more, pulled_out = Pull(), Pull()
    more.last = 4
    with pytest.raises(KeyboardInterrupt):
        after(small(), digits(), tmp_path / "c", max_rounds=4, callbacks=[pulled_out])
    resumed, again = after(
        small(),
        digits(),
        tmp_path / "c",
        max_rounds=4,
        callbacks=[more],
        ckpt_path="last",
        allow_changed=True,
    )
    assert same(whole, resumed)
    assert (again.run_dir / "ledger.csv").read_text() == (
        trainer.run_dir / "ledger.csv"
    ).read_text()


def test_the_student_starts_from_the_counters_of_the_start(tmp_path):
    """Whatever clients have trained in its process before."""

    def counting(classes):
        network = SmallCNN(classes, norm="batch", width=4)
        for module in network.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.momentum = None  # a mean over all batches that a counter has counted
        return network

    one, two = (
        after(FedKD(network=counting), digits(), tmp_path / str(workers), workers=workers)[0]
        for workers in (1, 2)
    )
    assert same(one, two)


def test_batchnorm_and_a_client_with_one_example_stay_finite(tmp_path):
    sizes = {"synthetic_examples": 60, "synthetic_test_examples": 10, "synthetic_size": 16}
    data = FederatedImages(
        "synthetic",
        num_clients=12,
        partition=Dirichlet(0.2),
        public_examples=20,
        val_fraction=0.0,
        **sizes,
    )
    server, _ = after(small(), data, tmp_path, max_rounds=3, participation=1.0)
    assert data.sizes.min() == 1
    assert all(tensor.isfinite().all() for tensor in server.values())


# --- the public set
# --------------------------------------------------------------------------------------------------------


def dealt(seed: int = 0, **settings) -> FederatedImages:
    data = FederatedImages(**{"dataset": "digits", "num_clients": 10, **settings})
    data.setup()
    data.distribute(seed, torch.device("cpu"))
    return data


def held(data: FederatedImages) -> np.ndarray:
    return np.concatenate(
        [
            np.concatenate([data.client(id).train, data.client(id).val])
            for id in range(data.num_clients)
        ]
    )


@pytest.mark.parametrize("partition", [IID(), Dirichlet(0.1)])
def test_no_client_holds_a_public_example(partition):
    data = dealt(partition=partition, public_examples=200, val_fraction=0.2)
    assert sorted([*held(data), *data.public]) == list(range(len(data.train_target)))
    assert len(data.public) == 200
    summary = json.loads(json.dumps(data.partition_summary()))
    assert summary["public"]["size"] == 200
    assert (
        summary["public"]
        == dealt(partition=IID(), public_examples=200).partition_summary()["public"]
    )
    assert (
        summary["public"]["sha256"]
        != dealt(1, public_examples=200).partition_summary()["public"]["sha256"]
    )
    assert np.sum(summary["classes_per_client"]) + 200 == len(data.train_target)


def test_public_batches_are_each_example_once_without_its_label(tmp_path):
    data = dealt(public_examples=65, batch_size=64)
    for batches, sizes in (
        (data.public_batches(), [65]),
        (data.public_batches(rng.stream(0, "x")), [65]),
        (data.public_batches(batch_size=40), [40, 25]),
    ):
        batches = list(batches)
        assert [len(position) for _, position in batches] == sizes
        assert sorted(torch.cat([position for _, position in batches]).tolist()) == list(range(65))
        for inputs, position in batches:
            assert torch.equal(
                inputs, data.inputs("train", torch.from_numpy(data.public)[position])
            )
    assert [
        position.tolist()
        for _, position in dealt(public_examples=1).public_batches(rng.stream(0, "x"))
    ] == [[0, 0]]

    class Relabelled(FederatedImages):
        def distribute(self, seed, device):
            super().distribute(seed, device)
            self.train_target[self.public] = 0

    settings = {"num_clients": 4, "partition": IID(), "public_examples": 40}
    assert same(
        after(small(), FederatedImages(**settings), tmp_path)[0],
        after(small(), Relabelled(**settings), tmp_path)[0],
    )


def test_without_a_public_set_the_partition_is_what_it_was():
    data = dealt(partition=Dirichlet(0.1))
    shards = Dirichlet(0.1)(data.train_target.numpy(), 10, 0)
    assert sorted(held(data)) == list(range(len(data.train_target)))
    for id, shard in enumerate(shards):
        assert sorted([*data.client(id).train, *data.client(id).val]) == shard.tolist()
    assert "public" not in data.partition_summary()


def test_another_data_set_is_public_and_clients_keep_theirs():
    sizes = {"synthetic_examples": 90, "synthetic_test_examples": 10}
    data = dealt(public_dataset="synthetic", **sizes)
    assert len(data.public) == 90
    assert sorted(held(data)) == list(range(len(data.train_target)))
    some = dealt(public_dataset="synthetic", public_examples=20, **sizes)
    ((inputs, _),) = some.public_batches()
    pixels = dealt(dataset="synthetic", **sizes).train_images[some.public].float() / 255
    torch.testing.assert_close(some.denormalise(inputs), pixels)
    assert some.partition_summary()["public"]["dataset"] == "synthetic"
    cropped = dealt(
        public_dataset="synthetic", synthetic_size=24, crop="shrink", crop_size=20, **sizes
    )
    ((inputs, _),) = cropped.public_batches()
    assert inputs.shape[1:] == cropped.example_shape
    torch.testing.assert_close(
        cropped.denormalise(inputs), cropped.public_images[..., 2:22, 2:22].float() / 255
    )


def test_a_run_is_not_continued_where_the_public_images_are_others(tmp_path, monkeypatch):
    def fit(**settings):
        data = dealt(public_dataset="synthetic", public_examples=20, synthetic_examples=90)
        return run(
            FedAvg(network=SmallCNN, optimizer=sgd()), data, tmp_path, max_rounds=1, **settings
        )

    begun = fit()
    again = {"ckpt_path": str(begun.run_dir)}
    fit(**again)
    assert dealt(public_examples=20).public_sha256 == ""
    drawn, hold = begun.data.public[0], FederatedImages.hold

    def changed(data, train, test, public):
        public[drawn] ^= 1
        hold(data, train, test, public)

    monkeypatch.setattr(FederatedImages, "hold", changed)
    with pytest.raises(InputError, match=r"the public set: [0-9a-f]{12} -> [0-9a-f]{12} "):
        fit(**again)


@pytest.mark.parametrize(
    "settings",
    [
        {"public_examples": -1},
        {"public_examples": 5000},
        {"public_dataset": "digits"},
        {"public_dataset": "cifar"},
        {"public_dataset": "synthetic", "synthetic_size": 16},
        {"public_dataset": "synthetic", "synthetic_size": 24, "crop": "shrink"},
        {"public_dataset": "synthetic", "public_examples": 5001},
    ],
    ids=str,
)
def test_bad_public_sets_say_what_to_write(settings):
    with refused("public_", "write"):
        dealt(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.0},
        {"distill_epochs": -1},
        {"server_epochs": 0},
        {"sharpen": -1.0},
        {"average_weights": True, "server_epochs": -1},
    ],
)
def test_bad_settings(settings):
    with refused(f"--model.{list(settings)[-1]} ", "write --model"):
        FedKD(**settings)


def test_a_public_set_is_required():
    with refused("no public set", "--data.public_examples"):
        small().build(dealt())


def test_soft_label_loss_by_hand():
    outputs, p = torch.tensor([[2.0, 0.0], [1.0, 1.0]]), torch.tensor([[0.0, 1.0], [0.5, 0.5]])
    q = torch.sigmoid(torch.tensor(-1.0))  # softmax of [1, 0], T = 2
    torch.testing.assert_close(soft_label_loss(outputs, p, 2.0), 4 * -torch.log(q) / 2)
