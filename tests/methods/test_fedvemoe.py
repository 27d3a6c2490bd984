"""Fed-VEMoE on small federations: what it must equal, who moves which expert, bytes, births and
resume."""

from __future__ import annotations

import csv
import math
from copy import deepcopy
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from language_program import Stops
from outcomes import differences, outcome, rows_of
from refusals import refused
from tiny_language import adam, fit, method_of, records
from toy import ready

from callbacks import ByzantineClients, ExpertFigure, FactorError, NewTasks
from callbacks.meters.factor_error import _weighted
from fl_lightning.aggregation.averages import NormClipping
from fl_lightning.aggregation.receiving import check_upload
from fl_lightning.compatibility import Run, check_run
from fl_lightning.data import TokenData
from fl_lightning.engines.base import ClientResult
from fl_lightning.engines.sequential import SequentialEngine
from fl_lightning.hooks import Meter, Stressor
from fl_lightning.methods import FedAvg, FedVEMoE, LocalOnly, Oracle
from fl_lightning.methods.experts.slots import Rules
from fl_lightning.models.adapters import add_adapter
from fl_lightning.models.language import Llama, LlamaTiny
from fl_lightning.models.language.experts import Seats, factors_of
from fl_lightning.privacy.secure import SecureSum
from fl_lightning.wire import Codes, Payload, PayloadError

P, D = 496, 16
"""Values of an adapter of the tiny network, and features of a token."""


def built(data=None, **settings) -> tuple[FedVEMoE, object]:
    """A method that has been built, and its data."""
    method, data = method_of(FedVEMoE, **settings), data or records(generate=False)
    data.prepare_data()
    data.setup("fit")
    data.distribute(0, torch.device("cpu"))
    torch.manual_seed(0)
    method.build(data)
    method.round = 1
    return method, data


def with_experts(method: FedVEMoE, count: int) -> FedVEMoE:
    """Put so many different experts into the first slots."""
    experts, active = method.server["experts"].clone(), method.server["active"].clone()
    for slot in range(1, count + 1):
        experts[slot] = method.first["weights"] + 0.1 * torch.randn(
            P, generator=torch.Generator().manual_seed(slot)
        )
        active[slot] = True
    method.server |= {"experts": experts, "active": active, "prior": active.double() / count}
    return method


def upload_of(method: FedVEMoE, data, client: int) -> Payload:
    """What a client sends that takes its seats, and then changes everything by 1."""
    client = data.client(client)
    method.receive(method.broadcast(client), client)
    method._take(method.choose(data, client, data.labels(client)))
    with torch.no_grad():
        for parameter in method.network.parameters():
            if parameter.requires_grad:
                parameter += 1
    return method.upload(client)


def finals(method, folder: Path, **settings) -> torch.Tensor:
    fit(method, folder, **settings)
    state = method.server
    return state["weights"] if "weights" in state else state["experts"][0 if method.shared else 1]


class Keeps(Meter):
    """Holds on to what clients keep."""

    def on_setup(self, context):
        self.found: dict[int, dict[str, torch.Tensor]] = {}

    def on_client_end(self, client, round, context):
        self.found[client.id] = dict(client.state)


# Equivalences


@pytest.mark.parametrize("ffa", [False, True])
def test_no_experts_is_fedavg_and_so_is_one_without_a_shared_adapter(ffa, tmp_path):
    plain = finals(method_of(FedAvg, ffa=ffa), tmp_path / "plain")
    for number, settings in enumerate(({"k_max": 0}, {"k_max": 1, "shared": False, "top_m": 1})):
        method = method_of(FedVEMoE, ffa=ffa, birth="never", **settings)
        assert torch.equal(finals(method, tmp_path / str(number)), plain), settings


@pytest.mark.slow
def test_experts_are_pefts_adapters_on_a_network_of_transformers(tmp_path):
    """The same equality where base and adapter are not ours."""
    transformers, _ = pytest.importorskip("transformers"), pytest.importorskip("peft")
    shape = {
        "vocab_size": 259,
        "hidden_size": 32,
        "intermediate_size": 64,
        "max_position_embeddings": 256,
    }
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**shape, **layers)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    network = {"network": f"hf:{tmp_path / 'model'}", "optimizer": adam()}
    plain = finals(FedAvg(**network), tmp_path / "plain")
    one = FedVEMoE(**network, k_max=1, shared=False, top_m=1, birth="never")
    assert torch.equal(finals(one, tmp_path / "one"), plain)


