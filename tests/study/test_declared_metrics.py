"""Metrics of which no word tells the direction, declared by the callback or the method that adds them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from compared import report_of
from refusals import refused
from synthetic_runs import make_run

from fl_lightning import Meter
from fl_lightning.conformance.toy import Points, on_points, run
from fl_lightning.errors import InputError
from fl_lightning.methods import FedAvg
from fl_lightning.metrics import Metric
from fl_lightning.study.metric_names import TaskMetrics, column, direction
from fl_lightning.study.report.compare import compare
from fl_lightning.study.results.gather import gather, with_metric

pytestmark = pytest.mark.usefixtures("figures_only_where_looked_at")


class Doubtful(Meter):
    """The share of the examples that have no clear answer."""

    declared_metrics = (Metric("doubt/share", "doubtful (%)", 100, 1, " points", higher_is_better=False),)

    def on_evaluate(self, probs, target, record, context):
        record.metrics["doubt/share"] = float((probs.amax(1) < 0.9).float().mean())


class Hopeful(Doubtful):
    declared_metrics = (Metric("doubt/share", higher_is_better=True),)


def two_methods(root: Path, *emitters: object) -> Path:
    """A is doubtful in a fifth of the examples, and B in a tenth and a little less."""
    folder = root / "study"
    for label, share, slope in (("A", 0.2, 1e-3), ("B", 0.1, 9e-4)):
        for seed in range(5):
            make_run(folder, label, seed, 0.5, emitters=emitters, **{"doubt/share": share + slope * seed})
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
    with refused("metric doubt/share", "higher_is_better"):
        with_metric(gather(str(two_methods(tmp_path)), tmp_path), "doubt/share")


def test_two_directions_of_one_name_are_refused(tmp_path):
    folder = two_methods(tmp_path, Doubtful())
    make_run(folder, "C", 0, 0.5, emitters=(Hopeful(),), **{"doubt/share": 0.1})
    with pytest.raises(InputError, match="direction of doubt/share"):
        compare(str(folder), tmp_path / "out")


def test_a_run_keeps_what_its_method_and_its_callbacks_declare(tmp_path):
    class Drifting(FedAvg):
        declared_metrics = (Metric("novel/drift", higher_is_better=False),)

    trainer = run(on_points(Drifting()), Points((1, 1)), tmp_path, max_rounds=1, callbacks=[Doubtful()])
    metadata = json.loads((trainer.run_dir / "metadata.json").read_text())
    task = TaskMetrics.of_run(metadata)
    assert dict(task.declared) == {
        one.name: one for one in (*Drifting.declared_metrics, *Doubtful.declared_metrics)
    }
    assert direction("novel/drift", task) == -1
    assert column("doubt/share", task).mean([0.1]) == "10.0"
