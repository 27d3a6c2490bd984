"""``compare`` on runs whose truth is known: planted effects, planted nulls, damaged and mixed folders."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from matplotlib.backends.backend_agg import FigureCanvasAgg
from synthetic_runs import history_of, make_run, make_study

from fl_lightning.__main__ import main
from fl_lightning.errors import InputError
from fl_lightning.settings import config_of, settings_hash
from fl_lightning.study import compare as command
from fl_lightning.study import gather as gathering
from fl_lightning.study import statistics
from fl_lightning.study.compare import compare
from fl_lightning.study.comparison import Comparison
from fl_lightning.study.criteria import parse
from fl_lightning.study.curves import forest
from fl_lightning.study.direction import direction
from fl_lightning.study.document import comparable
from fl_lightning.study.gather import check_comparable, gather, with_metric
from fl_lightning.study.plan import Study
from fl_lightning.study.verdicts import verdicts

A, B, C = {0: 0.90, 1: 0.92, 2: 0.94}, {0: 0.89, 1: 0.90, 2: 0.91}, {0: 0.80, 1: 0.83, 2: 0.82}  # A - B = 0.01, 0.02, 0.03


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


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.fixture
def figures():
    """For tests that look at them."""


@pytest.fixture(autouse=True)
def draw_only_where_looked_at(request, monkeypatch):
    """A figure takes half a second."""
    if "figures" not in request.fixturenames:
        monkeypatch.setattr(command, "figures", lambda comparison: [])


# -- the numbers ----------------------------------------------------------------------------------------------------------------------


def test_the_report_agrees_with_scipy_on_the_csv_it_wrote(tmp_path):
    generator = np.random.default_rng(0)
    seeds = range(6)
    accuracies = {label: {s: 0.8 + 0.02 * s + float(generator.normal(0, 0.01)) for s in seeds} for label in "ABCD"}
    make_study(tmp_path / "runs", accuracies, proposed=["A"])
    compare("study", tmp_path / "out", tmp_path / "runs")
    runs = rows_of(tmp_path / "out/runs.csv")
    values = {label: [float(row["final/accuracy"]) for row in runs if row["method"] == label] for label in "ABCD"}
    found = [row for row in rows_of(tmp_path / "out/differences.csv") if row["metric"] == "final/accuracy"]
    assert [(row["a"], row["b"]) for row in found] == [("A", "B"), ("A", "C"), ("A", "D")]
    for row in found:
        x = np.subtract(values[row["a"]], values[row["b"]])
        t = scipy.stats.ttest_rel(values[row["a"]], values[row["b"]])
        assert (float(row["t"]), float(row["p_t"])) == pytest.approx((t.statistic, t.pvalue))
        assert (float(row["low"]), float(row["high"])) == pytest.approx(tuple(t.confidence_interval(0.95)))
        assert float(row["p_wilcoxon"]) == pytest.approx(scipy.stats.wilcoxon(x).pvalue)
        bootstrap = scipy.stats.bootstrap((x,), np.mean, n_resamples=20_000, method="BCa", rng=1).confidence_interval
        assert (float(row["bootstrap_low"]), float(row["bootstrap_high"])) == pytest.approx(tuple(bootstrap), abs=2e-3)
    p = sorted((float(row["p_t"]), float(row["p_holm"])) for row in found)
    steps = [(3 - i) * raw for i, (raw, _) in enumerate(p)]
    assert [corrected for _, corrected in p] == pytest.approx([min(1, max(steps[: i + 1])) for i in range(3)])
    level = report_of(tmp_path / "out")["levels"][0]
    assert level["methods"]["B"]["metrics"]["final/accuracy"]["std"] == pytest.approx(np.std(values["B"], ddof=1))


def planted(root: Path, trial: int, effect: float, seeds: int, baselines: int) -> Comparison:
    """Baselines and a proposed method that share what a seed does to all; differences have a standard deviation of 0.01 sqrt 2."""
    generator = np.random.default_rng(trial)
    shared = generator.normal(0.8, 0.03, seeds)
    labels = ["proposed", *(f"b{i}" for i in range(baselines))]
    accuracies = {
        label: {s: float(shared[s] + generator.normal(effect * (label == "proposed"), 0.01)) for s in range(seeds)}
        for label in labels
    }
    make_study(root, accuracies, name=f"trial{trial}", proposed=["proposed"])
    return comparison_of(root, f"trial{trial}")


def test_a_planted_effect_is_found_at_the_stated_power(tmp_path):
    """80 of 100; binomial(100, 0.8) is outside 69 .. 89 once in a hundred times."""
    effect = statistics.detectable_effect(5) * 0.01 * np.sqrt(2)
    wins = [planted(tmp_path, trial, effect, 5, 1).outcome({}).winner for trial in range(100)]
    assert set(wins) == {"proposed", None}
    assert 69 <= wins.count("proposed") <= 89


def test_a_planted_null_has_no_winner(tmp_path):
    """Four baselines, three seeds, nothing between them. Broken on purpose: without Holm's correction there would be winners."""
    trials = [planted(tmp_path, trial, 0.0, 3, 4) for trial in range(100)]
    assert [one.outcome({}).winner for one in trials].count(None) >= 94
    families = [one.differences("final/accuracy", {}) for one in trials]
    raw = sum(any(one.test.p_t < 0.05 for one in family) for family in families)
    corrected = sum(any(one.test.p_holm < 0.05 for one in family) for family in families)
    assert raw >= 10 > 7 >= corrected


