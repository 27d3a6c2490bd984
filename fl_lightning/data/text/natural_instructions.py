"""Natural Instructions and data sets with its fields, dealt out by categories of their definitions.

``N`` training records, ``K`` clients, ``G`` categories.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from fl_lightning.config.constraints import within
from fl_lightning.data.arrays import check_test_fraction
from fl_lightning.data.base import NumClients
from fl_lightning.data.hugging_face import load_splits
from fl_lightning.data.text.federation import TextData, TextExamples, tasks_of
from fl_lightning.data.text.prompts import PLAIN, Prompt
from fl_lightning.data.text.records import (
    JSON_SUFFIXES,
    FieldSources,
    json_records,
    places_by_prompt,
    prompt_place,
    read_text,
    texts_sha256,
)
from fl_lightning.data.text.tokens import Record, TooLong, encode_records
from fl_lightning.errors import require

CATEGORIES = {
    "translation": ["translat"],
    "reasoning": ["reason", "logic", "arithmetic", "calculat", "math", "infer"],
    "code": ["code", "program", "python", "sql", "command"],
    "rewriting": ["rewrit", "paraphras", "rephras", "reword", "simplif"],
}
"""The categories by default, with the beginnings of words by which a definition is known."""
ALL = "all"
"""The one category where no keywords are given."""


class NaturalInstructions(TextData):
    """Records of Natural Instructions (Wang et al. 2022, arXiv 2204.07705), or of a data set with
    its fields ``task_name``, ``definition``, ``inputs`` and ``targets``.

    A record's category is the first one of which a keyword begins a word of its definition, in
    small letters or capitals; records of none are left out, and ``partition.json`` says how many.
    The category is the group, and client k belongs to category k mod G: its clients share its
    records evenly. Equal prompts are never on both sides of a split.

    Args:
        path: a data set of Hugging Face ``datasets``: a name on the Hub, such as
            ``Muennighoff/natural-instructions``, a folder that ``save_to_disk`` wrote, or a
            ``.parquet`` file; or a file of JSON lines, which needs no library.
        name: configuration of a data set on the Hub; null: its default.
        train: name of the training split.
        test: name of the test split; null: ``test_fraction`` of the training split.
        test_fraction: share of the prompts that becomes the test set if there is no ``test``, in
            (0, 1).
        columns: names of columns or keys that are not those of the fields, by field, such as
            ``{inputs: article, targets: highlights}``; null: those of the fields.
        constants: texts of fields that the data set has no column of, by field; null: none.
        template: what a network reads, with ``{definition}`` and ``{inputs}`` in their places, see
            :class:`~fl_lightning.data.text.prompts.Prompt`.
        categories: keywords of each category by its name; null: translation, reasoning, code and
            rewriting; {}: all records are of one category, whatever their definitions.
        max_examples: largest number of records of a category that are read of each split, by a hash
            of their prompts; without ``test``, the test records are among them. null: all.
        num_clients: number of clients; fewer than there are categories: the later ones are left
            out.
        context: largest number of tokens that the network sees.
        too_long: what is done with a record longer than the context; refuse: an error; cut: the end
            of its inputs is left out, and what stands before them where that is not enough, and
            ``partition.json`` says of how many records.
        generate: whether answers are generated for exact match and ROUGE-L.
        settings: those of all text, see :class:`~fl_lightning.data.TextData`.
    """

    dataset = "natural_instructions"
    own_setting = "path"

    def __init__(
        self,
        path: str,
        name: str | None = None,
        train: str = "train",
        test: str | None = None,
        test_fraction: float = 0.1,
        columns: dict[str, str] | None = None,
        constants: dict[str, str] | None = None,
        template: str = PLAIN,
        categories: dict[str, list[str]] | None = None,
        max_examples: Annotated[
            int | None,
            within(
                "[1, inf)", "a category has one record or more", "write e.g. 2000, or null for all"
            ),
        ] = None,
        num_clients: NumClients = 8,
        context: int = 512,
        too_long: TooLong = "cut",
        generate: bool = True,
        **settings: Any,
    ) -> None:
        check_test_fraction(test is not None, test_fraction)
        self.fields, self.prompt = FieldSources(columns, constants), Prompt(template)
        self.prompt_end, self.asked = self.prompt.end, self.prompt.asked
        self.categories = CATEGORIES if categories is None else categories
        require(
            all(self.categories.values()) and all(map(all, self.categories.values())),
            f"categories={categories}",
            "each has a keyword or more",
            "write e.g. {translation: [translat], code: [python, sql]}, or {} for one of all records",
        )
        super().__init__(num_clients=num_clients, context=context, generate=generate, **settings)
        self.path, self.configuration, self.splits = path, name, (train, test)
        self.test_fraction, self.max_examples, self.too_long = test_fraction, max_examples, too_long
        self.groups = tuple(self.categories)[:num_clients] or (ALL,)
        self._known: dict[str, str | None] = {}
        self._summary: dict[str, Any] = {}

    def prepare_data(self) -> None:
        """Download the data set if it is one of the Hub, and check its splits and columns.

        Raises:
            InputError: it cannot be loaded, or lacks a split or column.
        """
        self._sources()

    def read(self) -> tuple[TextExamples, TextExamples]:
        """Read the records.

        Raises:
            InputError: the data set cannot be loaded, a record lacks a text, or a category has no
                record.
        """
        if self.run_form:  # a node has records of what it has
            self.groups = tuple(self.categories) or (ALL,)
        train, *tests = self._sources()
        left_out: Counter[str] = Counter()
        records = self._chosen(train, left_out)
        both = self._chosen(tests[0], left_out) if tests else None
        place_of = places_by_prompt([*records, *(both or [])], self.prompt)
        records, test, held_out = self.split(records, both, place_of)
        if both is not None:
            left_out["test records among the training records"] = self.tests_left_out
        groups = [self.category(record) for record in records]
        for split, some in (("training", records), ("test", test)):
            missing = set(self.groups) - {self.category(record) for record in some}
            require(
                not missing or (self.run_form and records),
                f"{self.path}, category {min(missing, default='')}",
                f"no {split} record has a definition with one of its keywords",
                "give other keywords in categories, or more records",
            )
        group = np.array([self.groups.index(str(name)) for name in groups], np.int64)
        place = np.array([prompt_place(record) for record in records])
        self._summary = {
            "sha256": texts_sha256(text for record in [*records, *test] for text in record),
            "categories": dict(Counter(str(name) for name in groups)),
            "records left out": dict(left_out),
        }
        test_group = np.array(
            [self.groups.index(str(self.category(record))) for record in test], np.int64
        )
        first, second = (
            encode_records(some, self.tokenizer, self.context, self.too_long, template=self.prompt)
            for some in (records, test)
        )
        owner = self._owners(group, place)
        return (
            TextExamples(first, group, owner, tasks_of(records), held_out),
            TextExamples(second, test_group, None, tasks_of(test)),
        )

    def category(self, record: Record) -> str | None:
        """Return the name of a record's category; None if it has none that is used."""
        if not self.categories:
            return ALL
        definition = record.definition
        if definition not in self._known:
            self._known[definition] = next(
                (name for name in self.groups if _has_keyword(definition, self.categories[name])),
                None,
            )
        return self._known[definition]

    def _sources(self) -> list[Iterable[tuple[Mapping[str, Any], str]]]:
        """Return the rows of each split that is named, each with its place."""
        path = Path(self.path)
        if path.is_file() and path.suffix in JSON_SUFFIXES:
            require(
                self.splits[1] is None,
                f"test={self.splits[1]}",
                f"{self.path} has a single split",
                "leave test out",
            )
            return [json_records(path, read_text(path))]
        named = [split for split in self.splits if split is not None]
        needed = list(dict.fromkeys(self.fields.columns.values()))
        found = load_splits(self.path, self.configuration, self.splits, needed)
        return [
            self._rows(split.select_columns(needed), f"{self.path}, {name}")
            for split, name in zip(found[: len(named)], named, strict=True)
        ]

    def _rows(self, split: Any, place: str) -> Iterator[tuple[Mapping[str, Any], str]]:
        return ((row, f"{place}, row {number}") for number, row in enumerate(split))

    def _chosen(
        self, rows: Iterable[tuple[Mapping[str, Any], str]], left_out: Counter[str]
    ) -> list[Record]:
        """Return the records of a split that have a category, at most ``max_examples`` of each."""
        found: dict[str, list[Record]] = {name: [] for name in self.groups}
        for row, place in rows:
            record = self.fields.checked(row, place)
            name = self.category(record)
            if name is None:
                left_out["of no category"] += 1
            else:
                found[name].append(record)
        for name, some in found.items():
            if self.max_examples is not None and len(some) > self.max_examples:
                left_out["beyond max_examples"] += len(some) - self.max_examples
                found[name] = sorted(some, key=lambda record: prompt_place(record, "chosen"))
                del found[name][self.max_examples :]
        return [record for some in found.values() for record in some]

    def _owners(self, group: np.ndarray, place: np.ndarray) -> np.ndarray:
        """Return the client of each record, int64 ``[N]``: those of a category take turns by the
        hash."""
        owner = np.empty(len(group), np.int64)
        for number in range(len(self.groups)):
            clients = np.arange(number % self.num_clients, self.num_clients, len(self.groups))
            members = np.flatnonzero(group == number)
            members = members[np.argsort(place[members], kind="stable")]
            owner[members] = clients[np.arange(len(members)) % len(clients)]
        return owner

    @property
    def text_summary(self) -> dict[str, Any]:
        """The SHA-256 of all records, the training records by category, and how many were left out
        why."""
        return self._summary


def _has_keyword(definition: str, keywords: Iterable[str]) -> bool:
    return any(re.search(rf"\b{re.escape(word)}", definition, re.IGNORECASE) for word in keywords)