def test_the_own_adapter_is_what_the_client_learns_alone(tmp_path):
    """LocalOnly on the same batches: those of a federation whose clients hold nothing back."""
    alone, method = method_of(LocalOnly), method_of(FedVEMoE)
    method._probe_places = lambda client: []  # type: ignore[method-assign]
    states = []
    for each in (alone, method):
        keeps = Keeps()
        fit(each, tmp_path / type(each).__name__, callbacks=[keeps])
        states.append(keeps.found)
    for id in range(4):
        assert torch.equal(states[0][id]["weights"], states[1][id]["own"])


def test_workers_change_nothing(tmp_path):
    one = finals(method_of(FedVEMoE), tmp_path / "one")
    assert torch.equal(finals(method_of(FedVEMoE), tmp_path / "two", workers=2), one)


@pytest.mark.parametrize("top_m", [2, 3])
def test_a_secure_sum_is_the_plain_one(top_m, tmp_path):
    pytest.importorskip("cryptography")
    states = []
    for name, secure in (("plain", None), ("secure", SecureSum())):
        method = method_of(FedVEMoE, k_init=3, k_max=3, top_m=top_m, wire="oblivious")
        fit(method, tmp_path / name, secure_sum=secure, max_rounds=3)
        states.append(method.server)
    for name in states[0]:
        assert torch.equal(states[0][name], states[1][name]), name


@pytest.mark.slow
@pytest.mark.essential
def test_plain_and_oblivious_messages_give_the_same_experts(tmp_path):
    settings = {"k_init": 2, "k_max": 3, "top_m": 3}
    plain, oblivious = (
        method_of(FedVEMoE, **settings),
        method_of(FedVEMoE, wire="oblivious", **settings),
    )
    fit(plain, tmp_path / "plain")
    fit(oblivious, tmp_path / "oblivious")
    for name in plain.server:
        assert torch.equal(plain.server[name], oblivious.server[name]), name


@pytest.mark.slow
@pytest.mark.essential
def test_a_secure_sum_is_the_plain_one_where_experts_are_born(tmp_path):
    """The seeds are sums too."""
    pytest.importorskip("cryptography")
    states = []
    for name, secure in (("plain", None), ("secure", SecureSum())):
        method = method_of(FedVEMoE, k_max=3, wire="oblivious", birth_gap=0.0, birth_z=0.0)
        fit(method, tmp_path / name, secure_sum=secure, max_rounds=6)
        states.append(method.server)
        assert sum(int(row["experts/born"]) for row in rounds(tmp_path / name)) >= 1
    for name in states[0]:
        assert torch.equal(states[0][name], states[1][name]), name


def test_slots_permuted_a_whole_round_is_permuted():
    """The choice, messages, means, use and prior: nothing depends on the number of a slot."""
    order = torch.tensor([0, 3, 1, 4, 2])  # what stands in each slot after the permutation
    states, sent = [], []
    for permuted in (False, True):
        method, data = built(k_max=4, top_m=3)
        with_experts(method, 4)
        if permuted:
            rows = ("experts", "routers", "prior", "active", "born", "starving")
            method.server |= {name: method.server[name][order] for name in rows}
        uploads = {id: upload_of(method, data, id) for id in range(4)}
        sent.append(
            [method.wire.trained(up, method.server["active"]).shares for up in uploads.values()]
        )
        method.aggregate(uploads)
        states.append(method.slots)
    assert len({tuple(shares) for shares in sent[0]}) > 1  # clients choose differently
    for plain, other in zip(*sent, strict=True):
        moved = {slot: plain[int(order[slot])] for slot in other}
        assert other == pytest.approx(moved)
    for name in ("experts", "routers", "prior", "mass", "starving", "active"):
        assert torch.allclose(
            getattr(states[1], name), getattr(states[0], name)[order], atol=1e-6
        ), name


# The network


