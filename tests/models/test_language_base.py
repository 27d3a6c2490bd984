"""The shipped byte model: the file, what it can do, the names it has as a network, and the program
that makes it."""

from __future__ import annotations

import hashlib
import importlib.util
import math
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
from places import ROOT
from safetensors.torch import load_file, save_file

from fl_lightning.cli.parser import FederatedCLI
from fl_lightning.errors import InputError, RunStopped
from fl_lightning.models import build_network
from fl_lightning.models.adapters import adapter_layers
from fl_lightning.models.language import (
    BYTE_VOCABULARY,
    Llama,
    LlamaTiny,
    LlamaTinyDeep,
)
from fl_lightning.models.language.tiny import WEIGHTS_FILE, load_base
from fl_lightning.tasks import LanguageModelling

PAGE = ROOT / "docs/howto/language_models.md"
FILES = {
    LlamaTiny: (
        "b10e6c1be35b980f1aaaed8d20374b45788f94488b9a14d0f95ef8ef9f863df9",
        468_096,
        945_000,
    ),
    LlamaTinyDeep: (
        "419acf7fc009119f584ce0be5574eabeff2836248c2a02c73da772eef0b14bec",
        911_232,
        2_000_000,
    ),
}
"""Of each shipped base the SHA-256 of its file, its weights, and bytes that the file is below; in
the order of the page."""
BASES = pytest.mark.parametrize("base", [*FILES], ids=lambda base: base.__name__)
BOS, EOS, PAD = 256, 257, 258


