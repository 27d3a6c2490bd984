"""A winner is named where five seeds or more show it, of methods that have learnt something."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from compared import comparison_of, report_of
from synthetic_runs import make_run, make_study

from fl_lightning.study.report.compare import compare
from fl_lightning.study.report.comparison import Comparison
from fl_lightning.study.statistics import sequence_interval
from fl_lightning.tasks import Classification, LanguageModelling, Regression

pytestmark = pytest.mark.usefixtures("figures_only_where_looked_at")


def study(
    root,
    seeds: int,
    base: float,
    gain: float,
    spread: float = 0.0,
    guess: float | None = 0.1,
    **more,
):
    """Two methods of which A is better by about ``gain``, with every seed."""
    for seed in range(seeds):
        of_seed = base + spread * (-1) ** seed * (seed + 1)
        make_run(root / "study", "A", seed, of_seed + gain * (1 + 0.1 * seed), guess=guess, **more)
        make_run(root / "study", "B", seed, of_seed, guess=guess, **more)
    return root


@pytest.mark.parametrize(("seeds", "winner"), [(2, None), (3, None), (4, None), (5, "A"), (6, "A")])
def test_fewer_than_five_seeds_name_no_winner_and_the_report_says_why(
    tmp_path, capsys, seeds, winner
):
    compare("study", tmp_path / "out", study(tmp_path / "runs", seeds, base=0.8, gain=0.05))
    report, text = report_of(tmp_path / "out"), (tmp_path / "out/report.md").read_text()
    assert (report["leader"], report["winner"]) == ("A", winner)
    assert report["gap"]["p_t"] < 0.05  # the statistics are as they were
    terminal = capsys.readouterr().out
    for said in (text, terminal):
        assert ("winner: A" in said) == (winner is not None)
        assert (f"but no winner is named with fewer than 5 seeds: with {seeds}, so" in said) == (
            winner is None
        )


@pytest.mark.parametrize(("proposed", "family"), [([], 3), (["A"], 2), (["A", "C"], 3)])
def test_a_method_none_of_whose_runs_counts_is_in_the_family_and_named(tmp_path, proposed, family):
    """What is asked does not get fewer by cells that fail."""
    rows = {"A": {}, "B": {}}
    for seed in range(5):
        rows["B"][seed] = 0.8 + 0.02 * (-1) ** seed
        rows["A"][seed] = rows["B"][seed] + 0.05 * (1 + 0.1 * seed)
    methods = {"methods": {"A": {}, "B": {}, "C": {}}, "proposed": proposed}
    make_study(tmp_path, rows, **methods)
    found = comparison_of(tmp_path)
    (one,) = found.differences(found.study.metric, {})
    assert (one.a, one.b, one.test.family) == ("A", "B", family)
    assert one.test.p_holm == pytest.approx(family * one.test.p_t)
    ranking = found.ranking({})
    assert ranking.leader == "A"
    assert "every other method that has a number (C: none)" in ranking.reason


def test_no_winner_beside_an_interval_without_zero_has_the_p_that_decides(tmp_path, capsys):
    worse = {seed: 0.8 + 0.02 * (-1) ** seed for seed in range(5)}
    better = {seed: value + 0.01 + 0.0048 * (seed - 2) for seed, value in worse.items()}
    make_study(tmp_path / "runs", {"A": better, "B": worse, "C": worse}, proposed=["A"])
    compare("study", tmp_path / "out", tmp_path / "runs")
    gap = report_of(tmp_path / "out")["gap"]
    assert gap["low"] > 0 < 0.05 < gap["p_holm"]
    text = (tmp_path / "out/report.md").read_text()
    said = "95 % interval [+0.06, +1.94], p (Holm) 0.084, 5 seeds."
    assert said in text
    assert said in capsys.readouterr().out
    assert "p (Holm) is the t-test's, corrected for all pairs of its level, and decides" in text


def test_where_nobody_learnt_nobody_wins(tmp_path, capsys):
    """The differences are as sure as can be; the accuracies are around the share of the largest
    class."""
    compare(
        "study", tmp_path / "out", study(tmp_path / "runs", 6, base=0.12, gain=0.01, spread=0.02)
    )
    report, text = report_of(tmp_path / "out"), (tmp_path / "out/report.md").read_text()
    assert (report["leader"], report["winner"]) == ("A", None)
    assert (
        "**no winner.** A is significantly better than every other method, but it has not learnt"
        in text
    )
    assert "than 10.00, which one answer to all test examples can have" in text
    assert "Nobody has learnt anything: no method's accuracy" in capsys.readouterr().out


def test_who_has_learnt(tmp_path):
    def learnt(name: str, accuracies, **more):
        for seed, accuracy in enumerate(accuracies):
            make_run(tmp_path / name / "study", "A", seed, accuracy, **more)
        return comparison_of(tmp_path / name).has_learnt("A", {})

    assert learnt("by interval", [0.2, 0.21, 0.19], guess=0.1) is True
    assert learnt("not by interval", [0.2, 0.4, 0.11], guess=0.1) is False
    assert learnt("collapsed, always to one class", [0.1, 0.1, 0.1], guess=0.1) is False
    assert learnt("equal and better", [0.3, 0.3, 0.3], guess=0.1) is True
    assert learnt("worse, with one seed", [0.05], guess=0.1) is False
    assert learnt("better, with one seed", [0.9], guess=0.1) is None
    assert learnt("a run of before", [0.9, 0.91, 0.92]) is None
    looked_at = Comparison(comparison_of(tmp_path / "by interval").results, sequence_interval)
    assert looked_at.has_learnt("A", {}) is None  # seeds that are added: three say nothing
    perplexity = {"task": LanguageModelling()}
    assert learnt("less is better", [20.0, 21.0, 22.0], guess=60.0, **perplexity) is True
    assert (
        learnt("less is better, and it is not less", [60.0, 61.0, 62.0], guess=60.0, **perplexity)
        is False
    )


def test_the_constant_guess_is_the_best_that_any_constant_reaches():
    """By trying constants."""
    classes = torch.tensor([0, 2, 2, 1, 2, 0, 2])
    assert Classification().constant_guess(classes) == max(
        (classes == c).double().mean() for c in range(3)
    )
    assert Classification().constant_guess(torch.zeros(3, 4)) is None  # several labels an example
    numbers = torch.tensor([[1.0, 5.0], [2.0, -1.0], [6.0, 0.0]])
    tried = np.linspace(-8, 8, 1601)
    best = [min(np.square(numbers[:, d].numpy() - c).mean() for c in tried) for d in range(2)]
    assert Regression().constant_guess(numbers) == pytest.approx(np.mean(best), abs=1e-4)
    tokens = torch.tensor([[7, 7, 3, -100], [7, -100, -100, -100]])
    task = LanguageModelling()
    shares = torch.zeros(8, dtype=torch.double).index_fill(0, torch.tensor([7]), 0.75)
    shares[3] = 0.25
    logits = shares.log().expand(2, 4, 8)
    sums = task.examplewise(logits, tokens)
    nats, weight = (float(part.sum()) for part in sums["loss"])
    assert task.constant_guess(tokens) == pytest.approx(np.exp(nats / weight))
    assert LanguageModelling(primary="token_accuracy").constant_guess(tokens) == 0.75
    for empty in (torch.empty(0, dtype=torch.int64), torch.full((2, 3), -100)):
        assert (task if empty.ndim == 2 else Classification()).constant_guess(empty) is None
