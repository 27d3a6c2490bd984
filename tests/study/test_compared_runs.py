"""Which runs ``compare`` counts, and what it says of the others."""

from __future__ import annotations

import csv
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from compared import A, B, C, report_of
from synthetic_runs import history_of, make_run, make_study

from fl_lightning.__main__ import main
from fl_lightning.config.settings import config_of, settings_hash
from fl_lightning.errors import InputError
from fl_lightning.metrics import final_summary
from fl_lightning.run.checkpoint import save_checkpoint
from fl_lightning.run.tables import CsvTable, numbers
from fl_lightning.study.report.compare import compare
from fl_lightning.study.report.comparison import Comparison
from fl_lightning.study.results import gather as gathering
from fl_lightning.study.results.gather import gather
from fl_lightning.study.results.run_records import read_directory
from fl_lightning.study.results.runs import run_metrics
from fl_lightning.tasks import LanguageModelling

pytestmark = pytest.mark.usefixtures("figures_only_where_looked_at")


@pytest.mark.parametrize(
    ("differs", "message"),
    [
        ({"dataset": "cifar10"}, "data set cifar10"),
        ({"rounds": 6}, "number of rounds 6"),
        ({"partition": "f" * 64}, "partition ffff"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path, capsys, differs, message):
    folder = make_study(tmp_path, {"A": A, "B": B})
    shutil.rmtree(folder / "B-seed1")
    make_run(folder, "B", 1, 0.9, **differs)
    assert (
        main(
            ["compare", "--study", "study", "--root", str(tmp_path), "--out", str(tmp_path / "out")]
        )
        == 2
    )
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_versions_of_asynchronous_rounds_may_be_more_than_rounds(tmp_path):
    """They are made of fewer uploads. The others are still of one number of rounds."""
    folder = make_study(tmp_path, {"A": A, "B": B, "C": C})
    for seed in (0, 1):
        shutil.rmtree(folder / f"B-seed{seed}")
        make_run(folder, "B", seed, 0.9, rounds=10, **{"clients/staleness": 1.5})
    words = ["compare", "--study", "study", "--root", str(tmp_path), "--out"]
    assert main([*words, str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "report.md").exists()
    shutil.rmtree(folder / "C-seed1")
    make_run(folder, "C", 1, 0.9, rounds=6)
    assert main([*words, str(tmp_path / "other")]) == 2


def with_checkpoint(run: Path, round: int) -> None:
    """Leave the mark of a table that a checkpoint holds, and the table's second copy."""
    rows = [*csv.DictReader((run / "metrics.csv").read_text().splitlines())][:round]
    (run / "checkpoints").mkdir()
    table = CsvTable(run / "metrics.csv", run / "checkpoints/metrics.csv")
    table.append(rows)
    checkpoint = run / "checkpoints" / f"round_{round:06d}"
    save_checkpoint(checkpoint, {}, {"progress": {"tables": {"metrics": table.mark}}})


def test_a_number_that_was_edited_by_hand_is_told_by_the_hash_in_the_checkpoint(tmp_path):
    """A run without a checkpoint, or with none that can be read, has no hash to tell by, and nothing
    else says what a loss of training was."""
    folder = make_study(tmp_path / "runs", {"A": A, "B": B})
    for seed in (0, 1):
        with_checkpoint(folder / f"A-seed{seed}", 5)
    results = gather("study", tmp_path / "runs")
    assert results.excluded == []
    for name in ("A-seed0", "B-seed0"):
        path = folder / name / "metrics.csv"
        head, _, last = path.read_text().rstrip("\n").rpartition("\n")
        cells = last.split(",")
        cells[head.splitlines()[0].split(",").index("train/loss")] = "0.99"
        path.write_text(f"{head}\n{','.join(cells)}\n")
    results = gather("study", tmp_path / "runs")
    assert [entry.name for entry in results.excluded] == ["A-seed0"]
    assert "metrics.csv was changed since the run wrote it" in results.excluded[0].reason
    assert {run.name for run in results.runs} >= {"A-seed1", "B-seed0"}
    document = json.loads((folder / "A-seed1/metadata.json").read_text())
    (folder / "A-seed1/metadata.json").write_text(json.dumps(document | {"final/accuracy": 0.99}))
    named = {entry.name: entry.reason for entry in gather("study", tmp_path / "runs").excluded}
    assert "metadata.json has final/accuracy 0.99" in named.pop("A-seed1")
    assert named.keys() == {"A-seed0"}
    (folder / "A-seed1/metadata.json").write_text(json.dumps(document))
    # damaged: it tells nothing
    (folder / "A-seed0/checkpoints/round_000005/progress.json").write_text("{")
    assert gather("study", tmp_path / "runs").excluded == []


def _number(run: Path, name: str, value: float) -> None:
    file = run / "metadata.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {name: value}))


def _cut(run: Path, end: str) -> None:
    """Leave out the last row of ``metrics.csv``, or what is behind some text of it."""
    text = (run / "metrics.csv").read_text()
    start = text[:-1].rindex("\n") + 1
    (run / "metrics.csv").write_text(text[: text.rindex(end) + len(end)] if end else text[:start])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda run: _cut(run, ""), "metrics.csv has 4 rounds of 5"),
        (lambda run: _cut(run, ",0.1"), "metrics.csv is cut: it ends within the values of round 5"),
        (
            lambda run: _cut(run, "5,0.4,"),
            "metrics.csv is cut: it ends within the values of round 5",
        ),
        (lambda run: _number(run, "final/accuracy", 0.99), "metadata.json has final/accuracy 0.99"),
        (lambda run: _number(run, "final/last5_accuracy", 0.99), "has final/last5_accuracy 0.99"),
        (lambda run: _number(run, "final/best_val_round", 2), "has final/best_val_round 2"),
        (lambda run: _number(run, "seed", 7), "metadata.json has seed 7, and config.yaml 0"),
    ],
)
def test_a_run_without_checkpoints_whose_files_do_not_fit_is_named(tmp_path, damage, said):
    config = {"trainer.max_rounds": 5}
    folder = make_study(tmp_path, {"A": A, "B": B}, run={"config": config})
    (folder / "study.yaml").unlink()  # a plain folder of runs, in which any seed may be
    assert gather("study", tmp_path).excluded == []
    damage(folder / "A-seed0")
    results = gather("study", tmp_path)
    assert [entry.name for entry in results.excluded] == ["A-seed0"]
    assert said in results.excluded[0].reason
    assert len(results.runs) == 5


