"""Metrics of generated and of predicted text: exact match, ROUGE-L, token accuracy, perplexity.

Values of single examples are float64 arrays, so that their sums over batches and clients add up to
those of the whole. ``B`` examples, ``T`` positions, ``V`` tokens of the vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import takewhile

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fl_lightning.errors import MisuseError

IGNORED = -100
"""Target of a position that does not count; it is torch's ``ignore_index``."""

MAX_NATS = 700.0
"""Nats a token from which on the perplexity is no longer finite in float64, and is that of this
number."""


def exact_match(predictions: Sequence[str], references: Sequence[str]) -> np.ndarray:
    """Return 1 where a generated text equals its reference character by character and 0 elsewhere,
    ``[B]``.

    Raises:
        MisuseError: there are not as many predictions as references.

    >>> exact_match(["b a", "B a"], ["b a", "b a"]).tolist()
    [1.0, 0.0]
    """
    _check_pairs(predictions, references)
    return np.array([a == b for a, b in zip(predictions, references, strict=True)], np.float64)


def rouge_l(predictions: Sequence[str], references: Sequence[str]) -> np.ndarray:
    """Return the ROUGE-L F-measure of each generated text, in [0, 1], ``[B]``.

    It is the harmonic mean of precision and recall of the longest common subsequence of words (Lin
    2004). Words are those of the package rouge-score without stemming: runs of a-z and 0-9 in lower
    case. A pair of which one has no such words scores 0, so that a reference of signs alone cannot
    be matched.

    Raises:
        MisuseError: there are not as many predictions as references.

    >>> rouge_l(["play its", "7"], ["its play", "7"]).tolist()
    [0.5, 1.0]
    """
    _check_pairs(predictions, references)
    pairs = zip(predictions, references, strict=True)
    return np.array([_rouge_l(rouge_words(a), rouge_words(b)) for a, b in pairs], np.float64)


def rouge_words(text: str) -> list[str]:
    """Return the words of a text as rouge-score splits it."""
    return re.findall(r"[a-z0-9]+", text.lower())


def _rouge_l(prediction: list[str], reference: list[str]) -> float:
    common = longest_common_subsequence(prediction, reference)
    if not common:
        return 0.0
    precision, recall = common / len(prediction), common / len(reference)
    return 2 * precision * recall / (precision + recall)


def longest_common_subsequence(first: Sequence[str], second: Sequence[str]) -> int:
    """Return the length of the longest common subsequence of two sequences, in O(len x len) time.

    >>> longest_common_subsequence("a b c d".split(), "b d a".split())
    2
    """
    row = [0] * (len(second) + 1)
    for item in first:
        diagonal = 0
        for column, other in enumerate(second, 1):
            above = row[column]
            row[column] = diagonal + 1 if item == other else max(above, row[column - 1])
            diagonal = above
    return row[-1]


def token_sums(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what perplexity and token accuracy are made of, for each example.

    Args:
        logits: floating point ``[B, T, V]``.
        target: the token that follows each position, int64 ``[B, T]``, or ``IGNORED``.

    Returns:
        Cross-entropy in nats summed over the labelled tokens, number of them whose likeliest token
        is right, and number of labelled tokens, float64 ``[B]`` each.

    Raises:
        MisuseError: the shapes do not fit.
    """
    if logits.ndim != 3 or logits.shape[:2] != target.shape:
        raise MisuseError(
            f"logits {list(logits.shape)} and target {list(target.shape)}",
            "[B, T, V] and [B, T] are needed",
            "give one target for each position",
        )
    labelled = target != IGNORED
    nats = cross_entropy(
        logits.flatten(0, 1).float(), target.flatten(), reduction="none", ignore_index=IGNORED
    ).view_as(target)
    right = (logits.argmax(-1) == target) & logits.isfinite().all(-1)
    return nats.double().sum(1), right.double().sum(1), labelled.double().sum(1)


def perplexity(
    nats: float | np.ndarray | Tensor, tokens: float | np.ndarray | Tensor
) -> np.ndarray:
    """Return exp(nats / tokens), at most exp(``MAX_NATS``); NaN where there are no tokens.

    Args:
        nats: cross-entropy summed over labelled tokens, a number or an array.
        tokens: number of those tokens, of the same shape.

    >>> perplexity(np.log([2.0, 8.0]), np.array([1.0, 3.0])).round(9).tolist()
    [2.0, 2.0]
    """
    total, count = (np.asarray(torch.as_tensor(part).cpu(), np.float64) for part in (nats, tokens))
    mean = np.divide(
        total, count, out=np.full(np.broadcast(total, count).shape, np.nan), where=count > 0
    )
    return np.exp(np.minimum(mean, MAX_NATS))


def prompts_and_answers(
    input_ids: Tensor, target: Tensor, pad: int
) -> tuple[Tensor, Tensor, list[list[int]]]:
    """Take a batch of records apart into what generation is given and what it is compared with.

    Args:
        input_ids: int64 ``[B, T]``, padded on the right.
        target: int64 ``[B, T]``; the labelled positions of a row are consecutive, and each row has
            some.
        pad: id of the padding.

    Returns:
        Prompts int64 ``[B, P]``, padded on the left as ``generate`` of transformers needs it, their
        attention mask bool ``[B, P]``, and the labelled tokens of each row (with EOS, if it was not
        cut), where P is the length of the longest prompt.
    """
    labelled = target != IGNORED
    # the position that predicts the first labelled token is prompt
    length = labelled.int().argmax(1) + 1
    longest = int(length.max()) if len(length) else 0
    column = torch.arange(longest, device=input_ids.device) - (longest - length)[:, None]
    mask = column >= 0
    prompts = input_ids.gather(1, column.clamp(min=0)).masked_fill(~mask, pad)
    answers = [row[mark].tolist() for row, mark in zip(target, labelled, strict=True)]
    return prompts, mask, answers


def count_answers(target: Tensor) -> Tensor:
    """Return how many stretches of labelled positions each row has, int64 ``[B]``."""
    labelled = target != IGNORED
    return (labelled & ~torch.nn.functional.pad(labelled, (1, 0))[:, :-1]).sum(1)


def until_end(ids: Iterable[int], eos: int) -> list[int]:
    """Return the tokens before the first EOS: an answer, of which a tokeniser's ``decode`` makes a
    text.

    >>> until_end([55, 257, 55], eos=257)
    [55]
    """
    return list(takewhile(lambda id: id != eos, ids))


def _check_pairs(predictions: Sequence[str], references: Sequence[str]) -> None:
    if len(predictions) != len(references):
        raise MisuseError(
            f"{len(predictions)} predictions for {len(references)} references",
            "one for each is needed",
            "give them in the same order",
        )
