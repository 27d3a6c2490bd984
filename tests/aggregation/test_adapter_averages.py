"""Averages of low-rank adapters: the golden files, neutral settings, known answers, exact bytes,
and every path of a run."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from adapter_runs import Extreme, deployed_weights, fitted
from golden_cases import cases_in, differences
from outcomes import rows_of
from refusals import refused
from tiny_language import adam, fit, method_of, records, set_up, tiny
from torch import nn

from callbacks import GradientNorms
from fl_lightning import methods
from fl_lightning.aggregation.adapters import RULES, Residual, Stack, algebra, chosen_rule, padded
from fl_lightning.aggregation.adapters.moving_base import BaseChange
from fl_lightning.aggregation.exact_sum import ExactSum
from fl_lightning.aggregation.server_optimizers import EVALUATED, Extrapolation
from fl_lightning.clock import Clock, FedBuff, LogNormalDevices, SameDevice
from fl_lightning.compatibility import Run, check_run
from fl_lightning.conformance.bench import prepare_data
from fl_lightning.errors import LostStateError
from fl_lightning.hooks import Stressor
from fl_lightning.methods import (
    AQFL,
    MOON,
    SCAFFOLD,
    DynamicTerm,
    FedAvg,
    FedNTD,
    FedPQ,
    FedSAM,
    Krum,
    Lookahead,
    QFedAvg,
    ServerAdam,
    ServerSGD,
)
from fl_lightning.models.adapters import adapter_layers, add_adapter
from fl_lightning.privacy import ClientPrivacy
from fl_lightning.run.checkpoint import load_checkpoint, save_checkpoint
from fl_lightning.sampling import Oort
from fl_lightning.wire import Payload

EXACT = ("frozen_a", "residual", "stack", "alternate")
OF_ONE_LAYOUT = ("factors", "frozen_a", "residual", "product", "padded", "alternate", "solve")


# The golden files


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        folder = Path(metafunc.config.getoption("--golden")) / "breadth"
        found = [case for _, case in cases_in(folder) if "rule" in case]
        metafunc.parametrize(
            "case", found, ids=[f"{case['name']}-{place}" for place, case in enumerate(found)]
        )


def pairs_of(case) -> list[algebra.Pair]:
    """A and B of each client in float64, filled up with zeros to the largest rank."""
    rank = max(len(each["A"]) for each in case["adapters"])
    pairs = []
    for each in case["adapters"]:
        a, b = (torch.tensor(each[name], dtype=torch.float64) for name in "AB")
        missing = rank - len(a)
        pairs.append((nn.functional.pad(a, (0, 0, 0, missing)), nn.functional.pad(b, (0, missing))))
    return pairs


def means_of(pairs, shares) -> algebra.Pair:
    """mean(A) and mean(B) by the sums of a server, in float64."""

    def mean(tensors):
        total = ExactSum(tensors[0].numel(), len(tensors))
        total.add([tensor.reshape(-1) for tensor in tensors], shares)
        return (total.total() / sum(shares)).view(tensors[0].shape)

    return mean([a for a, _ in pairs]), mean([b for _, b in pairs])


def test_the_algebra_is_that_of_the_golden_files(case):
    pairs, shares, scale = pairs_of(case), case["shares"], case["settings"]["scale"]
    base, result = torch.tensor(case["base"], dtype=torch.float64), case["result"]
    a, b = means_of(pairs, shares)
    found = {"base": base, "A": a, "B": b}
    match case["rule"]:
        case "product":
            a, b = algebra.balanced(
                algebra.stacked(pairs, shares), case["settings"]["rank"], torch.zeros(2, 5).double()
            )
        case "stack":
            a, b = algebra.stacked(pairs, shares)
        case "residual":
            left_a, left_b = algebra.residual(pairs, shares, b)
            assert len(left_a) == (len(pairs) - 1) * len(a)
            found["base"] = base + scale * left_b @ left_a
        case "shared_a":
            found["W"] = torch.stack([base + scale * own @ a for _, own in pairs])
    found.setdefault("W", found["base"] + scale * b @ a)
    assert not differences(result, {name: found[name] for name in result}, tolerance=1e-9)


class Layer(nn.Module):
    """One adapted layer with the base of a case, over token ids that it does not look at."""

    reads_tokens = True

    def __init__(self, num_classes: int, case) -> None:
        super().__init__()
        ranks = [len(each["A"]) for each in case["adapters"]]
        base = nn.Linear(5, 4, bias=False)
        base.weight.data = torch.tensor(case["base"])
        self.layer = add_adapter(
            base, "lora", rank=max(ranks), alpha=case["settings"]["scale"] * max(ranks)
        )
        self.client_ranks = ranks
        self.width = num_classes

    def forward(self, inputs):
        ids = inputs["input_ids"]
        return (
            self.layer(torch.ones(*ids.shape, 5))
            .sum(-1, keepdim=True)
            .expand(*ids.shape, self.width)
        )


NAMES = {"shared_a": "share_a"}


def test_a_server_does_what_the_golden_files_say(case):
    """The same through uploads, messages and the network that is deployed, in float32."""
    rule = NAMES.get(case["rule"], case["rule"])
    method = FedAvg(network=partial(Layer, case=case), adapter_average=rule)
    data = prepare_data(records(generate=False, num_clients=len(case["adapters"])))
    method.build(data)
    method.round, method.cohort = case["settings"].get("round", 1), len(case["adapters"])
    clients = [data.client(id) for id in range(method.cohort)]
    if rule == "alternate":  # what rests is what the case has
        method.server["weights"] = torch.cat(
            [torch.cat([t.flatten() for t in pair]) for pair in pairs_of(case)[:1]]
        ).float()
    units, uploads = [round(share * 2**30) for share in case["shares"]], {}
    for client, (a, b) in zip(clients, pairs_of(case), strict=True):
        method.receive(Payload.from_bytes(method.broadcast(client).to_bytes()), client)
        for layer in adapter_layers(method.network).values():
            layer.lora_A.weight.data, layer.lora_B.weight.data = a.float(), b.float()
        method.keep_own(client)
        sent = method.upload(client)
        assert sent.tensor("weights").shape == method.upload_limits(client)["weights"]
        uploads[client.id] = Payload(
            {**sent, "examples": torch.tensor(units[client.id], dtype=torch.int32)}
        )
    method.most_examples = max(units)
    method.served = sorted(uploads)
    method.aggregate(uploads)
    if rule == "share_a":
        found = torch.stack([weight_of(method.deploy(client)) for client in clients])
    elif rule == "product":  # a client of rank 2 gets the nearest adapter of rank 2
        method.round += 1
        client = next(client for client in clients if client.id == 1)
        method.receive(method.broadcast(client), client)
        found = weight_of(method.network)
    else:
        found = weight_of(method.deploy())
    assert not differences(case["result"]["W"], found, tolerance=1e-6)
    if rule in EXACT:
        assert method.server_metrics()["average/factor_error"] < 1e-6


def weight_of(network: nn.Module) -> torch.Tensor:
    (layer,) = adapter_layers(network).values()
    return layer.full_weight().detach().clone()


# Neutral settings, and known answers of whole runs


def test_factors_are_a_run_without_a_rule_and_frozen_a_is_ffa(tmp_path):
    plain, _ = fitted(tmp_path, None)
    factors, rows = fitted(tmp_path, "factors")
    assert plain.server["weights"].equal(factors.server["weights"])
    assert all(0.001 < float(row["average/factor_error"]) < 1 for row in rows)
    ffa, _ = fitted(tmp_path, None, ffa=True)
    frozen, rows = fitted(tmp_path, "frozen_a")
    assert ffa.server["weights"].equal(frozen.server["weights"])
    assert all(float(row["average/factor_error"]) < 1e-6 for row in rows)


@pytest.mark.parametrize("rule", ["residual", "solve", "padded", "product", "stack"])
def test_one_client_is_plain_training(rule, tmp_path):
    """Bit for bit where the factors themselves go on; else in what they add."""
    one = records(generate=False, num_clients=1)
    plain, _ = fitted(tmp_path, None, data=one, max_rounds=1)
    ours, rows = fitted(tmp_path, rule, data=records(generate=False, num_clients=1), max_rounds=1)
    if rule in ("residual", "solve", "padded"):
        assert plain.server["weights"].equal(ours.server["weights"])
    torch.testing.assert_close(
        deployed_weights(ours), deployed_weights(plain), rtol=1e-5, atol=1e-6
    )
    assert float(rows[0]["average/factor_error"]) < 1e-6


@pytest.mark.parametrize("rule", ["residual", "solve"])
def test_with_equal_a_nothing_is_left_to_mend(rule, tmp_path):
    factors, plain = fitted(tmp_path, "factors", ffa=True)
    ours, rows = fitted(tmp_path, rule, ffa=True)
    assert ours.server["weights"].equal(factors.server["weights"])
    names = ("comm/upload_bytes", "comm/download_bytes", "train/loss")
    assert [[row[name] for name in names] for row in rows] == [
        [row[name] for name in names] for row in plain
    ]


def test_the_base_takes_what_the_means_lose(tmp_path):
    """After a round in which all start alike, `residual`, `stack` and the mean of the clients'
    products agree, and `factors` does not; `residual` keeps its factors."""
    true = FedAvg(network=partial(tiny, rank=2), optimizer=adam(), adapter_average=Spy())
    fit(true, tmp_path, max_rounds=1, eval_every=9)
    start = deployed_weights(
        fitted(tmp_path, None, max_rounds=1, settings={"server_optimizer": ServerSGD(lr=1e-9)})[0]
    )
    for rule, exact in (("residual", True), ("stack", True), ("factors", False)):
        method, _ = fitted(tmp_path, rule, max_rounds=1)
        apart = (
            deployed_weights(method) - start - true.adapters.mean
        ).norm() / true.adapters.mean.norm()
        assert (float(apart) < 1e-5) == exact, rule


class Spy(Residual):
    """Adds up the clients' products in a plain way."""

    def beside(self, method, found, made):
        self.mean = 0
        for adapters, share in zip(found.adapters, found.shares, strict=True):
            layers = zip(self.pairs, adapters, strict=True)
            products = [pair.scaling * (b @ a).flatten() for pair, (a, b) in layers]
            self.mean = self.mean + share * torch.cat(products)
        return super().beside(method, found, made)


