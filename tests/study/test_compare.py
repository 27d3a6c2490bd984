"""``compare`` on runs whose truth is known: planted effects, planted nulls, damaged and mixed
folders."""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from compared import GRID, OFF, ON, A, B, comparable, comparison_of, report_of
from matplotlib.backends.backend_agg import FigureCanvasAgg
from outcomes import rows_of
from places import ROOT
from rich.console import Console
from synthetic_runs import history_of, make_run, make_study

from fl_lightning.__main__ import main
from fl_lightning.errors import InputError
from fl_lightning.metrics import final_summary
from fl_lightning.study import statistics
from fl_lightning.study.report import compare as command
from fl_lightning.study.report.compare import compare
from fl_lightning.study.report.comparison import Comparison
from fl_lightning.study.report.figures import forest
from fl_lightning.study.report.tables import results as results_of
from fl_lightning.study.results.gather import gather, with_metric

pytestmark = pytest.mark.usefixtures("figures_only_where_looked_at")


def test_the_report_agrees_with_scipy_on_the_csv_it_wrote(tmp_path):
    generator = np.random.default_rng(0)
    seeds = range(6)
    accuracies = {
        label: {s: 0.8 + 0.02 * s + float(generator.normal(0, 0.01)) for s in seeds}
        for label in "ABCD"
    }
    make_study(tmp_path / "runs", accuracies, proposed=["A"])
    compare("study", tmp_path / "out", tmp_path / "runs")
    runs = rows_of(tmp_path / "out/runs.csv")
    values = {
        label: [float(row["final/accuracy"]) for row in runs if row["method"] == label]
        for label in "ABCD"
    }
    found = [
        row
        for row in rows_of(tmp_path / "out/differences.csv")
        if row["metric"] == "final/accuracy"
    ]
    assert [(row["a"], row["b"]) for row in found] == [("A", "B"), ("A", "C"), ("A", "D")]
    for row in found:
        x = np.subtract(values[row["a"]], values[row["b"]])
        t = scipy.stats.ttest_rel(values[row["a"]], values[row["b"]])
        assert (float(row["t"]), float(row["p_t"])) == pytest.approx((t.statistic, t.pvalue))
        assert (float(row["low"]), float(row["high"])) == pytest.approx(
            tuple(t.confidence_interval(0.95))
        )
        assert float(row["p_wilcoxon"]) == pytest.approx(scipy.stats.wilcoxon(x).pvalue)
        bootstrap = scipy.stats.bootstrap(
            (x,), np.mean, n_resamples=20_000, method="BCa", rng=1
        ).confidence_interval
        assert (float(row["bootstrap_low"]), float(row["bootstrap_high"])) == pytest.approx(
            tuple(bootstrap), abs=2e-3
        )
    p = sorted((float(row["p_t"]), float(row["p_holm"])) for row in found)
    steps = [(3 - i) * raw for i, (raw, _) in enumerate(p)]
    assert [corrected for _, corrected in p] == pytest.approx(
        [min(1, max(steps[: i + 1])) for i in range(3)]
    )
    level = report_of(tmp_path / "out")["levels"][0]
    assert level["methods"]["B"]["metrics"]["final/accuracy"]["std"] == pytest.approx(
        np.std(values["B"], ddof=1)
    )


def planted(root: Path, trial: int, effect: float, seeds: int, baselines: int) -> Comparison:
    """Baselines and a proposed method that share what a seed does to all; differences have a
    standard deviation of 0.01 sqrt 2."""
    generator = np.random.default_rng(trial)
    shared = generator.normal(0.8, 0.03, seeds)
    labels = ["proposed", *(f"b{i}" for i in range(baselines))]
    accuracies = {
        label: {
            s: float(shared[s] + generator.normal(effect * (label == "proposed"), 0.01))
            for s in range(seeds)
        }
        for label in labels
    }
    make_study(root, accuracies, name=f"trial{trial}", proposed=["proposed"])
    return comparison_of(root, f"trial{trial}")


@pytest.mark.slow
@pytest.mark.essential
def test_a_planted_effect_is_found_at_the_stated_power(tmp_path):
    """80 of 100; binomial(100, 0.8) is outside 69 .. 89 once in a hundred times."""
    effect = statistics.detectable_effect(5) * 0.01 * np.sqrt(2)
    wins = [planted(tmp_path, trial, effect, 5, 1).ranking({}).winner for trial in range(100)]
    assert set(wins) == {"proposed", None}
    assert 69 <= wins.count("proposed") <= 89


