"""Metrics of which no word tells the direction, declared by the callback or the method that adds
them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from compared import report_of
from refusals import refused
from synthetic_runs import make_run

from fl_lightning import Meter
from fl_lightning.conformance.toy import Points, on_points, run
from fl_lightning.methods import FedAvg
from fl_lightning.metrics import Metric
from fl_lightning.run.metadata import task_of
from fl_lightning.study.metric_names import TaskMetrics, column, direction, headline
from fl_lightning.study.plan.study import Study
from fl_lightning.study.report.compare import compare
from fl_lightning.study.report.comparison import Comparison
from fl_lightning.study.report.latex import Layout
from fl_lightning.study.report.latex import results as results_on_paper
from fl_lightning.study.report.tables import results
from fl_lightning.study.results.gather import gather, with_metric
from fl_lightning.tasks import Classification

pytestmark = pytest.mark.usefixtures("figures_only_where_looked_at")


class Doubtful(Meter):
    """The share of the examples that have no clear answer."""

    declared_metrics = (
        Metric("doubt/share", "doubtful (%)", 100, 1, " points", higher_is_better=False),
    )

    def on_evaluate(self, probs, target, record, context):
        record.metrics["doubt/share"] = float((probs.amax(1) < 0.9).float().mean())


class Hopeful(Doubtful):
    declared_metrics = (Metric("doubt/share", higher_is_better=True),)


def two_methods(root: Path, *emitters: object) -> Path:
    """A is doubtful in a fifth of the examples, and B in a tenth and a little less."""
    folder = root / "study"
    for label, share, slope in (("A", 0.2, 1e-3), ("B", 0.1, 9e-4)):
        for seed in range(5):
            make_run(
                folder, label, seed, 0.5, emitters=emitters, **{"doubt/share": share + slope * seed}
            )
    return folder


@pytest.mark.parametrize(("declares", "best"), [(Doubtful, "B"), (Hopeful, "A")])
def test_a_report_ranks_by_what_was_declared_and_names_it_so(tmp_path, declares, best):
    compare(str(two_methods(tmp_path, declares())), tmp_path / "out", metric="doubt/share")
    report = report_of(tmp_path / "out")
    assert report["higher_is_better"] is (declares is Hopeful)
    assert report["winner"] == best
    written = (tmp_path / "out/report.md").read_text()
    assert ("doubtful (%)" in written) is (declares is Doubtful)
    assert ("−10.0" in written or "+10.0" in written) is (declares is Doubtful)  # points, not 0.100


def test_without_a_declaration_it_cannot_rank_and_the_message_says_how(tmp_path):
    with refused("metric doubt/share", "declared_metrics"):
        with_metric(gather(str(two_methods(tmp_path)), tmp_path), "doubt/share")


def test_to_rank_by_what_runs_declare_differently_is_refused_and_nothing_else_is(tmp_path):
    folder = two_methods(tmp_path, Doubtful())
    make_run(folder, "C", 0, 0.5, emitters=(Hopeful(),), **{"doubt/share": 0.1})
    compare(str(folder), tmp_path / "out")
    with refused("doubt/share"):
        compare(str(folder), tmp_path / "by", metric="doubt/share")


def test_to_rank_by_what_some_runs_declare_is_refused(tmp_path):
    folder = two_methods(tmp_path, Doubtful())
    make_run(folder, "C", 0, 0.5, **{"doubt/share": 0.1})
    with refused("direction of doubt/share"):
        compare(str(folder), tmp_path / "by", metric="doubt/share")


@pytest.mark.parametrize(
    "name", ["final/last5_accuracy", "test/accuracy", "test/ece", "time/round"]
)
def test_a_class_cannot_turn_round_what_the_package_knows(name):
    task = {
        **task_of(Classification(), [FedAvg()]),
        "declared": {name: asdict(Metric(name, higher_is_better=True))},
    }
    before = {**task, "declared": {}}
    assert direction(name, TaskMetrics.of_run({"task": task})) == direction(
        name, TaskMetrics.of_run({"task": before})
    )
    task["declared"][name]["higher_is_better"] = False
    assert direction(name, TaskMetrics.of_run({"task": task})) == direction(
        name, TaskMetrics.of_run({"task": before})
    )


def test_a_study_may_be_about_a_declared_metric(tmp_path):
    """Which no word of the file tells anything of; one of the package's own families must be
    known."""
    file = tmp_path / "study.yaml"
    text = "study: one\nconfig: kd_default.yaml\nseeds: [0]\nmethods: {{A: {{}}}}\nmetric: {}\n"
    file.write_text(text.format("doubt/share"))
    assert Study.read(file).metric == "doubt/share"
    file.write_text(text.format("test/doubt"))
    with refused("metric test/doubt"):
        Study.read(file)


@pytest.mark.parametrize(
    "arguments",
    [
        {"scale": "100"},
        {"scale": 0},
        {"digits": 1.0},
        {"title": 100},
        {"higher_is_better": "lower"},
        {"name": ""},
    ],
)
def test_a_metric_of_wrong_kind_is_refused(arguments):
    with refused(f"{next(iter(arguments))}="):
        Metric(**{"name": "doubt/share"} | arguments)


@pytest.mark.parametrize(
    "given", [("doubt/share",), Doubtful.declared_metrics[0], {"doubt/share": 1}, None]
)
def test_what_is_no_tuple_of_metrics_ends_a_run_before_anything_is_created(tmp_path, given):
    meter = Doubtful()
    meter.declared_metrics = given
    with refused("Doubtful.declared_metrics"):
        run(on_points(FedAvg()), Points((1, 1)), tmp_path, max_rounds=1, callbacks=[meter])
    assert not list(tmp_path.iterdir())


def test_two_callbacks_of_a_run_declare_a_name_alike(tmp_path):
    with refused("doubt/share"):
        run(
            on_points(FedAvg()),
            Points((1, 1)),
            tmp_path,
            max_rounds=1,
            callbacks=[Doubtful(), Hopeful()],
        )


@pytest.mark.parametrize(
    "found", [[], {"x/y": 5}, {"x/y": {"scale": None}}, {"x/y": {"higher_is_better": "up"}}]
)
def test_a_damaged_declaration_counts_as_none(found):
    task = {**task_of(Classification()), "declared": found}
    assert TaskMetrics.of_run({"task": task}).declared == {}


def test_two_columns_of_one_title_are_told_apart():
    twice = tuple(Metric(f"doubt/{one}", "doubtful (%)") for one in ("share", "count"))
    task = TaskMetrics.of_run(
        {"task": {"primary": "accuracy", "declared": {one.name: asdict(one) for one in twice}}}
    )
    names = [one.name for one in twice]
    titles = [one.title for one in headline("test/accuracy", [], names, task)]
    assert len({*titles}) == len(titles) == 2


class Confusing(Meter):
    """Titles of which two are one, two are those of other columns, and short forms that others
    have."""

    declared_metrics = (
        Metric("doubt/a", "doubt", short="doubtful"),
        Metric("doubt/b", "doubt", short="doubtful"),
        Metric("doubt/c", "seeds", short="method"),
        Metric("doubt/d", "method", short="sure"),
        Metric("doubt/e", "sure"),
    )


@pytest.mark.parametrize("asked", ["doubt/a,doubt/b,doubt/c,doubt/d,doubt/e", None])
def test_no_column_takes_the_place_of_another_of_its_title(tmp_path, asked):
    names = "abcde"
    for seed in range(3):
        for place, label in enumerate("AB"):
            values = {f"doubt/{one}": n + 0.5 * place for n, one in enumerate(names, start=3)}
            if (label, seed) != ("B", 2):  # the numbers of seeds are a column too
                made = {"emitters": (Confusing(),), "rounds": 2, **values}
                make_run(tmp_path / "study", label, seed, 0.5, **made)
    layout = Layout.read(asked, None, None)
    comparison = Comparison(gather("study", tmp_path))
    on_paper, _ = results_on_paper(comparison, {}, layout)
    for table in (on_paper, results(comparison, {})):
        assert len({*table.header}) == len(table.header)
        row = dict(zip(table.header, table.rows[0], strict=True))
        assert (row.pop("method"), row.pop("seeds")) == ("A", "3")
        cells = [cell for cell in row.values() if cell.endswith(".000 ± 0.000")]
        assert [cell for cell in cells if cell[0] in "34567"] == [
            f"{n}.000 ± 0.000" for n in (3, 4, 5, 6, 7)
        ]
    compare(str(tmp_path / "study"), tmp_path / "out", columns=asked)


def test_a_run_keeps_what_its_method_and_its_callbacks_declare(tmp_path):
    class Drifting(FedAvg):
        declared_metrics = (Metric("novel/drift", higher_is_better=False),)

    trainer = run(
        on_points(Drifting()), Points((1, 1)), tmp_path, max_rounds=1, callbacks=[Doubtful()]
    )
    metadata = json.loads((trainer.run_dir / "metadata.json").read_text())
    task = TaskMetrics.of_run(metadata)
    assert dict(task.declared) == {
        one.name: one for one in (*Drifting.declared_metrics, *Doubtful.declared_metrics)
    }
    assert direction("novel/drift", task) == -1
    assert column("doubt/share", task).mean([0.1]) == "10.0"
