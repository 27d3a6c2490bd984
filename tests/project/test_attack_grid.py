"""The published grid of averages and attacks is that of its file, and a run of it is what it
says."""

from __future__ import annotations

from statistics import fmean

import pytest
from outcomes import rows_of
from scripts import ROOT, script

from fl_lightning.study.statistics import t_interval

RUNS, PAGE = ROOT / "docs/results/attack_grid.csv", ROOT / "docs/results/attacks.md"


@pytest.fixture(scope="module")
def grid():
    with script("benchmarks/attack_grid") as module:
        yield module


@pytest.mark.slow
@pytest.mark.essential
def test_the_tables_are_those_of_the_file(grid):
    assert grid.tables(grid.accuracies(RUNS)) in PAGE.read_text()


def test_what_the_page_says_of_them(grid):
    found = grid.accuracies(RUNS)
    page, seeds = " ".join(PAGE.read_text().split()), len(found[grid.MEAN, "none"])
    assert f"seeds 0 to {seeds - 1}," in page
    mean = {pair: fmean(values) for pair, values in found.items()}
    # every sentence of the page with a number, "only", "all" or "none"
    big = ("sign_flip, 10", "ipm, 10")
    assert "leave the mean below 0.2, and no other average below 0.6" in page
    assert all(mean[grid.MEAN, attack] < 0.2 for attack in big)
    assert all(mean[pair] > 0.6 for pair in mean if pair[1] in big and pair[0] != grid.MEAN)
    refused = {}
    for row in rows_of(RUNS):
        if int(row["refused"]):
            refused.setdefault((row["average"], row["attack"]), []).append(int(row["refused"]))
    assert refused.keys() == {(grid.MEAN, attack) for attack in big}
    runs, uploads = sum(map(len, refused.values())), sum(map(sum, refused.values()))
    assert (
        f"In all {runs} runs of the mean under these two uploads were refused, {uploads} " in page
    )
    assert runs == len(big) * seeds
    held = [a for a in grid.AVERAGES if all(mean[a, attack] > 0.8 for attack in grid.ATTACKS)]
    assert f"Above 0.8 under every attack are {' and '.join(f'`{a}`' for a in held)}" in page
    least = found["NormClipping(1)", "ipm, 10"]
    assert "the interval of the first reaches below it under `ipm, 10`" in page
    assert held[0] == "NormClipping(1)"
    assert t_interval(least)[0] < 0.8
    worst = min(grid.AVERAGES, key=lambda a: mean[a, "none"])
    assert f"Without an attack `{worst}` costs most" in page
    assert "`Bulyan(4)` falls lowest under `ipm, 0.1`" in page
    assert min(grid.AVERAGES, key=lambda a: mean[a, "ipm, 0.1"]) == "Bulyan(4)"
    gains = [mean[a, "alie"] - mean[grid.MEAN, "alie"] for a in grid.AVERAGES]
    assert "Under `alie` no average is more than 0.03 above the mean" in page
    assert max(gains) <= 0.03


def test_one_run(grid, tmp_path):
    """A file is gone on with where it ended."""
    path = tmp_path / "runs.csv"
    path.write_text(",".join(grid.COLUMNS) + "\n")
    whole = [(average, attack, 0) for attack in grid.ATTACKS for average in grid.AVERAGES]
    with path.open("a") as file:
        for average, attack, seed in whole[:-1]:
            file.write(f'"{average}","{attack}",{seed},1,0.5,0\n')
    assert set(grid.read_runs(path)) == set(whole[:-1])
    grid.make_runs(path, seeds=1, rounds=1)
    last = grid.read_runs(path)[whole[-1]]
    assert 0 <= float(last["accuracy"]) <= 1
    assert (last["rounds"], last["refused"]) == ("1", "0")
