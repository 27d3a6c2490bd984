"""LoRA: what is trained and travels, its gradients, FFA's exact mean, merged weights, and peft's
results."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fl_lightning.errors import InputError
from fl_lightning.models.adapters import LoRALinear, adapter_layers, add_adapter, merged_lora
from fl_lightning.models.language import (
    BYTE_VOCABULARY,
    Llama,
    LlamaTiny,
)
from fl_lightning.wire.layout import Layout


def small(seed: int = 0) -> Llama:
    torch.manual_seed(seed)
    return Llama(50, width=24, depth=3, heads=2)


def stirred(network: nn.Module, seed: int = 3) -> nn.Module:
    """The network with adapters that add something."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for layer in adapter_layers(network).values():
            nn.init.normal_(layer.lora_B.weight, std=0.3)
    return network


def ids(*shape: int) -> Tensor:
    torch.manual_seed(5)
    return torch.randint(0, 50, shape)


def test_adapters_alone_are_trained_and_travel():
    layout = Layout.of(LlamaTiny(BYTE_VOCABULARY))
    assert layout.size == 49_152
    assert all(name.endswith(("lora_A.weight", "lora_B.weight")) for name in layout.shapes)
    assert layout.shapes["layers.0.self_attn.qkv_proj.lora_A.weight"] == (8, 96)
    assert layout.shapes["layers.0.self_attn.qkv_proj.lora_B.weight"] == (288, 8)
    only_b = Layout.of(LlamaTiny(BYTE_VOCABULARY, ffa=True))
    assert all(name.endswith("lora_B.weight") for name in only_b.shapes)
    assert only_b.size == 4 * 8 * (288 + 96 + 512 + 96)
    assert Layout.of(LlamaTiny(BYTE_VOCABULARY, rank=2, targets=["o_proj"])).size == 4 * 2 * (
        96 + 96
    )
    assert Layout.of(LlamaTiny(BYTE_VOCABULARY, rank=0)).size == 468_096


def test_new_adapters_add_nothing():
    network, tokens = small(), ids(2, 9)
    before = network(tokens)
    assert add_adapter(network, "lora")(tokens).equal(before)
    assert not stirred(network)(tokens).allclose(before)


def test_gradients_are_the_chain_rule_of_the_dense_weights():
    """With G the gradient by W + s B A: that by A is s B^T G and that by B is s G A^T."""
    adapted = stirred(
        add_adapter(small(), "lora", rank=3, alpha=12, targets=["o_proj", "down_proj"])
    ).double()
    dense = small().double()
    with torch.no_grad():
        for name, layer in adapter_layers(adapted).items():
            dense.get_submodule(name).weight += 4 * layer.lora_B.weight @ layer.lora_A.weight
    for network in (adapted, dense):
        network(ids(2, 9)).logsumexp(-1).mean().backward()
    for name, layer in adapter_layers(adapted).items():
        gradient = dense.get_submodule(name).weight.grad
        torch.testing.assert_close(layer.lora_A.weight.grad, 4 * layer.lora_B.weight.T @ gradient)
        torch.testing.assert_close(layer.lora_B.weight.grad, 4 * gradient @ layer.lora_A.weight.T)
        assert layer.base_layer.weight.grad is None


def test_nothing_below_the_first_adapter_needs_a_gradient():
    network = add_adapter(small(), "lora", targets=["down_proj"])
    needs: dict[str, bool] = {}
    for name, module in network.named_modules():
        module.register_forward_hook(
            lambda _m, _i, out, name=name: needs.update({name: out.requires_grad})
        )
    network(ids(2, 9))
    order = [*needs]
    first = order.index("layers.0.mlp.down_proj.lora_A")
    assert first > 5
    assert not any(needs[name] for name in order[:first])
    assert all(
        needs[name] for name in order[order.index("layers.0.mlp.down_proj") :] if "base" not in name
    )


@pytest.mark.parametrize("ffa", [True, False])
def test_the_mean_of_products_is_the_product_of_means_with_one_a(ffa: bool):
    layers = [LoRALinear(nn.Linear(7, 5), rank=2, alpha=4, ffa=ffa) for _ in range(3)]
    with torch.no_grad():
        for layer in layers:
            layer.lora_B.weight.normal_()
            if ffa:
                layer.lora_A.weight.copy_(layers[0].lora_A.weight)
    means = [
        torch.stack([getattr(layer, part).weight for layer in layers]).mean(0)
        for part in ("lora_B", "lora_A")
    ]
    products = torch.stack([layer.product() for layer in layers]).mean(0)
    assert torch.allclose(2 * means[0] @ means[1], products, atol=1e-6) == ffa


