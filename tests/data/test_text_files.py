"""A person's own text: records and prose from files, and one error for each mistake."""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest
import torch

from fl_lightning.data import IID, TextFiles
from fl_lightning.data.text.prompts import PLAIN
from fl_lightning.data.text.tokens import IGNORED, ByteTokenizer
from fl_lightning.errors import InputError

BYTES = ByteTokenizer()


def line(number: int, task: str = "task_add", **more) -> str:
    record = {
        "task_name": task,
        "definition": "Add.",
        "inputs": f"{number}+1",
        "targets": str(number + 1),
    }
    return json.dumps(record | more)


def data(train: Path, **settings) -> TextFiles:
    found = TextFiles(str(train), **{"context": 32, "batch_size": 4, **settings})
    found.prepare_data()
    found.setup()
    found.distribute(0, torch.device("cpu"))
    return found


def answers(found: TextFiles, split: str = "train") -> list[str]:
    target = found.train_target if split == "train" else found.test_target
    return [BYTES.decode(id for id in row if id != IGNORED) for row in target.tolist()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files of records: 40 of task_add, and 20 of task_plus."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "b.jsonl").write_text("\n".join(line(n) for n in range(40)) + "\n\n")
    (tmp_path / "own" / "a.jsonl").write_text("\r\n".join(line(n, "task_plus") for n in range(20)))
    (tmp_path / "own" / "README.rst").write_text("no text of ours")
    return tmp_path / "own"


def test_a_file_is_a_client_and_a_task_a_group(folder):
    found = data(folder)
    assert found.client_names == ["a.jsonl", "b.jsonl"]
    assert found.groups == ("task_add", "task_plus")
    assert found.num_clients == 2
    counts = found.group_counts()
    assert (counts > 0).tolist() == [[False, True], [True, False]]
    assert counts.sum() + len(found.test_target) == 60
    summary = json.loads(json.dumps(found.partition_summary()))
    assert summary["text"]["clients"] == ["a.jsonl", "b.jsonl"]
    assert summary["groups"] == ["task_add", "task_plus"]


def read_prompts(found: TextFiles, split: str) -> list[str]:
    """What the network reads of each example before its first label."""
    some = found._sequences[split]
    asked = (some.target != IGNORED).long().argmax(1) + 1
    rows = zip(some.input_ids.tolist(), asked.tolist(), strict=True)
    return [BYTES.decode(ids[:length]) for ids, length in rows]


@pytest.mark.parametrize("own_test", [False, True])
@pytest.mark.parametrize(("template", "name"), [("{inputs}=", "definition"), (PLAIN, "task_name")])
def test_what_the_template_leaves_out_parts_no_equal_prompts(tmp_path, template, name, own_test):
    """Each prompt stands in the file four times, with another text that the network never reads."""
    some = [line(n, **{name: f"{k}."}) for n in range(80) for k in range(4)]
    test = [line(n, **{name: "other"}) for n in range(70, 90)]
    (tmp_path / "train.jsonl").write_text("\n".join(some))
    (tmp_path / "test.jsonl").write_text("\n".join(test))
    settings = {"test": str(tmp_path / "test.jsonl")} if own_test else {"test_fraction": 0.3}
    found = data(tmp_path / "train.jsonl", template=template, val_fraction=0.3, **settings)
    prompts, held_out = read_prompts(found, "train"), found.train_held_out
    trained, validated = (
        {prompt for prompt, held in zip(prompts, held_out, strict=True) if held == part}
        for part in (False, True)
    )
    tested = set(read_prompts(found, "test"))
    assert len(tested) >= 10
    assert len(validated) > 10
    assert not trained & validated
    assert not (trained | validated) & tested


@pytest.mark.parametrize("template", [PLAIN, "{inputs}="])
def test_different_prompts_stay_where_they_were(tmp_path, template):
    """Runs of before have the split by the hash of task, definition and inputs, written out."""
    (tmp_path / "train.jsonl").write_text("\n".join(line(n) for n in range(200)))
    found = data(tmp_path / "train.jsonl", template=template, test_fraction=0.25)
    digests = [
        blake2b(f"0/text/place/task_add\0Add.\0{n}+1/0/0".encode(), digest_size=16).digest()
        for n in range(200)
    ]
    tested = [n for n in range(200) if int.from_bytes(digests[n][:6], "little") < 2**48 / 4]
    assert answers(found, "test") == [str(n + 1) for n in tested]


def test_equal_prompts_are_never_on_both_sides(tmp_path):
    """Every record stands in the file five times."""
    (tmp_path / "train.jsonl").write_text("\n".join(line(n) for n in [*range(200)] * 5))
    found = data(
        tmp_path / "train.jsonl",
        test_fraction=0.2,
        val_fraction=0.25,
        num_clients=8,
        partition=IID(),
    )
    prompts = np.array(answers(found))
    clients = [found.client(id) for id in range(8)]
    train, val = (
        {prompts[i] for c in clients for i in getattr(c, part)} for part in ("train", "val")
    )
    test = set(answers(found, "test"))
    assert not train & val
    assert not (train | val) & test
    assert len(train | val | test) == 200
    assert 20 <= len(test) <= 60
    assert 25 <= len(val) <= 60


def test_clients_and_groups_by_keys_of_the_records(tmp_path):
    (tmp_path / "train.jsonl").write_text(
        "\n".join(line(n, writer=n % 3, topic="odd" if n % 2 else "even") for n in range(30))
    )
    (tmp_path / "test.jsonl").write_text(
        "\n".join(line(n, writer=9, topic="new") for n in range(25, 40))
    )
    settings = {"test": str(tmp_path / "test.jsonl"), "client": "writer", "group": "topic"}
    found = data(tmp_path / "train.jsonl", **settings)
    assert found.client_names == ["0", "1", "2"]
    assert found.groups == ("even", "new", "odd")
    assert found._holdings.sizes.tolist() == [10, 10, 10]
    assert sorted(answers(found, "test"), key=int) == [str(n + 1) for n in range(30, 40)]
    assert found.text_summary["test records left out"] == 5
    with pytest.raises(InputError, match="write num_clients: 3"):
        data(tmp_path / "train.jsonl", num_clients=2, **settings)


def test_prose_is_cut_into_windows_by_file(tmp_path):
    texts = {"one.txt": "ab" * 100, "two.md": "The quick brown fox. " * 40}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    found = data(tmp_path, test_fraction=0.25, val_fraction=0.2)
    assert found.groups == ("one.txt", "two.md")
    for client, text in enumerate(texts.values()):
        train = "".join(
            a for a, g in zip(answers(found), found.train_group, strict=True) if g == client
        )
        test = "".join(
            a for a, g in zip(answers(found, "test"), found.test_group, strict=True) if g == client
        )
        assert train + test == text
        assert abs(len(test) / len(text) - 0.25) <= 32 / len(text)
    batches = [
        batch for id in (0, 1) for batch in found.train_batches(found.client(id), round=1, epochs=1)
    ]
    assert {inputs["input_ids"].shape[1] for inputs, _ in batches} == {32}
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "three.txt").write_text("other words")
    found = data(tmp_path, test=str(tmp_path / "test"))
    assert answers(found, "test") == ["other words"]
    assert "".join(answers(found)) == "".join(texts.values())
    assert found.groups == ("one.txt", "two.md", "three.txt")


