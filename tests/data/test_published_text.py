"""The overlays on published federations of text read files of the true form: their rows, clients
and prompts."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from places import ROOT

from fl_lightning import data
from fl_lightning.data import PreferenceFiles
from fl_lightning.data.text.prompts import Prompt, Record
from fl_lightning.data.text.tokens import IGNORED, ByteTokenizer, encode_records
from fl_lightning.errors import InputError

ALPACA = "Below is an instruction that describes a task. Write a response that appropriately completes the request."
FLOWERTUNE = {"general": (20, 2), "finance": (50, 5), "medical": (20, 2), "code": (10, 2)}
"""Clients of each challenge, and how many of them train in a round."""
BY_CLIENT = {"aya": (38, 4), "chatbot_it": (237, 10), "wildchat": (100, 5), "chatbot_pa": (747, 10)}
"""The same of FedLLM-Bench's data sets."""
BYTES = ByteTokenizer()


def overlay(name: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / "configs" / "overlays" / f"{name}.yaml").read_text())


def dealt(config: dict[str, Any], **settings: Any) -> data.TextData:
    """The data of an overlay with the byte tokeniser."""
    of_data = config["data"]
    given = {**of_data["init_args"], "tokenizer": None, **settings}
    if given.get("partition") is not None:
        given["partition"] = getattr(data, given["partition"])()
    found = getattr(data, of_data["class_path"])(**given)
    found.prepare_data()
    found.setup()
    found.distribute(0, torch.device("cpu"))
    return found


def texts(found: data.TextData, split: str = "train") -> set[tuple[str, str]]:
    """The prompts and answers that a network reads and learns."""
    some = found._sequences[split]
    rows = zip(some.input_ids.tolist(), some.target.tolist(), some.length.tolist(), strict=True)
    pairs = set()
    for ids, target, length in rows:
        answer = [id for id in target if id != IGNORED]
        pairs.add((BYTES.decode(ids[: length + 1 - len(answer)]), BYTES.decode(answer)))
    return pairs


def wanted(challenge: str, row: dict[str, str]) -> tuple[str, str]:
    """What Flower's template makes of a row, written here once more: prompt and answer."""
    asked = {
        "general": row["instruction"],
        "medical": row["input"],
        "finance": f"{row['instruction']} {row['input']}",
        "code": f"{row['instruction']} {row['input']}",
    }[challenge]
    return f"{ALPACA}\n### Instruction:\n{asked}\n### Response:", f" {row['output']}"


def rows(count: int = 120) -> list[dict[str, str]]:
    return [
        {
            "instruction": f"Do {number}.",
            "input": f"with {number}",
            "output": f"done {number}",
            "text": "x",
        }
        for number in range(count)
    ]


@pytest.mark.parametrize("challenge", FLOWERTUNE)
def test_flowertune_reads_the_rows_as_its_template_writes_them(challenge: str, tmp_path: Path):
    """The Hub has two of the four as one JSON list; clients share the rows evenly."""
    path, config = tmp_path / "rows.json", overlay(f"flowertune_{challenge}")
    path.write_text(json.dumps(rows(), indent=1))
    found = dealt(config, path=str(path), test_fraction=0.2)
    clients, sampled = FLOWERTUNE[challenge]
    assert found.num_clients == clients
    assert int(config["trainer"]["participation"] * clients + 0.5) == sampled
    sizes = [len(found.client(id).train) for id in range(clients)]
    assert max(sizes) - min(sizes) <= 1
    whole = texts(found) | texts(found, "test")
    assert whole == {wanted(challenge, row) for row in rows()}