def test_a_clear_winner_is_named_and_a_baseline_may_lead(tmp_path):
    make_study(
        tmp_path,
        {"P": {s: 0.95 + 0.001 * s for s in range(4)}, "B": {s: 0.8 + 0.002 * (s % 3) for s in range(4)}},
        proposed=["P"],
    )
    assert comparison_of(tmp_path).outcome({}).winner == "P"
    make_study(
        tmp_path,
        {"P": {s: 0.8 + 0.002 * (s % 3) for s in range(4)}, "B": {s: 0.95 + 0.001 * s for s in range(4)}},
        "other",
        proposed=["P"],
    )
    outcome = comparison_of(tmp_path, "other").outcome({})
    assert outcome.winner == "B"
    assert outcome.gap.test.mean < 0
    assert (outcome.gap.a, outcome.gap.b) == ("P", "B")


def test_one_seed_names_no_winner_however_large_the_difference(tmp_path, capsys):
    make_study(tmp_path / "runs", {"A": {0: 0.99}, "B": {0: 0.10}}, proposed=["A"], criteria=["accuracy(A) > accuracy(B)"])
    assert main(["compare", "--study", "study", "--root", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]) == 0
    report = report_of(tmp_path / "out")
    assert report["winner"] is None
    assert report["gap"]["mean"] == pytest.approx(0.89)
    assert report["gap"]["low"] is report["gap"]["p_t"] is None
    assert report["criteria"][0]["verdict"] == "undecided"
    assert "no winner" in capsys.readouterr().out


def test_pairs_need_a_seed_that_both_have(tmp_path):
    folder = make_study(tmp_path, {"A": A, "B": B}, proposed=["A"])
    shutil.rmtree(folder / "B-seed2")
    one = comparison_of(tmp_path).differences("final/accuracy", {})[0]
    assert (one.seeds, one.unpaired) == ((0, 1), (2,))
    assert one.test.differences == pytest.approx((0.01, 0.02))


def test_metrics_of_a_run(tmp_path):
    """Totals, medians without warm-up, the round that validation chose, the target: by hand."""
    make_study(tmp_path, {"A": {0: 0.5}}, target_accuracy=0.25)
    run = gather("study", tmp_path).runs[0]
    assert run.metrics["total/total_bytes"] == 5 * 3000
    assert run.metrics["time/round"] == pytest.approx(0.1)  # the first three are ten times as slow
    assert run.metrics["time/total"] == pytest.approx(3.2)
    assert run.metrics["final/best_val_test_accuracy"] == 0.5  # validation rises to the end
    assert (run.metrics["target/rounds"], run.metrics["target/megabytes"]) == (3, 0.009)
    assert run.metrics["test/ece"] == 0.1