@pytest.mark.slow
@pytest.mark.essential
def test_a_planted_null_has_no_winner(tmp_path):
    """Four baselines, three seeds, nothing between them. Broken on purpose: without Holm's
    correction there would be winners."""
    trials = [planted(tmp_path, trial, 0.0, 3, 4) for trial in range(100)]
    assert [one.ranking({}).leader for one in trials].count(None) >= 94
    families = [one.differences("final/accuracy", {}) for one in trials]
    raw = sum(any(one.test.p_t < 0.05 for one in family) for family in families)
    corrected = sum(any(one.test.p_holm < 0.05 for one in family) for family in families)
    assert raw >= 10 > 7 >= corrected


def test_a_narrow_terminal_has_whole_numbers_and_words(tmp_path):
    make_study(tmp_path, {"A": A, "B": B})
    console = Console(width=80, file=io.StringIO())
    console.print(results_of(comparison_of(tmp_path), {}).rich(console.width))
    shown = {part.strip() for part in re.split(" {2,}|\n", console.file.getvalue())}
    assert {"92.00 ± 2.00", "evaluations", "other columns: report.md"} <= shown


def test_a_clear_winner_is_named_and_a_baseline_may_lead(tmp_path):
    make_study(
        tmp_path,
        {
            "P": {s: 0.95 + 0.001 * s for s in range(5)},
            "B": {s: 0.8 + 0.002 * (s % 3) for s in range(5)},
        },
        proposed=["P"],
    )
    assert comparison_of(tmp_path).ranking({}).winner == "P"
    make_study(
        tmp_path,
        {
            "P": {s: 0.8 + 0.002 * (s % 3) for s in range(5)},
            "B": {s: 0.95 + 0.001 * s for s in range(5)},
        },
        "other",
        proposed=["P"],
    )
    outcome = comparison_of(tmp_path, "other").ranking({})
    assert outcome.winner == "B"
    assert outcome.gap.test.mean < 0
    assert (outcome.gap.a, outcome.gap.b) == ("P", "B")


def test_one_seed_names_no_winner_however_large_the_difference(tmp_path, capsys):
    make_study(
        tmp_path / "runs",
        {"A": {0: 0.99}, "B": {0: 0.10}},
        proposed=["A"],
        criteria=["accuracy(A) > accuracy(B)"],
    )
    assert (
        main(
            [
                "compare",
                "--study",
                "study",
                "--root",
                str(tmp_path / "runs"),
                "--out",
                str(tmp_path / "out"),
            ]
        )
        == 0
    )
    report = report_of(tmp_path / "out")
    assert report["winner"] is None
    assert report["gap"]["mean"] == pytest.approx(0.89)
    short = report["aggregated"]
    assert (short["best_proposed"], short["best_baseline"]) == ("A", "B")
    assert short["gap"] == pytest.approx(890)  # percent of B's 0.10
    assert short["metrics"]["B"][short["primary_metric"]] == 0.10
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


