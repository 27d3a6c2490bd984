"""Tables of merged adapters, of bfloat16, of networks of transformers, and of one common rest."""

from __future__ import annotations

import itertools
import json
import shlex
import sys
from dataclasses import asdict, replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from budgeted import built, costs
from places import BENCHMARKS, DOCS
from refusals import refused
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fl_lightning.__main__ import main
from fl_lightning.energy import (
    ModelledMeter,
    expected_energy,
    from_json,
    read_table,
    shipped_table,
    to_json,
)
from fl_lightning.energy.budgets.device import Device
from fl_lightning.energy.calibration import calibrate
from fl_lightning.energy.calibration.calibrate import Subject
from fl_lightning.energy.calibration.networks import adapted_network, calibration_advice
from fl_lightning.energy.calibration.samples import Measured, tables_of
from fl_lightning.energy.calibration.steps import steps_of
from fl_lightning.energy.calibration.works import (
    LinearShape,
    prefix_of,
    step_work,
    switched_copy,
    without_groups,
)
from fl_lightning.energy.switched import add_switches, merge_adapters
from fl_lightning.energy.switched.kinds import kind_and_rank
from fl_lightning.errors import InputError
from fl_lightning.models import LlamaTiny
from fl_lightning.models.adapters import ADAPTERS

LABEL = "modelled: CPU seconds x 15 W"


@pytest.fixture
def few_tokens(monkeypatch):
    monkeypatch.setattr(calibrate, "KNOTS", (1, 2, 4))
    monkeypatch.setattr(calibrate, "HELD_OUT", (3,))


def disturbed(network):
    """The network with random values in what is trained, so that its adapters do something."""
    draws = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in network.parameters():
            if weight.requires_grad:
                weight += 0.1 * torch.randn(weight.shape, generator=draws)
    return network


class Products(TorchFunctionMode):
    """Counts the products of layers."""

    count = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.count += function in (
            F.linear,
            torch.matmul,
            torch.Tensor.matmul,
            torch.Tensor.__matmul__,
        )
        return function(*args, **(kwargs or {}))


# Merged adapters


@pytest.mark.parametrize("kind", ADAPTERS)
def test_a_merged_network_computes_the_adapted_one_with_one_product_a_layer(kind):
    network = disturbed(LlamaTiny(259, rank=4, adapter=kind)).eval()
    ids = torch.randint(0, 256, (2, 7), generator=torch.Generator().manual_seed(1))
    names = list(switched_copy(network, "model")[1])
    with torch.no_grad():
        expected = network(ids)
        merge_adapters(network)
        torch.testing.assert_close(network(ids), expected, rtol=1e-3, atol=1e-3)
    assert not [weight for weight in network.parameters() if weight.requires_grad]
    _, layers = switched_copy(network, "model")
    assert list(layers) == names
    with torch.no_grad(), Products() as products:
        for layer in layers.values():
            layer.execute("high", torch.zeros(1, layer.shape[0]))
    assert products.count == len(layers) == 16


def test_what_is_merged_is_an_adapter():
    with refused("without adapted linear layer"):
        merge_adapters(LlamaTiny(259, rank=0))
    with refused("scope adapter"):  # W alone is no longer there
        switched_copy(adapted_network("llama_tiny", "merged"), "adapter")


@pytest.mark.parametrize("controller", ["none", "hest"])
def test_the_merged_table_is_taken_by_its_name(controller):
    method, _ = built(
        network=partial(LlamaTiny, rank=8),
        costs="llama_tiny_merged",
        scope="model",
        controller=controller,
    )
    table = shipped_table("llama_tiny_merged")
    found = method.devices[0].all_high(40, 10, "mean")
    assert found == pytest.approx(
        float(table.tensors(40)[:, 2].sum() + 10 * table.tensors(1)[:, 2].sum())
    )
    assert (table.scope, table.high) == ("model", "float32")


# The precision of high


def test_a_table_says_the_precision_of_high_and_one_of_before_is_float32():
    table = replace(costs(), high="bfloat16")
    document = json.loads(to_json(table))
    assert from_json(json.dumps(document)) == table
    del document["high"]
    assert from_json(json.dumps(document)).high == "float32"


def test_hest_refuses_a_table_of_another_precision():
    built(high="bfloat16", costs=replace(costs(), high="bfloat16"))
    for given, high in ((costs(), "bfloat16"), (replace(costs(), high="bfloat16"), "float32")):
        with refused(f"--model.high {high} with a table of costs whose *high* is {given.high}"):
            built(high=high, costs=given)


