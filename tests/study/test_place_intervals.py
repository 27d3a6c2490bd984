"""Places and their intervals, of numbers whose truth is known."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats

from fl_lightning.study.ranks import groups, places
from fl_lightning.study.statistics import holm


def test_the_intervals_follow_from_holm_corrected_tests_of_all_pairs():
    values = np.random.default_rng(0).normal([0.9, 0.89, 0.5, 0.3], 0.01, (6, 4))
    found = {one.label: one for one in places("ABCD", values)}
    pairs = [(a, b) for a in range(4) for b in range(a + 1, 4)]
    p = holm([scipy.stats.ttest_rel(values[:, a], values[:, b]).pvalue for a, b in pairs])
    alike = {("ABCD"[a], "ABCD"[b]) for (a, b), one in zip(pairs, p, strict=True) if one >= 0.05}
    assert alike == {("A", "B")}
    assert [(one.first, one.last) for one in map(found.get, "ABCD")] == [
        (1, 2),
        (1, 2),
        (3, 3),
        (4, 4),
    ]
    assert found["A"].alike == ("B",)
    assert [one.place for one in map(found.get, "ABCD")] == [1, 2, 3, 4]
    assert found["A"].mean_rank == pytest.approx(1 + np.mean(values[:, 1] > values[:, 0]))


def test_where_less_is_better_places_turn_round_and_the_order_of_methods_does_not_matter():
    values = np.random.default_rng(1).normal([0.3, 0.5, 0.9], 0.01, (5, 3))
    up = {one.label: one for one in places("ABC", values)}
    down = {one.label: one for one in places("ABC", values, higher_is_better=False)}
    assert [(up[x].first, down[x].first) for x in "ABC"] == [(3, 1), (2, 2), (1, 3)]
    assert {one.label: one for one in places("CBA", values[:, ::-1])}["A"].last == up["A"].last


def test_somebody_has_the_first_place_where_pairs_go_round():
    """A is behind B, B behind C and C behind A, each in the one seed that both have."""
    nan = float("nan")
    values = np.array([[0.0, 1.0, nan], [nan, 0.0, 1.0], [1.0, nan, 0.0]])
    assert [one.place for one in places("ABC", values)] == [1, 1, 1]


def test_planted_ties_leave_the_interval_in_few_of_many_studies():
    """With three equal methods, no interval may be shorter than 1 to 3 but in 5 % of the
    studies."""
    generator = np.random.default_rng(2)
    wrong = sum(
        any(
            (one.first, one.last) != (1, 3) for one in places("ABC", generator.normal(0, 1, (6, 3)))
        )
        for _ in range(400)
    )
    assert wrong <= 400 * 0.05 + 3 * np.sqrt(400 * 0.05 * 0.95)


def test_methods_without_spread_or_without_common_seeds_have_every_place():
    nan = float("nan")
    constant = places("AB", np.array([[0.5, 0.4]] * 3))
    assert [(one.first, one.last, one.place) for one in constant] == [(1, 2, 1), (1, 2, 2)]
    apart = places("AB", np.array([[0.5, nan], [nan, 0.4]]))
    assert [(one.first, one.last) for one in apart] == [(1, 2), (1, 2)]
    assert all(np.isnan(one.mean_rank) for one in apart)


def test_equal_means_that_rounding_tells_apart_share_their_ranks():
    values = np.array([[np.mean([0.1, 0.2, 0.3]), np.mean([0.3, 0.2, 0.1])], [0.5, 0.5]])
    assert values[0, 0] != values[0, 1]
    assert {(one.place, one.mean_rank) for one in places("AB", values)} == {(1, 1.5)}


def test_a_bar_joins_neighbours_of_whom_no_two_are_told_apart():
    values = np.random.default_rng(3).normal([0.9, 0.9, 0.9, 0.2], 0.05, (8, 4))
    ordered = sorted(places("ABCD", values), key=lambda one: one.mean_rank)
    assert groups(ordered) == [(0, 2)]
