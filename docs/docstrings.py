"""What the documentation site makes of this project's docstrings: Sphinx roles, literal blocks and
doctests become Markdown. An extension of griffe, which reads the sources without importing them."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|func|meth|mod|attr|data|exc):`(~?)([^`]+)`")
DOCTEST = re.compile(r"(?:^[ \t]*>>> .*\n?)(?:^[ \t]*\S.*\n?)*", re.MULTILINE)


def as_markdown(docstring: str) -> str:
    """Return the docstring with what Markdown does not know replaced.

    >>> as_markdown("Length of :meth:`to_bytes`; see :mod:`~fl_lightning.rng`. Layout::")
    'Length of `to_bytes`; see `rng`. Layout:'
    >>> as_markdown("Add.\\n\\n>>> 1 + 1\\n2\\n\\nEnd.")
    'Add.\\n\\n```pycon\\n>>> 1 + 1\\n2\\n```\\n\\nEnd.'
    """
    text = ROLE.sub(
        lambda found: f"`{found[2].rpartition('.')[2] if found[1] else found[2]}`", docstring
    )
    text = re.sub(r"::$", ":", text, flags=re.MULTILINE)
    return DOCTEST.sub(lambda found: f"```pycon\n{found[0].rstrip()}\n```\n", text).rstrip()


class Docstrings(griffe.Extension):
    """Every docstring as Markdown, and every class on the page of the file that defines it.

    What ``Annotated`` says beside a type is left out: the text has it in words.
    """

    def on_function(
        self, *, func: griffe.Function, loader: griffe.GriffeLoader, **kwargs: Any
    ) -> None:
        for parameter in func.parameters:
            annotation: Any = parameter.annotation
            path = str(getattr(annotation, "canonical_path", ""))
            if isinstance(annotation, griffe.ExprName) and path.startswith("fl_lightning."):
                annotation = getattr(loader.modules_collection[path], "value", None)
            if str(getattr(annotation, "canonical_path", "")) == "typing.Annotated":
                parameter.annotation = annotation.slice.elements[0]

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)

    def on_module(self, *, mod: griffe.Module, **kwargs: Any) -> None:
        mod.exports = None
