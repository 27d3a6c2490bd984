"""Conversations of several turns: what a network reads, which tokens it learns, and one line for
each mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from places import ROOT

from fl_lightning.data import IID, ConversationFiles, Natural
from fl_lightning.data.text.tokens import IGNORED, ByteTokenizer, HuggingFaceTokenizer
from fl_lightning.errors import InputError

BYTES = ByteTokenizer()
VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, "
    "detailed, and polite answers to the user's questions."
)


def said(*words: str) -> list[dict[str, str]]:
    """Turns in ShareGPT's form, the user's first."""
    return [{"from": ("human", "gpt")[n % 2], "value": text} for n, text in enumerate(words)]


def written(folder: Path, *lines: object) -> str:
    path = folder / "talks.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


def made(train: str, **settings) -> ConversationFiles:
    found = ConversationFiles(
        train, **{"context": 96, "batch_size": 4, "val_fraction": 0.0, **settings}
    )
    found.prepare_data()
    found.setup()
    found.distribute(0, torch.device("cpu"))
    return found


def spelled(found: ConversationFiles, split: str = "train", tokens=BYTES) -> set[tuple[str, str]]:
    """What a network reads of each conversation; and what it learns, with a bar where nothing is
    learnt and a dollar for the end token."""
    some, texts = found._sequences[split], set()
    for ids, target, length in zip(
        some.input_ids.tolist(), some.target.tolist(), some.length.tolist(), strict=True
    ):
        learnt, last = "", IGNORED
        for token in target:
            learnt += (
                "$" if token == tokens.eos else "" if token == IGNORED else tokens.decode([token])
            )
            learnt += "|" if token == IGNORED and last != IGNORED else ""
            last = token
        texts.add(
            ("".join("$" if i == tokens.eos else tokens.decode([i]) for i in ids[:length]), learnt)
        )
    return texts


def test_every_answer_is_learnt_and_no_question_is(tmp_path: Path):
    """Both forms of a file; an answer before any question and a question at the end are left
    out."""
    talks = [
        {"conversations": said("Hi", "Yo", "1+1?", "2", "Bye")},
        {
            "messages": [
                {"role": "system", "content": "Be."},
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b"},
            ]
        },
        {"conversations": [{"from": "gpt", "value": "Hello."}, *said("c", "d")]},
    ]
    train, test = written(tmp_path, *talks), tmp_path / "test.jsonl"
    longer = {"conversations": said("Hi", "Yo", "1+1?", "2", "2+2?", "4")}  # of one first question
    tests = {"conversations": said("e", "f")}, talks[0], longer
    test.write_text("\n".join(map(json.dumps, tests)))
    found = made(train, test=str(test), system="S.")
    assert spelled(found) == {
        ("S. USER: Hi ASSISTANT: Yo$USER: 1+1? ASSISTANT: 2", " Yo$| 2$|"),
        ("Be. USER: a ASSISTANT: b", " b$|"),
        ("S. USER: c ASSISTANT: d", " d$|"),
    }
    assert spelled(found, "test") == {("S. USER: e ASSISTANT: f", " f$|")}
    assert found.partition_summary()["text"]["test conversations left out"] == 2


@pytest.mark.parametrize(
    ("text", "given", "rule"),
    [
        ('{"ada": [%s], "ada": [%s]}', "talks.json, key 'ada'", "an object has it twice"),
        ('%s\n{"client": "a", %s', "line 2", "it is not JSON"),
        ("%s\n" + json.dumps({"conversations": said("a", "")}), "line 2", "an answer is empty"),
    ],
)
def test_nothing_of_a_file_is_lost_in_silence(tmp_path: Path, text: str, given: str, rule: str):
    talk = json.dumps({"conversations": said("a", "b")})
    path = tmp_path / "talks.json"
    path.write_text(text.replace("%s", talk))
    with pytest.raises(InputError) as caught:
        made(str(path))
    assert given in caught.value.given
    assert rule in str(caught.value)


def test_the_published_dialogues_are_read_as_their_authors_do(tmp_path: Path):
    """Fed-WildChat's file of clients, and Vicuna's prompt, here written once more."""
    config = yaml.safe_load(
        (ROOT / "configs/overlays/fedllm_bench_wildchat_turns.yaml").read_text()
    )
    settings = {**config["data"]["init_args"], "tokenizer": None, "partition": Natural()}
    clients = {
        f"{user:02}": [
            {"conversations": said(f"Q {user} {k}", "A", f"More {k}", "B")} for k in range(8)
        ]
        for user in range(50)
    }
    path = tmp_path / "wildchat_50c.json"
    path.write_text(json.dumps(clients))
    found = made(**{**settings, "train": str(path)})
    assert found.num_clients == 50
    assert int(config["trainer"]["participation"] * 50 + 0.5) == 3
    assert found.partition_summary()["text"]["clients"] == sorted(clients)
    assert spelled(found) | spelled(found, "test") == {
        (f"{VICUNA} USER: Q {user} {k} ASSISTANT: A$USER: More {k} ASSISTANT: B", " A$| B$|")
        for user in range(50)
        for k in range(8)
    }
    own = found._sequences["train"].input_ids[found.client(7).train]
    assert all(
        f"Q {sorted(clients)[7]}".replace(" 0", " ") in BYTES.decode(row.tolist()) for row in own
    )


def test_a_long_conversation_loses_its_end_or_is_left_out(tmp_path: Path):
    talks = [said("a" * n, "b" * 9, "c", "d" * 9) for n in (1, 20, 60)]
    train = written(tmp_path, *({"conversations": talk} for talk in talks))
    with pytest.raises(
        InputError, match=r"line 2 of 78 tokens; it takes 77 positions of a context of 60"
    ):
        made(train, test=train, context=60)
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"conversations": said("x", "y")}))
    found = made(train, test=str(other), context=45, too_long="cut")
    assert {learnt for _, learnt in spelled(found)} == {" bbbbbbbbb$|", " bbbbbbb"}
    text = json.loads(json.dumps(found.partition_summary()))["text"]
    assert text["conversations without an answer in the context"] == 1
    assert text["examples cut"] == {"train": 2, "test": 0}


def test_equal_first_questions_are_on_one_side(tmp_path: Path):
    train = written(tmp_path, *({"conversations": said(f"Q{n % 40}", f"{n}")} for n in range(200)))
    found = made(train, test_fraction=0.3, num_clients=3, partition=IID())
    asked = [
        {text.partition(" ASSISTANT")[0] for text, _ in spelled(found, split)}
        for split in ("train", "test")
    ]
    assert len(asked[0] | asked[1]) == 40
    assert len(asked[1]) > 4
    assert not asked[0] & asked[1]


def test_a_chat_template_of_a_tokeniser(tmp_path: Path):
    """What is learnt is what the template writes for an answer, its end included; a template that
    writes earlier turns anew is refused."""
    pytest.importorskip("transformers")
    from tiny_transformers import tokenizer_of_bytes

    tokens = tokenizer_of_bytes()
    train = written(tmp_path, {"conversations": said("Hi", "Yo", "1+1?", "2")})
    with pytest.raises(
        InputError, match="template=chat with a HuggingFaceTokenizer; the tokeniser has no chat"
    ):
        made(train, test=train, template="chat", tokenizer=HuggingFaceTokenizer(tokenizer=tokens))
    with pytest.raises(InputError, match="template=chat with a ByteTokenizer"):
        made(train, test=train, template="chat")
    turn = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}"
    tokens.chat_template = turn + "{% if add_generation_prompt %}<assistant>{% endif %}"
    own = HuggingFaceTokenizer(tokenizer=tokens)
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"conversations": said("x", "y")}))
    found = made(train, test=str(other), template="chat", tokenizer=own)
    read = "<user>Hi$<assistant>Yo$<user>1+1?$<assistant>2"
    (pair,) = spelled(found, tokens=own)
    assert pair[0] == read
    assert pair[1] == "Yo$|2$|"
    tokens.chat_template = "{{ messages | length }}" + tokens.chat_template
    with pytest.raises(
        InputError, match=r"line 1, turn 2; the tokeniser's chat template writes earlier turns anew"
    ):
        made(train, test=str(other), template="chat", tokenizer=own)


def chat_of(tmp_path: Path, template: str, *lines: object) -> ConversationFiles:
    pytest.importorskip("transformers")
    from tiny_transformers import tokenizer_of_bytes

    tokens = tokenizer_of_bytes()
    tokens.chat_template = template
    train, test = written(tmp_path, *lines), tmp_path / "test.jsonl"
    test.write_text(json.dumps({"conversations": said("x", "y")}))
    own = HuggingFaceTokenizer(tokenizer=tokens)
    return made(train, test=str(test), template="chat", tokenizer=own)


def test_a_conversation_that_a_chat_template_refuses_is_named(tmp_path: Path):
    template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('No system here') }}{% endif %}"
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}"
    )
    talks = {"conversations": said("a", "b")}, {"conversations": said("c", "d", "e", "f")}
    chat_of(tmp_path, template, *talks)
    system = {"conversations": [{"from": "system", "value": "Be."}, *said("c", "d")]}
    words = r"talks.jsonl, line 2, up to turn 3; the tokeniser's chat template refuses it \(.*No system here"
    with pytest.raises(InputError, match=words) as caught:
        chat_of(tmp_path, template, talks[0], system)
    assert "in place of chat" in caught.value.instead


def test_a_chat_template_that_writes_the_date_writes_the_same_on_another_day(tmp_path: Path):
    """As Llama 3.2's does, where a clock is there."""
    template = (
        "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y %f') %}{% endif %}"
        "{{ date_string }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}"
    )
    found = chat_of(tmp_path, template, {"conversations": said("a", "b")})
    ((read, _),) = spelled(found, tokens=found.tokenizer)
    assert read.startswith("26 Jul 2024<user>a$")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ({"turns": []}, "line 1; it has none of the keys conversations, messages"),
        ({"conversations": "Hi"}, "line 1; its turns are no list"),
        ({"conversations": [{"from": "human"}]}, "line 1, turn 1; a turn says in texts who speaks"),
        (
            {"conversations": [{"from": "bot", "value": "x"}]},
            "line 1, turn 1, from 'bot'; it is one of human",
        ),
        ({"conversations": said("a")}, "line 1; nobody answers a user in it"),
        (
            {"conversations": [*said("a", "b"), *said("c", "d")[1:]]},
            "user and assistant do not take turns",
        ),
        (
            {"conversations": [*said("a", "b"), {"from": "system", "value": "x"}]},
            "do not take turns",
        ),
        ({"conversations": said("a\ud800", "b")}, "line 1, turn 1; it holds half a character"),
    ],
)
def test_what_is_wrong_in_a_line_is_one_line(line: dict, told: str, tmp_path: Path):
    with pytest.raises(InputError, match=told) as caught:
        made(written(tmp_path, line, line), client=None)
    assert "\n" not in str(caught.value)


def test_answers_of_several_turns_are_not_generated(tmp_path: Path):
    with pytest.raises(InputError, match="generate=True with conversations"):
        made(written(tmp_path, {"conversations": said("a", "b")}), generate=True)
    with pytest.raises(InputError, match="the key user is missing"):
        made(written(tmp_path, {"conversations": said("a", "b")}), client="user")