def test_a_calibration_in_bfloat16_computes_in_bfloat16(few_tokens, tmp_path):
    out = tmp_path / "costs.json"
    flags = [
        "--calibrate",
        "--high",
        "bfloat16",
        "--seconds",
        "0.1",
        "--context",
        "4",
        "--out",
        str(out),
    ]
    assert main(["energy", *flags]) == 0
    assert read_table(out).high == "bfloat16"
    _, layers = switched_copy(LlamaTiny(259), "adapter", "bfloat16")
    seen = []

    class Seen(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is F.linear:
                seen.append(args[0].dtype)
            return function(*args, **(kwargs or {}))

    with torch.no_grad(), Seen():
        layers["layers.0.mlp.down_proj"].execute("high", torch.zeros(2, 256))
    assert seen == [torch.bfloat16]


# One rest


def samples_of(rest: float, high: float, step: float) -> dict:
    """Joules of two groups of 4 x 4, which do not depend on the number of tokens; everything else
    costs ``rest``, and a step at high ``step``."""
    found = {}
    for n in (1, 2, 3):
        for option, alone in (("off", 1.0), ("int8", 2.0), ("high", high)):
            found[f"4x4 {option}", n] = np.full(6, alone)
            found[f"step {option}", n] = np.full(6, rest + 2 * alone)
        found["step high", n] = np.array([rest + 2 * high] * 5 + [step])
        if n != 3:
            found["rest", n] = np.full(6, rest)
    return found


def test_tables_that_are_measured_together_have_one_rest_by_hand():
    """A step at high of the second has a quantile of 30, 14 more than its layers: the rest of
    both."""
    shapes = dict.fromkeys(("a", "b"), LinearShape(4, 4))
    first = Measured(samples_of(10.0, 3.0, 16.0), shapes, "adapter")
    second = Measured(samples_of(10.0, 8.0, 30.0), shapes, "model", "bfloat16")
    found = tables_of({"first": first, "second": second}, LABEL, 8)
    tables = [one.table for one in found.values()]
    assert tables[0].rest == tables[1].rest
    assert tables[0].fixed(2) == pytest.approx(10)
    assert tables[0].fixed(2, "q99") == pytest.approx(14)
    assert [(one.scope, one.high) for one in tables] == [
        ("adapter", "float32"),
        ("model", "bfloat16"),
    ]
    assert tables[1].all_high(2, "q99") == pytest.approx(30)
    alone = tables_of({"first": first}, LABEL, 8)["first"]
    assert alone.errors["4x4 int8"] == {n: pytest.approx(0) for n in (1, 3)}


def test_a_merged_network_has_an_amount_for_each_option_by_hand():
    """In their network, layers cost 4 more at int8 and 1 more at high: 2.5 for both, or each its
    own."""
    shapes, samples = dict.fromkeys(("a", "b"), LinearShape(4, 4)), samples_of(10.0, 3.0, 18.0)
    for n in (1, 2, 3):
        samples["step int8", n] = np.full(6, 10.0 + 2 * (2.0 + 4.0))
        samples["step high", n] = np.full(6, 10.0 + 2 * (3.0 + 1.0))
    found = {
        merged: tables_of({"": Measured(samples, shapes, "model", merged=merged)}, LABEL, 8)[
            ""
        ].table
        for merged in (False, True)
    }
    assert found[False].tensors(2)[0].tolist() == pytest.approx([1.0, 4.5, 5.5])
    assert found[True].tensors(2)[0].tolist() == pytest.approx([1.0, 6.0, 4.0])


def test_networks_of_other_groups_have_no_common_rest():
    subjects = {
        "all": Subject(LlamaTiny(259)),
        "some": Subject(LlamaTiny(259, targets=["qkv_proj"])),
    }
    with refused("all and some with other groups"):
        calibrate.calibrate_together(subjects, ModelledMeter(15), 0.1)


@pytest.mark.slow
@pytest.mark.essential
def test_the_shipped_tables_are_made_in_one_go(few_tokens, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import shipped_tables

    monkeypatch.setattr(
        sys, "argv", ["", "--seconds", "0.1", "--context", "4", "--out", str(tmp_path)]
    )
    assert shipped_tables.main() in (0, 1)
    assert "largest errors: llama_tiny " in capsys.readouterr().out
    tables = {path.stem: read_table(path) for path in tmp_path.iterdir()}
    assert set(tables) == set(shipped_tables.TABLES)
    assert len({json.dumps(asdict(table.rest)) for table in tables.values()}) == 1
    for name, (_, _, scope) in shipped_tables.TABLES.items():
        assert tables[name].scope == shipped_table(name).scope == scope
        assert list(tables[name].groups) == list(shipped_table(name).groups)


# Networks of transformers


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("peft")
    shape = {
        "vocab_size": 259,
        "hidden_size": 32,
        "intermediate_size": 48,
        "max_position_embeddings": 256,
    }
    layers = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    path = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, **layers)).save_pretrained(path)
    return path


