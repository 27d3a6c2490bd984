"""Places over all settings, and what is on a Pareto front: known answers."""

from __future__ import annotations

import numpy as np
import pytest
from compared import OFF, ON, comparison_of, report_of
from synthetic_runs import make_run, make_study

from fl_lightning.study.report.compare import compare
from fl_lightning.study.report.overall import (
    overall,
    overall_diagram,
    overall_table,
    proposed_table,
)
from fl_lightning.study.report.pareto import front, pareto, pareto_table, points_of
from fl_lightning.study.report.places import places_table
from fl_lightning.study.report.unequal import missing_seeds
from fl_lightning.study.statistics import t_interval

pytestmark = pytest.mark.usefixtures("figures_only_where_looked_at")
AXIS = {"grid": {"noise": {"on": {}, "off": {}}}}


def seeds(*values: float) -> dict[int, float]:
    return dict(enumerate(values))


# ranks of A, B, C with noise: 1 2 3 in seeds 0 to 2 and 2 1 3 in seed 3; without noise: 2 1 3
THREE = {
    "A": {ON: seeds(0.9, 0.9, 0.9, 0.8), OFF: seeds(0.5, 0.6, 0.5, 0.6)},
    "B": {ON: seeds(0.8, 0.8, 0.8, 0.9), OFF: seeds(0.7, 0.7, 0.7, 0.7)},
    "C": {ON: seeds(0.1, 0.2, 0.1, 0.2), OFF: seeds(0.1, 0.2, 0.3, 0.2)},
}


def test_ranks_are_averaged_over_settings_seed_by_seed(tmp_path):
    make_study(tmp_path, THREE, proposed=["C"], **AXIS)
    comparison = comparison_of(tmp_path)
    found = {one.label: one for one in overall(comparison)}
    a, b = [1.5, 1.5, 1.5, 2.0], [1.5, 1.5, 1.5, 1.0]
    assert {label: one.mean_rank for label, one in found.items()} == {
        "A": pytest.approx(np.mean(a)),
        "B": pytest.approx(np.mean(b)),
        "C": 3.0,
    }
    assert (found["A"].low, found["A"].high) == pytest.approx(t_interval(a))
    assert [found[label].place for label in "BAC"] == [1, 2, 3]
    assert found["A"].alike == ("B",)
    # C - A is 1.5 three times, and C - B nearly so: told apart
    assert (found["C"].first, found["C"].last, found["C"].alike) == (3, 3, ())
    table = proposed_table(comparison)
    assert table.rows[-1] == ["C", "all, by mean rank", "none", "3 of 3", "3"]
    level, over_all = table.caption.split("; ")
    assert level.endswith("which is corrected for all pairs of its level (Holm)")
    assert over_all.startswith("by mean rank by the method's own pairs over all levels")
    assert [row[0] for row in overall_table(comparison).rows] == ["B", "A", "C"]


def test_differences_that_are_the_same_for_all_seeds_are_told_apart_as_far_as_rounding_goes(
    tmp_path,
):
    """Ranks of one order throughout differ by 1 and 2 with no spread; a test of equal values has no
    p."""
    four = {
        label: {at: seeds(*[value] * 4) for at in (ON, OFF)}
        for label, value in zip("ABC", (0.9, 0.8, 0.7), strict=True)
    }
    make_study(tmp_path, four, **AXIS)
    assert [(one.label, one.first, one.last) for one in overall(comparison_of(tmp_path))] == [
        ("A", 1, 1),
        ("B", 2, 2),
        ("C", 3, 3),
    ]


def test_one_setting_or_a_method_that_one_setting_lacks_has_no_overall_place(tmp_path):
    make_study(tmp_path / "one", {label: of[ON] for label, of in THREE.items()})
    assert overall(comparison_of(tmp_path / "one")) == []
    assert overall_table(comparison_of(tmp_path / "one")) is None
    assert overall_diagram(comparison_of(tmp_path / "one")) is None
    some = {
        **THREE,
        "D": {ON: seeds(1.0, 1.0, 1.0, 1.0)},
        "E": {ON: THREE["A"][ON], OFF: {0: 0.4, 1: 0.4}},
    }
    make_study(tmp_path / "some", some, **AXIS)
    assert {one.label for one in overall(comparison_of(tmp_path / "some"))} == {*"ABCE"}


def test_places_say_over_which_seeds_they_are(tmp_path):
    """C has no number in seed 0 of one setting and seed 3 of the other: two seeds are left."""
    c = {ON: seeds(0.1, 0.2, 0.1, 0.2), OFF: seeds(0.1, 0.2, 0.3, 0.2)}
    c[ON][0] = c[OFF][3] = float("nan")
    make_study(tmp_path, {**THREE, "C": c}, proposed=["C"], **AXIS)
    comparison = comparison_of(tmp_path)
    said = "over 2 of 4 seeds, those in which all methods have a number in all settings"
    assert said in overall_table(comparison).caption
    assert proposed_table(comparison).caption.endswith(said)
    assert {one.seeds for one in overall(comparison)} == {(1, 2)}
    compare("study", tmp_path / "out", tmp_path)
    assert {
        label: one["seeds"] for label, one in report_of(tmp_path / "out")["overall"].items()
    } == {label: [1, 2] for label in "ABC"}
    for levels in comparison.levels:
        assert "over 3 of 4 seeds" in places_table(comparison, levels).caption
    assert missing_seeds(comparison) == (
        "Means are over each method's own seeds, places over those that both of a pair have, and places "
        "over all settings over those that all have in all settings: "
        "C has no number of seed 0 at noise=on; C has no number of seed 3 at noise=off."
    )
    make_study(tmp_path / "whole", THREE, **AXIS)
    assert "of 4 seeds" not in overall_table(comparison_of(tmp_path / "whole")).caption


def test_the_front_has_who_is_better_than_all_that_cost_no_more():
    points = {"A": (3.0, 0.9), "B": (1.0, 0.5), "C": (1.0, 0.6), "D": (2.0, 0.6), "E": (4.0, 0.95)}
    assert front(points) == ["C", "A", "E"]
    assert front({label: (cost, -quality) for label, (cost, quality) in points.items()}, False) == [
        "C",
        "A",
        "E",
    ]


def test_a_report_has_fronts_and_their_figure(tmp_path):
    folder = make_study(
        tmp_path,
        {label: seeds(0.5, 0.5) for label in "ABCDEFGHI"},
        methods={label: {} for label in "ABCDEFGHIJ"},
    )
    for seed in range(2):
        make_run(folder, "J", seed, 0.9, upload=5000)
    comparison = comparison_of(tmp_path)
    spent = points_of(comparison, {}, "total/total_bytes")
    assert spent["J"] == (5 * 3 * 5000, 0.9)
    on_front = ", ".join("ABCDEFGHIJ")
    assert pareto_table(comparison).rows == [["all", "up and down, all rounds (MB)", on_front]]
    (axes,) = pareto(comparison, {}).axes
    assert len({(line.get_color(), line.get_marker()) for line in axes.lines}) == 11
    compare("study", tmp_path / "out", tmp_path)
    assert report_of(tmp_path / "out")["overall"] == {}
    assert "## Pareto fronts" in (tmp_path / "out/report.md").read_text()
