"""``fit --dry_run``: bytes that travel as the ledger counts them, and memory as a process takes
it."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from outcomes import rows_of
from places import ROOT
from tiny_language import adam, fit, method_of, records
from tiny_transformers import save_base
from torch import nn

from fl_lightning.__main__ import main
from fl_lightning.clock import Clock, FedBuff, OverSelection, SameDevice
from fl_lightning.conformance.toy import trainer_in
from fl_lightning.data import FederatedImages, PreferencePairs
from fl_lightning.errors import InputError
from fl_lightning.methods import MOON, FedAvg
from fl_lightning.models.adapters import ADAPTERS, AdapterKind, add_adapter
from fl_lightning.models.language import Llama
from fl_lightning.privacy.secure.settings import SecureSum
from fl_lightning.run.dry_run import forecast, show
from fl_lightning.sampling import Oort, PowerOfChoice, Sampler
from fl_lightning.topology import Gossip, Hierarchy
from fl_lightning.wire import Layout

RULES = [
    None,
    "factors",
    "frozen_a",
    "residual",
    "stack",
    "product",
    "padded",
    "share_a",
    "alternate",
    "solve",
]
MARGIN = 0.25
"""Largest difference of a forecast from what was measured, as a share of the forecast."""
ENTRIES = 200
"""Bytes of a message beside its values: names, ranks of layers, n_k."""


@pytest.mark.parametrize("rank", [2, [1, 2, 3, 2]])
@pytest.mark.parametrize("rule", RULES)
def test_what_travels_is_what_the_ledger_counts(
    rule: str | None, rank: int | list[int], tmp_path: Path
):
    """In the rounds after the first two, in which a rule's messages are of another form."""
    if isinstance(rank, list) and rule not in ("stack", "product", "padded"):
        pytest.skip("it takes one rank")
    given = {"max_rounds": 4, "participation": 1.0, "max_local_steps": 1}
    method = partial(method_of, FedAvg, rank=rank, adapter_average=rule)
    found = forecast(method(), records(generate=False), participation=1.0, rounds=4).metrics()
    fit(method(), tmp_path, **given)
    rows = rows_of(next(tmp_path.rglob("metrics.csv")))[2:]
    for way in ("download", "upload"):
        counted = sum(float(row[f"comm/{way}_bytes"]) for row in rows) / len(rows) / 4
        assert abs(found[f"comm/client_{way}_bytes"] - counted) <= 0.02 * counted + ENTRIES, way


@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapters_of_all_kinds_have_a_forecast(kind: AdapterKind, tmp_path: Path):
    """Those of singular directions among them, where there are shapes and no values to
    decompose."""

    def network(vocab_size: int) -> nn.Module:
        return add_adapter(Llama(vocab_size, width=16, depth=1, heads=2), kind, rank=2)

    def method() -> FedAvg:
        return FedAvg(network=network, optimizer=adam())

    found = forecast(method(), records(generate=False), participation=1.0, rounds=2).metrics()
    fit(method(), tmp_path, max_rounds=2, participation=1.0, max_local_steps=1)
    row = rows_of(next(tmp_path.rglob("metrics.csv")))[-1]
    for way in ("download", "upload"):
        counted = float(row[f"comm/{way}_bytes"]) / 4
        assert abs(found[f"comm/client_{way}_bytes"] - counted) <= 8, way


def test_a_copied_network_has_a_forecast_too():
    """The one of the maker that it is copied from; the network that is copied, or held, keeps its
    values."""
    data = records(generate=False)

    def new(vocab_size: int) -> nn.Module:
        return add_adapter(Llama(vocab_size, width=16, depth=1, heads=2), "lora", rank=2)

    def told(maker: Callable[[int], nn.Module]) -> dict[str, float]:
        method = FedAvg(network=maker, optimizer=adam())
        return forecast(method, data, participation=1.0, rounds=2).metrics()

    network = new(data.num_classes)
    before = copy.deepcopy(network.state_dict())
    assert told(lambda vocab_size: copy.deepcopy(network)) == told(new)
    network.requires_grad_(False)
    head = told(
        lambda vocab_size: nn.Sequential(network, nn.Linear(vocab_size, vocab_size, bias=False))
    )
    assert head["comm/client_upload_bytes"] > 4 * data.num_classes**2
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())


MASKED = [(rule, 2) for rule in RULES if rule not in ("padded", "share_a")]


