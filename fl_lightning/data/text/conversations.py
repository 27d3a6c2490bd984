"""Conversations of several turns, as sequences of tokens of which the assistant's turns are learnt.

A conversation is learnt in one piece: every answer is predicted from all that was said before it,
and no token of a question is a target.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np

from fl_lightning.data.text.prompts import Prompt, Record
from fl_lightning.data.text.records import SURROGATE
from fl_lightning.data.text.token_items import TokenItem
from fl_lightning.data.text.tokens import Tokenizer
from fl_lightning.errors import InputError, as_bad_input, require

LISTS = ("conversations", "messages")
"""Keys under which the turns of a conversation stand: ShareGPT's, and that of chat interfaces."""
ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
}
"""Who speaks, by the names that files have for it."""
CHAT = "chat"
"""The template that means the tokeniser's own."""
CHAT_DATE = "26 Jul 2024"
"""What a chat template writes as today's date, so that tokens are the same on another day.

Llama 3's has it where there is no clock."""


class Turn(NamedTuple):
    """What somebody says.

    Args:
        role: system, user or assistant.
        text: the words.
    """

    role: str
    text: str


def turns_of(entry: Mapping[str, Any], place: str) -> list[Turn]:
    """Return the turns of a line: perhaps one of the system, then user and assistant in turn, the
    last of which is the assistant.

    An assistant's turn before any of the user's is left out, and so is a question at the end, which
    has no answer to learn.

    Raises:
        InputError: the line has no turns, one of them is none, or somebody speaks twice.
    """
    key = next((name for name in LISTS if name in entry), None)
    form = f'write "{LISTS[0]}": [{{"from": "human", "value": "..."}}, {{"from": "gpt", "value": "..."}}]'
    require(key is not None, place, f"it has none of the keys {', '.join(LISTS)}", form)
    said = entry[key or ""]
    require(isinstance(said, list), place, "its turns are no list", form)
    turns = [_turn(one, f"{place}, turn {number}") for number, one in enumerate(said, 1)]
    first = turns[:1] if turns and turns[0].role == "system" else []
    rest = turns[len(first) :]
    rest = rest[1:] if rest and rest[0].role == "assistant" else rest
    rest = rest[:-1] if rest and rest[-1].role == "user" else rest
    require(rest, place, "nobody answers a user in it", "remove the line")
    twice = any(
        one.role == other.role or "system" in (one.role, other.role)
        for one, other in pairwise(rest)
    )
    require(
        not twice and rest[0].role == "user",
        place,
        "user and assistant do not take turns",
        "join what one of them says in a row",
    )
    silent = any(turn.role == "assistant" and not turn.text for turn in rest)
    require(not silent, place, "an answer is empty: there is nothing to learn", "remove the line")
    return first + rest


def _turn(said: Any, place: str) -> Turn:
    """Return a turn as ShareGPT writes it, with ``from`` and ``value``, or with ``role`` and
    ``content``."""
    names = ("from", "value") if isinstance(said, dict) and "from" in said else ("role", "content")
    require(
        isinstance(said, dict) and all(isinstance(said.get(name), str) for name in names),
        place,
        "a turn says in texts who speaks, and what",
        'write {"from": "human", "value": "..."}, or {"role": "user", "content": "..."}',
    )
    who, text = said[names[0]], said[names[1]]
    require(
        who in ROLES,
        f"{place}, {names[0]} {who!r}",
        f"it is one of {', '.join(ROLES)}",
        "write one of them",
    )
    require(not SURROGATE.search(text), place, "it holds half a character", "write another text")
    return Turn(ROLES[who], text)


class TurnTemplate(Protocol):
    """How turns become tokens."""

    asked: tuple[str, ...]
    """The first question of a conversation, as :class:`TextData` has it."""
    end: str
    """What stands between a question and its answer."""

    def pieces(self, turns: Sequence[Turn], place: str) -> Iterator[tuple[list[int], bool]]:
        """Yield tokens, and whether they are learnt, which joined are the conversation."""


