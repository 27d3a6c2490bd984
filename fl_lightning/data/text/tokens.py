"""Tokens of text: the byte tokeniser, prompts and answers of instruction records, windows of prose.

``N`` examples, ``B`` batch, ``T`` positions that the network sees (the context).
A target is aligned with the network's outputs: ``target[:, t]`` is the token that follows
``input_ids[:, t]``, and ``IGNORED`` where no loss is taken. Padding is on the right.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from fl_lightning.config.packaged import HF_PREFIX, model_folder
from fl_lightning.config.recorded import Recorded
from fl_lightning.data.partition import check_memory
from fl_lightning.data.text.prompts import PLAIN_PROMPT, Prompt
from fl_lightning.data.text.prompts import PROMPT_END as PROMPT_END
from fl_lightning.data.text.prompts import Record as Record
from fl_lightning.data.text.prompts import prompt_of as prompt_of
from fl_lightning.errors import InputError, as_bad_input, require
from fl_lightning.metrics.text import IGNORED

log = logging.getLogger("fl_lightning")

TooLong = Literal["refuse", "cut"]


class Tokenizer(Protocol):
    """What text data needs of a tokeniser."""

    vocab_size: int
    """Number of tokens, special ones included: all ids are below it."""
    bos: int | None
    """Id of the token before every sequence; None: there is none."""
    eos: int
    """Id of the token after every answer."""
    pad: int
    """Id of the padding token; it may be that of another special token."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without special tokens."""

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids; special tokens are left out."""


class ByteTokenizer(Recorded):
    """The 256 bytes of UTF-8, then BOS, EOS and PAD: 259 tokens.

    >>> tokenizer = ByteTokenizer()
    >>> tokenizer.encode("its"), tokenizer.decode([256, 105, 116, 115, 257])
    ([105, 116, 115], 'its')
    """

    vocab_size = 259
    bos: int | None = 256
    eos = 257
    pad = 258

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text; bytes that are no UTF-8 become the replacement character."""
        return bytes(id for id in ids if id < 256).decode(errors="replace")


class HuggingFaceTokenizer(Recorded):
    """A tokeniser of transformers, of the extra ``fl_lightning[language]``.

    Args:
        name: name or folder of a pretrained tokeniser, or ``package:NAME``, an installed Python
            package.
        gguf_file: the file in the folder, where the tokeniser is part of GGUF weights.
        tokenizer: a ``PreTrainedTokenizerBase`` in place of a name, in Python.

    Raises:
        InputError: transformers is not installed, there is no such tokeniser, or it has no end
            token.
    """

    def __init__(self, name: str = "", tokenizer: Any = None, gguf_file: str | None = None) -> None:
        if tokenizer is None:
            tokenizer = pretrained_tokenizer(name, gguf_file)
        self.name, self.tokenizer = name, tokenizer
        require(
            tokenizer.eos_token_id is not None,
            f"tokenizer {name or type(tokenizer).__name__}",
            "it has no end-of-text token, so that an answer would never end",
            "set its eos_token, or use another one",
        )
        self.bos: int | None = tokenizer.bos_token_id
        self.eos: int = tokenizer.eos_token_id
        self.pad: int = self.eos if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        self.vocab_size: int = len(tokenizer)

    @property
    def sha256(self) -> str:
        """What tells it from another tokeniser."""
        return tokenizer_sha256(self.tokenizer)

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Iterable[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))


TokenizerSetting: TypeAlias = Tokenizer | str | None
"""A tokeniser; ``hf:NAME_OR_FOLDER``, the one of transformers, as a network is named; None:
bytes."""


def chosen_tokenizer(setting: TokenizerSetting) -> Tokenizer:
    """Return the tokeniser that a setting means.

    Raises:
        InputError: the text is no ``hf:NAME``, or there is no such tokeniser.
    """
    if setting is None:
        return ByteTokenizer()
    if not isinstance(setting, str):
        return setting
    name = setting.removeprefix(HF_PREFIX)
    require(
        setting.startswith(HF_PREFIX) and name,
        f"tokenizer={setting!r}",
        f"it is {HF_PREFIX}NAME_OR_FOLDER, the class path of a tokeniser, or null for bytes",
        f"write {HF_PREFIX}{name or 'NAME_OR_FOLDER'}",
    )
    return HuggingFaceTokenizer(name)


