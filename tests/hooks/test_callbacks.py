"""Stressors are pure functions of (seed, round, client); meters report what they saw and leave the
terminal as it was."""

import io
import logging
import math
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from callbacks import (
    ByzantineClients,
    Calibration,
    LabelNoise,
    PartitionFigure,
    ProgressBar,
    StragglerDropout,
)
from callbacks.figures.partition_figure import partition_figure
from fl_lightning.client import Assignment, Client
from fl_lightning.errors import InputError
from fl_lightning.exchange import asked_steps
from fl_lightning.hooks import RoundRecord
from fl_lightning.metrics import brier_score, expected_calibration_error
from fl_lightning.tasks import Classification, Regression, Task
from fl_lightning.tasks.base import Sums

# five of fifty clients are empty
SIZES = np.array([0 if k % 10 == 3 else 5 + k for k in range(50)])
STARTS = SIZES.cumsum() - SIZES


class Data:
    task, num_classes, num_clients, sizes = Classification(), 10, len(SIZES), SIZES
    group_names = ()
    train_target = torch.arange(SIZES.sum()) % 10

    def client(self, id: int) -> Client:
        indices = np.arange(STARTS[id], STARTS[id] + SIZES[id])
        return Client(id, train=indices, val=np.empty(0, np.int64))

    def labels(self, id: int) -> torch.Tensor:
        return torch.from_numpy(self.client(id).train % 10)

    def group_counts(self) -> np.ndarray:
        return np.stack(
            [np.bincount(self.labels(k), minlength=10) for k in range(self.num_clients)]
        )


