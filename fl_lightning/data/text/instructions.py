"""Instruction records made by rule: four clusters of three tasks, and one task that the clusters
answer differently.

A record is a pure function of (seed, client, index), and no file is read but a list of English
words. The ``house`` task has the same definition and the same inputs in every cluster and another
answer in each: a single model that reads nothing but the prompt is right for one cluster at most,
see :func:`best_single_model`.

Each input of a task belongs to training, validation or test by a hash of (seed, task, inputs). So a
held-out record never equals one that is trained on, however many clients there are and however they
are dealt.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from math import prod

import numpy as np

from fl_lightning.data.text.records import unit_hash
from fl_lightning.data.text.tokens import Record
from fl_lightning.errors import require
from fl_lightning.rng import stream

CLUSTERS = ("translation", "reasoning", "code", "rewriting")
HOUSE = "task_house"
TEST_SHARE = 0.2
"""Share of each task's inputs that are kept for the test records."""

MAX_DRAWS = 1000
"""Draws for one record. A draw is fit with probability 1 - TEST_SHARE or TEST_SHARE."""

MAX_LISTED = 10_000
"""Tasks with no more inputs have all of them listed to find those of the test; of others they are
drawn."""

VOWELS, CONSONANTS = "aeiou", "bdfgklmnprstvz"
NUMBERS = """
zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety
"""
Maker = Callable[[int], tuple[str, str]]


@cache
def words() -> tuple[str, ...]:
    """Return the 1 500 English words of 2 to 7 letters that records are made of, in alphabetical
    order."""
    return tuple(files(__package__).joinpath("words.txt").read_text(encoding="ascii").split())


SHIFTED = str.maketrans(
    VOWELS + CONSONANTS, VOWELS[1:] + VOWELS[:1] + CONSONANTS[3:] + CONSONANTS[:3]
)


def shift_letters(text: str) -> str:
    """Translate into the letter-shift language.

    A vowel becomes the next one, a consonant of ``CONSONANTS`` the third next; the rest stays.

    >>> shift_letters("its play")
    'obz tpey'
    """
    return text.translate(SHIFTED)


