"""The lines of an exported card that ask the model."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from exported import loaded, of_peft
from tiny_language import adam, records

import fl_lightning
from fl_lightning.conformance.toy import run
from fl_lightning.data import PreferencePairs
from fl_lightning.data.text.tokens import HuggingFaceTokenizer
from fl_lightning.export.asking import NEW_TOKENS
from fl_lightning.methods import FedAvg
from fl_lightning.metrics.text import prompts_and_answers, until_end
from fl_lightning.models import LlamaTiny
from fl_lightning.models.language import hf
from fl_lightning.trainer import FederatedTrainer


def preferring(folder: Path) -> FederatedTrainer:
    """What has learnt preferences."""
    data = PreferencePairs(num_clients=2, batch_size=8, context=72, examples_per_client=8)
    method = FedAvg(network=partial(LlamaTiny, rank=2), optimizer=adam())
    return run(method, data, folder, max_rounds=1, max_local_steps=1, workers=1)


def test_the_card_has_the_shape_of_one_sequences_outputs(tmp_path: Path):
    """A preference is of two sequences, and the network that is written answers one."""
    trainer = preferring(tmp_path)
    out = fl_lightning.export_model(trainer, tmp_path / "out", format="safetensors")
    B, T, V = trainer.method.deploy()(torch.zeros(3, 5, dtype=torch.int64)).shape
    assert (B, T) == (3, 5)
    said = f"token ids int64 [B, T]; outputs are logits [B, T, {V}]."
    assert said in (out / "README.md").read_text()


@of_peft
def test_what_has_learnt_preferences_is_asked_too(tmp_path: Path):
    """Its task generates nothing, and the card asks for as many tokens as without a bound."""
    pytest.importorskip("peft")
    trainer = preferring(tmp_path)
    for format in ("peft", "transformers"):
        out = fl_lightning.export_model(trainer, tmp_path / format, format=format)
        assert f"max_new_tokens={NEW_TOKENS}," in (out / "README.md").read_text()


class Shifted:
    """A tokeniser of one's own, of which no program can be told; it wraps one of no known class."""

    vocab_size, bos, eos, pad = 259, 258, 256, 257

    def __init__(self) -> None:
        self.tokenizer = object()

    def encode(self, text: str) -> list[int]:
        return [(byte + 1) % 256 for byte in text.encode()]

    def decode(self, ids: Iterable[int]) -> str:
        return bytes((id - 1) % 256 for id in ids if id < 256).decode(errors="replace")


@of_peft
def test_a_tokeniser_of_ones_own_is_none_of_bytes(tmp_path: Path):
    pytest.importorskip("peft")
    method = FedAvg(network=partial(LlamaTiny, rank=2), optimizer=adam())
    data = records(tokenizer=Shifted())
    trainer = run(method, data, tmp_path, max_rounds=1, max_local_steps=1, workers=1)
    out = fl_lightning.export_model(trainer, tmp_path / "home", format="transformers")
    assert "generate" not in (out / "README.md").read_text().partition("```python")[2]


@of_peft
@pytest.mark.parametrize("bytes_alone", [True, False])
def test_the_lines_of_the_card_ask_as_the_run_did(bytes_alone: bool, tmp_path: Path):
    """They are run as they stand, with the definition and inputs of a test record: the same tokens
    before the answer, and the same answer, as long as the run's may be, whatever the base's own
    settings of generation are and whatever the texts say."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("peft")
    from tiny_transformers import save_base, tokenizer_of_bytes

    network: Any = partial(LlamaTiny, rank=4)
    data = records()
    if not bytes_alone:
        base = save_base(tmp_path / "base", "Qwen2.5")
        transformers.GenerationConfig(repetition_penalty=5.0, eos_token_id=9).save_pretrained(base)
        network = partial(hf.TransformersLM, name=str(base), rank=4)
        data = records(
            generate=False, tokenizer=HuggingFaceTokenizer(tokenizer=tokenizer_of_bytes())
        )
    method = FedAvg(network=network, optimizer=adam(0.1))
    trainer = run(method, data, tmp_path, max_rounds=1, max_local_steps=2, workers=1)
    out = fl_lightning.export_model(trainer, tmp_path / "home")
    asking = (out / "README.md").read_text().split("```python\n")[2].partition("```")[0]
    own, tokens, answered = trainer.method.deploy().eval(), data.tokenizer, 0
    most = 64 if data.task.max_new_tokens == 0 else data.task.max_new_tokens
    assert (most == NEW_TOKENS) is not bytes_alone
    inputs, target = data.inputs("test", torch.arange(3)), data.test_target[:3]
    prompts, mask, _ = prompts_and_answers(inputs["input_ids"], target, tokens.pad)
    ours = own.generate(prompts, mask, max_new_tokens=most, eos=tokens.eos, pad=tokens.pad).tolist()
    for record, prompt, there, answer in zip(data.test_records, prompts, mask, ours, strict=False):
        lines = asking.replace('definition = "..."', f"definition = {record.definition!r}")
        lines = lines.replace('inputs = "..."', f"inputs = {record.inputs!r}")
        names = loaded(out) | {"__file__": str(out / "load.py")}
        exec(lines, names)
        assert names["ids"] == prompt[there].tolist()
        assert until_end(names["answer"], tokens.eos) == until_end(answer, tokens.eos)
        answered += bool(until_end(answer, tokens.eos))
        before = sum(map(len, names["parts"]))
        lines = asking.replace('definition = "..."', 'definition = "{inputs}"')
        exec(lines.replace('inputs = "..."', 'inputs = "{definition}"'), names)
        lengths = len(record.definition) + len(record.inputs), len("{inputs}{definition}")
        assert sum(map(len, names["parts"])) == before - lengths[0] + lengths[1]
    assert answered
