"""HEST and its baselines on small federations: budgets by hand, what they must equal, and what
never travels."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from budgeted import GROUPS, built, costs, loss_in_use, told_loss
from lightning.fabric import Fabric
from outcomes import rows_of
from refusals import refused
from tiny_language import fit, method_of, records, written_then_read

from callbacks import OptionFigure
from fl_lightning.clock import Clock, FedBuff, SameDevice
from fl_lightning.energy import shipped_table
from fl_lightning.energy.budgets.device import Device
from fl_lightning.energy.budgets.passes import Lengths, expected_joules
from fl_lightning.energy.costs import Removal
from fl_lightning.energy.options import OPTIONS
from fl_lightning.energy.switched import switched
from fl_lightning.hooks import Meter
from fl_lightning.methods import HEST, FedAvg
from fl_lightning.models import LlamaTiny
from fl_lightning.probing.by_kind import by_kind
from fl_lightning.probing.noisy_prompts import noisy_prompts

HIGH = math.exp(2) / (1 + math.exp(2))
"""Probability of *high* at the start, beside one other option."""


def disturb(method, size: float = 3.0, seed: int = 0):
    """Give adapters and controller random values, so that options differ from token to token."""
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in method.network.named_parameters():
            if weight.requires_grad:
                scale = size if name.startswith("controller") else 0.3
                weight += scale * torch.randn(weight.shape, generator=draws)
    method.server["weights"] = method.layout.read(method.network)
    return method


def last_round(trainer) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in rows_of(trainer.run_dir / "metrics.csv")[-1].items()
        if value
    }


def some(data, count: int = 8):
    index = torch.arange(count)
    return data.inputs("test", index), data.test_target[index]


def ids_of(inputs):
    return inputs if isinstance(inputs, torch.Tensor) else inputs["input_ids"]


def evaluated(method, data, client: int = 0, generate: bool = False):
    """Measurements of some test sequences on a client's device, which are read and perhaps
    continued."""
    network = method.deploy(data.client(client)).eval()
    inputs, target = some(data)
    with torch.no_grad():
        network.expect(target)
        outputs = network(inputs)
        if generate:
            lengths = Lengths.of(target, ids_of(inputs).shape[1])
            mask = torch.arange(ids_of(inputs).shape[1]) < lengths.prompts.unsqueeze(1)
            network.generate(ids_of(inputs), mask, max_new_tokens=6, eos=257, pad=258)
    return outputs, network.measured(), Lengths.of(target, ids_of(inputs).shape[1])


# Equivalences


def test_an_infinite_budget_is_fedavg_bit_for_bit(tmp_path):
    plain, free = method_of(FedAvg), method_of(HEST, budget=math.inf)
    for name, method in {"plain": plain, "free": free}.items():
        fit(method, tmp_path / name)
    assert torch.equal(plain.server["weights"], free.server["weights"])


def test_without_a_budget_rounds_may_be_asynchronous(tmp_path):
    """Nobody keeps anything then, nor where nothing decides."""
    given = {"clock": Clock(devices=SameDevice()), "rounds": FedBuff(2, 2)}
    plain, free = method_of(FedAvg), method_of(HEST, budget=math.inf)
    for name, method in {"plain": plain, "free": free}.items():
        fit(method, tmp_path / name, **given)
    assert torch.equal(plain.server["weights"], free.server["weights"])
    assert built()[0].keeps_state
    assert not built(controller="none")[0].keeps_state


def test_without_a_controller_the_adapters_are_fedavgs_and_energy_is_measured(tmp_path):
    plain, measured = (
        method_of(FedAvg),
        method_of(HEST, controller="none", costs=costs(), scope="adapter", budget=0.9),
    )
    fit(plain, tmp_path / "plain")
    row = last_round(fit(measured, tmp_path / "measured"))
    assert torch.equal(plain.server["weights"], measured.server["weights"])
    assert row["energy/joules"] == pytest.approx(row["energy/joules_high"])
    assert row["energy/over_budget"] > 0
    assert row["energy/clamped"] == row["energy/refused"] == 0


def test_at_the_start_high_is_the_network_without_switches():
    method, data = built()
    with torch.no_grad():
        method.network.controller.bias[:, 1] = 50.0
    method.server["weights"] = method.layout.read(method.network)
    inputs, target = some(data)
    network = method.deploy(data.client(0)).eval()
    method.budgeted.on.share = 1.0
    network.expect(target)
    with torch.no_grad():
        assert torch.allclose(network(inputs), network.network(inputs), atol=1e-6)


# The energy of a step


@pytest.mark.parametrize("budget_of", ["layers", "network"])
def test_expected_energy_of_a_step_by_hand(budget_of):
    method, data = built(controller="bhsp", budget_of=budget_of)
    inputs, target = some(data)
    lengths = Lengths.of(target, ids_of(inputs).shape[1])
    method.receive(method.broadcast(data.client(0)), data.client(0))
    _, energy = method.budgeted.sample(inputs, target, method.stream("options"), 2 / 3)
    found = []
    for p, new in zip(lengths.prompts.tolist(), lengths.new.tolist(), strict=True):
        assert p >= 7  # int8 is cheaper than off, which is therefore no option of these prompts
        used = [1 - (1 - chance) ** p for chance in (1 - HIGH, HIGH)]  # by one token or more
        prompt = 4 * (8 * used[0] + (1 - HIGH) * p + 2 * used[1] + HIGH * 6 * p)
        # and int8 costs more than high in a step of one token
        one = 4 * ((1 - HIGH) * 3 + HIGH * 8)
        rest, of_one = (10 + p, 11) if budget_of == "network" else (0, 0)
        budget = 0.8 * (4 * (2 + 6 * p) + rest + new * (4 * 8 + of_one))
        found.append((prompt + rest + new * (one + of_one)) / budget)
    assert float(energy.detach()) == pytest.approx(sum(found) / len(found), rel=1e-5)


def test_the_expected_energy_of_certain_choices_is_what_they_cost():
    """By the measured curves of the shipped table; nothing of it is a line."""
    device = Device(shipped_table("llama_tiny"), 0.7)
    lengths = Lengths(torch.tensor([5, 40, 1]), torch.tensor([3, 0, 7]))
    draws = torch.Generator().manual_seed(0)
    choices = 2 * torch.randint(0, 2, (3, 44, device.groups), generator=draws)  # off or high
    chances = torch.nn.functional.one_hot(choices, 3).double()
    found = expected_joules(device, lengths, chances)
    for row, (prompt, end) in enumerate(
        zip(lengths.prompts.tolist(), lengths.ends.tolist(), strict=True)
    ):
        assert float(found[row]) == pytest.approx(
            device.spent(choices[row, :end], prompt, "mean"), rel=1e-12
        )


def test_the_energy_has_a_gradient_and_reaches_the_controller_alone():
    method, data = built()
    inputs, target = some(data)
    method.receive(method.broadcast(data.client(0)), data.client(0))
    _, energy = method.budgeted.sample(inputs, target, method.stream("options"), 2 / 3)
    energy.backward()
    moved = {
        name for name, p in method.network.named_parameters() if p.grad is not None and p.grad.any()
    }
    assert moved == {
        "controller.readout",
        "controller.bias",
    }  # the projection follows once readouts are not 0


def test_the_price_climbs_above_the_budget_and_never_falls_below_zero():
    method, data = built(price_lr=0.5)
    client = data.client(1)
    method.receive(method.broadcast(client), client)
    for energy, price in ((1.4, 0.2), (1.2, 0.3), (0.8, 0.2), (0.2, 0.0), (1.1, 0.05)):
        method.on_train_batch_end({"energy": torch.tensor(energy)}, None, 0)
        assert float(method.price) == pytest.approx(price, abs=1e-6)
    upload = method.upload(client)
    assert set(upload.entries if hasattr(upload, "entries") else upload) == {"examples", "weights"}
    assert float(client.state["price"]) == pytest.approx(0.05)
    method.receive(method.broadcast(client), data.client(2))
    assert method.price == 0


# Budgets


@pytest.mark.parametrize("controller", ["hest", "bhsp"])
@pytest.mark.parametrize(("scope", "budget_of"), [("adapter", "layers"), ("model", "network")])
@pytest.mark.parametrize("budget", [0.5, 0.7, 0.95])
def test_no_sequence_costs_more_than_its_budget_whatever_the_controller_says(
    controller, scope, budget_of, budget
):
    method, data = built(
        controller=controller, scope=scope, costs=costs(scope), budget=budget, budget_of=budget_of
    )
    used = set()
    for seed in range(4):
        disturb(method, 10.0, seed)
        _, found, _ = evaluated(method, data, generate=True)
        assert not found["energy/over_budget"].any()
        assert not found["energy/refused"].any()
        assert (found["energy/joules"] <= budget * found["energy/joules_high"] + 1e-12).all()
        assert (found["energy/spent"] <= found["energy/granted"]).all()
        used.add(round(float(found["energy/joules"].sum()), 9))
    assert budget < 0.9 or len(used) > 1


def test_tabs_chooses_in_its_layers_and_nothing_holds_its_budget():
    method, data = built(controller="tabs", budget=0.6)
    _, found, _ = evaluated(method, data, generate=True)
    # its bias prefers high
    assert torch.allclose(found["energy/joules"], found["energy/joules_high"])
    assert (found["energy/over_budget"] == 2).all()  # read, and generated
    with torch.no_grad():
        method.network.controller.bias -= 4.0
    method.server["weights"] = method.layout.read(method.network)
    _, found, lengths = evaluated(method, data)
    off = 4e-3 * ((1 + 2 * lengths.prompts) + 3 * lengths.new)
    assert torch.allclose(found["energy/joules"], off.double())
    assert not found["energy/over_budget"].any()


def test_joules_are_those_of_the_options_taken_by_hand():
    method, data = built(controller="bhsp", budget=5.0)
    with torch.no_grad():
        method.network.controller.bias[:, 0] = 50.0  # int8, where there is one
    method.server["weights"] = method.layout.read(method.network)
    _, found, lengths = evaluated(method, data)
    prompts, new = lengths.prompts.double(), lengths.new.double()
    assert torch.allclose(found["energy/joules"], 4e-3 * ((8 + prompts) + 8 * new))
    assert torch.allclose(found["energy/joules_high"], 4e-3 * ((2 + 6 * prompts) + 8 * new))
    rest = 1e-3 * (10 + prompts + 11 * new)
    assert torch.allclose(found["energy/joules_model"], found["energy/joules"] + rest)
    assert torch.allclose(found["energy/spent"], 1.5 * found["energy/joules"])
    assert torch.allclose(found["energy/granted"], 5.0 * 1.5 * found["energy/joules_high"])
    assert (found["energy/controller_parameters"] == 8).all()  # two for each of four layers


def test_a_budget_below_the_cheapest_options_refuses_everything():
    method, data = built()
    method.devices[0].share = 0.05
    outputs, found, _ = evaluated(method, data)
    assert found["energy/refused"].all()
    assert not outputs.any()
    assert not found["energy/joules"].any()
    assert not found["energy/spent"].any()
    assert torch.allclose(found["energy/granted"], 0.05 * 1.5 * found["energy/joules_high"])
    inputs, _ = some(data)
    network = method.deploy(data.client(0)).eval()
    answers = network.generate(ids_of(inputs)[:, :9], None, max_new_tokens=3, eos=257, pad=258)
    assert (answers == 257).all()


@pytest.mark.parametrize("controller", ["hest", "tabs", "bhsp"])
def test_a_sequence_takes_the_options_that_it_takes_alone(controller):
    method, data = built(controller=controller, budget=0.7)
    disturb(method)
    network, (inputs, target) = method.deploy(data.client(0)).eval(), some(data)
    together, lengths = network.options_of(ids_of(inputs), target)
    assert len(together.unique()) > 1
    for row, end in enumerate(lengths.ends.tolist()):
        alone, _ = network.options_of(
            ids_of(inputs)[row : row + 1, :end], target[row : row + 1, :end]
        )
        assert torch.equal(alone[0], together[row, :end])


@pytest.mark.parametrize("controller", ["hest", "tabs", "bhsp"])
def test_reading_an_answer_takes_the_options_of_writing_it(controller):
    method, data = built(controller=controller, budget=0.7)
    disturb(method)
    network, (inputs, target) = method.deploy(data.client(0)).eval(), some(data, 4)
    network.expect(target)
    prompts = ids_of(inputs)[:, :9]
    written_then_read(network, prompts, max_new_tokens=5)


def test_what_a_token_takes_does_not_depend_on_later_tokens():
    method, data = built(budget=0.7)
    disturb(method)
    network = method.deploy(data.client(0)).eval()
    tokens = torch.randint(0, 256, (6, 20), generator=torch.Generator().manual_seed(1))
    target = torch.full_like(tokens, -100)
    target[:, 9:] = 0
    other = tokens.clone()
    other[:, 15:] = (other[:, 15:] + 7) % 256
    first, _ = network.options_of(tokens, target)
    second, _ = network.options_of(other, target)
    assert torch.equal(first[:, :15], second[:, :15])
    assert not torch.equal(first[:, 15:], second[:, 15:])


@pytest.mark.slow
def test_a_network_of_transformers_keeps_its_budget_and_writes_what_it_would_alone(tmp_path):
    """Its prompts are padded on the left, so they are continued one by one."""
    transformers, _ = pytest.importorskip("transformers"), pytest.importorskip("peft")
    shape = {
        "vocab_size": 259,
        "hidden_size": 32,
        "intermediate_size": 64,
        "max_position_embeddings": 256,
    }
    layers = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**shape, **layers)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    network = f"hf:{tmp_path / 'model'}"
    parts = (
        *(f"self_attn.{p}_proj" for p in "qkvo"),
        *(f"mlp.{p}_proj" for p in ("gate", "up", "down")),
    )
    names = [f"model.base_model.model.model.layers.0.{part}" for part in parts]
    method, data = built(network=network, costs=costs(groups=names), budget=0.7)
    disturb(method)
    _, found, _ = evaluated(method, data, generate=True)
    assert not found["energy/over_budget"].any()
    assert (found["energy/joules"] <= 0.7 * found["energy/joules_high"]).all()
    deployed, (inputs, target) = method.deploy(data.client(0)).eval(), some(data, 3)
    ids, lengths = ids_of(inputs), Lengths.of(target, ids_of(inputs).shape[1])
    mask = torch.arange(ids.shape[1]) < lengths.prompts.unsqueeze(1)
    together = deployed.generate(ids, mask, max_new_tokens=4)
    for row, prompt in enumerate(lengths.prompts.tolist()):
        alone = deployed.generate(ids[row : row + 1, :prompt], None, max_new_tokens=4)
        assert torch.equal(alone[0], together[row])


# Federations


def test_slow_and_fast_devices_train_one_model(tmp_path):
    fast = costs()
    slow = costs(high=(4.0, 9.0))
    method = method_of(
        HEST, scope="adapter", costs=[fast, slow], budget=[0.5, 0.6, 0.9], price_lr=1.0
    )
    states = Keeps()
    fit(method, tmp_path, callbacks=[states])
    assert len(method.devices) == 6
    shares = [device.share for device in method.devices]
    assert shares == [0.5, 0.6, 0.9] * 2
    assert [device.table.groups[GROUPS[0]]["high"].mean for device in method.devices] == [
        table.groups[GROUPS[0]]["high"].mean for table in (fast, slow, fast, slow, fast, slow)
    ]
    assert_devices_are_told_apart(tmp_path)
    prices = {client: float(state["price"]) for client, state in states.found.items()}
    assert set(prices) == {0, 1, 2, 3}
    assert prices[0] > prices[2]  # half the energy against nine tenths of it
    assert all(set(state) == {"price"} for state in states.found.values())


def assert_devices_are_told_apart(folder):
    """clients.csv has the joules of each client on its own device, by its own budget."""
    (path,) = folder.rglob("clients.csv")
    with path.open() as file:
        found = {int(row["client"]): row for row in csv.DictReader(file)}
    shares = {
        id: float(row["energy/granted"]) / (1.5 * float(row["energy/joules_high"]))
        for id, row in found.items()
    }
    assert len(shares) > 1  # not every client has validation examples
    assert shares == pytest.approx({id: (0.5, 0.6, 0.9)[id % 3] for id in shares})
    assert all(float(row["energy/spent"]) <= float(row["energy/granted"]) for row in found.values())


class Keeps(Meter):
    """Holds on to what clients keep."""

    def on_setup(self, context):
        self.found: dict[int, dict[str, torch.Tensor]] = {}

    def on_client_end(self, client, round, context):
        self.found[client.id] = dict(client.state)


def test_a_run_has_its_energy_and_a_figure(tmp_path):
    method = method_of(HEST, costs=costs(), scope="adapter", budget=0.7)
    row = last_round(fit(method, tmp_path, records(), callbacks=[OptionFigure()]))
    assert row["energy/over_budget"] == row["energy/refused"] == 0
    assert 0 < row["energy/joules"] <= 0.7 * row["energy/joules_high"] < row["energy/joules_model"]
    assert row["energy/joules_generated"] > 0
    assert row["energy/price"] > 0
    assert list(tmp_path.rglob("figures/options.png"))


def test_predictions_of_a_network_under_a_budget_need_no_labels():
    method, data = built()
    network = method.deploy(data.client(0)).eval()
    outputs, _, _ = evaluated(method, data)
    with torch.no_grad():
        again = network(some(data)[0])
    assert again.shape == outputs.shape


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"budget": 0.0}, "--model.budget 0.0"),
        ({"budget": []}, "--model.budget []"),
        ({"budget": [0.5, math.inf]}, "--model.budget [0.5, inf]"),
        ({"budget": 0.1}, "--model.budget 0.1 where the cheapest options cost 0."),
        ({"budget_of": "all"}, "--model.budget_of all"),
        ({"features": 0}, "--model.features 0"),
        ({"price_lr": -1.0}, "--model.price_lr"),
        ({"controller": "most"}, "--model.controller"),
        ({"costs": []}, "--model.costs []"),
        ({"costs": "nowhere.json"}, "nowhere.json"),
        ({"costs": "nothing"}, "no table of costs"),
        ({"scope": "model"}, "--model.scope model with a table of costs of the scope adapter"),
    ],
)
def test_bad_settings_are_refused(settings, said):
    with refused(said):
        built(**settings)


def test_a_table_of_another_network_is_refused():
    other = costs()
    groups = {**other.groups, "layers.9.mlp": other.groups[GROUPS[0]]}
    wrong = type(other)(other.label, other.device, other.scope, other.context, groups, other.rest)
    with refused("a table of 5 groups"):
        built(costs=wrong)


def test_a_table_of_other_adapters_is_refused():
    """As of a study whose LoRA kept the spectral adapters of the configuration that it changed."""
    network = partial(LlamaTiny, adapter="spectral", rank=8)
    for table in ("llama_tiny_lora", "llama_tiny"):
        with refused("spectral of rank 8 with a table of costs that was measured with"):
            built(network=network, costs=table, scope="model", controller="none")
    for adapter in ("lora", "ffa", "pissa"):
        built(
            network=partial(LlamaTiny, adapter=adapter, rank=8),
            costs="llama_tiny_lora",
            scope="model",
        )


def test_layers_that_are_computed_twice_in_a_step_are_refused():
    class Checkpointed(LlamaTiny):
        gradient_checkpointing = True

    with refused("gradient_checkpointing true"):
        built(network=Checkpointed)


def test_options_have_one_order():
    assert OPTIONS == ("off", "int8", "high")


# Found by attacks


def test_a_budget_of_all_the_energy_at_high_changes_nothing():
    """Costs are rounded up to whole units and budgets down: were they rounded apart, a share of 1
    would buy one option less than all of them."""
    method, data = built(budget=1.0)
    with torch.no_grad():
        method.network.controller.bias[:, 1] = 50.0
    method.server["weights"] = method.layout.read(method.network)
    _, found, _ = evaluated(method, data, generate=True)
    assert not found["energy/clamped"].any()
    assert torch.allclose(found["energy/joules"], found["energy/joules_high"])
    assert not found["energy/over_budget"].any()


def test_a_price_is_of_shares_of_the_budget_whatever_the_quantile():
    """Where all quantiles are three times as high, so is the budget, and every choice is the
    same."""
    taken = []
    for q99 in (1.0, 3.0):
        method, data = built(costs=costs(q99=q99), budget=5.0)
        disturb(method, 1.0)
        method.deploy(data.client(0)).eval()
        method.budgeted.price = 200.0
        taken.append(method.budgeted.options_of(*some(data))[0])
    assert len(taken[0].unique()) == 3
    assert torch.equal(*taken)


def test_what_follows_the_end_of_an_answer_is_padding():
    method, data = built(budget=1.5)
    network = method.deploy(data.client(0)).eval()
    ids = torch.randint(0, 256, (4, 9), generator=torch.Generator().manual_seed(0))
    eos = int(network.network.generate(ids, None, max_new_tokens=3)[0, 1])
    expected = network.network.generate(ids, None, max_new_tokens=5, eos=eos, pad=258)
    assert (expected == 258).any()
    assert torch.equal(network.generate(ids, None, max_new_tokens=5, eos=eos, pad=258), expected)


@pytest.mark.parametrize("controller", ["hest", "tabs", "bhsp"])
def test_under_autocast_answers_are_written_and_joules_keep_their_digits(controller):
    method, data = built(controller=controller)
    disturb(method)
    method.receive(method.broadcast(data.client(0)), data.client(0))
    energies = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            energy = method.budgeted.sample(*some(data), method.stream("options"), 2 / 3)[1]
        assert energy.dtype == torch.float32
        energies.append(float(energy.detach()))
    assert energies[0] == pytest.approx(energies[1], rel=0.01)  # TABS reads what is rounded
    with torch.autocast("cpu", torch.bfloat16):
        _, found, _ = evaluated(method, data, generate=True)
    assert (found["energy/joules_generated"] > 0).all()


def test_joules_of_two_sources_are_not_averaged():
    counted = replace(costs(), label="NVML")
    with refused("figures of NVML and of modelled"):
        built(costs=[costs(), counted])


def test_a_run_never_takes_what_a_table_has_removed():
    removed = tuple(Removal(group, "int8") for group in GROUPS)
    method, data = built(costs=replace(costs(), removed=removed), budget=5.0)
    with torch.no_grad():
        method.network.controller.bias[:, 0] = 50.0
    method.server["weights"] = method.layout.read(method.network)
    inputs, target = some(data)
    options, _ = method.deploy(data.client(0)).eval().options_of(inputs, target)
    assert not (options == OPTIONS.index("int8")).any()


def test_a_budget_is_refused_by_the_lengths_of_the_test_set():
    """The cheapest options cost a smaller share of longer prompts, which these data do not have."""
    data = records(generate=False)
    data.prepare_data()
    data.setup("fit")
    lengths = Lengths.of(data.test_target, data.test_target.shape[1])
    shares = []
    for p, new in zip(lengths.prompts.tolist(), lengths.new.tolist(), strict=True):
        shares.append((min(1 + 2 * p, 8 + p) + 3 * new) / (2 + 6 * p + 8 * new))
    assert min(shares) - 0.01 > (8 + 256) / (2 + 6 * 256)
    with refused(f"--model.budget {min(shares) - 0.01:g}"):
        built(data, budget=min(shares) - 0.01)
    built(data, budget=min(shares) + 0.01)


def test_an_answer_is_written_with_weights_that_are_quantised_once(monkeypatch):
    """A table of costs is of layers that keep their weights in int8."""
    made = []
    original = switched.quantised_rows
    monkeypatch.setattr(
        switched, "quantised_rows", lambda weight: made.append(weight) or original(weight)
    )
    method, data = built(controller="bhsp", budget=5.0, costs=costs(high=(20.0, 60.0)))
    with torch.no_grad():
        method.network.controller.bias[:, 0] = 50.0
    method.server["weights"] = method.layout.read(method.network)
    network = method.deploy(data.client(0)).eval()
    network.generate(ids_of(some(data)[0])[:, :9], None, max_new_tokens=5)
    assert len(made) == len(GROUPS)


def test_the_default_table_is_of_the_adapters():
    """The groups of all adapters of a network have the same names, and other costs."""

    def all_high_of(**settings):
        method, _ = built(network=partial(LlamaTiny, **settings), costs=None, scope="model")
        return method.devices[0].all_high(64, 8, "mean")

    spectral, lora = (
        Device(shipped_table(name), 1.0).all_high(64, 8, "mean")
        for name in ("llama_tiny", "llama_tiny_lora")
    )
    assert all_high_of(adapter="spectral", rank=96) == pytest.approx(spectral)
    assert all_high_of(adapter="lora", rank=8) == pytest.approx(lora)
    assert abs(spectral / lora - 1) > 0.01
    for settings in ({"adapter": "lora", "rank": 4}, {"adapter": "svft", "rank": 96}):
        with refused("without --model.costs", "--calibrate"):
            all_high_of(**settings)


def test_probes_count_what_evaluations_count():
    method, data = built(budget=0.7)
    disturb(method)
    everything = torch.arange(len(data.test_target))
    network = method.deploy(data.client(0))
    subject = SimpleNamespace(
        data=data,
        method=method,
        fabric=Fabric(accelerator="cpu"),
        networks=lambda: [(network, everything)],
        seed=0,
    )
    found = by_kind(subject).metrics
    with torch.no_grad():
        network.eval().expect(data.test_target)
        network(data.inputs("test", everything))
    clamped = float(network.measured()["energy/clamped"].sum())
    assert clamped > 1  # a mean would be less
    assert sum(value for name, value in found.items() if name.endswith("energy/clamped")) == clamped
    noisy = noisy_prompts(subject).metrics
    assert noisy["typos/energy/clamped"] > 1


def test_the_loss_that_a_client_tells_is_the_one_of_evaluation(monkeypatch):
    """At its own price; and no more sequences are read at once than there."""
    method, data = built(budget=0.7)
    disturb(method)
    client = replace(data.client(0), state={"price": torch.tensor(3.0)})
    assert loss_in_use(method, data, client) != loss_in_use(method, data, data.client(0))
    expected, read, sizes = loss_in_use(method, data, client), data.inputs, []
    monkeypatch.setattr(type(data), "evaluation_batch", 2)
    monkeypatch.setattr(data, "inputs", lambda split, i: sizes.append(len(i)) or read(split, i))
    method.deploy()
    assert told_loss(method, data, client) == pytest.approx(expected, rel=1e-6)
    assert max(sizes) == 2