def test_a_file_of_one_window_is_trained_on(tmp_path):
    """Its client is not left without examples; where no file has a second window there is no test
    text."""
    (tmp_path / "short.txt").write_text("a few words")
    with pytest.raises(InputError, match="no example is left for test"):
        data(tmp_path)
    (tmp_path / "long.txt").write_text("The quick brown fox. " * 9)
    found = data(tmp_path, val_fraction=0.0)
    assert found.sizes.tolist() == [5, 1]
    assert answers(found)[-1] == "a few words"
    assert found.test_group.tolist() == [0]


def test_the_advice_fits_all_records(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        "\n".join(line(n, inputs="5" * (20 + 5 * n)) for n in range(12))
    )
    with pytest.raises(InputError, match=r"write context: [0-9]+, or too_long: cut$") as error:
        data(tmp_path, test_fraction=0.2)
    needed = int(error.value.instead.split()[2].strip(","))
    assert needed > 80
    with pytest.raises(InputError):
        data(tmp_path, test_fraction=0.2, context=needed - 1)
    data(tmp_path, test_fraction=0.2, context=needed)


def test_long_records_are_refused_with_their_line_or_cut_and_counted(tmp_path, caplog):
    (tmp_path / "a.jsonl").write_text(
        "\n".join([line(1), line(2, inputs="5" * 60), *map(line, range(9))])
    )
    with pytest.raises(
        InputError, match=r"a\.jsonl, line 2 \(task_add\).*takes 69 tokens of a context of 32"
    ):
        data(tmp_path, test_fraction=0.01)
    found = data(tmp_path, too_long="cut", test_fraction=0.01)
    assert found.partition_summary()["text"]["examples cut"]["train"] == 1
    assert "1 of 10 training examples are longer than context=32 and were cut" in caplog.text
    with pytest.raises(InputError, match="context=1000000000000"):
        data(tmp_path, context=10**12)


