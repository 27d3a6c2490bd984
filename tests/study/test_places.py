"""The places in a report: what each table says, and what the diagram draws."""

from __future__ import annotations

from compared import A, B, C, comparison_of
from synthetic_runs import make_study

from fl_lightning.study.report.overall import proposed_table
from fl_lightning.study.report.places import critical_difference, places_table


def test_a_proposed_method_is_placed_by_its_own_comparisons_and_all_methods_by_all_pairs(tmp_path):
    """A and B differ by 0.01, 0.02 and 0.03, which three seeds do not tell from 0."""
    make_study(tmp_path, {"A": A, "B": B, "C": C}, proposed=["C"])
    comparison = comparison_of(tmp_path)
    every = places_table(comparison, {})
    assert [row[:4] for row in every.rows] == [
        ["A", "B", "1", "1 to 2"],
        ["B", "A", "2", "1 to 2"],
        ["C", "none", "3", "3"],
    ]
    assert "all 3 pairs" in every.caption
    assert proposed_table(comparison).rows == [["C", "all", "none", "3 of 3", "3"]]


def test_without_a_seed_that_all_have_there_is_no_mean_rank(tmp_path):
    make_study(tmp_path, {"A": {0: 0.9, 1: 0.8}, "B": {0: 0.8, 1: 0.7}, "C": {2: 0.7}})
    rows = places_table(comparison_of(tmp_path), {}).rows
    assert [row[-1] for row in rows] == ["-"] * 3


def test_two_methods_have_no_table_and_no_diagram(tmp_path):
    make_study(tmp_path, {"A": A, "B": B}, proposed=["A"])
    comparison = comparison_of(tmp_path)
    assert places_table(comparison, {}) is None
    assert proposed_table(comparison) is None
    assert critical_difference(comparison, {}) is None


def test_the_diagram_has_each_mean_rank_its_interval_and_a_bar_over_those_that_are_not_told_apart(
    tmp_path,
):
    make_study(tmp_path, {"A": A, "B": B, "C": C}, proposed=["C"])
    figure = critical_difference(comparison_of(tmp_path), {})
    (axes,) = figure.axes
    assert "mean rank, proposed" in [text.get_text() for text in figure.legends[0].get_texts()]
    drawn = [([float(x) for x in line.get_xdata()], line.get_marker()) for line in axes.lines]
    assert [x for x, marker in drawn if marker == "o" and x] == [[1.0], [2.0], [3.0]]
    assert [x for x, marker in drawn if marker == "None"] == [[1, 2], [1, 2], [3, 3], [1.0, 2.0]]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["A", "B", "C"]
