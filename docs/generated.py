"""Write the parts of the documentation that stand elsewhere already:

    python docs/generated.py

The table of methods and their place in the navigation come from the front matter of their pages,
the page "What works with what" from the table that runs are checked with, and what changes numbers
from what a resume allows. ``benchmarks/method_bytes.py`` measures the bytes that the pages have.
"""

from __future__ import annotations

from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from typing import Any

import what_works
import yaml

from fl_lightning import methods
from fl_lightning.config.settings import FREE_KEYS, ROOTS, is_free
from fl_lightning.trainer import FederatedTrainer

DOCS = Path(__file__).parent
TABLE, NAVIGATION, FEATURES = (
    DOCS / "methods/index.md",
    DOCS.parent / "mkdocs.yml",
    DOCS / "what-works.md",
)
NUMBERS = DOCS / "reproducibility.md"
HEAD = """\
| method | idea | what travels up | stays on the client | bytes up | bytes down | neutral setting |
|---|---|---|---|---|---|---|
"""


def rows() -> dict[str, list[dict[str, Any]]]:
    """Return the front matter of all methods by what kind they are: ``method``, ``idea``,
    ``travels``, ``bytes`` up and down as multiples of FedAvg's, ``page``, ``config``, and perhaps
    ``stays`` and ``neutral``."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(_front_matter(), key=lambda row: (_kind(row), row["method"])):
        found.setdefault(_kind(row), []).append(row)
    return found


def _kind(row: dict[str, Any]) -> str:
    kind = getattr(methods, row["method"]).kind
    return f"{kind[0].upper()}{kind[1:]}"


def _front_matter() -> Iterator[dict[str, Any]]:
    for page in sorted((DOCS / "methods").glob("*.md")):
        text = page.read_text()
        if text.startswith("---\n"):
            front = yaml.safe_load(text.split("---\n")[1])
            for row in front.get("rows", [front]):
                yield {"config": row["method"].lower(), **row, "page": page.name}


def table() -> str:
    """Return the table as Markdown."""
    lines = [HEAD]
    for kind, of_kind in rows().items():
        lines.append(f"| **{kind}** | | | | | | |\n")
        for row in of_kind:
            up, down = (f"{ratio:.2f}" for ratio in row["bytes"])
            cells = [
                row["idea"],
                row["travels"],
                row.get("stays", "-"),
                up,
                down,
                row.get("neutral", "-"),
            ]
            lines.append(f"| [{row['method']}]({row['page']}) | {' | '.join(cells)} |\n")
    return "".join(lines)


def navigation() -> str:
    """Return the lines of ``mkdocs.yml`` for pages of one method, by kind."""
    lines = []
    for kind, of_kind in rows().items():
        pages = [row for row in of_kind if row["page"] == f"{row['method'].lower()}.md"]
        lines += [f"      - {kind}:\n"] if pages else []
        lines += [f"          - {row['method']}: methods/{row['page']}\n" for row in pages]
    return "".join(lines)


def settings_by_effect() -> str:
    """Return which settings change what is computed, as a resume goes by, as Markdown."""
    trainer = [name for name in signature(FederatedTrainer.__init__).parameters if name != "self"]
    free = [f"trainer.{name}" for name in trainer if is_free(f"trainer.{name}", {})]
    free += [key for key in FREE_KEYS if key.startswith("data.") and "init_args" not in key]
    others = [f"trainer.{name}" for name in trainer if f"trainer.{name}" not in free]
    whose = dict.fromkeys(ROOTS, " of `FederatedImages`")
    names = [
        ", ".join(f"`{name}`{whose.get(name, '')}" for name in part) for part in (free, others)
    ]
    of_free = "time, memory, what is written and, `fast_dev_run`, how far it goes"
    return (
        "| settings | change |\n|---|---|\n"
        f"| {names[0]} | {of_free}; of what is computed at most the last digit |\n"
        f"| `seed_everything`, all of `model` and of `data` but the above, {names[1]} | what is computed |\n"
    )


def with_part(file: Path, begin: str, end: str, part: str) -> str:
    """Return a file's text with another part between two lines."""
    before, rest = file.read_text().split(begin)
    return before + begin + part + end + rest.split(end, 1)[1]


def files() -> dict[Path, str]:
    """Return what the files shall be."""
    return {
        FEATURES: what_works.page(),
        TABLE: with_part(TABLE, "is FedAvg.\n\n", "\nBytes are those", table()),
        NUMBERS: with_part(NUMBERS, "are equal.\n\n", "\nWhat else", settings_by_effect()),
        NAVIGATION: with_part(
            NAVIGATION, "      - methods/index.md\n", "      - Controls:", navigation()
        ),
    }


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text)