def test_a_run_that_was_stopped_early_has_fewer_rounds(tmp_path):
    folder = make_study(tmp_path, {"A": A, "B": B}, run={"config": {"trainer.max_rounds": 9}})
    with pytest.raises(InputError, match=r"metrics\.csv has 5 rounds of 9"):
        gather("study", tmp_path)
    for run in folder.glob("*-seed*"):
        _number(run, "stopped_early", "val/accuracy has not improved")
    assert len(gather("study", tmp_path).runs) == 6
    _cut(folder / "B-seed1", "")
    assert "metrics.csv gives" in gather("study", tmp_path).excluded[0].reason


@pytest.mark.parametrize("file", ["metadata.json", "config.yaml", "metrics.csv"])
def test_a_folder_in_the_place_of_a_file_is_named_and_the_other_runs_count(tmp_path, file):
    folder = make_study(tmp_path, {"A": A, "B": B}, run={"tested": {"fgsm/accuracy": 0.5}})
    (folder / "A-seed0" / file).unlink()
    (folder / "A-seed0" / file).mkdir()
    results = gather("study", tmp_path)
    assert f"{file} cannot be read: " in results.excluded[0].reason
    assert len(results.runs) == 5


@pytest.mark.parametrize("damage", ["{", "[" * 50_000, '{"metrics": 3}'])
def test_a_test_that_cannot_be_read_is_named_and_its_run_counts(tmp_path, damage):
    folder = make_study(tmp_path, {"A": A, "B": B}, run={"tested": {"fgsm/accuracy": 0.5}})
    (folder / "A-seed0/test.json").write_text(damage)
    results = gather("study", tmp_path)
    (entry,) = results.not_counted
    assert (entry.name, entry.reason[:19]) == ("test.json of A-seed0", "it cannot be read: ")
    assert len(results.runs) == 6
    has_test = {run.name for run in results.runs if "fgsm/accuracy" in run.metrics}
    assert "A-seed0" not in has_test
    assert len(has_test) == 5


