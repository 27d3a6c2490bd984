"""Controllers, their gates, the gradient of joules and the price."""

from __future__ import annotations

import math
from collections import Counter
from itertools import product

import numpy as np
import pytest
import torch
from refusals import refused

from fl_lightning import rng
from fl_lightning.energy import (
    BHSPController,
    CostLine,
    HESTController,
    TABSController,
    bounded,
    expected_energy,
    gating,
    gumbel_choices,
    probabilities,
)

COSTS = torch.tensor([[1.0, 2.0, 5.0], [0.5, math.inf, 3.0]], dtype=torch.float64)


def weights(controller) -> int:
    """Return the number of weights without biases."""
    return sum(tensor.numel() for name, tensor in controller.named_parameters() if name != "bias")


def test_numbers_of_weights():
    """Those that are claimed at d = 4096, L = 32, R = 16 and k = 32, on the modules themselves."""
    assert weights(HESTController(4096, 32, 32)) == 264_192
    assert weights(TABSController([4096] * 16 * 32)) == 2_097_152
    assert round(100 * (264_192 / 2_097_152 - 1)) == -87


def test_hest_is_its_formula():
    hest = HESTController(6, 4, 3, torch.Generator().manual_seed(1)).double()
    with torch.no_grad():
        hest.readout.copy_(torch.from_numpy(np.random.default_rng(0).normal(size=(2, 4, 3))))
    x = np.random.default_rng(1).normal(size=(2, 5, 6))
    theta = hest(torch.from_numpy(x)).detach().numpy()
    w, v, b = (value.detach().numpy() for value in (hest.projection, hest.readout, hest.bias))
    for at in np.ndindex(2, 5):
        h = x[at] / np.sqrt((x[at] ** 2).mean() + 1e-6)
        for g in range(4):
            expected = [0.0, *(float((w[z] @ h) @ v[z, g] + b[g, z]) for z in range(2))]
            assert theta[(*at, g)] == pytest.approx(expected, rel=1e-12)
    changed = x.copy()
    changed[:, 3:] += 1.0
    assert np.array_equal(hest(torch.from_numpy(changed)).detach().numpy()[:, :3], theta[:, :3]), (
        "causal"
    )


def test_all_begin_at_high_for_every_token():
    x = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(0))
    assert torch.equal(HESTController(6, 4, 3)(x), torch.tensor([0.0, 0.0, 2.0]).expand(2, 3, 4, 3))
    assert torch.equal(BHSPController(4)(2, 3), torch.tensor([0.0, 0.0, 2.0]).expand(2, 3, 4, 3))
    for group in range(2):
        tabs = TABSController([6, 6]).logits_at(group, x)
        assert torch.equal(tabs, torch.tensor([0.0, -math.inf, 2.0]).expand(2, 3, 3))


def test_the_same_stream_draws_the_same_features():
    drawn = []
    for _ in range(2):
        with rng.torch_stream(3, "controller"):
            drawn.append(HESTController(6, 4, 3).projection)
    assert torch.equal(*drawn)
    assert not torch.equal(
        drawn[0], HESTController(6, 4, 3, torch.Generator().manual_seed(9)).projection
    )


def test_hest_of_one_group_and_feature_is_tabs_with_its_gates_tied():
    """W_high v_high is the one weight vector that R gates of a layer share, on the same normalised
    input."""
    hest = HESTController(6, 1, 1).double()
    with torch.no_grad():
        hest.readout.fill_(0.7)
        hest.bias.copy_(torch.tensor([[0.3, -0.4]], dtype=torch.float64))
    tabs = TABSController([6] * 3).double()
    with torch.no_grad():
        for weight in tabs.weights:
            weight.copy_(0.7 * hest.projection[1, 0])
        tabs.bias.fill_(-0.4)
    x = torch.from_numpy(np.random.default_rng(2).normal(size=(2, 4, 6)))
    h = torch.nn.functional.rms_norm(x, (6,), eps=1e-6)
    ours, theirs = hest(x), torch.stack([tabs.logits_at(gate, h) for gate in range(3)], dim=-2)
    for gate in range(3):
        torch.testing.assert_close(theirs[..., gate, 2], ours[..., 0, 2], rtol=0, atol=1e-12)
    off_or_high = torch.tensor([[1.0, math.inf, 3.0]], dtype=torch.float64)
    torch.testing.assert_close(
        probabilities(theirs, off_or_high.expand(3, 3))[..., :1, :],
        probabilities(ours, off_or_high),
    )


