"""Adapters of all kinds: nothing added at the start, what is trained, merged weights, means, peft's
results."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from places import ROOT
from tiny_language import adam, fit
from torch import Tensor, nn

from fl_lightning.cli.parser import FederatedCLI
from fl_lightning.errors import InputError, MisuseError
from fl_lightning.methods import FedAvg
from fl_lightning.models.adapters import (
    ADAPTERS,
    AdaLoRALinear,
    Importance,
    PiSSALinear,
    SpectralLinear,
    SVFTLinear,
    adapter_layers,
    add_adapter,
    budget_at,
    choose_masks,
    merged_lora,
    orthogonality,
    signed_svd,
)
from fl_lightning.models.language import BYTE_VOCABULARY, Llama, LlamaTiny
from fl_lightning.models.language.experts import factors_of
from fl_lightning.wire import Layout

PAGE = ROOT / "docs/howto/adapters.md"
# of 4 blocks with layers 96 x 288, 96 x 96, 96 x 512 and 256 x 96, at rank 8 or 8 directions
VALUES = {
    "lora": 49_152,
    "ffa": 4 * 8 * (288 + 96 + 512 + 96),
    "pissa": 49_152,
    "adalora": 49_152 + 16 * 8,
    "svft": 16 * (8 + 7 + 7),
    "spectral": 16 * 8,
}


def small(seed: int = 0) -> Llama:
    torch.manual_seed(seed)
    return Llama(50, width=24, depth=2, heads=2)


def ids(*shape: int) -> Tensor:
    return torch.randint(0, 50, shape, generator=torch.Generator().manual_seed(5))


def stir(network: nn.Module, seed: int = 3, std: float = 0.2) -> nn.Module:
    """The network with adapters that add something."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.requires_grad:
                parameter += std * torch.randn(parameter.shape, generator=generator)
    return network


@pytest.mark.parametrize("kind", ADAPTERS)
def test_new_adapters_leave_the_outputs_plain_weights(kind: str):
    before = small()(ids(2, 9))
    after = add_adapter(small(), kind, 5, seed=1)(ids(2, 9))
    if kind == "pissa":
        torch.testing.assert_close(after, before, rtol=0, atol=1e-5)
        plain = dict(small().named_parameters())
        for name, layer in adapter_layers(add_adapter(small(), kind, 5)).items():
            split = layer.base_layer.weight + layer.product()
            torch.testing.assert_close(split, plain[f"{name}.weight"], rtol=0, atol=1e-6)
            assert layer.base_layer.weight.norm() < 0.9 * plain[f"{name}.weight"].norm()
    else:
        assert after.equal(before)
    assert not stir(add_adapter(small(), kind, 5, seed=1))(ids(2, 9)).allclose(before)


@pytest.mark.parametrize("kind", ADAPTERS)
def test_the_adapter_alone_is_trained_and_travels(kind: str):
    layout = Layout.of(LlamaTiny(BYTE_VOCABULARY, adapter=kind))
    assert layout.size == VALUES[kind]
    assert layout.shapes.keys() <= LlamaTiny(BYTE_VOCABULARY, adapter=kind).state_dict().keys()


def test_all_directions_of_the_byte_model():
    assert Layout.of(LlamaTiny(BYTE_VOCABULARY, rank=96, adapter="spectral")).size == 16 * 96
    kept = LlamaTiny(BYTE_VOCABULARY, rank=96, adapter="spectral").state_dict()
    plain = LlamaTiny(BYTE_VOCABULARY, rank=0).state_dict()
    assert sum(t.numel() for t in kept.values()) == sum(t.numel() for t in plain.values()) + 16 * 96
    torch.manual_seed(1)
    ours = LlamaTiny(BYTE_VOCABULARY, ffa=True).state_dict()
    torch.manual_seed(1)
    theirs = LlamaTiny(BYTE_VOCABULARY, adapter="ffa").state_dict()
    assert all(ours[name].equal(theirs[name]) for name in ours.keys() | theirs.keys())