def test_a_gate_without_a_router_gives_each_expert_its_share():
    """rho = 0, or gamma = inf with any rho: the layer is W x + scaling (B_0 A_0 + sum share_s B_s
    A_s) x."""
    torch.manual_seed(0)
    network = add_adapter(Llama(20, width=16, depth=1, heads=2), "lora", rank=2)
    seats = Seats(network, 2, gamma=1.0, shared=True)
    shares = torch.tensor([0.3, 0.7])
    seats.gate.log_shares = shares.log()
    with torch.no_grad():
        for layer in seats.layers:
            layer.expert_B.normal_()
            layer.common.lora_B.weight.normal_()
    ids, layer = torch.arange(12).view(2, 6), seats.layers[0]
    inputs: list[torch.Tensor] = []
    layer.register_forward_pre_hook(lambda module, given: inputs.append(given[0]))
    outputs: list[torch.Tensor] = []
    layer.register_forward_hook(lambda module, given, output: outputs.append(output))
    network(ids)
    dense = sum(s * b @ a for s, a, b in zip(shares, layer.expert_A, layer.expert_B, strict=True))
    expected = layer.common(inputs[0]) + layer.scaling * inputs[0] @ dense.T
    assert torch.allclose(outputs[0], expected, atol=1e-5)
    seats.gate.gamma = math.inf
    with torch.no_grad():
        seats.gate.router.normal_()
    network(ids)
    assert torch.allclose(outputs[1], expected, atol=1e-5)


def test_a_router_sends_tokens_to_experts():
    network = add_adapter(Llama(20, width=16, depth=1, heads=2), "lora", rank=2)
    seats = Seats(network, 2, gamma=0.01, shared=True)
    seats.gate.log_shares = torch.tensor([0.5, 0.5]).log()
    with torch.no_grad():
        seats.gate.router[1] = network.embed_tokens.weight[7]
    network(torch.tensor([[7, 7]]))
    assert seats.gate.log_weights[0, :, 1].exp().tolist() == pytest.approx([1, 1])


# The server's sums


def test_only_trainers_move_an_expert_and_the_mean_is_over_them():
    method, data = built(k_max=4)
    with_experts(method, 3)
    before = method.server["experts"].clone()
    uploads = {id: upload_of(method, data, id) for id in range(4)}
    trained = {
        id: [s for s in method.wire.trained(upload, method.server["active"]).shares if s]
        for id, upload in uploads.items()
    }
    served = {slot for slots in trained.values() for slot in slots}
    assert 0 < len(served) < 3  # one of the experts has no trainer
    method.aggregate(uploads)
    after = method.server["experts"]
    for slot in range(1, 5):
        rows = [up.tensor("rows")[1, :P] for id, up in uploads.items() if trained[id] == [slot]]
        examples = [
            int(up.tensor("examples")) for id, up in uploads.items() if trained[id] == [slot]
        ]
        if not rows:
            assert torch.equal(after[slot], before[slot])
            continue
        weights = torch.tensor(examples, dtype=torch.float64) / sum(examples)
        expected = (weights.unsqueeze(1) * torch.stack(rows).double()).sum(0)
        assert torch.allclose(after[slot].double(), expected, atol=1e-6)
    use = method.slots.mass[1:] / method.slots.mass[1:].sum()
    prior = (
        0.5 * torch.tensor([1, 1, 1, 0]) / 3
        + 0.5 * (use + torch.tensor([1, 1, 1, 0]) * 1e-3) / 1.003
    )
    assert method.slots.prior[1:].tolist() == pytest.approx(prior.tolist())


def test_a_step_of_half_the_way_ends_half_way():
    method, data = built(k_max=2, server_lr=0.5)
    start = method.server["experts"][0].clone()
    method.aggregate({0: upload_of(method, data, 0)})
    assert torch.allclose(method.server["experts"][0], start + 0.5, atol=1e-6)


def test_forged_uploads_are_refused():
    method, data = built(k_max=4)
    with_experts(method, 2)
    good, client = upload_of(method, data, 0), data.client(0)
    check_upload(method, good, client, [])
    free, none = torch.tensor([0, 0, 1, 0]), torch.tensor([0, 0, 0, 0])
    for name, entry in (
        ("slots", Codes(free.int(), bits=1)),
        ("slots", Codes(none.int(), bits=1)),
        ("shares", torch.tensor([1.5])),
        ("shares", torch.tensor([-1.0])),
        ("shares", torch.tensor([1.0005])),  # times n_k it is more than the largest weight
        ("rows", good.tensor("rows")[:1]),
        ("rows", good.tensor("rows")[:, :-1]),
        ("rows", good.tensor("rows") * float("nan")),
        # a seed without an adapter
        ("votes", Codes(torch.tensor([1, 1], dtype=torch.int32), bits=1)),
    ):
        with pytest.raises(PayloadError):
            check_upload(method, Payload({**dict(good.items()), name: entry}), client, [])