def test_a_closed_run_folder_is_named_and_the_other_runs_count(tmp_path, monkeypatch):
    """Who may not look into a folder cannot even ask whether it holds a run."""
    folder = make_study(tmp_path, {"A": A, "B": B})

    def closed(ask):
        def asked(path, *more):
            if Path(path).parent == folder / "A-seed0":
                raise PermissionError(13, "Permission denied", str(path))
            return ask(path, *more) and Path(path) != folder / "A-seed0"

        return asked

    for owner, name in ((Path, "exists"), (os, "access")):
        monkeypatch.setattr(owner, name, closed(getattr(owner, name)))
    read = Path.read_bytes
    monkeypatch.setattr(
        Path, "read_bytes", lambda path: closed(lambda path: True)(path) and read(path)
    )
    results = gather("study", tmp_path)
    assert results.excluded[0].reason == "metadata.json cannot be read: Permission denied"
    assert len(results.runs) == 5


def test_a_test_of_rounds_that_were_made_anew_is_left_out_and_named(tmp_path):
    """The last round is told by its weights, and another one by what training had measured."""
    for selection, recorded, weights, counts in (
        ("last", {}, 0, True),
        ("last", {}, 7, False),
        ("best_val", {"test/accuracy": 0.45}, 7, True),
        ("best_val", {"test/accuracy": 0.46}, 7, False),
    ):
        root = tmp_path / f"{selection}-{counts}"
        folder = make_study(root, {"A": A, "B": B}, selection=selection)
        round = 5 if selection == "last" else 3
        test = {
            "metrics": {"fgsm/accuracy": 0.5},
            "round": round,
            "weights_sha256": f"{weights:064x}",
        }
        (folder / "A-seed0/test.json").write_text(json.dumps(test | {"recorded": recorded}))
        rows = numbers((folder / "A-seed0/metrics.csv").read_bytes())
        rows[2] |= {"test/accuracy": 0.45, "val/accuracy": 0.99}
        lines = [",".join(map(str, some)) for some in (rows[0], *(row.values() for row in rows))]
        (folder / "A-seed0/metrics.csv").write_text("\n".join([*lines, ""]))
        for name, value in final_summary(rows).items():
            _number(folder / "A-seed0", name, value)
        results = gather("study", root)
        assert results.excluded == []
        assert ("fgsm/accuracy" in results.runs[0].metrics) == counts
        why = f"it is of other weights: round {round} was made anew since; test it again"
        found = [(entry.name, entry.reason) for entry in results.not_counted]
        assert found == ([] if counts else [("test.json of A-seed0", why)])


def test_files_of_a_run_that_are_nested_too_deeply_are_named(tmp_path):
    folder = make_study(tmp_path / "runs", {"A": A, "B": B})
    (folder / "A-seed0/metadata.json").write_text("[" * 50_000)
    (entry,) = gather("study", tmp_path / "runs").excluded
    assert (entry.name, entry.reason.split(":")[0]) == ("A-seed0", "metadata.json cannot be read")


def test_cells_that_do_not_count_are_listed_with_their_reason(tmp_path, capsys):
    folder = make_study(
        tmp_path / "runs",
        {"A": {s: 0.9 + 0.01 * s for s in range(6)}, "B": dict.fromkeys(range(6), 0.8)},
    )
    for seed in range(5):
        shutil.rmtree(folder / f"B-seed{seed}")
    make_run(folder, "B", 0, 0.8, status="running")
    make_run(folder, "B", 1, 0.8)
    (folder / "B-seed1/metadata.json").write_text("{")
    make_run(folder, "B", 2, 0.8)
    (folder / "B-seed2/metrics.csv").write_text("round,test/accuracy\n1,0.5\n3,0.7\n")
    make_run(folder, "B", 3, 0.8)
    (folder / "B-seed3/metrics.csv").write_text("round,test/accuracy\n1,oops\n")
    make_run(folder, "B", 5, 0.7, name="B-seed5-2")  # run again: the later counts
    make_run(folder, "Z", 0, 0.8)
    compare("study", tmp_path / "out", tmp_path / "runs")
    entries = {
        entry["name"]: entry["reason"] for entry in report_of(tmp_path / "out")["not_counted"]
    }
    expected = {
        "B-seed0": "not finished: running", "B-seed1": "metadata.json cannot be read", "B-seed2": "every round",
        "B-seed3": "metrics.csv cannot be read", "B-seed4": "never started", "B-seed5": "B-seed5-2 is used", "Z-seed0": "not a cell",
    }  # fmt: skip
    assert set(entries) == set(expected)
    said = capsys.readouterr().out
    written = (tmp_path / "out/report.md").read_text()
    for name, reason in expected.items():
        assert reason in entries[name]
        assert f"{name}: " in said
        assert f"- {name}: " in written