# -- criteria -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("criterion", "decision"),
    [  # A - B: mean 0.02, interval 0.02 -+ 4.303 x 0.01 / sqrt 3 = [-0.0048, 0.0448]
        ("accuracy(A) - accuracy(B) >= -0.005", "holds"),
        ("accuracy(A) - accuracy(B) >= -0.004", "undecided"),
        ("accuracy(A) - accuracy(B) > 0.044", "undecided"),
        ("accuracy(A) - accuracy(B) >= 0.045", "fails"),
        ("accuracy(B) + 0.045 < accuracy(A)", "fails"),
        ("0.05 > gap(A, B)", "holds"),
        ("-gap(B, A) * 2 / 2 < +0.05", "holds"),
        ("bytes(A) <= 0.75 * bytes(B)", "fails"),
        ("upload(A) <= upload(B)", "holds"),  # counted: equal in every seed
        ("download(A) < 2 * upload(B)", "fails"),
        ('metric("bits/average", A) <= 4', "holds"),
        ("ece(A) <= ece(B)", "undecided"),  # 0 in every seed: estimated, but without a spread
        ("p(A, B) < 0.05", "undecided"),
        ("p(C, A) < 0.2", "fails"),  # significant, and C is the worse
        ("p(A, C) <= 0.2", "holds"),
        ("accuracy(A) / (accuracy(B) - accuracy(B)) > 1", "undecided"),
    ],
)
def test_criteria_by_hand(tmp_path, criterion, decision):
    assert decisions(tmp_path, criterion) == [decision]


def test_numbers_of_a_criterion(tmp_path):
    make_study(tmp_path, {"A": A, "B": B}, criteria=["accuracy(A) - 0.01 >= accuracy(B)"])
    [(_, one)] = verdicts(comparison_of(tmp_path))[0].judgements
    half = 4.302652729911275 * 0.01 / np.sqrt(3)
    assert (one.left, one.right, one.difference) == pytest.approx((0.91, 0.90, 0.01))
    assert (one.low, one.high) == pytest.approx((0.01 - half, 0.01 + half))
    assert one.seeds == (0, 1, 2)