def test_an_expert_whose_loss_is_not_finite_is_taken_by_nobody():
    """All responsibilities would be NaN, and so would all clients."""
    method, data = built(k_max=3)
    with_experts(method, 2)
    method.server["experts"][2] = 3e18
    client = data.client(0)
    method.receive(method.broadcast(client), client)
    choice = method.choose(data, client, data.labels(client))
    assert choice.r.tolist() == [0, 1, 0, 0]
    method.server["experts"][1] = 3e18
    method.receive(method.broadcast(client), client)
    choice = method.choose(data, client, data.labels(client))
    assert choice.rejects
    assert choice.r.tolist() == pytest.approx([0, 0.5, 0.5, 0])


@pytest.mark.parametrize("wire", ["plain", "oblivious"])
def test_an_attack_multiplies_the_update_of_each_row(wire):
    method, data = built(k_max=4, wire=wire)
    with_experts(method, 2)
    starts, upload, client = method.slots.rows, upload_of(method, data, 0), data.client(0)
    attack = ByzantineClients(clients=1.0, attack="sign_flip", strength=2.0)
    context = SimpleNamespace(method=method, data=data, seed=0)
    attacked = attack.change_upload(upload, client=client, round=1, context=context)
    check_upload(method, attacked, client, [])
    honest, forged = (
        method.wire.trained(each, method.server["active"]) for each in (upload, attacked)
    )
    assert honest.shares == forged.shares
    for slot, row in honest.rows.items():
        assert torch.allclose(
            forged.rows[slot] - starts[slot], -2 * (row - starts[slot]), atol=1e-5
        )


def test_clients_of_one_example_choose_by_the_prior(tmp_path):
    """They have no probes; one alone would have no error of its mean."""
    method = method_of(FedVEMoE, k_init=2, k_max=3, top_m=3)
    fit(method, tmp_path, records(generate=False, examples_per_client=1))
    assert method.slots.mass[1:3].tolist() == pytest.approx([2, 2])


# Bytes


def entry(name: str, ndim: int, data: int) -> int:
    return 3 + len(name) + 4 * ndim + data


@pytest.mark.parametrize("experts", [1, 3])
@pytest.mark.parametrize("wire", ["plain", "oblivious"])
def test_bytes_are_those_of_the_formulas(experts, wire):
    """Down: the shared adapter and each active expert with its router. Up: two of them; oblivious
    all K + 1 and a seed, so that the length is always the same."""
    method, data = built(k_max=8, wire=wire)
    with_experts(method, experts)
    row, header = 4 * (P + D), 19
    down = (
        header + entry("active", 1, 1) + entry("prior", 1, 4 * experts) + entry("rejecters", 1, 4)
    )
    assert method.broadcast(data.client(0)).nbytes == down + entry(
        "experts", 2, (experts + 1) * row
    )
    rows, shares, own = (2, 1, 0) if wire == "plain" else (9, 8, entry("own", 1, 4 * P))
    up = header + entry("examples", 0, 4) + entry("slots", 1, 1) + entry("shares", 1, 4 * shares)
    up += entry("rows", 2, rows * row) + entry("votes", 1, 1) + own
    assert {upload_of(method, data, id).nbytes for id in range(4)} == {up}


@pytest.mark.parametrize(
    ("wire", "up"), [("plain", 2 * 127_360), ("oblivious", 9 * 127_360 + 126_976)]
)
def test_bytes_of_the_shipped_network_with_a_frozen_a(wire, up):
    """d 96, 4 blocks, r 8: 4 experts of 8 slots, to the few bytes of headers and votes."""
    network = partial(LlamaTiny, ffa=True)
    method = FedVEMoE(network=network, optimizer=adam(), k_init=4, k_max=8, wire=wire)
    data = records(generate=False)
    data.prepare_data()
    data.setup("fit")
    data.distribute(0, torch.device("cpu"))
    method.build(data)
    message, client = method.broadcast(data.client(0)), data.client(0)
    method.receive(message, client)
    assert 0 < message.nbytes - 5 * 127_360 < 200
    assert 0 < method.upload(client).nbytes - up < 200


