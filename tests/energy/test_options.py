"""Switched layers: integers bit for bit, tokens on their own, weights with gradients, choices row
by row."""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fl_lightning.energy.options import OPTIONS
from fl_lightning.energy.switched import (
    Plan,
    SwitchedLinear,
    add_switches,
    integer_product,
    integers,
    narrow_kept,
    quantised_rows,
    switches,
)
from fl_lightning.errors import InputError, MisuseError
from fl_lightning.models.adapters import (
    ADAPTERS,
    SpectralLinear,
    adapter_layers,
    add_adapter,
    merged_lora,
    plain_weights,
)
from fl_lightning.models.language import BYTE_VOCABULARY, Llama, LlamaTiny
from fl_lightning.probing.cost import flop_counter

TEXT = torch.tensor(
    [[256, *b"Copy.\nfour words to copy\n="], [256, *b"Title case.\ngreen olives\n="]]
)


def stir(network: nn.Module, std: float = 0.2) -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.requires_grad:
                parameter += std * torch.randn(parameter.shape, generator=generator)
    return network


def small(kind: str = "spectral", **settings: str) -> tuple[Llama, list[SwitchedLinear]]:
    """Two blocks, so eight switched layers."""
    torch.manual_seed(0)
    network = stir(add_adapter(Llama(50, width=24, depth=2, heads=2), kind, 5, seed=1))
    return network, add_switches(network, **settings)


def ids(*shape: int) -> Tensor:
    return torch.randint(0, 50, shape, generator=torch.Generator().manual_seed(5))


def draw(*shape: int, high: int = 3) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(8))


def recorded(network: nn.Module, layers: list[SwitchedLinear], tokens: Tensor) -> list[Tensor]:
    """The inputs of all switched layers without a plan."""
    seen: list[Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda _m, inputs, _o: seen.append(inputs[0]))
        for layer in layers
    ]
    with torch.no_grad():
        network(tokens)
    for hook in hooks:
        hook.remove()
    return seen


