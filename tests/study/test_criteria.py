"""Criteria of a study: by hand, refused, undecided."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from compared import GRID, OFF, ON, A, B, C, comparison_of, decisions, report_of
from refusals import refused
from synthetic_runs import make_run, make_study

from fl_lightning.__main__ import main
from fl_lightning.errors import InputError
from fl_lightning.metrics import final_summary
from fl_lightning.run.tables import numbers
from fl_lightning.study.metric_names import CLOCKS, KNOWN, direction
from fl_lightning.study.plan.criteria import parse
from fl_lightning.study.plan.study import Study
from fl_lightning.study.report.compare import compare
from fl_lightning.study.report.comparison import Comparison
from fl_lightning.study.report.document import report as document
from fl_lightning.study.report.looks import is_of_seeds
from fl_lightning.study.report.markdown import markdown
from fl_lightning.study.report.verdicts import verdicts
from fl_lightning.study.results.gather import check_comparable, gather

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
        # or and and: A - B >= 0.045 fails, >= -0.005 holds, >= 0 is undecided
        ("gap(A, B) >= 0.045 or gap(A, B) >= -0.005", "holds"),
        ("gap(A, B) >= 0 or gap(A, B) >= -0.005", "holds"),
        ("gap(A, B) >= 0 or gap(A, B) >= 0.045", "undecided"),
        ("gap(A, B) >= 0.045 or accuracy(A) < 0.5", "fails"),
        ("gap(A, B) >= -0.005 and gap(A, B) >= 0.045", "fails"),
        ("gap(A, B) >= -0.005 and gap(A, B) >= 0", "undecided"),
        ("gap(A, B) >= -0.005 and p(A, C) <= 0.2", "holds"),
        ("gap(A, B) >= 0.045 and accuracy(A) > 0 or (gap(A, B) >= -0.005)", "holds"),
        # t of A - B is 0.02 / (0.01 / sqrt 3) = 3.46, one-sided p 0.037; two-sided 0.074
        ("no_increase(accuracy, A, B)", "fails"),
        ("no_increase(accuracy, B, A)", "holds"),
        # A - 1.05 B = -0.0345, -0.025, -0.0155: mean -0.025, sd 0.0095, one-sided bound -0.025 +
        # 2.92 x 0.00548
        ("no_increase(accuracy, A, B, 0.05)", "holds"),
        ("no_increase(accuracy, A, B, 0.03)", "undecided"),
        ("no_increase(accuracy, A, C, 0.01)", "fails"),
        ("no_increase(upload, A, B)", "holds"),  # counted, the same in every seed
        ('no_increase("final/accuracy", A, B)', "fails"),
        # over the rounds: val/accuracy is 0.51, 0.52 ... 0.55 in every seed, bits/average 4 in 5
        # rounds
        ('max("test/accuracy", A) >= 0.85', "holds"),
        ('min("test/accuracy", A) >= 0.2', "fails"),  # a fifth of the last: 0.18, 0.184, 0.188
        ('sum("bits/average", A) >= 20', "holds"),
        ('sum("bits/average", A) > 20', "fails"),
        ('mean("val/accuracy", A) < 0.6', "undecided"),  # estimated, without a spread
        # test/accuracy over val/accuracy grows with the rounds: 0.2 a / 0.51 ... a / 0.55
        ('max("test/accuracy / val/accuracy", A) > 1.5', "holds"),
        ('min("test/accuracy / val/accuracy", A) > 0.5', "fails"),
        ('last("test/accuracy", A) - accuracy(A) <= 0.01 * accuracy(A)', "holds"),
    ],
)
def test_criteria_by_hand(tmp_path, criterion, decision):
    assert decisions(tmp_path, criterion) == [decision]


def test_a_margin_is_of_the_size_of_a_metric_below_zero(tmp_path):
    """A log-likelihood of -5 is no increase over -4, and a wider margin is easier to keep."""
    claims = {
        'no_increase("test/loss", A, B, 0.5)': "holds",
        'no_increase("test/loss", B, A)': "fails",
        'no_increase("test/loss", B, A, 0.1)': "fails",
        'no_increase("test/loss", B, A, 0.5)': "holds",
    }
    folder = make_study(tmp_path, {"A": A, "B": B}, criteria=[*claims])
    for label, loss in (("A", -5.0), ("B", -4.0)):
        for seed, path in enumerate(sorted(folder.glob(f"{label}-*/metrics.csv"))):
            rows = numbers(path.read_bytes())
            rows = [row | {"test/loss": loss + 0.01 * seed * loss} for row in rows]
            lines = [",".join(map(str, some)) for some in (rows[0], *(r.values() for r in rows))]
            path.write_text("\n".join([*lines, ""]))
            metadata = json.loads((path.parent / "metadata.json").read_text())
            metadata |= final_summary(rows) | {"final/loss": rows[-1]["test/loss"]}
            (path.parent / "metadata.json").write_text(json.dumps(metadata))
    assert {one.criterion.text: one.decision for one in verdicts(comparison_of(tmp_path))} == claims


def test_numbers_of_a_criterion(tmp_path):
    make_study(tmp_path, {"A": A, "B": B}, criteria=["accuracy(A) - 0.01 >= accuracy(B)"])
    [(_, one)] = verdicts(comparison_of(tmp_path))[0].judgements
    half = 4.302652729911275 * 0.01 / np.sqrt(3)
    assert (one.left, one.right, one.difference) == pytest.approx((0.91, 0.90, 0.01))
    assert (one.low, one.high) == pytest.approx((0.01 - half, 0.01 + half))
    assert one.seeds == (0, 1, 2)


@pytest.mark.parametrize("selection", ["last", "best_val"])
def test_epsilon_is_that_of_the_whole_run_and_needs_no_spread(selection, tmp_path):
    """It follows from the settings, so it is equal in all seeds; who lets validation choose has
    seen all rounds."""
    texts = ['metric("privacy/epsilon", A) < 2.5', 'max("privacy/epsilon", A) <= 2.5']
    folder = make_study(tmp_path, {"A": A, "B": B}, criteria=texts, selection=selection)
    for path in folder.glob("A-*/metrics.csv"):
        rows = numbers(path.read_bytes())
        rows = [
            {**row, "privacy/epsilon": 0.5 * number} for number, row in enumerate(rows, start=1)
        ]
        rows[1]["val/accuracy"] = 0.95
        lines = [",".join(map(str, some)) for some in (rows[0], *(row.values() for row in rows))]
        path.write_text("\n".join([*lines, ""]))
        metadata = json.loads((path.parent / "metadata.json").read_text())
        metadata |= final_summary(rows)
        assert metadata["final/best_val_round"] == 2
        (path.parent / "metadata.json").write_text(json.dumps(metadata))
    comparison = comparison_of(tmp_path)
    assert [verdict.decision for verdict in verdicts(comparison)] == ["fails", "holds"]


def test_joules_by_a_table_may_be_the_same_in_all_seeds(tmp_path):
    """They are tokens by a table, so a ladder costs the same with every seed that finds it."""
    texts = [
        f'last("energy/joules", A) {relation} last("energy/joules", B)'
        for relation in ("<=", "<", ">")
    ]
    folder = make_study(tmp_path, {"A": A, "B": B}, criteria=texts)
    for label, joules in (("A", 0.2), ("B", 0.3)):
        for path in folder.glob(f"{label}-*/metrics.csv"):
            header, *rows = path.read_text().splitlines()
            path.write_text(
                "\n".join([f"{header},energy/joules", *(f"{row},{joules}" for row in rows), ""])
            )
    assert [verdict.decision for verdict in verdicts(comparison_of(tmp_path))] == [
        "holds",
        "holds",
        "fails",
    ]


@pytest.mark.parametrize(
    ("metric", "found", "decisions"),
    [  # of A and B in three seeds
        # fewer in all seeds, by chance in one of 8
        ("clients/late", ([3, 4, 2], [4, 5, 40]), ["undecided"] * 3),
        ("clients/late", ([3, 4, 2], [13, 15, 11]), ["holds", "fails", "undecided"]),
        ("clients/late", ([0, 0, 0], [2, 2, 2]), ["holds", "fails", "holds"]),
        # two fewer in all seeds
        ("clients/late", ([1, 4, 2], [3, 6, 4]), ["holds", "fails", "undecided"]),
        # what a protocol promises of every run
        ("privacy/epsilon", ([3, 4, 2], [4, 5, 40]), ["holds", "fails", "undecided"]),
        ("comm/sent_bytes", ([1, 0, 2], [4, 5, 40]), ["holds", "fails", "holds"]),
    ],
)
def test_counts_over_rounds_need_an_interval_where_seeds_differ(tmp_path, metric, found, decisions):
    a, b = (f'sum("{metric}", {label})' for label in "AB")
    folder = make_study(
        tmp_path, {"A": A, "B": B}, criteria=[f"{a} < {b}", f"{a} >= {b}", f"{a} <= 2"]
    )
    for label, counts in zip("AB", found, strict=True):
        for seed, count in enumerate(counts):
            path = folder / f"{label}-seed{seed}/metrics.csv"
            header, *rows = path.read_text().splitlines()
            added = [f"{row},{count if n == 0 else 0}" for n, row in enumerate(rows)]
            path.write_text("\n".join([f"{header},{metric}", *added, ""]))
    assert [one.decision for one in verdicts(comparison_of(tmp_path))] == decisions


def test_accuracies_at_other_bits_are_no_counts(tmp_path):
    """They are the same in all three seeds, and have no interval; a number of bits would hold."""
    texts = [f'last("bits/{name}", A) > 0.5' for name in ("at/2/accuracy", "moved")]
    folder = make_study(tmp_path, {"A": A, "B": B}, criteria=texts)
    for path in folder.glob("*/metrics.csv"):
        header, *rows = path.read_text().splitlines()
        added = [f"{row},0.501,0.501" for row in rows]
        path.write_text("\n".join([f"{header},bits/at/2/accuracy,bits/moved", *added, ""]))
    assert [one.decision for one in verdicts(comparison_of(tmp_path))] == ["undecided", "holds"]


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
        "-" * 400 + "1 > accuracy(A)",
        "accuracy(A) > 0 " + "# " * 300,
        "",
        "import os",
        "accuracy(A) > 0; accuracy(B) > 0",
        "accuracy(A) >",
        "accuracy(A) > 0 or open('pwned', 'w')",
        "no_increase(upload, A)",
        "no_increase(upload, A, A)",
        "no_increase(uplaod, A, B)",
        "no_increase('upload', A, B)",
        "no_increase(upload, A, B, -0.1)",
        "no_increase(upload, A, B, A)",
        "no_increase(upload, A, B) > 0",
        "no_increase(open('pwned', 'w'), A, B)",
        "sum(A) > 0",
        "max('bits/moved') > 0",
    ],
)
def test_nothing_but_arithmetic_is_a_criterion(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="criterion"):
        parse(text, ["A", "B"])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "level", ["0.50", "0.5", "1e-3", "on", "1", "dirichlet-01", "2 labels", "it's", "a, b"]
)
def test_a_level_is_named_as_the_study_writes_it(level):
    """Whether it is a name or a number of Python or neither, alone or in quotes."""
    grid = {"beta": {level: 1, "off": 2}, "noise": {"0.5": 1}}
    for written in (level, repr(level)):
        text = f"accuracy(A, beta={written}, noise = 0.5) - auc(A, noise=0.5, beta={written}) > 0"
        found = parse(text, ["A"], grid)
        assert [one.at for one in found.quantities] == [
            (("beta", level), ("noise", "0.5")),
            (("noise", "0.5"), ("beta", level)),
        ]
        assert found.condition.text.startswith(f"accuracy(A, beta={level}, noise=0.5) - ")
    with refused("beta=half", "write one of them"):
        parse("accuracy(A, beta=half) > 0", ["A"], grid)


@pytest.mark.parametrize(
    ("criterion", "near"),
    [
        ("acuracy(A) > 0", "accuracy"),
        ("accuracy(Aa) > 0", "write A"),
        ('metric("test/ecce", A) > 0', "test/ece"),
        ('sum("bits/mooved", A) > 0', "bits/average"),
        ('max("test/ecce / test/accuracy", A) > 0', "write test/ece"),
        ("drop(A) < 0.1", "degradation"),
        ("rounds(A) < 10", "target_accuracy"),
        ("p(A, A) < 0.05", "p compares two"),
        ("no_increase(upload, A, B, noise=on)", "it is about the level that is judged"),
    ],
)
def test_an_unknown_name_is_told_the_nearest(tmp_path, capsys, criterion, near):
    make_study(tmp_path, {"A": A, "B": B}, criteria=[criterion])
    assert (
        main(
            ["compare", "--study", "study", "--root", str(tmp_path), "--out", str(tmp_path / "out")]
        )
        == 2
    )
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
                make_run(
                    folder, label, seed, 0.9, levels={"noise": "off"}, partition=f"{seed}" * 64
                )
    check_comparable(gather("free", tmp_path))
    with pytest.raises(InputError, match="partition"):
        check_comparable(gather("paired", tmp_path))


def test_methods_are_compared_on_the_same_examples(tmp_path):
    """Runs of one data set whose files changed in between are refused; runs of before say nothing
    of it."""
    first, second = "a" * 64, "b" * 64
    folder = make_study(tmp_path, {"A": A, "B": B}, "study")
    check_comparable(gather("study", tmp_path))
    for label, content in (("A", first), ("B", second)):
        shutil.rmtree(folder / f"{label}-seed0")
        make_run(folder, label, 0, 0.9, content=content)
        if label == "A":
            check_comparable(gather("study", tmp_path))
    with pytest.raises(
        InputError,
        match=r"A-seed0 has content of the data aaaaaaaaaaaa, B-seed0 has .* bbbbbbbbbbbb;",
    ):
        check_comparable(gather("study", tmp_path))
    assert (
        main(
            ["compare", "--study", "study", "--root", str(tmp_path), "--out", str(tmp_path / "out")]
        )
        == 2
    )
    assert not (tmp_path / "out").exists()
    levels = make_study(tmp_path, {"A": {ON: A, OFF: A}, "B": {ON: B, OFF: B}}, "levels", **GRID)
    for label in "AB":
        for level, content in (("on", first), ("off", second)):
            shutil.rmtree(levels / f"{label}-noise={level}-seed0")
            make_run(levels, label, 0, 0.9, levels={"noise": level}, content=content)
    check_comparable(gather("levels", tmp_path))


def test_what_test_measured_is_compared_and_what_it_did_not_is_undecided(tmp_path):
    criteria = ['metric("fgsm/accuracy", A) > 0.1', 'metric("pgd/accuracy", A) > 0.1']
    folder = make_study(tmp_path / "runs", {"A": A, "B": B}, criteria=criteria, test=["fgsm"])
    for seed in range(3):
        shutil.rmtree(folder / f"A-seed{seed}")
        make_run(
            folder, "A", seed, 0.9, tested={"fgsm/accuracy": 0.5 + 0.01 * seed, "test/ece": 0.7}
        )
    compare("study", tmp_path / "out", tmp_path / "runs")
    report = report_of(tmp_path / "out")
    assert [entry["verdict"] for entry in report["criteria"]] == ["holds", "undecided"]
    # the round's own, not another checkpoint's
    assert report["levels"][0]["methods"]["A"]["metrics"]["test/ece"]["mean"] == 0.1
    assert "FGSM (%)" in (tmp_path / "out/report.md").read_text()


def test_a_criterion_is_undecided_while_a_whole_level_has_no_run(tmp_path):
    accuracies = {"A": {ON: A}, "B": {ON: C}}
    criteria = ["accuracy(A) > 0.5", "p(A, B) < 0.2", "upload(A) <= upload(B)"]
    make_study(tmp_path, accuracies, criteria=criteria, grid=GRID["grid"])
    for verdict in verdicts(comparison_of(tmp_path)):
        assert [one.decision for _, one in verdict.judgements] == ["holds", "undecided"]
        assert verdict.decision == "undecided"


def test_a_clock_decides_by_a_premise_and_by_the_metric_too(tmp_path):
    """No seed is added for such a criterion, and it stands in the part of the report on time."""
    timed = [{"name": "x", "criterion": "accuracy(A) > 0.5"}, "gap(A, B) > 0"]
    criteria = [*timed, "accuracy(B) > 0.5"]
    premises = [{"name": "fast", "criterion": "time(A) <= 0.001", "needed_by": ["x"]}]
    make_study(
        tmp_path, {"A": A, "B": B}, criteria=criteria, premises=premises, metric="time/round"
    )
    comparison = comparison_of(tmp_path)
    found = verdicts(comparison)
    assert [(one.is_timing, is_of_seeds(one)) for one in found] == [(True, False)] * 2 + [
        (False, True)
    ]
    counted, _, timed_part = markdown(comparison, []).partition("## Time\n")
    assert "Criteria that no clock decides: 1 holds" in counted
    assert "fast" not in counted
    assert "fast: `time(A) <= 0.001`" in timed_part
    assert "# Time" not in timed_part  # a heading of its own, below it
    told = document(comparison)
    assert [len(told[key]) for key in ("premises", "criteria")] == [0, 1]
    assert [len(told["timings"][key]) for key in ("premises", "criteria")] == [1, 2]


LEVELS = [(("bits", str(level)),) for level in range(5)]


def five_levels(tmp_path, holds: int, **keys) -> str:
    """A is better than B at the first so many of five levels, and equal, but for noise, at the
    others."""
    worse = {seed: value - 0.1 - 0.001 * seed for seed, value in A.items()}
    accuracies = {
        "A": dict.fromkeys(LEVELS, A),
        "B": {level: worse if place < holds else B for place, level in enumerate(LEVELS)},
    }
    criterion = {
        "name": "gain",
        "criterion": "accuracy(A) - accuracy(B) >= 0.05",
        **keys.pop("entry", {}),
    }
    grid = {"bits": {str(level): {} for level in range(5)}}
    make_study(tmp_path, accuracies, criteria=[criterion], grid=grid, **keys)
    return verdicts(comparison_of(tmp_path))[0].decision


def test_quantities_at_levels_that_the_criterion_names(tmp_path):
    """A drops by 0.1 from noise off to on, B by 0.02 to 0.03: judged once, or once at each other
    level."""
    accuracies = {
        "A": {OFF: A, ON: {seed: value - 0.1 - 0.001 * seed for seed, value in A.items()}},
        "B": {OFF: A, ON: {seed: value - 0.02 - 0.005 * seed for seed, value in A.items()}},
    }
    criteria = [
        "accuracy(A, noise=off) - accuracy(A, noise=on) > accuracy(B, noise=off) - accuracy(B, noise=on)",
        "gap(A, B, noise=on) > gap(B, A, noise=on)",
        "accuracy(A) > 0.5",
    ]
    make_study(tmp_path, accuracies, criteria=criteria, grid=GRID["grid"])
    found = verdicts(comparison_of(tmp_path))
    assert [[dict(levels) for levels, _ in verdict.judgements] for verdict in found] == [
        [{}],
        [{}],
        [{"noise": "on"}, {"noise": "off"}],
    ]
    assert [verdict.decision for verdict in found] == ["holds", "fails", "holds"]
    assert found[0].judgements[0][1].left == pytest.approx(0.101)


@pytest.mark.parametrize(
    ("criterion", "instead"),
    [
        ("accuracy(A, noise=loud) > 0", "write one of them"),
        ("accuracy(A, nois=on) > 0", "write noise"),
        ("accuracy(A, noise=on) > accuracy(A)", "name its level of noise too"),
        ("p(A, B, noise=on) < 0.05", "leave noise out"),
        ("accuracy(A, **noise) > 0", "write noise"),
    ],
)
def test_levels_that_cannot_be_named(tmp_path, criterion, instead):
    path = tmp_path / "study.yaml"
    entries = {"study": "s", "seeds": [0], "methods": {"A": {}, "B": {}}, "grid": GRID["grid"]}
    path.write_text(json.dumps({**entries, "criteria": [criterion]}))
    with pytest.raises(InputError) as refused:
        Study.read(path)
    assert refused.value.instead == instead


@pytest.mark.parametrize(
    ("holds", "share", "decision"),
    [(5, 1.0, "holds"), (4, 1.0, "fails"), (4, 0.8, "holds"), (3, 0.8, "fails"), (3, 0.6, "holds")],
)
def test_a_share_of_the_levels(tmp_path, holds, share, decision):
    assert five_levels(tmp_path, holds, entry={"share": share}) == decision


@pytest.mark.parametrize(
    ("premises", "decision"),
    [
        (['sum("bits/average", B) >= 20'], "holds"),
        (['sum("bits/average", B) >= 21'], "not tested"),
        ([{"name": "off the ceiling", "criterion": "accuracy(A) <= 0.85"}], "not tested"),
        (["accuracy(A) <= 0.925"], "undecided"),  # 0.92, interval [0.87, 0.97]
        (["accuracy(A) <= 0.925", "accuracy(A) <= 0.85"], "not tested"),
        ([{"criterion": "accuracy(A) <= 0.85", "needed_by": ["other"]}], "holds"),
        ([{"criterion": "accuracy(A) <= 0.85", "needed_by": ["gap"]}], "not tested"),
    ],
)
def test_a_criterion_whose_premise_fails_is_not_tested(tmp_path, premises, decision):
    criteria = [
        {"name": "gap", "criterion": "gap(A, C) >= 0.05"},
        {"name": "other", "criterion": "gap(A, B) < 9"},
    ]
    make_study(tmp_path / "runs", {"A": A, "B": B, "C": C}, criteria=criteria, premises=premises)
    comparison = comparison_of(tmp_path / "runs")
    assert verdicts(comparison)[0].decision == decision
    compare("study", tmp_path / "out", tmp_path / "runs")
    text = (tmp_path / "out/report.md").read_text()
    assert "## Premises" in text
    assert f"| gap: `gap(A, C) >= 0.05` | **{decision}** |" in text
    first = report_of(tmp_path / "out")["criteria"][0]
    assert first["verdict"] == decision
    assert ("alone it holds" in first["levels"][0]["reason"]) == (decision == "not tested")


def test_a_premise_counts_at_its_own_level(tmp_path):
    """It fails at the two levels where B is as good as A: the criterion is tested at three of
    five."""
    premise = ["accuracy(B) <= 0.87"]
    assert five_levels(tmp_path / "all", 3, premises=premise) == "not tested"
    assert five_levels(tmp_path / "60 %", 3, premises=premise, entry={"share": 0.6}) == "holds"
    assert five_levels(tmp_path / "none", 0, premises=premise, entry={"share": 0.2}) == "not tested"
    found = verdicts(comparison_of(tmp_path / "all"))[0]
    assert [one.decision for _, one in found.judgements] == ["holds"] * 3 + ["not tested"] * 2


def test_a_criterion_that_names_levels_needs_the_premises_of_these_alone(tmp_path):
    found = {}
    for bits in ("0", "4"):  # at 4 the premise fails
        entry = {"criterion": f"accuracy(A, bits={bits}) >= accuracy(B, bits=0) + 0.05"}
        premise = ["accuracy(B) <= 0.87"]
        found[bits] = five_levels(tmp_path / bits, 3, premises=premise, entry=entry)
    assert found == {"0": "holds", "4": "not tested"}


def test_the_interval_decides_and_may_be_another(tmp_path):
    """A wider one, as a confidence sequence is, leaves open what the t interval decides."""
    make_study(
        tmp_path,
        {"A": A, "B": B},
        criteria=["gap(A, B) >= -0.005", "no_increase(accuracy, B, A, 0.01)"],
    )
    results = gather("study", tmp_path)
    assert all(verdict.decision != "undecided" for verdict in verdicts(Comparison(results)))
    wide = Comparison(results, interval=lambda values, level=0.05: (-np.inf, np.inf))
    assert [verdict.decision for verdict in verdicts(wide)] == ["undecided", "undecided"]


def test_names_of_criteria_and_premises_fit_together(tmp_path):
    path = tmp_path / "study.yaml"
    start = {"study": "s", "seeds": [0], "methods": {"A": {}, "B": {}}}
    one = {"name": "gain", "criterion": "accuracy(A) > 0"}
    for keys, said in [
        ({"criteria": [one, one]}, "each name is given once"),
        (
            {
                "criteria": [one],
                "premises": [{"criterion": "accuracy(A) > 0", "needed_by": ["gian"]}],
            },
            "write gain",
        ),
        ({"criteria": [{"name": "gain"}]}, "criterion"),
        ({"criteria": [{**one, "share": 1.5}]}, "share"),
        ({"premises": [{"criterion": "accuracy(C) > 0"}]}, "methods of the study are A, B"),
        ({"premises": [{"criterion": "drop(A) > 0"}]}, "a drop needs a degradation"),
        ({"criteria": [3]}, "criteria"),
    ]:
        path.write_text(json.dumps(start | keys))
        with pytest.raises(InputError, match=said):
            Study.read(path)
    premise = {"criterion": "accuracy(A) > 0", "needed_by": ["gain"], "text": "it learns"}
    path.write_text(
        json.dumps(start | {"criteria": [{**one, "share": 0.8}], "premises": [premise]})
    )
    study = Study.read(path)
    path.write_text(study.to_yaml())
    again = Study.read(path)
    assert (again.criteria, again.premises) == (study.criteria, study.premises)
    assert again.parsed_criteria()[0].share == 0.8
    assert again.parsed_premises()[0].needed_by == ("gain",)


def test_which_way_a_metric_is_better():
    higher = ["final/accuracy", "final/auc_accuracy", "corrupted/fog", "corrupted/motion_blur", "corrupted/extra_accuracy",
              "fgsm/full_gradient_accuracy", "pgd/accuracy", "val/accuracy_worst_decile"]  # fmt: skip
    lower = ["test/loss", "fgsm/loss", "test/ece", "calibration/nll_scaled", "test/brier", "total/total_bytes",
             "time/round",
             "val/accuracy_std", "target/rounds", "target/megabytes", "latency/student_batch1_median", "train/loss",
             "bits/average"]  # fmt: skip
    higher += ["router/purity", "test/reward_margin"]
    lower += ["clock/idle", "clients/late", "clients/offline", "membership/auc", "membership/tpr"]
    assert {direction(name) for name in higher} == {1}
    assert {direction(name) for name in lower} == {-1}
    neither = {"final/best_val_round", "val/clients_min5", "experts/active", "clients/asked"}
    assert {one.metric for one in (*KNOWN, *CLOCKS) if direction(one.metric) is None} == neither
    assert {
        direction(name)
        for name in ("calibration/temperature", "clients/trained", "final/best_val_round")
    } == {None}


@pytest.mark.parametrize(
    "criterion",
    [
        "drop(A) < 0.1",
        "rounds(A) < 10",
        "megabytes(A) < 10",
        "p(A, A) < 0.05",
        "p(A, B) < 5",
        "p(A, B) < 0",
    ],
)
def test_criteria_that_cannot_be_judged_are_refused_before_the_runs(tmp_path, criterion):
    path = tmp_path / "study.yaml"
    path.write_text(
        json.dumps(
            {"study": "s", "seeds": [0], "methods": {"A": {}, "B": {}}, "criteria": [criterion]}
        )
    )
    with pytest.raises(InputError, match="criterion"):
        Study.read(path)
