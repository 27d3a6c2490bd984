"""A federation of one's own conversations: JSON lines of turns, of which the assistant's are
learnt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import compress
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from fl_lightning.config.constraints import path_to, within
from fl_lightning.data.text.conversations import (
    LISTS,
    Turn,
    conversation_item,
    turn_template,
    turns_of,
)
from fl_lightning.data.text.federation import TextData, TextExamples
from fl_lightning.data.text.records import (
    Line,
    json_records,
    line_of,
    prompt_place,
    read_text,
    texts_sha256,
)
from fl_lightning.data.text.token_items import token_sequences
from fl_lightning.data.text.tokens import Record, TooLong
from fl_lightning.errors import require

CONVERSATIONS = path_to("file", "no such file", "write a .jsonl or .json file")


def _place(turns: Sequence[Turn]) -> float:
    """Return a number in [0, 1) that is a hash of the first question."""
    asked = next(turn.text for turn in turns if turn.role == "user")
    return prompt_place(Record("", "", asked, ""))


class ConversationFiles(TextData):
    """Conversations of several turns in JSON lines. The loss is that of the assistant's turns, each
    of which is predicted from all that was said before it.

    A line has ``conversations``, a list of ``{"from": "human", "value": ...}`` and ``{"from":
    "gpt", ...}`` in turn (ShareGPT's form), or ``messages`` with ``role`` and ``content``; a turn
    of the system may stand first. A ``.json`` file may also be a list of such objects, or an object
    with the list of each client under its name, which is then the value of the key ``client``.
    Conversations with equal first questions are never on both sides of a split.

    Args:
        train: the ``.jsonl`` or ``.json`` file.
        test: a file of the same kind; null: ``test_fraction`` of ``train``.
        test_fraction: share of the first questions that becomes the test set if there is no
            ``test``, in (0, 1).
        client: key of a line that says whose it is; it is its group too. Null: all lines are of
            one, and a partition such as IID() deals them out.
        num_clients: number of clients; 0: as many as the training lines name.
        template: of a question, with ``{inputs}`` in its place; ``chat``: the tokeniser's chat
            template.
        system: what stands before the first question where the conversation has no turn of the
            system.
        too_long: what is done with a conversation longer than the context; refuse: an error; cut:
            its end is left out, or all of it where no answer begins in the context;
            ``partition.json`` says how often.
        settings: those of all text, see :class:`~fl_lightning.data.TextData`, but ``generate``.
    """

    dataset = "conversations"

    def __init__(
        self,
        train: Annotated[str, CONVERSATIONS],
        test: Annotated[str | None, CONVERSATIONS] = None,
        test_fraction: Annotated[float, within("(0, 1)", "a share in (0, 1)", 0.1)] = 0.1,
        client: str | None = None,
        num_clients: Annotated[int, within("[0, inf)", "0 clients or more are asked for", 0)] = 0,
        template: str = "USER: {inputs} ASSISTANT: ",
        system: str = "",
        too_long: TooLong = "refuse",
        **settings: Any,
    ) -> None:
        require(
            not settings.get("generate", False),
            "generate=True with conversations",
            "an answer is measured in the turn that it has, after the true ones before it",
            "leave generate out",
        )
        super().__init__(num_clients=num_clients or 1, **settings)
        self.count_clients = num_clients == 0
        self.paths = Path(train), Path(test) if test else None
        self.test_fraction, self.client_key, self.too_long = test_fraction, client, too_long
        self.template = turn_template(template, system, self.tokenizer)
        self.asked, self.prompt_end = self.template.asked, self.template.end
        self._summary: dict[str, Any] = {}

    def read(self) -> tuple[TextExamples, TextExamples]:
        """Read the files.

        Raises:
            InputError: a file cannot be read, a line is no conversation, or nothing is left to
                train on.
        """
        train, test = self.paths
        lines, held, held_out = self.split_lines(
            self._lines(train), self._lines(test) if test else None, _place
        )
        texts = (text for line in [*lines, *held] for turn in line.content for text in turn)
        self._summary = {
            "files": [path.name for path in self.paths if path],
            "sha256": texts_sha256(texts),
            "test conversations left out": self.tests_left_out,
            "conversations without an answer in the context": 0,
            "clients": self.client_names,
        }
        parts = self._examples(lines, held_out), self._examples(held, None)
        for path, some in zip((train, test or train), parts, strict=True):
            is_needed = some is parts[0] or not self.run_form
            require(
                len(some.sequences) or not is_needed,
                f"{path}",
                f"no conversation is left for {'training' if some is parts[0] else 'the test set'}: those "
                "with one first question stay together",
                "give more of them, or another test_fraction",
            )
        return parts

    def _lines(self, path: Path) -> list[Line]:
        """Return the conversations of a file."""
        seen: dict[str, Any] = {}
        return [
            line_of(turns_of(entry, place), entry, place, self.client_key, seen)
            for entry, place in json_records(path, read_text(path), LISTS)
        ]

    def _examples(self, lines: Sequence[Line], held_out: np.ndarray | None) -> TextExamples:
        """Return the examples of a split, of which those that are ``held_out`` are for
        validation."""
        items = [conversation_item(self.template, line.content, line.place) for line in lines]
        if self.too_long == "cut":
            kept = [bool(item.labelled[1 : self.context + 1].any()) for item in items]
            self._summary["conversations without an answer in the context"] += len(kept) - sum(kept)
            items, lines = [*compress(items, kept)], [*compress(lines, kept)]
            held_out = None if held_out is None else held_out[kept]
        sequences = token_sequences(items, self.tokenizer.pad, self.context, self.too_long)
        return replace(self.of_lines(lines, sequences), held_out=held_out)

    @property
    def text_summary(self) -> dict[str, Any]:
        """The files, the clients' names, the SHA-256 of all turns, and how many conversations were
        left out why."""
        return self._summary