def in_numpy(matrix: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The integers and scales of the rows of a matrix, by another program."""
    values = matrix.detach().numpy()
    scales = np.abs(values).max(axis=1, keepdims=True) / np.float32(127)
    return np.rint(values / scales).astype(np.int64), scales


def test_int8_is_int8_and_its_sums_are_those_of_integers():
    network = stir(LlamaTiny(BYTE_VOCABULARY, rank=16, adapter="spectral"))
    layers = add_switches(network)
    assert [layer.name for layer in layers][:2] == [
        "layers.0.self_attn.qkv_proj",
        "layers.0.self_attn.o_proj",
    ]
    assert [layer.group for layer in layers] == [*range(16)]
    for layer, x in zip(layers, recorded(network, layers, TEXT[:1]), strict=True):
        x, weight = x[0], layer.narrow_weight("int8")
        assert weight.values.dtype == quantised_rows(x).values.dtype == torch.int8
        (q_x, s_x), (q_w, s_w) = in_numpy(x), in_numpy(layer.adapted.full_weight())
        np.testing.assert_array_equal(weight.values.numpy(), q_w)
        sums = integer_product(quantised_rows(x).values, weight.values)
        assert sums.dtype == torch.int32
        np.testing.assert_array_equal(sums.numpy(), q_x @ q_w.T)
        found = layer.execute("int8", x)
        np.testing.assert_allclose(found.detach().numpy(), (q_x @ q_w.T) * s_x * s_w.T, rtol=1e-5)
        full = layer.adapted(x)
        error = (found - full).norm() / full.norm()
        assert 0 < error < 0.02, f"{layer.name}: {error:.4f}"
        alone = torch.cat([layer.execute("int8", row[None]) for row in x])
        assert alone.equal(found), "a token's result does not depend on the others"


@pytest.mark.parametrize("instructions", [True, False])
def test_sums_are_exact_whatever_computes_them(instructions: bool, monkeypatch: pytest.MonkeyPatch):
    """Also those of the largest values, beyond what float32 holds."""
    monkeypatch.setattr(integers, "_has_int8_instructions", lambda: instructions)
    largest = integers.EXACT_FLOAT32
    for rows, inputs, outputs in ((1, 7, 5), (17, 96, 3), (0, 8, 8), (3, largest, 2), (2, 4001, 2)):
        left = torch.randint(-127, 128, (rows, inputs), dtype=torch.int8)
        left[1:] = 127
        right = torch.full((outputs, inputs), 127, dtype=torch.int8)
        expected = left.numpy().astype(np.int64) @ right.numpy().astype(np.int64).T
        np.testing.assert_array_equal(integer_product(left, right).numpy(), expected)
        with torch.autocast("cpu", torch.bfloat16):
            np.testing.assert_array_equal(integer_product(left, right).numpy(), expected)
        with monkeypatch.context() as patch:
            patch.setattr(
                torch, "_int_mm", lambda *_: (_ for _ in ()).throw(RuntimeError("no kernel"))
            )
            np.testing.assert_array_equal(integer_product(left, right).numpy(), expected)
    most = integers.MOST_INPUTS * 127**2
    assert most < 2**31 <= most + 127**2


@pytest.mark.parametrize("instructions", [True, False])
def test_products_of_integers_are_counted_on_every_processor(instructions, monkeypatch):
    monkeypatch.setattr(integers, "_has_int8_instructions", lambda: instructions)
    matrices = (torch.ones(shape, dtype=torch.int8) for shape in ((17, 96), (24, 96)))
    with flop_counter() as counter:
        integer_product(*matrices)
    assert counter.get_total_flops() == 2 * 17 * 96 * 24


def test_a_row_of_zeros_is_zero_and_bias_is_added():
    layer = switches(with_switch(nn.Sequential(nn.Linear(6, 4))))[0]
    x = torch.zeros(2, 6)
    assert layer.execute("int8", x).equal(layer.adapted.base_layer.bias.expand(2, 4))
    assert layer.execute("int8", x[:0]).shape == (0, 4)


def with_switch(network: nn.Module, **settings: str) -> nn.Module:
    add_switches(add_adapter(network, "lora", 2, seed=0), **settings)
    return network


@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.parametrize("high", ["float32", "bfloat16"])
def test_without_a_plan_nothing_changes(kind: str, high: str):
    torch.manual_seed(0)
    plain = stir(add_adapter(Llama(50, width=24, depth=2, heads=2), kind, 5, seed=1))
    network, layers = small(kind, scope="model", high=high)
    assert len(layers) == len(switches(network)) == 8
    for mode in (True, False):
        logits, expected = network.train(mode)(ids(2, 9)), plain.train(mode)(ids(2, 9))
        assert logits.equal(expected)
    for found in (logits, expected):
        found.logsumexp(-1).mean().backward()
    trained = [[p for p in each.parameters() if p.requires_grad] for each in (network, plain)]
    assert all(a.grad.equal(b.grad) for a, b in zip(*trained, strict=True))
    assert (
        plain_weights(network).keys() == Llama(50, width=24, depth=2, heads=2).state_dict().keys()
    )


@pytest.mark.parametrize("scope", ["adapter", "model"])
def test_choices_are_executed_row_by_row(scope: str):
    network, layers = small(scope=scope)
    logits = network(ids(2, 9))
    board = layers[0].board
    board.plan = Plan(choices=torch.full((2, 9, 8), 2))
    torch.testing.assert_close(network(ids(2, 9)), logits, rtol=0, atol=1e-6)
    inputs = recorded(network, layers, ids(2, 9))
    choices = draw(2, 9, 8)
    board.plan = Plan(choices=choices)
    for layer, x in zip(layers, inputs, strict=True):
        rows = zip(x.flatten(0, 1), choices[..., layer.group].flatten().tolist(), strict=True)
        expected = torch.cat([layer.execute(OPTIONS[z], row[None]) for row, z in rows])
        torch.testing.assert_close(layer(x).flatten(0, 1), expected, rtol=1e-5, atol=1e-5)
    with merged_lora(network):
        for layer, x in zip(layers, inputs, strict=True):
            rows = zip(x.flatten(0, 1), choices[..., layer.group].flatten().tolist(), strict=True)
            expected = torch.cat([layer.execute(OPTIONS[z], row[None]) for row, z in rows])
            torch.testing.assert_close(layer(x).flatten(0, 1), expected, rtol=1e-5, atol=1e-5)
        merged = network(ids(2, 9))
    torch.testing.assert_close(network(ids(2, 9)), merged, rtol=1e-3, atol=1e-3)
    board.plan = None
    assert network(ids(2, 9)).equal(logits)


def test_off_is_the_base_or_nothing():
    torch.manual_seed(0)
    base = Llama(50, width=24, depth=2, heads=2)
    network, layers = small(scope="adapter")
    layers[0].board.plan = Plan(choices=torch.zeros(2, 9, 8, dtype=torch.int64))
    torch.testing.assert_close(network(ids(2, 9)), base(ids(2, 9)))
    with merged_lora(network):
        torch.testing.assert_close(network(ids(2, 9)), base(ids(2, 9)))
    network, layers = small(scope="model")
    ends = [layer.name.endswith(("o_proj", "down_proj")) for layer in layers]
    choices = torch.where(torch.tensor(ends), 0, 2).expand(2, 9, 8)
    layers[0].board.plan = Plan(choices=choices)
    skipped = base.logits(base.norm(base.embed_tokens(ids(2, 9))))  # every branch is skipped
    torch.testing.assert_close(network(ids(2, 9)), skipped)


def test_options_that_no_token_chose_are_not_computed():
    network, layers = small()
    calls: list[tuple[str, int]] = []
    for layer in layers:
        execute = layer.execute
        layer.execute = lambda option, x, execute=execute: (
            calls.append((option, len(x))),
            execute(option, x),
        )[1]  # type: ignore[method-assign]
    choices = torch.ones(2, 9, 8, dtype=torch.int64)
    choices[0, :4] = 0
    layers[0].board.plan = Plan(choices=choices)
    network(ids(2, 9))
    assert calls == [("off", 4), ("int8", 14)] * 8
    for each in layers:
        each.available = (True, False, True)
    with pytest.raises(
        MisuseError, match=r"option int8 of layers.0.self_attn.qkv_proj; it is not available"
    ):
        network(ids(2, 9))
    with pytest.raises(MisuseError, match="not available"):
        layers[3].execute("int8", torch.zeros(1, 24))


@pytest.mark.parametrize("scope", ["adapter", "model"])
@pytest.mark.parametrize("high", ["float32", "bfloat16"])
def test_weights_mix_the_options_and_have_their_gradient(scope: str, high: str):
    """One-hot weights give what choices give; dy/dw_z is y_z, by finite differences; the rest is
    the adapter's."""
    network, layers = small(scope=scope, high=high)
    layer, board = layers[3], layers[3].board
    x = recorded(network, layers, ids(2, 9))[3]
    choices = draw(2, 9, 8)
    board.plan = Plan(choices=choices)
    expected = layer(x)
    board.plan = Plan(weights=nn.functional.one_hot(choices, 3).float())
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)

    weights = (
        torch.rand(2, 9, 8, 3, generator=torch.Generator().manual_seed(1)).double().requires_grad_()
    )

    def mixed(weights: Tensor) -> Tensor:
        board.plan = Plan(weights=weights)
        return layer(x).double().sum(-1)

    assert torch.autograd.gradcheck(mixed, weights, eps=1e-2, atol=2e-3, rtol=1e-3)

    ours, full = (deepcopy(layer) for _ in range(2))
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    ours.board.plan = Plan(weights=nn.functional.one_hot(torch.ones(2, 9, 8).long(), 3).float())
    narrow = ours(inputs[0])
    torch.testing.assert_close(narrow.flatten(0, 1), layer.execute("int8", x.flatten(0, 1)))
    narrow.sin().sum().backward()
    plain = full.adapted(inputs[1])
    plain.backward(narrow.detach().cos())
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
    torch.testing.assert_close(ours.adapted.spectral_m.grad, full.adapted.spectral_m.grad)
    assert full.adapted.spectral_m.grad.norm() > 0