def pretrained_tokenizer(name: str, gguf_file: str | None = None) -> Any:
    """Return a tokeniser of transformers.

    Raises:
        InputError: transformers is not installed, or there is no such tokeniser.
    """
    given = f"tokenizer {name!r}"
    with as_bad_input(
        given, "it needs transformers", "pip install 'fl_lightning[language]'", ImportError
    ):
        from transformers import AutoTokenizer
    with as_bad_input(
        given, "it cannot be read", "write its name or its folder", OSError, ValueError
    ):
        file = {} if gguf_file is None else {"gguf_file": gguf_file}
        return AutoTokenizer.from_pretrained(model_folder(name), **file)


def tokenizer_sha256(tokenizer: Any) -> str:
    """Return the SHA-256 of the vocabulary of a tokeniser of transformers, and of the tokens that
    it makes of a text with a bit of everything."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda token: (token[1], token[0]))
    ends = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
    text = "  The fox's 3 cubs\n\tcost 12.50 \u20ac; d\u00e9j\u00e0 vu? def f(x):\r\n\u4e16\u754c"
    return sha256(repr((vocabulary, ends, list(tokenizer.encode(text)))).encode()).hexdigest()


@dataclass(frozen=True)
class Sequences:
    """Examples as tensors.

    Args:
        input_ids: int64 ``[N, T]``, padded on the right.
        target: int64 ``[N, T]``, aligned with the outputs.
        length: number of positions of each example that are no padding, int64 ``[N]``.
        cut: number of examples that were longer than the context and lost tokens.
    """

    input_ids: Tensor
    target: Tensor
    length: Tensor
    cut: int = 0

    def __len__(self) -> int:
        return len(self.length)

    def to(self, device: torch.device) -> Sequences:
        """Return the same examples on a device."""
        return Sequences(
            self.input_ids.to(device), self.target.to(device), self.length.to(device), self.cut
        )

    def batch(self, index: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Return inputs and targets of some examples, trimmed to the longest of them.

        Args:
            index: positions of the examples, int64 ``[B]``.

        Returns:
            ``{"input_ids": int64 [B, T'], "attention_mask": bool [B, T']}`` and the targets int64
            ``[B, T']``, where T' is the largest length.
        """
        mask = text_mask(self.length[index])
        longest = mask.shape[1]
        inputs = {"input_ids": self.input_ids[index, :longest], "attention_mask": mask}
        return inputs, self.target[index, :longest]


def text_mask(length: Tensor) -> Tensor:
    """Return which positions of a batch are no padding, bool ``[B, T']``, where T' is the largest
    length."""
    longest = int(length.max()) if len(length) else 0
    return torch.arange(longest, device=length.device) < length[:, None]


