"""FedProx, FedNTD, QFedAvg, AQFL, FedPQ: where each ends, its neutral setting, its bytes, its
noise.

References share no code with the package.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from averaged import digits, entry, sent
from refusals import refused
from tiny_language import set_up
from torch import nn
from toy import CENTRES, Points, on_points, run, run_for_nothing, sgd

from fl_lightning import rng
from fl_lightning.methods import AQFL, FedAvg, FedMPQ, FedNTD, FedPQ, FedProx, QFedAvg
from fl_lightning.methods.losses import not_true_distillation
from fl_lightning.models import LlamaTiny
from fl_lightning.tasks import ClassRows
from fl_lightning.wire import Payload


def initial_weights(data: Points) -> torch.Tensor:
    method = on_points(FedAvg())
    data.setup()
    data.distribute(0, torch.device("cpu"))
    with rng.torch_stream(0, "weights"):
        method.build(data)
    return method.server["weights"]


def test_fedprox_moves_as_far_as_its_recursion_says(tmp_path):
    """w - c + mu (w - w_t): after E steps a share (1 - (1 - lr (1 + mu))^E) / (1 + mu) of the
    way."""
    start, lr, mu, steps = initial_weights(Points((3, 1))), 0.1, 0.5, 4
    method = on_points(FedProx(mu=mu))
    run(method, Points((3, 1)), tmp_path, max_rounds=1, local_epochs=steps)
    share = (1 - (1 - lr * (1 + mu)) ** steps) / (1 + mu)
    target = 0.75 * CENTRES[0] + 0.25 * CENTRES[1]
    torch.testing.assert_close(method.server["weights"], start + share * (target - start))


def test_fedntd_is_a_plain_torch_loop(tmp_path):
    """One client, two rounds of three steps on the toy, with the loss written out class by
    class."""
    start, method = initial_weights(Points((2, 5))), on_points(FedNTD(beta=2.0, tau=2.0))
    run(method, Points((2, 5)), tmp_path, max_rounds=2, participation=0.5, local_epochs=3)
    weights = start.clone()
    for round in (1, 2):
        (k,) = rng.stream(0, "cohort", round).choice(2, 1, replace=False, shuffle=False)
        others, received = [c for c in range(6) if c != k], weights.clone()
        for _ in range(3):
            weights.requires_grad_(True)
            q_g, q = (
                torch.softmax(received[others] / 2.0, 0),
                torch.softmax(weights[others] / 2.0, 0),
            )
            kl = sum(q_g[i] * (q_g[i].log() - q[i].log()) for i in range(5))
            loss = (weights - CENTRES[k]).square().sum() / 2 + 2.0 * 2.0**2 * kl
            (gradient,) = torch.autograd.grad(loss, weights)
            weights = (weights - 0.1 * gradient).detach()
    torch.testing.assert_close(method.server["weights"], weights)


def test_not_true_distillation_by_hand():
    local, received = torch.tensor([[9.0, 1.0, 0.0]]), torch.tensor([[-9.0, 0.0, 1.0]])
    p = torch.sigmoid(torch.tensor(1.0))
    kl = (1 - p) * torch.log((1 - p) / p) + p * torch.log(p / (1 - p))
    torch.testing.assert_close(
        not_true_distillation(ClassRows(local, torch.tensor([0]), None), received, 1.0), kl
    )
    torch.manual_seed(0)
    local, received, target = torch.randn(5, 7), torch.randn(5, 7), torch.tensor([0, 6, 3, 3, 1])
    rows = []
    for z, g, y in zip(local, received, target, strict=True):
        keep = [c for c in range(7) if c != y]
        q, q_g = F.softmax(z[keep] / 3, 0), F.softmax(g[keep] / 3, 0)
        rows.append((q_g * (q_g / q).log()).sum())
    torch.testing.assert_close(
        not_true_distillation(ClassRows(local, target, None), received, 3.0),
        9 * torch.stack(rows).mean(),
    )


def weights_after(method, tmp_path, **settings) -> torch.Tensor:
    run(
        method,
        digits(),
        tmp_path,
        **{"max_rounds": 2, "participation": 0.5, "local_epochs": 1, **settings},
    )
    return method.server["weights"]


@pytest.mark.parametrize(
    ("method", "neutral", "other"),
    [
        (FedProx, {"mu": 0.0}, {"mu": 0.01}),
        (FedNTD, {"beta": 0.0}, {"beta": 1.0}),
        (QFedAvg, {"bits": 32}, {"bits": 16}),
    ],
)
def test_neutral_settings_are_fedavg_bit_for_bit(method, neutral, other, tmp_path):
    plain = weights_after(FedAvg(optimizer=sgd(momentum=0.9)), tmp_path)
    assert torch.equal(
        plain, weights_after(method(optimizer=sgd(momentum=0.9), **neutral), tmp_path)
    )
    changed = weights_after(method(optimizer=sgd(momentum=0.9), **other), tmp_path)
    assert changed.isfinite().all()
    assert not torch.equal(plain, changed)


def test_sixteen_bits_are_nearly_fedavg(tmp_path):
    start = weights_after(FedAvg(optimizer=sgd(0.0)), tmp_path)
    moved = weights_after(FedAvg(optimizer=sgd()), tmp_path, max_rounds=1) - start
    coded = weights_after(QFedAvg(optimizer=sgd(), bits=16), tmp_path, max_rounds=1) - start
    torch.testing.assert_close(coded, moved, rtol=0, atol=2 * float(moved.abs().max()) / 2**15)


def test_fedprox_holds_only_trainable_parameters(tmp_path):
    """BatchNorm statistics move freely: at a huge pull the weights stay and the statistics are
    FedAvg's of weights that stay."""
    from fl_lightning.models import SmallCNN

    network = lambda classes: SmallCNN(classes, norm="batch", width=4)  # noqa: E731
    method = FedProx(network=network, optimizer=sgd(1e-7), mu=1e6)
    start = weights_after(method, tmp_path, max_rounds=1)
    frozen = weights_after(FedAvg(network=network, optimizer=sgd(0.0)), tmp_path, max_rounds=1)
    torch.testing.assert_close(start, frozen, rtol=0, atol=1e-4)
    assert method.anchored.size + 2 * (4 + 8 + 16) == method.layout.size