def number_in_words(number: int) -> str:
    """Return the English name of a number in [0, 999].

    >>> number_in_words(217)
    'two hundred seventeen'
    """
    names = NUMBERS.split()
    hundreds, rest = divmod(number, 100)
    parts = [f"{names[hundreds]} hundred"] if hundreds else []
    if rest >= 20:
        parts.append(names[18 + rest // 10])
        rest %= 10
    if rest or not parts:
        parts.append(names[rest])
    return " ".join(parts)


def camel_case(chosen: Iterable[str]) -> str:
    """Return words as one name.

    >>> camel_case(["its", "play"])
    'itsPlay'
    """
    first, *others = chosen
    return first + "".join(map(str.capitalize, others))


@dataclass(frozen=True)
class InstructionTask:
    """A rule that makes records.

    Args:
        name: ``task_name`` of the records.
        cluster: the cluster whose clients have this task.
        definition: the instruction.
        size: number of different inputs.
        make: returns inputs and answer of a number in [0, size).
    """

    name: str
    cluster: str
    definition: str
    size: int
    make: Maker

    def record(self, number: int) -> Record:
        """Return the record of a number in [0, size)."""
        return Record(self.name, self.definition, *self.make(number))


def _of_words(count: int, inputs: str, answer: Callable[[list[str]], str]) -> tuple[int, Maker]:
    """Return the number of ways to choose different words, and the maker of a record from such a
    choice.

    Args:
        count: number of words.
        inputs: format of the inputs, with one pair of braces for each word.
        answer: makes the answer from the words.
    """

    def make(number: int) -> tuple[str, str]:
        chosen = _distinct_words(number, count)
        return inputs.format(*chosen), answer(chosen)

    return prod(range(len(words()), len(words()) - count, -1)), make


def _distinct_words(number: int, count: int) -> list[str]:
    """Return the ``number``-th ordered choice of different words."""
    taken: list[int] = []
    for radix in range(len(words()), len(words()) - count, -1):
        number, place = divmod(number, radix)
        for earlier in sorted(taken):
            place += place >= earlier
        taken.append(place)
    return [words()[place] for place in taken]


def _larger(number: int) -> tuple[str, str]:
    first, other = divmod(number, 99)
    second = other + (other >= first)
    return f"{first} {second}", str(max(first, second))


def _next(number: int) -> tuple[str, str]:
    first, step = number // 9, number % 9 + 1
    return f"{first} {first + step} {first + 2 * step}", str(first + 3 * step)


@cache
def tasks() -> dict[str, tuple[InstructionTask, ...]]:
    """Return the three tasks of each cluster, by cluster."""
    translation, reasoning, code, rewriting = CLUSTERS
    one_method, one_list = "{0[1]}.{0[0]}({0[2]})".format, "[{0[0]}, {0[1]}, {0[2]}]".format
    rules: tuple[tuple[str, str, str, int, Maker], ...] = (
        (
            "task_shift",
            translation,
            "To Zu.",
            *_of_words(2, "{} {}", lambda w: shift_letters(" ".join(w))),
        ),
        ("task_to_digits", translation, "In digits.", 300, lambda n: (number_in_words(n), str(n))),
        ("task_to_words", translation, "In words.", 300, lambda n: (str(n), number_in_words(n))),
        (
            "task_add",
            reasoning,
            "Add.",
            400,
            lambda n: (f"{n // 20}+{n % 20}", str(n // 20 + n % 20)),
        ),
        ("task_larger", reasoning, "Larger number.", 100 * 99, _larger),
        ("task_next", reasoning, "Continue.", 50 * 9, _next),
        ("task_camel", code, "Camel case.", *_of_words(3, "{}_{}_{}", camel_case)),
        ("task_method", code, "As a method.", *_of_words(3, "{}({}, {})", one_method)),
        ("task_list", code, "As a list.", *_of_words(3, "{} {} {}", one_list)),
        (
            "task_upper",
            rewriting,
            "Capitals.",
            *_of_words(2, "{} {}", lambda w: " ".join(w).upper()),
        ),
        (
            "task_reverse",
            rewriting,
            "Reverse.",
            *_of_words(3, "{} {} {}", lambda w: " ".join(w[::-1])),
        ),
        ("task_last", rewriting, "Last word.", *_of_words(3, "{} {} {}", lambda w: w[-1])),
    )
    made = [InstructionTask(*rule) for rule in rules]
    return {
        cluster: tuple(task for task in made if task.cluster == cluster) for cluster in CLUSTERS
    }


@cache
def house_tasks() -> dict[str, InstructionTask]:
    """Return the house task of each cluster: the same definition and inputs, another answer."""
    answers: dict[str, Callable[[list[str]], str]] = {
        "translation": lambda chosen: shift_letters(" ".join(chosen)),
        "reasoning": lambda chosen: str(sum(map(len, chosen))),
        "code": camel_case,
        "rewriting": lambda chosen: " ".join(chosen[::-1]),
    }
    return {
        cluster: InstructionTask(
            HOUSE, cluster, "As we do.", *_of_words(2, "{} {}", answers[cluster])
        )
        for cluster in CLUSTERS
    }


def place_of(seed: int, record: Record) -> float:
    """Return a number in [0, 1) that is a hash of (seed, task_name, inputs).

    Below ``TEST_SHARE`` the inputs are those of test records.
    """
    return unit_hash(seed, f"place/{record.task_name}/{record.inputs}")


def for_validation(places: Sequence[float], val_fraction: float) -> np.ndarray:
    """Return which training examples are held out for validation, bool ``[N]``, by the hashes of
    their inputs; of all inputs, a share of ``val_fraction`` of those that are no test inputs is."""
    return np.array(places, np.float64) < TEST_SHARE + (1 - TEST_SHARE) * val_fraction


def cluster_of(client: int) -> str:
    """Return the cluster of a client: clients 0, 4, 8 ... translate."""
    return CLUSTERS[client % len(CLUSTERS)]


def is_house(index: int, house: float) -> bool:
    """Return whether the record at ``index`` is a house record.

    The records 0 .. n - 1 have a share ``house`` of them, within log2(n) + 1 records, spread
    evenly. A larger share only turns more records into house records, and leaves the others as they
    are. Source: the sequence of van der Corput (1935), base 2.

    >>> [index for index in range(8) if is_house(index, 0.25)]
    [0, 4]
    """
    return _reversed_bits(index) < house


def _reversed_bits(index: int) -> float:
    bits = f"{index:b}"[::-1]
    return int(bits, 2) / 2 ** len(bits)


def training_record(seed: int, client: int, index: int, house: float = 0.0) -> Record:
    """Return one training record of a client.

    Record ``index`` is of task ``index % 3`` of the client's cluster, or of the house task. Clients
    4m to 4m + 3, one of each cluster, have the same house inputs.

    Args:
        seed: seed of the text; the seed of the run has no influence.
        client: id of the client, 0 or more.
        index: number of the record, 0 or more.
        house: share of house records, in [0, 1].
    """
    cluster = cluster_of(client)
    if is_house(index, house):
        rng = stream(seed, "text/house", round=index, client=client // len(CLUSTERS))
        return _draw(house_tasks()[cluster], rng, seed, test=False)
    rng = stream(seed, "text/record", round=index, client=client)
    own = tasks()[cluster]
    return _draw(own[index % len(own)], rng, seed, test=False)


def training_records(seed: int, client: int, count: int, house: float = 0.0) -> Iterator[Record]:
    """Yield the first training records of a client; the arguments are those of
    :func:`training_record`."""
    return (training_record(seed, client, index, house) for index in range(count))


def test_records(seed: int, task: InstructionTask, count: int) -> list[Record]:
    """Return test records of a task with different inputs, none of which is trained on by any
    client.

    Those of the house task have the same inputs in every cluster.

    Args:
        seed: seed of the text.
        task: one of :func:`tasks` or :func:`house_tasks`.
        count: number of records.

    Raises:
        InputError: the task has too few inputs.
    """
    if task.size <= MAX_LISTED:
        listed = [(place_of(seed, record), record) for record in map(task.record, range(task.size))]
        fit = sorted(pair for pair in listed if pair[0] < TEST_SHARE)
        _check_count(task, count, len(fit))
        return [record for _, record in fit[:count]]
    _check_count(task, count, int(task.size * TEST_SHARE / 2))
    rng = stream(seed, f"text/test/{task.name}")
    found: dict[str, Record] = {}
    while len(found) < count:
        record = _draw(task, rng, seed, test=True)
        found.setdefault(record.inputs, record)
    return list(found.values())


def _check_count(task: InstructionTask, count: int, most: int) -> None:
    require(
        count <= most,
        f"{count} test records of {task.name}",
        f"with this seed it has {most}",
        f"write {most} or fewer",
    )


def _draw(task: InstructionTask, rng: np.random.Generator, seed: int, *, test: bool) -> Record:
    for _ in range(MAX_DRAWS):
        record = task.record(int(rng.integers(task.size)))
        if (place_of(seed, record) < TEST_SHARE) is test:
            return record
    raise AssertionError(f"{MAX_DRAWS} draws of {task.name} were all of the other part")


def best_single_model(records: Iterable[Record]) -> float:
    """Return the largest share of these records that one model can answer exactly.

    A model that reads nothing but the prompt gives one answer to it, so it is right for the most
    frequent answer to each prompt at best. On house records of four equally large clusters that is
    1/4.
    """
    answers: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for record in records:
        answers[record.definition, record.inputs][record.targets] += 1
    total = sum(count.total() for count in answers.values())
    return sum(max(count.values()) for count in answers.values()) / total
