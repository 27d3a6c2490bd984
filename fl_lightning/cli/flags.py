"""The flags of a command line, as words and before any parser."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest


def flags_in(args: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each word of a command line with its value: of ``--name=value`` these two, of another
    word the word that follows, which may be a flag again; of the last one an empty text."""
    for word, following in zip_longest(args, args[1:], fillvalue=""):
        name, equals, value = word.partition("=")
        yield name, value if equals else following