@pytest.mark.parametrize("kind", [FedProx, FedNTD, QFedAvg, AQFL, FedPQ])
def test_same_seed_same_bytes_in_any_order_of_clients(kind):
    first = sent(kind(optimizer=sgd()), digits())
    assert first == sent(kind(optimizer=sgd()), digits(), order=(2, 0, 3, 1))
    assert len(set(first.values())) == 4


@pytest.mark.parametrize("kind", [QFedAvg, FedPQ, AQFL, FedMPQ])
def test_a_client_that_diverged_is_rejected_and_never_averaged(kind, tmp_path, caplog):
    method = kind(optimizer=sgd(1e25))
    trainer = run_for_nothing(
        method, digits(), tmp_path, max_rounds=1, participation=0.5, local_epochs=1
    )
    assert "holds NaN" in caplog.text
    assert (trainer.run_dir / "ledger.csv").read_text().count("rejected") == 2
    untrained = weights_after(FedAvg(optimizer=sgd(0.0)), tmp_path, max_rounds=1)
    # of four clients
    torch.testing.assert_close(method.server["weights"], untrained, rtol=0, atol=2.0**-38)


WEIGHTS, REST = (
    [432, 4608, 18432, 10240],
    234,
)  # small_cnn: three convolutions and a linear layer; GroupNorm and the bias


FULL = 19 + entry("examples", 0, 4) + entry("weights", 1, 4 * (sum(WEIGHTS) + REST))


CODED = 19 + entry("examples", 0, 4) + entry("rest", 1, 4 * REST)


