import json
import pickle
from copy import deepcopy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fl_lightning import rng
from fl_lightning.quantization import (
    Quantized,
    allocate_bits,
    dequantize_codes,
    prune,
    quantize,
    quantize_and_prune,
)
from fl_lightning.quantization.activations import fake_quantize, quantize_activations
from fl_lightning.quantization.latent import Latent, counts_without_waiting
from fl_lightning.quantization.layer import Grid, Layer
from fl_lightning.quantization.planes import (
    PLANE_MAX,
    TOP_MAX,
    Planes,
    gain,
    length,
    to_planes,
    units,
)
from fl_lightning.quantization.uniform import nearest_scale


def test_allocation_golden(golden):
    cases = json.loads((golden / "fedmpq_allocation.json").read_text())["cases"]
    assert cases
    for case in cases:
        assert (
            allocate_bits(case["sizes"], case["mean_bits"], case["delta"], case["budget"])
            == case["bits"]
        )


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
    grid = Grid([Layer(*planes.shape[1:])], scale.view(1), torch.ones(1))
    return Planes(matched).quantized(planes.flatten(), grid)[0][0]


weights = st.integers(0, 1000).map(
    lambda seed: torch.randn(200, generator=torch.Generator().manual_seed(seed))
)


@given(weights, st.integers(1, 8), st.floats(0.3, 3))
def test_planes_hold_the_weights_exactly(w, bits, room):
    """On a grid that is finer or coarser than the weights need."""
    scale = w.abs().max() * room
    planes = to_planes(w, bits, scale)
    assert planes.shape == (2, bits, 200)
    assert planes.min() >= 0
    assert planes[:, :-1].numpy().max(initial=0) <= PLANE_MAX
    assert planes[:, -1].max() <= TOP_MAX
    torch.testing.assert_close(units(planes) * scale / (2**bits - 1), w, rtol=1e-5, atol=1e-6)


def test_planes_of_weights_far_above_the_grid_saturate():
    planes = to_planes(torch.tensor([100.0, -0.5]), 3, torch.tensor(1.0))
    assert units(planes).tolist() == [TOP_MAX * 4, -3.5]


def test_plane_gradients_by_hand():
    scale = torch.tensor(0.7)
    planes = to_planes(torch.tensor([0.7, -0.1, 0.3]), 3, scale).requires_grad_()
    upstream = torch.tensor([1.0, 2.0, -1.0])
    from_planes(planes, scale).backward(upstream)
    step = scale / 7
    for b in range(3):
        torch.testing.assert_close(planes.grad[0, b], 2**b * step * upstream)
        torch.testing.assert_close(planes.grad[1, b], -(2**b) * step * upstream)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_a_matched_step_on_both_sides_is_two_sgd_steps_on_the_weights(bits):
    w, upstream, scale = (
        torch.tensor([0.7, -0.4, 0.3]),
        torch.tensor([0.2, -0.1, 0.05]),
        torch.tensor(0.7),
    )
    planes = to_planes(w, bits, scale).requires_grad_()
    from_planes(planes, scale, matched=True).backward(upstream)
    moved = units(planes.detach() - 0.01 * planes.grad) * scale / (2**bits - 1)
    torch.testing.assert_close(moved, w - 0.02 * upstream, rtol=0, atol=1e-6)


def test_the_regulariser_by_hand():
    """Norms 3 and 4 of a layer of 3 weights at 2 bits, beside a layer of 1 weight at 1 bit whose
    norm is 2: in planes, and in weights whose digits these are."""
    planes = torch.zeros(2, 2, 3)
    planes[0, 0] = torch.tensor([1.0, 2.0, 2.0])
    planes[1, 1, 0] = 4.0
    flat = torch.cat([planes.flatten(), torch.tensor([0.0, 2.0])])
    grid = Grid([Layer(2, 3), Layer(1, 1)], torch.ones(2), torch.ones(2))
    _, penalty = Planes().quantized(flat, grid)
    torch.testing.assert_close(
        penalty, torch.tensor((3 * 2 * 7.0 + 1 * 1 * 2.0) / 4), rtol=0, atol=1e-4
    )

    # magnitudes 3, 1, 8 have lowest digits 1, 1, 0 and 1, 0, 4 above; magnitude 2 at one bit has
    # digit 2
    grid = grid._replace(scales=torch.tensor([3.0, 1.0]))
    rounded, penalty = Latent().quantized(torch.tensor([3.2, -0.9, 8.0, -2.0]), grid)
    expected = (3 * 2 * (2**0.5 + 17**0.5) + 1 * 1 * 2.0) / 4
    assert torch.cat(rounded).tolist() == [3.0, -1.0, 8.0, -2.0]
    torch.testing.assert_close(penalty, torch.tensor(expected), rtol=0, atol=1e-4)