@pytest.mark.parametrize(("rule", "rank"), [*MASKED, ("product", [1, 2, 3, 2])])
def test_masks_are_in_the_forecast(rule: str | None, rank: int | list[int], tmp_path: Path):
    """Eight bytes for each value of a sum, those of products among them, and what keys and shares
    take."""
    pytest.importorskip("cryptography")
    secure = SecureSum()
    given = {"max_rounds": 4, "participation": 1.0, "max_local_steps": 1, "secure_sum": secure}
    method = partial(method_of, FedAvg, rank=rank, adapter_average=rule)
    data = records(generate=False)
    found = forecast(method(), data, participation=1.0, rounds=4, secure_sum=secure).metrics()
    fit(method(), tmp_path, **given)
    rows = rows_of(next(tmp_path.rglob("metrics.csv")))[2:]
    for way in ("download", "upload"):
        counted = sum(float(row[f"comm/{way}_bytes"]) for row in rows) / len(rows) / 4
        assert abs(found[f"comm/client_{way}_bytes"] - counted) <= 0.02 * counted + ENTRIES, way


@pytest.mark.parametrize(("rounds", "clients"), [("OverSelection", 7), ("FedBuff", 3)])
def test_a_forecast_is_of_the_clients_that_a_round_exchanges_messages_with(
    rounds: str, clients: int
):
    """Ten clients of which half are wanted: 1.3 times as many are asked, or three make a
    version."""
    kind = OverSelection(1.3) if rounds == "OverSelection" else FedBuff(concurrency=6, buffer=3)
    data = FederatedImages(dataset="synthetic", num_clients=10)
    found = forecast(FedAvg(network="mlp"), data, participation=0.5, rounds=4, kind=kind)
    assert found.cohort == clients


class Mine(Sampler):
    """One of a user's own that asks three and takes the first."""

    candidates = 3

    def draw(self, view, among, count):
        return sorted(view.ask(among[:3].tolist()))[:count]


@pytest.mark.parametrize("sampler", [PowerOfChoice(3), PowerOfChoice(2), Oort(), Mine()])
def test_what_candidates_are_asked_is_in_the_forecast(sampler: Sampler, tmp_path: Path, capsys):
    """Two of four clients train, and answers have the bytes that the ledger counts."""
    given = {
        "max_rounds": 2,
        "participation": 0.5,
        "sampler": sampler,
        "clock": Clock(devices=SameDevice()),
    }
    asked, usual = given, given | {"sampler": None}
    found, plain = (
        trainer_in(tmp_path, **one).fit(method_of(), records(generate=False), dry_run=True)
        for one in (asked, usual)
    )
    assert capsys.readouterr().out.count("asking clients") == 1
    sent, less = (
        rows_of(fit(method_of(), tmp_path, **one).run_dir / "metrics.csv")[-1]
        for one in (asked, usual)
    )
    more = float(sent["comm/total_bytes"]) - float(less["comm/total_bytes"])
    assert found["comm/total_bytes"] - plain["comm/total_bytes"] == more > 0


def test_no_total_is_forecast_where_peers_talk_to_each_other(capsys):
    """Ten peers of which each hears the nine others send ninety messages, and not ten."""
    data, method = FederatedImages(dataset="synthetic", num_clients=10), FedAvg(network="mlp")
    given = {"participation": 1.0, "rounds": 2}
    usual, peers, edges = (
        forecast(method, data, topology=topology, **given)
        for topology in (None, Gossip("complete"), Hierarchy())
    )
    assert peers.metrics().items() < usual.metrics().items() == edges.metrics().items()
    assert not any(name.startswith("comm/") for name in peers.metrics())
    for found, said in ((peers, "A message of a peer has"), (edges, "What the nodes of Hierarchy")):
        show(found, method, data, "32-true")
        assert said in capsys.readouterr().out