@pytest.mark.parametrize("wire", ["plain", "oblivious"])
def test_clients_that_remember_experts_are_sent_those_that_moved(tmp_path, wire):
    """The run is the same, and the ledger has fewer bytes down: by a row for each expert that stood
    still, but for the entry that says which moved."""
    settings = {"max_rounds": 6, "participation": 0.5}
    states, down = [], []
    for form in ("all", "changed"):
        method = method_of(
            FedVEMoE, k_init=4, k_max=5, wire=wire, down=form, birth_gap=0.0, birth_z=0.0
        )
        fit(method, tmp_path / form, **settings)
        states.append(vars(method.slots))
        with next((tmp_path / form).rglob("ledger.csv")).open() as file:
            down.append([int(row["download"]) for row in csv.DictReader(file)])
    assert [
        name for name, value in states[0].items() if not torch.equal(value, states[1][name])
    ] == []
    saved = [
        (whole + entry("moved", 1, 1) - part) / (4 * (P + D))
        for whole, part in zip(*down, strict=True)
    ]
    assert all(rows in range(5) for rows in saved)
    assert saved[:2] == [0, 0]  # nobody remembers anything
    assert max(saved) > 0


def test_a_client_that_did_not_answer_is_sent_again_what_it_missed(tmp_path, monkeypatch):
    """In rounds 2 and 3 a machine is away, so its client remembers the experts of round 1."""
    train = SequentialEngine.train

    def with_one_away(engine, tasks, units=None):
        for result, task in zip(train(engine, tasks, units), tasks, strict=True):
            away = task.client.id == 1 and task.round in (2, 3)
            yield ClientResult(task.client, b"", {}, {}, 0, status="dropped") if away else result

    monkeypatch.setattr(SequentialEngine, "train", with_one_away)
    method = method_of(FedVEMoE, k_init=4, k_max=5, down="changed")
    fit(method, tmp_path, max_rounds=3)
    served = method.server["served"].tolist()
    assert served.pop(1) == 1
    assert set(served) == {3}


def test_a_client_that_remembers_goes_on_after_an_interruption(tmp_path):
    def outcome_of(name: str, stop_after: int | None = None, **more) -> dict:
        stops = Stops()
        stops.rounds = stop_after
        method = method_of(FedVEMoE, k_init=3, k_max=4, down="changed")
        settings = {
            "max_rounds": 4,
            "participation": 0.5,
            "checkpoint_every": 1,
            "callbacks": [stops],
        }
        fit(method, tmp_path / name / "runs", **settings, **more)
        return outcome(tmp_path / name)

    whole = outcome_of("whole")
    with pytest.raises(KeyboardInterrupt):
        outcome_of("cut", 2)
    assert differences(outcome_of("cut", ckpt_path="last"), whole) == []


# What is measured


def test_transfer_is_the_difference_of_two_losses_on_validation():
    method, data = built(records(generate=False, examples_per_client=60), k_init=2, k_max=2)
    client = data.client(1)
    assert method.transfer(client) is None  # it has no adapter of its own yet
    own = method.first["weights"] + 0.2 * torch.randn(P, generator=torch.Generator().manual_seed(3))
    client.state["own"] = own
    found = method.transfer(client)
    losses = []
    for network in (method.deploy(client), tiny_with(own)):
        of_examples = []
        for index in client.val.tolist():
            inputs, target = data.inputs("train", torch.tensor([index])), data.train_target[index]
            with torch.no_grad():
                logits = network.eval()(inputs)[0]
            kept = (target != -100).nonzero().flatten()
            chosen = logits.log_softmax(-1)[kept, target[kept]]
            of_examples.append(-float(chosen.mean()))
        losses.append(torch.tensor(of_examples))
    difference = losses[0] - losses[1]
    assert found.mean == pytest.approx(float(difference.mean()), rel=1e-4)
    assert found.error == pytest.approx(float(difference.std() / len(difference) ** 0.5), rel=1e-4)