def test_expected_energy_of_a_token_has_its_gradient():
    """dE / dtheta_z = p_z (c_z - E_g) by hand, and by central differences."""
    theta = torch.from_numpy(np.random.default_rng(3).normal(size=(4, 2, 3))).requires_grad_()
    of_step = torch.stack((torch.zeros_like(COSTS), COSTS), dim=-1)  # [G, 3, 2]

    def energy_of(logits):
        return expected_energy(probabilities(logits, COSTS).unsqueeze(-3), of_step)

    energy = energy_of(theta)
    assert energy.shape == (4,)
    (gradient,) = torch.autograd.grad(energy.sum(), theta)
    p = probabilities(theta, COSTS).detach()
    assert p[:, 1, 1].eq(0).all()
    costs = COSTS.nan_to_num(posinf=0.0)
    by_group = (p * costs).sum(-1, keepdim=True)
    torch.testing.assert_close(gradient, p * (costs - by_group))
    torch.testing.assert_close(energy.detach(), by_group.sum((-2, -1)))
    step = 1e-5
    for at in np.ndindex(4, 2, 3):
        moved = torch.zeros_like(theta)
        moved[at] = step
        with torch.no_grad():
            change = energy_of(theta + moved) - energy_of(theta - moved)
        assert float(change.sum()) / (2 * step) == pytest.approx(float(gradient[at]), abs=1e-8)


CURVES = torch.tensor(
    [
        [[0.0, 1.0, 1.5, 4.0], [0.0, 3.0, 3.0, 3.5], [0.0, 2.0, 4.0, 6.0]],
        [[0.0, 0.2, 0.9, 1.0], [0.0, *[math.inf] * 3], [0.0, 5.0, 5.5, 7.0]],
    ],
    dtype=torch.float64,
)
"""Joules of an option that 0 to 3 tokens take, ``[G, 3, 4]``, of no common shape."""


def some_chances(rows: int = 5) -> torch.Tensor:
    theta = torch.from_numpy(np.random.default_rng(4).normal(size=(rows, 3, 2, 3), scale=2.0))
    return probabilities(theta, CURVES[..., -1])


def test_expected_energy_of_a_prompt_is_the_mean_over_all_choices():
    """3 tokens, 2 groups and 3 options: 729 choices, each with its probability and its cost."""
    chances = some_chances()
    chances[3] = torch.eye(3, dtype=torch.float64)[2]  # all high, for certain
    chances[4, 1:] = 0.0  # a prompt of one token, and padding
    found = expected_energy(chances, CURVES)
    for row, p in enumerate(chances.tolist()):
        expected = 0.0
        tokens = 1 if row == 4 else 3
        for each in product(product(range(3), repeat=2), repeat=tokens):
            chance = math.prod(
                p[t][g][z] for t, taken in enumerate(each) for g, z in enumerate(taken)
            )
            if chance:
                pairs = Counter((g, z) for taken in each for g, z in enumerate(taken))
                expected += chance * sum(float(CURVES[g, z, m]) for (g, z), m in pairs.items())
        assert float(found[row]) == pytest.approx(expected, abs=1e-12)
    assert float(found[3]) == 13.0
    # certain choices cost what a ledger charges
    chosen = torch.zeros(1, 3, 2, 3, dtype=torch.float64)
    chosen[0, [0, 1, 2], 0, [0, 2, 0]] = chosen[0, :, 1, 2] = 1.0
    assert float(expected_energy(chosen, CURVES)) == 1.5 + 2.0 + 7.0


def test_the_gradient_of_a_prompts_energy_is_exact_and_finite_at_certain_choices():
    chances = some_chances(4)
    chances[1] = torch.eye(3, dtype=torch.float64)[2]
    chances[2, :, :, 0], chances[2, :, :, 2] = 0.5, 0.5
    chances.requires_grad_()
    (gradient,) = torch.autograd.grad(expected_energy(chances, CURVES).sum(), chances)
    assert gradient.isfinite().all()
    step = 1e-4
    for at in np.ndindex(*chances.shape):
        moved = torch.zeros_like(chances)
        moved[at] = step
        with torch.no_grad():
            change = expected_energy(chances + moved, CURVES) - expected_energy(
                chances - moved, CURVES
            )
        assert float(change.sum()) / (2 * step) == pytest.approx(float(gradient[at]), abs=1e-9)


