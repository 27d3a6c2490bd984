"""Token ids of one's own: what is learnt is what the labels say, padding is nothing, and mistakes
are one line."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from page_commands import documented, file_of_page
from places import DOCS
from tiny_language import method_of
from toy import run

from fl_lightning.__main__ import main
from fl_lightning.data import IID, DatasetData, Dirichlet, Natural, TextFiles, TokenData, TokenFile
from fl_lightning.data.text.tokens import ByteTokenizer, Record, encode_records
from fl_lightning.errors import InputError
from fl_lightning.metrics.text import IGNORED

PAGE = DOCS / "howto" / "token_ids.md"
BYTES = ByteTokenizer()


class ListData(torch.utils.data.Dataset):
    """Items from a list."""

    def __init__(self, items: list) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int):
        return self.items[index]


def ready(train: list, **settings) -> TokenData:
    test = settings.pop("test", None)
    if "client" not in settings:
        settings = {"num_clients": 1, **settings}
    data = TokenData(
        ListData(train), None if test is None else ListData(test), **{"context": 16, **settings}
    )  # type: ignore[arg-type]
    data.prepare_data()
    data.setup()
    data.distribute(0, torch.device("cpu"))
    return data


def only(item) -> tuple[list[int], list[int]]:
    """Inputs and targets of an item, as a network gets them."""
    data = ready([item], test=[[7, 7, 8]])
    inputs, target = next(data.train_batches(data.client(0), round=1, epochs=1))
    length = int(inputs["attention_mask"][0].sum())
    assert (target[0, length:] == IGNORED).all()
    return inputs["input_ids"][0, :length].tolist(), target[0, :length].tolist()


HF = {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]}
SAME = {
    "labels": HF,
    "labels of the first token count for nothing": {**HF, "input_ids": [5, 6, 7, 8], "labels": [5, -100, 7, 8]},
    "a loss mask": {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1]},
    "a tuple": ([5, 6, 7, 8], [-100, -100, 7, 8]),
    "tensors": tuple(map(torch.tensor, HF.values())),
    "padding on the right": {
        "input_ids": [5, 6, 7, 8, 0, 0], "labels": [-100, -100, 7, 8, 3, 0], "attention_mask": [1, 1, 1, 1, 0, 0]
    },
    "padding on the left": {
        "input_ids": [9, 5, 6, 7, 8], "labels": [9, -100, -100, 7, 8], "attention_mask": [0, 1, 1, 1, 1]
    },
    "names that nothing reads": {**HF, "token_type_ids": [0, 0, 0, 0], "text": "abc"},
}  # fmt: skip


@pytest.mark.parametrize("form", SAME)
def test_every_form_of_an_item_is_the_same_example(form):
    """The target at a position is the token that follows, where that one is labelled."""
    assert only(SAME[form]) == ([5, 6, 7], [IGNORED, 7, 8])


@pytest.mark.parametrize("item", [[5, 6, 7, 8], torch.tensor([5, 6, 7, 8]), (torch.tensor([5, 6, 7, 8]),), (5, 6, 7, 8), {"input_ids": [5, 6, 7, 8]}])  # fmt: skip
def test_without_labels_every_token_but_the_first_is_learnt(item):
    assert only(item) == ([5, 6, 7], [6, 7, 8])


def words(number: int) -> Record:
    return Record(
        "count", "Count.", " ".join(str(number + k) for k in range(1 + number % 5)), str(number + 9)
    )


def as_tokens(record: Record) -> dict:
    prompt = [BYTES.bos, *BYTES.encode(f"{record.definition}\n{record.inputs}\n=")]
    answer = [*BYTES.encode(record.targets), BYTES.eos]
    return {
        "input_ids": prompt + answer,
        "labels": [-100] * len(prompt) + answer,
        "writer": f"w{len(record.inputs) % 3}",
    }


def test_records_that_are_tokenised_before_are_the_records():
    """The same tensors as TextFiles makes of the text, in every row, and the same clients."""
    records = [words(number) for number in range(30)]
    data = ready([as_tokens(one) for one in records], test=[as_tokens(words(99))], client="writer", num_clients=0, context=40)  # fmt: skip
    expected = encode_records(records, BYTES, 40)
    assert torch.equal(data._sequences["train"].input_ids, expected.input_ids)
    assert torch.equal(data.train_target, expected.target)
    assert torch.equal(data._sequences["train"].length, expected.length)
    assert isinstance(data.partition, Natural)
    for client in range(3):
        held = [*data.client(client).train, *data.client(client).val]
        assert {len(records[k].inputs) % 3 for k in held} == {client}


def test_the_run_is_that_of_the_text(tmp_path):
    """Two rounds of FedAvg over ids and over the text that they are of end in the same weights."""
    records = [words(number) for number in range(40)]
    lines = tmp_path / "records.jsonl"
    lines.write_text("\n".join(json.dumps(one._asdict()) for one in records))
    test = tmp_path / "test.jsonl"
    test.write_text(json.dumps(words(99)._asdict()))
    settings = {
        "context": 40,
        "num_clients": 3,
        "partition": IID(),
        "batch_size": 4,
        "val_fraction": 0.0,
        "generate": True,
    }
    made = {
        "text": TextFiles(str(lines), str(test), **settings),
        "ids": TokenData(ListData([as_tokens(one) for one in records]), ListData([as_tokens(words(99))]), **settings),  # type: ignore[arg-type]
    }  # fmt: skip
    results = {
        name: run(method_of(), data, tmp_path / name, max_rounds=2, workers=1).method.server[
            "weights"
        ]
        for name, data in made.items()
    }
    assert torch.equal(results["ids"], results["text"])
    assert "exact_match" in next((tmp_path / "ids").rglob("metrics.csv")).read_text()
    summary = json.loads(next((tmp_path / "ids").rglob("partition.json")).read_text())["text"]
    assert len(summary["sha256"]) == 64
    assert summary["test items left out"] == 0


def test_the_split_parts_no_equal_items_and_is_the_same_in_every_run():
    items = [[1, 2, k % 20, 3] for k in range(60)]
    one, other = (ready(items, test_fraction=0.25) for _ in range(2))
    parts = [set(data._sequences[split].input_ids[:, 2].tolist()) for data in (one, other) for split in ("train", "test")]  # fmt: skip
    assert parts[:2] == parts[2:]
    assert not parts[0] & parts[1]
    assert len(parts[1]) == 5
    assert len(one.test_target) == 15
    given = ready(items[:40], test=[*items[35:45], [4, 4, 4]])
    assert len(given.test_target) == 1
    assert given.text_summary["test items left out"] == 10


def test_content_changes_the_hash_and_a_mask_is_content():
    plain, masked = (ready([[1, 2, 3], item], test=[[9, 9]]) for item in ([4, 5, 6], {"input_ids": [4, 5, 6], "loss_mask": [0, 0, 1]}))  # fmt: skip
    assert plain.content_sha256 != masked.content_sha256
    assert plain.content_sha256 == ready([[1, 2, 3], (4, 5, 6)], test=[[9, 9]]).content_sha256


def test_defaults_of_the_partition_and_a_vocabulary_of_ones_own(tmp_path):
    items = [
        {"input_ids": [k % 300, 999, 5, 2], "loss_mask": [0, 0, 1, 1], "site": k % 4}
        for k in range(40)
    ]
    data = ready(items, group="site", num_clients=2, vocab_size=1000, eos=2, generate=True)
    assert isinstance(data.partition, Dirichlet)
    assert data.num_classes == 1000
    assert data.group_names == ("0", "1", "2", "3")
    assert isinstance(ready(items, num_clients=2, vocab_size=1000).partition, IID)
    trainer = run(method_of(rank=0), data, tmp_path, max_rounds=25, workers=1)
    metrics = next(tmp_path.rglob("metrics.csv")).read_text().splitlines()
    last = dict(zip(metrics[0].split(","), metrics[-1].split(","), strict=True))
    assert float(last["test/exact_match"]) == 1.0, "the answer is always 5 and the end"
    assert trainer.data.task.generates


def test_an_item_that_is_cut_keeps_its_beginning():
    data = ready([list(range(10)), [1, 2]], test=[[9, 9]], context=4, too_long="cut")
    assert data.train_target[0].tolist() == [1, 2, 3, 4]
    assert data.partition_summary()["text"]["examples cut"] == {"train": 1, "test": 0}


WRONG = {
    "text": (["a text"] * 3, {}, "item 0; its input_ids are no row of whole numbers; give the ids of one sequence"),
    "fractions": ([[0.5, 1.0]], {}, "no row of whole numbers"),
    "rows of several lengths": ([[[1], [2, 3]]], {}, "no row of whole numbers"),
    "empty": ([[]], {}, "item 0; its input_ids are empty"),
    "no ids": ([{"ids": [1, 2]}], {}, "item 0; it has no input_ids; write ids"),
    "beyond the vocabulary": ([[1, 2], [3, 259]], {}, r"item 1, token \[259\]; ids are 0 to 258 with a vocabulary"),
    "negative": ([[1, -100]], {}, r"token \[-100\]; ids are 0 to 258"),
    "shifted labels": ([([5, 6, 7], [6, 7, -100])], {}, r"label \[6\] of the token \[5\] at \[0\]; a label is the token at its own"),
    "both": ([{**HF, "loss_mask": [0, 0, 1, 1]}], {}, "it has labels and a loss_mask"),
    "short labels": ([([5, 6, 7], [6, 7])], {}, r"labels \[2\]; it has one for each of the 3 tokens"),
    "a weight": ([{"input_ids": [1, 2], "loss_mask": [0, 0.5]}], {}, "its loss_mask has values other than 0 and 1"),
    "lists in a mask": ([{"input_ids": [1, 2], "loss_mask": [[0], [0, 1]]}], {}, r"item 0, loss_mask \[0, 0\]; it has one for each of the 2 tokens"),
    "words in a mask": ([{"input_ids": [1, 2], "loss_mask": ["no", "yes"]}], {}, "its loss_mask has values other than 0 and 1"),
    "lists in ids": ([([[1], [2, 3]], [1, 2])], {}, "its input_ids are no row of whole numbers"),
    "a hole": ([{"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}], {}, "its attention_mask has a 0 between ones"),
    "all padding": ([{"input_ids": [1, 2], "attention_mask": [0, 0]}], {}, "its attention_mask is 0 everywhere"),
    "nothing learnt": ([([5, 6], [-100, -100])], {}, "none of its tokens after the first is to be learnt"),
    "one token": ([[5]], {}, "item 0 of 1 tokens; none of its tokens after the first is to be learnt"),
    "too long": ([list(range(30))], {"test": [[1, 2]]}, "item 0 of 30 tokens; it takes 29 positions of a context of 16; write context: 29"),
    "too long behind a split": ([*([k, k] for k in range(20)), list(range(30))], {}, "data.train ListData, item 20 of 30 tokens"),
    "cut before the answer": ([(list(range(30)), [-100] * 29 + [29])], {"test": [[1, 2]], "too_long": "cut"}, "none of its first 17 tokens is to be learnt"),
    "no client": ([{"input_ids": [1, 2]}], {"client": "writer", "num_clients": 0}, "writer; .*item 0 has no such name"),
    "two clients of one name": ([{"input_ids": [1, n], "who": [3, "3"][n % 2]} for n in range(20)], {"client": "who", "num_clients": 0}, "client '3' and 3; they are two values"),
    "no such place": ([([1, 2], [1, 2])], {"client": 2, "num_clients": 0}, "2; .*item 0 has no such position"),
    "clients of nobody": ([[1, 2]], {"num_clients": 0}, "nothing says whose an example is"),
    "one item": ([[1, 2]] * 5, {}, "there are not two different ones"),
    "the test is the training": ([[1, 2]], {"test": [[1, 2]]}, "all its items are training items too"),
    "an answer without end": ([([1, 2, 3], [-100, 2, 3])], {"test": [[1, 2]], "generate": True}, "item 0; its answer does not end with the token 257"),
    "two answers": ([([1, 2, 3, 257], [-100, 2, -100, 257])], {"test": [[1, 2]], "generate": True}, "its labelled tokens are 2 stretches"),
    "generate without an end": ([[1, 2]], {"vocab_size": 9, "generate": True}, "a token ends each answer; write eos: ID"),
    "two vocabularies": ([[1, 2]], {"vocab_size": 9, "tokenizer": BYTES}, "leave vocab_size out"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake_is_one_line(mistake):
    train, settings, said = WRONG[mistake]
    with pytest.raises(InputError, match=said) as error:
        ready(train, **settings)
    assert "\n" not in str(error.value)


def test_other_modules_of_datasets_name_this_one():
    with pytest.raises(
        InputError, match=r"task=language_modelling with DatasetData; .*; write TokenData"
    ):
        DatasetData(ListData([]), num_clients=1, task="language_modelling")  # type: ignore[arg-type]


def test_saved_folders_and_parquet_files_are_the_lines(tmp_path):
    datasets = pytest.importorskip("datasets")
    items = [as_tokens(words(number)) for number in range(12)]
    (tmp_path / "tokens.jsonl").write_text("\n".join(map(json.dumps, items)))
    found = datasets.Dataset.from_list(items)
    found.save_to_disk(tmp_path / "saved")
    found.to_parquet(tmp_path / "tokens.parquet")
    datasets.DatasetDict({"train": found, "test": found}).save_to_disk(tmp_path / "splits")
    digests = set()
    for name in ("tokens.jsonl", "saved", "tokens.parquet", "splits/train"):
        data = TokenData(partial(TokenFile, str(tmp_path / name)), client="writer", context=40)
        data.setup()
        digests.add(data.content_sha256)
    assert len(digests) == 1
    with pytest.raises(InputError, match=r"it has the splits train, test; write .*splits/train"):
        TokenFile(str(tmp_path / "splits"))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nothing.jsonl", "there is no such file or folder"),
        ("bad.jsonl", "bad.jsonl, line 2; it is not JSON"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path, name, said):
    (tmp_path / "bad.jsonl").write_text('{"input_ids": [1, 2]}\nnothing')
    with pytest.raises(InputError, match=said):
        TokenFile(str(tmp_path / name))


FEW = ["--trainer.max_rounds", "8", "--trainer.eval_every", "8", "--trainer.logger", "false"]


@pytest.mark.slow
@pytest.mark.essential
def test_the_commands_of_the_page_train_on_ids(tmp_path, monkeypatch):
    """The dataset of the page and the file of the same items are trained with the shipped byte
    model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    source = file_of_page("own_tokens.py", PAGE)
    Path("own_tokens.py").write_text(source)
    names: dict = {}
    exec(source, names)
    counting = names["Counting"]()
    Path("tokens.jsonl").write_text(
        "\n".join(json.dumps(counting[k]) for k in range(len(counting)))
    )
    (own,), (file,) = (
        documented("own_tokens.Counting", PAGE),
        documented("fl_lightning.data.TokenFile", PAGE),
    )
    found = {}
    for name, command in (("own", own), ("file", file)):
        assert main([*command, "--trainer.default_root_dir", name, *FEW]) == 0
        found[name] = json.loads(next(Path(name).rglob("metadata.json")).read_text())
        partition = json.loads(next(Path(name).rglob("partition.json")).read_text())
        assert partition["text"]["clients"] == ["step 1", "step 2", "step 3", "step 4"]
    assert found["own"]["content_sha256"] == found["file"]["content_sha256"]
    assert found["own"]["weights_sha256"] == found["file"]["weights_sha256"]
    assert found["own"]["final/perplexity"] < 6