def test_numbers_that_are_none_are_left_out_and_listed(tmp_path):
    folder = make_study(tmp_path / "runs", {"A": A, "B": B})
    shutil.rmtree(folder / "B-seed1")
    make_run(
        folder,
        "B",
        1,
        0.9,
        **{"train/loss": float("nan")},
        tested={"corrupted/accuracy": float("inf"), "note": "text"},
    )
    compare("study", tmp_path / "out", tmp_path / "runs")
    report = report_of(tmp_path / "out")
    assert {(entry["run"], entry["metric"]) for entry in report["not_numbers"]} == {
        ("B-seed1", "train/loss"),
        ("B-seed1", "corrupted/accuracy"),
    }
    assert report["levels"][0]["methods"]["B"]["metrics"]["train/loss"]["seeds"] == [0, 2]
    assert report["gap"]["seeds"] == [0, 1, 2]
    assert "train/loss of B-seed1 is not a number" in (tmp_path / "out/report.md").read_text()


def test_a_target_that_is_never_reached(tmp_path):
    make_study(
        tmp_path / "runs",
        {"A": A, "B": {0: 0.5, 1: 0.9, 2: 0.9}},
        target_accuracy=0.8,
        criteria=["rounds(A) <= rounds(B)"],
    )
    compare("study", tmp_path / "out", tmp_path / "runs")
    assert "2 of 3" in (tmp_path / "out/report.md").read_text()
    assert report_of(tmp_path / "out")["criteria"][0]["levels"][0]["seeds"] == [1, 2]


def test_a_folder_without_a_study_is_labelled_by_what_differs(tmp_path):
    for seed in range(2):
        make_run(
            tmp_path / "mixed",
            "FedAvg",
            seed,
            0.9 + 0.01 * seed,
            tagged=False,
            config={"model": {"lr": 0.1}, "trainer": {"devices": 1}},
        )
        make_run(
            tmp_path / "mixed",
            "FedAvg",
            seed,
            0.8,
            tagged=False,
            config={"model": {"lr": 0.5}, "trainer": {"devices": 2}},
            name=f"x{seed}",
        )
        make_run(tmp_path / "mixed", "FedProx", seed, 0.7 + 0.02 * seed, tagged=False)
    make_run(tmp_path / "mixed", "FedProx", 1, 0.7, tagged=False, name="FedProx-seed1-2")
    results = gather(str(tmp_path / "mixed"), tmp_path)
    assert {run.label for run in results.runs} == {"FedAvg lr=0.1", "FedAvg lr=0.5", "FedProx"}
    assert [entry.name for entry in results.excluded] == ["FedProx-seed1"]
    assert Comparison(results).ranking({}).best_proposed == "FedAvg lr=0.1"


@pytest.mark.parametrize("broken", ["missing", "nan"])
def test_a_sweep_that_has_not_reached_the_proposed_method_is_reported(tmp_path, capsys, broken):
    folder = make_study(
        tmp_path, {"P": A, "B": B, "C": C}, proposed=["P"], criteria=["accuracy(P) > accuracy(B)"]
    )
    for path in folder.glob("P-seed*"):
        if broken == "missing":
            shutil.rmtree(path)
        else:
            text = json.loads((path / "metadata.json").read_text())
            (path / "metadata.json").write_text(json.dumps(text | {"final/accuracy": float("nan")}))
    assert (
        main(
            ["compare", "--study", "study", "--root", str(tmp_path), "--out", str(tmp_path / "out")]
        )
        == 0
    )
    assert "no comparison: P has no finished run" in " ".join(
        capsys.readouterr().out.lower().replace(" p has", " P has").split()
    )
    report = report_of(tmp_path / "out")
    assert (report["winner"], report["gap"]) == (None, None)
    assert report["criteria"][0]["verdict"] == "undecided"