@pytest.fixture(scope="module")
def program() -> ModuleType:
    """``benchmarks/language_base.py``, which is no part of a package."""
    spec = importlib.util.spec_from_file_location(
        "language_base", ROOT / "benchmarks/language_base.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@BASES
def test_the_file_is_the_one_that_was_evaluated(base: type[LlamaTiny]):
    sha256, size, largest = FILES[base]
    file = base.weights_file
    assert hashlib.sha256(file.read_bytes()).hexdigest() == sha256
    weights = load_file(file)
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert sum(weight.numel() for weight in weights.values()) == size
    assert file.stat().st_size < largest
    own = base(BYTE_VOCABULARY, rank=0).state_dict()
    assert all(own[name].equal(weight.float()) for name, weight in weights.items())


@BASES
@pytest.mark.parametrize("definition", ["Copy.", "In quotes.", "Title case."])
def test_it_copies_what_it_has_never_seen(
    program: ModuleType, base: type[LlamaTiny], definition: str
):
    words = ["qyx", "tolpo", "vrimeb", "zwe", "nokuda", "hylf"]
    found = program.exact_match(
        base(BYTE_VOCABULARY), definition, program.FORMATS[definition], words, 16
    )
    assert found > 0.5
    assert (
        program.exact_match(
            base(BYTE_VOCABULARY, pretrained=False),
            definition,
            program.FORMATS[definition],
            words,
            16,
        )
        == 0
    )


@BASES
def test_it_writes_the_english_that_it_read(program: ModuleType, base: type[LlamaTiny]):
    text = torch.tensor(
        [list(b"The value of this argument is used as a name in the current scope.")]
    )
    ids = torch.cat((torch.tensor([[BOS]]), text[:, :-1]), dim=1)
    assert program.loss_of(base(BYTE_VOCABULARY), ids, text) < 1.8 < math.log(BYTE_VOCABULARY) / 2


@pytest.mark.slow
@BASES
def test_the_page_says_how_well_it_predicts_text_that_it_has_not_seen(
    program: ModuleType, base: type[LlamaTiny]
):
    """The texts are those of the Python that runs this, which may be another than the base has
    read."""
    says = re.findall(r"\b(\d\.\d+) nats a byte on\s+text that it has not", PAGE.read_text())
    text = list(f"{program.reference_text()}\n\n{program.docstrings()}".encode("ascii"))
    unseen = torch.tensor(text[int(len(text) * (1 - program.HELD_OUT_TEXT)) :])
    starts = [*range(0, len(unseen) - program.TEXT_LENGTH, program.TEXT_LENGTH)][:256]
    with torch.no_grad():
        found = program.loss_of(base(BYTE_VOCABULARY), *program.text_batch(unseen, starts))
    assert float(found) == pytest.approx(float(says[[*FILES].index(base)]), abs=0.06)


@pytest.mark.parametrize("share", [0.0, 0.2])
def test_branches_are_dropped_by_chance_for_each_sequence(program: ModuleType, share: float):
    """A step of training with LayerDrop, by the count of tokens that the feed-forward layers
    compute."""
    network, seen = Llama(BYTE_VOCABULARY, width=16, depth=8, heads=2), []
    for block in network.layers:
        block.mlp.register_forward_pre_hook(lambda module, x: seen.append(x[0][..., 0].numel()))
    text = torch.arange(200)
    program.train(
        network, text, program.words_of("some words of a few letters that are read")[0], 4, share
    )
    rows = program.TEXT_ROWS * program.TEXT_LENGTH + program.RECORD_ROWS * program.RECORD_LENGTH
    assert sum(seen) / (4 * 8 * rows) == pytest.approx(1 - share, abs=0.03 if share else 0)
    assert {*network.state_dict()} == {
        *Llama(BYTE_VOCABULARY, width=16, depth=8, heads=2).state_dict()
    }


def test_a_file_that_is_not_whole_is_refused(tmp_path: Path):
    weights, network, path = (
        load_file(WEIGHTS_FILE),
        Llama(BYTE_VOCABULARY),
        tmp_path / "base.safetensors",
    )
    last = "norm.weight"
    for broken in (
        {name: weight for name, weight in weights.items() if name != last},
        {**weights, last: weights[last][:5].clone()},
        {
            **{name: weight for name, weight in weights.items() if name != last},
            "other": weights[last],
        },
    ):
        save_file(broken, path)
        with pytest.raises(InputError, match=last):
            load_base(network, path)
    path.write_bytes(WEIGHTS_FILE.read_bytes()[:-10])
    with pytest.raises(RunStopped, match="install the package again"):
        load_base(network, path)
    with pytest.raises(RunStopped, match="install the package again"):
        load_base(network, tmp_path / "missing.safetensors")


TOKENS = {"task": LanguageModelling(), "inputs": torch.zeros(2, 64, dtype=torch.int64)}


def test_its_name_is_a_network():
    network = build_network("llama_tiny", BYTE_VOCABULARY, (64,), **TOKENS)
    assert isinstance(network, LlamaTiny)
    assert len(adapter_layers(network)) == 16
    with pytest.raises(InputError, match="bytes, 259 tokens"):
        build_network("llama_tiny", 300, (64,), **TOKENS)
    with pytest.raises(InputError, match="a language model reads examples of tokens"):
        build_network("llama_tiny", BYTE_VOCABULARY, (3, 28, 28))
    with pytest.raises(InputError, match="write llama_tiny"):
        build_network("lama_tiny", BYTE_VOCABULARY, (64,), **TOKENS)


def test_blocks_that_are_not_kept_are_not_part_of_the_network():
    whole, shallow = LlamaTiny(BYTE_VOCABULARY), LlamaTiny(BYTE_VOCABULARY, blocks=[0, 1, 3])
    assert len(adapter_layers(shallow)) == 12
    whole.layers[2].forward = lambda x, *_: x
    ids = torch.arange(40).reshape(2, 20)
    assert torch.equal(whole(ids), shallow(ids))
    for wrong in ([], [1, 0], [0, 0], [0, 4], [-1]):
        with pytest.raises(InputError, match=r"write \[0, 2, 3\]"):
            LlamaTiny(BYTE_VOCABULARY, blocks=wrong)


def test_a_configuration_gives_it_settings(bare_directory: Path):
    Path("lora.yaml").write_text(
        "model:\n  class_path: FedAvg\n  init_args:\n    network:\n"
        "      class_path: fl_lightning.models.LlamaTiny\n"
        "      init_args: {rank: 4, alpha: 4, targets: [qkv_proj], ffa: true}\n"
    )
    cli = FederatedCLI("fit", ["--config", "lora.yaml"])
    network = build_network(cli.model.network_spec, BYTE_VOCABULARY, (64,), **TOKENS)
    layers = [*adapter_layers(network).values()]
    assert len(layers) == 4
    assert layers[0].lora_A.weight.shape == (4, 96)
    assert layers[0].scaling == 1
    assert not layers[0].lora_A.weight.requires_grad


def test_the_code_of_the_page_runs():
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(block, {})  # it holds an assertion itself


def test_the_settings_of_the_page_are_understood(bare_directory: Path):
    (block,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    Path("page.yaml").write_text(block)
    spec = FederatedCLI("fit", ["--config", "page.yaml"]).model.network_spec
    network = build_network(spec, BYTE_VOCABULARY, (64,), **TOKENS)
    assert len(adapter_layers(network)) == 8


@pytest.mark.slow
def test_the_program_makes_the_same_weights_again_and_they_learn(program: ModuleType):
    reference = program.reference_text()
    words, held_out = program.words_of(reference)
    assert not {*words} & {*held_out}
    text = torch.tensor(list(reference.encode("ascii")))
    found = []
    for _ in range(2):
        torch.manual_seed(program.SEED)
        network = Llama(BYTE_VOCABULARY)
        program.train(network, text, words, steps=40)
        found.append(network)
    states = [network.state_dict() for network in found]
    assert all(states[0][name].equal(weight) for name, weight in states[1].items())
    nats = program.evaluate(found[0], text, held_out, count=2)["text, nats per byte"]
    assert nats < 0.7 * math.log(BYTE_VOCABULARY)
