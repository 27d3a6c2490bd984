"""Seeds whose runs have no number of what is compared are not left out in silence."""

from __future__ import annotations

import json
from math import inf, nan
from shutil import rmtree

import numpy as np
import pytest
from compared import A, B, C, comparison_of
from synthetic_runs import make_run, make_study

from fl_lightning.study.plan.registration import plan_of, register
from fl_lightning.study.report.latex import Layout
from fl_lightning.study.report.latex import results as on_paper
from fl_lightning.study.report.looks import is_awaited
from fl_lightning.study.report.markdown import how_to_read, undecided
from fl_lightning.study.report.places import places_table
from fl_lightning.study.report.registered import registration_report
from fl_lightning.study.report.tables import differences, results, target
from fl_lightning.study.report.unequal import lost_uploads, missing_seeds
from fl_lightning.study.report.verdicts import verdicts
from fl_lightning.tasks import LanguageModelling

SEEDS = range(7)
NOISE = 0.01 * np.random.default_rng(0).normal(size=(3, len(SEEDS)))


def three_runs(root, criteria, **rounds):
    """A study of one method, with values of a metric of its rounds by seed."""
    folder = make_study(root, {"A": dict.fromkeys((0, 1, 2), 0.8)}, criteria=criteria)
    for seed in (0, 1, 2):
        rmtree(folder / f"A-seed{seed}")
        make_run(folder, "A", seed, 0.8, **{name: given[seed] for name, given in rounds.items()})


def judged(root):
    return {
        one.criterion.text: (one.decision, one.judgements[0][1].reason)
        for one in verdicts(comparison_of(root))
    }


def test_a_target_that_some_seeds_never_reach_is_not_judged_by_the_others(tmp_path):
    a = dict(enumerate([1.0, 0.94, 0.98, 0.9, 0.3, 0.3, 0.3]))
    b = {seed: 0.75 + NOISE[1, seed] for seed in SEEDS}
    never = dict.fromkeys(SEEDS, 0.2)
    criteria = ["rounds(A) <= rounds(B)", "megabytes(B) <= 1", "rounds(C) <= 20"]
    rows = {"A": a, "B": b, "C": never}
    make_study(tmp_path, rows, run={"rounds": 20}, target_accuracy=0.7, criteria=criteria)
    assert judged(tmp_path) == {
        criteria[0]: ("undecided", "no rounds(A) in seed 4, 5, 6; without them it holds"),
        criteria[1]: ("holds", "the whole interval is <= 0"),
        criteria[2]: ("undecided", "no rounds(C) in seed 0, 1, 2, 3, 4, 5, 6"),
    }


@pytest.mark.parametrize(
    ("made", "asked", "more"),
    [  # B's rounds are versions of fewer uploads, or early stopping has ended its runs
        (20, 20, {"clients/staleness": 1.0}),
        (5, 5, {"clients/staleness": 1.0}),
        (4, 5, {}),
    ],
)
def test_areas_over_unlike_rounds_and_unlike_rounds_are_not_compared(tmp_path, made, asked, more):
    areas = ["auc(A) < auc(B)", "no_increase(auc, A, B)", "p(A, B) < 0.05"]
    rounds, others = "rounds(A) < rounds(B)", ["accuracy(A) > 0.8", "auc(B) > 1", "rounds(B) > 1"]
    keys = {"metric": "final/auc_accuracy", "target_accuracy": 0.4, "selection": "last"}
    claims, methods = [*areas, rounds, *others], {"A": {}, "B": {}}
    folder = make_study(tmp_path, {"A": A}, methods=methods, criteria=claims, **keys)
    for seed in B:
        config = {"trainer": {"max_rounds": asked}}
        path = make_run(folder, "B", seed, B[seed], rounds=made, config=config, **more)
        if made < asked:
            said = json.loads((path / "metadata.json").read_text()) | {"stopped_early": "patience"}
            (path / "metadata.json").write_text(json.dumps(said))
    comparison = comparison_of(tmp_path)
    between = {4: "4 to 5", 5: "synchronous and asynchronous", 20: "5 to 20"}[made]
    reason = f"its runs are of {between} rounds, which cannot be compared"
    unlike = [one for one in verdicts(comparison) if one.judgements[0][1].reason == reason]
    assert [one.criterion.text for one in unlike] == [*areas, *([rounds] if more else [])]
    assert {one.decision for one in unlike} == {"undecided"}
    assert not any(map(is_awaited, unlike))
    reason = comparison.ranking({}).reason
    says = f"but final/auc_accuracy of runs of {between} rounds cannot be compared"
    assert reason.endswith(says) == (made != 5)  # where areas are alike nobody is ahead
    captions = [table(comparison, {}).caption for table in (results, target)]
    titles = "AUC (% x rounds)", "rounds to target"
    said = [
        f"{title}: of runs of {between} rounds, not to be compared" in caption
        for title, caption in zip(titles, captions, strict=True)
    ]
    assert said == [True, bool(more)]
    table, bold = on_paper(comparison, {}, Layout(["auc", "rounds", "primary"]))
    assert {column for _, column in bold} == ({3} if more else {2, 3})
    assert captions[0].partition("; AUC")[2] in table.caption