def test_every_column_is_of_the_selected_model(tmp_path):
    """Validation chose round 2 of 5. All that can differ between rounds is of that round, and of no
    other."""
    at_best = {"corrupted/accuracy": 0.3, "fgsm/accuracy": 0.2, "test/brier": 0.6}
    for label in "AB":
        for seed in range(3):
            path = make_run(
                tmp_path / "runs/study",
                label,
                seed,
                0.9,
                tested=at_best,
                chosen="best",
                tested_round=2,
            )
            rows = rows_of(path / "metrics.csv")
            for row, validation in zip(rows, (0.5, 0.9, 0.6, 0.6, 0.6), strict=True):
                number = int(row["round"])
                row |= {
                    "val/accuracy": validation,
                    "test/ece": 0.01 * number,
                    "bits/average": number,
                }
                row["test/accuracy"] = 0.1 * number + 0.01 * seed
            text = "\n".join(
                [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
            )
            (path / "metrics.csv").write_text(text + "\n")
            metadata = json.loads((path / "metadata.json").read_text())
            metadata |= final_summary(
                [{key: float(value) for key, value in row.items()} for row in rows]
            )
            (path / "metadata.json").write_text(json.dumps(metadata))
    document = {"study": "study", "seeds": [0, 1, 2], "methods": {"A": {}, "B": {}}, "test": True}
    criteria = ["ece(A) <= 0.02", "accuracy(A) <= 0.3"]  # 0.05 and 0.5 in the last round
    for selection, expected, said, left_out in (
        (
            "best_val",
            {"accuracy": 0.21, "ece": 0.02, "fgsm": 0.2, "bits": 2},
            "round that validation chose",
            0,
        ),
        (
            "last",
            {"accuracy": 0.51, "ece": 0.05, "fgsm": None, "bits": 5},
            "the last round's model",
            6,
        ),
        (
            "last5",
            {"accuracy": 0.31, "ece": 0.05, "fgsm": None, "bits": 5},
            "of the last five evaluations",
            6,
        ),
    ):
        text = json.dumps(document | {"selection": selection, "criteria": criteria})
        (tmp_path / "runs/study/study.yaml").write_text(text)
        compare("study", tmp_path / selection, tmp_path / "runs")
        report = report_of(tmp_path / selection)
        found = report["levels"][0]["methods"]["A"]["metrics"]
        names = {
            "ece": "test/ece",
            "fgsm": "fgsm/accuracy",
            "bits": "bits/average",
            "accuracy": report["metric"],
        }
        means = {key: found.get(name, {}).get("mean") for key, name in names.items()}
        assert means == {
            key: value if value is None else pytest.approx(value) for key, value in expected.items()
        }
        assert [one["levels"][0]["left"] for one in report["criteria"]] == pytest.approx(
            [expected["ece"], expected["accuracy"]]
        )
        assert len(report["not_counted"]) == left_out
        main_table, beside = (
            (tmp_path / selection / "report.md")
            .read_text()
            .partition(begin)[2]
            .partition("|")[0]
            .lower()
            for begin in ("## Results", "## Beside it")
        )
        assert said in main_table
        assert said not in beside
        other = report["other_model"]["levels"][0]["methods"]["A"]["metrics"]
        assert other["test/ece"]["mean"] == pytest.approx(0.07 - expected["ece"])


def test_the_bits_of_every_layer_are_in_the_report(tmp_path):
    layers = {
        "bits/layer/conv1": 8.0,
        "bits/layer/a_late_one": 2.0,
        "bits/pruned": 3,
        "bits/moved": 1,
    }
    for seed in range(2):
        make_run(tmp_path / "runs/study", "MPQ", seed, 0.9 + seed / 100, **layers)
        make_run(tmp_path / "runs/study", "AQFL", seed, 0.8)
        make_run(tmp_path / "runs/study", "FedAvg", seed, 0.9, **{"bits/average": 32.0})
    compare("study", tmp_path / "out", tmp_path / "runs")
    lines = (tmp_path / "out/report.md").read_text().splitlines()
    [start] = [number for number, line in enumerate(lines) if line.startswith("## Magnitude bits")]
    assert lines[start + 4 : start + 11] == [  # FedAvg is not quantised
        "| layer | AQFL | MPQ |",
        "| --- | ---: | ---: |",
        "| average | 4.00 ± 0.00 | 4.00 ± 0.00 |",
        "| conv1 | - | 8.00 ± 0.00 |",
        "| a_late_one | - | 2.00 ± 0.00 |",
        "| bit planes that clients pruned, all rounds | - | 15.0 ± 0.0 |",
        "| changes of a layer's width by the server, all rounds | - | 5.0 ± 0.0 |",
    ]
    assert "bits per weight" in next(line for line in lines if line.startswith("| method | seeds"))
    assert "a\\_late\\_one" in (tmp_path / "out/tables.tex").read_text()


def test_when_all_are_proposed_they_are_compared_with_each_other(tmp_path):
    make_study(
        tmp_path,
        {"P": {0: 0.9, 1: 0.91, 2: 0.93}, "Q": {0: 0.5, 1: 0.52, 2: 0.51}},
        proposed=["P", "Q"],
    )
    outcome = comparison_of(tmp_path).ranking({})
    assert outcome.leader == "P"
    assert (outcome.gap.a, outcome.gap.b) == ("P", "Q")


def test_the_winner_under_corruption_is_the_most_accurate(tmp_path):
    folder = tmp_path / "study"
    for label, base in (("good", 0.8), ("bad", 0.2)):
        for seed in range(3):
            make_run(
                folder,
                label,
                seed,
                0.9,
                tested={"corrupted/fog": base + seed / 100 * (label == "good")},
            )
    assert (
        Comparison(with_metric(gather("study", tmp_path), "corrupted/fog")).ranking({}).leader
        == "good"
    )
    make_run(folder, "good", 3, 0.9, **{"mine/strange": 1.0})
    with pytest.raises(InputError, match="metric mine/strange"):
        with_metric(gather("study", tmp_path), "mine/strange")


@pytest.mark.slow
@pytest.mark.essential
def test_the_same_runs_give_the_same_report_byte_for_byte(tmp_path, figures):
    make_study(
        tmp_path / "runs",
        {"A": {ON: A, OFF: B}, "B": {ON: B, OFF: A}},
        criteria=["time(A) <= 2 * time(B)"],
        **GRID,
    )
    for out in ("one", "two"):
        compare("study", tmp_path / out, tmp_path / "runs")
    files = [
        path.relative_to(tmp_path / "one")
        for path in sorted((tmp_path / "one").rglob("*"))
        if path.is_file()
    ]
    assert len(files) == 10 + 2 * 9
    assert Path("figures/degradation_over_rounds.png") in files
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes(), (
            file
        )


@pytest.mark.parametrize("own", [(), ("FedPer",), ("FedPer", "FedAvg")])
def test_a_report_says_where_methods_answer_other_questions(own, tmp_path):
    """Own models on dealt examples beside one model on all of them; not where all or none have own
    models."""
    for label in ("FedPer", "FedAvg"):
        more = {"personal/accuracy": 0.7, "global/accuracy": 0.3} if label in own else {}
        config = {"model": {"class_path": f"fl_lightning.methods.{label}"}}
        for seed in (0, 1):
            make_run(tmp_path / "runs", label, seed, 0.5, config=config, **more)
    compare(str(tmp_path / "runs"), tmp_path / "out", tmp_path)
    text = (tmp_path / "out" / "report.md").read_text()
    assert ("Not like with like: the accuracy of FedPer is" in text) == (own == ("FedPer",))
    assert ("accuracy of own models, mean over clients (%)" in text) == bool(own)


@pytest.mark.parametrize("seeds", [(0,), (0, 1)])
def test_runs_of_one_method_have_a_report_without_differences(seeds, tmp_path):
    """As a newcomer asks for, who has one run of his own, or the same run simulated and
    deployed."""
    for seed in seeds:
        make_run(tmp_path / "runs", "FedAvg", seed, 0.5 + 0.1 * seed)
    compare(str(tmp_path / "runs"), tmp_path / "out", tmp_path)
    assert report_of(tmp_path / "out")["levels"][0]["differences"] == []
    text = (tmp_path / "out" / "report.md").read_text()
    assert "| FedAvg |" in text
    assert "## Differences" not in text
    assert (tmp_path / "out" / "tables.tex").read_text().count("begin{tabular}") == 2


@pytest.mark.slow
@pytest.mark.essential
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
        assert (tmp_path / "one/out" / file).read_bytes() == (
            tmp_path / "two/out" / file
        ).read_bytes()
    texts = [
        (tmp_path / root / "out/report.md").read_text().partition("## Time")[0]
        for root in ("one", "two")
    ]
    assert texts[0] == texts[1]


def test_nothing_is_overwritten_or_lost(tmp_path, monkeypatch, capsys):
    make_study(tmp_path / "runs", {"A": A, "B": B})
    out, args = (
        tmp_path / "out",
        [
            "compare",
            "--study",
            "study",
            "--root",
            str(tmp_path / "runs"),
            "--out",
            str(tmp_path / "out"),
        ],
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
        (["--study", "study", "--out", "x" * 300], "it cannot be looked at"),
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
    make_study(
        tmp_path / "runs",
        {"A|b_c&d": A, "50%": B},
        claimed={"A|b_c&d": {"accuracy": 0.9}, "elsewhere": "faster"},
    )
    compare("study", tmp_path / "out", tmp_path / "runs")
    assert r"A\textbar{}b\_c\&d &" in (tmp_path / "out/tables.tex").read_text()
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


def test_a_method_far_from_all_others_does_not_squeeze_their_differences(tmp_path, figures):
    close = {
        name: {seed: value + 0.002 * place for seed, value in A.items()}
        for place, name in enumerate("BDE")
    }
    make_study(tmp_path / "runs", {"A": A, **close}, "close", proposed=["A"])
    assert len(forest(comparison_of(tmp_path / "runs", "close"), {}).axes) == 1
    make_study(
        tmp_path / "runs",
        {"A": A, **close, "F": {seed: value - 0.4 for seed, value in A.items()}},
        proposed=["A"],
    )
    drawn = forest(comparison_of(tmp_path / "runs"), {})
    FigureCanvasAgg(drawn).draw()
    near, whole = drawn.axes
    assert near.get_xlim()[1] < 3 < 40 < whole.get_xlim()[1]
    assert "40" in "".join(text.get_text() for text in near.texts)
    assert near.get_window_extent().width > 0.25 * drawn.bbox.width


def test_curves_that_lie_on_each_other_are_told_apart(tmp_path, figures):
    make_study(tmp_path / "runs", dict.fromkeys("ABCD", A))
    axes = dict(command.figures(comparison_of(tmp_path / "runs")))["accuracy_over_rounds"].axes[0]
    marked = [
        line for line in axes.lines if line.get_linestyle() == "None" and len(line.get_xdata())
    ]
    places = [tuple(line.get_xdata()) for line in marked]
    assert len(places) == 4
    assert len({x for place in places for x in place}) == sum(map(len, places))
    assert len({line.get_marker() for line in marked}) == 4


def test_many_methods_have_a_panel_each(tmp_path, figures):
    make_study(tmp_path / "runs", dict.fromkeys("ABCDEFGH", A))
    drawn = dict(command.figures(comparison_of(tmp_path / "runs")))["accuracy_over_rounds"]
    assert [axes.get_title() for axes in drawn.axes if axes.get_visible()] == list("BCDEFGH")


def test_many_methods_that_are_all_proposed_have_a_panel_each(tmp_path, figures):
    make_study(tmp_path / "runs", dict.fromkeys("ABCDEFGH", A), proposed=[*"ABCDEFGH"])
    drawn = dict(command.figures(comparison_of(tmp_path / "runs")))["accuracy_over_rounds"]
    assert [axes.get_title() for axes in drawn.axes if axes.get_visible()] == list("BCDEFGH")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("git", "main"),
        ("versions", ["torch"]),
        ("code", ["a"]),
        ("resumed", {"a": 1}),
        ("resumed", [1]),
        ("command_line", ["fit", 1]),
        ("task", {"primary": "accuracy", "shares": 1}),
    ],
)
def test_metadata_of_another_form_leave_a_run_out(tmp_path, name, value):
    make_study(tmp_path / "runs", {"A": A, "B": B})
    file = next((tmp_path / "runs/study").glob("A*")) / "metadata.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), name: value}))
    compare("study", tmp_path / "out", tmp_path / "runs")
    report = (tmp_path / "out/report.md").read_text()
    assert f"metadata.json has something else as {name} than a run writes" in report