def test_labels_that_are_no_names(tmp_path):
    accuracies = {"KD a=1": A, "KD-a": B, "KD": C}
    text = ["accuracy(KD a=1) - accuracy(KD-a) >= -0.005", "accuracy('KD a=1') > accuracy(KD)", "p(KD a=1, KD) <= 0.2"]
    assert decisions(tmp_path, *text, accuracies=accuracies) == ["holds", "holds", "holds"]


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('touch pwned') > 0",
        "accuracy(A).__class__.__mro__ > 0",
        "accuracy(__import__('os')) > 0",
        "accuracy(*[A]) > 0",
        "accuracy(label=A) > 0",
        "(lambda: 1)() > 0",
        "[x for x in (1,)][0] > accuracy(A)",
        "open('pwned', 'w') > 0",
        "accuracy(A) > 0 if open('pwned','w') else 1",
        "(pwned := accuracy(A)) > 0",
        "9**9**9**9 > accuracy(A)",
        "accuracy(A) ** 2 > 0",
        "accuracy(A) << 99999999 > 0",
        "accuracy(A) > 1e999",
        "accuracy(A) > " + "9" * 400,
        "accuracy(A) > True",
        "accuracy(A) > 1j",
        "accuracy(A) > 'a'",
        "accuracy(A) == accuracy(B)",
        "0 < accuracy(A) < 1",
        "accuracy(A) > 0 and accuracy(B) > 0",
        "accuracy(A)",
        "1 > 0",
        "accuracy > 0",
        "accuracy() > 0",
        "accuracy(A, B) > 0",
        "p(A, B) > 0.05",
        "p(A, B) + 1 < 2",
        "f'{open}' > 0",
        "accuracy(A) > \0",
        "(" * 300 + "1" + ")" * 90 + " > accuracy(A)",
        "-" * 5000 + "1 > accuracy(A)",
        "accuracy(A) > 0 " + "# " * 300,
        "",
        "import os",
        "accuracy(A) > 0; accuracy(B) > 0",
        "accuracy(A) >",
    ],
)
def test_nothing_but_arithmetic_is_a_criterion(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="criterion"):
        parse(text, ["A", "B"])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("criterion", "near"),
    [
        ("acuracy(A) > 0", "accuracy"),
        ("accuracy(Aa) > 0", "write A"),
        ('metric("test/ecce", A) > 0', "test/ece"),
        ("drop(A) < 0.1", "degradation"),
        ("rounds(A) < 10", "target_accuracy"),
        ("p(A, A) < 0.05", "p compares two"),
    ],
)
def test_an_unknown_name_is_told_the_nearest(tmp_path, capsys, criterion, near):
    make_study(tmp_path, {"A": A, "B": B}, criteria=[criterion])
    assert main(["compare", "--study", "study", "--root", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert near in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# -- the grid -------------------------------------------------------------------------------------------------------------------------

ON, OFF = (("noise", "on"),), (("noise", "off"),)
GRID = {"grid": {"noise": {"on": {}, "off": {}}}, "degradation": {"axis": "noise", "stressed": "on", "clean": "off"}}


def test_degradation_is_paired_and_every_level_counts(tmp_path):
    """Drops by hand: A 0.01, 0.02, 0.03; B 0.10, 0.11, 0.14."""
    clean_b = {0: 0.95, 1: 0.97, 2: 0.99}
    accuracies = {
        "A": {ON: A, OFF: {s: a + 0.01 * (s + 1) for s, a in A.items()}},
        "B": {ON: {s: b - 0.10 - 0.01 * s**2 for s, b in clean_b.items()}, OFF: clean_b},
    }
    criteria = ["drop(A) - drop(B) <= -0.05", "drop(A) <= 0.005", "accuracy(A) >= 0.85", "accuracy(A) < accuracy(B)"]
    make_study(tmp_path / "runs", accuracies, criteria=criteria, proposed=["A"], **GRID)
    comparison = comparison_of(tmp_path / "runs")
    drops = {label: one for _, label, one in comparison.degradations()}
    assert drops["A"].test.differences == pytest.approx((0.01, 0.02, 0.03))
    assert drops["B"].test.differences == pytest.approx((0.10, 0.11, 0.14))
    found = verdicts(comparison)
    assert [verdict.decision for verdict in found] == ["holds", "undecided", "holds", "fails"]
    assert [len(verdict.judgements) for verdict in found] == [1, 1, 2, 2]
    compare("study", tmp_path / "out", tmp_path / "runs")
    report = report_of(tmp_path / "out")
    assert report["level"] == {"noise": "on"}
    assert report["degradation"][0]["mean"] == pytest.approx(0.02)


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
    assert main(["compare", "--study", "study", "--root", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_levels_may_differ_unless_a_degradation_is_taken_of_them(tmp_path):
    for name, keys in (("free", {"grid": GRID["grid"]}), ("paired", GRID)):
        folder = make_study(tmp_path, {"A": {ON: A, OFF: A}, "B": {ON: B, OFF: B}}, name, **keys)
        for label in "AB":
            for seed in range(3):
                shutil.rmtree(folder / f"{label}-noise=off-seed{seed}")
                make_run(folder, label, seed, 0.9, levels={"noise": "off"}, partition=f"{seed}" * 64)
    check_comparable(gather("free", tmp_path))
    with pytest.raises(InputError, match="partition"):
        check_comparable(gather("paired", tmp_path))


# -- what is not there ----------------------------------------------------------------------------------------------------------------


def test_cells_that_do_not_count_are_listed_with_their_reason(tmp_path, capsys):
    folder = make_study(tmp_path / "runs", {"A": {s: 0.9 + 0.01 * s for s in range(6)}, "B": dict.fromkeys(range(6), 0.8)})
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
    entries = {entry["name"]: entry["reason"] for entry in report_of(tmp_path / "out")["not_counted"]}
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
    make_run(folder, "B", 1, 0.9, **{"train/loss": float("nan")}, tested={"corrupted/accuracy": float("inf"), "note": "text"})
    compare("study", tmp_path / "out", tmp_path / "runs")
    report = report_of(tmp_path / "out")
    assert {(entry["run"], entry["metric"]) for entry in report["not_numbers"]} == {
        ("B-seed1", "train/loss"),
        ("B-seed1", "corrupted/accuracy"),
    }
    assert report["levels"][0]["methods"]["B"]["metrics"]["train/loss"]["seeds"] == [0, 2]
    assert report["gap"]["seeds"] == [0, 1, 2]
    assert "train/loss of B-seed1 is not a number" in (tmp_path / "out/report.md").read_text()


def test_what_test_measured_is_compared_and_what_it_did_not_is_undecided(tmp_path):
    criteria = ['metric("fgsm/accuracy", A) > 0.1', 'metric("pgd/accuracy", A) > 0.1']
    folder = make_study(tmp_path / "runs", {"A": A, "B": B}, criteria=criteria, test=["fgsm"])
    for seed in range(3):
        shutil.rmtree(folder / f"A-seed{seed}")
        make_run(folder, "A", seed, 0.9, tested={"fgsm/accuracy": 0.5 + 0.01 * seed, "test/ece": 0.7})
    compare("study", tmp_path / "out", tmp_path / "runs")
    report = report_of(tmp_path / "out")
    assert [entry["verdict"] for entry in report["criteria"]] == ["holds", "undecided"]
    assert report["levels"][0]["methods"]["A"]["metrics"]["test/ece"]["mean"] == 0.1  # the round's own, not another checkpoint's
    assert "FGSM (%)" in (tmp_path / "out/report.md").read_text()


def test_a_target_that_is_never_reached(tmp_path):
    make_study(
        tmp_path / "runs", {"A": A, "B": {0: 0.5, 1: 0.9, 2: 0.9}}, target_accuracy=0.8, criteria=["rounds(A) <= rounds(B)"]
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
    assert [entry.name for entry in results.uncounted] == ["FedProx-seed1"]
    assert Comparison(results).outcome({}).best_proposed == "FedAvg lr=0.1"


@pytest.mark.parametrize("broken", ["missing", "nan"])
def test_a_sweep_that_has_not_reached_the_proposed_method_is_reported(tmp_path, capsys, broken):
    folder = make_study(tmp_path, {"P": A, "B": B, "C": C}, proposed=["P"], criteria=["accuracy(P) > accuracy(B)"])
    for path in folder.glob("P-seed*"):
        if broken == "missing":
            shutil.rmtree(path)
        else:
            text = json.loads((path / "metadata.json").read_text())
            (path / "metadata.json").write_text(json.dumps(text | {"final/accuracy": float("nan")}))
    assert main(["compare", "--study", "study", "--root", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    assert "no comparison: P has no finished run" in " ".join(capsys.readouterr().out.lower().replace(" p has", " P has").split())
    report = report_of(tmp_path / "out")
    assert (report["winner"], report["gap"]) == (None, None)
    assert report["criteria"][0]["verdict"] == "undecided"


def test_when_all_are_proposed_they_are_compared_with_each_other(tmp_path):
    make_study(tmp_path, {"P": {0: 0.9, 1: 0.91, 2: 0.93}, "Q": {0: 0.5, 1: 0.52, 2: 0.51}}, proposed=["P", "Q"])
    outcome = comparison_of(tmp_path).outcome({})
    assert outcome.winner == "P"
    assert (outcome.gap.a, outcome.gap.b) == ("P", "Q")


def test_a_criterion_is_undecided_while_a_whole_level_has_no_run(tmp_path):
    accuracies = {"A": {ON: A}, "B": {ON: C}}
    criteria = ["accuracy(A) > 0.5", "p(A, B) < 0.2", "upload(A) <= upload(B)"]
    make_study(tmp_path, accuracies, criteria=criteria, grid=GRID["grid"])
    for verdict in verdicts(comparison_of(tmp_path)):
        assert [one.decision for _, one in verdict.judgements] == ["holds", "undecided"]
        assert verdict.decision == "undecided"


def test_a_run_of_other_settings_is_not_taken_for_a_cell(tmp_path):
    folder = make_study(tmp_path, {"A": A, "B": B})
    for path in folder.glob("A-seed*"):
        shutil.rmtree(path)
    right = {seed: make_run(folder, "A", seed, 0.9 + seed / 100, config={"model": {"lr": 0.1}}) for seed in (0, 1)}
    make_run(folder, "A", 1, 0.1, name="A-seed1-2", config={"model": {"lr": 0.5}})
    make_run(folder, "A", 2, 0.1, config={"model": {"lr": 0.5}})
    cells = []
    for seed in range(3):
        of_a = settings_hash({"seed_everything": seed, "model.lr": 0.1})
        of_b = settings_hash(config_of(folder / f"B-seed{seed}"))
        runs = {"A": {0: "A-seed0", 1: "A-seed1-2", 2: None}[seed], "B": f"B-seed{seed}"}
        for label, hashed in (("A", of_a), ("B", of_b)):
            cells.append({"name": f"{label}-seed{seed}", "hash": hashed, "status": "waiting", "run": runs[label]})
    (folder / "cells.json").write_text(json.dumps(cells))
    results = gather("study", tmp_path)
    assert [run.name for run in results.runs if run.label == "A"] == [path.name for path in right.values()]
    reasons = {entry.name: entry.reason for entry in results.uncounted if "other settings" in entry.reason}
    assert set(reasons) == {"A-seed1-2", "A-seed2"}


def test_which_way_a_metric_is_better():
    higher = ["final/accuracy", "final/auc_accuracy", "corrupted/fog", "corrupted/motion_blur", "corrupted/extra_accuracy",
              "fgsm/full_gradient_accuracy", "pgd/accuracy", "val/accuracy_worst_decile"]  # fmt: skip
    lower = ["test/loss", "fgsm/loss", "test/ece", "calibration/nll_scaled", "test/brier", "total/total_bytes",
             "time/round",
             "val/accuracy_std", "target/rounds", "target/megabytes", "latency/student_batch1_median", "train/loss",
             "bits/average"]  # fmt: skip
    assert {direction(name) for name in higher} == {1}
    assert {direction(name) for name in lower} == {-1}
    assert {direction(name) for name in ("calibration/temperature", "clients/trained", "final/best_val_round")} == {None}


def test_the_winner_under_corruption_is_the_most_accurate(tmp_path):
    folder = tmp_path / "study"
    for label, base in (("good", 0.8), ("bad", 0.2)):
        for seed in range(3):
            make_run(folder, label, seed, 0.9, tested={"corrupted/fog": base + seed / 100 * (label == "good")})
    assert Comparison(with_metric(gather("study", tmp_path), "corrupted/fog")).outcome({}).winner == "good"
    make_run(folder, "good", 3, 0.9, **{"mine/strange": 1.0})
    with pytest.raises(InputError, match="whether more of it is better"):
        with_metric(gather("study", tmp_path), "mine/strange")


@pytest.mark.parametrize(
    ("of_b", "left"),
    [
        ({}, {"A", "B"}),
        ({"chosen": "best", "tested_round": 3}, set()),  # nothing says which of the two was meant
        ({"tested_round": 3}, {"A"}),  # tested before the run went on
    ],
)
def test_tests_of_different_checkpoints_are_not_put_side_by_side(tmp_path, of_b, left):
    for seed in range(2):
        make_run(tmp_path / "study", "A", seed, 0.9, tested={"fgsm/accuracy": 0.5})
        make_run(tmp_path / "study", "B", seed, 0.9, tested={"fgsm/accuracy": 0.4}, **of_b)
    results = gather("study", tmp_path)
    assert {run.label for run in results.runs if "fgsm/accuracy" in run.metrics} == left
    said = {entry.name for entry in results.uncounted}
    assert said == {f"test.json of {label}-seed{seed}" for label in {"A", "B"} - left for seed in range(2)}
    assert len(results.runs) == 4


@pytest.mark.parametrize(
    "criterion", ["drop(A) < 0.1", "rounds(A) < 10", "megabytes(A) < 10", "p(A, A) < 0.05", "p(A, B) < 5", "p(A, B) < 0"]
)
def test_criteria_that_cannot_be_judged_are_refused_before_the_runs(tmp_path, criterion):
    path = tmp_path / "study.yaml"
    path.write_text(json.dumps({"study": "s", "seeds": [0], "methods": {"A": {}, "B": {}}, "criteria": [criterion]}))
    with pytest.raises(InputError, match="criterion"):
        Study.read(path)


def test_tags_that_only_some_runs_carry_are_no_axis(tmp_path):
    for seed in range(2):
        make_run(tmp_path / "tuned", "A", seed, 0.9, tags={"tuned_by": "tune_kd"})
        make_run(tmp_path / "tuned", "B", seed, 0.8)
        make_run(tmp_path / "swept", "A", seed, 0.8, tags={"noise": "on"})
    results = gather("tuned", tmp_path)
    assert results.study.grid == {}
    assert [run.name for run in results.runs] == ["A-seed0", "A-seed1", "B-seed0", "B-seed1"]
    assert list(gather("swept", tmp_path).study.grid) == ["noise"]


def test_one_label_of_different_settings_is_not_one_method(tmp_path, monkeypatch):
    """Neither in a folder nor in a store, whose parameters are text; and there a test of an earlier round does not count."""
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
    assert [(run.label, "fgsm/accuracy" in run.metrics) for run in results.runs] == [("A lr=0.1", True), ("A lr=0.5", False)]
    assert [entry.name for entry in results.uncounted] == ["test.json of A1"]


@pytest.mark.parametrize("value", [None, "0.9", [1]])
def test_a_final_accuracy_that_is_no_number_is_listed(tmp_path, value):
    folder = make_study(tmp_path, {"A": A, "B": B})
    file = folder / "B-seed1/metadata.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"final/accuracy": value}))
    results = gather("study", tmp_path)
    assert [(entry.name, "final/accuracy" in entry.reason) for entry in results.uncounted] == [("B-seed1", True)]


# -- the files ------------------------------------------------------------------------------------------------------------------------


def test_the_same_runs_give_the_same_report_byte_for_byte(tmp_path, figures):
    make_study(tmp_path / "runs", {"A": {ON: A, OFF: B}, "B": {ON: B, OFF: A}}, criteria=["time(A) <= 2 * time(B)"], **GRID)
    for out in ("one", "two"):
        compare("study", tmp_path / out, tmp_path / "runs")
    files = [path.relative_to(tmp_path / "one") for path in sorted((tmp_path / "one").rglob("*")) if path.is_file()]
    assert len(files) == 8 + 2 * 9
    assert Path("figures/degradation_over_rounds.png") in files
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes(), file


def test_reports_of_two_sweeps_differ_in_timings_and_provenance_alone(tmp_path, figures):
    for root, seconds in (("one", 0.1), ("two", 0.3)):
        make_study(tmp_path / root, {"A": A}, criteria=["time(A) <= 2", "accuracy(A) > 0.5"])
        for seed, accuracy in B.items():
            make_run(tmp_path / root / "study", "B", seed, accuracy, seconds=seconds)
        text = (tmp_path / root / "study/study.yaml").read_text()
        (tmp_path / root / "study/study.yaml").write_text(text.replace("A: {}", "A: {}\n  B: {}"))
        compare("study", tmp_path / root / "out", tmp_path / root)
    one, two = (report_of(tmp_path / root / "out") for root in ("one", "two"))
    assert comparable(one) == comparable(two)
    assert one["timings"] != two["timings"]
    assert "accuracy(A) > 0.5" in json.dumps(comparable(one))
    for file in ("runs.csv", "differences.csv", "tables.tex", "figures/paired_differences.png"):
        assert (tmp_path / "one/out" / file).read_bytes() == (tmp_path / "two/out" / file).read_bytes()
    texts = [(tmp_path / root / "out/report.md").read_text().partition("## Time")[0] for root in ("one", "two")]
    assert texts[0] == texts[1]


def test_nothing_is_overwritten_or_lost(tmp_path, monkeypatch, capsys):
    make_study(tmp_path / "runs", {"A": A, "B": B})
    out, args = (
        tmp_path / "out",
        ["compare", "--study", "study", "--root", str(tmp_path / "runs"), "--out", str(tmp_path / "out")],
    )
    out.mkdir()
    (out / "thesis.tex").write_text("mine")
    assert main(args) == 2  # not empty
    assert main([*args, "--overwrite", "true"]) == 2  # not a report
    assert [path.name for path in out.iterdir()] == ["thesis.tex"]
    (out / "thesis.tex").rename(tmp_path / "thesis.tex")
    assert main(args) == 0
    (tmp_path / "thesis.tex").rename(out / "thesis.tex")
    (out / "figures/mine.png").write_text("the user's own")
    (out / "figures/final_by_method-noise=on.png").write_text("of a level that is gone")
    with (out / "report.md").open("a") as file:
        file.write("![final_by_method-noise=on](<figures/final_by_method-noise=on.png>)\n")
    assert main(args) == 2
    before = sorted(path.relative_to(out) for path in out.rglob("*"))
    with monkeypatch.context() as patch:
        patch.setattr(command, "markdown", lambda *_: 1 / 0)  # fails when half is written
        with pytest.raises(ZeroDivisionError):
            main([*args, "--overwrite", "true"])
    assert sorted(path.relative_to(out) for path in out.rglob("*")) == before
    assert main([*args, "--overwrite", "true"]) == 0
    assert (out / "thesis.tex").read_text() == "mine"
    assert [path.name for path in (out / "figures").iterdir()] == ["mine.png"]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    assert "--out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--study", "stdy"], "write --study study"),
        (["--study", "study", "--metric", "final/acuracy"], "final/accuracy"),
        (["--study", "study", "--mlflow", "sqlite:///none.db"], "no such database"),
        (["--study", "empty"], "no finished run"),
        (["--study", "study", "--out", "runs/study/study.yaml"], "it is a file"),
        (["--study", "none.yaml"], "cannot be read"),
    ],
)
def test_bad_input_is_one_line_and_creates_nothing(tmp_path, monkeypatch, capsys, args, message):
    make_study(tmp_path / "runs", {"A": A, "B": B})
    (tmp_path / "runs/empty").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["compare", *(["--out", "out"] if "--out" not in args else []), *args]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_tables_are_escaped(tmp_path):
    make_study(tmp_path / "runs", {"A|b_c&d": A, "50%": B}, claimed={"A|b_c&d": {"accuracy": 0.9}, "elsewhere": "faster"})
    compare("study", tmp_path / "out", tmp_path / "runs")
    assert r"A|b\_c\&d &" in (tmp_path / "out/tables.tex").read_text()
    written = (tmp_path / "out/report.md").read_text()
    assert "| A\\|b_c&d | accuracy | 0.9 | 0.92 ± 0.02 |" in written
    assert "- elsewhere: faster" in written


def test_brackets_that_latex_would_read_as_an_argument(tmp_path):
    make_study(tmp_path / "runs", {"[A]": A, "*B": B})
    compare("study", tmp_path / "out", tmp_path / "runs")
    text = (tmp_path / "out/tables.tex").read_text()
    assert "\n{[}A] &" in text
    assert "\n{*}B &" in text


def test_a_link_is_written_through(tmp_path):
    make_study(tmp_path / "runs", {"A": A, "B": B})
    (tmp_path / "target").mkdir()
    link = tmp_path / "out"
    link.symlink_to(tmp_path / "target", target_is_directory=True)
    compare("study", link, tmp_path / "runs")
    compare("study", link, tmp_path / "runs", overwrite=True)
    assert link.is_symlink()
    assert (tmp_path / "target/report.json").is_file()


def test_figures_of_long_names_and_of_nothing(tmp_path, figures):
    """Names lie inside the figure, rounds are whole, and what shows no pair is left out and said."""
    names = ["FedMPQKD with a temperature of four and alpha 0.25", "FedMPQ_with_no_space_in_its_very_long_name_at_all_x"]
    make_study(tmp_path / "runs", dict(zip(names, (A, B), strict=True)))
    drawn = forest(comparison_of(tmp_path / "runs"), {})
    FigureCanvasAgg(drawn).draw()
    edges = [label.get_window_extent() for label in drawn.axes[0].get_yticklabels()]
    assert min(edge.x0 for edge in edges) >= 0
    assert drawn.axes[0].get_window_extent().width > 0.4 * drawn.bbox.width
    make_study(tmp_path / "runs", {"A": {0: 0.9}, "B": {1: 0.9}}, "unpaired")
    for seed, label in ((1, "A"), (0, "B")):
        shutil.rmtree(tmp_path / f"runs/unpaired/{label}-seed{seed}", ignore_errors=True)
    comparison = comparison_of(tmp_path / "runs", "unpaired")
    over = dict(command.figures(comparison))
    assert over["paired_differences"] is None
    assert all(tick == int(tick) for tick in over["accuracy_over_rounds"].axes[0].get_xticks())
    compare("unpaired", tmp_path / "out", tmp_path / "runs")
    assert not list((tmp_path / "out/figures").glob("paired*"))
    assert "Not drawn" in (tmp_path / "out/report.md").read_text()


# -- real runs ------------------------------------------------------------------------------------------------------------------------

CONFIG = Path(__file__).parent.parent / "configs/fedavg.yaml"
FIT = ["fit", "--config", str(CONFIG), "--trainer.max_rounds", "2", "--trainer.participation", "0.5", "--trainer.callbacks", "[]",
       "--trainer.experiment", "real", "--data.num_clients", "8", "--data.partition", "IID"]  # fmt: skip


def test_mlflow_and_directories_give_one_report_and_equal_methods_are_equal(tmp_path, monkeypatch):
    """FedProx with mu = 0 is FedAvg bit for bit: every difference is exactly 0, and that is no win."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for seed in "01":
        for label, flags in (("FedAvg", []), ("FedProx", ["--model", "FedProx", "--model.mu", "0"])):
            tags = ["--trainer.tags", json.dumps({"study": "real", "label": label})]
            assert main([*FIT, *flags, *tags, "--seed_everything", seed, "--trainer.run_name", f"{label}-seed{seed}"]) == 0
    compare("real", Path("from_folder"))
    compare("real", Path("from_store"), mlflow="sqlite:///mlflow.db")
    folder, store = report_of(tmp_path / "from_folder"), report_of(tmp_path / "from_store")
    assert comparable(folder) == comparable(store)
    for name in ("runs.csv", "differences.csv", "timings.csv"):
        assert Path("from_folder", name).read_text() == Path("from_store", name).read_text()
    real = rows_of(tmp_path / "runs/real/FedAvg-seed0/metrics.csv")[0]
    assert set(history_of(0.5)[0]) - {"test/ece"} <= set(real)  # the form of the synthetic runs is the true one
    assert folder["gap"]["differences"] == [0.0, 0.0]
    assert folder["gap"]["p_t"] == 1.0
    assert folder["winner"] is None
