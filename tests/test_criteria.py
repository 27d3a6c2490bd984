"""Criteria of a study: by hand, refused, undecided."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from compared import GRID, OFF, ON, A, B, C, comparison_of, decisions, report_of
from synthetic_runs import make_run, make_study

from fl_lightning.__main__ import main
from fl_lightning.errors import InputError
from fl_lightning.study.metric_names import direction
from fl_lightning.study.report.compare import compare
from fl_lightning.study.report.verdicts import verdicts
from fl_lightning.study.results.gather import check_comparable, gather
from fl_lightning.study.spec.criteria import parse
from fl_lightning.study.spec.plan import Study

pytestmark = pytest.mark.usefixtures("figures_only_where_looked_at")


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
    text = [
        "accuracy(KD a=1) - accuracy(KD-a) >= -0.005",
        "accuracy('KD a=1') > accuracy(KD)",
        "p(KD a=1, KD) <= 0.2",
    ]
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
        "not accuracy(A) > 0",
        "accuracy(A) > 0 and accuracy(B)",
        "(accuracy(A) > 0) > (accuracy(B) > 0)",
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


def test_degradation_is_paired_and_every_level_counts(tmp_path):
    """Drops by hand: A 0.01, 0.02, 0.03; B 0.10, 0.11, 0.14."""
    clean_b = {0: 0.95, 1: 0.97, 2: 0.99}
    accuracies = {
        "A": {ON: A, OFF: {s: a + 0.01 * (s + 1) for s, a in A.items()}},
        "B": {ON: {s: b - 0.10 - 0.01 * s**2 for s, b in clean_b.items()}, OFF: clean_b},
    }
    criteria = [
        "drop(A) - drop(B) <= -0.05",
        "drop(A) <= 0.005",
        "accuracy(A) >= 0.85",
        "accuracy(A) < accuracy(B)",
    ]
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


def test_what_test_measured_is_compared_and_what_it_did_not_is_undecided(tmp_path):
    criteria = ['metric("fgsm/accuracy", A) > 0.1', 'metric("pgd/accuracy", A) > 0.1']
    folder = make_study(tmp_path / "runs", {"A": A, "B": B}, criteria=criteria, test=["fgsm"])
    for seed in range(3):
        shutil.rmtree(folder / f"A-seed{seed}")
        make_run(folder, "A", seed, 0.9, tested={"fgsm/accuracy": 0.5 + 0.01 * seed, "test/ece": 0.7})
    compare("study", tmp_path / "out", tmp_path / "runs")
    report = report_of(tmp_path / "out")
    assert [entry["verdict"] for entry in report["criteria"]] == ["holds", "undecided"]
    assert (
        report["levels"][0]["methods"]["A"]["metrics"]["test/ece"]["mean"] == 0.1
    )  # the round's own, not another checkpoint's
    assert "FGSM (%)" in (tmp_path / "out/report.md").read_text()


def test_a_criterion_is_undecided_while_a_whole_level_has_no_run(tmp_path):
    accuracies = {"A": {ON: A}, "B": {ON: C}}
    criteria = ["accuracy(A) > 0.5", "p(A, B) < 0.2", "upload(A) <= upload(B)"]
    make_study(tmp_path, accuracies, criteria=criteria, grid=GRID["grid"])
    for verdict in verdicts(comparison_of(tmp_path)):
        assert [one.decision for _, one in verdict.judgements] == ["holds", "undecided"]
        assert verdict.decision == "undecided"


def test_which_way_a_metric_is_better():
    higher = ["final/accuracy", "final/auc_accuracy", "corrupted/fog", "corrupted/motion_blur", "corrupted/extra_accuracy",
              "fgsm/full_gradient_accuracy", "pgd/accuracy", "val/accuracy_worst_decile"]  # fmt: skip
    lower = ["test/loss", "fgsm/loss", "test/ece", "calibration/nll_scaled", "test/brier", "total/total_bytes",
             "time/round",
             "val/accuracy_std", "target/rounds", "target/megabytes", "latency/student_batch1_median", "train/loss",
             "bits/average"]  # fmt: skip
    assert {direction(name) for name in higher} == {1}
    assert {direction(name) for name in lower} == {-1}
    assert {
        direction(name) for name in ("calibration/temperature", "clients/trained", "final/best_val_round")
    } == {None}


@pytest.mark.parametrize(
    "criterion",
    ["drop(A) < 0.1", "rounds(A) < 10", "megabytes(A) < 10", "p(A, A) < 0.05", "p(A, B) < 5", "p(A, B) < 0"],
)
def test_criteria_that_cannot_be_judged_are_refused_before_the_runs(tmp_path, criterion):
    path = tmp_path / "study.yaml"
    path.write_text(
        json.dumps({"study": "s", "seeds": [0], "methods": {"A": {}, "B": {}}, "criteria": [criterion]})
    )
    with pytest.raises(InputError, match="criterion"):
        Study.read(path)
