"""A federation of one's own conversations: JSON lines of turns, of which the assistant's are
learnt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np

from fl_lightning.config.constraints import path_to, within
from fl_lightning.data.arrays import numbers_by_name
from fl_lightning.data.text.conversations import (
    LISTS,
    Turn,
    conversation_item,
    turn_template,
    turns_of,
)
from fl_lightning.data.text.federation import TextData, TextExamples
from fl_lightning.data.text.records import (
    json_records,
    name_under,
    prompt_place,
    read_text,
    texts_sha256,
)
from fl_lightning.data.text.token_items import token_sequences
from fl_lightning.data.text.tokens import Record, TooLong
from fl_lightning.errors import require

CONVERSATIONS = path_to("file", "no such file", "write a .jsonl or .json file")


class Talk(NamedTuple):
    """A conversation of a file.

    Args:
        turns: as :func:`~fl_lightning.data.text.conversations.turns_of` gives them.
        place: file and line, for messages.
        client: whose it is.
    """

    turns: Sequence[Turn]
    place: str
    client: str

    @property
    def hash(self) -> float:
        """A number in [0, 1) that is a hash of the first question."""
        asked = next(turn.text for turn in self.turns if turn.role == "user")
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
        self.asked = self.template.asked
        self._summary: dict[str, Any] = {}

    def read(self) -> tuple[TextExamples, TextExamples]:
        """Read the files.

        Raises:
            InputError: a file cannot be read, a line is no conversation, or nothing is left to
                train on.
        """
        train, test = self.paths
        both = self._talks(test) if test else None
        talks, held, held_out = self.split(
            self._talks(train),
            both,
            lambda talk: talk.hash,
        )
        texts = (text for talk in [*talks, *held] for turn in talk.turns for text in turn)
        self._summary = {
            "files": [path.name for path in self.paths if path],
            "sha256": texts_sha256(texts),
            "test conversations left out": len(both or held) - len(held),
            "conversations without an answer in the context": 0,
        }
        self._summary["clients"] = names = sorted({talk.client for talk in talks})
        if self.count_clients:
            self.num_clients = max(len(names), 1)
        self.groups = tuple(sorted({talk.client for talk in [*talks, *held]}))
        parts = self._examples(talks, names, held_out), self._examples(held, names, None)
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

    def _talks(self, path: Path) -> list[Talk]:
        found, seen = [], dict[str, Any]()
        for entry, place in json_records(path, read_text(path), LISTS):
            key = self.client_key
            require(
                key is None or key in entry,
                place,
                f"the key {key} is missing",
                f'add "{key}": "..."',
            )
            who = name_under(key, entry, place, seen) if key else "all"
            found.append(Talk(turns_of(entry, place), place, who))
        return found

    def _examples(
        self, talks: Sequence[Talk], names: Sequence[str], held_out: np.ndarray | None
    ) -> TextExamples:
        """Return the examples of a split.

        Args:
            talks: of the split.
            names: of the clients.
            held_out: whether each is for validation; None: none is.
        """
        items = [conversation_item(self.template, talk.turns, talk.place) for talk in talks]
        if self.too_long == "cut":
            kept = [item.labelled[1 : self.context + 1].any() for item in items]
            self._summary["conversations without an answer in the context"] += len(kept) - sum(kept)
            items = [item for item, stays in zip(items, kept, strict=True) if stays]
            talks = [talk for talk, stays in zip(talks, kept, strict=True) if stays]
            held_out = None if held_out is None else held_out[kept]
        groups, clients = (
            {name: k for k, name in enumerate(some)} for some in (self.groups, names)
        )
        return TextExamples(
            token_sequences(items, self.tokenizer.pad, self.context, self.too_long),
            np.array([groups[talk.client] for talk in talks], np.int64),
            numbers_by_name([talk.client for talk in talks], clients),
            held_out=held_out,
        )

    @property
    def text_summary(self) -> dict[str, Any]:
        """The files, the clients' names, the SHA-256 of all turns, and how many conversations were
        left out why."""
        return self._summary
