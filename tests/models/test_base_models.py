"""Families of base models by ``hf:``: one round of adapters, found by architecture, that plain peft
loads."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from tiny_language import adam, fit, records
from tiny_transformers import BASES, save_base

import fl_lightning
from fl_lightning.__main__ import main
from fl_lightning.data.text.tokens import HuggingFaceTokenizer
from fl_lightning.errors import InputError
from fl_lightning.methods import FedAvg
from fl_lightning.models.language import hf

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)
ALL = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def tuned(base: Path, run: Path, **settings):
    tokens = HuggingFaceTokenizer(str(base))
    network = partial(hf.TransformersLM, name=str(base), rank=4, **settings)
    data = records(generate=False, tokenizer=tokens, context=72)
    return fit(FedAvg(network=network, optimizer=adam()), run, data, max_rounds=1)


@pytest.mark.parametrize("family", BASES)
@pytest.mark.parametrize("targets", ["all-linear", "peft-default"])
def test_one_round_and_home_to_peft(family: str, targets: str, tmp_path: Path):
    """The adapters are on the layers that the architecture has, and answer in plain peft as in the
    run."""
    peft = pytest.importorskip("peft")
    base = save_base(tmp_path / "base", family)
    trainer = tuned(base, tmp_path / "run", targets=targets)
    network = trainer.method.deploy().eval()
    adapted = {
        name.partition(".lora_A")[0].split(".")[-1]
        for name, p in network.named_parameters()
        if "lora_A" in name
    }
    assert adapted == (ALL if targets == "all-linear" else {"q_proj", "v_proj"})
    out = fl_lightning.export_model(trainer, tmp_path / "home", format="peft")
    import transformers

    plain = transformers.AutoModelForCausalLM.from_pretrained(base)
    home = peft.PeftModel.from_pretrained(plain, out).eval()
    ids = torch.arange(2, 40)[None]
    with torch.no_grad():
        found, expected = home(input_ids=ids).logits, network(ids)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        with home.disable_adapter():
            assert not home(input_ids=ids).logits.allclose(expected, atol=1e-6), (
                "the round changed nothing"
            )


@pytest.mark.parametrize("family", BASES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_checkpointing_gives_the_same_gradients(family: str, dtype: str, tmp_path: Path):
    """What is computed again is what was computed, bit for bit, and fewer values wait for the
    backward pass."""
    base = save_base(tmp_path / "base", family)
    ids = torch.arange(2, 66).view(2, 32)
    found = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        network = hf.TransformersLM(
            258, str(base), rank=4, dtype=dtype, gradient_checkpointing=checkpointing
        ).train()
        with torch.no_grad():
            for name, weight in network.named_parameters():
                if "lora_B" in name:
                    weight.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
        kept = 0

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal kept
            kept += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = network(ids).float().logsumexp(-1).mean()
        loss.backward()
        gradients = {n: p.grad for n, p in network.named_parameters() if p.requires_grad}
        assert all(g is not None and g.abs().sum() > 0 for g in gradients.values())
        found.append((loss.detach(), gradients, kept))
    (loss, plain, all_kept), (loss_again, again, few_kept) = found
    assert loss.equal(loss_again)
    assert all(plain[name].equal(again[name]) for name in plain)
    assert few_kept < all_kept


def test_checkpointing_changes_no_run(tmp_path: Path):
    """Rounds end with the same weights, bit for bit."""
    base = save_base(tmp_path / "base")
    ends = [
        tuned(base, tmp_path / f"run{again}", gradient_checkpointing=again).method.server["weights"]
        for again in (False, True)
    ]
    assert ends[0].equal(ends[1])


def test_targets_of_peft_are_of_its_adapters_and_of_architectures_that_it_knows(tmp_path: Path):
    base = save_base(tmp_path / "base")
    with pytest.raises(
        InputError, match="peft-default' with adapter svft; it is no adapter of peft"
    ):
        hf.TransformersLM(258, str(base), targets="peft-default", adapter="svft")


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_a_folder_and_lines_of_ones_own_take_two_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As the page on language models says; plain peft then answers otherwise than the base."""
    peft = pytest.importorskip("peft")
    import transformers

    monkeypatch.chdir(tmp_path)
    save_base(tmp_path / "my_model", "Qwen2.5")
    some = [{"user": f"u{k % 3}", "question": f"{k} + 1", "answer": str(k + 1)} for k in range(40)]
    (tmp_path / "my_records.jsonl").write_text("\n".join(map(json.dumps, some)))
    flags = {
        "model": "FedAvg",
        "model.network": "hf:my_model",
        "model.optimizer": "AdamW",
        "model.optimizer.lr": 0.01,
        "data": "TextFiles",
        "data.train": "my_records.jsonl",
        "data.client": "user",
        "data.group": "user",
        "data.columns": "{inputs: question, targets: answer}",
        "data.constants": "{task_name: sums, definition: Add.}",
        "data.context": 64,
        "data.tokenizer": "hf:my_model",
        "trainer.max_rounds": 1,
        "trainer.participation": 1.0,
        "trainer.logger": "false",
        "trainer.workers": 1,
        "trainer.experiment": "mine",
        "trainer.run_name": "one",
    }
    assert (
        main(
            ["fit", *(part for name, value in flags.items() for part in (f"--{name}", str(value)))]
        )
        == 0
    )
    assert main(["export", "runs/mine/one", "--to", "my_adapter"]) == 0
    base = transformers.AutoModelForCausalLM.from_pretrained("my_model")
    home, ids = peft.PeftModel.from_pretrained(base, "my_adapter").eval(), torch.arange(2, 30)[None]
    with torch.no_grad():
        tuned_logits = home(input_ids=ids).logits
        with home.disable_adapter():
            assert not home(input_ids=ids).logits.allclose(tuned_logits, atol=1e-3)
