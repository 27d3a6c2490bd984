"""The page of published figures is generated, says of each figure what was run, and is about
studies that are there."""

from __future__ import annotations

import csv
import json
from itertools import pairwise, product

import pytest
from places import ROOT
from scripts import script

from fl_lightning.study.plan.study import Study
from fl_lightning.study.statistics import t_interval


@pytest.fixture
def published():
    with script("docs/published_figures") as module:
        yield module


def make_run(folder, found, **about):
    """Write a finished run with these accuracies, round by round."""
    folder.mkdir(parents=True)
    known = {"seed": 0, "status": "finished", "partition_sha256": "0" * 64, **about}
    (folder / "metadata.json").write_text(json.dumps(known))
    (folder / "config.yaml").write_text(f"seed_everything: {known['seed']}\n")
    rows = "".join(f"{number},{value}\n" for number, value in enumerate(found, 1))
    (folder / "metrics.csv").write_text(f"round,test/accuracy\n{rows}")


def test_the_page_is_generated(published):
    assert published.PAGE.read_text() == published.page(), "run python docs/published_figures.py"


def test_every_published_figure_is_of_a_cell_of_its_study_and_has_a_cost(published):
    costs = {(row["study"], row["method"]) for row in published.read("costs")}
    for name in published.SOURCES:
        study = Study.read(ROOT / f"configs/published/{name}.yaml")
        ((_, levels),) = study.grid.items()
        figures = [row for row in published.read("figures") if row["study"] == name]
        assert {row["level"] for row in figures} == {*levels}
        assert {row["method"] for row in figures} == {*study.methods}
        assert len(figures) == len(levels) * len(study.methods)
        assert {(name, label) for label in study.methods} <= costs


@pytest.mark.slow
@pytest.mark.essential
def test_ours_are_the_best_rounds_of_finished_runs_with_their_interval(
    published, tmp_path, monkeypatch
):
    """Fewer rounds are said and compared with nothing; a disagreement beyond two points is
    named."""
    rows = [["study", "level", "method", "seed", "rounds", "best", "last"]]
    for seed, (start, accuracy) in enumerate([(0.5, 0.9), (0.5, 0.91), (0.95, 0.92)]):
        for study, rounds in (("niid_bench", 50), ("niid_bench_short", 3)):
            tags = {"label": "FedAvg", "partition": {50: "iid", 3: "labels3"}[rounds]}
            found = [start, *[0.4] * (rounds - 2), accuracy]
            make_run(tmp_path / "runs" / study / f"FedAvg-{seed}", found, seed=seed, tags=tags)
    for row in sorted(
        published.rows_of_runs(tmp_path / "runs"), key=lambda row: (row["level"], row["seed"])
    ):
        rows.append([*row.values()])
    assert [row[4:] for row in rows[1:4]] == [
        ["50", "0.900000", "0.900000"],
        ["50", "0.910000", "0.910000"],
        ["50", "0.950000", "0.920000"],
    ]
    for name in ("figures", "costs", "side_by_side"):
        (tmp_path / f"{name}.csv").write_text((published.TABLES / f"{name}.csv").read_text())
    with (tmp_path / "ours.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    monkeypatch.setattr(published, "TABLES", tmp_path)
    lines = [
        line
        for line in published.page().splitlines()
        if line.startswith(("| iid | FedAvg", "| labels3 | FedAvg"))
    ]
    low, high = t_interval([90, 91, 95])
    assert (
        lines[0]
        == f"| iid | FedAvg | 89.23 ± 0.45 | 92.00 [{low:.2f}, {high:.2f}] | 3 seeds; +2.8 points, not explained |"
    )
    assert "| 3 of 50 rounds, 3 seeds; all take" in lines[1]
    assert "points" not in lines[1]
    assert "not run, " in published.page()
    fallen = [dict(zip(rows[0], row, strict=True)) | {"last": "0.1"} for row in rows[1:3]]
    said = published.ours("niid_bench", fallen, "FedAvg", 90.0)[1]
    assert said == "2 seeds; +0.5 points; 2 ended at 10.00, 10.00"
    ten = [fallen[0] | {"best": "0.57", "last": "0.47"}, fallen[1] | {"last": "0.810001"}]
    said = published.ours("niid_bench", ten, "FedAvg", 74.0)[1]
    assert said == "2 seeds; +0.0 points; 1 ended at 47.00"


def test_pfllibs_own_code_is_compared_in_rounds_that_both_have_made(published, tmp_path):
    """Of Ditto the clients' own models count, and a round that ours has not made is left out."""
    for method, found in (("Ditto", [0.5, 0.6]), ("FedRoD", [0.7])):
        tags = {"label": method, "skew": "practical"}
        make_run(tmp_path / "runs/pfllib_short" / method, found, tags=tags)
    theirs = tmp_path / "theirs.csv"
    theirs.write_text(
        "Ditto,own,0,1,0.1\nDitto,personal,0,1,0.4\nFedROD,own,0,0,0\nFedROD,own,0,1,0.8\nFedROD,own,0,2,1\n"
    )
    found = published.side_by_side("pfllib", tmp_path / "runs", theirs)
    assert [(row["method"], row["round"], row["theirs"], row["ours"]) for row in found] == [
        ("Ditto", "1", "0.4", "0.500000"),
        ("FedRoD", "1", "0.8", "0.700000"),
    ]


def test_niid_benchs_own_code_is_compared_by_setting(published, tmp_path):
    tags = {"label": "FedAvg", "partition": "labels2"}
    make_run(tmp_path / "runs/niid_bench_brief/FedAvg", [0.5], tags=tags)
    theirs = tmp_path / "theirs.csv"
    theirs.write_text(
        "iid,FedAvg,0,1,0.8\nlabels2,FedAvg,0,1,0.4\nlabels2,FedAvg,1,1,0.6\nlabels2,FedProx,0,1,0.3\n"
    )
    found = published.side_by_side("niid_bench", tmp_path / "runs", theirs)
    assert [(*row.values(),) for row in found] == [
        ("niid_bench", "labels2", "FedAvg", "0", "1", "0.4", "0.500000")
    ]


def test_damaged_runs_and_those_of_no_cell_are_no_figures(published, tmp_path):
    """In neither table; the numbers of a damaged run were taken, and a plain run was a KeyError."""
    tags, root = {"label": "FedAvg", "partition": "iid"}, tmp_path / "runs"
    for folder in ("niid_bench_brief", "niid_bench_short"):
        make_run(root / folder / "FedAvg", [0.5, 0.6], tags=tags)
        make_run(root / folder / "damaged", [0.5, 0.9], seed=1, tags=tags)
        (root / folder / "damaged/metrics.csv").write_text("round,test/accuracy\n1,0.5\n3,0.9\n")
        make_run(root / folder / "changed", [0.5, 0.9], seed=2, tags=tags, **{"final/accuracy": 1})
        make_run(root / folder / "plain", [0.5, 0.9], seed=3)
        make_run(root / folder / "unfinished", [0.5], seed=4, tags=tags, status="running")
    theirs = tmp_path / "theirs.csv"
    theirs.write_text("".join(f"iid,FedAvg,{seed},1,0.8\n" for seed in range(5)))
    found = published.side_by_side("niid_bench", root, theirs)
    assert [row["seed"] for row in found] == ["0"]
    assert [row["seed"] for row in published.rows_of_runs(root)] == ["0"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--theirs", "pfllib={file}"], "add --runs runs"),
        (["--runs", "runs", "--theirs", "pflib={file}"], "write niid_bench or pfllib"),
        (["--runs", "runs", "--theirs", "pfllib=nowhere.csv"], "and a file"),
    ],
)
def test_what_the_command_lacks_is_said_in_a_line(published, tmp_path, capsys, words, said):
    file = tmp_path / "theirs.csv"
    file.write_text("")
    with pytest.raises(SystemExit):
        published.main([word.format(file=file) for word in words])
    assert said in capsys.readouterr().err