def test_flowertune_reads_parquet_in_the_layout_of_the_hub(tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    (tmp_path / "hub" / "data").mkdir(parents=True)
    table = datasets.Dataset.from_list(rows())
    table.to_parquet(str(tmp_path / "hub" / "data" / "train-00000-of-00001.parquet"))
    found = dealt(overlay("flowertune_finance"), path=str(tmp_path / "hub"), test_fraction=0.2)
    assert texts(found) | texts(found, "test") == {wanted("finance", row) for row in rows()}


@pytest.mark.parametrize("name", ["aya", "chatbot_it", "wildchat"])
def test_fedllm_bench_has_a_list_for_each_client(name: str, tmp_path: Path):
    """Clients are those of the file, with as many records as they wrote; the names are in
    partition.json."""
    config, clients = overlay(f"fedllm_bench_{name}"), BY_CLIENT[name][0]
    written = {
        f"user{number:03}": [
            {
                "instruction": f"Ask {number} {k}?",
                "response": f"Answer {number} {k}.",
                "language": "English",
            }
            for k in range(3 + number % 4)
        ]
        for number in range(clients)
    }
    path = tmp_path / "by_client.json"
    path.write_text(json.dumps(written, ensure_ascii=False))
    found = dealt(config, train=str(path))
    assert found.client_names == sorted(written)
    assert int(config["trainer"]["participation"] * clients + 0.5) == BY_CLIENT[name][1]
    template = config["data"]["init_args"]["template"]
    assert template == f"{ALPACA}\n\n### Instruction:\n{{inputs}} \n\n### Response: "
    every = {
        (template.rstrip(" ").replace("{inputs}", one["instruction"]), " " + one["response"])
        for some in written.values()
        for one in some
    }
    assert texts(found) | texts(found, "test") == every
    for id in (0, clients - 1):
        own = found.train_target[found.client(id).train]
        answers = {BYTES.decode(t for t in row if t != IGNORED).strip() for row in own.tolist()}
        assert answers <= {one["response"] for one in written[sorted(written)[id]]}


def test_fedllm_bench_has_preferences_of_each_client(tmp_path: Path):
    written = {
        f"arena_{number}": [
            {"prompt": f"Q {number} {k}?", "chosen": f"good {k}", "rejected": f"bad {k}"}
            for k in range(4)
        ]
        for number in range(30)
    }
    path = tmp_path / "by_client.json"
    path.write_text(json.dumps(written))
    config = overlay("fedllm_bench_chatbot_pa")
    found = dealt(config, train=str(path))
    assert isinstance(found, PreferenceFiles)
    assert found.groups == tuple(sorted(written))
    clients, sampled = BY_CLIENT["chatbot_pa"]
    assert int(config["trainer"]["participation"] * clients + 0.5) == sampled


def test_a_template_is_the_text_in_one_piece():
    """The tokens of prompt and answer are those of the whole text where a token begins with a
    blank; a cut leaves what follows the inputs."""
    record = Record("t", "Add {inputs}.", "1 {definition} 2", "3")
    assert Prompt("{definition}|{inputs}|{definition} Say:  ").parts(record) == (
        "Add {inputs}.|1 {definition} 2",
        "|Add {inputs}. Say:",
        "  3",
    )
    made = encode_records([record], BYTES, 12, "cut", template=Prompt("Q {inputs}\nA: "))
    assert BYTES.decode(made.input_ids[0].tolist()) == "Q 1 {d\nA: 3"
    for wrong in ("{definition}", "{inputs}{inputs}", ""):
        with pytest.raises(InputError, match=r"it has \{inputs\} once"):
            Prompt(wrong)


def test_a_place_that_a_template_does_not_know_is_told(caplog):
    with caplog.at_level(logging.WARNING, "fl_lightning"):
        Prompt("{definition} {inputs} {'a': 1}")
        assert not caplog.messages
        assert Prompt("{definitoin} {inputs}").before == "{definitoin} "
    assert caplog.messages == ["template: {definitoin} is none of its places and stays as it is"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            '{"a": [{"question": "x", "response": "y"}]}',
            "record 1 of a; the key instruction is missing",
        ),
        (
            '{"a": [{"instruction": "x", "response": 3}]}',
            "record 1 of a; the value of response is no text",
        ),
        ('[{"instruction": "x", "response": "y"}]', "record 1; the key client is missing"),
        (
            '{"a": {"instruction": "x"}}',
            "line 1; the keys instruction, response, client are missing; add",
        ),
    ],
)
def test_what_is_wrong_in_a_file_of_clients_is_one_line(text: str, said: str, tmp_path: Path):
    (tmp_path / "some.json").write_text(text)
    with pytest.raises(InputError, match=said) as caught:
        dealt(overlay("fedllm_bench_aya"), train=str(tmp_path / "some.json"))
    assert "\n" not in str(caught.value)


def test_lines_of_lists_are_lines(tmp_path: Path):
    """A line of token ids is an object of lists too, and no file of clients."""
    (tmp_path / "ids.jsonl").write_text('{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}')
    assert data.TokenFile(str(tmp_path / "ids.jsonl"))[0] == {
        "input_ids": [1, 2, 3],
        "labels": [1, 2, 3],
    }