def tiny_with(adapter: torch.Tensor) -> torch.nn.Module:
    """The network of :func:`built` without experts, and with this adapter."""
    method, _ = built(k_max=0)
    method.layout.write(method.network, adapter)
    return method.network


def test_the_error_is_of_the_mean_that_is_made():
    """By hand: no share is above 0.4, and what is cut off goes to the others alike."""
    rows = {id: torch.tensor([count, 0.0]).double() for id, count in ((0, 98), (1, 1), (2, 1))}
    for most, wanted in ((1.0, [0.98, 0.01, 0.01]), (0.4, [0.4, 0.3, 0.3])):
        shares = _weighted(rows, FedAvg(max_share=most))[1]
        assert shares.tolist() == pytest.approx(wanted, abs=1e-8)


@pytest.mark.parametrize("cls", [FedAvg, FedVEMoE])
def test_the_error_of_averaging_factors_apart(cls, tmp_path):
    """By dense products: the mean of B A against the product of the means, of every layer and
    expert, over the clients whose upload is not lost later."""

    class Keeper(FactorError):
        def on_round_end(self, record, context):
            self.seen = [
                (slot, weight, dense(context.method, adapter))
                for client, payload in self.payloads
                if client
                for slot, weight, adapter in context.method.averaged(payload)
            ]
            self.starts = {}
            super().on_round_end(record, context)
            self.found = record.metrics["average/factor_error"]

        def on_round_start(self, round, context):
            super().on_round_start(round, context)
            self.payloads = []

        def change_upload(self, upload, *, client, round, context):
            self.payloads.append((client.id, upload))
            return super().change_upload(upload, client=client, round=round, context=context)

    class Loses(Stressor):
        def change_upload(self, upload, *, client, round, context):
            return upload if client.id else None

    keeper, settings = Keeper(), {"k_init": 2, "k_max": 2} if cls is FedVEMoE else {}
    fit(method_of(cls, **settings), tmp_path, callbacks=[keeper, Loses()], max_rounds=1)
    assert any(client == 0 for client, _ in keeper.payloads)
    error = whole = 0.0
    for slot in {slot for slot, *_ in keeper.seen}:
        of_slot = [(weight, layers) for other, weight, layers in keeper.seen if other == slot]
        total = sum(weight for weight, _ in of_slot)
        for number in range(len(of_slot[0][1])):
            b, a, product = (
                sum(weight / total * layers[number][part] for weight, layers in of_slot)
                for part in range(3)
            )
            error += float((product - b @ a).square().sum())
            whole += float(product.square().sum())
    assert 0 < error < whole
    assert keeper.found == pytest.approx((error / whole) ** 0.5, rel=1e-6)


