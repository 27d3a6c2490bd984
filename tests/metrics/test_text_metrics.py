"""Metrics of text against hand-worked numbers, brute force, torch, and the package rouge-score."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from fl_lightning.errors import MisuseError
from fl_lightning.metrics.text import (
    IGNORED,
    exact_match,
    longest_common_subsequence,
    perplexity,
    rouge_l,
    rouge_words,
    token_sums,
)
from fl_lightning.rng import stream

CASES = [
    # Lin (2004), section 3.1, S2 and S1
    ("police kill the gunman", "police killed the gunman", 0.75),
    ("the gunman kill police", "police killed the gunman", 0.5),  # S3
    ("", "a", 0.0),
    ("a", "", 0.0),
    ("", "", 0.0),
    ("x", "y", 0.0),
    ("PLAY its!", "play, its", 1.0),
    ("itsPlay", "its play", 0.0),
    ("a.b(c)", "b(a, c)", 2 / 3),
    ("a b c d e f", "a c", 0.5),  # precision 1/3, recall 1
    ("don't stop", "don t stop", 1.0),
    ("naïve café", "na ve caf", 1.0),
    ("(()", "(()", 0.0),
]


@pytest.mark.parametrize(("prediction", "reference", "score"), CASES)
def test_rouge_l_by_hand(prediction, reference, score):
    assert rouge_l([prediction], [reference]).tolist() == [pytest.approx(score, abs=1e-15)]


def test_rouge_l_is_that_of_rouge_score():
    """On the cases above and on random texts of few words and signs."""
    scorer = pytest.importorskip("rouge_score.rouge_scorer").RougeScorer(["rougeL"])
    rng = stream(0, "test")
    pieces = ["a", "b", "Ab", "9", " ", "  ", "_", "-", "é", "\n", "ß", "İ", "a1", "."]
    texts = ["".join(rng.choice(pieces, rng.integers(0, 25))) for _ in range(400)]
    pairs = [(a, b) for a, b, _ in CASES] + list(itertools.pairwise(texts))
    ours = rouge_l(*zip(*pairs, strict=True))
    theirs = [
        scorer.score(reference, prediction)["rougeL"].fmeasure for prediction, reference in pairs
    ]
    assert np.abs(ours - theirs).max() < 1e-12
    assert len(set(theirs)) > 20


def test_longest_common_subsequence_is_that_of_brute_force():
    rng = stream(1, "test")
    for _ in range(60):
        first, second = ("".join(rng.choice([*"abc"], rng.integers(0, 8))) for _ in range(2))
        both = (
            {c for n in range(len(x) + 1) for c in itertools.combinations(x, n)}
            for x in (first, second)
        )
        assert longest_common_subsequence(first, second) == max(map(len, set.intersection(*both)))


def test_exact_match_is_of_the_whole_text():
    pairs = {("a b", "a b"): 1, ("a b", "a B"): 0, ("a b ", "a b"): 0, ("", ""): 1, ("a", ""): 0}
    assert exact_match(*zip(*pairs, strict=True)).tolist() == [*pairs.values()]
    assert exact_match([], []).shape == (0,)


@pytest.mark.parametrize("metric", [exact_match, rouge_l])
def test_as_many_predictions_as_references(metric):
    with pytest.raises(MisuseError, match="2 predictions for 1 reference"):
        metric(["a", "b"], ["a"])


def random_batch(rows: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, 7, 11, generator=generator)
    target = torch.randint(0, 11, (rows, 7), generator=generator)
    target[:, :2] = IGNORED
    target[1] = IGNORED
    return logits, target


def test_sums_of_tokens_are_those_of_torch_and_add_up():
    logits, target = random_batch()
    nats, right, tokens = token_sums(logits, target)
    assert tokens.tolist() == [5, 0, 5, 5, 5]
    assert nats.dtype == right.dtype == tokens.dtype == torch.float64
    assert nats[1] == right[1] == 0
    mean = cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=IGNORED)
    assert float(nats.sum() / tokens.sum()) == pytest.approx(float(mean), rel=1e-6)
    labelled = target != IGNORED
    hits = (logits.argmax(-1) == target)[labelled].double().mean()
    assert float(right.sum() / tokens.sum()) == pytest.approx(float(hits))
    parts = [token_sums(logits[part], target[part]) for part in (slice(0, 2), slice(2, None))]
    for whole, *some in zip((nats, right, tokens), *parts, strict=True):
        assert torch.allclose(whole, torch.cat(some))


def test_padding_and_logits_there_do_not_matter():
    logits, target = random_batch()
    longer = torch.cat([logits, 9 * torch.randn(5, 3, 11)], 1)
    padded = torch.cat([target, torch.full((5, 3), IGNORED)], 1)
    for some, same in zip(token_sums(logits, target), token_sums(longer, padded), strict=True):
        assert torch.equal(some, same)


def test_perplexity_of_known_predictions():
    target = torch.arange(12).reshape(2, 6) % 4
    nats, right, tokens = token_sums(torch.zeros(2, 6, 50), target)
    assert perplexity(nats, tokens) == pytest.approx([50, 50])  # even: as many as there are tokens
    assert right.tolist() == [2, 1]  # the first of equals, token 0
    nats, right, tokens = token_sums(100.0 * torch.nn.functional.one_hot(target, 50), target)
    assert perplexity(nats, tokens) == pytest.approx([1, 1])
    assert torch.equal(right, tokens)
    assert perplexity(math.log(8), 3) == pytest.approx(2)
    assert perplexity(1e9, 1) == pytest.approx(math.exp(700))
    assert np.isnan(perplexity(np.array([0.0, 1.0]), np.array([0.0, 1.0]))).tolist() == [
        True,
        False,
    ]


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(MisuseError, match=r"\[5, 7, 11\] and target \[5, 6\]"):
        token_sums(random_batch()[0], random_batch()[1][:, 1:])


def test_words_of_rouge():
    assert rouge_words("To-day: 3.5% ITS\tplay_") == ["to", "day", "3", "5", "its", "play"]
