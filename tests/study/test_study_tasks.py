"""Studies of runs whose task is not classification: everything follows the task's primary
metric."""

from __future__ import annotations

import json
from itertools import product

import pytest
import yaml
from compared import GRID, OFF, ON, comparison_of, report_of
from rich.console import Console
from synthetic_runs import make_run, make_study

from fl_lightning.__main__ import main
from fl_lightning.errors import InputError
from fl_lightning.study.execute import mlflow_page
from fl_lightning.study.execute.display import Display
from fl_lightning.study.execute.jobs import Job, RunningJob
from fl_lightning.study.metric_names import TaskMetrics, direction, headline
from fl_lightning.study.plan.registration import plan_of, register
from fl_lightning.study.plan.study import Study
from fl_lightning.study.report.compare import compare
from fl_lightning.study.report.curves import rounds_curve
from fl_lightning.study.report.figures import figures as figures_of
from fl_lightning.study.report.registered import registration_report
from fl_lightning.study.report.tables import claims
from fl_lightning.study.report.verdicts import check_criteria
from fl_lightning.study.results.gather import gather, with_metric
from fl_lightning.tasks import Classification, LanguageModelling, Regression

pytestmark = pytest.mark.usefixtures("figures_only_where_looked_at")


class Distances(Regression):
    """A task of somebody else, with a metric whose name tells nothing."""

    primary = "distance"
    lower_is_better = frozenset({"loss", "distance"})


PERPLEXITY = LanguageModelling()
RESULTS = (
    "The last round's model, with the mean perplexity of the last five evaluations; "
    "mean ± standard deviation over seeds."
)
A, B = {0: 6.0, 1: 6.2, 2: 6.4}, {0: 7.0, 1: 7.1, 2: 7.2}  # A - B = -1.0, -0.9, -0.8
MEAN = {"last": 6.2, "last5": 6.2 * 137 / 60, "best_val": 6.2 * 5 / 3}
"""Of A; in round r a metric is 5 / r times its last value, and validation chooses round 3."""


@pytest.mark.parametrize("task", [PERPLEXITY, Distances()], ids=lambda task: task.primary)
@pytest.mark.parametrize("selection", ["last", "last5", "best_val"])
def test_a_report_follows_the_primary_metric(tmp_path, task, selection):
    """Selection, ranking, tests, criteria, target and the other model's table, in a study whose
    file says nothing of the task."""
    name, criteria = (
        task.primary,
        ["primary(A) <= primary(B)", "primary(A) > primary(B)", "p(A, B) < 0.05"],
    )
    criteria += ["auc(A) < auc(B)", "rounds(A) < rounds(B)", "no_increase(primary, A, B)"]
    chosen = {} if selection == "last5" else {"selection": selection}
    make_study(
        tmp_path,
        {"B": B, "A": A},
        task=task,
        criteria=criteria,
        target=8.0,
        claimed={"A": {name: 5.0}},
        **chosen,
    )
    compare("study", tmp_path / "out", tmp_path)
    report, text = report_of(tmp_path / "out"), (tmp_path / "out" / "report.md").read_text()
    form = {"last": "", "last5": "last5_", "best_val": "best_val_test_"}[selection]
    assert (report["metric"], report["higher_is_better"]) == (f"final/{form}{name}", False)
    assert report["levels"][0]["methods"]["A"]["metrics"][report["metric"]][
        "mean"
    ] == pytest.approx(MEAN[selection])
    assert report["leader"] == "A"
    assert report["gap"]["mean"] < 0
    assert "negative" in report["gap"]["direction"]
    assert report["aggregated"]["gap"] > 0  # percent by which A is better
    found = [one["verdict"] for one in report["criteria"]]
    # 4 against 5 rounds, always
    assert found == ["holds", "fails", "holds", "holds", "undecided", "holds"]
    rounds = report["criteria"][4]["levels"][0]
    assert (rounds["left"], rounds["right"]) == (4, 5)
    words = {
        "last": "last round",
        "last5": "last five evaluations",
        "best_val": "best-validation round",
    }[selection]
    header = next(line for line in text.splitlines() if line.startswith("| method | seeds |"))
    assert header.split(" | ")[2] == f"{name}, {words}"
    assert f"## Until a test {name} of 8" in text
    assert f"AUC ({name} x rounds)" in header
    assert f"| A | {name} | 5.0 | {MEAN[selection]:.4g}" in text
    assert "accura" not in text
    other = "last" if selection == "best_val" else "best_val_test"
    measured = report["other_model"]["levels"][0]["methods"]["A"]["metrics"]
    assert f"final/{other}_{name}".replace("last_", "") in measured
    assert main(["compare", "--study", "study", "--root", str(tmp_path), "--out", str(tmp_path / "again"),
                 "--metric", "final/accuracy"]) == 2  # fmt: skip


