"""Networks ``hf:FOLDER``: loaded without a network, adapted by peft, generating as each prompt
would alone."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from tiny_language import adam, fit, set_up
from torch import Tensor

from fl_lightning.aggregation.adapters import RULES
from fl_lightning.data import IID, TokenData
from fl_lightning.energy import (
    BHSPController,
    CostLine,
    CostTable,
    HESTController,
    MeasuredCost,
    TABSController,
)
from fl_lightning.energy.budgets.device import Device
from fl_lightning.energy.budgets.network import BudgetedNetwork
from fl_lightning.energy.switched import Plan, add_switches
from fl_lightning.errors import InputError, MisuseError
from fl_lightning.methods import AQFL, FedAdaLoRA, FedAvg, FedMPQ
from fl_lightning.models import LlamaPretrained, build_network
from fl_lightning.models.adapters import adapter_layers
from fl_lightning.models.language import BYTE_VOCABULARY, LlamaTiny, hf
from fl_lightning.models.language.hf_classifier import TransformersClassifier
from fl_lightning.tasks import LanguageModelling
from fl_lightning.wire import Layout

LENGTHS = [7, 2, 5]


def tokens(length: int) -> dict:
    """What a network of tokens is tried out with."""
    return {"task": LanguageModelling(), "inputs": torch.zeros(2, length, dtype=torch.int64)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("peft")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    path = tmp_path_factory.mktemp("llama")
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(10 if weight.ndim > 1 else 1)
    model.save_pretrained(path)
    return path


def prompts() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    return torch.randint(0, 50, mask.shape), mask


def test_a_folder_is_a_network_whose_adapters_alone_are_trained(folder: Path, capfd):
    import transformers

    network = build_network(f"hf:{folder}", 50, (7,), **tokens(7))
    assert capfd.readouterr() == ("", "")
    ids, mask = prompts()
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder)
    expected = plain(input_ids=ids, attention_mask=mask.long()).logits
    torch.testing.assert_close(
        network({"input_ids": ids, "attention_mask": mask})[mask], expected[mask]
    )
    torch.testing.assert_close(network(ids)[mask], expected[mask])
    trained = {name for name, weight in network.named_parameters() if weight.requires_grad}
    assert len(trained) == 2 * 7 * 2
    assert all("lora_" in name for name in trained)
    network(ids).logsumexp(-1).mean().backward()
    assert {
        name for name, weight in network.named_parameters() if weight.grad is not None
    } == trained


def test_a_folder_of_adapters_is_no_base(folder: Path, tmp_path: Path):
    """Its adapters would be lost, or be trained beside new ones, without a word."""
    peft = pytest.importorskip("peft")
    build_network(f"hf:{folder}", 50, (7,), **tokens(7)).model.save_pretrained(tmp_path)
    assert peft.PeftConfig.from_pretrained(tmp_path).base_model_name_or_path == str(folder)
    with pytest.raises(InputError, match=r"holds adapters.*by export --format transformers"):
        build_network(f"hf:{tmp_path}", 50, (7,), **tokens(7))


def test_settings_of_the_adapters(folder: Path):
    def trained(**settings: object) -> dict[str, torch.Size]:
        network = hf.TransformersLM(50, str(folder), **settings)
        return {name: p.shape for name, p in network.named_parameters() if p.requires_grad}

    assert all("lora_B" in name for name in trained(ffa=True))
    chosen = trained(rank=3, targets=["q_proj", "v_proj"])
    assert len(chosen) == 2 * 2 * 2
    assert {min(shape) for shape in chosen.values()} == {3}
    assert not any("lora" in name for name in trained(rank=0))
    narrow = hf.TransformersLM(
        50, str(folder), dtype="bfloat16", gradient_checkpointing=True
    ).train()
    assert {p.dtype for p in narrow.parameters() if not p.requires_grad} == {torch.bfloat16}
    assert {p.dtype for p in narrow.parameters() if p.requires_grad} == {torch.float32}
    narrow(prompts()[0]).float().logsumexp(-1).mean().backward()
    assert all(p.grad is not None for p in narrow.parameters() if p.requires_grad)


@pytest.mark.parametrize(
    ("kind", "part", "count"),
    [
        ("pissa", "lora_", 2 * 7 * 2),
        ("adalora", "lora_", 2 * 7 * 3),
        ("svft", "svft_m", 2 * 7),
        ("spectral", "spectral_m", 2 * 7),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kinds_of_adapters(folder: Path, kind: str, part: str, count: int, dtype: str):
    """They start as the plain model, are all that is trained, are float32, and leave the head as it
    is."""
    ids, _ = prompts()
    network = hf.TransformersLM(50, str(folder), rank=4, adapter=kind, dtype=dtype)
    plain = hf.TransformersLM(50, str(folder), rank=0, dtype=dtype)
    if dtype == "float32":
        torch.testing.assert_close(network(ids), plain(ids), rtol=1e-3, atol=1e-3)
    trained = {name: weight for name, weight in network.named_parameters() if weight.requires_grad}
    assert len(trained) == count
    assert all(part in name and "lm_head" not in name for name in trained)
    assert {weight.dtype for weight in trained.values()} == {torch.float32}
    network(ids).float().logsumexp(-1).mean().backward()
    assert {name for name, weight in network.named_parameters() if weight.grad is not None} == {
        *trained
    }
    assert network.generate(*prompts(), max_new_tokens=2).shape == (3, 2)


@pytest.mark.parametrize("kind", ["lora", "adalora", "spectral"])
def test_switches_take_the_adapters_of_peft_and_ours(folder: Path, kind: str):
    ids, _ = prompts()
    network = hf.TransformersLM(50, str(folder), rank=4, adapter=kind)
    with torch.no_grad():
        for weight in network.parameters():
            if weight.requires_grad:
                weight.add_(
                    0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
                )
    logits = network(ids)
    layers = add_switches(network)
    assert [layer.name.rpartition(".")[2] for layer in layers[:2]] == ["q_proj", "k_proj"]
    assert network(ids).equal(logits)
    for choice, bound in ((2, 1e-6), (1, 0.3)):
        layers[0].board.plan = Plan(choices=torch.full((*ids.shape, 14), choice))
        error = (network(ids) - logits).norm() / logits.norm()
        assert error <= bound
    assert error > 0
    layers[0].board.plan = Plan(choices=torch.zeros(*ids.shape, 14, dtype=torch.int64))
    torch.testing.assert_close(network(ids), hf.TransformersLM(50, str(folder), rank=0)(ids))


def test_prompts_of_different_lengths_get_what_each_gets_alone(folder: Path):
    network = build_network(f"hf:{folder}", 50, (7,), **tokens(7))
    ids, mask = prompts()
    together = network.generate(ids, mask, max_new_tokens=6)
    assert together.shape == (3, 6)
    for row, length in enumerate(LENGTHS):
        alone = ids[row : row + 1, :length]
        for _ in range(6):
            alone = torch.cat((alone, network(alone)[:, -1].argmax(-1, keepdim=True)), dim=1)
        assert together[row].equal(alone[0, length:])
    own = network.base.generation_config
    own.eos_token_id, own.repetition_penalty, own.do_sample = int(together[0, 1]), 1.5, True
    assert network.generate(ids, mask, max_new_tokens=6).equal(together), (
        "greedy, whatever the model prefers"
    )
    assert network.base.generation_config is own
    eos = int(together[0, 2])
    ended = network.train().generate(ids[:1], mask[:1], 6, eos, pad=0)[0].tolist()
    assert ended == together[0, : together[0].tolist().index(eos) + 1].tolist()
    assert network.model.training
    with pytest.raises(MisuseError, match="one token or more"):
        network.generate(ids, mask & False, 6)


def test_the_byte_model_is_a_folder_for_other_programs(tmp_path: Path):
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    ours = LlamaTiny(BYTE_VOCABULARY)
    with torch.no_grad():
        for layer in adapter_layers(ours).values():
            layer.lora_B.weight.normal_(std=0.1)
    hf.to_transformers(ours).save_pretrained(tmp_path)
    theirs = hf.TransformersLM(BYTE_VOCABULARY, str(tmp_path), rank=0)
    ids = torch.tensor([[256, *b"Copy.\nfour words to copy\n="]])
    assert not ours(ids).allclose(LlamaTiny(BYTE_VOCABULARY)(ids), atol=0.1)
    torch.testing.assert_close(theirs(ids), ours(ids), rtol=1e-4, atol=1e-4)
    assert theirs.generate(ids, None, 24, 257).equal(ours.generate(ids, None, 24, 257))
    for config in (theirs.base.config, theirs.base.generation_config):
        assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (256, 257, 258)


def test_what_does_not_work_is_refused_in_one_line(folder: Path, tmp_path: Path):
    def refused(
        words: str, name: Path | str = folder, num_classes: int = 50, **settings: object
    ) -> None:
        with pytest.raises(InputError, match=words) as error:
            hf.TransformersLM(num_classes, str(name), **settings)
        assert "\n" not in str(error.value)

    refused("tokens of the model", num_classes=51)
    refused("peft refuses them", targets=["qkv_proj"])
    refused("save_pretrained wrote", name=tmp_path)
    refused("rank 0 means none", rank=-1)
    refused("q_proj of 24 x 24.*24; write rank 24 or less", adapter="spectral", rank=25)
    refused("a target is all-linear", adapter="svft", targets=["qkv_proj"])
    refused("adapter pissa with ffa true", adapter="pissa", ffa=True)
    refused("one of lora, ffa", adapter="dora")
    with pytest.raises(InputError, match="with adapter pissa; its base lacks"):
        add_switches(hf.TransformersLM(50, str(folder), rank=4, adapter="pissa"))
    refused("one of float32", dtype="float64")
    refused(f"network hf:{folder}: .*save_pretrained wrote", gguf_file="missing.gguf")
    (tmp_path / "damaged.gguf").write_bytes(b"GGUF and then nothing")
    refused(
        f"network hf:{tmp_path}: .*save_pretrained wrote", name=tmp_path, gguf_file="damaged.gguf"
    )


def test_a_rank_above_the_size_of_a_layer_is_refused_of_pissa(folder: Path, gpt2: Path):
    """peft takes it, and trains fewer directions than were asked for."""
    hf.TransformersLM(50, str(folder), adapter="pissa", rank=24)
    whole = r"pissa of rank 25 on model.layers.0.self_attn.q_proj of 24 x 24; .*write rank 24"
    with pytest.raises(InputError, match=whole):
        hf.TransformersLM(50, str(folder), adapter="pissa", rank=25)
    wide = r"pissa of rank 17 on transformer.h.0.attn.c_attn of 16 x 48; .*write rank 16"
    with pytest.raises(InputError, match=wide):
        hf.TransformersLM(259, str(gpt2), adapter="pissa", rank=17)


@pytest.mark.parametrize("rule", sorted(RULES))
def test_rules_refuse_an_adapter_on_an_embedding_by_its_name(rule: str, gpt2: Path):
    network = partial(hf.TransformersLM, name=str(gpt2), rank=2, targets=["c_attn", "wte"])
    _, data = set_up(FedAvg(network=network), answers_of_bytes())
    with pytest.raises(InputError, match=r"transformer.wte, an embedding; .*out of targets"):
        FedAvg(network=network, adapter_average=rule).build(data)


def test_an_embedding_is_refused_where_its_adapter_cannot_learn(folder: Path):
    """A of an embedding starts at zero: where it is frozen, B has no gradient."""
    words = r"with adapter ffa; .* model.embed_tokens would never learn; leave it out of targets"
    with pytest.raises(InputError, match=words):
        hf.TransformersLM(50, str(folder), ffa=True, targets=["q_proj", "embed_tokens"])
    network = hf.TransformersLM(50, str(folder), targets=["q_proj", "embed_tokens"])
    network(prompts()[0]).logsumexp(-1).mean().backward()
    names = {name for name, weight in network.named_parameters() if weight.grad is not None}
    assert any("lora_embedding_A" in name for name in names)


@pytest.mark.parametrize(("num_classes", "warned"), [(24, True), (25, False), (1, False)])
def test_data_of_another_tokeniser_are_warned_of(
    num_classes: int, warned: bool, folder: Path, caplog
):
    hf.TransformersLM(num_classes, str(folder))
    LlamaPretrained(num_classes, name=str(folder))
    expected = f"knows 50 tokens and the data have {num_classes}"
    assert [expected in record.message for record in caplog.records] == [True, True] * warned


@pytest.mark.parametrize(
    ("there", "rank", "said"),
    [
        (False, 8, "load_in_4bit of hf:a/b without bitsandbytes; 4-bit weights are"),
        (True, 0, "load_in_4bit of hf:a/b with rank 0; 4-bit weights are frozen"),
        (True, 8, None),
    ],
)
def test_four_bits_need_a_package_and_adapters(there, rank, said, monkeypatch):
    monkeypatch.setattr(hf, "find_spec", lambda package: object() if there else None)
    if said is None:
        hf._require_4bit("a/b", rank, "adalora")
        for kind in ("pissa", "svft", "spectral"):
            with pytest.raises(
                InputError, match=f"4bit of hf:a/b with adapter {kind}; it takes singular"
            ):
                hf._require_4bit("a/b", rank, kind)
        return
    with pytest.raises(InputError, match=f"^{said}") as error:
        hf._require_4bit("a/b", rank)
    assert "\n" not in str(error.value)


def test_without_the_extra_one_line_names_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hf, "find_spec", lambda package: None)
    with pytest.raises(InputError) as error:
        build_network("hf:somebody/model", 50, (7,), **tokens(7))
    assert "pip install 'fl_lightning[language]'" in str(error.value)
    assert "hf:somebody/model without transformers, peft, accelerate" in str(error.value)
    with pytest.raises(InputError, match="without bitsandbytes"):
        hf._require_4bit("somebody/model", rank=8)


@pytest.mark.parametrize(("rank", "dtype"), [(0, torch.bfloat16), (2, torch.float32)])
def test_what_is_trained_travels_in_its_own_precision(rank: int, dtype: torch.dtype, folder: Path):
    """Whole weights in bfloat16; adapters on a base in bfloat16 are float32."""
    layout = Layout.of(hf.TransformersLM(50, name=str(folder), dtype="bfloat16", rank=rank))
    assert layout.size > 0
    assert layout.dtype == dtype


def test_a_classifier_pads_with_the_first_of_several_end_tokens(folder: Path, tmp_path: Path):
    """As those of Llama 3, whose configuration has no padding."""
    path = shutil.copytree(folder, tmp_path / "llama")
    settings = json.loads((path / "config.json").read_text())
    settings |= {"pad_token_id": None, "eos_token_id": [2, 3]}
    (path / "config.json").write_text(json.dumps(settings))
    network = TransformersClassifier(3, str(path), rank=0).eval()
    ids, mask = prompts()
    assert network.pad == 2
    assert network({"input_ids": ids, "attention_mask": mask}).shape == (3, 3)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GPT-2 of 40 learned positions; its linear layers are of transformers' own class Conv1D."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("peft")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=259,
        n_positions=40,
        n_embd=16,
        n_layer=1,
        n_head=2,
        bos_token_id=256,
        eos_token_id=257,
    )
    model, path = transformers.GPT2LMHeadModel(config), tmp_path_factory.mktemp("gpt2")
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(10 if weight.ndim > 1 else 1)
    model.save_pretrained(path)
    return path


def test_generation_ends_where_the_positions_end(gpt2: Path):
    """Each prompt gets what it gets alone, up to its last position; others go on."""
    network = hf.TransformersLM(259, str(gpt2)).eval()  # without dropout
    lengths = [38, 3, 40, 31]
    mask = torch.arange(40) < torch.tensor(lengths)[:, None]
    ids = torch.randint(0, 259, mask.shape, generator=torch.Generator().manual_seed(1))
    together = network.generate(ids, mask, max_new_tokens=8, eos=None, pad=258)
    assert together.shape == (4, 8)
    for row, (length, count) in enumerate(zip(lengths, (3, 8, 1, 8), strict=True)):
        alone = ids[row : row + 1, :length]
        for _ in range(count):
            alone = torch.cat((alone, network(alone)[:, -1].argmax(-1, keepdim=True)), dim=1)
        assert together[row].tolist() == alone[0, length:].tolist() + [258] * (8 - count)
    few = network.generate(ids[1:2], mask[1:2], max_new_tokens=8, eos=int(together[1, 1]), pad=0)
    assert few.shape[1] <= 2


def answers_of_bytes() -> TokenData:
    """The longest item fills a context of 40, so that its prompt and the longest answer exceed
    it."""
    prompts = [[256, *[65 + k % 20] * (2 + 3 * (k % 12))] for k in range(24)]
    answers = [
        [66] * (4 if len(prompt) > 30 else 17 - k % 3) + [257] for k, prompt in enumerate(prompts)
    ]
    both = [(p, a) for p, a in zip(prompts, answers, strict=True) if len(p + a) <= 41]
    assert max(len(p) for p, _ in both) + max(len(a) for _, a in both) > 45
    items = Items([(p + a, [-100] * len(p) + a) for p, a in both])
    return TokenData(items, context=40, num_clients=2, partition=IID(), batch_size=4, generate=True)  # type: ignore[arg-type]


def test_a_context_of_all_positions_is_trained_and_measured(gpt2: Path, tmp_path: Path):
    method = FedAvg(network=partial(hf.TransformersLM, name=str(gpt2)), optimizer=adam())
    fit(method, tmp_path, answers_of_bytes())
    assert "test/exact_match" in next(tmp_path.rglob("metrics.csv")).read_text()
    with pytest.raises(
        InputError, match=r"41 tokens; it has learned 40 positions; write --data.context 40"
    ):
        build_network(f"hf:{gpt2}", 259, (41,), **tokens(41))


class Items(torch.utils.data.Dataset):
    def __init__(self, items: list) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int):
        return self.items[index]


@pytest.mark.parametrize("method", [FedMPQ, AQFL])
def test_the_linear_layers_of_gpt2_are_quantised(method, gpt2: Path, tmp_path: Path, caplog):
    """All matrices are; what the server deploys has at most 2^(n+1) values in each, and nothing is
    left out."""
    network = partial(hf.TransformersLM, name=str(gpt2), rank=0)
    trainer = fit(method(network=network, optimizer=adam(), bits=2), tmp_path, answers_of_bytes())
    made = trainer.method
    names = {name for name, weight in made.network.named_parameters() if weight.ndim > 1}
    assert set(made.codec.names) == names
    assert sum("c_attn" in name or "c_fc" in name or "c_proj" in name for name in names) == 4
    assert "not quantised" not in caplog.text
    deployed = dict(made.deploy().named_parameters())
    bits = made.allocate(made.mean_budget())
    for name, n in zip(made.codec.names, bits, strict=True):
        assert len(deployed[name].unique()) <= 2 ** (n + 1)


def test_the_adapters_of_gpt2_are_quantised(gpt2: Path, tmp_path: Path):
    method = FedMPQ(network=partial(hf.TransformersLM, name=str(gpt2), rank=2), optimizer=adam())
    made = fit(method, tmp_path, answers_of_bytes()).method
    assert len(made.codec.names) == 8
    assert not made.codec.rest.size


def test_directions_of_pefts_adalora_are_dropped(gpt2: Path, tmp_path: Path):
    network = partial(hf.TransformersLM, name=str(gpt2), rank=3, adapter="adalora")
    method = FedAdaLoRA(network=network, optimizer=adam(), final_rank=1.0, warmup=0, fall=1)
    made = fit(method, tmp_path, answers_of_bytes()).method
    kept = made.server["kept"].view(len(made.factors), 3)
    assert int(kept.sum()) == len(made.factors)
    tensors = made.layout.unpack(made.server["weights"])
    for (rows, scales, columns), of_layer in zip(made.factors.values(), kept.bool(), strict=True):
        assert tensors[scales][:, 0].ne(0).tolist() == of_layer.tolist()
        assert (
            tensors[rows].any(1).tolist() == tensors[columns].any(0).tolist() == of_layer.tolist()
        )


@pytest.mark.parametrize("controller", ["hest", "tabs", "bhsp", "none"])
def test_under_a_budget_each_prompt_gets_the_options_that_it_gets_alone(
    folder: Path, controller: str
):
    """transformers moves padding to the left of prompts, where options of a padded batch would be
    of other tokens."""
    network = hf.TransformersLM(50, str(folder), rank=4, adapter="spectral")
    options = {
        name: MeasuredCost(CostLine(a, b), CostLine(a, b))
        for name, a, b in (("off", 1.0, 2.0), ("int8", 8.0, 1.0), ("high", 2.0, 6.0))
    }
    layers = add_switches(network)
    table = CostTable(
        "NVML", "by hand", "adapter", 64, {layer.name: options for layer in layers}, options["off"]
    )
    controllers = {
        "hest": lambda: HESTController(24, len(layers), 4),
        "tabs": lambda: TABSController([layer.shape[0] for layer in layers]),
        "bhsp": lambda: BHSPController(len(layers)),
        "none": lambda: None,
    }
    budgeted = BudgetedNetwork(
        network, layers, controllers[controller](), Device(table, 0.8)
    ).eval()
    with torch.no_grad():
        for weight in budgeted.parameters():
            if weight.requires_grad:
                weight += torch.randn(weight.shape, generator=torch.Generator().manual_seed(3))
    ids, mask = prompts()
    target = torch.full_like(ids, -100)
    budgeted.expect(target)
    together = budgeted.generate(ids, mask, max_new_tokens=4)
    measured = budgeted.measured()
    assert all(values.shape == (len(LENGTHS),) for values in measured.values())
    for row, length in enumerate(LENGTHS):
        budgeted.expect(target[:1])
        assert torch.equal(
            budgeted.generate(ids[row : row + 1, :length], None, max_new_tokens=4)[0], together[row]
        )
        for name, values in budgeted.measured().items():
            assert float(values) == float(measured[name][row])
