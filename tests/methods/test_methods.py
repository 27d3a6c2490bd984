"""FedAvg, FedMPQ and FedMPQKD beside plain loops and formulas that share no code with the package;
the kit checks what every method must do (test_conformance)."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from refusals import refused
from toy import run, sgd

from fl_lightning.data import IID, FederatedImages
from fl_lightning.methods import CosineSchedule, FedAvg, FedMPQ, FedMPQKD, LinearSchedule
from fl_lightning.methods.fedmpqkd import distillation
from fl_lightning.methods.schedules import at
from fl_lightning.tasks import ClassRows
from fl_lightning.wire import Payload


def rows(logits):
    """Logits of examples, of which each counts the same."""
    return ClassRows(logits, torch.zeros(len(logits), dtype=torch.int64), None)


def digits(num_clients: int = 4, **settings) -> FederatedImages:
    return FederatedImages(dataset="digits", num_clients=num_clients, partition=IID(), **settings)


# small BatchNorm batches amplify rounding, round by round
@pytest.mark.parametrize(("norm", "rounds"), [("group", 3), ("batch", 1)])
def test_fedavg_is_a_plain_torch_loop(norm, rounds, tmp_path):
    """Three clients, momentum, two epochs: weights and statistics to 1e-6, against torch.optim
    alone."""
    from fl_lightning import rng
    from fl_lightning.models import SmallCNN

    network = lambda classes: SmallCNN(classes, norm=norm, width=4)  # noqa: E731
    data, method = (
        digits(3, val_fraction=0.0),
        FedAvg(network=network, optimizer=sgd(0.05, momentum=0.9)),
    )
    run(method, data, tmp_path, max_rounds=rounds, seed=5)

    with rng.torch_stream(5, "weights"):
        # as ours: sums in another order drift apart step by step
        model = network(10).to(memory_format=torch.channels_last)
    state = copy.deepcopy(model.state_dict())
    for round in range(1, rounds + 1):
        mean = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in state.items()}
        total = sum(len(data.client(k).train) for k in range(3))
        for k in range(3):
            model.load_state_dict(state)
            model.train()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            for images, labels in data.train_batches(data.client(k), round=round, epochs=2):
                optimizer.zero_grad()
                F.cross_entropy(model(images), labels).backward()
                optimizer.step()
            for name, value in model.state_dict().items():
                mean[name] += value.double() * len(data.client(k).train) / total
        state = {name: value.to(state[name].dtype) for name, value in mean.items()}
    ours = method.layout.unpack(method.server["weights"])
    assert set(state) - set(ours) == {name for name in state if "num_batches_tracked" in name}
    for name, value in ours.items():
        torch.testing.assert_close(value, state[name], rtol=0, atol=1e-6)


def weights_after(method, tmp_path, **settings) -> torch.Tensor:
    run(method, digits(), tmp_path, **{"max_rounds": 3, "participation": 0.5, **settings})
    return method.server["weights"]


@pytest.mark.slow
@pytest.mark.essential
def test_alpha_zero_is_fedmpq_bit_for_bit(tmp_path):
    plain = weights_after(FedMPQ(optimizer=sgd()), tmp_path)
    assert torch.equal(plain, weights_after(FedMPQKD(optimizer=sgd(), alpha=0), tmp_path))
    assert not torch.equal(plain, weights_after(FedMPQKD(optimizer=sgd(), alpha=0.5), tmp_path))


@pytest.fixture(scope="module")
def default(tmp_path_factory) -> torch.Tensor:
    return weights_after(FedMPQKD(optimizer=sgd()), tmp_path_factory.mktemp("default"))


@pytest.mark.slow
@pytest.mark.essential
@pytest.mark.parametrize(
    "settings",
    [
        {"alpha": 1.0},
        {"kl": "reverse"},
        {"teacher": "joint"},
        {"teacher": 1},
        {"download": "quantised"},
        {"download": "quantised", "teacher_source": "received"},
        {"temperature": 4.0},
        {"activation_bits": 4},
        {"bits": 1},
        {"bits": 2},
        {"bits": [2, 8, 1, 4]},
        {"alpha": LinearSchedule(0.0, 1.0, 3)},
    ],
    ids=str,
)
def test_every_option_changes_the_result_and_stays_finite(settings, default, tmp_path):
    changed = weights_after(FedMPQKD(optimizer=sgd(), **settings), tmp_path)
    assert changed.isfinite().all()
    assert not torch.equal(default, changed)


def first_round_bytes(method, tmp_path) -> tuple[set[int], set[int]]:
    trainer = run(method, digits(), tmp_path, max_rounds=1)
    rows = [
        line.split(",") for line in (trainer.run_dir / "ledger.csv").read_text().splitlines()[1:]
    ]
    return {int(row[3]) for row in rows}, {int(row[4]) for row in rows}


@pytest.mark.slow
@pytest.mark.essential
def test_bytes_equal_the_hand_formula(tmp_path):
    """small_cnn: 33 712 weights in four layers, 234 values in GroupNorm and the bias. Header 19, an
    entry 3 + name + 4 per dimension."""
    weights, rest = [432, 4608, 18432, 10240], 234
    entry = lambda name, ndim, data: 3 + len(name) + 4 * ndim + data  # noqa: E731
    full = entry("weights", 1, 4 * (sum(weights) + rest))
    assert first_round_bytes(FedAvg(optimizer=sgd()), tmp_path) == (
        {19 + full},
        {19 + entry("examples", 0, 4) + full},
    )
    bits_entry, examples = entry("bits", 1, 2), entry("examples", 0, 4)
    tops, grid = entry("tops", 1, 2), entry("grid", 1, 16) + entry("pull", 1, 16)
    for bits in (1, 2, 4, 8):
        method = FedMPQ(optimizer=sgd(), bits=bits, prune_threshold=0.0)
        codes = sum(entry("w0", 1, (n * (bits + 1) + 7) // 8) for n in weights)
        coded = bits_entry + entry("scales", 1, 16) + codes + entry("rest", 1, 4 * rest)
        assert first_round_bytes(method, tmp_path) == (
            {19 + bits_entry + grid + full},
            {19 + examples + coded + tops},
        )
        method = FedMPQ(optimizer=sgd(), bits=bits, prune_threshold=0.0, download="quantised")
        assert first_round_bytes(method, tmp_path) == (
            {19 + coded + grid},
            {19 + examples + coded + tops},
        )


@pytest.mark.slow
@pytest.mark.essential
def test_the_teacher_costs_no_upload_and_its_download_is_counted(tmp_path):
    plain_down, plain_up = first_round_bytes(
        FedMPQ(optimizer=sgd(), prune_threshold=0.0, download="quantised"), tmp_path
    )
    for alpha in (0.0, 0.5, 1.0):
        received = FedMPQKD(
            optimizer=sgd(),
            alpha=alpha,
            prune_threshold=0.0,
            download="quantised",
            teacher_source="received",
        )
        assert first_round_bytes(received, tmp_path) == (plain_down, plain_up)
    full = FedMPQKD(optimizer=sgd(), prune_threshold=0.0, download="quantised")
    down, up = first_round_bytes(full, tmp_path)
    assert up == plain_up
    assert down == {plain_down.pop() + 3 + len("teacher") + 4 + 4 * (33712 + 234)}


def test_distillation_by_hand():
    student, teacher = (
        torch.tensor([[2.0, 0.0], [0.0, 0.0]]),
        torch.tensor([[0.0, 2.0], [0.0, 0.0]]),
    )
    p = torch.sigmoid(torch.tensor(1.0))  # softmax of [1, 0], T = 2
    kl = (2 * p - 1) * torch.log(p / (1 - p))  # symmetric here
    torch.testing.assert_close(distillation(rows(student), teacher, 2.0), 4 * kl / 2)
    torch.testing.assert_close(distillation(rows(student), teacher, 2.0, "reverse"), 4 * kl / 2)
    student[0, 0] = 1.0
    assert not torch.isclose(
        distillation(rows(student), teacher, 2.0),
        distillation(rows(student), teacher, 2.0, "reverse"),
    )
    log_t, log_s = F.log_softmax(teacher / 3, 1), F.log_softmax(student / 3, 1)
    torch.testing.assert_close(
        distillation(rows(student), teacher, 3.0), 9 * (log_t.exp() * (log_t - log_s)).sum(1).mean()
    )


def test_a_teacher_is_a_copy_from_before_the_first_step(tmp_path):
    method = FedMPQKD(optimizer=sgd(), bits=2)
    data = digits()
    run(method, data, tmp_path, max_rounds=1)
    method.receive(Payload.from_bytes(method.broadcast(data.client(0)).to_bytes()), data.client(0))
    before = method.layout.read(method.teacher)
    assert torch.equal(before, method.server["weights"])
    method.train()
    assert not method.teacher.training
    batch = next(iter(data.train_batches(data.client(0), round=2, epochs=1)))
    method.training_step(batch)["loss"].backward()
    method.configure_optimizers().step()
    method.on_train_batch_end({}, batch, 0)
    assert torch.equal(method.layout.read(method.teacher), before)
    assert all(p.grad is None for p in method.teacher.parameters())


def test_schedules():
    cosine = CosineSchedule(1.0, 0.0, rounds=3)
    assert [round(at(cosine, r), 6) for r in (1, 2, 3, 50)] == [1.0, 0.5, 0.0, 0.0]
    assert at(0.5, 7) == 0.5
    with pytest.raises(ValueError, match="at least 1"):
        LinearSchedule(0, 1, rounds=0)


@pytest.mark.parametrize(
    "settings",
    [
        {"bits": 0},
        {"bits": 9},
        {"bits": []},
        {"lambda_b": -1.0},
        {"prune_threshold": 1.0},
        {"activation_bits": 0},
    ],
)
def test_bad_settings_of_fedmpq(settings):
    with refused(f"--model.{next(iter(settings))} ", "write --model"):
        FedMPQ(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"alpha": -0.1},
        {"alpha": float("inf")},
        {"temperature": 0.0},
        {"temperature": LinearSchedule(2.0, 0.0, 5)},
        {"teacher": 0},
    ],
    ids=str,
)
def test_bad_settings_of_fedmpqkd(settings):
    with refused(f"--model.{next(iter(settings))} ", "write --model"):
        FedMPQKD(**settings)


def test_a_layer_of_zeros_can_learn(tmp_path):
    class ZeroHead(torch.nn.Sequential):
        def __init__(self, num_classes: int) -> None:
            super().__init__(
                torch.nn.Flatten(),
                torch.nn.Linear(3 * 32 * 32, 8),
                torch.nn.ReLU(),
                torch.nn.Linear(8, num_classes),
            )
            torch.nn.init.zeros_(self[3].weight)

    method = FedMPQKD(network=ZeroHead, optimizer=sgd())
    run(method, digits(), tmp_path, max_rounds=2)
    head = method.layout.unpack(method.server["weights"])["3.weight"]
    assert head.isfinite().all()
    assert head.abs().max() > 0


def test_distillation_is_in_float32_under_autocast():
    student, teacher = torch.randn(8, 10), torch.randn(8, 10)
    with torch.autocast("cpu", torch.bfloat16):
        found = distillation(rows(student.bfloat16()), teacher.bfloat16(), 2.0)
    torch.testing.assert_close(
        found, distillation(rows(student.bfloat16().float()), teacher.bfloat16().float(), 2.0)
    )


def test_alpha_zero_costs_what_fedmpq_costs(tmp_path):
    plain = first_round_bytes(FedMPQ(optimizer=sgd(), download="quantised"), tmp_path)
    assert plain == first_round_bytes(
        FedMPQKD(optimizer=sgd(), download="quantised", alpha=0), tmp_path
    )