def test_a_claimed_accuracy_has_no_perplexity_beside_it(tmp_path):
    claimed = {"A": {"accuracy": 0.9, "perplexity": 5.0}}
    make_study(tmp_path, {"B": B, "A": A}, task=LanguageModelling(), claimed=claimed)
    table, _ = claims(comparison_of(tmp_path))
    assert [row[3] == "-" for row in table.rows] == [True, False]


def test_what_stress_adds_to_a_perplexity_is_a_loss(tmp_path):
    under_stress = {seed: value + 2 for seed, value in A.items()}
    levels = {"A": {ON: under_stress, OFF: A}, "B": {ON: B, OFF: B}}
    make_study(
        tmp_path, levels, task=PERPLEXITY, selection="last", criteria=["drop(A) > drop(B)"], **GRID
    )
    comparison = comparison_of(tmp_path)
    drops = {label: one.test.mean for _, label, one in comparison.degradations()}
    assert drops == pytest.approx({"A": 2.0, "B": 0.0})
    drawn = dict(figures_of(comparison))
    assert {
        "perplexity_over_rounds-noise=on",
        "perplexity_over_megabytes-noise=off",
    } <= drawn.keys()
    axes = drawn["degradation_over_rounds"].axes[0]
    assert (axes.get_ylabel(), "added under noise: on − off" in axes.get_title()) == (
        "perplexity added",
        True,
    )
    assert max(
        line.get_ydata()[-1] for line in axes.lines if len(line.get_ydata()) == 5
    ) == pytest.approx(2.0)
    assert drawn["perplexity_over_rounds-noise=on"].axes[0].get_ylabel() == "test perplexity"
    tested = comparison.column("test/perplexity")
    x, y = rounds_curve(list(comparison.runs("A", {"noise": "off"}).values()), tested)
    assert x.tolist() == [1, 2, 3, 4, 5]
    assert y[:, -1].tolist() == [6.0, 6.2, 6.4]  # no percent


def test_a_share_of_another_name_is_shown_in_percent(tmp_path):
    matches = LanguageModelling(decoder=object(), max_new_tokens=4, primary="exact_match")  # type: ignore[arg-type]
    make_study(tmp_path, {"A": {0: 0.5, 1: 0.6}, "B": {0: 0.4, 1: 0.4}}, task=matches, target=0.3)
    compare("study", tmp_path / "out", tmp_path)
    report, text = report_of(tmp_path / "out"), (tmp_path / "out" / "report.md").read_text()
    assert (report["metric"], report["higher_is_better"]) == ("final/last5_exact_match", True)
    assert (
        "| exact match, last five evaluations (%) | exact match, last round (%) | AUC (% x rounds) |"
        in text
    )
    assert "## Until 30.0% test exact match" in text


def test_what_does_not_fit_the_task_is_refused(tmp_path):
    make_study(
        tmp_path, {"A": A, "B": B}, name="claims", task=PERPLEXITY, criteria=["accuracy(A) > 0.5"]
    )
    with pytest.raises(
        InputError, match=r"accuracy\(A\); .* of the runs is perplexity; write primary\(A\)"
    ):
        check_criteria(comparison_of(tmp_path, "claims"))
    make_study(tmp_path, {"A": A, "B": B}, name="target", task=PERPLEXITY, target_accuracy=0.5)
    with pytest.raises(InputError, match=r"target_accuracy: 0.5; .*perplexity; write target:"):
        check_criteria(comparison_of(tmp_path, "target"))
    mixed = make_study(tmp_path, {"A": {0: 0.9}}, name="mixed", methods={"A": {}, "B": {}})
    make_run(mixed, "B", 0, 7.0, task=PERPLEXITY)
    with pytest.raises(
        InputError, match=r"accuracy, B-seed0 has primary metric perplexity; .*its own study"
    ):
        comparison_of(tmp_path, "mixed")
    both = yaml.safe_load((mixed / "study.yaml").read_text()) | {
        "target": 8.0,
        "target_accuracy": 0.5,
    }
    (mixed / "study.yaml").write_text(json.dumps(both))
    with pytest.raises(InputError, match=r"target_accuracy and target; .*leave one of them out"):
        Study.read(mixed / "study.yaml")


