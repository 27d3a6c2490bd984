"""The figure of quality against joules, on made-up runs of known energy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml
from compared import comparison_of
from matplotlib.backends.backend_agg import FigureCanvasAgg
from synthetic_runs import make_run, make_study

from fl_lightning.study.metric_names import headline
from fl_lightning.study.report.compare import compare
from fl_lightning.study.report.curves import over, rounds_curve
from fl_lightning.study.report.energy_figure import budgets, curves, quality_over_joules
from fl_lightning.tasks import LanguageModelling

TASK = LanguageModelling()
BUDGETS = (0.4, 0.6, 0.8)
HIGH = 20e-3
"""Joules of a sequence with all layers at high."""


def make_runs(root: Path, broken: float = 1.0, written: float | None = None, **study) -> None:
    """Three budgets and seeds: HEST keeps the budget, TABS spends a tenth more than it, LoRA spends
    all. The perplexity of HEST is multiplied by ``broken``; an answer takes ``written`` times a
    sequence."""
    folder = root / "study"
    folder.mkdir(parents=True)
    document = {
        "study": "study",
        "seeds": [1, 2, 3],
        "methods": {"HEST": {}, "TABS": {}, "LoRA": {}},
        "grid": {"budget": {str(share): {} for share in BUDGETS}},
        "selection": "last",
        "metric": "energy/joules",
        "proposed": ["HEST"],
        **study,
    }
    (folder / "study.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
    for share in BUDGETS:
        for label, used in (("HEST", share), ("TABS", 1.1 * share), ("LoRA", 1.0)):
            for seed in (1, 2, 3):
                joules = HIGH * used * (1 + 0.01 * (seed - 2))
                energy = {
                    "energy/joules": joules,
                    "energy/joules_model": joules + 1.2 * HIGH,
                    "energy/spent": 1.5 * joules,
                    "energy/granted": 1.5 * share * HIGH,
                    "energy/refused": 0.0,
                    "test/rouge_l": 0.1 + 0.3 * used,
                }
                energy |= {} if written is None else {"energy/joules_generated": written * joules}
                perplexity = (5.0 - 2.0 * used + 0.1 * seed) * (broken if label == "HEST" else 1.0)
                levels = {"budget": str(share)}
                make_run(folder, label, seed, perplexity, levels=levels, task=TASK, **energy)


def test_points_and_budgets_by_hand(tmp_path):
    make_runs(tmp_path)
    comparison = comparison_of(tmp_path)
    found = curves(comparison, "energy/joules", comparison.column("test/rouge_l"))
    assert [p.x for p in found["HEST"]] == pytest.approx([HIGH * share for share in BUDGETS])
    assert [p.y for p in found["HEST"]] == pytest.approx([22.0, 28.0, 34.0])  # percent
    assert found["HEST"][0].x_spread == pytest.approx(0.01 * HIGH * 0.4)
    assert [p.y_spread for p in found["LoRA"]] == pytest.approx([0.0] * 3, abs=1e-12)
    assert list(budgets(comparison).values()) == pytest.approx(
        [1.5 * share * HIGH for share in BUDGETS]
    )


@pytest.mark.slow
@pytest.mark.essential
def test_the_figure_has_a_panel_for_each_quality_and_scope_and_its_budgets(tmp_path):
    make_runs(tmp_path / "runs")
    figure = quality_over_joules(comparison_of(tmp_path / "runs"))
    FigureCanvasAgg(figure).draw()
    panels = figure.axes
    assert len(panels) == 6  # perplexity and ROUGE-L; quantiles, means, the whole network
    assert [axes.get_xlabel() for axes in panels] == ["mJ per sequence"] * 6
    titles = " ".join(axes.get_title() for axes in panels[:3])
    assert "the switched layers" in titles
    assert "the whole network" in titles
    assert [axes.get_ylabel() for axes in panels[::3]] == ["test perplexity", "test ROUGE-L (%)"]
    lines = [line.get_xdata()[0] for line in panels[0].lines if len(set(line.get_xdata())) == 1]
    assert set(np.round([1.5e3 * share * HIGH for share in BUDGETS], 6)) <= set(np.round(lines, 6))
    compare("study", tmp_path / "out", tmp_path / "runs")
    assert (tmp_path / "out" / "figures" / "quality_over_joules.png").is_file()
    text = (tmp_path / "out" / "report.md").read_text()
    assert "a sequence, whole network (mJ)" in text
    assert "sequences refused" in text


def test_answers_that_are_written_are_drawn_over_the_joules_of_writing_them(tmp_path):
    """Their budget is of the longest answer that is allowed, and that of reading of the true
    one."""
    make_runs(tmp_path, written=3.0)
    panels = quality_over_joules(comparison_of(tmp_path)).axes
    assert [axes.axison for axes in panels] == [True] * 3 + [False, True, False]
    assert panels[4].get_xlabel() == "mJ per answer and its prompt"
    assert panels[4].get_ylabel() == "test ROUGE-L (%)"
    (hest, *_) = panels[4].containers
    assert hest[0].get_xdata() == pytest.approx([3e3 * HIGH * share for share in BUDGETS])


def test_perplexities_far_apart_are_on_a_logarithmic_axis_and_shares_never(tmp_path):
    for broken, scale in ((1.0, "linear"), (1000.0, "log")):
        make_runs(tmp_path / scale, broken)
        comparison = comparison_of(tmp_path / scale)
        panels = quality_over_joules(comparison).axes
        assert [axes.get_yscale() for axes in panels] == [scale] * 3 + ["linear"] * 3
        assert ("(logarithmic)" in panels[0].get_ylabel()) == (scale == "log")
        (axes,) = over(comparison, comparison.levels[0], "round", rounds_curve).axes
        assert axes.get_yscale() == scale


def test_runs_without_energy_have_no_such_figure_and_half_of_it_is_no_fault(tmp_path):
    make_study(tmp_path, {"A": {0: 0.9, 1: 0.8}, "B": {0: 0.7, 1: 0.8}})
    assert quality_over_joules(comparison_of(tmp_path)) is None
    make_runs(tmp_path / "runs")
    for path in (tmp_path / "runs" / "study").glob("LoRA*"):  # of a release without the pair
        metrics = path / "metrics.csv"
        rows = [line.split(",") for line in metrics.read_text().splitlines()]
        keep = [
            place
            for place, name in enumerate(rows[0])
            if name not in ("energy/spent", "test/rouge_l")
        ]
        metrics.write_text("".join(",".join(row[place] for place in keep) + "\n" for row in rows))
    figure = quality_over_joules(comparison_of(tmp_path / "runs"))
    assert len(figure.axes) == 6
    assert [line.get_label() for line in figure.axes[5].containers] == ["HEST", "TABS"]


def test_the_table_of_results_has_both_scopes_and_what_was_refused():
    measured = ["energy/joules", "energy/joules_model", "energy/refused", "test/perplexity"]
    titles = [column.title for column in headline("energy/joules", [], measured)]
    assert titles == [
        "energy of a sequence (mJ)",
        "energy of a sequence, whole network (mJ)",
        "sequences refused",
    ]