def dense(method, adapter: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    """B, A and B A of each layer."""
    named = method.layout.unpack(adapter.double())
    pairs = [
        (named[name.replace("lora_A", "lora_B")], a)
        for name, a in named.items()
        if "lora_A" in name
    ]
    return [(b, a, b @ a) for b, a in pairs]


def test_factors_have_no_error_where_a_is_frozen_and_secure_sums_show_none(tmp_path):
    class Last(Meter):
        def on_round_end(self, record, context):
            self.found = record.metrics["average/factor_error"]

    last = Last()
    fit(method_of(FedAvg, ffa=True), tmp_path, callbacks=[FactorError(), last], max_rounds=1)
    assert last.found < 1e-7
    with refused("FactorError"):
        fit(
            method_of(FedAvg),
            tmp_path,
            callbacks=[FactorError()],
            secure_sum=SecureSum(threshold=0.67),
        )
    for settings in ({"average": NormClipping(1.0)}, {"cls": Oracle}):
        with refused("FactorError"):
            method = method_of(**{"cls": FedAvg, **settings})
            fit(method, tmp_path, callbacks=[FactorError()], max_rounds=1)
    with refused("that trains", "llama_tiny"):
        fit(method_of(FedAvg, rank=0), tmp_path / "whole", callbacks=[FactorError()])
    assert not (tmp_path / "whole").exists()


# Births


def test_nobody_seeds_an_expert_where_no_slot_is_free():
    """One client rejected all in the last round, so that it would with certainty."""
    for k_init, seeds in ((2, True), (3, False)):
        method, data = built(k_init=k_init, k_max=3)
        method.server["rejecters"] = torch.tensor(1.0, dtype=torch.float64)
        client = data.client(0)
        method.receive(method.broadcast(client), client)
        assert method._wins_lottery(client) == seeds


def contradicting(part: str) -> list[dict[str, object]]:
    """Questions to which two clusters give different answers, after fillers that differ between the
    parts."""
    return [
        item(
            [1, 14 + first, 18 + second, 2 + question],
            (10 if client // 2 else 6) + question,
            client,
        )
        for client, first, second, question in product(range(4), repeat=4)
        if ((first + second) % 4 == 0) == (part == "test")
    ]


def item(asked: list[int], answer: int, client: int) -> dict[str, object]:
    labels = [-100] * len(asked) + [answer]
    return {
        "input_ids": [*asked, answer],
        "labels": labels,
        "client": client,
        "cluster": client // 2,
    }


def clusters() -> TokenData:
    return TokenData(
        train=contradicting("train"),
        test=contradicting("test"),
        vocab_size=24,
        client="client",
        group="cluster",
        batch_size=8,
        val_fraction=0.1,
        context=8,
    )


def decided(vocab_size: int) -> torch.nn.Module:
    """A network whose logits can be large, although its head is frozen."""
    network = Llama(vocab_size, width=32, depth=1, heads=2)
    with torch.no_grad():
        network.embed_tokens.weight.mul_(10)
    return add_adapter(network, "lora", rank=8)


def rounds(folder: Path) -> list[dict[str, str]]:
    return rows_of(next(folder.rglob("metrics.csv")))


def one_birth() -> FedVEMoE:
    return FedVEMoE(network=decided, optimizer=adam(0.01), k_max=4, shared=False, birth_gap=0.2)


@pytest.mark.slow
@pytest.mark.essential
def test_experts_reach_both_optima_by_one_birth_and_fedavg_the_mean(tmp_path):
    """One model for both clusters can at best answer with 1/2 each: ln 2 nats, against 0 with two
    experts."""
    method = one_birth()
    fit(method, tmp_path / "experts", clusters(), max_rounds=12, max_local_steps=4, seed=3)
    found = rounds(tmp_path / "experts")
    assert sum(int(row["experts/born"]) for row in found) == 1
    assert float(found[-1]["train/loss_task"]) < 0.01
    assert method.slots.prior[1:].tolist() == pytest.approx([0.5, 0.5, 0, 0], abs=0.02)
    plain = FedAvg(network=decided, optimizer=adam(0.003))
    fit(plain, tmp_path / "plain", clusters(), max_rounds=60, max_local_steps=1)
    last = [float(row["train/loss_task"]) for row in rounds(tmp_path / "plain")[-10:]]
    assert math.log(2) - 0.02 < sum(last) / 10 < math.log(2) + 0.15


def births(folder: Path, stop_after: int | None = None, **settings) -> dict:
    """The outcome of a run in which an expert is born in round 3."""
    stops = Stops()
    stops.rounds = stop_after
    given = {"max_rounds": 5, "max_local_steps": 4, "checkpoint_every": 1, "callbacks": [stops]}
    fit(one_birth(), folder / "runs", clusters(), seed=3, **given, **settings)
    return outcome(folder)


@pytest.mark.slow
@pytest.mark.essential
@pytest.mark.parametrize("done", [2, 3])
def test_interrupted_before_or_after_a_birth_it_ends_as_if_it_was_not(done, tmp_path):
    whole = births(tmp_path / "whole")
    assert [int(row["experts/born"]) for row in whole["metrics"]] == [0, 0, 1, 0, 0]
    with pytest.raises(KeyboardInterrupt):
        births(tmp_path / "cut", done)
    found = births(tmp_path / "cut", ckpt_path="last")
    assert differences(found, whole) == []


def changing(folder: Path, stop_after: int | None = None, **settings) -> dict:
    """The outcome of a run in which experts are pruned and merged."""
    stops = Stops()
    stops.rounds = stop_after
    rules = Rules(
        prune_share=0.3, prune_rounds=1, merge_cosine=-0.9, merge_rounds=2, merge_loss=1.0
    )
    method = method_of(FedVEMoE, k_init=5, k_max=6, birth_gap=0.0, birth_z=0.0, rules=rules)
    given = {"max_rounds": 6, "participation": 0.75, "checkpoint_every": 1, "callbacks": [stops]}
    fit(method, folder / "runs", **given, **settings)
    return outcome(folder)


@pytest.mark.slow
@pytest.mark.essential
def test_interrupted_in_any_round_of_prunes_and_merges_it_ends_as_if_it_was_not(tmp_path):
    whole = changing(tmp_path / "whole")
    for change in ("pruned", "merged", "born"):
        assert sum(int(row[f"experts/{change}"]) for row in whole["metrics"]) >= 1, change
    for done in range(1, 6):
        with pytest.raises(KeyboardInterrupt):
            changing(tmp_path / str(done), done)
        assert differences(changing(tmp_path / str(done), ckpt_path="last"), whole) == [], done


# Refusals


def test_what_does_not_fit_is_refused():
    for given, settings in (
        ("k_init 3", {"k_init": 3, "k_max": 2}),
        ("top_m 1", {"top_m": 1}),
        ("tau 0", {"tau": 0.0}),
        ("probes 1", {"probes": 1}),
        ("shared False", {"shared": False, "k_max": 0}),
    ):
        with refused(given):
            method_of(FedVEMoE, **settings)
    with refused("Classification"):
        method_of(FedVEMoE).build(ready())
    with refused("Llama that trains", "rank"):
        built(rank=0)
    with refused("secure_sum", "write --model.wire oblivious"):
        check_run(Run(built()[0], masks=SecureSum()))


def test_an_adapter_that_starts_at_something_is_not_added_twice():
    """PiSSA starts at the leading part of the weights: shared adapter and expert would both add
    it."""

    def pissa(vocab_size: int) -> torch.nn.Module:
        return add_adapter(Llama(vocab_size, width=16, depth=1, heads=2), "pissa", rank=2)

    with refused("do not start at 0", "shared false"):
        built_with(pissa)
    plain, inputs = pissa(259), torch.arange(12).view(2, 6)
    method = built_with(lambda vocab_size: deepcopy(plain), shared=False, top_m=1)
    with torch.no_grad():
        assert torch.allclose(method.deploy().eval()(inputs), plain.eval()(inputs), atol=1e-5)


def built_with(network, **settings) -> FedVEMoE:
    method, data = FedVEMoE(network=network, **settings), records(generate=False)
    data.prepare_data()
    data.setup("fit")
    data.distribute(0, torch.device("cpu"))
    method.build(data)
    return method


def test_the_names_of_adapters_are_those_that_travel():
    method, _ = built()
    names = [name for each in method.seats.factors for name in (each.a, each.b)]
    assert sorted(names) == sorted(method.layout.shapes)
    assert method.layout.size == P
    with refused("that trains"):
        factors_of(Llama(20, width=16, depth=1, heads=2))


# An open world


@pytest.mark.slow
@pytest.mark.essential
def test_a_group_that_arrives_gets_an_expert(tmp_path):
    """Rounds to recover are counted; clients that are away neither train nor are measured."""
    method = FedVEMoE(network=decided, optimizer=adam(0.01), k_max=4, shared=False, birth_gap=0.2)
    comes = NewTasks(group=1, arrives=4)
    given = {"max_rounds": 14, "max_local_steps": 4, "callbacks": [ExpertFigure(), comes]}
    fit(method, tmp_path, clusters(), seed=3, **given)
    found = rounds(tmp_path)
    assert [int(row["clients/trained"]) for row in found] == [2] * 3 + [4] * 11
    assert not any(row["router/purity"] for row in found[:3])  # one group is no partition
    assert sum(int(row["experts/born"]) for row in found[3:]) >= 1
    recovered = [row for row in found if row["tasks/rounds_to_recover"]]
    assert len(recovered) == 1
    last = recovered[0]
    assert float(last["router/purity"]) == 1
    assert int(last["round"]) - 4 + 1 == float(last["tasks/rounds_to_recover"])


def test_a_group_that_is_not_there_is_refused(tmp_path):
    for settings in ({"group": "none", "arrives": 2}, {"group": 7, "arrives": 2}):
        with refused("NewTasks(group"):
            fit(method_of(FedVEMoE), tmp_path, callbacks=[NewTasks(**settings)])
    for settings in ({}, {"arrives": 3, "leaves": 2}, {"arrives": 0}):
        with refused("NewTasks(arrives"):
            NewTasks(0, **settings)