def test_the_accuracy_that_was_registered_by_default_is_the_primary_metric(tmp_path):
    """The plan is written before a run tells its task."""
    folder = make_study(
        tmp_path, {"A": A, "B": B}, task=PERPLEXITY, criteria=["primary(A) < primary(B)"]
    )
    study = Study.read(folder / "study.yaml", find_configs=False)
    plan = plan_of(study, [(label, {}, {"seed_everything": 0}) for label in study.methods])
    assert plan["metric"] == "final/last5_accuracy"
    assert "target" not in plan
    register(folder, plan, 1)
    results = gather("study", tmp_path)
    assert registration_report(results, folder).status == "registered late"
    report = registration_report(with_metric(results, "final/perplexity"), folder)
    assert "metric: registered final/last5_perplexity, now final/perplexity" in report.differences


@pytest.mark.parametrize(
    "task",
    [Classification(), LanguageModelling(), Regression()],
    ids=lambda task: type(task).__name__,
)
def test_names_tell_what_the_tasks_say(task):
    """Files are read before there are runs, so that names alone have to tell direction and unit."""
    for metric in {*task.per_client, *task.shares, "loss"}:
        expected = -1 if metric in task.lower_is_better else 1
        for form in ("test/{}", "val/{}_worst_decile", "final/best_val_{}", "final/auc_{}"):
            assert direction(form.format(metric)) == expected
        assert TaskMetrics().is_share(f"final/last5_{metric}") == (metric in task.shares)
    found = headline(
        "bits/average", (), ["test/rouge_l", "val/rouge_l_worst_decile"], TaskMetrics(task.primary)
    )
    assert [column.title for column in found] == ["ROUGE-L (%)"]
    older = {f"final/last5_{task.primary}": 1.0, f"final/last5_val_{task.primary}": 1.0}
    assert TaskMetrics.of_run(older).primary == task.primary  # MLflow has lost the file
    assert TaskMetrics.of_run(older).higher_is_better == task.higher_is_better


def test_displays_show_the_primary_metric(tmp_path, monkeypatch):
    run = make_run(tmp_path, "A", 0, 7.123456, task=PERPLEXITY)
    console = Console(width=100, record=True)
    display = Display(lambda: "sweep", lambda job: (run, 5), console)
    console.print(display.table([RunningJob(Job("A-seed0", ["fit"], tmp_path / "log"), None, 0)]))
    text = console.export_text()
    assert "perplexity" in text
    assert "7.123" in text
    assert "accuracy" not in text
    monkeypatch.setattr(mlflow_page, "version", lambda name: "3.17.2")
    view = mlflow_page.view_tags(["noise"], display.task)[mlflow_page.TAG]
    assert "test/perplexity" in view
    assert "final/best_val_perplexity" in view
    assert "accuracy" not in view


@pytest.mark.parametrize(
    ("every", "said"),
    [
        (1, None),
        (2, "the last five evaluations are those of rounds 12, 14, 16, 18, 20.\n"),
        (
            5,
            "are those of rounds 5, 10, 15, 20: their mean says how fast a method learns as much as",
        ),
    ],
)
def test_a_report_says_which_rounds_the_last_evaluations_are(tmp_path, every, said):
    folder = tmp_path / "study"
    for seed, label in product(range(2), "AB"):
        make_run(folder, label, seed, 6.0 + seed, task=PERPLEXITY, rounds=20, every=every)
    study = {"study": "study", "seeds": [0, 1], "methods": {"A": {}, "B": {}}}
    (folder / "study.yaml").write_text(yaml.safe_dump(study))
    compare("study", tmp_path / "out", tmp_path)
    text = (tmp_path / "out" / "report.md").read_text()
    assert ("evaluations are those" not in text) if said is None else (said in text)


def test_a_mean_over_some_seeds_says_of_how_many(tmp_path):
    for seed, purity in enumerate((0.75, 1.0, 1.0)):
        for label in "AB":
            more = {"router/purity": purity} if label == "A" else {}
            make_run(tmp_path / "study", label, seed, 6.0 + seed, task=PERPLEXITY, rounds=5, **more)
    study = {"study": "study", "seeds": [0, 1, 2], "methods": {"A": {}, "B": {}}}
    (tmp_path / "study" / "study.yaml").write_text(yaml.safe_dump(study))
    compare("study", tmp_path / "out", tmp_path)
    lines = (tmp_path / "out" / "report.md").read_text().splitlines()
    header, _, *rows = (line.split(" | ") for line in lines[lines.index(RESULTS) + 2 :])
    place = header.index("round from which purity is 1")
    assert {row[0]: row[place] for row in rows[:2]} == {"| A": "1.0 ± 0.0 (2 of 3)", "| B": "-"}
