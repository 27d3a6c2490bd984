"""Pairs of answers to one prompt, as sequences of tokens.

``N`` pairs, ``B`` batch, ``T`` positions that the network sees. A batch has 2 B sequences, the B
first answers and then the B second ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fl_lightning.data.text.tokens import Sequences, Tokenizer, TooLong, padded, text_mask
from fl_lightning.errors import require
from fl_lightning.rng import key
from fl_lightning.tasks.preference import PairTarget


class AnswerPair(NamedTuple):
    """Two answers to a prompt.

    Args:
        prompt: what the network reads before it answers.
        chosen: the answer that is preferred.
        rejected: the other one.
    """

    prompt: str
    chosen: str
    rejected: str


@dataclass(frozen=True)
class PairSequences(Sequences):
    """Pairs as tensors: ``input_ids`` int64 ``[N, 2, T]``, ``target`` int64 ``[N, 2 T + 3]`` in the
    form of :class:`~fl_lightning.tasks.preference.PairTarget`, ``length`` of the longer answer
    int64 ``[N]``."""

    def to(self, device: torch.device) -> PairSequences:
        moved = super().to(device)
        return PairSequences(moved.input_ids, moved.target, moved.length, moved.cut)

    def batch(self, index: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        mask = text_mask(self.length[index].repeat(2))
        ids = self.input_ids[index, :, : mask.shape[1]].transpose(0, 1).flatten(0, 1)
        return {"input_ids": ids, "attention_mask": mask}, self.target[index]


def encode_pairs(
    pairs: Sequence[AnswerPair],
    tokenizer: Tokenizer,
    context: int,
    too_long: TooLong = "refuse",
    places: Sequence[str] | None = None,
) -> PairSequences:
    """Return pairs as sequences: BOS, prompt, answer, EOS twice. Labelled are the answer and EOS.

    The order of the two answers follows from a hash of the pair, so that none can be told by its
    place.

    Args:
        pairs: the pairs.
        tokenizer: makes the tokens; prompt and answers are encoded apart.
        context: T, the largest number of positions.
        too_long: what is done with a pair of more positions. refuse: an error; cut: the beginning
            of its prompt is left out, and the end of an answer where that is not enough.
        places: where each pair stands, for the message; None: its number.

    Raises:
        InputError: a pair is too long, or nothing stands before its answers.
    """
    rows: list[list[tuple[list[int], int]]] = [[], []]
    preferred, cut = [], 0
    for number, pair in enumerate(pairs):
        start = [] if tokenizer.bos is None else [tokenizer.bos]
        prompt = tokenizer.encode(pair.prompt)
        place = places[number] if places else f"pair {number + 1}"
        begins = "the prompt is empty, and this tokenizer has no token that begins a text"
        require(
            start or prompt, place, begins, "write a prompt, or use a tokenizer with a BOS token"
        )
        answers = [[*tokenizer.encode(text), tokenizer.eos] for text in pair[1:]]
        extra = len(start) + len(prompt) + max(map(len, answers)) - 1 - context
        if extra > 0:
            require(
                too_long == "cut",
                place,
                f"it takes {context + extra} tokens of a context of {context}",
                f"write context: {context + extra}, or too_long: cut",
            )
            cut += 1
            prompt = prompt[min(extra, max(len(prompt) - 1, 0)) :]
            answers = [answer[: context + 1 - len(start) - len(prompt)] for answer in answers]
            require(
                answers[0] != answers[1],
                place,
                f"within {context} tokens its two answers are the same",
                f"write context: {context + extra}, or remove the line",
            )
        chosen_is_first = key(0, "text/order/" + "\0".join(pair))[0] < 128
        preferred.append(chosen_is_first)
        head = start + prompt
        for row, answer in zip(rows, answers if chosen_is_first else answers[::-1], strict=True):
            row.append((head + answer, len(head)))
    both = [padded(row, tokenizer.pad, context, 0) for row in rows]
    labels = torch.stack([one.target for one in both])
    target = PairTarget.joined(
        labels, torch.zeros(2, len(pairs)), torch.tensor(preferred, dtype=torch.bool)
    )
    length = torch.maximum(both[0].length, both[1].length)
    return PairSequences(torch.stack([one.input_ids for one in both], 1), target, length, cut)
