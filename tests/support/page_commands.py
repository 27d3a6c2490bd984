"""The commands and files of a page of the documentation, by default of the page on data."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from places import DOCS

PAGE = DOCS / "howto" / "data.md"


def documented(word: str, page: Path = PAGE) -> list[list[str]]:
    """Return the arguments of every command of the page that names ``word``, in order."""
    lines = "".join(re.findall(r"```(?:bash|text)\n(.*?)```", page.read_text(), re.DOTALL)).replace(
        "\\\n", " "
    )
    commands = [
        shlex.split(line)
        for line in lines.splitlines()
        if line.startswith("python -m fl_lightning")
    ]
    found = [words for words in commands if word in words]
    assert found, f"no command of the page names {word}"
    return [words[3:] for words in found]


def file_of_page(name: str, page: Path = PAGE) -> str:
    """Return the content of a Python file that the page shows after its name."""
    found = re.search(
        rf"`{re.escape(name)}`.*?``` \{{\.python\}}\n(.*?)```", page.read_text(), re.DOTALL
    )
    assert found, name
    return found[1]