def test_weights_train_the_network_through_all_layers():
    network, layers = small()
    logits = torch.zeros(8, 3, requires_grad=True)
    hard = nn.functional.one_hot(draw(2, 9, 8), 3).float()
    soft = logits.softmax(-1).expand(2, 9, 8, 3)
    layers[0].board.plan = Plan(weights=hard + soft - soft.detach())  # straight-through
    network(ids(2, 9)).logsumexp(-1).mean().backward()
    assert (logits.grad.abs().sum(-1) > 0).all()
    assert all(layer.adapted.spectral_m.grad.norm() > 0 for layer in layers)
    layers[0].available = (True, False, True)
    with pytest.raises(MisuseError, match="option int8"):
        network(ids(2, 9))
    hard[..., 0, 2] += hard[..., 0, 1]
    hard[..., 0, 1] = 0
    layers[0].board.plan = Plan(weights=hard)
    assert network(ids(2, 9)).isfinite().all()


def test_bfloat16_is_computed_in_bfloat16():
    layer = small(high="bfloat16")[1][0]
    x = torch.randn(5, 24, generator=torch.Generator().manual_seed(0))
    weight = layer.narrow_weight("high")
    assert weight.dtype == torch.bfloat16
    assert weight.equal(layer.adapted.full_weight().bfloat16())
    found = layer.execute("high", x)
    assert found.dtype == torch.float32
    assert found.equal(found.bfloat16().float())
    assert found.equal(nn.functional.linear(x.bfloat16(), weight).float())


