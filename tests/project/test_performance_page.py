"""The page of performance says what its table of seconds has."""

from __future__ import annotations

import csv

import pytest
from places import ROOT

PAGE = ROOT / "docs/results/performance.md"
PEERS = ("pfl", "pfl2", "flower", "blazefl")
SHOWN = ("auto", "limit", *PEERS)


@pytest.fixture(scope="module")
def measured() -> dict[str, dict[str, dict[str, str]]]:
    found: dict[str, dict[str, dict[str, str]]] = {}
    with (ROOT / "docs/results/performance/workloads.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            found.setdefault(row["workload"], {})[row["who"]] = row
    return found


def to_fastest(by: dict[str, dict[str, str]]) -> float:
    return float(by["auto"]["seconds"]) / min(float(by[who]["seconds"]) for who in PEERS)


def test_both_tables_are_those_of_the_runs(measured):
    lines = PAGE.read_text().splitlines()
    for name, by in measured.items():
        seconds = {who: float(row["seconds"]) for who, row in by.items()}
        ratios = [f"{seconds[who] / seconds['plain']:.2f}" if who in by else "-" for who in SHOWN]
        to_limit = f"{seconds['auto'] / seconds['limit']:.2f}"
        to_peer = f"{to_fastest(by):.2f}" if "pfl" in by else "-"
        shown = next(line for line in lines if line.startswith(f"| {name}: "))
        assert [one.strip(" *") for one in shown.split("|")[2:-1]] == [*ratios, to_limit, to_peer]
        peaks = [by[who]["peak_mib"] or "-" if who in by else "-" for who in SHOWN]
        assert f"| {name} | {' | '.join(peaks)} |" in lines


def test_who_leads_is_said(measured):
    ahead = {name: to_fastest(by) for name, by in measured.items() if "pfl" in by}
    assert {name for name, ratio in ahead.items() if ratio < 1} == {"W1", "W2", "W3", "B1", "W4"}
    assert f"{ahead['W1']:.2f}" == "1.00"
    to_limit = {
        name: float(by["auto"]["seconds"]) / float(by["limit"]["seconds"])
        for name, by in measured.items()
    }
    above = {name: round(100 * (ratio - 1)) for name, ratio in to_limit.items() if name != "W4"}
    assert above == {"W3": 3, "L1": 3, "W2": 6, "B1": 12, "W1": 19, "B2": 50}
    assert all(
        float(by["auto"]["peak_mib"]) > min(float(by[who]["peak_mib"] or "inf") for who in PEERS)
        for by in measured.values()
        if "pfl" in by
    )
    found = {
        (name, who): row["others"]
        for name, by in measured.items()
        for who, row in by.items()
        if row["others"] != "0.0"
    }
    assert found == {("W2", "plain"): "0.5", ("W3", "limit"): "0.2"}
