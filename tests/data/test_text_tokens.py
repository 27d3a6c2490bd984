"""Tokens: aligned targets by hand, nothing lost without being counted, and tokenisers of
transformers."""

from __future__ import annotations

import json

import pytest
import torch
from tiny_language import fit, method_of

from fl_lightning.data import TextFiles
from fl_lightning.data.text.prompts import Prompt
from fl_lightning.data.text.tokens import (
    IGNORED,
    ByteTokenizer,
    HuggingFaceTokenizer,
    Record,
    encode_records,
    encode_windows,
    prompt_of,
)
from fl_lightning.deploy.protocol.identity import facts
from fl_lightning.errors import InputError
from fl_lightning.metrics.text import prompts_and_answers, until_end
from fl_lightning.rng import stream
from fl_lightning.run.resume import changed_identity

BYTES = ByteTokenizer()
BOS, EOS, PAD = 256, 257, 258
RECORDS = [
    Record("task_add", "Add.", "1+2", "3"),
    Record("task_upper", "Capitals.", "a b", "A B"),
    Record("task_other", "", "", "é"),
]


class WithoutBos(ByteTokenizer):
    bos = None


def test_bytes_there_and_back():
    for text in ("", "its play", "naïve\n\t\0 ☃", "\U0001f600"):
        ids = BYTES.encode(text)
        assert all(0 <= id < 256 for id in ids)
        assert BYTES.decode([BOS, *ids, EOS, PAD]) == text
    assert BYTES.decode([0xE2, 0x98]) == "\ufffd"
    assert sorted({BYTES.bos, BYTES.eos, BYTES.pad}) == [256, 257, 258]
    assert BYTES.vocab_size == 259


def test_a_record_by_hand():
    """[BOS] "Add.\\n1+2\\n=" "3" [EOS]: the last token is only a target, and the loss is of the
    answer."""
    sequences = encode_records(RECORDS[:1], BYTES, context=14)
    prompt = [ord(letter) for letter in "Add.\n1+2\n="]
    assert prompt_of(RECORDS[0]) == "Add.\n1+2\n="
    assert sequences.input_ids.tolist() == [[BOS, *prompt, ord("3"), PAD, PAD]]
    assert sequences.target.tolist() == [[*[IGNORED] * 10, ord("3"), EOS, IGNORED, IGNORED]]
    assert sequences.length.tolist() == [12]
    assert sequences.cut == 0


class Marked(ByteTokenizer):
    """It reads the text of a special token as the token, as those of transformers do."""

    def encode(self, text):
        parts = [super(Marked, self).encode(part) for part in text.split("</s>")]
        return [id for part in parts for id in (EOS, *part)][1:]


def test_answers_that_end_in_their_middle_are_named(caplog):
    records = [*RECORDS[:2], Record("task_add", "Add.", "1+2", "3</s>4")]
    encode_records([*RECORDS, Record("task_add", "Add.", "1+2", "3</s>")], Marked(), context=40)
    assert caplog.text == ""
    encode_records([*records, records[-1]], Marked(), context=40)
    assert (
        "with the end-of-text token in the middle of their text: 2, first record 3;" in caplog.text
    )


def test_batches_are_trimmed_to_the_longest():
    sequences = encode_records(RECORDS, BYTES, context=40)
    for index in ([0, 1, 2], [2], [2, 0], []):
        inputs, target = sequences.batch(torch.tensor(index, dtype=torch.int64))
        width = int(sequences.length[index].max()) if index else 0
        assert (
            inputs["input_ids"].shape
            == inputs["attention_mask"].shape
            == target.shape
            == (len(index), width)
        )
        assert torch.equal(inputs["attention_mask"], inputs["input_ids"] != PAD)
        assert torch.equal(target, sequences.target[index][:, :width])
        assert inputs["attention_mask"].dtype == torch.bool


