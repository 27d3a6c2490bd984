"""The README has one card for each method, and its numbers are measured."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from fl_lightning import methods
from fl_lightning.methods import Method

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SECTION = README.split("## Methods\n")[1].split("\n## ")[0]
TABLE = [
    [cell.strip(" `") for cell in line.split("|")[1:-1]]
    for line in SECTION.splitlines()
    if line.startswith("| `")
]
ROWS = {row[0]: row for row in TABLE[1:]}
CARDS = dict(re.findall(r"^- \*\*`(\w+)`\*\*[:,] (.*?)(?=^- |^$)", SECTION, re.DOTALL | re.MULTILINE))
TYPES = {
    name: value
    for name, value in vars(methods).items()
    if isinstance(value, type) and issubclass(value, Method)
}


def test_every_method_has_a_row_and_a_card():
    assert set(ROWS) == set(CARDS) == set(TYPES) - {"Method"}
    for name, card in CARDS.items():
        assert "*Weak:*" in card, name
        no_paper = ("FedMPQKD", "LocalOnly", "Oracle", "Centralised")
        assert name in no_paper or re.search(r"\([^()]*\b20\d\d\)", card), f"{name} without its paper"


@pytest.fixture(scope="module")
def method_bytes():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import method_bytes

        yield method_bytes
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


@pytest.mark.slow
@pytest.mark.essential
def test_the_bytes_are_those_of_the_ledger(method_bytes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert {name: (row[2], row[3]) for name, row in ROWS.items()} == method_bytes.relative_bytes()
    assert list(tmp_path.iterdir()) == []


def test_fedavgs_bytes(method_bytes, tmp_path):
    up, down = method_bytes.method_bytes("fedavg", tmp_path)
    assert {f"{up / 1e3:.1f}", f"{down / 1e3:.1f}"} == set(re.findall(r"FedAvg's ([\d.]+) kB", SECTION))
