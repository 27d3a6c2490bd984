"""Differences of many methods: a matrix with each pair twice, in the colour of the better one."""

from __future__ import annotations

import pytest
from compared import comparison_of
from matplotlib.colors import to_hex
from synthetic_runs import make_run

from fl_lightning.figures import BLUE, ORANGE
from fl_lightning.study.report.difference_matrix import PALE
from fl_lightning.study.report.figures import figures

pytestmark = pytest.mark.usefixtures("figures_only_where_looked_at")


def test_more_methods_than_a_page_has_rows_for_are_a_matrix(tmp_path):
    """Method k is better than method k + 1 by 2 points in each of six seeds, and the last two are
    equal but for noise of either sign. Runs that are evaluated once have no curves."""
    labels = [f"M{number:02}" for number in range(12)]
    for place, label in enumerate(labels):
        for seed in range(6):
            noise = 0.001 * (-1) ** (seed + place)
            make_run(tmp_path / "study", label, seed, 0.8 - 0.02 * min(place, 10) + noise, rounds=1)
    drawn = dict(figures(comparison_of(tmp_path)))
    assert drawn["accuracy_over_rounds"] is None
    (axes,) = drawn["paired_differences"].axes
    assert [tick.get_text() for tick in axes.get_yticklabels()] == labels
    assert [tick.get_text() for tick in axes.get_xticklabels()] == labels
    cells = {tuple(map(round, text.get_position())): text.get_text() for text in axes.texts}
    assert len(cells) == 12 * 11
    assert cells[1, 0] == "+2"  # row 0 less column 1
    assert cells[0, 1] == "−2"
    looks = {}
    for patch in axes.collections:
        if patch.get_paths() and len(patch.get_paths()[0].vertices):
            box = patch.get_paths()[0].get_extents()
            centre = round(box.x0 + 0.5), round(box.y0 + 0.5)
            looks[centre] = to_hex(patch.get_facecolor()[0]).upper(), patch.get_alpha()
    assert looks[1, 0] == (BLUE, 1.0)
    assert looks[0, 1] == (ORANGE, 1.0)
    assert looks[11, 10][1] == looks[10, 11][1] == PALE


def test_more_seeds_than_there_are_shapes_have_one_shape_that_the_legend_names(tmp_path):
    for seed in range(9):
        make_run(tmp_path / "study", "A", seed, 0.8 + 0.01 * seed, rounds=1)
    drawn = dict(figures(comparison_of(tmp_path)))["final_by_method"]
    assert {line.get_marker() for line in drawn.axes[0].lines} == {"None", "|", "o"}
    assert [text.get_text() for text in drawn.legends[0].get_texts()] == ["mean", "one seed"]


def test_runs_that_are_evaluated_once_have_no_curve_over_rounds(tmp_path):
    for label in "AB":
        for seed in range(3):
            make_run(tmp_path / "study", label, seed, 0.8 + 0.01 * seed, rounds=1)
    drawn = dict(figures(comparison_of(tmp_path)))
    assert drawn["accuracy_over_rounds"] is None
    assert drawn["accuracy_over_megabytes"] is not None
