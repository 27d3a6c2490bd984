"""FedMosaic's parts: the layer, families and their blocks, who helps whom, the figure."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from mosaics import LARGE, SMALL, built, digits, mosaic
from refusals import refused
from torch import nn
from toy import run

from callbacks import RelevanceFigure
from callbacks.figures.relevance_figure import (
    label_correlation,
    label_similarity,
    similar_next_to_each_other,
)
from fl_lightning.methods import FedMosaic
from fl_lightning.methods.relevance import cosine, kept_rows, mix, relevance_weights
from fl_lightning.models import build_network
from fl_lightning.models.pq_lora import (
    PQLoRALinear,
    adapted_layers,
    attach,
    read_adapters,
    target_layers,
    write_global,
)


@pytest.mark.parametrize("gate", ["scalar", "input"])
@pytest.mark.parametrize("full_gradient", [True, False])
def test_layer_is_its_formula_and_its_derivative(gate, full_gradient):
    torch.manual_seed(0)
    layer = PQLoRALinear(
        nn.Linear(5, 4, dtype=torch.float64),
        rank=3,
        scale=0.7,
        gate=gate,
        full_gradient=full_gradient,
    )
    x = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    assert torch.equal(layer(x), layer.base(x))  # P = Q = Pg = Qg = 0
    with torch.no_grad():
        for value in (layer.P, layer.Q, layer.global_P, layer.global_Q):
            value.normal_()
    P, Q = (v.detach().clone().requires_grad_() for v in (layer.P, layer.Q))
    low = x @ layer.A.T
    by_hand = (
        layer.base(x)
        + 0.7
        * (0.5 * (low @ P.T + Q) + 0.5 * (low @ layer.global_P.T + layer.global_Q))
        @ layer.B.T
    )
    torch.testing.assert_close(layer(x), by_hand)
    (x_ours,) = torch.autograd.grad(layer(x).square().sum(), x)
    x_theirs, *theirs = torch.autograd.grad(by_hand.square().sum(), [x, P, Q])
    torch.testing.assert_close(x_ours, x_theirs)
    ours = torch.autograd.grad(layer(x).square().sum(), [layer.P, layer.Q])
    for mine, plain in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, plain * (2 if full_gradient else 1))  # 1 / (1 - g)
    torch.testing.assert_close(layer.A @ layer.A.T, torch.eye(3, dtype=torch.float64))
    torch.testing.assert_close(layer.B.T @ layer.B, torch.eye(3, dtype=torch.float64))


def test_adapters_have_one_shape_and_survive_the_way_there_and_back():
    networks = [
        attach(build_network(n, 10, (3, 32, 32)), num_blocks=3, rank=4) for n in (SMALL, LARGE)
    ]
    shapes = [read_adapters(adapted_layers(network)).shape for network in networks]
    assert shapes == [(3, 4, 5), (3, 4, 5)]
    adapters = torch.randn(3, 4, 5)
    write_global(adapted_layers(networks[1]), adapters)
    for layer, adapter in zip(adapted_layers(networks[1]), adapters, strict=True):
        assert torch.equal(torch.cat([layer.global_P, layer.global_Q[:, None]], 1), adapter)


def test_families_meet_on_the_public_set():
    """Aligned, A x of one family is close to A x of the other on images that neither has seen;
    orthonormal all the same."""
    agreement = {}
    for align in ("none", "public"):
        data = digits(public_examples=200)
        method = built(mosaic(align=align), data)
        images, _ = next(data.test_batches())
        seen = []
        for family in method.families:
            layer, inputs = adapted_layers(family)[-1], []
            layer.register_forward_hook(
                lambda layer, args, out, inputs=inputs: inputs.append(args[0])
            )
            family(images)
            low = inputs[0] @ layer.A.T
            seen.append((low - low.mean(0)).flatten())
            torch.testing.assert_close(layer.A @ layer.A.T, torch.eye(4))
            torch.testing.assert_close(layer.B.T @ layer.B, torch.eye(4))
        agreement[align] = torch.cosine_similarity(*seen, dim=0).item()
    assert agreement["public"] > 0.4 > abs(agreement["none"])
    with refused("--model.align public", "--data.public_examples"):
        built(mosaic(align="public"), digits())


def test_blocks_pair_by_depth():
    assert target_layers(SMALL(10), 3) == [
        "blocks.0.layers.3",
        "blocks.1.layers.3",
        "blocks.2.layers.3",
    ]
    assert target_layers(LARGE(10), 3) == [
        "blocks.0.layers.3",
        "blocks.2.layers.3",
        "blocks.4.layers.3",
    ]
    vit = build_network("vit_tiny_patch16_224", 10, (3, 32, 32))
    assert target_layers(vit, 4) == [f"blocks.{i}.mlp.fc2" for i in (2, 5, 8, 11)]
    assert target_layers(nn.Linear(2, 2), 1) == [""]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 13}, r"--model.rank 13 .* 24 inputs and 12 outputs; .*; write --model.rank 12"),
        ({"num_blocks": 9}, r"--model.num_blocks 9 .*; .*; write"),
        (
            {"networks": ["small_cnn"]},
            r"--model.num_blocks 3 for SmallCNN.*; write --model.num_blocks 1",
        ),
        (
            {
                "reference": lambda classes: nn.Sequential(
                    nn.Flatten(), nn.AdaptiveAvgPool1d(classes)
                )
            },
            r"--model.reference Sequential; .*; write",
        ),
    ],
)
def test_networks_that_do_not_fit(settings, message):
    with pytest.raises(ValueError, match=message):
        built(mosaic(**settings))


@pytest.mark.parametrize(
    "settings",
    [
        {"networks": []}, {"rank": 0}, {"num_blocks": 0}, {"tau": 0.0}, {"ema": 0.0}, {"ema": 1.5},
        {"sketch_rows": 0.0}, {"sketch_batches": 0}, {"sigma": -1.0}, {"sigma": float("inf")},
    ],
    ids=str,
)  # fmt: skip
def test_bad_settings(settings):
    with refused(f"--model.{next(iter(settings))} ", "write --model"):
        FedMosaic(**settings)


def test_weights_and_mix_by_hand():
    relevance = cosine(
        torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 3.0], [0.0, 0.0]]),
        torch.tensor([[1.0, 0.0], [1.0, 1.0]]),
    )
    torch.testing.assert_close(
        relevance,
        torch.tensor([[1, 0.5**0.5], [1, 0.5**0.5], [0, 0.5**0.5], [0, 0]], dtype=torch.float64),
    )
    weights = relevance_weights(
        torch.tensor([[1.0, 0.0, 0.5], [0.0, 1.0, 0.5]]), 0.5, torch.eye(2, 3, dtype=torch.bool)
    )
    a = 1 / (1 + np.exp(1))
    torch.testing.assert_close(
        weights, torch.tensor([[0, a, 1 - a], [a, 0, 1 - a]], dtype=torch.float32)
    )
    assert relevance_weights(torch.zeros(1, 1), 0.5, torch.ones(1, 1, dtype=torch.bool)).item() == 0
    assert relevance_weights(torch.zeros(1, 0), 0.5).shape == (1, 0)
    adapters = torch.randn(3, 2, 4, 5)
    torch.testing.assert_close(
        mix(weights, adapters), torch.einsum("mk,k...->m...", weights, adapters)
    )


def test_kept_rows_are_feature_rows_with_all_their_classes():
    kept = kept_rows(10, 256, 0.4, np.random.default_rng(0))
    assert len(kept) == 10 * 102
    grid = torch.zeros(2560).index_fill(0, kept, 1.0).view(10, 256)
    assert set(grid.sum(0).tolist()) == {0.0, 10.0}


@pytest.mark.slow
@pytest.mark.essential
def test_relevance_finds_the_clients_with_similar_classes(tmp_path):
    data, method = digits(12, batch_size=16), mosaic()
    trainer = run(
        method, data, tmp_path, max_rounds=3, local_epochs=1, callbacks=[RelevanceFigure(every=2)]
    )
    ids, relevance = method.relevance()
    assert ids.tolist() == list(range(12))
    assert label_correlation(relevance, data.group_counts()) > 0.9
    figures = {path.name for path in (trainer.run_dir / "figures").iterdir()}
    assert figures == {
        f"{name}.{suffix}"
        for name in ("relevance", "relevance_round_0002")
        for suffix in ("png", "pdf")
    }
    history = (trainer.run_dir / "metrics.csv").read_text()
    assert "relevance/label_correlation" in history.splitlines()[0]


def test_relevance_sees_nothing_when_the_noise_is_loud(tmp_path):
    data, method = digits(12), mosaic(sigma=100.0)
    run(method, data, tmp_path, max_rounds=2, local_epochs=1)
    assert abs(label_correlation(method.relevance()[1], data.group_counts())) < 0.4


def test_figure_helpers():
    counts = np.array([[5, 0], [0, 5], [4, 0], [0, 9]])
    assert label_similarity(counts).tolist() == [
        [1, 0, 1, 0],
        [0, 1, 0, 1],
        [1, 0, 1, 0],
        [0, 1, 0, 1],
    ]
    order = similar_next_to_each_other(label_similarity(counts)).tolist()
    assert {frozenset(order[:2]), frozenset(order[2:])} == {frozenset({0, 2}), frozenset({1, 3})}
    assert label_correlation(label_similarity(counts), counts) == pytest.approx(1)
    assert np.isnan(label_correlation(np.eye(2), counts[:2]))
    with refused("RelevanceFigure(every=-1)", "every: 0"):
        RelevanceFigure(every=-1)


def test_the_figure_is_idle_with_other_methods(tmp_path, caplog):
    from fl_lightning.methods import FedAvg

    trainer = run(FedAvg(), digits(), tmp_path, max_rounds=1, callbacks=[RelevanceFigure(every=1)])
    assert "RelevanceFigure with FedAvg; it draws methods that weigh clients by" in caplog.text
    assert not [*trainer.run_dir.glob("figures/relevance*")]
