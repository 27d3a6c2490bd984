"""Studies of three methods whose accuracies are known, and what ``compare`` makes of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from synthetic_runs import make_study

from fl_lightning.study.report.comparison import Comparison
from fl_lightning.study.report.verdicts import verdicts
from fl_lightning.study.results.gather import check_comparable, gather

A, B, C = (
    {0: 0.90, 1: 0.92, 2: 0.94},
    {0: 0.89, 1: 0.90, 2: 0.91},
    {0: 0.80, 1: 0.83, 2: 0.82},
)  # A - B = 0.01, 0.02, 0.03


def comparable(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a report without what may differ between two sweeps of one study."""
    return {key: value for key, value in document.items() if key not in ("timings", "provenance")}


def comparison_of(root: Path, name: str = "study") -> Comparison:
    results = gather(name, root)
    check_comparable(results)
    return Comparison(results)


def decisions(root: Path, *criteria: str, accuracies=None, **keys) -> list[str]:
    make_study(root, accuracies or {"A": A, "B": B, "C": C}, criteria=list(criteria), **keys)
    return [verdict.decision for verdict in verdicts(comparison_of(root))]


def report_of(out: Path) -> dict:
    def refuse(text):
        raise AssertionError(f"{text} is not JSON")

    return json.loads((out / "report.json").read_text(), parse_constant=refuse)


ON, OFF = (("noise", "on"),), (("noise", "off"),)


GRID = {
    "grid": {"noise": {"on": {}, "off": {}}},
    "degradation": {"axis": "noise", "stressed": "on", "clean": "off"},
}