def test_figures_of_long_names_and_of_nothing(tmp_path, figures):
    """Names lie inside the figure, rounds are whole, and what shows no pair is left out and
    said."""
    names = [
        "FedMPQKD with a temperature of four and alpha 0.25",
        "FedMPQ_with_no_space_in_its_very_long_name_at_all_x",
    ]
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


CONFIG = ROOT / "configs/fedavg.yaml"


FIT = ["fit", "--config", str(CONFIG), "--trainer.max_rounds", "2", "--trainer.participation", "0.5", "--trainer.callbacks", "[]",
       "--trainer.experiment", "real", "--data.num_clients", "8", "--data.partition", "IID"]  # fmt: skip


@pytest.mark.slow
@pytest.mark.essential
def test_mlflow_and_directories_give_one_report_and_equal_methods_are_equal(tmp_path, monkeypatch):
    """FedProx with mu = 0 is FedAvg bit for bit: every difference is exactly 0, and that is no
    win."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for seed in "01":
        for label, flags in (
            ("FedAvg", []),
            ("FedProx", ["--model", "FedProx", "--model.mu", "0"]),
        ):
            tags = ["--trainer.tags", json.dumps({"study": "real", "label": label})]
            assert (
                main(
                    [
                        *FIT,
                        *flags,
                        *tags,
                        "--seed_everything",
                        seed,
                        "--trainer.run_name",
                        f"{label}-seed{seed}",
                    ]
                )
                == 0
            )
    compare("real", Path("from_folder"))
    compare("real", Path("from_store"), mlflow="sqlite:///mlflow.db")
    folder, store = report_of(tmp_path / "from_folder"), report_of(tmp_path / "from_store")
    assert comparable(folder) == comparable(store)
    for name in ("runs.csv", "differences.csv", "timings.csv"):
        assert Path("from_folder", name).read_text() == Path("from_store", name).read_text()
    records = gather("real", Path("runs"), "sqlite:///mlflow.db").records
    for record in records:
        assert record.clients == Path("runs/real", record.name, "clients.csv").read_text() != ""
    assert len(records) == 4
    real = rows_of(tmp_path / "runs/real/FedAvg-seed0/metrics.csv")[0]
    # the form of the synthetic runs is the true one
    assert set(history_of(0.5)[0]) - {"test/ece"} <= set(real)
    assert folder["gap"]["differences"] == [0.0, 0.0]
    assert folder["gap"]["p_t"] == 1.0
    assert folder["winner"] is None