def test_a_run_of_other_settings_is_not_taken_for_a_cell(tmp_path):
    folder = make_study(tmp_path, {"A": A, "B": B})
    for path in folder.glob("A-seed*"):
        shutil.rmtree(path)
    right = {
        seed: make_run(folder, "A", seed, 0.9 + seed / 100, config={"model": {"lr": 0.1}})
        for seed in (0, 1)
    }
    make_run(folder, "A", 1, 0.1, name="A-seed1-2", config={"model": {"lr": 0.5}})
    make_run(folder, "A", 2, 0.1, config={"model": {"lr": 0.5}})
    cells = []
    for seed in range(3):
        of_a = settings_hash({"seed_everything": seed, "model.lr": 0.1})
        of_b = settings_hash(config_of(folder / f"B-seed{seed}"))
        runs = {"A": {0: "A-seed0", 1: "A-seed1-2", 2: None}[seed], "B": f"B-seed{seed}"}
        for label, hashed in (("A", of_a), ("B", of_b)):
            cells.append(
                {
                    "name": f"{label}-seed{seed}",
                    "hash": hashed,
                    "status": "waiting",
                    "run": runs[label],
                }
            )
    (folder / "cells.json").write_text(json.dumps(cells))
    results = gather("study", tmp_path)
    assert [run.name for run in results.runs if run.label == "A"] == [
        path.name for path in right.values()
    ]
    reasons = {
        entry.name: entry.reason for entry in results.excluded if "other settings" in entry.reason
    }
    assert set(reasons) == {"A-seed1-2", "A-seed2"}


@pytest.mark.parametrize(
    ("of_b", "left"),
    [
        ({}, {"A", "B"}),
        ({"chosen": "best", "tested_round": 3}, {"A"}),  # the tables are of the last round
        ({"chosen": "best"}, {"A", "B"}),  # which is the round that validation chose
        ({"tested_round": 3}, {"A"}),  # tested before the run went on
    ],
)
def test_tests_of_different_checkpoints_are_not_put_side_by_side(tmp_path, of_b, left):
    for seed in range(2):
        make_run(tmp_path / "study", "A", seed, 0.9, tested={"fgsm/accuracy": 0.5})
        make_run(tmp_path / "study", "B", seed, 0.9, tested={"fgsm/accuracy": 0.4}, **of_b)
    results = gather("study", tmp_path)
    assert {run.label for run in results.runs if "fgsm/accuracy" in run.metrics} == left
    said = {entry.name for entry in results.not_counted}
    assert said == {
        f"test.json of {label}-seed{seed}" for label in {"A", "B"} - left for seed in range(2)
    }
    assert len(results.runs) == 4


def test_a_test_of_another_checkpoint_takes_nothing_from_the_tables(tmp_path):
    """What was measured of the round that the study selects counts, whichever was tested last."""
    for seed in range(2):
        make_run(tmp_path / "study", "A", seed, 0.9, tested={"fgsm/accuracy": 0.5})
        folder = make_run(
            tmp_path / "study",
            "B",
            seed,
            0.9,
            tested={"fgsm/accuracy": 0.1},
            chosen="best",
            tested_round=3,
        )
        of_last = {"chosen": "last", "round": 5, "metrics": {"fgsm/accuracy": 0.4}}
        (folder / "test_round_000005.json").write_text(json.dumps(of_last))
        (folder / "test_round_000004.json").write_text("[1")
        (folder / "test_notes.json").write_text("[1]")
    results = gather("study", tmp_path)
    assert {(run.label, run.metrics["fgsm/accuracy"]) for run in results.runs} == {
        ("A", 0.5),
        ("B", 0.4),
    }
    assert not results.not_counted


