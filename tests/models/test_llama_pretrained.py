"""Models of the Llama family from a folder: transformers' logits and answers, adapters in peft, and
refusals."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fl_lightning.errors import InputError
from fl_lightning.models import LlamaPretrained

transformers = pytest.importorskip("transformers")

LONGER = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
SPECIAL = {"bos_token_id": 290, "eos_token_id": [291, 292], "pad_token_id": None}
FORMS: dict[str, dict[str, Any]] = {
    "SmolLM2": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "Llama 3": {"num_key_value_heads": 1, "tie_word_embeddings": False, "rope_parameters": LONGER},
    "wide heads": {"head_dim": 24, "rms_norm_eps": 1e-5, "rope_parameters": YARN, **SPECIAL},
}


def saved(folder: Path, kind: str = "Llama", **settings: Any) -> Any:
    """Return a small model of transformers that has been written to a folder."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 48,
        "max_position_embeddings": 128,
    }
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.3}
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **shape, **settings})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("form", FORMS)
def test_logits_and_answers_are_those_of_transformers(form, tmp_path):
    from fl_lightning.models.language.hf import to_transformers

    theirs = saved(tmp_path, **FORMS[form])
    ours = LlamaPretrained(300, str(tmp_path), rank=2)
    ids, mask = torch.randint(0, 300, (3, 70)), torch.ones(3, 70, dtype=torch.int64)
    expected = theirs(input_ids=ids).logits
    assert expected.std() > 1
    torch.testing.assert_close(ours(ids), expected, rtol=1e-4, atol=1e-4)
    answers = ours.generate(ids, mask, max_new_tokens=8, eos=None, pad=0)
    asked = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert torch.equal(answers, theirs.generate(ids, attention_mask=mask, **asked)[:, 70:])
    back = to_transformers(ours)
    assert torch.equal(back(input_ids=ids).logits, expected)
    for name in SPECIAL:
        for config in ("config", "generation_config"):
            assert getattr(getattr(back, config), name) == getattr(getattr(theirs, config), name)


def test_all_linear_layers_but_the_head_have_adapters(tmp_path):
    saved(tmp_path, tie_word_embeddings=False)
    torch.manual_seed(0)
    network = LlamaPretrained(300, str(tmp_path), rank=2)
    adapted = {
        name.split(".lora")[0]
        for name, weight in network.named_parameters()
        if weight.requires_grad
    }
    layers = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    assert adapted == {f"layers.{block}.{layer}" for block in range(2) for layer in layers}
    whole = LlamaPretrained(300, str(tmp_path), rank=0)
    assert all(weight.requires_grad for weight in whole.parameters())


def test_a_head_of_its_own_may_have_an_adapter(tmp_path):
    from fl_lightning.models.language.hf import to_transformers

    saved(tmp_path, tie_word_embeddings=False)
    network = LlamaPretrained(300, str(tmp_path), rank=2, targets=["o_proj", "lm_head"])
    ids, plain = torch.randint(0, 300, (3, 20)), LlamaPretrained(300, str(tmp_path), rank=0)
    assert torch.equal(network(ids), plain(ids))
    torch.nn.init.normal_(network.lm_head.lora_B.weight)
    assert not network(ids).allclose(plain(ids), atol=1e-2)
    merged = to_transformers(network)(input_ids=ids).logits
    torch.testing.assert_close(merged, network(ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "settings", "says"),
    [
        ("Qwen2", {}, "architecture qwen2"),
        ("Llama", {"attention_bias": True}, "biases in linear layers"),
        ("Llama", {"hidden_act": "gelu"}, "activation gelu"),
        ("Mistral", {"sliding_window": 16}, "sliding window of 16 tokens"),
    ],
)
def test_other_blocks_are_refused(kind, settings, says, tmp_path):
    saved(tmp_path, kind, **settings)
    with pytest.raises(InputError, match=says):
        LlamaPretrained(300, str(tmp_path))


def test_data_of_more_tokens_are_refused(tmp_path):
    saved(tmp_path)
    with pytest.raises(InputError, match="300 tokens on data of 301"):
        LlamaPretrained(301, str(tmp_path))


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)
@pytest.mark.parametrize("form", FORMS)
def test_its_adapters_load_in_peft_on_the_base_that_is_named(form, tmp_path):
    peft = pytest.importorskip("peft")
    from fl_lightning.export.language import write_peft
    from fl_lightning.export.trained_model import TrainedModel

    base, folder = tmp_path / "base", tmp_path / "adapter"
    saved(base, **FORMS[form])
    folder.mkdir()
    network = LlamaPretrained(300, str(base), rank=2)
    with torch.no_grad():
        for weight in network.parameters():
            weight.add_(0.1 * torch.randn_like(weight) if weight.requires_grad else 0)
    needs = write_peft(TrainedModel(network, SimpleNamespace(tokenizer=None)), folder)
    assert needs == f"transformers and peft, and the base {base}"
    assert not (folder / "base").exists()
    theirs = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(base), folder
    )
    ids = torch.randint(0, 300, (3, 70))
    torch.testing.assert_close(theirs(input_ids=ids).logits, network(ids), rtol=1e-4, atol=1e-4)
    network.source, named = "owner/name", tmp_path / "named"
    named.mkdir()
    write_peft(TrainedModel(network, SimpleNamespace(tokenizer=None)), named)
    settings = json.loads((named / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == "owner/name"


@pytest.mark.parametrize(
    ("adapter", "expected"),
    [("lora", ["peft", "transformers"]), ("pissa", ["transformers"])],
)
def test_adapters_that_took_a_part_of_the_named_base_are_merged(adapter, expected, tmp_path):
    """peft would put them on the whole base, whose leading part would count twice."""
    from fl_lightning.export.language import forms

    saved(tmp_path)
    network = LlamaPretrained(300, str(tmp_path), rank=2, adapter=adapter)
    assert forms(network) == expected
    network.source = ""  # the base goes along, without the part
    assert forms(network) == ["peft", "transformers"]