@pytest.mark.parametrize("tokenizer", [BYTES, WithoutBos()], ids=["bos", "none"])
def test_a_context_that_just_fits_and_one_that_does_not(tokenizer):
    fits = int(encode_records(RECORDS[1:2], tokenizer, 100).length)
    assert encode_records(RECORDS[1:2], tokenizer, fits).length.tolist() == [fits]
    with pytest.raises(
        InputError, match=f"here, line 3.*takes {fits} tokens of a context of {fits - 1}"
    ):
        encode_records(RECORDS[1:2], tokenizer, fits - 1, places=["here, line 3"])
    cut = encode_records(RECORDS[:2], tokenizer, fits - 2, "cut")
    assert cut.cut == 1
    assert cut.length.tolist()[1] == fits - 2
    prompts, mask, (_, answer) = prompts_and_answers(cut.input_ids, cut.target, PAD)
    assert BYTES.decode(prompts[1][mask[1]].tolist()) == "Capitals.\na\n="  # " b" is left out
    assert answer == [*b"A B", EOS]
    kept = len(BYTES.encode("\n=")) + (tokenizer.bos is not None)
    short = encode_records(RECORDS[1:2], tokenizer, kept + 1, "cut")
    assert [id for id in short.target[0].tolist() if id != IGNORED] == [*b"A "]


def test_a_context_that_holds_no_answer_is_refused_even_where_records_are_cut():
    assert encode_records(RECORDS[1:2], BYTES, 3, "cut").target.tolist() == [
        [IGNORED, IGNORED, ord("A")]
    ]
    with pytest.raises(InputError, match="context=2; it holds not even"):
        encode_records(RECORDS[1:2], BYTES, 2, "cut")


@pytest.mark.parametrize("context", [0, 1])
def test_a_context_of_at_least_two(context):
    for encode in (
        lambda: encode_records(RECORDS, BYTES, context),
        lambda: encode_windows("a", BYTES, context),
    ):
        with pytest.raises(InputError, match=f"context={context}"):
            encode()


@pytest.mark.parametrize("tokenizer", [BYTES, WithoutBos()], ids=["bos", "none"])
@pytest.mark.parametrize("length", [0, 1, 2, 7, 8, 9, 15, 16, 17, 50])
def test_every_token_of_a_text_is_a_target_once(tokenizer, length):
    text = "".join(map(chr, stream(0, "test").integers(32, 127, length)))
    windows = encode_windows(text, tokenizer, 8)
    labelled = windows.target[windows.target != IGNORED].tolist()
    assert labelled == tokenizer.encode(text)[tokenizer.bos is None :]
    inputs = [
        row[:n] for row, n in zip(windows.input_ids.tolist(), windows.length.tolist(), strict=True)
    ]
    for number, row in enumerate(inputs):
        assert row[1:] == windows.target[number, : len(row) - 1].tolist()
        assert len(row) == 8 or number == len(inputs) - 1
    if tokenizer.bos is None:
        assert [id for row in inputs for id in row] == tokenizer.encode(text)[:-1]
    else:
        assert all(row[0] == BOS for row in inputs)


def test_an_answer_with_nothing_before_it_is_refused():
    tokens = ByteTokenizer()
    tokens.bos = None
    record = Record("task", "", "", "yes")
    with pytest.raises(InputError, match="nothing comes before its answer"):
        encode_records([record], tokens, 16, template=Prompt("{inputs}"))


def test_prompts_and_answers_are_those_of_the_records():
    sequences = encode_records(RECORDS, BYTES, 40)
    inputs, target = sequences.batch(torch.arange(3))
    prompts, mask, answers = prompts_and_answers(inputs["input_ids"], target, PAD)
    assert torch.equal(mask, prompts != PAD)
    assert mask[:, -1].all()
    assert mask.any(0).all()
    for record, row, keep, answer in zip(RECORDS, prompts, mask, answers, strict=True):
        assert row[keep].tolist() == [BOS, *BYTES.encode(prompt_of(record))]
        assert answer == [*BYTES.encode(record.targets), EOS]
        assert BYTES.decode(until_end([*answer, *b"more", EOS], EOS)) == record.targets
    empty, mask, answers = prompts_and_answers(inputs["input_ids"][:0], target[:0], PAD)
    assert empty.shape == mask.shape == (0, 0)
    assert answers == []