def test_for_lines_the_fixed_part_is_paid_where_any_token_takes_the_option(monkeypatch):
    """a (1 - prod (1 - p)) + b sum p, for a long prompt, in pieces as in one, also in float32."""
    tokens, (a, b) = 200, (3.0, 0.25)
    p = torch.from_numpy(np.random.default_rng(5).uniform(size=(7, tokens, 1, 3))) / 50
    line = torch.from_numpy(CostLine(a, b).at(np.arange(tokens + 1))).expand(1, 3, -1)
    expected = (a * (1 - (1 - p).prod(1)) + b * p.sum(1)).sum((-2, -1))
    whole = expected_energy(p, line)
    torch.testing.assert_close(whole, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(
        expected_energy(p.float(), line).double(), expected, rtol=1e-5, atol=0
    )
    monkeypatch.setattr(gating, "MOST_VALUES", 100_000)
    assert torch.equal(expected_energy(p, line), whole)


def test_logits_beyond_the_bound_keep_the_gradient_that_leads_back():
    theta = torch.tensor([-20.0, -20.0, -8.0, 0.5, 8.0, 20.0, 20.0, -math.inf], requires_grad=True)
    slope = torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0, 1.0, -1.0, 0.0])
    found = bounded(theta)
    assert found.tolist() == [-8.0, -8.0, -8.0, 0.5, 8.0, 8.0, 8.0, -math.inf]
    (gradient,) = torch.autograd.grad(found, theta, slope)
    assert gradient.tolist() == [0.0, -1.0, 1.0, 1.0, -1.0, 1.0, 0.0, 0.0]


def test_a_price_moves_a_controller_that_is_certain():
    """A logit of 200, as training without a bound has found them, has no second option in
    float32."""
    costs = torch.tensor([[0.0, math.inf, 1.0]])
    for limited in (True, False):
        theta = torch.tensor([[0.0, 0.0, 200.0]], requires_grad=True)
        optimizer = torch.optim.Adam([theta], lr=0.5)
        for _ in range(600):
            p = probabilities(bounded(theta) if limited else theta, costs)
            energy = (p * costs.nan_to_num(posinf=0.0)).sum()
            optimizer.zero_grad()
            (100.0 * energy).backward()
            optimizer.step()
        assert (energy.item() < 0.01) == limited
        assert (theta[0, 2].item() < theta[0, 0].item()) == limited


def test_gates_are_one_hot_draws_of_softmax_with_the_soft_gradient():
    theta = torch.tensor([[0.0, 1.0, 2.0], [0.5, 9.0, 0.0]], dtype=torch.float64).expand(
        20_000, 2, 3
    )
    theta = theta.clone().requires_grad_()
    gates = gumbel_choices(theta, COSTS, rng.stream(0, "gates"))
    assert ((gates.detach() == 0) | ((gates.detach() - 1).abs() < 1e-12)).all()
    assert gates[:, 1, 1].eq(0).all(), "an option of infinite cost is never drawn"
    expected = probabilities(theta, COSTS)[0]
    assert torch.allclose(gates.mean(0), expected, atol=4 * 0.5 / math.sqrt(20_000))
    values = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    (gradient,) = torch.autograd.grad((gates * values).sum(), theta)
    noise = torch.from_numpy(rng.stream(0, "gates").gumbel(size=theta.shape))
    p = probabilities((theta.detach() + noise) * 1.5, COSTS)
    soft = 1.5 * p * (values - (p * values).sum(-1, keepdim=True))
    torch.testing.assert_close(gradient, soft)


def test_sizes_that_are_refused():
    with refused("features=0"):
        HESTController(4, 2, 0)
    with refused("groups=0"):
        BHSPController(0)
    with refused("groups=0"):
        TABSController([])
    with refused("widths=0"):
        TABSController([4, 0])