@pytest.mark.parametrize("of_others", [{}, {"weights_sha256": "f" * 64}])
def test_a_test_that_another_one_stands_in_for_is_found_by_tables_of_its_own_round(
    tmp_path, of_others
):
    """The best round, 3, was tested after the last one, 5; each table finds its own, in whichever
    order they are asked. A test of other weights takes nothing from that of the other round."""
    for seed in range(2):
        tested = {"tested": {"fgsm/loss": 0.3}, "chosen": "best", "tested_round": 3}
        folder = make_run(tmp_path / "study", "A", seed, 8.0, task=LanguageModelling(), **tested)
        of_last = {"chosen": "last", "round": 5, "metrics": {"fgsm/loss": 0.5}, **of_others}
        (folder / "test_round_000005.json").write_text(json.dumps(of_last))
    last = Comparison(gather("study", tmp_path))
    expected = [[None, 0.3] if of_others else [0.5, 0.3]] * 2
    for _ in range(2):
        best = last.other
        found = [
            [one.metrics.get("fgsm/loss") for one in both]
            for both in zip(last.results.runs, best.results.runs, strict=True)
        ]
        assert found == expected
        assert [entry.name for entry in last.results.not_counted] == (
            ["test.json of A-seed0", "test.json of A-seed1"] if of_others else []
        )
        assert not best.results.not_counted
        last = best.other


def test_tags_that_only_some_runs_carry_are_no_axis(tmp_path):
    for seed in range(2):
        make_run(tmp_path / "tuned", "A", seed, 0.9, tags={"tuned_by": "tune_kd"})
        make_run(tmp_path / "tuned", "B", seed, 0.8)
        make_run(tmp_path / "swept", "A", seed, 0.8, tags={"noise": "on"})
    results = gather("tuned", tmp_path)
    assert results.study.grid == {}
    assert [run.name for run in results.runs] == ["A-seed0", "A-seed1", "B-seed0", "B-seed1"]
    assert list(gather("swept", tmp_path).study.grid) == ["noise"]


def test_tags_of_a_search_are_no_axis_where_all_runs_carry_them(tmp_path):
    """Those that ``tune`` gives to the run with the best settings."""
    tags = {"label": "tuned", "tuned_by": "tune_kd", "trial": "7"}
    make_run(tmp_path / "tuned", "FedMPQKD", 0, 0.9, tags=tags)
    results = gather("tuned", tmp_path)
    assert (results.study.grid, [run.levels for run in results.runs]) == ({}, [{}])


def test_one_label_of_different_settings_is_not_one_method(tmp_path, monkeypatch):
    """Neither in a folder nor in a store, whose parameters are text; and there a test of an earlier
    round does not count."""
    entries = []
    for number, lr in enumerate((0.1, 0.5)):
        make_run(tmp_path / "two", "A", 0, 0.9, name=f"A{number}", config={"model": {"lr": lr}})
        metadata = json.loads((tmp_path / f"two/A{number}/metadata.json").read_text())
        history = [dict(row) for row in history_of(0.9)]
        history[2 if number else 4]["fgsm/accuracy"] = 0.5
        settings = {"model.lr": str(lr), "trainer.devices": "1"}
        entries.append(
            {
                "name": f"A{number}",
                "id": f"{number}",
                "metadata": metadata,
                "history": history,
                "settings": settings,
                "typed": False,
            }
        )
    assert {run.label for run in gather("two", tmp_path).runs} == {"A lr=0.1", "A lr=0.5"}
    monkeypatch.setattr(gathering, "read_runs", lambda uri, name: entries)
    results = gather("two", tmp_path, "sqlite:///any.db")
    assert [(run.label, "fgsm/accuracy" in run.metrics) for run in results.runs] == [
        ("A lr=0.1", True),
        ("A lr=0.5", False),
    ]
    assert [entry.name for entry in results.not_counted] == ["test.json of A1"]


@pytest.mark.parametrize("value", [None, "0.9", [1]])
def test_a_final_accuracy_that_is_no_number_is_listed(tmp_path, value):
    folder = make_study(tmp_path, {"A": A, "B": B})
    file = folder / "B-seed1/metadata.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"final/accuracy": value}))
    results = gather("study", tmp_path)
    assert [(entry.name, "final/accuracy" in entry.reason) for entry in results.excluded] == [
        ("B-seed1", True)
    ]


