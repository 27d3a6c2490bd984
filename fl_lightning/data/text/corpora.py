"""English text that every machine with Python has: reference prose of CPython, and docstrings.

The text is read where it is installed. Source files are parsed and never imported. The text differs
between versions of Python and of the packages, so a corpus has a SHA-256 that says which text a run
has seen.
"""

from __future__ import annotations

import ast
import importlib.util
import platform
import re
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from math import inf
from pathlib import Path
from typing import Any

from fl_lightning.data.text.records import texts_sha256
from fl_lightning.errors import InputError, require

SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "testing", "__pycache__"}
)
"""Folders whose files are no part of a corpus: other packages' code, and tests."""

MAX_FILE_BYTES = 4_000_000
"""Larger source files are not parsed; they are generated tables."""


@dataclass(frozen=True)
class Corpus:
    """Text by domain.

    Args:
        name: name of the corpus.
        domains: text of each domain by its name, in alphabetical order of the names.
        left_out: what was there and is no part of the corpus, as a number by reason.
    """

    name: str
    domains: dict[str, str]
    left_out: dict[str, int] = field(default_factory=dict)

    @cached_property
    def text(self) -> str:
        """The text of all domains, separated by empty lines."""
        return "\n\n".join(self.domains.values())

    @cached_property
    def sha256(self) -> str:
        """SHA-256 over the names and texts of all domains in UTF-8, each followed by a zero
        byte."""
        return texts_sha256(part for domain in self.domains.items() for part in domain)

    def summary(self) -> dict[str, Any]:
        """Return what identifies the text, ready for JSON: an entry of ``partition.json``."""
        return {
            "corpus": self.name,
            "sha256": self.sha256,
            "python": platform.python_version(),
            "characters": {name: len(text) for name, text in self.domains.items()},
            "left_out": dict(self.left_out),
        }


@cache
def topics() -> Corpus:
    """Return CPython's language reference by topic (``pydoc_data.topics``), about 0.5 MB, as one
    domain.

    A topic whose text is part of another one is left out. Lines within a paragraph are joined, and
    characters other than ASCII are removed.
    """
    from pydoc_data.topics import topics as text_of

    marks = {name: text.strip()[200:1200] for name, text in text_of.items()}
    doubles = {
        name
        for name, mark in marks.items()
        if mark and any(mark in text for other, text in text_of.items() if other != name)
    }
    text = "\n\n".join(text_of[name].strip() for name in sorted(text_of) if name not in doubles)
    return Corpus(
        "topics", {"topics": _unwrap(_ascii(text))}, {"topics inside another": len(doubles)}
    )


@cache
def standard_library(max_characters: int | None = None, min_characters: int = 0) -> Corpus:
    """Return the docstrings of the standard library; a domain is a top-level module or package.

    Args:
        max_characters: largest number of characters of a domain; what follows is left out. None:
            all.
        min_characters: smaller domains are left out.

    Raises:
        InputError: this Python has no source files.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    entries = [path for path in folder.iterdir() if path.name not in SKIPPED_FOLDERS]
    modules = {
        path.stem: path
        for path in entries
        if path.suffix == ".py" or (path / "__init__.py").is_file()
    }
    return _docstring_corpus("standard_library", modules, max_characters, min_characters)


@cache
def packages(*names: str, max_characters: int | None = None) -> Corpus:
    """Return the docstrings of installed packages; a domain is a package.

    Args:
        names: import names of top-level packages, such as ``torch``. They are found and not
            imported.
        max_characters: largest number of characters of a domain; what follows is left out. None:
            all.

    Raises:
        InputError: a package is not installed, or has no docstrings.
    """
    folders = {}
    for name in names:
        spec = importlib.util.find_spec(name) if name.isidentifier() else None
        origin = Path((spec and spec.origin) or "")
        require(
            origin.suffix == ".py",
            f"package {name!r}",
            "it is not installed as source files",
            f"install it, or leave {name} out",
        )
        folders[name] = origin.parent if origin.name == "__init__.py" else origin
    return _docstring_corpus("packages", folders, max_characters, 0)


def _docstring_corpus(
    name: str, sources: dict[str, Path], max_characters: int | None, min_characters: int
) -> Corpus:
    require(
        max_characters is None or max_characters >= 1,
        f"max_characters={max_characters}",
        "a domain has at least one character",
        "write null for all",
    )
    domains, short, cut = {}, 0, 0
    enough = inf if max_characters is None else max(max_characters, min_characters)
    for domain in sorted(sources):
        text = _joined(docstrings(sources[domain]), enough)
        if len(text) < max(min_characters, 1):
            short += 1
            continue
        domains[domain] = text[:max_characters]
        cut += len(text) > len(domains[domain])
    if not domains:
        raise InputError(
            f"corpus {name}",
            "no docstring was found",
            "use a Python that has its source files installed",
        )
    return Corpus(name, domains, {"domains too short": short, "domains cut": cut})


def _joined(texts: Iterable[str], enough: float) -> str:
    """Return texts separated by empty lines, as many as are needed for more than so many
    characters."""
    found: list[str] = []
    length = -2
    for text in texts:
        found.append(_ascii(text))
        length += len(found[-1]) + 2
        if length > enough:
            break
    return "\n\n".join(found)


def docstrings(source: Path) -> Iterator[str]:
    """Yield the docstrings of a file, or of all files in a folder, in the order of paths and lines.

    Files that are no Python of this version, and folders of tests, are passed over. Nothing is
    imported.

    Args:
        source: a file or a folder.
    """
    for path in _source_files(source):
        if path.stat().st_size > MAX_FILE_BYTES:
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the other code's backslashes
                tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError, RecursionError, OSError):
            continue
        documented = [
            node
            for node in ast.walk(tree)
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        ]
        for node in sorted(documented, key=lambda node: getattr(node, "lineno", 0)):
            if text := (ast.get_docstring(node) or "").strip():
                yield text


def _source_files(source: Path) -> Iterable[Path]:
    if source.is_file():
        return [source]
    found = (
        path
        for path in source.rglob("*.py")
        if SKIPPED_FOLDERS.isdisjoint(path.relative_to(source).parts[:-1])
    )
    return sorted(found, key=lambda path: path.relative_to(source).as_posix())


def _ascii(text: str) -> str:
    return text.encode("ascii", "ignore").decode()


def _unwrap(text: str) -> str:
    """Join the lines of a paragraph: a line that ends in a letter, comma or semicolon goes on in
    the next."""
    return re.sub(r"(?<=[a-z,;])\n {0,6}(?=[a-z(])", " ", text)