def test_seeds_that_were_compared_before_stay(published):
    before = published.read("side_by_side")
    first = {**before[0], "theirs": "0.5"}
    found = published.with_rounds(
        before, [{**first, "seed": "100"}, {**first, "seed": "20"}, first]
    )
    assert len(found) == len(before) + 2
    cell = [first[name] for name in published.SIDE_BY_SIDE[:3]]
    mine = [row for row in found if [*row.values()][:3] == cell and row["round"] == first["round"]]
    assert [row["seed"] for row in mine][-2:] == ["20", "100"]
    assert mine[0]["theirs"] == "0.5"


def test_pfllibs_own_code_has_three_seeds_of_every_method(published):
    rows = [row for row in published.read("side_by_side") if row["study"] == "pfllib"]
    cells = {(row["method"], row["seed"], row["round"]) for row in rows}
    assert len(cells) == len(rows) == 10 * 3 * 5
    assert {seed for _, seed, _ in cells} == {"0", "1", "2"}


def test_what_the_page_says_of_niid_benchs_own_code(published):
    """Three seeds of everything; with two or three labels accuracy changes by ten points from one
    round to the next, on both sides."""
    rows = [row for row in published.read("side_by_side") if row["study"] == "niid_bench"]
    assert {row["seed"] for row in rows} == {"0", "1", "2"}
    assert len(rows) == 3 * 7 * 4 * 5
    for level, side in product(("labels2", "labels3"), ("theirs", "ours")):
        changes = [
            abs(float(after[side]) - float(before[side]))
            for before, after in pairwise(row for row in rows if row["level"] == level)
            if int(after["round"]) == int(before["round"]) + 1
        ]
        assert len(changes) == 3 * 4 * 4
        assert max(changes) >= 0.1


def test_runs_of_another_machine_are_added_and_of_one_run_that_of_most_rounds_counts(published):
    def row(seed: int, rounds: int) -> dict[str, str]:
        return dict(
            zip(published.RUN, ("niid_bench", "iid", "FedAvg", seed, rounds, 0.5, 0.5), strict=True)
        )

    kept = published.with_runs([row(0, 3), row(1, 50)], [row(0, 50), row(1, 3), row(2, 3)])
    assert [(one["seed"], one["rounds"]) for one in kept] == [(0, 50), (1, 50), (2, 3)]
