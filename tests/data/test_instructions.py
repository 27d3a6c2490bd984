"""The instruction federation: rules against independent ones, held-out records, and what one model
can reach."""

from __future__ import annotations

import hashlib
import json
import math
import re
from functools import partial
from itertools import chain

import numpy as np
import pytest
import torch
from tiny_language import adam, tiny

from fl_lightning.data import IID, Dirichlet, InstructionData
from fl_lightning.data.text import instructions as made
from fl_lightning.data.text.records import texts_sha256
from fl_lightning.data.text.tokens import IGNORED, ByteTokenizer, prompt_of
from fl_lightning.engines.stacked.batches import stacked_batches
from fl_lightning.errors import InputError
from fl_lightning.methods import FedMPQKD
from fl_lightning.rng import stream

TASKS = [task for cluster in made.CLUSTERS for task in made.tasks()[cluster]]
HOUSES = [made.house_tasks()[cluster] for cluster in made.CLUSTERS]
CPU = torch.device("cpu")


def data(seed: int = 0, **settings) -> InstructionData:
    found = InstructionData(**{"examples_per_client": 60, "tests_per_task": 6, **settings})
    found.prepare_data()
    found.setup()
    found.distribute(seed, CPU)
    return found


def test_records_are_the_same_on_every_machine():
    first = (
        made.training_record(0, client, index, 0.25) for client in range(8) for index in range(20)
    )
    assert (
        texts_sha256(chain.from_iterable(first))
        == "ef07bb1fef9dc8bcae2d5bb9e95dbfd10338019db5cbe003efd68e6966c624f8"
    )
    tests = (record for task in [*TASKS, *HOUSES] for record in made.test_records(0, task, 24))
    assert (
        texts_sha256(chain.from_iterable(tests))
        == "872de19595f60969f103df264f53b1a7325dc2d42ef447777093ca535ceca1ac"
    )
    words = hashlib.sha256("\n".join(made.words()).encode()).hexdigest()
    assert words == "1a0b7ebd965ea6b46de8416c4c82dd90f8e795c937666eb2760ccad69359323d"


def test_the_word_list_is_plain():
    words = made.words()
    assert len(words) == 1500
    assert list(words) == sorted(set(words))
    assert all(re.fullmatch("[a-z]{2,7}", word) for word in words)


def capitals(text: str) -> str:
    return "".join(chr(ord(letter) - 32) if letter.isalpha() else letter for letter in text)


def shift_back(text: str) -> str:
    """The letter-shift language, the other way round."""
    vowels, consonants = "aeiou", "bdfgklmnprstvz"
    back = {letter: vowels[vowels.index(letter) - 1] for letter in vowels}
    back |= {letter: consonants[consonants.index(letter) - 3] for letter in consonants}
    return "".join(back.get(letter, letter) for letter in text)


def spoken(text: str) -> int:
    """The value of a number's name."""
    names = dict(zip(made.NUMBERS.split(), [*range(20), *range(20, 100, 10)], strict=True))
    hundreds, _, rest = text.rpartition("hundred")
    return 100 * names.get(hundreds.strip(), 0) + sum(names[name] for name in rest.split())


def continued(inputs: str) -> str:
    first, second, third = map(int, inputs.split())
    assert third - second == second - first > 0
    return str(2 * third - second)


