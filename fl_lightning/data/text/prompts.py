"""Records of instructions, and how their texts become what a network reads and what it answers."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import NamedTuple

from fl_lightning.errors import require

log = logging.getLogger("fl_lightning")

PROMPT_END = "\n="
"""What separates the inputs of a record from the answer that is asked for."""
PLAIN = "{definition}\n{inputs}" + PROMPT_END
"""The template by default."""


class Record(NamedTuple):
    """One instruction in the schema of Natural Instructions (Mishra et al. 2022; Wang et al. 2022).

    Args:
        task_name: name of the task.
        definition: instruction, the same for all records of a task.
        inputs: what the instruction is about.
        targets: the right answer.
    """

    task_name: str
    definition: str
    inputs: str
    targets: str


class Prompt:
    """A template of prompts. Blanks at its end belong to the answer: most tokenisers make one token
    of a blank and the word that follows.

    >>> Prompt("### Q: {inputs}\\n### A: ").parts(Record("add", "Add.", "1+2", "3"))
    ('### Q: 1+2', '\\n### A:', ' 3')

    Args:
        template: a text with ``{inputs}`` once, and perhaps ``{definition}``, in their places. What
            follows ``{inputs}`` is never cut.

    Attributes:
        asked: the template up to the end of the inputs, and what stands between them and the
            answer. Tokens are made of each by itself.
        end: what stands between the last of its places and the answer.

    Raises:
        InputError: it has no place for the inputs, or several.
    """

    def __init__(self, template: str = PLAIN) -> None:
        require(
            template.count("{inputs}") == 1,
            f"template={template!r}",
            "it has {inputs} once, and perhaps {definition}",
            'write e.g. "{definition} {inputs} Answer: "',
        )
        for name in sorted({*re.findall(r"{\w+}", template)} - {"{inputs}", "{definition}"}):
            log.warning("template: %s is none of its places and stays as it is", name)
        self.before, _, after = template.partition("{inputs}")
        self.tail = after.rstrip(" ")
        self.asked = self.before + "{inputs}", self.tail
        self.end = self.tail.rpartition("{definition}")[2]
        self.blanks = after[len(self.tail) :]

    def parts(self, record: Record) -> tuple[str, str, str]:
        """Return the text up to the end of the inputs, what stands between them and the answer, and
        the answer."""
        before, tail = (
            text.replace("{definition}", record.definition) for text in (self.before, self.tail)
        )
        return before + record.inputs, tail, self.blanks + record.targets


PLAIN_PROMPT = Prompt()
"""The prompt by default."""


def prompt_of(record: Record) -> str:
    """Return the text that the network reads before it answers, by the template by default.

    >>> prompt_of(Record("task_larger", "Larger number.", "3 12", "12"))
    'Larger number.\\n3 12\\n='
    """
    parts: Sequence[str] = PLAIN_PROMPT.parts(record)
    return "".join(parts[:2])