@pytest.mark.parametrize(
    ("criterion", "premises", "awaited"),
    [  # A - B = 0.01, 0.02, 0.03 is undecided at 0, holds at -0.005 and fails at 0.045
        ("gap(A, B) >= 0", [], True),
        ("rounds(B) <= 5", [], False),
        ("accuracy(A) / (accuracy(B) - accuracy(B)) > 1", [], False),
        ("no_increase(rounds, A, B, 0.01)", [], False),
        ('mean("train/loss", A) <= 1', [], True),
        ('mean("train/loss", A) <= 1 / (accuracy(A) - accuracy(A))', [], False),
        ("rounds(B) <= 5 or gap(A, B) >= 0", [], True),  # it may hold
        ("rounds(B) <= 5 and gap(A, B) >= 0", [], True),  # it may fail
        ("rounds(B) <= 5 or gap(A, B) >= 0.045", [], False),
        ("rounds(B) <= 5 and gap(A, B) >= -0.005", [], False),
        ("rounds(B) <= 5 and rounds(B) <= 6", [], False),
        ("gap(A, B) >= -0.005", ["rounds(B) <= 5"], False),
        ("gap(A, B) >= 0", ["rounds(B) <= 5"], False),
        ("rounds(B) <= 5", ["gap(A, B) >= 0"], True),  # it may be not tested
        ("gap(A, B) >= 0", ["rounds(B) <= 5", "gap(A, B) >= 0"], True),
        ("rounds(B) <= 5", ["gap(A, B) >= -0.005"], False),
    ],
)
def test_seeds_are_awaited_where_they_can_decide(tmp_path, criterion, premises, awaited):
    accuracies = {"A": A, "B": B}
    keys = {"criteria": [criterion], "premises": premises, "target_accuracy": 0.999}
    make_study(tmp_path, accuracies, **keys)
    (found,) = verdicts(comparison_of(tmp_path))
    assert (found.decision, is_awaited(found)) == ("undecided", awaited)


def test_no_seed_is_awaited_for_a_count_that_is_true_in_some_seeds(tmp_path):
    """Its part is undecided for good. The other part is 1.1 in the mean, more than 0 and less than
    5."""
    counted, other = 'metric("bits/average", A) <= 4', 'metric("own/x", A)'
    awaited = {
        f"{counted} and {other} > 0": False,
        f"{counted} or {other} > 5": False,
        f"{counted} and {other} > 1.1": True,
    }
    three_runs(tmp_path, [*awaited], **{"bits/average": [3, 4, 5], "own/x": [1, 1.1, 1.2]})
    found = verdicts(comparison_of(tmp_path))
    assert {one.decision for one in found} == {"undecided"}
    assert {one.criterion.text: is_awaited(one) for one in found} == awaited


@pytest.mark.parametrize(("share", "awaited"), [(1.0, True), (0.6, False), (0.3, True)])
def test_a_level_is_awaited_where_it_can_turn_the_whole(tmp_path, share, awaited):
    """At two of three levels B never reaches the target. The third can fail the whole where all
    must hold, and hold it where one is enough; where two must hold it can do neither."""
    never, late = dict.fromkeys((0, 1, 2), 0.3), {0: 0.9, 1: 0.8, 2: 0.55}  # in rounds 3, 4, 5
    by_level = {(("noise", "on"),): never, (("noise", "low"),): never, (("noise", "off"),): late}
    keys = {"grid": {"noise": {"on": {}, "low": {}, "off": {}}}, "target_accuracy": 0.5}
    criteria = [{"criterion": "rounds(B) <= 4", "share": share}]
    make_study(tmp_path, {"B": by_level}, criteria=criteria, **keys)
    (found,) = verdicts(comparison_of(tmp_path))
    assert [one.decision for _, one in found.judgements] == ["undecided"] * 3
    assert is_awaited(found) is awaited