RIGHT = {
    "task_shift": lambda i, t: shift_back(t) == i,
    "task_to_digits": lambda i, t: spoken(i) == int(t),
    "task_to_words": lambda i, t: spoken(t) == int(i),
    "task_add": lambda i, t: sum(map(int, i.split("+"))) == int(t),
    "task_larger": lambda i, t: sorted(map(int, i.split()))[1] == int(t) > min(map(int, i.split())),
    "task_next": lambda i, t: continued(i) == t,
    "task_camel": lambda i, t: re.sub("([A-Z])", lambda m: "_" + m[1].lower(), t) == i,
    "task_method": lambda i, t: re.sub(r"(\w+)\.(\w+)\((\w+)\)", r"\2(\1, \3)", t) == i,
    "task_list": lambda i, t: t == str(i.split()).replace("'", ""),
    "task_upper": lambda i, t: capitals(i) == t,
    "task_reverse": lambda i, t: t.split()[2::-1] == i.split() != t.split(),
    "task_last": lambda i, t: i.endswith(" " + t),
}


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_every_answer_is_right(task):
    """Against rules written apart, at the ends of the range of inputs and over it."""
    records = [
        task.record(number) for number in {0, task.size - 1, *range(1, task.size, task.size // 97)}
    ]
    assert len({record.inputs for record in records}) == len(records)
    for record in records:
        assert record.task_name == task.name
        assert RIGHT[task.name](record.inputs, record.targets), record


def test_examples_of_the_specification():
    assert made.shift_letters("its play") == "obz tpey"
    house = {
        cluster: task.record(_number("its", "plain"))
        for cluster, task in made.house_tasks().items()
    }
    assert {record.inputs for record in house.values()} == {"its plain"}
    assert [record.targets for record in house.values()] == [
        "obz tpeos",
        "8",
        "itsPlain",
        "plain its",
    ]


def _number(first: str, second: str) -> int:
    """The number of two different words among all ordered choices."""
    words = made.words()
    one, two = words.index(first), words.index(second)
    return one + len(words) * (two - (two > one))


@pytest.mark.parametrize("house", [0.0, 0.1, 0.25, 1 / 3, 0.5, 0.9, 1.0])
def test_the_dial_is_the_share_of_house_records(house):
    marks = np.cumsum([made.is_house(index, house) for index in range(1000)])
    for n in (1, 2, 3, 10, 97, 512, 1000):
        assert abs(marks[n - 1] - n * house) <= math.log2(n) + 1


def test_a_larger_dial_changes_only_the_records_that_become_house_records():
    low, high = ([made.training_record(3, 1, i, house) for i in range(60)] for house in (0.2, 0.7))
    changed = [new for old, new in zip(low, high, strict=True) if old != new]
    assert 25 <= len(changed) <= 35
    assert {record.task_name for record in changed} == {made.HOUSE}


def test_a_record_depends_on_seed_client_and_index_alone():
    few, many = data(num_clients=4), data(num_clients=12, seed=7)
    assert many.train_records[: len(few.train_records)] == few.train_records
    assert made.training_record(0, 5, 17, 0.25) == many.train_records[5 * 60 + 17]
    assert data(num_clients=4, text_seed=1).train_records != few.train_records


def prompts(records) -> set[tuple[str, str]]:
    return {(record.task_name, record.inputs) for record in records}


@pytest.mark.parametrize("partition", [None, IID(), Dirichlet(0.5)], ids=str)
def test_held_out_records_are_never_trained_on(partition):
    """By task and inputs, over all clients, though the small tasks repeat their inputs in
    training."""
    found = data(num_clients=12, examples_per_client=200, tests_per_task=24, partition=partition)
    clients = [found.client(id) for id in range(12)]
    train = prompts(found.train_records[i] for client in clients for i in client.train)
    val = prompts(found.train_records[i] for client in clients for i in client.val)
    test = prompts(found.test_records)
    assert not train & val
    assert not train & test
    assert not val & test
    for records, is_test in ((found.train_records, False), (found.test_records, True)):
        assert {made.place_of(0, record) < made.TEST_SHARE for record in records} == {is_test}
    held = sum(len(client.val) for client in clients)
    assert 0.07 < held / (12 * 200) < 0.13
    assert sorted(np.concatenate([[*c.train, *c.val] for c in clients])) == [*range(12 * 200)]


def test_test_records_are_different_and_as_many_as_asked_for():
    found = data(tests_per_task=24)
    assert len(found.test_records) == (12 + 4) * 24
    for group, cluster in enumerate(made.CLUSTERS):
        own = [r for r, g in zip(found.test_records, found.test_group, strict=True) if g == group]
        assert {r.task_name for r in own} == {
            *(task.name for task in made.tasks()[cluster]),
            made.HOUSE,
        }
        assert len(prompts(own)) == 4 * 24
    with pytest.raises(InputError, match=r"write \d+ or fewer") as refused:
        made.test_records(0, made.tasks()["translation"][1], 200)
    fits = int(re.search("write ([0-9]+)", str(refused.value))[1])
    assert 40 <= fits <= 80  # a fifth of 300 inputs
    assert len(made.test_records(0, made.tasks()["translation"][1], fits)) == fits


def test_one_model_is_right_on_the_house_task_for_the_largest_cluster_at_most():
    """The bound is computed from the records, and the best constant rule reaches it."""
    found = data(tests_per_task=24)
    house = [record for record in found.test_records if record.task_name == made.HOUSE]
    assert made.best_single_model(house) == 1 / 4
    for cluster, task in made.house_tasks().items():
        answer = {record.inputs: record.targets for record in made.test_records(0, task, 24)}
        assert sum(answer[record.inputs] == record.targets for record in house) == len(house) / 4, (
            cluster
        )
    trained = [record for record in found.train_records if record.task_name == made.HOUSE]
    assert made.best_single_model(trained) == 1 / 4
    others = [record for record in found.test_records if record.task_name != made.HOUSE]
    assert made.best_single_model(others) == 1
    unequal = [
        r for r, g in zip(found.test_records, found.test_group, strict=True) if r in house and g < 2
    ]
    assert made.best_single_model(unequal + unequal[:24]) == 2 / 3


def test_without_conflict_one_model_could_be_always_right():
    assert made.HOUSE not in {record.task_name for record in data(house=0.0).test_records}
    assert made.best_single_model(data(house=0.0).train_records) == 1
    assert {record.task_name for record in data(house=1.0).train_records} == {made.HOUSE}


def test_partitions_see_clusters_and_the_natural_one_sees_clients():
    natural = data()
    counts = natural.group_counts()
    assert [row.nonzero()[0].tolist() for row in counts] == [[k % 4] for k in range(8)]
    assert counts.sum() == len(natural.train_records)
    even = data(partition=IID()).group_counts()
    assert even.sum(axis=1).tolist() == [60] * 8
    assert even.min() > 0
    summary = json.loads(json.dumps(natural.partition_summary()))
    assert summary["groups"] == [*made.CLUSTERS]
    assert summary["classes_per_client"] == counts.tolist()
    assert summary["text"]["sha256"] == texts_sha256(
        chain.from_iterable([*natural.train_records, *natural.test_records])
    )
    assert data(text_seed=1).partition_summary()["text"]["sha256"] != summary["text"]["sha256"]
    assert natural.train_target.shape == (480, 72)  # the targets are back where they were


def test_batches_are_the_records():
    """Decoded again; and the same twice, which a resumed run needs."""
    found, tokenizer = data(), ByteTokenizer()
    client = found.client(5)
    batches = list(found.train_batches(client, round=3, epochs=1))
    again = list(found.train_batches(client, round=3, epochs=1))
    seen = []
    for (inputs, target), (_, target_again) in zip(batches, again, strict=True):
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        assert torch.equal(target, target_again)
        assert (target[:, ids.shape[1] :] == IGNORED).all()
        target = target[:, : ids.shape[1]]
        assert ids.shape == mask.shape == target.shape
        assert mask.any(0).all()  # the longest example fills its row
        assert torch.equal(ids == tokenizer.pad, ~mask)
        assert (target[~mask] == IGNORED).all()
        inner = (target[:, :-1] != IGNORED) & mask[:, 1:]
        assert torch.equal(ids[:, 1:][inner], target[:, :-1][inner])
        for row, answer in zip(ids.tolist(), target.tolist(), strict=True):
            labelled = [id for id in answer if id != IGNORED]
            assert labelled[-1] == tokenizer.eos
            seen.append((tokenizer.decode(row), tokenizer.decode(labelled)))
    records = [found.train_records[i] for i in client.train]
    assert sorted(seen) == sorted((prompt_of(r) + r.targets, r.targets) for r in records)


def test_test_and_validation_batches_and_other_labels():
    found = data()
    size = [len(target) for _, target in found.test_batches(50)]
    assert sum(size) == len(found.test_task) == len(found.test_records)
    owners = torch.cat([owner for *_, owner in found.val_batches(batch_size=7)])
    assert np.array_equal(np.bincount(owners, minlength=8), found.val_sizes)
    client = found.client(0)
    nothing = torch.full_like(found.labels(client), IGNORED)
    for _, target in found.train_batches(client, round=1, epochs=1, labels=nothing):
        assert (target == IGNORED).all()


def test_a_public_set_is_held_by_no_client():
    found = data(public_examples=40)
    held = np.concatenate([[*found.client(k).train, *found.client(k).val] for k in range(8)])
    assert not np.isin(held, found.public).any()
    assert len(held) == 480 - 40
    assert {int(found.train_group[i]) for i in found.client(6).train} == {2}
    (inputs, _), *_ = found.public_batches()
    assert len(inputs["input_ids"]) == 40


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"house": 1.5}, "house=1.5"),
        ({"house": float("nan")}, "house=nan"),
        ({"examples_per_client": 0}, "examples_per_client=0"),
        ({"tests_per_task": 0}, "tests_per_task=0"),
        ({"context": 1}, "context=1"),
        ({"num_clients": 0}, "num_clients=0"),
        ({"num_clients": 10**9}, "10"),
        ({"context": 40}, "write context: 6[0-9]$"),  # too_long is no setting here
        ({"tests_per_task": 500}, "or fewer"),
    ],
    ids=str,
)
def test_bad_settings_are_one_error(settings, said):
    with pytest.raises(InputError, match=said):
        data(**settings)