class WrittenTurns:
    """Turns by a template of one's own: BOS and the system's text; then each question by the
    template, and its answer, which an end token follows.

    Args:
        template: of a question, with ``{inputs}`` in its place, as :class:`Prompt` has it.
        system: what stands before the first question, and a blank after it, where a conversation
            has no system's turn; empty: nothing.
        tokenizer: makes the tokens.
    """

    def __init__(self, template: str, system: str, tokenizer: Tokenizer) -> None:
        self.prompt, self.system, self.tokenizer = Prompt(template), system, tokenizer
        text = "".join(self.prompt.asked).replace("{definition}", "")
        self.asked: tuple[str, ...] = (f"{system} {text}" if system else text,)
        self.end = self.prompt.tail.replace("{definition}", "")

    def pieces(self, turns: Sequence[Turn], place: str) -> Iterator[tuple[list[int], bool]]:
        system, encode = self.system, self.tokenizer.encode
        if turns[0].role == "system":
            system, turns = turns[0].text, turns[1:]
        if self.tokenizer.bos is not None:
            yield [self.tokenizer.bos], False
        for asked, said in zip(turns[::2], turns[1::2], strict=True):
            head, tail, answer = self.prompt.parts(Record("", "", asked.text, said.text))
            yield encode(f"{system} {head}{tail}" if system else head + tail), False
            yield [*encode(answer), self.tokenizer.eos], True
            system = ""


class ChatTurns:
    """Turns by the chat template of a tokeniser of transformers.

    Args:
        tokenizer: a ``PreTrainedTokenizerBase`` that has one.
    """

    asked: tuple[str, ...] = ()
    end = ""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def pieces(self, turns: Sequence[Turn], place: str) -> Iterator[tuple[list[int], bool]]:
        before: list[int] = []
        for number, turn in enumerate(turns):
            if turn.role != "assistant":
                continue
            for count, learnt in ((number, False), (number + 1, True)):
                ids = self._ids(turns[:count], f"{place}, up to turn {number + 1}", asks=not learnt)
                if ids[: len(before)] != before:
                    raise InputError(
                        f"{place}, turn {number + 1}",
                        "the tokeniser's chat template writes earlier turns anew, and none stays",
                        "write a template with {inputs} in place of chat",
                    )
                yield ids[len(before) :], learnt
                before = ids

    def _ids(self, turns: Sequence[Turn], place: str, asks: bool) -> list[int]:
        from jinja2 import TemplateError

        said = [{"role": turn.role, "content": turn.text} for turn in turns]
        asked = {"add_generation_prompt": asks, "date_string": CHAT_DATE}
        rule = "the tokeniser's chat template refuses it"
        instead = "leave the line out, or write a template with {inputs} in place of chat"
        with as_bad_input(place, rule, instead, TemplateError):
            return list(
                self.tokenizer.apply_chat_template(said, tokenize=True, return_dict=False, **asked)
            )


def turn_template(template: str, system: str, tokenizer: Tokenizer) -> TurnTemplate:
    """Return the template that a setting means.

    Raises:
        InputError: the tokeniser has no chat template, or the text has no place for a question.
    """
    if template != CHAT:
        return WrittenTurns(template, system, tokenizer)
    own = getattr(tokenizer, "tokenizer", None)
    require(
        own is not None and getattr(own, "chat_template", None),
        f"template={CHAT} with a {type(tokenizer).__name__}",
        "the tokeniser has no chat template",
        'write hf:NAME of a chat model as the tokenizer, or a template such as "USER: {inputs} ASSISTANT: "',
    )
    require(
        not system,
        f"system={system!r} with template={CHAT}",
        "the template has one",
        "leave system out",
    )
    return ChatTurns(own)


def conversation_item(template: TurnTemplate, turns: Sequence[Turn], place: str) -> TokenItem:
    """Return a conversation as tokens, of which the assistant's are learnt.

    Args:
        template: how turns become tokens.
        turns: as :func:`turns_of` gives them.
        place: where they stand, for messages.
    """
    pieces = list(template.pieces(turns, place))
    ids = np.array([id for some, _ in pieces for id in some], np.int64)
    learnt = np.repeat([learnt for _, learnt in pieces], [len(some) for some, _ in pieces])
    return TokenItem(ids, learnt, None, None, place)