@dataclass
class FakeContext:
    seed: int = 1
    max_rounds: int = 100
    run_dir: Path = Path()
    method: Any = None
    callbacks: tuple[Any, ...] = ()
    data: Any = field(default_factory=Data)
    figures: dict[str, Figure] = field(default_factory=dict)

    def log_figure(self, name: str, figure: Figure) -> None:
        figure.savefig(io.BytesIO(), dpi=20)  # it can be drawn
        self.figures[name] = figure


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Global generators in a state that no run has, and the same state afterwards: nobody read or
    moved them."""
    random.seed(666), np.random.seed(666), torch.manual_seed(666)  # noqa: NPY002
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002
    yield
    assert before == (
        random.getstate(),
        np.random.get_state()[1].tolist(),  # noqa: NPY002
        torch.get_rng_state().tolist(),
    )


def noisy_labels(
    noise: LabelNoise, round: int, context: FakeContext, order: list[int] | None = None
) -> dict[int, list[int]]:
    ids = order or range(context.data.num_clients)
    result = {}
    for k in ids:
        labels = context.data.labels(k)
        result[k] = noise.change_labels(
            labels, client=context.data.client(k), round=round, context=context
        ).tolist()
        assert torch.equal(labels, context.data.labels(k)), "the given labels were changed in place"
    return result


def flips(changed: dict[int, list[int]]) -> dict[int, int]:
    counts = {
        k: sum(a != b for a, b in zip(new, Data().labels(k).tolist(), strict=True))
        for k, new in changed.items()
    }
    return {k: count for k, count in counts.items() if count}


def test_shares_of_classes_are_changed_as_the_classes_are() -> None:
    """What a stressor before made of labels that are sure is what it makes of the labels."""
    context = FakeContext()
    client, labels = context.data.client(0), context.data.labels(0)
    shares = torch.nn.functional.one_hot(labels, 10).float()
    stressors = [LabelNoise(1, 1.0, 0.5), ByzantineClients(1.0, "label_flip")]
    for stressor in stressors:
        given = {"client": client, "round": 1, "context": context}
        changed = stressor.change_labels(labels, **given)
        assert not torch.equal(changed, labels)
        assert torch.equal(stressor.change_labels(shares, **given).argmax(1), changed)
        assert torch.equal(stressor.change_labels(shares, **given).sum(1), torch.ones(len(labels)))


@pytest.mark.usefixtures("poisoned")
def test_label_noise_is_exact_and_the_same_every_round() -> None:
    noise, context = LabelNoise(round=60, clients=0.2, labels=0.3), FakeContext()
    noise.on_check(context)
    assert flips(noisy_labels(noise, 59, context)) == {}
    at_60 = noisy_labels(noise, 60, context)
    assert len(flips(at_60)) == round(0.2 * 45)  # of the clients with data
    assert flips(at_60) == {k: round(0.3 * SIZES[k]) for k in flips(at_60)}
    assert all(0 <= label < 10 for labels in at_60.values() for label in labels)
    backwards = [*reversed(range(50))]
    assert (
        noisy_labels(LabelNoise(round=60, clients=0.2, labels=0.3), 99, context, backwards) == at_60
    )
    other_seed = FakeContext(seed=2)
    noise.on_check(other_seed)
    assert flips(noisy_labels(noise, 60, other_seed)).keys() != flips(at_60).keys()


def test_flips_are_uniform_over_the_other_classes() -> None:
    context = FakeContext(
        data=SimpleNamespace(task=Classification(), num_classes=4, sizes=np.array([30_000]))
    )
    client = Client(0, train=np.arange(30_000), val=np.empty(0, np.int64))
    labels = torch.full((30_000,), 2)
    changed = LabelNoise(round=1, clients=1.0, labels=1.0).change_labels(
        labels, client=client, round=1, context=context
    )
    counts = torch.bincount(changed, minlength=4)
    assert counts[2] == 0
    assert (counts[[0, 1, 3]] - 10_000).abs().max() < 5 * math.sqrt(30_000 * 2 / 9)


def cohort(ids: list[int]) -> list[Assignment]:
    return [Assignment(Data().client(k)) for k in ids]


@pytest.mark.usefixtures("poisoned")
def test_label_noise_among_the_cohort_survives_a_resume() -> None:
    context, sampled = FakeContext(), [7, 3, 21, 40, 11, 30]  # 3 is empty
    noise = LabelNoise(round=5, clients=0.4, labels=0.5, among="cohort")
    noise.change_cohort(cohort([1, 2]), round=4, context=context)
    noise.change_cohort(cohort(sampled), round=5, context=context)
    noise.change_cohort(cohort([1, 2]), round=6, context=context)
    changed = noisy_labels(noise, 6, context)
    assert len(flips(changed)) == 2
    assert set(flips(changed)) < {7, 21, 40, 11, 30}

    resumed, reordered = (
        LabelNoise(round=5, clients=0.4, labels=0.5, among="cohort") for _ in range(2)
    )
    resumed.load_state_dict(noise.state_dict())
    reordered.change_cohort(cohort(sampled[::-1]), round=5, context=context)
    assert noisy_labels(resumed, 6, context) == noisy_labels(reordered, 6, context) == changed
    with pytest.raises(ValueError, match="joined the run after round 5"):
        noisy_labels(LabelNoise(round=5, among="cohort"), 6, context)


def test_label_noise_that_never_comes_is_said(caplog: pytest.LogCaptureFixture) -> None:
    LabelNoise(round=60).on_check(FakeContext(max_rounds=3))
    assert "starts at round 60 and the run ends at 3" in caplog.text


def test_a_noisy_client_that_stays_clean_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    data = SimpleNamespace(task=Regression(), num_classes=1, sizes=np.ones(1, np.int64))
    noise, context = LabelNoise(round=1, clients=1.0, labels=1.0), FakeContext(data=data)
    client, labels = Client(0, np.arange(1), np.empty(0, np.int64)), torch.ones(1)
    for round in (1, 2):
        given = {"client": client, "round": round, "context": context}
        assert torch.equal(noise.change_labels(labels, **given), labels)
    assert caplog.text.count("no other labels for client 0") == 1


def test_a_task_with_one_output_and_wrong_targets_of_its_own_may_be_noisy() -> None:
    class Negated(Task):
        """Of a target the wrong one is its negative."""

        def loss(self, outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return (outputs - target).abs().mean()

        def examplewise(self, outputs: torch.Tensor, target: torch.Tensor) -> Sums:
            return {"loss": ((outputs - target).abs(), self.weight(target))}

        def corrupt(self, target: torch.Tensor, where: Any, *drawn: Any) -> torch.Tensor:
            return target.index_fill(0, torch.from_numpy(where), -1.0)

    def checked(task: Task, target: torch.Tensor) -> None:
        data = SimpleNamespace(task=task, num_classes=1, train_target=target)
        LabelNoise(round=1).on_check(FakeContext(data=data))

    checked(Negated(), torch.ones(4))
    with pytest.raises(InputError, match="LabelNoise on data with one class"):
        checked(Classification(), torch.zeros(4, dtype=torch.int64))


def test_label_noise_scales_to_a_large_federation() -> None:
    """100 000 clients: only sizes are read, and no client but the asked one."""
    data = SimpleNamespace(task=Classification(), num_classes=10, sizes=np.ones(100_000, np.int64))
    noise, context = LabelNoise(round=1, clients=0.1, labels=1.0), FakeContext(data=data)
    noisy = [
        k for k in range(3000)
        if noise.change_labels(torch.tensor([1]), client=Client(k, np.array([k]), np.array([])), round=1, context=context) != 1
    ]  # fmt: skip
    assert abs(len(noisy) - 300) < 5 * math.sqrt(3000 * 0.1 * 0.9)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("mode", ["before", "after", "partial"])
def test_stragglers_do_not_depend_on_the_order(mode: Any) -> None:
    dropout, ids = StragglerDropout(0.4, mode=mode, work=0.25), list(range(0, 50, 2))
    forward = dropout.change_cohort(cohort(ids), round=3, context=FakeContext())
    backward = dropout.change_cohort(cohort(ids[::-1]), round=3, context=FakeContext())
    outcome = [(a.client.id, a.work, a.trains, a.returns) for a in forward]
    assert outcome == [(a.client.id, a.work, a.trains, a.returns) for a in backward[::-1]]
    alone = [
        dropout.change_cohort(cohort([k]), round=3, context=FakeContext())[0].returns for k in ids
    ]
    assert alone == [a.returns for a in forward]
    expected = {
        "before": (1.0, False, False),
        "after": (1.0, True, False),
        "partial": (0.25, True, True),
    }[mode]
    assert {o[1:] for o in outcome} == {(1.0, True, True), expected}
    assert outcome != [
        (a.client.id, a.work, a.trains, a.returns)
        for a in dropout.change_cohort(cohort(ids), round=4, context=FakeContext())
    ]


def test_a_share_of_the_steps_is_no_step_more_for_rounding() -> None:
    data = SimpleNamespace(num_steps=lambda client, epochs: 100)
    fed: Any = SimpleNamespace(data=data, local_epochs=1, max_local_steps=None)
    asked = [asked_steps(fed, Data().client(0), work) for work in (0.55, 0.551, 0.07, 0.001)]
    assert asked == [55, 56, 7, 1]


def test_the_straggler_rate_is_the_probability() -> None:
    dropout, context, n = StragglerDropout(0.2), FakeContext(), 100 * 50
    lost = sum(
        not a.returns
        for r in range(1, 101)
        for a in dropout.change_cohort(cohort([*range(50)]), round=r, context=context)
    )
    assert abs(lost - 0.2 * n) < 4 * math.sqrt(n * 0.2 * 0.8)


def test_stressors_compose() -> None:
    """Neither undoes what the other did."""
    gone = [Assignment(Data().client(0), work=0.5, trains=False, returns=False)]
    after = StragglerDropout(1.0, mode="after").change_cohort(gone, round=1, context=FakeContext())[
        0
    ]
    partial = StragglerDropout(1.0, mode="partial", work=0.5).change_cohort(
        gone, round=1, context=FakeContext()
    )[0]
    assert (after.trains, after.returns) == (False, False)
    assert (partial.work, partial.trains, partial.returns) == (0.25, False, False)


@pytest.mark.parametrize(
    "make",
    [
        lambda: LabelNoise(round=0),
        lambda: LabelNoise(clients=10),
        lambda: LabelNoise(labels=-0.1),
        lambda: LabelNoise(among="all"),  # type: ignore[arg-type]
        lambda: StragglerDropout(20),
        lambda: StragglerDropout(mode="late"),  # type: ignore[arg-type]
        lambda: StragglerDropout(work=0),
        lambda: Calibration(bins=0),
        lambda: ProgressBar(refresh_per_second=0),
    ],
)
def test_bad_arguments_are_refused_in_three_parts(make: Any) -> None:
    with pytest.raises(ValueError, match=r".*; .*; "):
        make()


def random_probs(saturated: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(400, 10, generator=generator) * (80 if saturated else 3)
    return logits.softmax(1), torch.randint(10, (400,), generator=generator)


@pytest.mark.parametrize("saturated", [False, True])
def test_calibration_is_the_metric_and_draws_the_last_round(saturated: bool) -> None:
    """Also where many confidences are exactly 1."""
    probs, target = random_probs(saturated)
    meter, context, record = Calibration(), FakeContext(), RoundRecord(7)
    meter.on_evaluate(probs, target, record, context)
    assert record.metrics["test/ece"] == expected_calibration_error(probs, target)
    assert record.metrics["test/brier"] == brier_score(probs, target)
    assert context.figures == {}
    resumed = Calibration()
    resumed.load_state_dict(meter.state_dict())
    for each in (meter, resumed):
        context.figures.clear()
        each.on_fit_end({}, context)
        (title,) = [
            axes.get_title()
            for axes in context.figures["reliability_round_0007"].axes
            if axes.get_title()
        ]
        assert f"ECE {record.metrics['test/ece']:.3f}" in title


def test_two_calibrations_of_one_run_agree() -> None:
    same, other = Calibration(10), Calibration(20)
    same.on_check(FakeContext(callbacks=(same, Calibration(10))))
    with pytest.raises(InputError, match="of 10 and 20 bins, and one test/ece; leave one"):
        same.on_check(FakeContext(callbacks=(same, other)))


def test_calibration_outlives_a_diverged_model() -> None:
    probs, target = random_probs()
    meter, context, record = Calibration(every=1), FakeContext(), RoundRecord(1)
    meter.on_evaluate(probs * float("nan"), target, record, context)
    meter.on_fit_end({}, context)
    assert math.isnan(record.metrics["test/ece"])
    assert math.isnan(record.metrics["test/brier"])
    assert context.figures == {}


def test_partition_figure() -> None:
    context = FakeContext()
    PartitionFigure().on_setup(context)
    assert "50 clients" in context.figures["partition"].axes[0].get_title()
    many = partition_figure(np.ones((1001, 3), int))
    assert "200 of 1001 clients" in many.axes[0].get_title()
    partition_figure(np.zeros((3, 2), int)).savefig(io.BytesIO())
    named = partition_figure(np.ones((3, 2), int), "group", ("code", "rewriting")).axes[1]
    assert [label.get_text() for label in named.get_yticklabels()] == ["code", "rewriting"]


def fake_round(bar: ProgressBar, r: int, context: FakeContext) -> None:
    bar.on_round_start(r, context)
    bar.on_client_end(Data().client(0), r, context)
    bar.on_round_end(
        RoundRecord(r, {"test/accuracy": r / 100, "clients/trained": 1.0, "comm/total_bytes": 1e6}),
        context,
    )


def test_progress_is_about_ten_lines_where_there_is_no_terminal(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    bar, context = ProgressBar(), FakeContext()
    with caplog.at_level(logging.INFO, "fl_lightning"):
        bar.on_setup(context)
        for r in range(1, 101):
            fake_round(bar, r, context)
        bar.on_fit_end({}, context)
    assert len(caplog.messages) == 11
    assert "round 50/100  accuracy 50.0 %, best 50.0 %" in caplog.text
    assert "100.0 MB" in caplog.messages[-1]
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("rounds", [1, 9, 10, 19, 99, 109])
def test_a_run_of_any_length_has_at_most_eleven_lines(rounds: int) -> None:
    bar = ProgressBar()
    bar._max_rounds = rounds
    shown = [round for round in range(1, rounds + 1) if bar._is_milestone(round)]
    assert {1, rounds} <= {*shown}
    assert min(rounds, 7) <= len(shown) <= 11


def test_the_terminal_is_given_back_after_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    for name, value in {"TERM": "xterm", "COLUMNS": "100"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stderr", terminal)
    handler = logging.StreamHandler(terminal)
    monkeypatch.setattr(logging.getLogger("fl_lightning"), "handlers", [handler])
    bar, context = ProgressBar(), FakeContext()
    bar.on_setup(context)
    fake_round(bar, 1, context)
    bar.on_round_start(2, context)
    logging.getLogger("fl_lightning").warning("a line above the display")
    assert "\x1b[?25l" in terminal.getvalue()  # cursor hidden
    bar.on_exception(KeyboardInterrupt(), context)
    assert sys.stderr is terminal
    assert handler.stream is terminal
    after = terminal.getvalue().rpartition("\x1b[?25l")[2]
    assert "\x1b[?25h" in after  # cursor shown
    # and no line of a round that will not be finished
    assert "left" not in after.rpartition("\x1b[?25h")[2]
    assert "a line above the display\n" in terminal.getvalue()
    assert "accuracy 1.0 %" in terminal.getvalue()