@pytest.mark.parametrize("context", [3, 8])
@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_a_step_of_transformers_is_the_end_of_a_whole_pass(folder, tmp_path, context, positions):
    name = folder
    if positions == "learned":
        transformers = pytest.importorskip("transformers")
        config = transformers.GPTNeoConfig(
            vocab_size=259, hidden_size=16, num_layers=2, num_heads=2, max_position_embeddings=32,
            attention_types=[[["global", "local"], 1]], window_size=4, intermediate_size=32,
        )  # fmt: skip
        name = tmp_path / "neo"
        transformers.GPTNeoForCausalLM(config).save_pretrained(name)
    network = adapted_network(f"hf:{name}")
    assert steps_of(network).longest == (32 if positions == "learned" else None)
    with torch.inference_mode():
        prefix = prefix_of(network, 3, context)
        first, again = (step_work(network, prefix)() for _ in range(2))
        torch.testing.assert_close(first, network(prefix.ids)[:, -1])
        assert torch.equal(first, again), "the cache of earlier tokens is not written into"
        switched, layers = switched_copy(network, "model")
        high = step_work(switched, prefix, "high", len(layers))()
        torch.testing.assert_close(high, first)
        empty = without_groups(switched)
        off = step_work(switched, prefix, "off", len(layers))()
        torch.testing.assert_close(step_work(empty, prefix)(), off)


def test_networks_whose_steps_are_not_known_are_refused(folder):
    with refused("costs of a Sequential", "--network llama_tiny"):
        steps_of(torch.nn.Sequential())
    steps = steps_of(adapted_network(f"hf:{folder}"))
    steps.model = lambda **settings: SimpleNamespace(logits=None)  # as a state-space model does
    with refused("which returns no cache of layers"):
        steps.read(torch.zeros(1, 3, dtype=torch.int64))


@pytest.mark.parametrize("kind", ["lora", "spectral", "adalora", "merged"])
def test_hest_runs_on_a_table_of_its_network(folder, kind, few_tokens, tmp_path):
    """The groups are HEST's, and a network whose table is missing is told the command that makes
    it."""
    out, network = tmp_path / "costs.json", f"hf:{folder}"
    flags = ["--network", network, "--adapter", kind, "--rank", "4", "--scope", "model"]
    assert (
        main(["energy", "--calibrate", "true", *flags, "--seconds", "0.1", "--out", str(out)]) == 0
    )
    from fl_lightning.models.language.hf import TransformersLM

    adapter = "lora" if kind == "merged" else kind
    maker = partial(TransformersLM, name=str(folder), rank=4, adapter=adapter)
    method, _ = built(network=maker, costs=str(out), scope="model", budget=1.0)
    table = read_table(out)
    assert list(method.devices[0].table.groups) == list(table.groups)
    assert len(table.groups) == 7
    assert table.adapter == (kind if kind == "merged" else f"{kind} of rank 4")
    if kind == "lora":
        with pytest.raises(
            InputError,
            match="lora of rank 3 with a table of costs that was measured with lora of rank 4",
        ):
            built(network=partial(maker, rank=3), costs=str(out), scope="model", budget=1.0)


def test_advice_is_a_command_that_works(folder, few_tokens, tmp_path, monkeypatch):
    from fl_lightning.models.language.hf import TransformersLM

    monkeypatch.chdir(tmp_path)
    maker = partial(TransformersLM, name=str(folder), rank=4, targets=["q_proj", "v_proj"])
    for given in (None, "nowhere.json", costs("model")):
        with pytest.raises(InputError) as error:
            built(network=maker, costs=given, scope="model", high="bfloat16")
        if isinstance(given, str) or given is None:
            command = error.value.instead.partition("python -m fl_lightning ")[2].partition(
                ", and"
            )[0]
    assert main([*shlex.split(command), "--seconds", "0.1"]) == 0
    method, _ = built(network=maker, costs="costs.json", scope="model", high="bfloat16", budget=1.0)
    assert len(method.devices[0].table.groups) == 2


@pytest.mark.parametrize(
    ("settings", "flags"),
    [
        ({"adapter": "pissa", "rank": 3}, "--adapter pissa --rank 3 --scope model --high float32"),
        (
            {"rank": 3, "targets": ["o_proj"]},
            "--adapter lora --rank 3 --scope model --high float32 --targets o_proj",
        ),
    ],
)
def test_advice_names_the_network_of_the_run(settings, flags):
    network = LlamaTiny(259, **settings)
    advice = calibration_advice(network, add_switches(network, "model"))
    words = shlex.split(advice.partition("fl_lightning ")[2].partition(", and")[0])
    start = ["energy", "--calibrate", "true", "--network", "llama_tiny"]
    assert words == [*start, *flags.split(), "--out", "costs.json"]