def test_of_many_pairs_a_report_names_those_with_the_smallest_p(tmp_path):
    noise = np.random.default_rng(1).normal(size=(15, 3))
    rows = {f"M{n}": dict(enumerate(0.5 + 0.01 * noise[n])) for n in range(15)}
    make_study(tmp_path, rows)
    comparison = comparison_of(tmp_path)
    tests = comparison.differences(comparison.study.metric, {})
    table = differences(comparison, {})
    assert (len(tests), len(table.rows)) == (105, 100)
    assert "of 105 pairs the 100 with the smallest p, report.json has all" in table.caption
    assert "corrected for all pairs of its level, and decides" in how_to_read(comparison)
    largest = {f"{one.a} − {one.b}" for one in sorted(tests, key=lambda one: one.test.p_t)[100:]}
    assert largest.isdisjoint(row[0] for row in table.rows)
    assert any(
        line.startswith("105 of 105 differences are not decided. Found")
        for line in undecided(comparison)
    )


def test_pairs_without_a_run_are_not_decided_and_of_the_family(tmp_path):
    """A is better than B, and Holm's correction is over the three pairs of the study."""
    rows = {
        label: {n: base + 0.001 * n * n for n in SEEDS} for label, base in (("A", 0.9), ("B", 0.5))
    }
    rows["B"][0] = 0.51
    make_study(tmp_path, rows, methods={"A": {}, "B": {}, "C": {}})
    comparison = comparison_of(tmp_path)
    (found,) = comparison.differences(comparison.study.metric, {})
    assert (found.winner, found.test.family) == ("A", 3)
    said = "2 of 3 differences are not decided: A − C (no run), B − C (no run)."
    assert said in list(undecided(comparison))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"proposed": ["A"]}, True),
        ({}, False),  # all pairs are in the table of differences
        ({"proposed": ["A"], "criteria": ["p(C, B) < 0.05"]}, False),
    ],
)
def test_a_report_says_which_tables_test_no_baselines_against_each_other(tmp_path, keys, said):
    make_study(tmp_path, {"A": A, "B": B, "C": C}, **keys)
    comparison = comparison_of(tmp_path)
    assert "all 3 pairs" in places_table(comparison, {}).caption
    lines = [line for line in undecided(comparison) if "baselines" in line.lower()]
    assert len(lines) == said
    assert all(line.startswith("In the tables of differences baselines are not") for line in lines)


def test_runs_that_lost_uploads_are_counted_in_the_report(tmp_path):
    three_runs(tmp_path / "good", [])
    assert [*lost_uploads(comparison_of(tmp_path / "good"))] == []
    lost = {"clients/rejected": [0, 2, 1], "clients/trained": [4, 4, 0]}
    three_runs(tmp_path / "lost", [], **lost)
    refused, unused = lost_uploads(comparison_of(tmp_path / "lost"))
    assert "Uploads were refused in 2 of 3 runs (A 2); " in refused
    assert "A round or more used no upload in 1 of 3 runs (A 1); " in unused


def test_a_run_that_is_compared_at_every_level_is_counted_once(tmp_path):
    """Its refused uploads, its loss that is no number, the test of another round that it has, and
    that it was not registered."""
    grid, other = {"noise": {"on": {}, "off": {}}}, {"test/loss": 1.0}
    methods = {"A": {"grid": False}, "B": {}}
    levels = {(("noise", level),): {0: 0.7} for level in grid["noise"]}
    folder = make_study(tmp_path, {"B": levels}, grid=grid, methods=methods)
    lost = {"clients/rejected": 1, "train/loss": nan}
    make_run(folder, "A", 0, 0.8, tested=other, tested_round=3, **lost)
    comparison = comparison_of(tmp_path)
    assert next(lost_uploads(comparison)).startswith("Uploads were refused in 1 of 3 runs (A 1); ")
    assert comparison.not_numbers() == [{"run": "A-seed0", "metric": "train/loss"}]
    assert [one.name for one in comparison.not_counted] == ["test.json of A-seed0"]
    plan = plan_of(comparison.study, [("A", {}, {}), *(("B", dict(one), {}) for one in levels)])
    register(folder, plan, 0)
    line = registration_report(comparison.results, folder).line
    assert "3 runs, such as A-seed0, were not made by the sweep" in line