@pytest.mark.parametrize("kind", ADAPTERS)
def test_products_gradients_and_merged_weights_are_those_of_dense_ones(kind: str):
    """With G the gradient by the dense W + dW, that by the adapter is the chain rule's through
    product()."""
    adapted = stir(add_adapter(small(), kind, 5, seed=1)).double()
    dense = small().double()
    with torch.no_grad():
        for name, layer in adapter_layers(adapted).items():
            dense.get_submodule(name).weight.copy_(layer.full_weight())
    logits, expected = adapted(ids(2, 9)), dense(ids(2, 9))
    torch.testing.assert_close(logits, expected)
    for found in (logits, expected):
        found.logsumexp(-1).mean().backward()
    for name, layer in adapter_layers(adapted).items():
        trained = [p for p in layer.parameters() if p.requires_grad]
        chained = torch.autograd.grad(
            layer.product(), trained, dense.get_submodule(name).weight.grad
        )
        torch.testing.assert_close([p.grad for p in trained], list(chained))
        assert layer.base_layer.weight.grad is None
    single = adapted.float()
    logits = single(ids(2, 9))
    weights = {name: tensor.clone() for name, tensor in single.state_dict().items()}
    with merged_lora(single):
        torch.testing.assert_close(single(ids(2, 9)), logits, rtol=1e-5, atol=1e-5)
        for name, layer in adapter_layers(single).items():
            assert layer.unmerged_weight().equal(weights[f"{name}.base_layer.weight"])
            assert layer.full_weight().equal(layer.unmerged_weight() + layer.product())
    assert single(ids(2, 9)).equal(logits)
    assert all(tensor.equal(weights[name]) for name, tensor in single.state_dict().items())


@pytest.mark.parametrize(
    ("kind", "exact"), [("spectral", True), ("svft", True), ("ffa", True), ("lora", False)]
)
def test_the_mean_of_what_travels_is_the_mean_of_products(kind: str, exact: bool):
    clients = [stir(add_adapter(small(), kind, 5, seed=1), seed=k) for k in range(3)]
    layout = Layout.of(clients[0])
    mean = add_adapter(small(), kind, 5, seed=1)
    layout.write(mean, torch.stack([layout.read(client) for client in clients]).mean(0))
    for name, layer in adapter_layers(mean).items():
        products = torch.stack([adapter_layers(client)[name].product() for client in clients]).mean(
            0
        )
        assert torch.allclose(layer.product(), products, atol=1e-6) == exact


def test_directions_have_one_sign():
    """Negated, permuted and transposed copies of a matrix have the same directions, moved along."""
    weight = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    u, s, vt = signed_svd(weight)
    torch.testing.assert_close(((u * s) @ vt).float(), weight)
    assert (u.gather(0, u.abs().argmax(0, keepdim=True)) > 0).all()
    rows, columns = torch.randperm(7), torch.randperm(5)
    for other, left, right in (
        (-weight, u, -vt),
        (weight[rows], u[rows], vt),
        (weight[:, columns], u, vt[:, columns]),
        (-weight[rows][:, columns], u[rows], -vt[:, columns]),
        (3 * weight, u, vt),
    ):
        found = signed_svd(other)
        torch.testing.assert_close(found[0], left)
        torch.testing.assert_close(found[2], right)
    for kind in ("pissa", "spectral", "svft"):
        first, again = (add_adapter(small(), kind, 4) for _ in range(2))
        torch.manual_seed(torch.randint(100, ()).item())
        assert all(a.equal(b) for a, b in zip(first.buffers(), again.buffers(), strict=True))
        assert all(a.equal(b) for a, b in zip(first.parameters(), again.parameters(), strict=True))