def planes_by_autograd(flat, scales, pull, layers, matched):
    """The same in torch's own operations, in the order of the paper's equations."""
    weights, penalty, at = [], 0.0, 0
    for (bits, n), scale, strength in zip(layers, scales, pull, strict=True):
        planes = flat[at : at + 2 * bits * n].view(2, bits, n)
        at += 2 * bits * n
        if matched:
            factor = 1 / gain(bits, scale)
            planes = planes * factor + (planes - planes * factor).detach()
        value = torch.einsum(
            "b,bn->n", 2.0 ** torch.arange(bits, dtype=flat.dtype), planes[0] - planes[1]
        )
        weights.append((value + (value.round() - value).detach()) * scale / (2**bits - 1))
        norm = n * bits * (planes.square().sum(dim=(0, 2)) + 1e-8).sqrt().sum()
        penalty = penalty + norm * strength + (norm - norm * strength).detach()
    return weights, penalty / sum(n for _, n in layers)


def latent_by_autograd(flat, scales, pull, layers, _):
    """Each weight's digits move with it as a step on the planes of one side would move them: digit
    b by 2^b / (c sum_b 4^b) of what W moves. Their group lasso is then torch's own."""
    weights, penalty, at = [], 0.0, 0
    for (bits, n), scale, strength in zip(layers, scales, pull, strict=True):
        w, step = flat[at : at + n], scale / (2**bits - 1)
        at += n
        q = (w / step).round().detach()
        weights.append(w + (q * step - w).detach())
        magnitude, side = q.abs().long(), torch.copysign(torch.ones_like(w), w).detach()
        rise = strength * side * (w - w.detach()) / (step * sum(4**b for b in range(bits)))
        for b in range(bits):
            digit = magnitude >> b if b == bits - 1 else magnitude >> b & 1
            p = digit.to(w.dtype) + 2**b * rise
            penalty = penalty + n * bits * (p.square().sum() + 1e-8).sqrt()
    return weights, penalty / sum(n for _, n in layers)


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize(
    ("representation", "by_autograd"),
    [
        (Planes(False), planes_by_autograd),
        (Planes(True), planes_by_autograd),
        (Latent(), latent_by_autograd),
    ],
    ids=["raw planes", "matched planes", "latent"],
)
def test_quantized_weights_are_autograds(representation, by_autograd, batched):
    """For layers of several sizes and bits, some weights above their grid; under vmap for three
    clients at once."""
    generator = torch.Generator().manual_seed(0)
    layers, is_latent = [Layer(1, 5), Layer(4, 7), Layer(8, 3)], isinstance(representation, Latent)
    entries, dtype = (
        sum(layer.size if is_latent else length(layer) for layer in layers),
        torch.float64,
    )
    flats = 2 * torch.rand(3, entries, generator=generator, dtype=dtype) - (1 if is_latent else 0)
    scales, pull = torch.rand(2, 3, 3, generator=generator, dtype=dtype) + 0.1
    upstream = torch.randn(3, 15, generator=generator, dtype=dtype)

    def ours(flat, scales, pull, layers, _):
        return representation.quantized(flat, Grid(layers, scales, pull))

    def loss(function, flat, scales, pull, upstream):
        weights, penalty = function(
            flat, scales, pull, layers, getattr(representation, "matched", None)
        )
        return torch.cat(list(weights)) @ upstream + 0.3 * penalty

    expected, found = flats.clone().requires_grad_(), flats.clone().requires_grad_()
    rows = list(zip(scales, pull, upstream, strict=True))
    before = sum(loss(by_autograd, flat, *row) for flat, row in zip(expected, rows, strict=True))
    one = lambda *row: loss(ours, *row)  # noqa: E731
    after = (
        torch.func.vmap(one)(found, scales, pull, upstream)
        if batched
        else torch.stack([one(flat, *row) for flat, row in zip(found, rows, strict=True)])
    )
    precision = {"rtol": 1e-5, "atol": 1e-6} if is_latent else {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(after.sum(), before, **precision)  # its table of digits is float32
    before.backward()
    after.sum().backward()
    torch.testing.assert_close(found.grad, expected.grad, **precision)


def test_counts_on_a_device_are_those_on_the_cpu():
    rows = torch.randint(9, (3, 500), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    expected = torch.stack([row.bincount(minlength=12) for row in rows])
    assert torch.equal(counts_without_waiting(rows, 12), expected)


@pytest.mark.parametrize("representation", [Planes(), Latent()])
def test_regulariser_has_the_papers_size(representation):
    """METHODS.md 4: ResNet-20 with half the bits set gives about 457 / 1826 / 7305 at N = 2 / 4 /
    8."""
    from fl_lightning.methods.quantized import quantized_layers
    from fl_lightning.models import build_network

    network = build_network("resnet20", 10, (3, 32, 32))
    sizes = [w.numel() for w in quantized_layers(network, True).values()]
    generator = torch.Generator().manual_seed(0)
    for bits, expected in ((2, 457), (4, 1826), (8, 7305)):
        grid = Grid(
            [Layer(bits, n) for n in sizes],
            torch.full((len(sizes),), 2.0**bits - 1),
            torch.ones(len(sizes)),
        )
        weights = [torch.randint(2**bits, (n,), generator=generator).float() for n in sizes]
        _, penalty = representation.quantized(representation.variables(weights, grid), grid)
        assert abs(float(penalty) - expected) / expected < 0.02


def test_stochastic_rounding_is_unbiased_and_seeded():
    w = torch.linspace(-1, 1, 41)
    draws = torch.stack(
        [quantize(w, 2, noise=rng.stream(0, "t", r)).dequantize() for r in range(4000)]
    )
    standard_error = (1 / 3) / 2 / np.sqrt(4000)
    assert (draws.mean(0) - w).abs().max() < 5 * standard_error
    assert torch.equal(
        quantize(w, 2, noise=rng.stream(0, "t", 1)).codes(),
        quantize(w, 2, noise=rng.stream(0, "t", 1)).codes(),
    )


@given(weights, st.integers(1, 8))
def test_codes_round_trip_and_nearest_error(w, bits):
    layer = quantize(w, bits)
    assert torch.equal(dequantize_codes(layer.codes(), layer.scale, bits), layer.dequantize())
    assert (layer.dequantize() - w).abs().max() <= layer.step / 2 * 1.0001


def test_zero_layer_stays_zero():
    assert torch.equal(quantize(torch.zeros(5), 4).dequantize(), torch.zeros(5))


def layer_of(magnitudes: list[int], bits: int) -> Quantized:
    m = torch.tensor(magnitudes, dtype=torch.int32)
    # step 1
    return Quantized(m, torch.arange(len(m)) % 2 == 1, scale=float(2**bits - 1), bits=bits)


def test_pruning_by_hand():
    empty_top, empty_top_dropped = prune(layer_of([3, 1, 2, 3] * 25, bits=4))
    assert (empty_top.bits, empty_top.step) == (2, 1.0)  # two empty planes on top: the step stays
    torch.testing.assert_close(empty_top.dequantize(), layer_of([3, 1, 2, 3] * 25, 4).dequantize())

    # one in 101 has the top digit
    rare_top, rare_top_dropped = prune(layer_of([15] + [7, 5, 6, 1] * 25, bits=4))
    assert (rare_top.bits, rare_top.step) == (3, 1.0)
    assert rare_top.magnitude[0] == 7  # saturates: all lower digits 1

    empty_low, empty_low_dropped = prune(layer_of([8, 4, 12, 0] * 25, bits=4))
    # two empty planes below: the step doubles twice
    assert (empty_low.bits, empty_low.step) == (2, 4.0)
    torch.testing.assert_close(empty_low.dequantize(), layer_of([8, 4, 12, 0] * 25, 4).dequantize())

    assert (empty_top_dropped, rare_top_dropped, empty_low_dropped) == (2, 1, 0)

    assert prune(layer_of([0] * 100, bits=4))[0].bits == 1  # never below one bit
    assert prune(layer_of([15, 9, 6, 1] * 25, bits=4))[0].bits == 4


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_the_nearest_scale_is_no_worse_than_any_other(bits):
    """By trying; a uniform layer keeps its whole range, one with outliers loses them at few
    bits."""
    generator = torch.Generator().manual_seed(0)
    uniform = torch.rand(5000, generator=generator) * 2 - 1
    heavy = torch.randn(5000, generator=generator) ** 3

    def error(values, scale):
        return float((quantize(values, bits, scale).dequantize() - values).square().sum())

    for values in (uniform, heavy):
        largest = float(values.abs().max())
        best = min(error(values, largest * k / 16) for k in range(1, 17))
        assert error(values, nearest_scale(values, bits)) <= 1.001 * best
    assert nearest_scale(heavy, 2) < 0.5 * float(heavy.abs().max())
    assert nearest_scale(torch.zeros(3), bits) == 0


def test_what_outgrows_the_grid():
    """A few large weights empty no plane and are not cut off; what pruning drops saturates them."""
    full = torch.tensor([15.0, -9.0, 6.0, 1.0] * 25)
    outlier = torch.cat([full, torch.tensor([45.0])])
    layer, top = quantize_and_prune(outlier, 4, scale=15.0, threshold=0.02)
    # the top plane is full: 4 bits, a longer step
    assert (layer.bits, top, layer.scale) == (4, 0, 45.0)
    assert layer.dequantize()[-1] == 45

    layer, top = quantize_and_prune(full, 4, scale=15.0, threshold=0.02)
    assert (layer.bits, top) == (4, 0)
    torch.testing.assert_close(layer.dequantize(), full)

    # half of the grid
    low = torch.cat([torch.tensor([7.0, -4.0, 3.0, 1.0] * 25), torch.tensor([45.0])])
    layer, top = quantize_and_prune(low, 4, scale=15.0, threshold=0.02)
    assert (layer.bits, top, layer.step) == (3, 1, 1.0)
    assert layer.dequantize()[-1] == 7


def test_what_a_quantised_method_leaves_out_is_said_by_name(caplog):
    """A layer of another kind stays in full precision, and a warning names its weight."""
    from fl_lightning.conformance.toy import images, sgd
    from fl_lightning.methods import AQFL

    class Mixed(torch.nn.Module):
        def __init__(self, num_classes: int) -> None:
            super().__init__()
            self.first, self.last = torch.nn.Conv1d(3, 4, 1), torch.nn.Linear(4, num_classes)

        def forward(self, x):
            return self.last(self.first(x.flatten(2)).mean(2))

    data = images()
    data.prepare_data()
    data.setup()
    data.distribute(0, torch.device("cpu"))
    method = AQFL(network=Mixed, optimizer=sgd(0.1))
    method.build(data)
    assert "not quantised, and sent in full precision, are first.weight [4, 3, 1]:" in caplog.text
    assert method.codec.names == ["last.weight"]
    assert "first.weight" in method.rest.shapes


def fake_quantize_of_today(x, bits):
    """As it was for float32 and bfloat16, and stays."""
    step = (x.detach().abs().amax() / (2**bits - 1)).clamp_min(1e-12)
    return x + ((x / step).round() * step - x).detach()


@pytest.mark.parametrize("bits", [1, 4, 8])
def test_activations_of_zero_stay_zero_in_half_precision_and_others_are_as_they_were(bits):
    tiny = 2.0**-24  # the least number of float16
    for value in (0.0, tiny, 100 * tiny, 1e-5, 1.0, 6e4):
        x = value * torch.tensor([1.0, -0.4, 0.0], dtype=torch.float16)
        found = fake_quantize(x, bits)
        assert found.isfinite().all()
        assert (found - x).abs().max() <= x.abs().max() / (2**bits - 1) / 2 * 1.01 + tiny
        if value >= 1e-5:  # not only what is finite
            assert torch.equal(found, fake_quantize_of_today(x, bits))
    assert torch.equal(fake_quantize(torch.zeros(3).half(), bits), torch.zeros(3).half())
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for scale in (0.0, 1e-40, 1e-20, 1e-13, 1e-10, 1.0, 1e30):
            x = (scale * torch.randn(50, generator=torch.Generator().manual_seed(0))).to(dtype)
            assert torch.equal(fake_quantize(x, bits), fake_quantize_of_today(x, bits))


class Tied(torch.nn.Module):
    """An embedding whose weight the first of two further layers has too, and a layer that is called
    by a name; before the last layer a hook of its author's doubles what comes."""

    def __init__(self, num_classes: int = 5) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(7, 7)
        self.a, self.b = torch.nn.Linear(7, 7), torch.nn.Linear(7, 7)
        self.last = torch.nn.Linear(7, num_classes)
        self.a.weight = self.b.weight = self.embedding.weight
        self.last.register_forward_pre_hook(doubled)

    def forward(self, ids):
        return self.last(self.b(self.a(input=self.embedding(ids))).tanh())

    def by_hand(self, ids, bits):
        """The same with the inputs of all linear layers on a grid of so many bits."""

        def grid(x):
            return fake_quantize_of_today(x, bits)

        x = grid(self.embedding.weight[ids])
        for layer in (self.a, self.b):
            x = grid(x) @ layer.weight.T + layer.bias
        return grid(2 * x.tanh()) @ self.last.weight.T + self.last.bias


def doubled(module, args):
    return tuple(2 * each for each in args)


def tied() -> tuple[Tied, torch.Tensor]:
    torch.manual_seed(0)
    return Tied(), torch.tensor([[1, 2, 3], [4, 5, 6]])


def test_the_inputs_of_every_layer_are_quantised_once_however_it_is_called():
    """The second layer of a weight too, and one that is called by name."""
    network, ids = tied()
    plain = network(ids)
    quantize_activations(network, ["embedding.weight", "last.weight"], 2)
    found = network(ids)
    torch.testing.assert_close(found, network.by_hand(ids, 2))
    assert not torch.allclose(found, plain)
    for copy in (deepcopy(network), pickle.loads(pickle.dumps(network))):
        assert torch.equal(copy(ids), found)


def test_ids_stay_as_they_are_in_whatever_layer_has_a_quantised_weight():
    class Bag(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.last, self.bag = torch.nn.Linear(7, 7), torch.nn.EmbeddingBag(7, 7)
            self.bag.weight = self.last.weight

        def forward(self, ids):
            return self.last(self.bag(ids))

    network, ids = Bag(), torch.tensor([[1, 2, 6]])
    expected = fake_quantize_of_today(network.bag(ids), 2) @ network.last.weight.T
    quantize_activations(network, ["last.weight"], 2)
    torch.testing.assert_close(network(ids), expected + network.last.bias)


class Hooked(torch.nn.Sequential):
    """Two layers, before each of which a hook of its author's changes what comes."""

    def __init__(self, num_classes: int) -> None:
        layers = torch.nn.Linear(768, 8), torch.nn.Linear(8, num_classes)
        super().__init__(torch.nn.Flatten(), *layers)
        layers[0].register_forward_pre_hook(doubled)
        layers[1].register_forward_pre_hook(one_more, with_kwargs=True)


def one_more(module, args, named):
    return (args[0] + 1,), named


def test_full_precision_leaves_the_hooks_of_a_networks_author():
    from fl_lightning.conformance.toy import images, sgd
    from fl_lightning.methods import AQFL

    data = images()
    data.prepare_data()
    data.setup()
    data.distribute(0, torch.device("cpu"))
    method = AQFL(bits=2, activation_bits=1, network=Hooked, optimizer=sgd(0.1))
    method.build(data)
    x = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    _, first, last = method.network

    def by_hand(grid):
        hidden = grid(2 * x.flatten(1)) @ first.weight.T + first.bias
        return grid(hidden + 1) @ last.weight.T + last.bias

    full = method.full_precision()
    torch.testing.assert_close(full(x), by_hand(lambda x: x))
    quantised = by_hand(lambda x: fake_quantize_of_today(x, 1))
    torch.testing.assert_close(method.network(x), quantised)
    for layer in (full[1], full[2]):
        assert len(layer._forward_pre_hooks) == 1
        assert layer._forward_pre_hooks_with_kwargs.keys() <= layer._forward_pre_hooks.keys()
