"""The corruptions of text: language models whose prompts have noise in their words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.data import TextData
from fl_lightning.data.text.token_data import TokenNumbers
from fl_lightning.data.text.tokens import Tokenizer, padded
from fl_lightning.evaluation import averages, evaluate_batch
from fl_lightning.metrics.text import count_answers, prompts_and_answers
from fl_lightning.probing.corruptions.typos import NOISES, add_noise
from fl_lightning.probing.probed_model import BATCH_SIZE, Finding, ProbedModel
from fl_lightning.rng import stream

NO_IMAGES = "corruptions of images (CIFAR-C) left out: the examples of {} are tokens"
NO_PROMPTS = "noise in prompts left out: {}"


def noisy_prompts(subject: ProbedModel) -> Finding:
    """Evaluate the test set with noise in the words of the prompts; the answers stay what they are.

    An example's noise depends on the seed, the kind of noise and the example alone.
    """
    data, skipped = subject.data, [NO_IMAGES.format(type(subject.data).__name__)]
    if not isinstance(data, TextData):
        why = f"{type(data).__name__} is no TextData with a tokenizer"
        return Finding(skipped=[*skipped, NO_PROMPTS.format(why)])
    if why := _no_prompts(data):
        return Finding(skipped=[*skipped, NO_PROMPTS.format(why)])
    found = {noise: _metrics_under(subject, data, noise) for noise in NOISES}
    metrics = {
        f"typos/{name}": float(np.mean([of_noise[name] for of_noise in found.values()]))
        for name in next(iter(found.values()))
    }
    for noise, values in found.items():
        metrics |= {f"typos/{noise}/{name}": value for name, value in values.items()}
    details = {
        "source": "generated",
        "recipe": "Belinkov & Bisk 2018, synthetic noise: one error in every word of the prompt",
        "left_out": "their natural noise, which needs lists of people's mistakes",
    }
    return Finding(metrics, details=details, skipped=skipped)


def _no_prompts(data: TextData) -> str:
    """Return why the test examples have no prompts that can have noise in their words; empty if
    they have."""
    if isinstance(data.tokenizer, TokenNumbers):
        return "its tokens are numbers, and no words"
    if int((_prompt_lengths(data.test_target) > 1).sum()) == 0:
        return "every token is labelled, there are none"
    if int(count_answers(data.test_target).max()) > 1:
        return "questions stand between answers"
    return "its prompts hold tokens that are no text" if _has_special_tokens(data) else ""


def _has_special_tokens(data: TextData) -> bool:
    """Return whether a token of a test prompt other than the first of the text is lost in its
    text."""
    every: Any = data.inputs("test", torch.arange(len(data.test_target), device=data.device))
    ids = every["input_ids"]
    place = torch.arange(ids.shape[1], device=ids.device)
    is_first = (place == 0) & (ids == (-1 if data.tokenizer.bos is None else data.tokenizer.bos))
    asked = (place < _prompt_lengths(data.test_target)[:, None]) & ~is_first
    # some tokenisers leave out a blank at the beginning of what they decode
    return any(not data.tokenizer.decode([id, id]) for id in ids[asked].unique().tolist())


def _metrics_under(subject: ProbedModel, data: TextData, noise: str) -> dict[str, float]:
    """Return the task's metrics of the test set under a noise."""
    sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros(2, dtype=torch.float64))
    for network, indices in subject.networks():
        for index in indices.split(min(BATCH_SIZE, data.evaluation_batch)):
            inputs, target = noisy_batch(data, index, noise, subject.seed)
            _, found = evaluate_batch(subject.fabric, data.task, network, inputs, target)
            for metric, (total, weight) in found.items():
                sums[metric] += torch.stack([total.sum(), weight.sum()]).cpu()
    means = averages(sums, subject.method.counted_metrics)
    return {name: float(value) for name, value in data.task.finish(means).items()}


def noisy_batch(
    data: TextData, index: Tensor, noise: str, seed: int
) -> tuple[dict[str, Tensor], Tensor]:
    """Return inputs and targets of some test examples with noise in their prompts.

    Args:
        data: the data set.
        index: positions in the test set, int64 ``[B]``.
        noise: one of ``NOISES``.
        seed: seed of the run.
    """
    inputs: Any = data.inputs("test", index)
    ids, target = inputs["input_ids"], data.test_target[index]
    prompts, mask, answers = prompts_and_answers(ids, target[:, : ids.shape[1]], data.tokenizer.pad)
    rows = []
    for number, prompt, seen, answer in zip(index.tolist(), prompts, mask, answers, strict=True):
        rng = stream(seed, f"typos/{noise}", number)
        noisy = _noisy_prompt(prompt[seen].tolist(), data.tokenizer, data.prompt_end, noise, rng)
        rows.append(([*noisy, *answer], len(noisy)))
    longest = max(len(row) for row, _ in rows) - 1
    sequences = padded(rows, data.tokenizer.pad, longest, 0).to(data.device)
    return sequences.batch(torch.arange(len(rows), device=data.device))


def _noisy_prompt(
    ids: Sequence[int], tokenizer: Tokenizer, prompt_end: str, noise: str, rng: np.random.Generator
) -> list[int]:
    """Return the tokens of a prompt with noise in its words but those of its end, which is encoded
    apart or not, as in training."""
    start = (
        [tokenizer.bos] if tokenizer.bos is not None and list(ids[:1]) == [tokenizer.bos] else []
    )
    end = tokenizer.encode(prompt_end)
    apart = len(ids) - len(end)
    if list(ids[apart:]) == end:
        head = tokenizer.decode(ids[len(start) : apart])
        return [*start, *tokenizer.encode(add_noise(head, noise, rng)), *end]
    text = tokenizer.decode(ids[len(start) :])
    head = text.removesuffix(prompt_end)
    return [*start, *tokenizer.encode(add_noise(head, noise, rng) + text[len(head) :])]


def _prompt_lengths(target: Tensor) -> Tensor:
    """Return the number of tokens before the first labelled one, int64 ``[n]``."""
    return (target >= 0).int().argmax(1) + 1