def qsgd_bytes(bits: int, norms: int) -> int:
    return CODED + entry("codes", 1, (sum(WEIGHTS) * bits + 7) // 8) + entry("norms", 1, 4 * norms)


def pq_bytes(dim: int, centroids: int) -> int:
    size = CODED
    for n in WEIGHTS:
        count = -(-n // dim)
        k = min(centroids, count // 4)
        size += entry("i0", 1, (count * int(np.ceil(np.log2(k))) + 7) // 8) + entry(
            "c0", 2, 4 * k * dim
        )
    return size


def aqfl_bytes(bits: int) -> int:
    return (
        CODED
        + entry("bits", 1, 2)
        + entry("scales", 1, 16)
        + sum(entry("w0", 1, (n * (bits + 1) + 7) // 8) for n in WEIGHTS)
    )


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (FedProx(optimizer=sgd()), FULL),
        (FedNTD(optimizer=sgd()), FULL),
        (QFedAvg(optimizer=sgd(), bits=32), FULL),
        (QFedAvg(optimizer=sgd(), bits=4), qsgd_bytes(4, 4)),
        (QFedAvg(optimizer=sgd(), bits=3, bucket=512), qsgd_bytes(3, 1 + 9 + 36 + 20)),
        (FedPQ(optimizer=sgd(), iterations=2), pq_bytes(2, 256)),
        (FedPQ(optimizer=sgd(), dim=3, centroids=100, iterations=2), pq_bytes(3, 100)),
        (AQFL(optimizer=sgd(), bits=1), aqfl_bytes(1)),
        (AQFL(optimizer=sgd(), bits=4), aqfl_bytes(4)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else str(value),
)
def test_bytes_equal_the_hand_formula(method, expected, tmp_path):
    trainer = run(method, digits(), tmp_path, max_rounds=1, local_epochs=1)
    rows = [
        line.split(",") for line in (trainer.run_dir / "ledger.csv").read_text().splitlines()[1:]
    ]
    assert {int(row[3]) for row in rows} == {FULL - entry("examples", 0, 4)}  # down: W_t
    assert {int(row[4]) for row in rows} == {expected}


@pytest.mark.parametrize("kind", [QFedAvg, FedPQ])
@pytest.mark.parametrize("adapter", ["lora", "svft", "spectral"])
def test_where_nothing_is_coded_a_value_takes_32_bits(kind, adapter):
    """SVFT and spectral adapters are vectors, which travel as they are."""
    network = partial(LlamaTiny, rank=2, adapter=adapter)
    method, _ = set_up(kind(network=network, optimizer=sgd()))
    assert (method.server_metrics()["bits/average"] == 32) == (adapter != "lora")


def test_each_client_of_aqfl_has_its_own_bits_and_downloads_may_be_coded(tmp_path):
    method = AQFL(optimizer=sgd(), bits=[1, 2, 4, 8], download="quantised")
    trainer = run(method, digits(), tmp_path, max_rounds=2, local_epochs=1)
    rows = [
        line.split(",") for line in (trainer.run_dir / "ledger.csv").read_text().splitlines()[1:]
    ]
    assert [int(row[4]) for row in rows] == [aqfl_bytes(bits) for bits in (1, 2, 4, 8)] * 2
    assert [int(row[3]) for row in rows] == [
        aqfl_bytes(bits) - entry("examples", 0, 4) for bits in (1, 2, 4, 8)
    ] * 2
    assert method.server["weights"].isfinite().all()
    found = method.server_metrics()
    deployed = {value for name, value in found.items() if name.startswith("bits/layer/")}
    assert {found["bits/average"]} == deployed == {3.0}, "their mean, rounded down"


def test_aqfl_trains_through_the_grid():
    """At 1 bit the forward pass sees -s, 0 and s, and the gradient there goes to the fp32 weights
    as it is."""
    method = on_points(AQFL(bits=1))
    data = Points((1, 1))
    data.setup()
    data.distribute(0, torch.device("cpu"))
    method.build(data)
    method.receive(
        Payload({"weights": torch.tensor([0.9, -0.3, 0.5, -0.9, 0.2, 0.0])}), data.client(0)
    )
    method.training_step((torch.ones(1, 1), torch.tensor([0])))["loss"].backward()
    on_grid = torch.tensor([0.9, 0.0, 0.9, -0.9, 0.0, 0.0])
    torch.testing.assert_close(method.network.weight.grad.flatten(), on_grid - CENTRES[0])
    assert method.network.weight.flatten().tolist() == pytest.approx(
        [0.9, -0.3, 0.5, -0.9, 0.2, 0.0]
    )


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        (FedProx, {"mu": -0.1}),
        (FedProx, {"mu": float("nan")}),
        (FedNTD, {"beta": -1.0}),
        (FedNTD, {"tau": 0.0}),
        (QFedAvg, {"bits": 1}),
        (QFedAvg, {"bits": 17}),
        (QFedAvg, {"bucket": 0}),
        (QFedAvg, {"bucket": 513}),
        (AQFL, {"bits": 0}),
        (AQFL, {"bits": [4, 9]}),
        (AQFL, {"bits": []}),
        (AQFL, {"activation_bits": 9}),
        (FedPQ, {"dim": 0}),
        (FedPQ, {"centroids": 1}),
        (FedPQ, {"centroids": 2**17}),
        (FedPQ, {"iterations": 0}),
    ],
    ids=str,
)
def test_bad_settings(method, settings):
    with refused(f"--model.{next(iter(settings))} ", "write --model"):
        method(**settings)


def test_bits_of_aqfl_are_one_or_one_for_each_client(tmp_path):
    with refused("2 budgets for 4 clients", "a list of 4"):
        run(AQFL(bits=[2, 4]), digits(), tmp_path, max_rounds=1)
