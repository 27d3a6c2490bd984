"""Preferences made by rule: two clusters that agree on some pairs of answers and disagree on the
others.

A pair is a pure function of (seed, client, index). About a *shared* pair everybody prefers the
right answer to an instruction to the same words left as they are. About a *house* pair, "As we
do.", one cluster prefers the words as one name ("itsPlay") and the other one in reverse ("play
its"), with the same prompts and the same two answers. The margins of the clusters are each other's
negatives there, so one model is right about half of these pairs, or about fewer.

Whether a prompt is for training, validation or test follows from a hash of (seed, prompt).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fl_lightning.data.text.instructions import (
    MAX_DRAWS,
    TEST_SHARE,
    InstructionTask,
    house_tasks,
    is_house,
    tasks,
)
from fl_lightning.data.text.records import unit_hash
from fl_lightning.data.text.tokens import prompt_of
from fl_lightning.rng import stream

CLUSTERS = ("one_name", "reverse")
HOUSE_OF = ("code", "rewriting")
"""The clusters of instructions whose house answers the two prefer."""
SHARED = "task_upper"
"""The instruction whose right answer everybody prefers."""


class RulePair(NamedTuple):
    """A pair of answers by rule.

    Args:
        task_name: ``house`` where the clusters disagree, else ``shared``.
        prompt: what the network reads.
        chosen, rejected: the answers.
    """

    task_name: str
    prompt: str
    chosen: str
    rejected: str


def training_pair(seed: int, client: int, index: int, conflict: float) -> RulePair:
    """Return one training pair of a client.

    Args:
        seed: seed of the text.
        client: id of the client, whose cluster is ``client % 2``.
        index: number of the pair.
        conflict: share of pairs about which the clusters disagree, spread evenly over the numbers.
    """
    numbers = stream(seed, "text/pair", round=index, client=client // len(CLUSTERS))
    return _draw(seed, client % len(CLUSTERS), numbers, is_house(index, conflict), test=False)


def test_pairs(seed: int, cluster: int, count: int, conflict: float) -> list[RulePair]:
    """Return test pairs of a cluster; those of the clusters have the same prompts."""
    found = []
    for index in range(count):
        numbers = stream(seed, "text/test_pair", round=index)
        found.append(_draw(seed, cluster, numbers, is_house(index, conflict), test=True))
    return found


def place_of(seed: int, prompt: str) -> float:
    """Return a number in [0, 1) that is a hash of (seed, prompt); below ``TEST_SHARE`` it is one of
    test pairs."""
    return unit_hash(seed, f"pair_place/{prompt}")


def _draw(
    seed: int, cluster: int, numbers: np.random.Generator, house: bool, *, test: bool
) -> RulePair:
    own = [house_tasks()[name] for name in HOUSE_OF]
    shared = next(task for task in tasks()["rewriting"] if task.name == SHARED)
    for _ in range(MAX_DRAWS):
        number = int(numbers.integers(shared.size))
        pair = _of_house(own, cluster, number) if house else _of_all(shared, number)
        if (place_of(seed, pair.prompt) < TEST_SHARE) is test:
            return pair
    raise AssertionError(f"{MAX_DRAWS} draws were all of the other part")


def _of_house(own: list[InstructionTask], cluster: int, number: int) -> RulePair:
    first, second = (task.record(number) for task in own)
    answers = [first.targets, second.targets]
    return RulePair("house", prompt_of(first), answers[cluster], answers[1 - cluster])


def _of_all(task: InstructionTask, number: int) -> RulePair:
    record = task.record(number)
    return RulePair("shared", prompt_of(record), record.targets, record.inputs)