def test_spectral_trains_in_one_product_where_that_is_cheaper_and_equally_well():
    torch.manual_seed(1)
    layer = SpectralLinear(nn.Linear(24, 16), rank=16)
    nn.init.normal_(layer.spectral_m)
    x = torch.randn(4, 9, 24, requires_grad=True)
    slope = torch.randn(4, 9, 16)
    with torch.no_grad():
        apart = layer(x)
        assert torch.equal(apart, layer.base_layer(x) + layer.added(x))
    together = layer(x)
    found = torch.autograd.grad(together, (x, layer.spectral_m), slope)
    expected = torch.autograd.grad(
        layer.base_layer(x) + layer.added(x), (x, layer.spectral_m), slope
    )
    assert not torch.equal(together, apart)  # it was another order of products
    torch.testing.assert_close((together, *found), (apart, *expected))
    # 36 tokens: 15 360 multiplications against 5 760
    few = SpectralLinear(nn.Linear(24, 16), rank=2)
    nn.init.normal_(few.spectral_m)
    assert torch.equal(few(x), few.base_layer(x) + few.added(x))


def test_svft_is_the_sum_of_its_entries_and_spectral_its_diagonal():
    base = nn.Linear(6, 4)
    u, _, vt = signed_svd(base.weight, 3)
    layer = stir(SVFTLinear(base, rank=3, band=1))
    low, high, main = layer.svft_m[:2], layer.svft_m[5:], layer.svft_m[2:5]
    by_hand = sum(main[i] * torch.outer(u[:, i], vt[i]) for i in range(3))
    by_hand += sum(high[i] * torch.outer(u[:, i], vt[i + 1]) for i in range(2))
    by_hand += sum(low[i] * torch.outer(u[:, i + 1], vt[i]) for i in range(2))
    torch.testing.assert_close(layer.product(), by_hand.float())
    plain, spectral = SVFTLinear(base, rank=3, band=0), SpectralLinear(base, rank=3)
    with torch.no_grad():
        plain.svft_m.copy_(main)
        spectral.spectral_m.copy_(main)
    torch.testing.assert_close(plain.product(), spectral.product())
    x = torch.randn(2, 5, 6)
    torch.testing.assert_close(plain(x), spectral(x))


def test_svft_of_rank_1_has_one_diagonal():
    network = LlamaTiny(BYTE_VOCABULARY, adapter="svft", rank=1)
    assert {layer.svft_m.numel() for layer in adapter_layers(network).values()} == {1}
    layers = adapter_layers(add_adapter(small(), "svft", 2)).values()
    assert {layer.svft_m.numel() for layer in layers} == {4}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kind": "dora"}, "one of lora, ffa, pissa, adalora, svft, spectral"),
        (
            {"kind": "spectral", "rank": 25},
            "layers.0.self_attn.qkv_proj of 24 x 72.*24; write rank 24 or less",
        ),
        ({"kind": "pissa", "rank": 25}, "rank 25.*write rank 24 or less"),
        ({"kind": "svft", "rank": 0}, "rank of 1 or more"),
        ({"kind": "svft", "rank": 2, "band": 2}, "0 to R - 1 diagonals"),
        ({"kind": "spectral", "targets": ["q_proj"]}, "qkv_proj, o_proj"),
    ],
)
def test_settings_that_fit_no_layer_are_refused(settings: dict, words: str):
    with pytest.raises(InputError, match=words):
        add_adapter(small(), **settings)


def test_what_does_not_go_together_is_refused():
    with pytest.raises(InputError, match=r"adapter spectral with ffa true; .*write adapter ffa"):
        LlamaTiny(BYTE_VOCABULARY, adapter="spectral", ffa=True)
    with pytest.raises(InputError, match="adapted once"):
        add_adapter(add_adapter(small(), "svft"), "lora")
    for kind in ("adalora", "spectral"):
        with pytest.raises(InputError, match="experts are LoRA"):
            factors_of(add_adapter(small(), kind))
    with pytest.raises(InputError, match="without AdaLoRA"):
        orthogonality(small())
    assert (
        adapter_layers(add_adapter(small(), "pissa")).keys()
        == adapter_layers(add_adapter(small(), "svft")).keys()
    )


