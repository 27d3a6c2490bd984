"""The documentation's table of methods is that of their pages, and its numbers are measured."""

from __future__ import annotations

import re

import pytest
from scripts import ROOT, script

from fl_lightning import methods
from fl_lightning.methods import Method

TYPES = {
    name
    for name, value in vars(methods).items()
    if isinstance(value, type) and issubclass(value, Method) and value is not Method
}


@pytest.fixture(scope="module")
def generated():
    with script("docs/generated") as module:
        yield module


@pytest.fixture(scope="module")
def method_bytes():
    with script("benchmarks/method_bytes") as module:
        yield module


def test_the_documentation_is_generated(generated):
    for path, text in generated.files().items():
        assert path.read_text() == text, f"{path.name}: run python docs/generated.py"


def test_every_method_has_a_row_and_its_file(generated):
    rows = [row for of_kind in generated.rows().values() for row in of_kind]
    assert {row["method"] for row in rows} == TYPES
    assert len(rows) == len(TYPES)
    for row in rows:
        assert set(row) <= {
            "method",
            "config",
            "page",
            "idea",
            "travels",
            "stays",
            "bytes",
            "neutral",
        }
        page, config = (
            (ROOT / "docs/methods" / row["page"]).read_text(),
            f"configs/{row['config']}.yaml",
        )
        assert config in page or row["page"] == "references.md", row
        assert (ROOT / config).exists(), config
        no_paper = row["method"] in ("FedMPQKD", "LocalOnly", "Oracle", "Centralised")
        assert no_paper or re.search(r"\b20[012]\d\b", page.split("**Source")[1]), (
            f"{row} without its paper"
        )


OF_EACH_KIND = {"SCAFFOLD", "FedPQ", "FedMPQKD", "FedKD", "FedBN", "FedProto"}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "only", [pytest.param(OF_EACH_KIND, marks=pytest.mark.essential, id="some"), ()]
)
def test_the_bytes_are_those_of_the_ledger(only, generated, method_bytes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = {
        row["method"]: tuple(row["bytes"])
        for of_kind in generated.rows().values()
        for row in of_kind
    }
    measured = method_bytes.relative_bytes(only)
    assert measured.keys() == ({*only, "FedAvg"} if only else rows.keys())
    assert {name: rows[name] for name in measured} == measured
    assert list(tmp_path.iterdir()) == []


def test_fedavgs_bytes(method_bytes, tmp_path):
    up, down = method_bytes.method_bytes("fedavg", tmp_path)
    text = (ROOT / "docs/methods/index.md").read_text()
    assert {f"{up / 1e3:.1f}", f"{down / 1e3:.1f}"} == set(
        re.findall(r"FedAvg's ([\d.]+) kB", text)
    )
