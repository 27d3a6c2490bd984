"""Noise in the words of prompts: each kind by its definition, and the probe that shows it to a
model."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
import torch
from tiny_language import tiny
from toy import run, sgd

from fl_lightning.data import (
    IID,
    ConversationFiles,
    CorpusData,
    InstructionData,
    TextFiles,
    TokenData,
)
from fl_lightning.data.text.tokens import IGNORED, PROMPT_END, ByteTokenizer
from fl_lightning.methods import FedAvg
from fl_lightning.probing import PROBES, ProbedModel, noisy_prompts
from fl_lightning.probing.by_kind import TIMED_PROMPTS
from fl_lightning.probing.corruptions.typos import KEYBOARD, NEIGHBOURS, NOISES, add_noise
from fl_lightning.probing.noisy_prompts import noisy_batch

TEXT = "Give the UPPER-case word, 42 times:\nan international federation f(x, y) ..."


def words(text: str) -> list[str]:
    return "".join(
        letter if letter.isascii() and letter.isalpha() else " " for letter in text
    ).split()


def noisy(noise: str, seed: int) -> str:
    return add_noise(TEXT, noise, np.random.default_rng(seed))


@pytest.mark.parametrize("noise", NOISES)
def test_noise_changes_letters_of_words_and_nothing_else(noise):
    for seed in range(20):
        found = noisy(noise, seed)
        assert found == noisy(noise, seed)
        assert [c for c in found if not c.isalpha()] == [c for c in TEXT if not c.isalpha()]
        assert [c.isalpha() for c in found] == [c.isalpha() for c in TEXT]
    assert len({noisy(noise, seed) for seed in range(20)}) > 1


def pairs(noise: str) -> list[tuple[str, str]]:
    return [
        pair
        for seed in range(50)
        for pair in zip(words(TEXT), words(noisy(noise, seed)), strict=True)
    ]


def test_each_noise_is_what_the_paper_says():
    for before, after in pairs("swap"):
        wrong = [at for at, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
        if len(before) < 4:
            assert before == after
        elif wrong:  # the letters may be equal
            assert wrong[1] == wrong[0] + 1
            assert wrong[0] > 0
            assert wrong[1] < len(before) - 1
            assert (after[wrong[0]], after[wrong[1]]) == (before[wrong[1]], before[wrong[0]])
    for before, after in pairs("middle"):
        assert (before[0], before[-1], Counter(before)) == (after[0], after[-1], Counter(after))
    assert all(Counter(before) == Counter(after) for before, after in pairs("full"))
    assert any(before[0] != after[0] for before, after in pairs("full"))
    for before, after in pairs("keyboard"):
        (wrong,) = [(a, b) for a, b in zip(before, after, strict=True) if a != b]
        assert wrong[1].lower() in NEIGHBOURS[wrong[0].lower()]
        assert wrong[0].isupper() == wrong[1].isupper()


def test_neighbours_of_keys_are_mutual():
    assert set(NEIGHBOURS) == set("".join(KEYBOARD))
    assert all(key in NEIGHBOURS[other] for key, around in NEIGHBOURS.items() for other in around)


def made() -> InstructionData:
    found = InstructionData(num_clients=2, examples_per_client=12, tests_per_task=2)
    found.setup()
    found.distribute(0, torch.device("cpu"))
    return found


def test_prompts_get_noise_and_their_ends_and_answers_stay(monkeypatch):
    data, tokenizer = made(), ByteTokenizer()
    every = torch.arange(len(data.test_target))
    clean, target = (
        data.inputs("test", every),
        data.test_target[:, : int(data._sequences["test"].length.max())],
    )
    with monkeypatch.context() as patched:
        patched.setattr(
            "fl_lightning.probing.noisy_prompts.add_noise", lambda text, noise, rng: text
        )
        same, same_target = noisy_batch(data, every, "swap", 0)
    assert torch.equal(same["input_ids"], clean["input_ids"])
    assert torch.equal(same["attention_mask"], clean["attention_mask"])
    assert torch.equal(same_target, target)
    found, found_target = noisy_batch(data, every, "full", 0)
    assert torch.equal(found_target, target)  # of bytes no noise changes the length
    labelled = target != IGNORED
    for row in range(len(every)):
        start = int(labelled[row].int().argmax()) + 1
        prompt = tokenizer.decode(found["input_ids"][row, :start].tolist())
        assert prompt.endswith(PROMPT_END)
        assert found["input_ids"][row, 0] == tokenizer.bos
        assert torch.equal(found["input_ids"][row, start:], clean["input_ids"][row, start:])
    assert (found["input_ids"] != clean["input_ids"]).any()
    part, part_target = noisy_batch(data, every[3:5], "full", 0)
    width = part_target.shape[1]
    assert torch.equal(part["input_ids"], found["input_ids"][3:5, :width])  # whatever the batch


class Merging(ByteTokenizer):
    """Makes one token of a question mark and a blank, as merges across a seam do."""

    vocab_size = 260

    def encode(self, text: str) -> list[int]:
        return [id for part in text.split("? ") for id in [259, *part.encode()]][1:]

    def decode(self, ids) -> str:
        return super().decode(b for id in ids for b in (b"? " if id == 259 else [id]))


def asking(folder, template: str):
    """The data of a question in a conversation, whose tokens are made in one, and in a record."""
    for cls, key in ((ConversationFiles, "conversations"), (TextFiles, "definition")):
        paths = []
        for split in ("train", "test"):
            turns = [
                {"from": "human", "value": f"What of {split}?"},
                {"from": "gpt", "value": "A cow."},
            ]
            record = {
                "task_name": "",
                "definition": "Name it",
                "inputs": split,
                "targets": "A cow.",
            }
            paths.append(folder / f"{key}_{split}.jsonl")
            paths[-1].write_text(json.dumps({**record, "conversations": turns}))
        made = cls(*map(str, paths), template=template, tokenizer=Merging())
        made.setup()
        yield made


@pytest.mark.parametrize(
    "template", ["USER: {inputs} ASSISTANT: ", "{inputs} {definition} Answer: "]
)
def test_the_words_of_a_template_before_the_answer_have_no_noise(template, tmp_path, monkeypatch):
    for data in asking(tmp_path, template):
        index = torch.arange(1)
        clean = data.inputs("test", index)["input_ids"]
        assert (259 in clean) == isinstance(data, ConversationFiles)  # records are encoded apart
        found = noisy_batch(data, index, "keyboard", 0)[0]["input_ids"]
        assert (found != clean).any()
        end = f" {template.split()[-1]} A cow."
        assert data.tokenizer.decode(found[0].tolist()).endswith(end)
        with monkeypatch.context() as patched:
            patched.setattr(noisy_prompts, "add_noise", lambda text, noise, rng: text)
            assert torch.equal(noisy_batch(data, index, "keyboard", 0)[0]["input_ids"], clean)


def subject(tmp_path, data, network="llama_tiny") -> ProbedModel:
    method = FedAvg(network=network, optimizer=sgd(0.05))
    trainer = run(method, data, tmp_path, max_rounds=1, max_local_steps=1)
    return ProbedModel(trainer.fabric, method, trainer.data, {}, trainer.seed)


def test_the_probe_measures_what_the_clean_test_does(tmp_path, monkeypatch):
    probed = subject(tmp_path, made())
    finding = PROBES["corruptions"](probed)
    names = {"loss", "perplexity", "token_accuracy", "exact_match", "rouge_l"}
    assert set(finding.metrics) == {
        f"typos/{noise}{name}" for noise in ("", *(f"{n}/" for n in NOISES)) for name in names
    }
    each = [finding.metrics[f"typos/{noise}/loss"] for noise in NOISES]
    assert finding.metrics["typos/loss"] == pytest.approx(sum(each) / len(each))
    assert finding.metrics == PROBES["corruptions"](probed).metrics
    assert finding.skipped == [
        "corruptions of images (CIFAR-C) left out: the examples of InstructionData are tokens"
    ]
    clean = PROBES["clean"](probed).metrics
    assert finding.metrics["typos/loss"] > clean["test/loss"]
    monkeypatch.setattr(noisy_prompts, "add_noise", lambda text, noise, rng: text)
    neutral = PROBES["corruptions"](probed).metrics
    for name in names:
        assert neutral[f"typos/swap/{name}"] == pytest.approx(clean[f"test/{name}"])


def test_answers_are_timed_in_evaluation_mode(tmp_path, monkeypatch):
    probed, modes = subject(tmp_path, made()), []
    network = probed.method.network
    original = type(network).generate

    def generate(self, *arguments, **settings):
        modes.append(self.training)
        return original(self, *arguments, **settings)

    monkeypatch.setattr(type(network), "generate", generate)
    network.train()
    found = PROBES["generation"](probed)
    assert modes == [False] * (1 + TIMED_PROMPTS + 1)
    assert network.training
    assert found.details[f"batch of {TIMED_PROMPTS}"] == "measured once, so p99 is the median"


class Dialogues(torch.utils.data.Dataset):
    """Two answers in each, with what is asked before them; of ``learnt`` one answer, after the token
    that ends a turn."""

    def __init__(self, learnt=(0, 0, 1, 0, 1, 1)):
        self.learnt = [*learnt]

    def __len__(self):
        return 20

    def __getitem__(self, index):
        ids = [97 + index, 98, 99, 257, 101, 102]
        return {"input_ids": ids, "loss_mask": self.learnt}


@pytest.mark.parametrize(
    ("items", "settings", "why"),
    [
        (Dialogues(), {"tokenizer": ByteTokenizer()}, "questions stand between answers"),
        (
            Dialogues((0, 0, 0, 0, 1, 1)),
            {"tokenizer": ByteTokenizer()},
            "its prompts hold tokens that are no text",
        ),
        (Dialogues(), {"vocab_size": 258}, "its tokens are numbers, and no words"),
    ],
)
def test_dialogues_and_tokens_that_are_no_text_have_no_noise(items, settings, why, tmp_path):
    data = TokenData(items, num_clients=2, context=16, partition=IID(), **settings)
    finding = PROBES["corruptions"](subject(tmp_path, data, tiny))
    assert finding.metrics == {}
    assert finding.skipped[-1] == f"noise in prompts left out: {why}"


def test_plain_text_has_no_prompts(tmp_path):
    data = CorpusData(packages=["yaml"], context=64, max_characters=2000)
    finding = PROBES["corruptions"](subject(tmp_path, data))
    assert not finding.metrics
    assert "every token is labelled" in finding.skipped[1]
