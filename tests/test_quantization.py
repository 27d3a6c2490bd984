import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fl_lightning import rng
from fl_lightning.quantization import Quantized, allocate_bits, dequantize_codes, prune, quantize
from fl_lightning.quantization.planes import Layer, gain, reconstruct, to_planes, units


def test_allocation_golden(golden):
    cases = json.loads((golden / "fedmpq_allocation.json").read_text())["cases"]
    assert cases
    for case in cases:
        assert allocate_bits(case["sizes"], case["mean_bits"], case["delta"], case["budget"]) == case["bits"]


layers = st.lists(
    st.tuples(st.integers(1, 50_000), st.integers(1, 8), st.integers(1, 5)), min_size=1, max_size=12
)


@given(layers, st.floats(1, 9))
def test_allocation_never_exceeds_its_budget_and_leaves_no_room(layers, budget):
    sizes, mean_bits, delta = zip(*layers, strict=True)
    bits = allocate_bits(sizes, mean_bits, delta, budget)
    used = sum(n * b for n, b in zip(sizes, bits, strict=True))
    assert all(1 <= b <= 8 for b in bits)
    assert used <= budget * sum(sizes)
    assert all(b == 8 or used + n > budget * sum(sizes) for n, b in zip(sizes, bits, strict=True))


def test_allocation_refuses_nonsense():
    for arguments in (
        ([1], [1, 1], [1], 4),
        ([1], [1], [1], 0.5),
        ([1], [9], [1], 4),
        ([1], [4], [1], float("nan")),
    ):
        with pytest.raises(ValueError, match=";"):
            allocate_bits(*arguments)


def from_planes(planes, scale, matched=False):
    """One layer."""
    weights, _ = reconstruct(planes.flatten(), scale.view(1), [Layer(*planes.shape[1:])], matched)
    return weights[0]


weights = st.integers(0, 1000).map(
    lambda seed: torch.randn(200, generator=torch.Generator().manual_seed(seed))
)


@given(weights, st.integers(1, 8))
def test_planes_hold_the_weights_exactly(w, bits):
    planes, scale = to_planes(w, bits)
    assert planes.shape == (2, bits, 200)
    assert planes.min() >= 0
    assert planes.max() <= 2
    torch.testing.assert_close(units(planes) * scale / (2**bits - 1), w, rtol=0, atol=1e-6)
    torch.testing.assert_close(from_planes(planes, scale), quantize(w, bits).dequantize(), rtol=0, atol=1e-6)


def test_plane_gradients_by_hand():
    planes, scale = to_planes(torch.tensor([0.7, -0.1, 0.3]), bits=3)
    planes.requires_grad_()
    upstream = torch.tensor([1.0, 2.0, -1.0])
    from_planes(planes, scale).backward(upstream)
    step = scale / 7
    for b in range(3):
        torch.testing.assert_close(planes.grad[0, b], 2**b * step * upstream)
        torch.testing.assert_close(planes.grad[1, b], -(2**b) * step * upstream)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_a_matched_step_on_planes_is_an_sgd_step_on_the_weights(bits):
    w, upstream = torch.tensor([0.7, -0.4, 0.3]), torch.tensor([0.2, -0.1, 0.05])
    planes, scale = to_planes(w, bits)
    planes.requires_grad_()
    from_planes(planes, scale, matched=True).backward(upstream)
    moved = units(planes.detach() - 0.01 * planes.grad) * scale / (2**bits - 1)
    torch.testing.assert_close(moved, w - 0.01 * upstream, rtol=0, atol=1e-6)


def test_the_regulariser_by_hand():
    """Norms 3 and 4 of a layer of 3 weights at 2 bits, beside a layer of 1 weight at 1 bit whose norm is
    2."""
    planes = torch.zeros(2, 2, 3)
    planes[0, 0] = torch.tensor([1.0, 2.0, 2.0])
    planes[1, 1, 0] = 4.0
    flat = torch.cat([planes.flatten(), torch.tensor([0.0, 2.0])])
    _, penalty = reconstruct(flat, torch.ones(2), [Layer(2, 3), Layer(1, 1)])
    torch.testing.assert_close(penalty, torch.tensor((3 * 2 * 7.0 + 1 * 1 * 2.0) / 4), rtol=0, atol=1e-4)


def by_autograd(flat, scales, layers, matched):
    """The same in torch's own operations, in the order of the paper's equations."""
    weights, penalty, at = [], 0.0, 0
    for (bits, n), scale in zip(layers, scales, strict=True):
        planes = flat[at : at + 2 * bits * n].view(2, bits, n)
        at += 2 * bits * n
        if matched:
            factor = 1 / gain(bits, scale)
            planes = planes * factor + (planes - planes * factor).detach()
        value = torch.einsum("b,bn->n", 2.0 ** torch.arange(bits, dtype=flat.dtype), planes[0] - planes[1])
        weights.append((value + (value.round() - value).detach()) * scale / (2**bits - 1))
        penalty = penalty + n * bits * (planes.square().sum(dim=(0, 2)) + 1e-8).sqrt().sum()
    return weights, penalty / sum(n for _, n in layers)


