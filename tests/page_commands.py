"""The commands of the page on data, as lists of arguments."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs" / "howto" / "data.md"


def documented(word: str) -> list[list[str]]:
    """Return the arguments of every command of the page that names ``word``, in order."""
    lines = "".join(re.findall(r"```(?:bash|text)\n(.*?)```", PAGE.read_text(), re.DOTALL)).replace(
        "\\\n", " "
    )
    found = [shlex.split(line) for line in lines.splitlines() if word in shlex.split(line)]
    assert found, f"no command of the page names {word}"
    assert all(words[:3] == ["python", "-m", "fl_lightning"] for words in found)
    return [words[3:] for words in found]


def file_of_page(name: str) -> str:
    """Return the content of a Python file that the page shows after its name."""
    found = re.search(rf"`{re.escape(name)}`.*?``` \{{\.python\}}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found, name
    return found[1]
