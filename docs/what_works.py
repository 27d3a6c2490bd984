"""The page "What works with what", from the table that runs are checked with."""

from __future__ import annotations

from fl_lightning import methods
from fl_lightning.compatibility import ROWS, why_not
from fl_lightning.methods import Method

HEAD = """\
# What works with what

`fit`, `deploy`, `test`, `check` and the plan of a study check a run with one table. What does not fit is
refused in one line before anything is created, with exit code 2. Methods have their default settings here.
`python docs/generated.py` writes this page from that table, `fl_lightning/compatibility/`.

{table}

{reasons}

## What each feature needs

{needs}

## A method of your own

It has all features unless it says why not: `refuses` gives reasons by the names that stand in brackets
above, and messages have them.

```python
from fl_lightning import Method


class Votes(Method):
    refuses = {{"attack": "its clients send votes alone"}}
```

A method that overrides `aggregate` reads single uploads. It has neither secure sums nor client-level
privacy, and need not say so.
"""


def page() -> str:
    """Return the page as Markdown."""
    columns = [feature for row in ROWS for feature in row.features]
    reasons: list[str] = []
    lines = [f"| | {' | '.join(columns).replace('_', ' ')} |", f"|---|{':---:|' * len(columns)}"]
    for name in methods.__all__:
        kind = getattr(methods, name)
        if isinstance(kind, type) and issubclass(kind, Method) and kind is not Method:
            cells = [_cell(why_not(kind(), feature), reasons) for feature in columns]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    needs = []
    for row in ROWS:
        names = ", ".join(f"`{feature}`" for feature in row.features)
        needs.append(
            f"- {row.name[0].upper()}{row.name[1:]}{f' ({names})' if names else ''}: {row.needs}"
        )
    numbered = [f"{number}. {reason}" for number, reason in enumerate(reasons, start=1)]
    return HEAD.format(table="\n".join(lines), reasons="\n".join(numbered), needs="\n".join(needs))


def _cell(why: str, reasons: list[str]) -> str:
    """Return what a cell says, and put a reason that is new into the list."""
    if not why:
        return "yes"
    text = why[0].upper() + why[1:] + "."
    if text not in reasons:
        reasons.append(text)
    return f"no ({reasons.index(text) + 1})"