@pytest.mark.parametrize("batch_tokens", [None, 512])
def test_a_wrong_answer_is_read_as_it_is_learnt(batch_tokens):
    """Where label noise changed an answer, the inputs have no token of the true one; clean ones are
    as they were, and all engines see the same batches."""
    found = data(batch_tokens=batch_tokens)
    clients = [found.client(k) for k in (0, 3)]
    noisy = []
    for client in clients:
        labels, where = found.labels(client), np.arange(0, len(client.train), 2)
        noisy.append(found.task.corrupt(labels, where, stream(0, "noise"), 259))
    for client, labels in zip(clients, noisy, strict=True):
        clean = list(found.train_batches(client, round=1, epochs=1, labels=found.labels(client)))
        plain = found.train_batches(client, round=1, epochs=1)
        wrong = found.train_batches(client, round=1, epochs=1, labels=labels)
        changed = 0
        for (one, target), (alike, _), (other, false) in zip(clean, plain, wrong, strict=True):
            assert torch.equal(one["input_ids"], alike["input_ids"])
            mask, ids = one["attention_mask"], other["input_ids"]
            inner = (false[:, : ids.shape[1] - 1] != IGNORED) & mask[:, 1:]
            assert torch.equal(ids[:, 1:][inner], false[:, : ids.shape[1] - 1][inner])
            # prompts and padding stay
            assert torch.equal(ids[:, 1:][~inner], one["input_ids"][:, 1:][~inner])
            rows = (false != target).any(1)
            assert torch.equal(ids[~rows], one["input_ids"][~rows])
            learnt = (
                inner
                & rows[:, None]
                & (target[:, : ids.shape[1] - 1] != false[:, : ids.shape[1] - 1])
            )
            assert (ids[:, 1:][learnt] != one["input_ids"][:, 1:][learnt]).all()
            changed += int(learnt.sum())
        assert changed > 50
    steps = [found.num_steps(client, 1) for client in clients]
    stacked = stacked_batches(found, clients, round=1, epochs=[1, 1], labels=noisy, steps=steps)
    seen = {0: [], 1: []}
    for step in stacked:
        for places, (inputs, target) in step:
            for row, place in enumerate(places):
                seen[place].append((inputs["input_ids"][row], target[row]))
    for place, (client, labels) in enumerate(zip(clients, noisy, strict=True)):
        own = found.train_batches(client, round=1, epochs=1, labels=labels)
        for (inputs, target), (ids, same) in zip(own, seen[place], strict=True):
            assert torch.equal(target, same)
            assert torch.equal(inputs["input_ids"], ids[:, : inputs["input_ids"].shape[1]])


def test_a_teacher_reads_the_wrong_answers_too():
    """FedMPQ-KD, which looks its teacher's logits up by number, trains on the inputs of all other
    methods."""
    found = data()
    client = found.client(0)
    wrong = found.task.corrupt(
        found.labels(client), np.arange(len(client.train)), stream(0, "noise"), 259
    )
    method = FedMPQKD(network=partial(tiny, rank=0), optimizer=adam(), alpha=1.0)
    method.build(found)
    method.alpha = 1.0
    batches = list(method.local_batches(found, client, epochs=2, labels=wrong, steps=2))
    assert len(batches[0]) == 3, "the teacher's logits are known beforehand"
    method.alpha = 0.0
    others = method.local_batches(found, client, epochs=2, labels=wrong, steps=2)
    for (one, target, _), (other, same) in zip(batches, others, strict=True):
        assert torch.equal(one["input_ids"], other["input_ids"])
        assert torch.equal(target, same)
