"""Preferences: the loss of DPO by hand, pairs as tokens, and a federation whose clusters prefer
opposite answers."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from outcomes import rows_of
from refusals import refused
from tiny_language import adam, tiny
from torch.nn import functional as F
from torchmetrics.classification import BinaryAccuracy
from toy import run

from callbacks import LabelNoise
from fl_lightning import rng
from fl_lightning.conformance.bench import prepare_data
from fl_lightning.data import IID, PreferenceFiles, PreferencePairs
from fl_lightning.data.text import preferences
from fl_lightning.data.text.pairs import AnswerPair, encode_pairs
from fl_lightning.data.text.tokens import ByteTokenizer
from fl_lightning.methods import FedAvg, FedVEMoE, LocalOnly, Oracle
from fl_lightning.models.adapters import adapter_layers
from fl_lightning.models.language import LlamaTiny
from fl_lightning.tasks.preference import PairTarget, Preference

PAIRS = [
    AnswerPair("a=", "yes", "no"),
    AnswerPair("long prompt=", "b", "cc"),
    AnswerPair("x", "1", "22"),
]


def pairs(**settings) -> PreferencePairs:
    small = {"num_clients": 4, "examples_per_client": 12, "tests_per_cluster": 8, "batch_size": 4}
    return PreferencePairs(**{**small, **settings})


def log_probability(network, prompt: str, answer: str) -> float:
    """log p(answer and its end | prompt), token by token."""
    head, tail = [256, *prompt.encode()], [*answer.encode(), 257]
    logits = network(torch.tensor([head + tail])).log_softmax(-1)[0]
    return sum(float(logits[len(head) - 1 + place, token]) for place, token in enumerate(tail))


def test_the_loss_is_that_of_the_paper():
    """With a reference of its own, whatever the order of the answers and the padding."""
    torch.manual_seed(0)
    policy, reference, beta = tiny(259).requires_grad_(True), tiny(259), 0.3
    with torch.no_grad():
        for layer in adapter_layers(policy).values():
            layer.lora_B.weight.normal_(std=0.5)
    sequences = encode_pairs(PAIRS, ByteTokenizer(), context=20)
    inputs, target = sequences.batch(torch.arange(3))
    parts = PairTarget.of(target)
    with torch.no_grad():
        texts = [
            (p.chosen, p.rejected) if sign > 0 else (p.rejected, p.chosen)
            for p, sign in zip(PAIRS, parts.sign, strict=True)
        ]
        known = [
            [log_probability(reference, p.prompt, t[k]) for p, t in zip(PAIRS, texts, strict=True)]
            for k in (0, 1)
        ]
    target = PairTarget.joined(parts.labels, torch.tensor(known), parts.sign > 0)
    task = Preference(beta)
    outputs = policy(inputs).detach()
    assert task.accepts(outputs, 259, 3)
    with torch.no_grad():
        margins = [
            beta
            * (
                (log_probability(policy, *p[:2]) - log_probability(reference, *p[:2]))
                - (
                    log_probability(policy, p.prompt, p.rejected)
                    - log_probability(reference, p.prompt, p.rejected)
                )
            )
            for p in PAIRS
        ]
    expected = -np.mean([float(F.logsigmoid(torch.tensor(margin))) for margin in margins])
    assert float(task.loss(outputs, target)) == pytest.approx(expected, rel=1e-4)
    sums = task.examplewise(outputs, target)
    assert sums["reward_margin"][0].tolist() == pytest.approx(margins, abs=1e-4)
    assert sums["preference_accuracy"][0].tolist() == [float(margin > 0) for margin in margins]
    wrong = task.corrupt(target, np.array([1]), np.random.default_rng(0), 259)
    assert task.examplewise(outputs, wrong)["reward_margin"][0].tolist() == pytest.approx(
        [margins[0], -margins[1], margins[2]], abs=1e-4
    )
    assert {*parts.sign.tolist()} == {1.0, -1.0}, "the preferred answer is not told by its place"


def test_what_is_too_long_is_refused_or_cut_where_it_begins():
    with refused("pair 2", "context: 15"):
        encode_pairs(PAIRS, ByteTokenizer(), context=8)
    with refused("pair 1", "write context: 43"):
        encode_pairs(
            [AnswerPair("p", "y" * 41, "y" * 40 + "n")], ByteTokenizer(), context=16, too_long="cut"
        )
    cut = encode_pairs(PAIRS, ByteTokenizer(), context=8, too_long="cut")
    assert cut.cut == 1
    tokens = cut.input_ids[1].flatten().tolist()
    assert bytes(token for token in tokens if token < 256).decode().count("mpt=") == 2
    assert not bytes(token for token in tokens if token < 256).decode().startswith("long")


def test_an_answer_has_something_before_it():
    """Else its first token has no position to be told from; BOS is enough."""
    empty, bare = [PAIRS[0], AnswerPair("", "yes", "no")], ByteTokenizer()
    assert encode_pairs(empty, bare, context=8).length.tolist() == [6, 4]
    bare.bos = None
    with refused("pair 2", "BOS"):
        encode_pairs(empty, bare, context=8)


def test_clusters_prefer_opposite_answers_to_the_same_prompts():
    """What they agree on is equal, and half is neither: no pair of a test prompt is trained on."""
    of_clusters = [preferences.test_pairs(0, cluster, 64, 0.5) for cluster in (0, 1)]
    assert sum(pair.task_name == "house" for pair in of_clusters[0]) == 32
    for one, other in zip(*of_clusters, strict=True):
        assert one.prompt == other.prompt
        same = (one.chosen, one.rejected) == (other.chosen, other.rejected)
        swapped = (one.chosen, one.rejected) == (other.rejected, other.chosen)
        assert (same, swapped) == ((False, True) if one.task_name == "house" else (True, False))
    tests = {pair.prompt for pair in of_clusters[0]}
    trained = [
        preferences.training_pair(0, client, index, 0.5)
        for client in range(4)
        for index in range(50)
    ]
    assert not tests & {pair.prompt for pair in trained}
    assert trained[:50] == [preferences.training_pair(0, 0, index, 0.5) for index in range(50)]


def fitted(method, folder, data=None, **settings):
    small = {"max_rounds": 3, "max_local_steps": 4, "workers": 1, "participation": 1.0}
    trainer = run(method, data or pairs(), folder, **{**small, **settings})
    return rows_of(trainer.run_dir / "metrics.csv")


def network(vocabulary: int):
    return tiny(vocabulary, rank=4)


def test_one_model_is_right_about_half_of_what_is_in_dispute(tmp_path):
    """All pairs are in dispute: the clusters' margins are each other's negatives. A model for each
    is right."""
    data = partial(pairs, conflict=1.0)
    shared = fitted(FedAvg(network=network, optimizer=adam(0.02)), tmp_path / "shared", data())
    assert {float(row["test/preference_accuracy"]) for row in shared} == {0.5}
    assert all(abs(float(row["test/reward_margin"])) < 1e-6 for row in shared)
    more = data(examples_per_client=80)
    apart = fitted(
        Oracle(network=network, optimizer=adam(0.02)), tmp_path / "apart", more, max_local_steps=15
    )
    assert float(apart[-1]["test/preference_accuracy"]) > 0.8
    assert float(apart[-1]["test/reward_margin"]) > 0.05


@pytest.mark.parametrize("size", [32, 5])
def test_what_has_learnt_nothing_is_right_about_half_of_the_pairs(size):
    """And not about those that rounding decides."""
    data = prepare_data(pairs(num_clients=2, tests_per_cluster=16))
    with rng.torch_stream(0, "weights"):
        base = LlamaTiny(data.num_classes)
    data.see_network(base)
    found = []
    for index in torch.arange(len(data.test_target)).split(size):
        target = data.test_target[index]
        with torch.no_grad():
            outputs = base(data.inputs("test", index))
        found.append(data.task.examplewise(outputs, target)["preference_accuracy"][0])
    assert set(torch.cat(found).tolist()) == {0.5}


def test_the_reference_is_the_base_also_where_the_base_moves(tmp_path):
    """A network that has learnt nothing has margins of 0, and the loss log 2. The reference stays
    after rounds."""
    data = pairs()
    method = FedAvg(network=network, optimizer=adam(0.02), adapter_average="residual")
    rows = fitted(method, tmp_path, data)
    assert method.adapters.base_moved(method)
    again, fresh = prepare_data(pairs()), FedAvg(network=network, optimizer=adam(0.0))
    with rng.torch_stream(0, "weights"):
        fresh.build(again)
    again.see_network(fresh.network)
    assert data.train_target.equal(again.train_target)
    inputs, target = again.inputs("test", torch.arange(4)), again.test_target[:4]
    loss = again.task.loss(fresh.network(inputs).detach(), target)
    assert float(loss) == pytest.approx(np.log(2), abs=1e-5)
    assert float(rows[-1]["test/loss"]) < np.log(2)


def test_the_reference_is_computed_as_clients_compute(tmp_path):
    """In bfloat16 too, a network that learns nothing has margins of 0."""
    method = FedAvg(network=network, optimizer=adam(0.0))
    (row,) = fitted(method, tmp_path, precision="bf16-mixed", max_rounds=1)
    assert float(row["test/loss"]) == pytest.approx(np.log(2), abs=1e-6)
    assert float(row["train/loss"]) == pytest.approx(np.log(2), abs=1e-6)


@pytest.mark.parametrize("method", [FedAvg, LocalOnly])
def test_a_named_metric_of_pairs_is_that_of_the_task_for_each_client(tmp_path, method):
    data = pairs(val_fraction=0.3, metrics=[BinaryAccuracy])
    (row,) = fitted(method(network=network, optimizer=adam(0.1)), tmp_path, data, max_rounds=1)
    for split in ("val", "test"):
        assert 0 < float(row[f"{split}/accuracy"]) == float(row[f"{split}/preference_accuracy"])


def test_engines_and_noise(tmp_path):
    """Stacked clients are those trained one by one; wrong preferences are learnt like right
    ones."""
    settings = {"max_rounds": 2}
    one = FedAvg(network=network, optimizer=adam(0.02))
    fitted(one, tmp_path / "one", **settings, engine="sequential")
    many = FedAvg(network=network, optimizer=adam(0.02))
    fitted(many, tmp_path / "many", **settings, engine="batched")
    torch.testing.assert_close(many.server["weights"], one.server["weights"], rtol=1e-3, atol=1e-4)
    for callbacks, least, most in (
        ([], 0.9, 1),
        ([LabelNoise(round=1, clients=1.0, labels=1.0)], 0, 0.1),
    ):
        method, folder = FedAvg(network=network, optimizer=adam(0.02)), tmp_path / str(most)
        rows = fitted(method, folder, pairs(conflict=0.0), callbacks=callbacks, max_rounds=4)
        assert least <= float(rows[-1]["test/preference_accuracy"]) <= most


def write(path: Path, lines) -> Path:
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


def test_json_lines_of_ones_own(tmp_path):
    lines = [
        {
            "prompt": f"Is {k} even? ",
            "chosen": "yes" if k % 2 == 0 else "no",
            "rejected": "maybe",
            "who": f"u{k % 3}",
        }
        for k in range(60)
    ]
    file = write(tmp_path / "pairs.jsonl", lines)
    data = PreferenceFiles(str(file), client="who", context=32, batch_size=4)
    rows = fitted(
        FedAvg(network=network, optimizer=adam(0.02)), tmp_path / "runs", data, max_rounds=2
    )
    assert data.num_clients == 3
    assert len(data.train_target) + len(data.test_target) == 60
    assert 0 < len(data.test_target) < 20
    assert float(rows[-1]["test/preference_accuracy"]) > 0.9
    others = [{**lines[0], "chosen": "of course"}, {**lines[0], "prompt": "nobody has asked"}]
    held = write(tmp_path / "held.jsonl", [*lines[:5], *others])
    tested = PreferenceFiles(str(file), test=str(held), num_clients=5, partition=IID(), context=32)
    assert len(prepare_data(tested).test_target) == 1
    assert tested.text_summary["test pairs left out"] == 6
    dealt = PreferenceFiles(str(file), num_clients=5, partition=IID(), context=32)
    assert prepare_data(dealt).num_clients == 5
    for line, given in (
        ({"prompt": "p", "chosen": "a"}, "line 1"),
        ({"prompt": "p", "chosen": "a", "rejected": "a"}, "line 1"),
        ({"prompt": 3, "chosen": "a", "rejected": "b"}, "line 1"),
        ({"prompt": "p", "chosen": "a", "rejected": "b", "who": None}, "line 1"),
        ({"prompt": "p", "chosen": "a", "rejected": "b", "who": "\ud800"}, "line 1"),
    ):
        with refused(given):
            bad = str(write(tmp_path / "bad.jsonl", [line]))
            PreferenceFiles(bad, context=32, client="who" if "who" in line else None).setup()


def test_what_reads_tokens_one_by_one_is_refused(tmp_path):
    with refused("--model FedVEMoE where the task is Preference"):
        fitted(FedVEMoE(network=network), tmp_path)
    with refused("generate=True with preferences"):
        pairs(generate=True)