@pytest.mark.parametrize(("kind", "ours"), list(itertools.product(ADAPTERS, [True, False])))
def test_kinds_and_ranks_are_read_from_the_layers(kind, ours, request):
    if ours:
        network = LlamaTiny(259, adapter=kind, rank=5)
    else:
        network = adapted_network(f"hf:{request.getfixturevalue('folder')}", kind, 5)
    found = kind_and_rank(add_switches(network, "model")[0].adapted)
    assert found == ("lora" if kind == "pissa" and not ours else kind, 5)


LENGTHS = ((40, 10), (50, 20), (60, 30))
"""Tokens of prompts and answers of the sequences that the pages speak of."""


def span(values, form: str, between: str = " to ") -> str:
    """The least and the largest as the pages write them, once where they are the same."""
    return between.join(dict.fromkeys(form.format(value) for value in (min(values), max(values))))


def test_the_pages_say_what_the_shipped_tables_say():
    names = ("llama_tiny", "llama_tiny_adapter", "llama_tiny_lora", "llama_tiny_merged")
    tables = {name: shipped_table(name) for name in names}
    devices = {name: Device(table.without_useless(), 1.0) for name, table in tables.items()}
    spectral, adapter, lora, merged = devices.values()

    def rest(device: Device) -> list[float]:
        return [
            100 * device.rest(*n) / (device.rest(*n) + device.all_high(*n, "mean")) for n in LENGTHS
        ]

    def at_high(device: Device, other: Device) -> list[float]:
        return [device.all_high(*n, "mean") / other.all_high(*n, "mean") for n in LENGTHS]

    def cheaper(name: str, tokens: int) -> int:
        return int(tables[name].without_useless(tokens).available(tokens)[:, 1].sum())

    kept = {}
    for share in (0.7, 0.4):  # high for a part of the energy, and the cheapest options for the rest
        mixed = []
        for n in LENGTHS:
            least, mean = spectral.least_share(*n, "q99"), spectral.least_share(*n, "mean")
            high = (share - least) / (1 - least)
            mixed.append(high + (1 - high) * mean)
        kept[share] = span(mixed, "{:.2f}")
    ratios = tables["llama_tiny"].tensors(1, "q99").sum(0) / tables["llama_tiny"].tensors(1).sum(0)
    drawn = []
    for tokens in (11, 26, 40):
        costs = spectral.prompt_costs(tokens, "mean")
        theta = torch.tensor([0.0, 0.0, 2.0], dtype=torch.float64).expand(tokens, len(costs), 3)
        out = costs[..., -1].isinf()
        chances = theta.masked_fill(out, -torch.inf).softmax(-1)
        costs = costs.masked_fill(out.unsqueeze(-1), 0.0)
        drawn.append(float(expected_energy(chances, costs) / costs[:, 2, -1].sum()))
    said = {
        "howto/energy.md": [
            f"in {cheaper('llama_tiny', 16)} of 16 layers at 16 tokens and in {cheaper('llama_tiny', 64)} at 64",
            f"in {cheaper('llama_tiny_merged', 64)} at 64 tokens and in {cheaper('llama_tiny_merged', 256)} at 256",
            f"it is {span([*rest(spectral), *rest(adapter), *rest(lora)], '{:.0f}')} % of the mean joules",
            f"and {span(rest(merged), '{:.0f}')} % where its adapters are merged",
            f"cost {span([adapter.least_share(*n, 'q99') for n in LENGTHS], '{:.2f}')} of all layers",
            f"and {span([spectral.least_share(*n, 'q99') for n in LENGTHS], '{:.2f}')} in the scope `model`",
        ],
        "methods/hest.md": [
            f"E is {span(drawn, '{:.1f}')} times that by the shipped table",
            f"a quantile of {ratios[2]:.2f} times its mean, and *off* of {ratios[0]:.2f} times",
            f"a budget of 0.7 can have {kept[0.7]} of the mean joules",
            f"and at 0.4, {kept[0.4]}.",
            f"costs {span(at_high(merged, spectral), '{:.2f}')} of *high* of spectral adapters",
            f"and {span(at_high(merged, lora), '{:.2f}')} of LoRA's",
        ],
    }
    for page, sentences in said.items():
        text = " ".join((DOCS / page).read_text().split())
        assert [sentence for sentence in sentences if sentence not in text] == []
