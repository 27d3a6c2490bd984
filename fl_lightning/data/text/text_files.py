"""A federation of one's own text: JSON lines of instruction records, and plain text files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch

from fl_lightning.config.constraints import path_to, within
from fl_lightning.data.arrays import check_test_fraction
from fl_lightning.data.partition import check_memory
from fl_lightning.data.text.federation import TextData, TextExamples, tasks_of
from fl_lightning.data.text.prompts import PLAIN, Prompt
from fl_lightning.data.text.records import (
    JSON_SUFFIXES,
    FieldSources,
    Line,
    json_records,
    name_under,
    places_by_prompt,
    read_text,
)
from fl_lightning.data.text.tokens import Sequences, TooLong, encode_records, encode_windows
from fl_lightning.errors import require

PROSE_SUFFIXES = (".txt", ".md", ".text")


TEXT = path_to("any", "no such file", "write a .jsonl or .txt file, or a folder of them")


class TextFiles(TextData):
    """Text of one's own: JSON lines with instruction records, or plain text that is cut into
    windows.

    A line of a ``.jsonl`` file is an object with the texts ``task_name``, ``definition``,
    ``inputs`` and ``targets``, the fields of Natural Instructions; other keys may be there. A
    ``.json`` file may also be one list of such objects, or one object with the list of each client
    under its name, which is then the value of the key ``client``. A plain text file (``.txt``,
    ``.md``) is one client and one group; its windows do not overlap in what they predict.

    Args:
        train: a file, or a folder whose files are read in the order of their names.
        test: a file or folder of the same kind; null: ``test_fraction`` of ``train``.
        test_fraction: share of the training files that becomes the test set if there is no
            ``test``, in (0, 1): of records those with certain inputs, of plain text the end of each
            file; a file of one window has none.
        client: key of a record that says whose it is; null: the file.
        group: key of a record that says its group, by which partitions deal it out; null: the file.
        num_clients: number of clients; 0: as many as write in the training files.
        too_long: what is done with a record longer than the context; refuse: an error; cut: the end
            of its inputs is left out, and what stands before them where that is not enough, and
            ``partition.json`` says of how many records.
        columns: names of keys that are not those of the fields, by field, such as ``{inputs:
            instruction, targets: response}``; null: those of the fields.
        constants: texts of fields that no key has, by field; null: none.
        template: what a network reads, with ``{definition}`` and ``{inputs}`` in their places, see
            :class:`~fl_lightning.data.text.prompts.Prompt`.
        settings: those of all text, see :class:`~fl_lightning.data.TextData`; ``context`` is the
            length of a window of plain text too.
    """

    dataset = "text_files"

    def __init__(
        self,
        train: Annotated[str, TEXT],
        test: Annotated[str | None, TEXT] = None,
        test_fraction: float = 0.1,
        client: str | None = None,
        group: str | None = "task_name",
        num_clients: Annotated[
            int,
            within(
                "[0, inf)", "a federation has at least one client", "write 0 for those of the files"
            ),
        ] = 0,
        too_long: TooLong = "refuse",
        columns: dict[str, str] | None = None,
        constants: dict[str, str] | None = None,
        template: str = PLAIN,
        **settings: Any,
    ) -> None:
        check_test_fraction(test is not None, test_fraction)
        super().__init__(num_clients=num_clients or 1, **settings)
        self.count_clients = num_clients == 0
        self.train_path, self.test_path = Path(train), Path(test) if test else None
        self.test_fraction = test_fraction
        self.client_key, self.group_key, self.too_long = client, group, too_long
        self.fields, self.prompt = FieldSources(columns, constants), Prompt(template)
        self.prompt_end = self.prompt.end
        self._digest = hashlib.sha256()

    def prepare_data(self) -> None:
        """Check that there are files of one kind.

        Raises:
            InputError: a file or folder is missing, or holds no text or two kinds of it.
        """
        kinds = {_is_prose(text_files(path)) for path in (self.train_path, self.test_path) if path}
        require(
            len(kinds) == 1,
            f"train {self.train_path} and test {self.test_path}",
            "both are JSON lines or both are plain text",
            "give files of one kind",
        )

    def read(self) -> tuple[TextExamples, TextExamples]:
        """Read the files.

        Raises:
            InputError: a file cannot be read, a line is no record, or nothing is left to train on.
        """
        self.prepare_data()
        self._digest = hashlib.sha256()
        files = text_files(self.train_path)
        tests = text_files(self.test_path) if self.test_path else []
        check_memory(f"train {self.train_path}", sum(path.stat().st_size for path in files + tests))
        require(
            not (self.generate and _is_prose(files)),
            "generate=True with plain text",
            "every token of it is labelled, and there are no answers",
            "write generate: false",
        )
        self.asked = () if _is_prose(files) else self.prompt.asked
        train, test = (self._prose if _is_prose(files) else self._records)(files, tests)
        for split, some in (("train", train), ("test", test)):
            require(
                len(some.sequences) or (split == "test" and self.run_form),
                f"{split} {self.test_path if split == 'test' and self.test_path else self.train_path}",
                f"no example is left for {split}",
                "give more text",
            )
        return train, test

    def _records(self, files: list[Path], tests: list[Path]) -> tuple[TextExamples, TextExamples]:
        both = [[line for path in some for line in self._lines(path)] for some in (files, tests)]
        records = (line.content for some in both for line in some)
        place = places_by_prompt(records, self.prompt)
        lines, test, held_out = self.split_lines(both[0], both[1] if tests else None, place)

        def examples(some: list[Line]) -> TextExamples:
            records = [line.content for line in some]
            sequences = encode_records(
                records,
                self.tokenizer,
                self.context,
                self.too_long,
                [line.place for line in some],
                template=self.prompt,
            )
            return replace(self.of_lines(some, sequences), task=tasks_of(records))

        return replace(examples(lines), held_out=held_out), examples(test)

    def _prose(self, files: list[Path], tests: list[Path]) -> tuple[TextExamples, TextExamples]:
        names = {path.name: number for number, path in enumerate(files)}
        self.name_clients(list(names))
        self.groups = tuple(dict.fromkeys([*names, *(path.name for path in tests)]))
        numbers = {name: number for number, name in enumerate(self.groups)}
        train, test = [], []
        for path in files:
            windows = encode_windows(self._text(path), self.tokenizer, self.context)
            # one: to train on
            share = min(max(1, round(self.test_fraction * len(windows))), len(windows) - 1)
            first = len(windows) - (0 if tests or self.run_form else share)
            train.append((numbers[path.name], part_of_windows(windows, slice(0, first))))
            test.append((numbers[path.name], part_of_windows(windows, slice(first, None))))
        if tests:
            test = [
                (numbers[path.name], encode_windows(self._text(path), self.tokenizer, self.context))
                for path in tests
            ]
        return joined_windows(train), replace(joined_windows(test), owner=None)  # files are groups

    def _text(self, path: Path) -> str:
        text = read_text(path)
        self._digest.update(text.encode() + b"\0")
        return text

    def _lines(self, path: Path) -> Iterator[Line]:
        """Yield the records of a file of JSON."""
        keys = self.client_key, self.group_key
        seen: dict[str, dict[str, Any]] = {key: {} for key in keys if key}
        for entry, place in json_records(path, self._text(path)):
            record = self.fields.checked(entry, place, *filter(None, keys))
            known = self.fields.of(entry)
            names = [name_under(key, known, place, seen[key]) if key else path.name for key in keys]
            yield Line(record, place, *names)

    @property
    def text_summary(self) -> dict[str, Any]:
        """The SHA-256 of all files' texts, the clients' names, and how many test records were left
        out because they are training records too."""
        return {
            "sha256": self._digest.hexdigest(),
            "clients": self.client_names,
            "test records left out": self.tests_left_out,
        }


def text_files(path: Path) -> list[Path]:
    """Return a file, or the text files of a folder in the order of their names.

    Raises:
        InputError: there is no such file, none in the folder, or they are of two kinds.
    """
    suffixes = JSON_SUFFIXES + PROSE_SUFFIXES
    if path.is_dir():
        found = sorted(
            file for file in path.iterdir() if file.is_file() and file.suffix in suffixes
        )
    else:
        TEXT.check(path)
        found = [path]
    TEXT.require(found, path, "no text in this folder")
    require(
        all(file.suffix in suffixes for file in found),
        f"{path}",
        f"a text file's name ends in {', '.join(suffixes)}",
        "rename it",
    )
    require(
        len({file.suffix in PROSE_SUFFIXES for file in found}) == 1,
        f"{path}",
        "it holds JSON lines and plain text",
        "keep them in two folders",
    )
    return found


def _is_prose(files: list[Path]) -> bool:
    return files[0].suffix in PROSE_SUFFIXES


def part_of_windows(windows: Sequences, part: slice) -> Sequences:
    """Return some of the windows."""
    return Sequences(windows.input_ids[part], windows.target[part], windows.length[part])


def joined_windows(parts: list[tuple[int, Sequences]]) -> TextExamples:
    """Return the windows of all files; the number of a file is their group and their owner."""
    number = np.repeat(
        np.array([number for number, _ in parts], np.int64), [len(windows) for _, windows in parts]
    )
    input_ids, target, length = (
        torch.cat([getattr(windows, name) for _, windows in parts])
        for name in ("input_ids", "target", "length")
    )
    return TextExamples(Sequences(input_ids, target, length), number, number)