def encode_records(
    records: Sequence[Record],
    tokenizer: Tokenizer,
    context: int,
    too_long: TooLong = "refuse",
    places: Sequence[str] | None = None,
    can_cut: bool = True,
    template: Prompt = PLAIN_PROMPT,
) -> Sequences:
    """Return records as sequences: BOS, prompt, answer, EOS. The loss is that of the answer and
    EOS.

    The last token is only a target, so a record of L tokens takes L - 1 positions.

    Args:
        records: the records.
        tokenizer: makes the tokens; prompt and answer are encoded apart.
        context: T, the largest number of positions.
        too_long: what is done with a record of more positions. refuse: an error; cut: the end of
            its inputs is left out, and of what stands before them, such as its definition, where
            that is not enough, and then of its answer; ``Sequences.cut`` counts it.
        places: where each record stands, for the message, such as a file and line; None: its
            number.
        can_cut: whether ``too_long`` is a setting of the data, which the message may propose.
        template: how the texts of a record become prompt and answer.

    Raises:
        InputError: the context is too small for a record, or for any answer.
    """
    _check_context(context)
    rows, cut, ended = [], 0, []
    for number, record in enumerate(records):
        place = places[number] if places else f"record {number + 1}"
        head, tail, answer = map(tokenizer.encode, template.parts(record))
        if tokenizer.eos in answer[:-1]:
            ended.append(place)
        answer = [*answer, tokenizer.eos]
        start = [] if tokenizer.bos is None else [tokenizer.bos]
        extra = len(start) + len(head) + len(tail) + len(answer) - 1 - context
        if extra > 0:
            if too_long != "cut":
                longest = max(_positions(template.parts(one), tokenizer) for one in records)
                raise InputError(
                    f"{place} ({record.task_name})",
                    f"it takes {context + extra} tokens of a context of {context}",
                    f"write context: {longest}{', or too_long: cut' if can_cut else ''}",
                )
            cut += 1
            head = head[: max(len(head) - extra, 0)]
            room = context + 1 - len(start) - len(head) - len(tail)
            require(
                room >= 1,
                f"context={context}",
                "it holds not even the end of a prompt and one token of the answer",
                "write a larger context",
            )
            answer = answer[:room]
        prompt = start + head + tail
        require(
            prompt,
            f"{place} ({record.task_name})",
            "nothing comes before its answer, and the tokeniser has no first token",
            "write a template with text of its own, such as '{inputs}\\n='",
        )
        rows.append((prompt + answer, len(prompt)))
    if ended:
        log.warning(
            "answers with the end-of-text token in the middle of their text: %d, first %s; a model "
            "learns to end there, and what generated answers are compared with ends there too",
            len(ended),
            ended[0],
        )
    return padded(rows, tokenizer.pad, context, cut)


def _positions(parts: Sequence[str], tokenizer: Tokenizer) -> int:
    """Return the positions that a record takes as :func:`encode_records` writes it."""
    return sum(len(tokenizer.encode(text)) for text in parts) + (tokenizer.bos is not None)


def encode_windows(text: str, tokenizer: Tokenizer, context: int) -> Sequences:
    """Cut a text into windows of consecutive tokens, without overlap of what is predicted.

    Each window starts with BOS and predicts the next ``context`` tokens: every token of the text is
    a target exactly once. Without BOS a window starts with the last token of the one before it, and
    the first token of the text is no target. The last window may be shorter.

    Args:
        text: the text.
        tokenizer: makes the tokens.
        context: T, positions of a window.
    """
    _check_context(context)
    ids = tokenizer.encode(text)
    if tokenizer.bos is None:
        windows = [
            ids[start : start + context + 1] for start in range(0, max(len(ids) - 1, 0), context)
        ]
    else:
        windows = [
            [tokenizer.bos, *ids[start : start + context]] for start in range(0, len(ids), context)
        ]
    return padded([(window, 1) for window in windows], tokenizer.pad, context, 0)


def padded(rows: Sequence[tuple[list[int], int]], pad: int, context: int, cut: int) -> Sequences:
    """Return sequences from tokens and the number of the first ones that are no targets."""
    check_memory(f"{len(rows)} examples of context={context}", 16 * len(rows) * context)
    input_ids = torch.full((len(rows), context), pad, dtype=torch.int64)
    target = torch.full((len(rows), context), IGNORED, dtype=torch.int64)
    for number, (ids, unlabelled) in enumerate(rows):
        row = torch.tensor(ids)
        input_ids[number, : len(ids) - 1] = row[:-1]
        target[number, unlabelled - 1 : len(ids) - 1] = row[unlabelled:]
    return Sequences(
        input_ids, target, torch.tensor([len(ids) - 1 for ids, _ in rows], dtype=torch.int64), cut
    )


def _check_context(context: int) -> None:
    require(context >= 2, f"context={context}", "a network sees at least 2 tokens", "write e.g. 72")
