"""A base of 4 bits: what it computes and what is exported are those of the weights that the 4 bits
stand for."""

from __future__ import annotations

import runpy
from copy import deepcopy
from functools import partial
from pathlib import Path

import pytest
import torch
from tiny_language import adam, fit
from torch import Tensor

import fl_lightning
from fl_lightning.errors import InputError
from fl_lightning.methods import FedAvg
from fl_lightning.models import step_memory
from fl_lightning.models.language import BYTE_VOCABULARY, hf

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
bitsandbytes = pytest.importorskip("bitsandbytes")

HALF_DIGITS = 0.02
"""bfloat16, in which the products of 4-bit layers are computed, is off by less; the 4 bits
themselves by more."""
pytestmark = pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"
)


def off(one: Tensor, other: Tensor) -> float:
    return float((one - other).detach().norm() / other.detach().norm())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=BYTE_VOCABULARY + 5, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    model = transformers.Qwen2ForCausalLM(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(6 if weight.ndim > 1 else 1)
    path = tmp_path_factory.mktemp("qwen")
    model.save_pretrained(path)
    return path


def in_whole_weights(network: hf.TransformersLM) -> hf.TransformersLM:
    """The same adapters on float32 weights, taken out of the 4 bits one by one."""
    whole = hf.TransformersLM(BYTE_VOCABULARY, network.name)
    plain = dict(whole.model.named_modules())
    for name, layer in network.model.named_modules():
        if isinstance(layer, bitsandbytes.nn.Linear4bit):
            values = bitsandbytes.functional.dequantize_4bit(
                layer.weight.data, layer.weight.quant_state
            )
            plain[name].weight.data = values.float()
    state = peft.get_peft_model_state_dict(network.model)
    peft.set_peft_model_state_dict(whole.model, deepcopy(state))
    return whole


def ids() -> Tensor:
    return torch.randint(0, BYTE_VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(2))


def test_steps_are_those_of_the_weights_that_it_stands_for(folder: Path):
    """Also after an evaluation, in which bitsandbytes would pack the weights for good."""
    network = hf.TransformersLM(BYTE_VOCABULARY, str(folder), load_in_4bit=True)
    with torch.no_grad():
        for name, weight in network.named_parameters():
            if "lora_B" in name:
                weight.add_(
                    0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(3))
                )
        network.eval()(ids())
    whole = in_whole_weights(network)
    for one in (network, whole):
        one.train()(ids()).float().logsumexp(-1).mean().backward()
    assert off(network(ids()), whole(ids())) < HALF_DIGITS
    exact = dict(whole.named_parameters())
    trained = {name: weight for name, weight in network.named_parameters() if weight.requires_grad}
    assert {"lora_A" in name or "lora_B" in name for name in trained} == {True}
    for name, weight in trained.items():
        assert off(weight.grad, exact[name].grad) < 2 * HALF_DIGITS, name


def test_both_exports_answer_as_the_run_did(folder: Path, tmp_path: Path):
    network = partial(hf.TransformersLM, name=str(folder), load_in_4bit=True)
    method = FedAvg(network=network, optimizer=adam(0.05))
    trainer = fit(method, tmp_path)
    with torch.no_grad():
        expected = method.deploy().eval()(ids())
        base = hf.TransformersLM(BYTE_VOCABULARY, str(folder), load_in_4bit=True).eval()(ids())
        assert off(base, expected) > 10 * HALF_DIGITS  # it has learnt something
        for to in ("peft", "transformers"):
            fl_lightning.export_model(trainer, tmp_path / to, format=to)
            loaded = runpy.run_path(str(tmp_path / to / "load.py"))["network"]
            assert off(loaded(ids()).logits, expected) < HALF_DIGITS
    assert "in 4 bits" in (tmp_path / "peft/README.md").read_text()


def test_safetensors_hold_what_the_four_bits_do_not(folder: Path, tmp_path: Path):
    trainer = fit(
        FedAvg(
            network=partial(hf.TransformersLM, name=str(folder), load_in_4bit=True),
            optimizer=adam(0.05),
        ),
        tmp_path,
    )
    fl_lightning.export_model(trainer, tmp_path / "out", format="safetensors")
    loaded = runpy.run_path(str(tmp_path / "out/load.py"))["network"]
    with torch.no_grad():
        assert torch.equal(loaded(ids()), trainer.fitted[0].deploy().eval()(ids()))


def test_layers_of_an_architecture_of_its_own_are_exported_as_it_has_them(tmp_path: Path):
    """GPT-2's are transposed; and 4 bits of bfloat16 are not those of float32."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=BYTE_VOCABULARY, n_positions=80, n_embd=64, n_layer=1, n_head=2
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    network = partial(
        hf.TransformersLM, name=str(tmp_path / "gpt2"), load_in_4bit=True, dtype="bfloat16"
    )
    trainer = fit(FedAvg(network=network, optimizer=adam(0.05)), tmp_path)
    whole, narrow = (
        step_memory._frozen_bytes(
            hf.TransformersLM(BYTE_VOCABULARY, str(tmp_path / "gpt2"), load_in_4bit=on)
        )
        for on in (False, True)
    )
    assert narrow < 0.6 * whole
    with torch.no_grad():
        expected = trainer.fitted[0].deploy().eval()(ids())
        for to in ("peft", "transformers"):
            fl_lightning.export_model(trainer, tmp_path / to, format=to)
            loaded = runpy.run_path(str(tmp_path / to / "load.py"))["network"]
            assert off(loaded(ids()).logits.float(), expected) < HALF_DIGITS, to


@pytest.mark.parametrize("rule", ["residual", "stack"])
def test_rules_that_change_the_base_are_refused(rule: str, folder: Path, tmp_path: Path):
    network = partial(hf.TransformersLM, name=str(folder), load_in_4bit=True)
    method = FedAvg(network=network, optimizer=adam(), adapter_average=rule)
    with pytest.raises(InputError, match=f"adapter_average {rule} with load_in_4bit"):
        fit(method, tmp_path)