MISTAKES = {
    "not JSON": (b'{"task_name": }', "line 3; it is not JSON"),
    "cut off": (line(3).encode()[:-5], "line 3; it is not JSON"),
    "an array": (b"[1, 2]", "line 3; it is no JSON object"),
    "deep": (b"[" * 100_000, "line 3; it is not JSON"),
    "a missing key": (
        b'{"task_name": "a", "definition": "b", "inputs": "c"}',
        "line 3; the key targets is missing",
    ),
    "a number": (line(3, targets=4).encode(), "line 3; the value of targets is no text"),
    "null": (line(3, inputs=None).encode(), "line 3; the value of inputs is no text"),
    "half a character": (
        line(3, inputs="\ud800").encode(),
        "line 3; the value of inputs is no text",
    ),
    "no answer": (line(3, targets="").encode(), "line 3; targets is empty"),
    "not UTF-8": (b"\xff", "is not UTF-8"),
}


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ("NaN", "line 1; the value of user is NaN; a name is a text"),
        ('["a"]', 'line 1; the value of user is ["a"]; a name is a text'),
        ('1 "1"', 'line 2; the value of user is "1" and 1 on a line before'),
        ('1.0 "1.0"', 'line 2; the value of user is "1.0" and 1.0 on a line before'),
        ("1 1.0", "line 2; the value of user is 1.0 and 1 on a line before"),
        ('true "True"', 'line 2; the value of user is "True" and true on a line before'),
    ],
)
def test_two_values_are_never_read_as_one_client(tmp_path, names, said):
    lines = [line(n)[:-1] + f', "user": {name}}}' for n, name in enumerate(names.split())]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    with pytest.raises(InputError) as refused:
        data(tmp_path / "a.jsonl", client="user")
    assert said in str(refused.value)


def test_numbers_are_names_of_clients_as_they_are_written(tmp_path):
    lines = [line(n, user=(7, 2.5, "b")[n % 3]) for n in range(60)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    assert data(tmp_path / "a.jsonl", client="user").client_names == ["2.5", "7", "b"]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_file_is_one_line_that_names_it(tmp_path, mistake):
    wrong, said = MISTAKES[mistake]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([line(1).encode(), b"", wrong, line(4).encode()]))
    with pytest.raises(InputError, match=said) as refused:
        data(tmp_path / "a.jsonl")
    assert "a.jsonl" in refused.value.given
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("files", "settings", "said"),
    [
        ({}, {}, "no text in this folder"),
        ({}, {"train": "nowhere"}, "nowhere; no such file"),
        ({"a.jsonl": ""}, {}, "the file is empty"),
        ({"a.txt": " \n"}, {}, "the file is empty"),
        ({"a.txt": "abc", "b.jsonl": line(1)}, {}, "JSON lines and plain text"),
        ({"a.csv": "abc"}, {"train": "a.csv"}, "a text file's name ends in"),
        ({"a.txt": "abc"}, {"test_fraction": 0.0}, "test_fraction=0.0"),
        ({"a.txt": "abc"}, {"test_fraction": 1.0}, "test_fraction=1.0"),
        ({"a.txt": "abc"}, {"num_clients": -1}, "num_clients=-1"),
        ({"a.txt": "abc"}, {}, "no example is left for test"),
        ({"a.jsonl": line(1)}, {"test_fraction": 0.001}, "no example is left for test"),
        ({"a.jsonl": line(1)}, {"client": "writer"}, "the key writer is missing"),
        (
            {"a.jsonl": '{"ann": [{"client": "bob"}]}'},
            {},
            "record 1 of ann; its client is 'bob'; leave client out",
        ),
        (
            {"a.jsonl": line(1), "t/b.txt": "abc"},
            {"test": "t"},
            "both are JSON lines or both are plain text",
        ),
    ],
    ids=str,
)
def test_other_mistakes_are_one_error(tmp_path, monkeypatch, files, settings, said):
    monkeypatch.chdir(tmp_path)
    for name, text in files.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)
    with pytest.raises(InputError, match=said):
        data(Path(settings.pop("train", ".")), **settings)