def test_settings_that_are_no_methods_own_and_differ_are_named(tmp_path):
    """Also where the seeds of one method differ. What only the method decides may differ between
    methods."""
    folder = make_study(tmp_path, {"A": A, "B": B, "C": C})
    for label, participation in (("A", 0.5), ("B", 0.5), ("C", 1.0)):
        for seed in (0, 1, 2):
            model = {
                "class_path": label,
                "init_args": {"mu": 0.2 if (label, seed) == ("B", 1) else 0.1},
            }
            config = {
                "model": model,
                "trainer": {"participation": participation},
                "seed_everything": seed,
            }
            (folder / f"{label}-seed{seed}" / "config.yaml").write_text(json.dumps(config))
    assert (
        main(
            ["compare", "--study", "study", "--root", str(tmp_path), "--out", str(tmp_path / "out")]
        )
        == 0
    )
    text = (tmp_path / "out" / "report.md").read_text()
    between = (
        "Methods differ in settings that are not their own: `trainer.participation` (0.5; C: 1.0)."
    )
    within = "The runs of B differ in more than the seed: `model.init_args.mu` (0.1; seed 1: 0.2)."
    assert between in text
    assert within in text
    assert text.count("differ in more than the seed") == 1
    assert "drop-outs and noise, but for the settings named above. The 95 %" in text


@pytest.mark.parametrize(
    ("codes", "said"),
    [
        (
            ["1", "1", "2", "3"],
            "The runs of A, B were trained by several versions of mine: they differ in",
        ),
        (["", "", "1", "2"], "The runs of B were trained by several versions of mine."),
        (["", "", "1", "1 after 2"], "The runs of B were trained by several versions of mine."),
        (["1", "1", "1", "1"], ""),
    ],
)
def test_runs_of_two_versions_of_a_file_are_said_to_be(codes, said, tmp_path, capsys):
    folder = make_study(tmp_path, {"A": A, "B": B})
    for place, code in zip(("A-seed0", "A-seed1", "B-seed0", "B-seed1"), codes, strict=True):
        now, _, before = code.partition(" after ")
        about = {"code": {"mine": now, "helper": "0"} if now else {"helper": "0"}}
        if before:
            about["resumed"] = [{"after_round": 1, "code_before": {"mine": before}}]
        file = folder / place / "metadata.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | about))
    out = ["--out", str(tmp_path / "out")]
    assert main(["compare", "--study", "study", "--root", str(tmp_path), *out]) == 0
    text = (tmp_path / "out" / "report.md").read_text()
    assert text.count("several versions") == bool(said)
    assert said in text
    assert said in capsys.readouterr().out


def test_means_over_other_seeds_are_said_to_be(tmp_path, capsys):
    folder = make_study(tmp_path, {"A": A, "B": B, "C": C})
    shutil.rmtree(folder / "B-seed1")
    assert (
        main(
            ["compare", "--study", "study", "--root", str(tmp_path), "--out", str(tmp_path / "out")]
        )
        == 0
    )
    said = (
        "Means are over each method's own seeds, places over those that both of a pair have: "
        "B has none of seed 1."
    )
    assert said in (tmp_path / "out" / "report.md").read_text()
    assert said in capsys.readouterr().out


def test_a_seed_that_a_method_lacks_tells_nothing_of_it(tmp_path):
    """It is a hard one, so that B has the higher mean; in every seed that both have, A is better."""
    a = {seed: 0.8 + 0.01 * seed for seed in range(6)}
    b = {seed: value - 0.1 - 0.001 * seed for seed, value in a.items()}
    c = {seed: value - 0.3 + 0.001 * seed for seed, value in a.items()}
    make_study(tmp_path / "runs", {"A": a | {6: 0.1}, "B": b, "C": c | {6: 0.0}}, proposed=["B"])
    compare("study", tmp_path / "out", tmp_path / "runs")
    report = report_of(tmp_path / "out")
    assert (report["best_proposed"]["method"], report["best_baseline"]["method"]) == ("B", "A")
    mean_a, mean_b = (sum(some.values()) / 6 for some in (a, b))
    assert report["aggregated"]["gap"] == pytest.approx(100 * (mean_b / mean_a - 1))
    places = [(one["label"], one["place"], one["first"]) for one in report["levels"][0]["places"]]
    assert places == [("A", 1, 1), ("B", 2, 2), ("C", 3, 3)]