def test_a_is_drawn_from_its_stream():
    def first_a(seed: int | None, generator: int) -> Tensor:
        network = small()
        torch.manual_seed(generator)
        add_adapter(network, "ffa", seed=seed)
        return next(iter(adapter_layers(network).values())).lora_A.weight

    assert first_a(1, generator=0).equal(first_a(1, generator=9))
    assert not first_a(1, generator=0).equal(first_a(2, generator=0))
    assert first_a(None, generator=0).equal(first_a(None, generator=0))
    assert not first_a(None, generator=0).equal(first_a(None, generator=9))


def test_merged_weights_have_the_same_logits_and_leave_no_trace():
    network, tokens = stirred(add_adapter(small(), "lora")), ids(3, 9)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    logits, generated = network(tokens), network.generate(tokens, max_new_tokens=8)
    with merged_lora(network):
        calls = [
            layer.lora_A.register_forward_hook(lambda *_: pytest.fail("not merged"))
            for layer in adapter_layers(network).values()
        ]
        torch.testing.assert_close(network(tokens), logits)
        with merged_lora(network):
            assert network.generate(tokens, max_new_tokens=8).equal(generated)
        torch.testing.assert_close(network(tokens), logits)
    for call in calls:
        call.remove()
    assert network(tokens).equal(logits)
    assert all(tensor.equal(before[name]) for name, tensor in network.state_dict().items())
    with pytest.raises(KeyError), merged_lora(network):
        raise KeyError
    assert network(tokens).equal(logits)


def test_many_clients_share_one_base_in_a_stack():
    network = stirred(add_adapter(small().double(), "lora", rank=2))
    tensors = dict(network.named_parameters())
    base = {name: tensor for name, tensor in tensors.items() if not tensor.requires_grad}
    stacks = {
        name: torch.stack([tensor.detach() * (1 + k) for k in range(3)])
        for name, tensor in tensors.items()
        if tensor.requires_grad
    }
    tokens = ids(3, 2, 9)

    def loss(adapters: dict[str, Tensor], tokens: Tensor) -> Tensor:
        return functional_call(network, base | adapters, (tokens,)).logsumexp(-1).mean()

    together = vmap(grad(loss))(stacks, tokens)
    for k in range(3):
        alone = grad(loss)({name: stack[k] for name, stack in stacks.items()}, tokens[k])
        for name, gradient in alone.items():
            torch.testing.assert_close(together[name][k], gradient)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rank": 0}, "rank of 1 or more"),
        ({"alpha": 0.0}, "positive alpha"),
        ({"targets": ["q_proj"]}, "qkv_proj, o_proj, gate_up_proj, down_proj"),
        ({"targets": ["o_proj", "proj"]}, "all-linear"),
        ({"targets": []}, "all-linear"),
        ({"targets": [""]}, "all-linear"),
    ],
)
def test_settings_that_fit_no_layer_are_refused(settings: dict, words: str):
    with pytest.raises(InputError, match=words):
        add_adapter(small(), "lora", **settings)


def test_a_network_is_adapted_once():
    with pytest.raises(InputError, match="adapted once"):
        add_adapter(add_adapter(small(), "lora"), "lora")
    assert isinstance(add_adapter(nn.Linear(3, 2), "lora", rank=1), LoRALinear)


@pytest.mark.parametrize("kind", ["lean", "transformers"])
def test_logits_and_gradients_are_those_of_peft(kind: str):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    sizes = {"vocab_size": 50, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}

    def made() -> nn.Module:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(**sizes, num_attention_heads=2)
        return small() if kind == "lean" else transformers.LlamaForCausalLM(config)

    targets = ["qkv_proj", "down_proj"] if kind == "lean" else ["q_proj", "v_proj", "down_proj"]
    ours = stirred(add_adapter(made(), "lora", rank=3, alpha=12, targets=targets))
    settings = peft.LoraConfig(r=3, lora_alpha=12, target_modules=targets)
    theirs = peft.inject_adapter_in_model(settings, made())
    partners = {
        name: module
        for name, module in theirs.named_modules()
        if isinstance(module, peft.tuners.lora.Linear)
    }
    assert partners.keys() == adapter_layers(ours).keys()
    for name, layer in adapter_layers(ours).items():
        partners[name].lora_A["default"].load_state_dict(layer.lora_A.state_dict())
        partners[name].lora_B["default"].load_state_dict(layer.lora_B.state_dict())
    logits = [made(ids(2, 9)) for made in (ours, theirs)]
    expected, got = logits[1], logits[0]
    if kind == "transformers":
        expected, got = expected.logits, got.logits
    torch.testing.assert_close(got, expected)
    for found in (got, expected):
        found.logsumexp(-1).mean().backward()
    for name, layer in adapter_layers(ours).items():
        for part in ("lora_A", "lora_B"):
            torch.testing.assert_close(
                getattr(layer, part).weight.grad,
                getattr(partners[name], part)["default"].weight.grad,
            )
    trained = {
        name.replace(".default", "") for name, p in theirs.named_parameters() if p.requires_grad
    }
    assert trained == {name for name, p in ours.named_parameters() if p.requires_grad}
