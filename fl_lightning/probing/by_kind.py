"""Probes of tasks whose test examples are of several kinds, and of answers that are generated."""

from __future__ import annotations

from collections import defaultdict
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.evaluation import averages, evaluate_batch, evaluation_mode
from fl_lightning.metrics.text import prompts_and_answers
from fl_lightning.probing.probed_model import BATCH_SIZE, Finding, ProbedModel
from fl_lightning.tasks import LanguageModelling

TIMED_PROMPTS, TIMED_TOKENS = 32, 32
"""Prompts whose answers are timed, and the tokens of each."""


def by_kind(subject: ProbedModel) -> Finding:
    """Evaluate the test examples of each kind by itself, such as those of one instruction task."""
    kinds, task = subject.data.test_kinds, subject.data.task
    if not len(kinds):
        return Finding(skipped=["kinds left out: the test examples are all of one kind"])
    sums: dict[str, dict[str, Tensor]] = defaultdict(
        lambda: defaultdict(lambda: torch.zeros(2, dtype=torch.float64))
    )
    for network, indices in subject.networks():
        for index in indices.split(min(BATCH_SIZE, subject.data.evaluation_batch)):
            inputs, target = subject.data.inputs("test", index), subject.data.test_target[index]
            _, found = evaluate_batch(subject.fabric, task, network, inputs, target)
            names = [kinds[at] for at in index.tolist()]
            for metric, pair in found.items():
                for name, total, weight in zip(names, *(part.cpu() for part in pair), strict=True):
                    sums[name][metric] += torch.stack([total, weight])
    metrics = {
        f"kind/{name}/{metric}": float(value)
        for name in sorted(sums)
        for metric, value in task.finish(
            averages(sums[name], subject.method.counted_metrics)
        ).items()
    }
    return Finding(
        metrics, details={"examples": {name: kinds.count(name) for name in sorted(sums)}}
    )


@torch.no_grad()
def generation(subject: ProbedModel) -> Finding:
    """Measure the seconds of a generated token, one prompt at a time and many at once."""
    task = subject.data.task
    if not isinstance(task, LanguageModelling):
        return Finding(skipped=[f"generation left out: the task is {type(task).__name__}"])
    if task.decoder is None:
        return Finding(skipped=["generation left out: the data have no decoder of tokens"])
    network, indices = next(iter(subject.networks()))
    index = indices[torch.arange(TIMED_PROMPTS, device=indices.device) % len(indices)]
    inputs, target = subject.data.inputs("test", index), subject.data.test_target[index]
    ids = inputs["input_ids"] if isinstance(inputs, dict) else inputs
    prompts, mask, _ = prompts_and_answers(ids, target[:, : ids.shape[1]], task.decoder.pad)
    generate: Any = network.generate
    timings: dict[str, float] = {}
    with evaluation_mode(network), subject.fabric.autocast():
        generate(prompts[:1], mask[:1], max_new_tokens=TIMED_TOKENS)  # warm
        for size in (1, TIMED_PROMPTS):
            taken = []
            for part, seen in zip(prompts.split(size), mask.split(size), strict=True):
                started = perf_counter()
                made = generate(part, seen, max_new_tokens=TIMED_TOKENS)
                int(made[0, 0])  # waits for the device
                taken.append((perf_counter() - started) / made.numel())
            timings[f"latency/token_batch{size}_median"] = float(np.median(taken))
            timings[f"latency/token_batch{size}_p99"] = float(np.quantile(taken, 0.99))
    details = {
        "prompts": TIMED_PROMPTS,
        "tokens": TIMED_TOKENS,
        "latency": "a new token's share of the seconds of its batch, reading the prompts included",
        f"batch of {TIMED_PROMPTS}": "measured once, so p99 is the median",
    }
    return Finding(timings=timings, details=details)