def test_masked_directions_add_nothing_and_are_not_trained():
    layer = stir(AdaLoRALinear(nn.Linear(6, 4), rank=3, alpha=6))
    kept = 2 * layer.lora_B[:, [0, 2]] @ torch.diag(layer.lora_E[[0, 2], 0]) @ layer.lora_A[[0, 2]]
    layer.set_mask(torch.tensor([True, False, True]))
    torch.testing.assert_close(layer.product(), kept)
    layer(torch.randn(5, 6)).square().sum().backward()
    for gradient in (layer.lora_A.grad, layer.lora_E.grad, layer.lora_B.grad.T):
        assert (gradient[1] == 0).all()
        assert (gradient[0] != 0).all()
    with pytest.raises(MisuseError, match=r"bool of shape \(3,\)"):
        layer.set_mask(torch.ones(3))


def test_orthogonality_by_hand():
    network = add_adapter(nn.Sequential(nn.Linear(2, 2)), "adalora", rank=2, seed=0)
    layer = network[0]
    with torch.no_grad():
        layer.lora_A.copy_(torch.eye(2))
        layer.lora_B.copy_(torch.tensor([[1.0, 1.0], [0.0, 2.0]]))
    assert orthogonality(network).item() == 1 + 1 + 16  # P^T P = [[1, 1], [1, 5]]


def test_the_budget_falls_and_masks_keep_it():
    steps = range(25)
    found = [budget_at(step, start=100, end=10, warmup=4, cooldown=5, total=20) for step in steps]
    assert found[:5] == [100] * 5
    assert found[15:] == [10] * 10
    assert found == sorted(found, reverse=True)
    tied = {"a": torch.tensor([2.0, 1.0, 2.0]), "b": torch.tensor([2.0, 0.0])}
    for budget, kept in ((0, 0), (2, 2), (4, 4), (9, 5)):
        masks = choose_masks(tied, budget)
        assert sum(int(mask.sum()) for mask in masks.values()) == kept
    assert {name: mask.tolist() for name, mask in choose_masks(tied, 2).items()} == {
        "a": [True, False, True],
        "b": [False, False],
    }
    with pytest.raises(InputError, match="in which the budget falls"):
        budget_at(0, 10, 5, warmup=5, cooldown=5, total=10)
    with pytest.raises(InputError, match="it falls"):
        budget_at(0, 5, 10, warmup=0, cooldown=0, total=10)


@pytest.mark.parametrize("kind", ADAPTERS)
def test_a_federation_trains_them_and_leaves_the_base(kind: str, tmp_path: Path):
    def adapted(vocabulary: int) -> nn.Module:
        torch.manual_seed(0)
        return add_adapter(Llama(vocabulary, width=16, depth=1, heads=2), kind, 4, seed=1)

    method = FedAvg(network=adapted, optimizer=adam())
    network = fit(method, tmp_path, max_rounds=1).method.network
    start = dict(adapted(network.embed_tokens.num_embeddings).named_parameters())
    for name, parameter in network.named_parameters():
        assert parameter.equal(start[name]) != parameter.requires_grad, name


def test_the_code_of_the_page_runs():
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        exec(block, {})  # it holds assertions itself