class NarrowLinear(nn.Linear):
    """Computes in the precision of its inputs, as autocast does."""

    def forward(self, x):
        return nn.functional.linear(x, self.weight.to(x))


def narrow(vocab_size: int, dtype: torch.dtype) -> nn.Module:
    network = tiny(vocab_size)
    for layer in adapter_layers(network).values():
        layer.base_layer.__class__ = NarrowLinear
        layer.base_layer.weight.data = layer.base_layer.weight.data.to(dtype)
    return network


class NarrowSpy(Spy):
    """Keeps the frozen weights before a round, and how far those after it are from what they were
    to be, in a plain way."""

    def __init__(self):
        super().__init__()
        self.found = []

    def frozen_weights(self, method):
        self.base.write(method.network, BaseChange.read(self.base.shapes, method.server, "base"))
        layers = adapter_layers(method.network).values()
        return torch.cat([layer.base_layer.weight.flatten().double() for layer in layers])

    def beside(self, method, found, made):
        before = self.frozen_weights(method)
        entries = super().beside(method, found, made)
        method.server |= entries
        pairs = zip(self.pairs, self.pairs_in(method.layout, made), strict=True)
        mean = torch.cat([(pair.scaling * b @ a).flatten() for pair, (a, b) in pairs])
        left = self.mean - mean - (self.frozen_weights(method) - before)
        self.found.append(float(left.norm() / self.mean.norm()))
        return entries


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_a_narrow_base_rounds_away_is_measured(dtype, tmp_path, caplog):
    rule = NarrowSpy()
    method = FedAvg(network=partial(narrow, dtype=dtype), optimizer=adam(), adapter_average=rule)
    ended = fit(method, tmp_path, max_rounds=3, eval_every=9)
    told = [float(row["average/factor_error"]) for row in rows_of(ended.run_dir / "metrics.csv")]
    assert told == pytest.approx(rule.found, rel=1e-2, abs=1e-5)
    wide = dtype == torch.float32
    assert all((error < 1e-5) == wide for error in told)
    said = [line for line in caplog.messages if "frozen weights of" in line]
    assert len(said) == (0 if wide else 1)
    assert wide or str(dtype).removeprefix("torch.") in said[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_new_adapters_on_a_narrow_base_are_measured(dtype, tmp_path):
    """All that a round has learnt is in the base: one of a change that it cannot hold has lost
    it."""
    ended = fit(
        FedAvg(network=partial(narrow, dtype=dtype), optimizer=adam(), adapter_average="stack"),
        tmp_path,
        eval_every=9,
    )
    for row in rows_of(ended.run_dir / "metrics.csv"):
        assert (float(row["average/factor_error"]) < 1e-5) == (dtype == torch.float32)


def test_the_nearest_adapter_of_each_rank():
    torch.manual_seed(0)
    pair = torch.randn(6, 7).double(), torch.randn(5, 6).double()
    matrix = pair[1] @ pair[0]
    errors = torch.linalg.svdvals(matrix)
    for rank in (1, 3, 5, 8):
        spare = torch.randn(rank, 7).double()
        a, b = algebra.balanced(pair, rank, spare)
        lost = float((b @ a - matrix).norm())
        assert lost == pytest.approx(float(errors[rank:].square().sum().sqrt()), abs=1e-9)
        assert a[5:].equal(spare[5:])
        assert not b[:, 5:].any()
        wide_a, wide_b = algebra.balanced(pair, 5, torch.zeros(5, 7).double())
        torch.testing.assert_close(b[:, :5] @ a[:5], wide_b[:, :rank] @ wide_a[:rank])
    nearer = algebra.solved(pair, (torch.randn(3, 7).double(), torch.randn(5, 3).double()), 50)
    assert float((nearer[1] @ nearer[0] - matrix).norm()) < 1.01 * float(
        errors[3:].square().sum().sqrt()
    )


def test_norms_weigh_filled_up_adapters():
    small, large = (torch.eye(2), torch.eye(2)), (torch.eye(2), 3 * torch.eye(2))
    assert algebra.norm_shares([[small], [large]], [0.5, 0.5]) == pytest.approx([0.25, 0.75])
    assert algebra.norm_shares([[large], [large]], [0.3, 0.7]) == [0.3, 0.7]
    assert algebra.norm_shares([[(torch.eye(2), torch.zeros(2, 2))]] * 2, [0.3, 0.7]) == [0.3, 0.7]


# Bytes


HEADER, ENTRY = 19, 3 + 4  # of a payload and of an entry of one dimension, beside its name


def size_of(**entries) -> int:
    """Bytes of a payload whose entries are vectors: name -> (values, bytes of each)."""
    return HEADER + sum(
        ENTRY + len(name) + count * width for name, (count, width) in entries.items()
    )


@pytest.mark.parametrize("rule", sorted(RULES))
def test_bytes_are_those_of_the_table(rule, tmp_path):
    """Of the small network: four layers, 4 clients of rank 2, all in every round."""
    layers = [(48, 16), (16, 16), (80, 16), (16, 40)]
    assert {
        tuple(layer.base_layer.weight.shape) for layer in adapter_layers(tiny(259)).values()
    } == {*layers}
    r, K, L = 2, 4, len(layers)
    m, n, whole = (
        sum(m for m, _ in layers),
        sum(n for _, n in layers),
        r * sum(m + n for m, n in layers),
    )
    examples = HEADER + 3 + len("examples") + 4
    up = lambda values: examples + ENTRY + len("weights") + 4 * values  # noqa: E731
    down = lambda values: size_of(weights=(values, 4))  # noqa: E731

    def base(rank: int, **more) -> int:
        values = sum(min(rank * (m + n), m * n) for m, n in layers)
        return size_of(**more, base_step_ranks=(L, 2), base_step_values=(values, 4))

    expected = {
        "factors": [(up(whole), down(whole))] * 3,
        "solve": [(up(whole), down(whole))] * 3,
        "product": [(up(whole), down(whole))] * 3,
        "padded": [(up(whole), down(whole))] * 3,
        "frozen_a": [(up(r * m), down(r * m))] * 3,
        "share_a": [(up(r * n), down(r * n))] * 3,
        "residual": [
            (up(whole), down(whole)),
            *[(up(whole), base((K - 1) * r, weights=(whole, 4)))] * 2,
        ],
        "stack": [(up(whole), HEADER), *[(up(whole), base(K * r))] * 2],
        "alternate": [(up(r * m), down(whole)), (up(r * n), down(r * m)), (up(r * m), down(r * n))],
    }
    _, rows = fitted(tmp_path, rule, max_rounds=3)
    found = [(int(row["comm/upload_bytes"]), int(row["comm/download_bytes"])) for row in rows]
    assert found == [(K * up, K * down) for up, down in expected[rule]]


def test_a_truncated_residual_is_counted_and_loses_something(tmp_path):
    whole, rows = fitted(tmp_path, "residual", max_rounds=2)
    cut, fewer = fitted(tmp_path, Residual(rank=1), max_rounds=2)
    assert int(fewer[1]["comm/download_bytes"]) < int(rows[1]["comm/download_bytes"])
    assert (
        1e-4
        < float(fewer[0]["average/factor_error"])
        < float(fitted(tmp_path, "factors")[1][0]["average/factor_error"])
    )
    assert cut.server["base_step_ranks"].tolist() == [1] * 4
    assert whole.server["base_step_ranks"].max() == 6


def test_a_change_of_the_base_is_a_pair_or_a_matrix():
    torch.manual_seed(0)
    shapes = [(6, 5), (4, 4)]
    steps = [
        [(torch.randn(1, n).double(), torch.randn(m, 1).double()) for m, n in shapes]
        for _ in range(4)
    ]
    total, matrices = BaseChange.none(shapes), [torch.zeros(shape).double() for shape in shapes]
    for pairs in steps:
        total = total.plus(BaseChange.of(shapes, pairs))
        matrices = [matrix + b @ a for matrix, (a, b) in zip(matrices, pairs, strict=True)]
        again = BaseChange.read(shapes, total.entries("base"), "base")
        for layer, matrix in enumerate(matrices):
            torch.testing.assert_close(again.matrix(layer), matrix.float())
    assert total.entries("base")["base_ranks"].tolist() == [-1, -1]
    assert sum(tensor.numel() for tensor in total.entries("base").values()) == 2 + 30 + 16


# Ranks of clients


@pytest.mark.parametrize("rule", ["product", "stack", "padded"])
def test_clients_have_ranks_of_their_own(rule, tmp_path):
    """A client of rank r_k starts from, trains and sends r_k rows and columns, as a network of that
    rank would."""
    ranks = [1, 3]
    method, rows = fitted(tmp_path, rule, rank=ranks, max_rounds=3)
    sides = 16 + 48 + 16 + 16 + 16 + 80 + 40 + 16
    ups = [HEADER + 3 + 8 + 4 + ENTRY + 7 + 4 * rank * sides for rank in ranks]
    assert int(rows[0]["comm/upload_bytes"]) == 2 * sum(ups)
    if rule != "padded":
        assert (float(rows[0]["average/factor_error"]) < 1e-6) == (rule == "stack")
    data = prepare_data(records(generate=False))
    client = data.client(0)
    method.round = 4
    method.receive(Payload.from_bytes(method.broadcast(client).to_bytes()), client)
    for layer in adapter_layers(method.network).values():
        assert not layer.lora_A.weight[1:].any()
        assert not layer.lora_B.weight[:, 1:].any()
        assert layer.lora_A.weight[:1].any()
    alone, other = fitted(tmp_path, rule, rank=[2, 2]), fitted(tmp_path, rule, rank=2)
    assert weights_of(alone[0]).equal(weights_of(other[0]))


def weights_of(method) -> torch.Tensor:
    return torch.cat([tensor.double().flatten() for _, tensor in sorted(method.server.items())])


@pytest.mark.parametrize("rule", sorted({*RULES} - {"product", "stack", "padded"}))
def test_other_rules_refuse_ranks_of_their_own(rule, tmp_path):
    with refused("--model.network.rank [1, 3]", "product, stack or padded"):
        fitted(tmp_path, rule, rank=[1, 3])


@pytest.mark.parametrize("rule", ["product", "padded"])
@pytest.mark.parametrize("cls", [QFedAvg, FedPQ, AQFL])
def test_codes_of_all_weights_refuse_ranks_of_their_own(cls, rule, tmp_path):
    with refused(f"--model.network.rank [1, 2] with --model {cls.__name__}", "one rank"):
        fitted(tmp_path, rule, rank=[1, 2], cls=cls)
    assert "average/factor_error" in fitted(tmp_path, rule, rank=[2, 2], cls=cls)[1][-1]


def test_whole_weights_of_qfedavg_have_ranks_of_their_own(tmp_path):
    whole, _ = fitted(tmp_path, "product", rank=[1, 2], cls=QFedAvg, settings={"bits": 32})
    plain, _ = fitted(tmp_path, "product", rank=[1, 2])
    assert weights_of(whole).equal(weights_of(plain))


@pytest.mark.parametrize("cls", [FedPQ, AQFL])
def test_codes_of_all_weights_are_measured(cls, tmp_path):
    """Beside what they say of their bits without a rule."""
    _, plain = fitted(tmp_path, None, cls=cls)
    _, rows = fitted(tmp_path, "factors", cls=cls)
    bits = [name for name in plain[-1] if name.startswith("bits/")]
    assert [rows[-1][name] for name in bits] == [plain[-1][name] for name in bits]
    assert "32.0" not in {plain[-1][name] for name in bits}
    assert all(0.001 < float(row["average/factor_error"]) < 2 for row in rows)


@pytest.mark.parametrize("rule", ["product", "padded"])
def test_stale_updates_of_several_ranks_are_refused(rule, tmp_path):
    """They end in the middle of a run: a part of the weights has no difference to all of them."""
    timed = {"clock": Clock(devices=SameDevice()), "rounds": FedBuff(2, 2)}
    with refused(f"adapter_average {rule} with --trainer.rounds FedBuff", "leave rounds out"):
        fitted(tmp_path, rule, rank=[1, 3], **timed)


# Every path of a run


PARTIAL = {"participation": 0.5, "max_rounds": 5}


@pytest.mark.parametrize("rule", ["residual", "stack", "alternate"])
def test_clients_that_miss_rounds_get_what_they_lack(rule, tmp_path):
    """Two of four clients in each round; what is sent does not change what is learnt."""
    some, rows = fitted(tmp_path, rule, **PARTIAL)
    if rule == "alternate":
        return_all = fitted(tmp_path, SendsAll(), **PARTIAL)[0]
        assert some.server["weights"].equal(return_all.server["weights"])
        return
    always, more = fitted(tmp_path, RULES[rule](resend=True), **PARTIAL)
    assert weights_of(some).equal(weights_of(always))
    down = [sum(int(row["comm/download_bytes"]) for row in each) for each in (rows, more)]
    assert down[0] < down[1]


def test_the_mean_of_the_last_two_models_has_what_rests_as_they_have_it(tmp_path):
    """Round 3 trains B, so that A is the same in both."""
    settings = {"server_optimizer": Extrapolation()}
    method, _ = fitted(tmp_path, "alternate", settings=settings, max_rounds=3)
    weights, evaluated = method.server["weights"], method.server[EVALUATED]
    rests = ~method.adapters.halves[1][: len(weights)]
    assert weights[rests].equal(evaluated[rests])
    assert not weights.equal(evaluated)


class SendsAll(RULES["alternate"]):
    def broadcast(self, method, client):
        return Payload({"weights": method.server["weights"]})


@pytest.mark.parametrize("rule", ["residual", "stack", "alternate"])
def test_a_run_that_is_continued_ends_the_same(rule, tmp_path):
    """From a checkpoint in the middle, with what the server and the clients remember."""
    once = method_of(adapter_average=rule)
    settings = {**PARTIAL, "eval_every": 9, "checkpoint_every": 1, "keep_checkpoints": 9}
    trainer = fit(once, tmp_path / "once", **settings)
    middle, again = (
        trainer.run_dir / "checkpoints" / "round_000003",
        method_of(adapter_average=rule),
    )
    fit(again, tmp_path / "again", ckpt_path=str(middle), **settings)
    assert weights_of(again).equal(weights_of(once))


def test_a_base_that_was_moved_goes_on_with_the_rule_that_moved_it(tmp_path):
    """Others would leave out what it has learnt, or read it in another way."""
    begun = fit(method_of(adapter_average="residual"), tmp_path, max_rounds=1).run_dir
    settings = {"ckpt_path": str(begun), "allow_changed": True}
    (newest,) = (begun / "checkpoints").glob("round_*")

    def go_on(rule) -> None:
        fit(method_of(adapter_average=rule), tmp_path, **settings)

    for rule in (None, "product", "stack", RULES["residual"](resend=True)):
        with refused("--ckpt_path", "--model.adapter_average"):
            go_on(rule)
    tensors, documents = load_checkpoint(newest)
    del documents["progress"]["mover"]  # as before it was noted
    save_checkpoint(newest, tensors, documents)
    with refused("--ckpt_path", "--model.adapter_average"):
        go_on(None)
    go_on(RULES["residual"](rank=1))
    assert len(rows_of(begun / "metrics.csv")) == 2


@pytest.mark.parametrize("rule", ["residual", "stack", "alternate"])
def test_what_is_measured_beside_a_round_leaves_what_clients_keep(rule, tmp_path):
    """Losses that clients tell before they train, norms of gradients, and a client that is alone in
    its stack receive the same message once more."""
    told = {"sampler": Oort(), "clock": Clock(devices=LogNormalDevices()), "max_rounds": 4}
    asked, _ = fitted(tmp_path, rule, callbacks=[GradientNorms(every=1)], **told)
    plain, _ = fitted(tmp_path, rule, max_rounds=4)
    assert weights_of(asked).equal(weights_of(plain))
    settings = {"participation": 0.25, "max_rounds": 4}
    alone, _ = fitted(tmp_path, rule, engine="batched", **settings)
    one, _ = fitted(tmp_path, rule, engine="sequential", **settings)
    assert weights_of(alone).equal(weights_of(one))


@pytest.mark.slow
@pytest.mark.essential
@pytest.mark.parametrize("rule", sorted(RULES))
def test_workers_and_stacks_of_clients_leave_the_same(rule, tmp_path):
    settings = {"max_rounds": 3, "participation": 0.75}
    one, _ = fitted(tmp_path, rule, engine="sequential", **settings)
    two, _ = fitted(tmp_path, rule, engine="sequential", **{**settings, "workers": 2})
    assert weights_of(one).equal(weights_of(two))
    stacked, _ = fitted(tmp_path, rule, engine="batched", **settings)
    torch.testing.assert_close(
        deployed_weights(stacked), deployed_weights(one), rtol=1e-3, atol=1e-4
    )


@pytest.mark.slow
@pytest.mark.essential
@pytest.mark.parametrize("rule", sorted({*RULES} - {"stack"}))
def test_a_server_optimiser_steps_with_what_the_rule_makes(rule, tmp_path):
    plain, _ = fitted(tmp_path, rule, max_rounds=3)
    neutral, _ = fitted(tmp_path, rule, max_rounds=3, settings={"server_optimizer": ServerSGD()})
    assert plain.server["weights"].equal(neutral.server["weights"])
    if rule == "product":  # whose factors have other directions in each round
        return
    momentum = {"server_optimizer": ServerSGD(momentum=0.5)}
    moved, rows = fitted(tmp_path, rule, max_rounds=3, settings=momentum)
    assert not plain.server["weights"].equal(moved.server["weights"])
    if rule in EXACT:
        assert all(float(row["average/factor_error"]) < 1e-6 for row in rows)


class Nobody(Stressor):
    """Returns in the first round, to which noise is added all the same."""

    def change_upload(self, upload, *, round, **_):
        return None if round == 1 else upload


@pytest.mark.parametrize("rule", ["alternate", "stack"])
def test_privacy(rule, tmp_path):
    pytest.importorskip("dp_accounting")
    noisy = {"privacy": ClientPrivacy(noise_multiplier=1e-9, clip_norm=1e3), "max_rounds": 3}
    if rule == "stack":
        with refused("--model.adapter_average stack with trainer.privacy", "frozen_a"):
            fitted(tmp_path, rule, settings={"weigh_by": "clients"}, **noisy)
        return
    plain, _ = fitted(tmp_path, rule, settings={"weigh_by": "clients"}, max_rounds=3)
    private, _ = fitted(tmp_path, rule, settings={"weigh_by": "clients"}, **noisy)
    torch.testing.assert_close(
        private.server["weights"], plain.server["weights"], rtol=1e-4, atol=1e-5
    )
    alone = {"privacy": ClientPrivacy(noise_multiplier=1.0, clip_norm=1.0), "max_rounds": 2}
    alone["callbacks"] = [Nobody()]
    moved, _ = fitted(tmp_path, rule, settings={"weigh_by": "clients"}, **alone)
    assert moved.server["weights"].isfinite().all()


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("rule", ["solve", "product"])
def test_factors_that_nothing_could_send_are_not_made(rule, alike, tmp_path, monkeypatch):
    """Factors of a product of the largest values would leave their range, and every round would be
    void."""
    monkeypatch.setattr(Extreme, "alike", alike)
    made = fit(method_of(Extreme, adapter_average=rule), tmp_path).method
    assert 0 < float(made.server["weights"].abs().max()) < 2**20
    counted = next(tmp_path.rglob("metrics.csv")).read_text()
    assert "average/factor_error" in counted


@pytest.mark.parametrize(
    ("most", "shares"), [(1.0, 1e3 / 1004), (0.3, 0.3), (0.2, 0.2)], ids=["free", "some", "equal"]
)
def test_weights_by_norm_stay_within_the_largest_share(most, shares, monkeypatch):
    """Of five equal clients one has a B that is a thousand times larger."""
    found, mean = [], padded.weighted_mean
    monkeypatch.setattr(padded, "weighted_mean", lambda v, own: found.append(own) or mean(v, own))
    method = method_of(FedAvg, rank=2, adapter_average="padded", max_share=most)
    method.build(prepare_data(records(generate=False, num_clients=5)))
    adapters = method.layout.unpack(torch.ones(method.layout.size))
    plain = method.layout.pack(adapters)
    large = {name: t * (1e3 if "lora_B" in name else 1) for name, t in adapters.items()}
    rows, start = [plain] * 4 + [method.layout.pack(large)], method.server["weights"]
    made = method.adapters.over(method.average)(rows, [0.2] * 5, start)
    if most == 0.2:
        assert not found
        assert made.equal(mean(rows, [0.2] * 5))
    else:
        assert found == [pytest.approx([(1 - shares) / 4] * 4 + [shares])]


def test_what_does_not_go_together_is_refused():
    def check(rule, cls=FedAvg, **settings):
        check_run(Run(cls(adapter_average=rule, **settings)))

    for rule in RULES:
        check(rule)
        with refused(f"--model.adapter_average {rule} with --model SCAFFOLD", "FedAvg"):
            check(rule, SCAFFOLD)
    check("product", QFedAvg)
    with refused("--model.adapter_average residual with --model QFedAvg", "FedAvg"):
        check("residual", QFedAvg)
    for name in ("FedProx", "FedNTD", "FedSAM", "FedAdam", "FedACG"):
        check("residual", getattr(methods, name))
    with refused("--model.adapter_average product with --model.average Krum", "leave average out"):
        check("product", average=Krum())
    check("factors", average=Krum())
    with refused("--model.adapter_average stack with --model.server_optimizer", "residual"):
        check("stack", server_optimizer=ServerAdam())
    for rule in ("product", "solve", "padded"):
        with refused(f"--model.adapter_average {rule} with --model FedExP", "residual"):
            check(rule, methods.FedExP)
        check(rule, methods.FedExP, eps=float("inf"), mean_of_two=False)
        check(rule, server_optimizer=ServerSGD())
    for optimizer in (ServerSGD(momentum=0.9), ServerSGD(lr=0.5), ServerAdam(), Lookahead()):
        with refused("--model.adapter_average product with --model.server_optimizer", "residual"):
            check("product", server_optimizer=optimizer)
        check("solve", server_optimizer=optimizer)
    for rule in ("stack", "product"):
        with refused(f"--model.adapter_average {rule} with a DynamicTerm", "residual"):
            check(rule, terms=[DynamicTerm()])
    check("solve", terms=[DynamicTerm()])
    with refused(
        "--model.adapter_average share_a with --model.personal head", "leave personal out"
    ):
        check("share_a", personal="head")
    assert isinstance(chosen_rule("residual"), Residual)
    assert chosen_rule(Stack(resend=True)).resend


@pytest.mark.parametrize("rule", ["stack", "product", "alternate", "padded"])
def test_rules_that_make_both_factors_refuse_a_frozen_one(rule, tmp_path):
    """Their A would be lost: what they made of B alone was another model, or the run had no A to
    read."""
    with refused(f"--model.adapter_average {rule} with layers.0", "frozen_a"):
        fitted(tmp_path, rule, rank=[1, 2] if rule == "padded" else 2, ffa=True)


class Tied(nn.Sequential):
    """Embedding and head have one weight, and the head has an adapter."""

    reads_tokens = True

    def __init__(self, num_classes: int) -> None:
        super().__init__(nn.Embedding(num_classes, 8), nn.Linear(8, num_classes, bias=False))
        self[1].weight = self[0].weight
        add_adapter(self, "lora", rank=2)

    def forward(self, inputs):
        return super().forward(inputs["input_ids"])


@pytest.mark.parametrize("rule", ["residual", "stack", "product"])
def test_an_adapter_of_a_tied_head_moves_no_base(rule, tmp_path):
    """What a rule adds to the head's weight would be added to the embedding too."""
    method = FedAvg(network=Tied, optimizer=adam(), adapter_average=rule)
    with nullcontext() if rule == "product" else refused(f"{rule} with an adapter on 1", "product"):
        set_up(method, records(generate=False))


def test_a_network_without_two_factors_is_refused(tmp_path):
    with refused("--model.adapter_average factors with a Llama without LoRA", "llama_tiny"):
        fitted(tmp_path, "factors", rank=0)
    with refused("--model.personal", "share_a"):
        fitted(tmp_path, "product", settings={"personal": "*lora_B.*"})


def test_steps_uphill_are_along_the_factor_that_is_trained(tmp_path, caplog):
    """As of a network in which the other factor is frozen, and in a stack of clients too."""
    one = {"cls": FedSAM, "engine": "sequential", "settings": {"rho": 0.3}}
    frozen, _ = fitted(tmp_path, None, ffa=True, max_rounds=1, **one)
    method, rows = fitted(tmp_path, "alternate", max_rounds=1, **one)
    assert deployed_weights(method).equal(deployed_weights(frozen))
    assert float(rows[0]["average/factor_error"]) < 1e-6
    plain, _ = fitted(tmp_path, "alternate", max_rounds=1, engine="sequential")
    assert not deployed_weights(plain).equal(deployed_weights(method))
    both, _ = fitted(tmp_path, "alternate", **one)
    stacked, _ = fitted(tmp_path, "alternate", **{**one, "engine": "batched"})
    torch.testing.assert_close(
        deployed_weights(stacked), deployed_weights(both), rtol=1e-3, atol=1e-4
    )
    assert "one by one" not in caplog.text


def test_a_client_without_the_factor_that_rests_is_named(tmp_path):
    method, _ = fitted(tmp_path, "alternate")
    method.round, client = 3, prepare_data(records(generate=False)).client(1)
    with refused("client 1, which took part in round 2", "put back", LostStateError):
        method.receive(method.broadcast(client), client)


@pytest.mark.parametrize("rule", ["residual", "stack"])
def test_terms_read_the_model_that_was_received_on_a_base_that_moves(rule, tmp_path):
    """Its copy that a term compares with has the moved base; a client's model of another round is
    no such copy."""
    method, _ = fitted(tmp_path, rule, cls=FedNTD)
    method.round, client = 3, prepare_data(records(generate=False)).client(1)
    client.state.clear()
    method.adapters.resend = method.adapters.base.resend = True
    method.receive(method.broadcast(client), client)
    received, held = method.network.state_dict(), method.received_network.state_dict()
    assert method.adapters.base_moved(method)
    assert all(held[name].equal(received[name]) for name in received)
    with refused(f"--model.adapter_average {rule} with --model MOON", "product"):
        fitted(tmp_path, rule, cls=MOON)