@pytest.mark.parametrize(
    ("loss", "decision", "reason"),
    [
        (1.0, "holds", "the whole interval is <= 0"),
        (nan, "undecided", "no max(train/loss, A) in seed 2; without them it holds"),
        (inf, "undecided", "no max(train/loss, A) in seed 2; without them it holds"),
    ],
)
def test_a_round_without_a_number_is_one_of_its_seed(tmp_path, loss, decision, reason):
    criterion = 'max("train/loss", A) <= 3'
    three_runs(tmp_path, [criterion], **{"train/loss": [1.01, 0.98, loss]})
    assert judged(tmp_path)[criterion] == (decision, reason)


@pytest.mark.parametrize(
    ("infinite", "decision"), [((), "holds"), ((1,), "undecided"), ((0, 1, 2), "fails")]
)
def test_an_infinite_epsilon_is_more_than_any_number(tmp_path, infinite, decision):
    criteria = ['metric("privacy/epsilon", A) <= 8', 'max("privacy/epsilon", A) <= 8']
    spent = [inf if seed in infinite else 7.0 for seed in (0, 1, 2)]
    three_runs(tmp_path, criteria, **{"privacy/epsilon": spent})
    found = judged(tmp_path)
    count = 3 - len(infinite)
    assert found[criteria[0]] == (decision, f"counted: true for {count} of 3 seeds")
    if decision != "undecided":
        assert found[criteria[1]] == found[criteria[0]]


@pytest.mark.parametrize(
    ("spent", "decision", "reason"),
    [
        ((7.0, 7.0, inf), "undecided", "counted: true for 2 of 3 seeds"),
        ((inf, inf, inf), "fails", "counted: true for 0 of 3 seeds"),
        ((7.0, 7.0, 7.0), "holds", "counted: the same difference in all of 3 seeds"),
    ],
)
def test_an_infinite_epsilon_is_an_increase(tmp_path, spent, decision, reason):
    criterion = 'no_increase("privacy/epsilon", A, B)'
    rows = {"A": dict(enumerate(spent)), "B": dict.fromkeys(range(3), 7.0)}
    folder = make_study(
        tmp_path, {name: dict.fromkeys(range(3), 0.8) for name in rows}, criteria=[criterion]
    )
    for name, epsilons in rows.items():
        for seed, epsilon in epsilons.items():
            rmtree(folder / f"{name}-seed{seed}")
            make_run(folder, name, seed, 0.8, **{"privacy/epsilon": epsilon})
    assert judged(tmp_path)[criterion] == (decision, reason)


def test_a_method_that_has_no_number_in_some_seeds_is_no_winner(tmp_path):
    a, b, c = (
        {seed: 20 + far + NOISE[i, seed] for seed in SEEDS} for i, far in enumerate((-3, 0, 2))
    )
    criteria = ["p(A, B) < 0.05", "p(B, C) < 0.05", "gap(A, B) <= 0"]
    keys = {"task": LanguageModelling(), "selection": "last", "criteria": criteria}
    make_study(tmp_path / "all", {"A": a, "B": b, "C": c}, **keys)
    assert comparison_of(tmp_path / "all").ranking({}).winner == "A"
    make_study(tmp_path / "some", {"A": {**a, 2: inf, 5: nan}, "B": b, "C": c}, **keys)
    found = comparison_of(tmp_path / "some")
    ranking = found.ranking({})
    assert (ranking.leader, ranking.winner) == ("A", None)
    assert ranking.reason == (
        "A is significantly better than every other method, "
        "but in seed 2, 5 its final/perplexity is not a number"
    )
    assert missing_seeds(found).endswith("A has no number of seed 2, 5.")
    assert judged(tmp_path / "some") == {
        criteria[0]: ("undecided", "no p(A, B) in seed 2, 5; without them it holds"),
        criteria[1]: ("holds", "significantly better; Holm over 3"),
        criteria[2]: ("undecided", "no gap(A, B) in seed 2, 5; without them it holds"),
    }
    make_study(tmp_path / "none", {"A": a, "B": b, "C": dict.fromkeys(SEEDS, nan)}, **keys)
    ranking = comparison_of(tmp_path / "none").ranking({})
    assert ranking.winner == "A"
    assert ranking.reason == (
        "A is significantly better than every other method that has a number (C: none)"
    )