def test_the_settings_of_the_page_are_understood(bare_directory: Path):
    (block,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    Path("page.yaml").write_text(block)
    network = FederatedCLI("fit", ["--config", "page.yaml"]).model.network_spec(BYTE_VOCABULARY)
    assert Layout.of(network).size == 16 * 96


def with_peft(config: object) -> nn.Module:
    peft = pytest.importorskip("peft")
    return peft.inject_adapter_in_model(config, small())


def test_pissa_is_that_of_peft():
    peft = pytest.importorskip("peft")
    targets = ["qkv_proj", "down_proj"]
    theirs = with_peft(
        peft.LoraConfig(r=3, lora_alpha=12, target_modules=targets, init_lora_weights="pissa")
    )
    ours = add_adapter(small(), "pissa", 3, alpha=12, targets=targets)
    for name, layer in adapter_layers(ours).items():
        partner = theirs.get_submodule(name)
        torch.testing.assert_close(
            layer.base_layer.weight, partner.base_layer.weight, rtol=0, atol=5e-5
        )
        torch.testing.assert_close(
            layer.product(), partner.get_delta_weight("default"), rtol=0, atol=5e-5
        )
        assert isinstance(layer, PiSSALinear)
    torch.testing.assert_close(ours(ids(2, 9)), theirs(ids(2, 9)))


def test_adalora_has_the_outputs_gradients_and_masks_of_peft():
    peft = pytest.importorskip("peft")
    from peft.tuners.adalora.layer import RankAllocator

    targets = ["qkv_proj", "down_proj"]
    config = peft.AdaLoraConfig(
        init_r=4,
        target_r=2,
        tinit=2,
        tfinal=3,
        total_step=12,
        lora_alpha=12,
        target_modules=targets,
    )
    theirs = with_peft(config)
    ours = stir(add_adapter(small(), "adalora", 4, alpha=12, targets=targets, seed=1))
    partners = {name: theirs.get_submodule(name) for name in adapter_layers(ours)}
    with torch.no_grad():
        for name, layer in adapter_layers(ours).items():
            for part in ("lora_A", "lora_E", "lora_B"):
                getattr(partners[name], part)["default"].copy_(getattr(layer, part))
    allocator, importance = RankAllocator(theirs, config, "default"), Importance()
    for step in range(1, 4):
        logits = [network(ids(2, 9 + step)) for network in (ours, theirs)]
        # peft divides by the rank + 0.00001
        torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
        for network, found in zip((ours, theirs), logits, strict=True):
            network.zero_grad()
            found.logsumexp(-1).mean().backward()
        importance.update(ours)
        allocator.update_ipt(theirs)
        budget = budget_at(step, start=16, end=8, warmup=2, cooldown=3, total=12)
        assert budget == allocator.budget_schedule(step)[0]
    masks = choose_masks(importance.scores(), 8)
    pattern = allocator.mask_to_budget(theirs, 8)
    assert {f"{name}.lora_E.default": mask.tolist() for name, mask in masks.items()} == pattern
    assert sum(not kept for mask in masks.values() for kept in mask.tolist()) > 0
    for name, layer in adapter_layers(ours).items():
        layer.set_mask(masks[name])
    torch.testing.assert_close(ours(ids(2, 9)), theirs(ids(2, 9)), rtol=1e-4, atol=1e-4)


def test_a_step_that_a_scaler_leaves_out_has_no_importance():
    """One gradient of it is not finite, and no NaN stays in what is smoothed."""
    network = stir(add_adapter(small(), "adalora", 4, targets=["down_proj"]))
    trained = [weight for weight in network.parameters() if weight.requires_grad]
    found, left_out = [], (0, 2)
    for broken in (False, True):
        importance = Importance()
        for step in range(4):
            network.zero_grad()
            network(ids(2, 9 + step)).logsumexp(-1).mean().backward()
            if broken and step in left_out:
                trained[0].grad.view(-1)[0] = float("inf")
            if broken or step not in left_out:
                importance.update(network)
        found.append(importance.scores())
    for name, scores in found[0].items():
        assert scores.min() > 0
        assert torch.equal(found[1][name], scores)


def test_svft_is_the_lora_of_peft_with_its_factors():
    """peft has no SVFT; a dense M between fixed factors is what its LoRA gives with A = M V^T and B
    = U."""
    peft = pytest.importorskip("peft")
    ours = stir(add_adapter(small(), "svft", 3, targets=["down_proj"]))
    theirs = with_peft(peft.LoraConfig(r=3, lora_alpha=3, target_modules=["down_proj"]))
    with torch.no_grad():
        for name, layer in adapter_layers(ours).items():
            partner = theirs.get_submodule(name)
            partner.lora_A["default"].weight.copy_(layer.matrix() @ layer.right)
            partner.lora_B["default"].weight.copy_(layer.left)
    torch.testing.assert_close(ours(ids(2, 9)), theirs(ids(2, 9)))