def test_nothing_is_loaded_or_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    """No weights are read, no data are made, and no folder is there after it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fl_lightning.data.InstructionData.read", None)
    monkeypatch.setattr("fl_lightning.data.PreferencePairs.read", None)
    for config, values in (
        ("lora_default", "197 kB"),
        ("preferences", "197 kB"),
        ("vemoe_default", ""),
    ):
        assert main(["fit", "--config", str(ROOT / "configs" / f"{config}.yaml"), "--dry_run"]) == 0
        out = capsys.readouterr().out
        assert f"A client is sent {values}" in out
        assert ("of its own; what travels" in out) is (config == "vemoe_default")
    assert list(tmp_path.iterdir()) == []


class TrainsLess(FedAvg):
    """Its layout is of what it trains, which nobody knows before it is built."""

    def build(self, data):
        super().build(data)
        self.layout = Layout.of(self.network, include=lambda name: name.endswith("bias"))
        self.start_server()


def test_what_travels_is_not_known_where_a_build_of_ones_own_may_choose_it(capsys):
    for method, said in ((TrainsLess(), True), (MOON(), False)):
        data = FederatedImages(dataset="digits")
        show(forecast(method, data, participation=1.0, rounds=1), method, data, "32-true")
        note = "TrainsLess has a build of its own; what travels is said as if it were weights."
        assert (note in capsys.readouterr().out) is said


def test_a_pair_has_two_sequences_and_a_frozen_base_no_gradients():
    plain = forecast(
        method_of(), records(generate=False, batch_size=8), participation=0.5, rounds=3
    )
    pairs = PreferencePairs(num_clients=4, batch_size=8, context=72)
    two = forecast(method_of(), pairs, participation=0.5, rounds=3)
    assert two.cohort == plain.cohort == 2
    assert two.memory.base == plain.memory.base > plain.memory.trained == plain.memory.gradients
    assert 1.9 < two.memory.activations / plain.memory.activations < 2.1
    bounded = PreferencePairs(num_clients=4, batch_size=8, batch_tokens=8 * 72, context=72)
    half = forecast(method_of(), bounded, participation=0.5, rounds=3)
    assert 1.9 < two.memory.activations / half.memory.activations < 2.1
    assert plain.memory.optimizer == 2 * plain.memory.trained  # AdamW's moments
    sgd = FedAvg(network=method_of().network_spec, optimizer=partial(torch.optim.SGD, lr=0.1))
    whole = forecast(sgd, records(generate=False), participation=1.0, rounds=1)
    assert whole.memory.optimizer == 0


def test_what_cannot_be_told_is_refused_in_one_line(tmp_path: Path):
    (tmp_path / "a.csv").write_text("x,y\n1,0\n2,1\n")
    from fl_lightning.data import TableData

    with pytest.raises(InputError, match="is known once it is read; leave dry_run out") as caught:
        forecast(
            FedAvg(network="mlp"),
            TableData(str(tmp_path / "a.csv"), "y", num_clients=2),
            participation=1,
            rounds=1,
        )
    assert "\n" not in str(caught.value)


def test_a_deployment_refuses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    pytest.importorskip("flwr")
    monkeypatch.chdir(tmp_path)
    config = str(ROOT / "configs" / "lora_default.yaml")
    assert main(["deploy", "--config", config, "--dry_run", "true"]) == 2
    assert "write fit in place of deploy" in capsys.readouterr().err


def measured(*words: str) -> dict[str, float]:
    """What a process grew by while it trained, and what was forecast; blocks that are freed go back
    at once, so that what the process holds is what tensors take."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", ROOT / "tests" / "support" / "measured_step.py", *words],
        capture_output=True,
        text=True,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def check_forecast(*words: str) -> None:
    """Compare the growth of one process with the forecast, or of a second one where that was off:
    pages come and go with what else the machine does."""
    for last in (False, True):
        found = measured(*words)
        assert found["weights"] == found["memory/base_bytes"] + found["memory/trained_bytes"]
        added = found["memory/total_bytes"] - found["weights"]
        if abs(found["grown"] - added) <= MARGIN * added:
            return
        assert not last, f"grown by {found['grown']:,} bytes of {added:,}"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is read from /proc")
@pytest.mark.slow
@pytest.mark.essential
def test_a_process_takes_what_was_forecast():
    check_forecast("llama_tiny", "32", "72")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is read from /proc")
@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [[], ["gradient_checkpointing=1"], ["dtype=bfloat16"], ["rank=0"]]
)
def test_a_process_with_a_model_of_transformers_does_too(words: list[str], tmp_path: Path):
    sizes = {
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
    }
    base = save_base(tmp_path / "base", "SmolLM2", vocab_size=2048, **sizes)
    check_forecast("hf", "16", "128", f"name={base}", *words)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_configuration_without_weights_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Where there is no CUDA, 4 bits are forecast all the same, and checkpointing lowers
    activations."""
    base = save_base(tmp_path / "base", "Mistral")
    for file in base.glob("*.safetensors"):
        file.unlink()
    from fl_lightning.models.language.hf import TransformersLM

    def of(**settings: object):
        network = partial(TransformersLM, name=str(base), rank=4, **settings)
        data = records(generate=False)
        data.num_classes = 258  # the tokens of this base
        return forecast(
            FedAvg(network=network, optimizer=adam()), data, participation=1.0, rounds=1
        )

    plain, narrow = of(), of(load_in_4bit=True, gradient_checkpointing=True)
    linear = 2 * (32 * 32 * 2 + 2 * 16 * 32 + 3 * 32 * 48)
    assert plain.memory.base - narrow.memory.base == linear * 4 - round(linear * 0.5625)
    assert plain.again is not None
    assert plain.again.activations < plain.memory.activations
    assert (
        narrow.metrics()["memory/activations_bytes"]
        > narrow.metrics()["memory/checkpointed_activations_bytes"]
    )
    assert not plain.computes_again
    assert narrow.computes_again