def test_costs_of_a_run_are_of_all_its_rounds(tmp_path):
    """Whichever round is selected; an upload's bytes are those of one that was used."""
    record = read_directory(make_run(tmp_path, "A", 0, 0.8, **{"comm/wasted_bytes": 200}))
    cost = {"cost/train_flops": 7.0, "cost/train_memory": 3.0}
    rows = [{**row, "clock/seconds": 2.0 * row["round"], **cost} for row in record.history]
    rows[1] |= dict.fromkeys(cost, 0.0)  # nobody trained
    best = {**record.metadata, "final/best_val_round": 2}
    found = run_metrics(replace(record, history=rows, metadata=best), selection="best_val")
    assert found["test/accuracy"] == pytest.approx(0.8 * 2 / 5)
    assert found["clock/seconds"] == 10
    assert {name: found[name] for name in cost} == cost
    assert found["client/upload_bytes"] == 5 * (1000 - 200) / (5 * 4)


def test_a_file_of_the_clock_that_has_changed_between_methods_is_refused(tmp_path, capsys):
    """Where their settings of it are the same; another file is another setting."""
    folder = make_study(tmp_path, {"A": A, "B": B})
    words = ["compare", "--study", "study", "--root", str(tmp_path), "--out", str(tmp_path / "out")]

    def read(label, seed, file, sha256):
        run = folder / f"{label}-seed{seed}"
        (run / "config.yaml").write_text(
            json.dumps({"trainer": {"clock": file}, "seed_everything": seed})
        )
        metadata = json.loads((run / "metadata.json").read_text())
        (run / "metadata.json").write_text(json.dumps({**metadata, "clock_sha256": sha256}))

    for seed in (0, 1, 2):
        read("A", seed, "slow.csv", "0" * 64)
        read("B", seed, "slow.csv", "1" * 64)
    assert main(words) == 2
    assert "content of the files of trainer.clock" in capsys.readouterr().err
    for seed in (0, 1, 2):
        read("B", seed, "fast.csv", "1" * 64)
    assert main(words) == 0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tokens", "the tokens of the text"),
        ("test_owners", "the clients or groups of test examples"),
        ("public", "the public set"),
    ],
)
def test_data_that_have_changed_between_methods_are_refused(name, said, tmp_path, capsys):
    """Where their settings are the same; and a public set is drawn for each seed."""
    folder = make_study(tmp_path, {"A": A, "B": B})
    words = ["compare", "--study", "study", "--root", str(tmp_path), "--out", str(tmp_path / "out")]

    def read(label, seed, context, sha256):
        run = folder / f"{label}-seed{seed}"
        settings = {"data": {"context": context}, "seed_everything": seed}
        (run / "config.yaml").write_text(json.dumps(settings))
        metadata = json.loads((run / "metadata.json").read_text())
        (run / "metadata.json").write_text(json.dumps({**metadata, f"{name}_sha256": sha256}))

    for seed in (0, 1, 2):
        read("A", seed, 64, f"{seed if name == 'public' else 0}" * 64)
    words += ["--overwrite", "true"]
    assert main(words) == 0, "runs of before do not say"
    for seed in (0, 1, 2):
        read("B", seed, 64, "8" * 64)
    assert main(words) == 2
    assert f"B-seed0 has content of {said} 888888888888" in capsys.readouterr().err
    for seed in (0, 1, 2):
        read("B", seed, 32, "8" * 64)
    assert main(words) == 0


def test_joules_of_two_sources_or_of_two_versions_of_a_table_are_refused(tmp_path, capsys):
    folder = make_study(tmp_path, {"A": A, "B": B})
    words = ["compare", "--study", "study", "--root", str(tmp_path), "--out", str(tmp_path / "out")]
    words += ["--overwrite", "true"]

    def measure(label, seed, source, sha256="0" * 64):
        file = folder / f"{label}-seed{seed}" / "metadata.json"
        found = {"costs_label": source, "costs_sha256": sha256}
        file.write_text(json.dumps(json.loads(file.read_text()) | found))

    for seed in (0, 1, 2):
        measure("A", seed, "RAPL")
    assert main(words) == 0, "runs of before do not say"
    for seed in (0, 1, 2):
        measure("B", seed, "modelled: CPU seconds x 15 W")
    assert main(words) == 2
    assert "source of joules RAPL" in capsys.readouterr().err
    for seed in (0, 1, 2):
        measure("B", seed, "RAPL", f"{seed // 2}" * 64)
    assert main(words) == 2
    assert "content of the files of model.costs" in capsys.readouterr().err
    for seed in (0, 1, 2):
        measure("B", seed, "RAPL", "1" * 64)
    assert main(words) == 0, "each method has its own table"