@pytest.mark.parametrize("high", ["float32", "bfloat16"])
def test_a_token_does_not_depend_on_what_others_chose(high: str):
    network, layers = small(high=high)
    board, tokens = layers[0].board, ids(2, 9)
    choices = draw(2, 9, 8)
    board.plan = Plan(choices=choices)
    together = network(tokens)
    other = choices.clone()
    other[1], other[0, 6:] = 2 - other[1], 2 - other[0, 6:]
    board.plan = Plan(choices=other)
    torch.testing.assert_close(network(tokens)[0, :6], together[0, :6], rtol=1e-3, atol=1e-3)
    assert not network(tokens)[0, 6:].allclose(together[0, 6:], rtol=1e-3, atol=1e-3)


def test_narrow_weights_are_made_once_and_again_after_a_step(monkeypatch: pytest.MonkeyPatch):
    network, layers = small()
    made = []
    full = SpectralLinear.full_weight
    monkeypatch.setattr(
        SpectralLinear, "full_weight", lambda self: (made.append(self), full(self))[1]
    )
    board = layers[0].board
    board.plan = Plan(choices=torch.ones(2, 9, 8, dtype=torch.int64))
    with narrow_kept(network):
        first = network(ids(2, 9))
        assert network(ids(2, 9)).equal(first)
        assert len(made) == 8
        for fused in (True, False):
            made.clear()
            parameters = [p for p in network.parameters() if p.requires_grad]
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            torch.optim.AdamW(parameters, lr=0.1, fused=fused).step()
            changed = network(ids(2, 9))
            assert len(made) == 8
            assert not changed.equal(first)
            first = changed
        made.clear()
        with torch.no_grad():
            layers[2].adapted.spectral_m.copy_(torch.zeros(5))
        network(ids(2, 9))
        assert made == [layers[2].adapted]
    made.clear()
    network(ids(2, 9))
    network(ids(2, 9))
    assert len(made) == 16