def word_tokenizer(**special: str):
    """A tokeniser of transformers over a handful of words."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    words = ["[UNK]", "<s>", "</s>", "Add", ".", "\n", "1", "+", "2", "=", "3"]
    core = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: id for id, word in enumerate(words)}, unk_token="[UNK]")
    )
    core.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"\w+|\n|."), "isolated")
    core.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    core.decoder = tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, **special)


def test_a_tokeniser_of_transformers_does_as_well():
    tokenizer = HuggingFaceTokenizer(tokenizer=word_tokenizer(bos_token="<s>", eos_token="</s>"))
    assert (tokenizer.bos, tokenizer.eos, tokenizer.pad, tokenizer.vocab_size) == (1, 2, 2, 11)
    sequences = encode_records(RECORDS[:1], tokenizer, 12)
    assert sequences.input_ids.tolist() == [[1, 3, 4, 5, 6, 7, 8, 5, 9, 10, 2, 2]]
    assert sequences.target.tolist() == [[*[IGNORED] * 8, 10, 2, IGNORED, IGNORED]]
    inputs, target = sequences.batch(torch.tensor([0]))
    # PAD is EOS, the mask knows
    assert inputs["attention_mask"].sum() == inputs["input_ids"].shape[1] == 10
    _, _, answers = prompts_and_answers(inputs["input_ids"], target, tokenizer.pad)
    assert tokenizer.decode(until_end(answers[0], tokenizer.eos)) == "3"


def test_a_run_is_not_continued_with_another_tokeniser(tmp_path, monkeypatch):
    """Its text is the same, and so are the numbers of its tokens."""
    begun = fit(method_of(), tmp_path, max_rounds=1)
    again = {"ckpt_path": str(begun.run_dir), "max_rounds": 1}
    fit(method_of(), tmp_path, **again)
    metadata = json.loads((begun.run_dir / "metadata.json").read_text())
    known = metadata["tokens_sha256"]
    monkeypatch.setattr(ByteTokenizer, "encode", lambda self, text: [*text.swapcase().encode()])
    with pytest.raises(InputError, match=rf"\(the tokens of the text: {known[:12]} -> "):
        fit(method_of(), tmp_path, **again)
    other = fit(method_of(), tmp_path, **again, allow_changed=True)
    assert other.run_dir == begun.run_dir
    assert not changed_identity({"partition": "p"}, {"partition": "p", "tokens": "t"})  # of before


def test_tokenisers_of_transformers_are_told_apart_by_their_tokens():
    """Those of a node's own text have other examples than the server's."""
    one, same, other = (word_tokenizer(bos_token="<s>", eos_token="</s>") for _ in range(3))
    other.add_tokens(["fox"])
    data = [
        TextFiles("own.jsonl", tokenizer=HuggingFaceTokenizer(tokenizer=each))
        for each in (one, same, other)
    ]
    hashes = [facts(each)["tokenizer"] for each in data]
    assert hashes[0] == hashes[1] != hashes[2]
    assert "tokenizer" not in facts(TextFiles("own.jsonl"))


def test_tokenisers_that_cannot_be_used_are_refused(tmp_path):
    with pytest.raises(InputError, match="no end-of-text token"):
        HuggingFaceTokenizer(tokenizer=word_tokenizer(bos_token="<s>"))
    (tmp_path / "nothing").mkdir()
    with pytest.raises(InputError, match="it cannot be read"):
        HuggingFaceTokenizer(str(tmp_path / "nothing"))