@pytest.mark.parametrize("matched", [False, True])
@pytest.mark.parametrize("batched", [False, True])
def test_reconstruction_is_autograds(matched, batched):
    """In float64, for layers of several sizes and bits; under vmap for three clients at once."""
    generator = torch.Generator().manual_seed(0)
    layers = [Layer(1, 5), Layer(4, 7), Layer(8, 3)]
    flats = 2 * torch.rand(3, sum(layer.length for layer in layers), generator=generator, dtype=torch.float64)
    scales = torch.rand(3, 3, generator=generator, dtype=torch.float64) + 0.1
    upstream = torch.randn(3, 15, generator=generator, dtype=torch.float64)

    def loss(function, flat, scales, upstream):
        weights, penalty = function(flat, scales, layers, matched)
        return torch.cat(weights) @ upstream + 0.3 * penalty

    expected, found = flats.clone().requires_grad_(), flats.clone().requires_grad_()
    before = sum(loss(by_autograd, *row) for row in zip(expected, scales, upstream, strict=True))
    one = lambda *row: loss(reconstruct, *row)  # noqa: E731
    after = (
        torch.func.vmap(one)(found, scales, upstream)
        if batched
        else torch.stack(list(map(one, found, scales, upstream)))
    )
    torch.testing.assert_close(after.sum(), before)
    before.backward()
    after.sum().backward()
    torch.testing.assert_close(found.grad, expected.grad, rtol=1e-12, atol=1e-12)


def test_regulariser_has_the_papers_size():
    """METHODS.md 4: ResNet-20 with half the bits set gives about 457 / 1826 / 7305 at N = 2 / 4 / 8."""
    from fl_lightning.methods.quantized import quantized_layers
    from fl_lightning.models import build_network

    sizes = [w.numel() for w in quantized_layers(build_network("resnet20", 10, (3, 32, 32)), True).values()]
    for bits, expected in ((2, 457), (4, 1826), (8, 7305)):
        total = sum(n * bits * bits * np.sqrt(n / 2) for n in sizes) / sum(sizes)
        assert abs(total - expected) / expected < 0.02


def test_stochastic_rounding_is_unbiased_and_seeded():
    w = torch.linspace(-1, 1, 41)
    draws = torch.stack([quantize(w, 2, noise=rng.stream(0, "t", r)).dequantize() for r in range(4000)])
    standard_error = (1 / 3) / 2 / np.sqrt(4000)
    assert (draws.mean(0) - w).abs().max() < 5 * standard_error
    assert torch.equal(
        quantize(w, 2, noise=rng.stream(0, "t", 1)).codes(),
        quantize(w, 2, noise=rng.stream(0, "t", 1)).codes(),
    )


@given(weights, st.integers(1, 8))
def test_codes_round_trip_and_nearest_error(w, bits):
    layer = quantize(w, bits)
    back = Quantized.from_codes(layer.codes(), layer.scale, bits)
    assert torch.equal(back.dequantize(), layer.dequantize())
    assert torch.equal(dequantize_codes(layer.codes(), layer.scale, bits), layer.dequantize())
    assert (layer.dequantize() - w).abs().max() <= layer.step / 2 * 1.0001


def test_zero_layer_stays_zero():
    assert torch.equal(quantize(torch.zeros(5), 4).dequantize(), torch.zeros(5))


def layer_of(magnitudes: list[int], bits: int) -> Quantized:
    m = torch.tensor(magnitudes, dtype=torch.int32)
    return Quantized(m, torch.arange(len(m)) % 2 == 1, scale=float(2**bits - 1), bits=bits)  # step 1


def test_pruning_by_hand():
    empty_top = prune(layer_of([3, 1, 2, 3] * 25, bits=4))
    assert (empty_top.bits, empty_top.step) == (2, 1.0)  # two empty planes on top: the step stays
    torch.testing.assert_close(empty_top.dequantize(), layer_of([3, 1, 2, 3] * 25, 4).dequantize())

    rare_top = prune(layer_of([15] + [7, 5, 6, 1] * 25, bits=4))  # one in 101 has the top digit
    assert (rare_top.bits, rare_top.step) == (3, 1.0)
    assert rare_top.magnitude[0] == 7  # saturates: all lower digits 1

    empty_low = prune(layer_of([8, 4, 12, 0] * 25, bits=4))
    assert (empty_low.bits, empty_low.step) == (2, 4.0)  # two empty planes below: the step doubles twice
    torch.testing.assert_close(empty_low.dequantize(), layer_of([8, 4, 12, 0] * 25, 4).dequantize())

    assert prune(layer_of([0] * 100, bits=4)).bits == 1  # never below one bit
    assert prune(layer_of([15, 9, 6, 1] * 25, bits=4)).bits == 4