def test_generation_with_the_cache_is_that_of_whole_sequences():
    """Options are chosen by a token and its layer, as a controller on embeddings does, before each
    step."""
    network = stir(LlamaTiny(BYTE_VOCABULARY, rank=16, adapter="spectral"), std=0.05)
    layers = add_switches(network)
    board, shapes = layers[0].board, []

    def choose(_module: nn.Module, inputs: tuple[Tensor, ...], _embedded: Tensor) -> None:
        (tokens,) = inputs
        shapes.append(tuple(tokens.shape))
        board.plan = Plan(choices=(tokens[..., None] + torch.arange(16)) % 3)

    network.embed_tokens.register_forward_hook(choose)
    prompts, lengths = TEXT, [27, 20]
    mask = torch.arange(prompts.shape[1]) < torch.tensor(lengths)[:, None]
    with narrow_kept(network):
        together = network.generate(prompts, mask, max_new_tokens=5)
    assert shapes == [(2, 27), *[(2, 1)] * 4]
    for row, length in enumerate(lengths):
        alone = prompts[row : row + 1, :length]
        for _ in range(5):
            alone = torch.cat((alone, network(alone)[:, -1].argmax(-1, keepdim=True)), dim=1)
        assert together[row].equal(alone[0, length:])
    with merged_lora(network):
        assert network.generate(prompts, mask, max_new_tokens=5).equal(together)


def test_a_copy_has_its_own_board():
    network, layers = small()
    copy = deepcopy(network)
    boards = {id(layer.board) for layer in switches(copy)}
    assert len(boards) == 1
    assert boards != {id(layers[0].board)}


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({}, "weights .*, or choices"),
        ({"weights": torch.zeros(2, 9, 8)}, "weights .B, T, G, 3."),
        ({"weights": torch.zeros(2, 9, 8, 3), "choices": torch.zeros(2, 9, 8)}, "2 tensors"),
        ({"choices": torch.full((2, 9, 8), 3)}, "0 is off, 1 is int8 and 2 is high"),
        ({"choices": torch.full((2, 9, 7), 1)}, "7 layers on a network of 8"),
        ({"choices": torch.full((2, 8, 8), 1)}, "tokens of shape .2, 9."),
    ],
)
def test_a_wrong_plan_is_refused(plan: dict, words: str):
    network, layers = small()

    def use() -> None:
        layers[0].board.plan = Plan(**plan)
        network(ids(2, 9))

    with pytest.raises(MisuseError, match=words):
        use()


def test_networks_that_cannot_be_switched_are_refused():
    for network, settings, words in (
        (Llama(50, width=24, depth=1, heads=2), {}, "without adapted linear layer"),
        (add_adapter(nn.Linear(3, 3), "lora"), {}, "itself an adapted linear layer"),
        (small()[0], {}, "switched once"),
        (
            add_adapter(nn.Sequential(nn.Linear(3, 3)), "pissa", 2),
            {},
            "base lacks the part of the weights",
        ),
        (
            add_adapter(nn.Sequential(nn.Linear(3, 3)), "lora"),
            {"scope": "layer"},
            "one of adapter, model",
        ),
        (
            add_adapter(nn.Sequential(nn.Linear(3, 3)), "lora"),
            {"high": "float16"},
            "one of float32, bfloat16",
        ),
    ):
        with pytest.raises(InputError, match=words):
            add_switches(network, **settings)
    with pytest.raises(MisuseError, match="one of off, int8, high"):
        small()[1][0].execute("low", torch.zeros(1, 24))
    assert (
        len(add_switches(add_adapter(nn.Sequential(nn.Linear(3, 3)), "pissa", 2), scope="model"))
        == 1
    )
    assert len(adapter_layers(small()[0])) == 8


@pytest.mark.parametrize("scope", ["adapter", "model"])
@pytest.mark.parametrize("enabled", [False, True])
def test_the_precision_of_an_output_does_not_depend_on_the_options(scope: str, enabled: bool):
    _, layers = small(scope=scope)
    found, (board, x) = set(), (layers[0].board, torch.randn(1, 5, 24))
    for row in ([0] * 5, [1] * 5, [2] * 5, [0, 1, 2, 1, 0]):
        choices = torch.tensor(row).reshape(1, 5, 1).expand(-1, -1, len(layers))
        with (
            board.using(Plan(choices=choices)),
            torch.autocast("cpu", torch.bfloat16, enabled=enabled),
        ):
            found.add(layers[0](x).dtype)
    assert found == {torch.bfloat16 if enabled else torch.float32}
