"""The chart of when clients were at work shows the ledger's times, and leaves the run alone."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from ranked import result
from ten import SMALL
from toy import run, sgd

from callbacks import TimelineFigure
from callbacks.figures.timeline_figure import timeline_figure
from fl_lightning.clock import Clock, Diurnal, FedBuff, LogNormalDevices
from fl_lightning.conformance.toy import images
from fl_lightning.methods import FedAvg
from fl_lightning.study.metric_names import Column
from fl_lightning.study.report.curves import seconds_curve


def trained(folder: Path, **settings):
    clock = Clock(
        devices=LogNormalDevices(), availability=Diurnal(online=2.0, offline=1.0, day=4.0)
    )
    settings = {"clock": clock, "local_epochs": 1, "max_rounds": 8, **settings}
    return run(FedAvg(network=SMALL, optimizer=sgd(0.1)), images(), folder, **settings)


def test_it_shows_the_ledger_and_leaves_the_run_alone(tmp_path):
    """Also of a run that was continued: what it shows of rounds before is in checkpoints."""
    rounds = FedBuff(4, 2)
    plain = result(trained(tmp_path / "plain", rounds=rounds).run_dir)
    figure = TimelineFigure(rounds=3)
    trainer = trained(tmp_path / "drawn", rounds=rounds, callbacks=[figure])
    assert result(trainer.run_dir) == plain
    with (trainer.run_dir / "ledger.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if int(row["round"]) > 5]
    expected = [
        [
            int(row["round"]),
            int(row["client"]),
            row["status"],
            float(row["started"]),
            float(row["ended"]),
        ]
        for row in rows
    ]
    assert figure.seen["bars"] == expected
    metrics = pd.read_csv(trainer.run_dir / "metrics.csv")
    assert figure.seen["ends"] == metrics["clock/seconds"].tolist()[4:]
    counted = sum(figure.seen["staleness"].values())
    assert counted == metrics["clients/trained"].sum()
    total = sum(int(versions) * count for versions, count in figure.seen["staleness"].items())
    assert total == pytest.approx((metrics["clients/staleness"] * metrics["clients/trained"]).sum())
    assert (trainer.run_dir / "figures" / "timeline.png").stat().st_size > 10_000
    half = trained(
        tmp_path / "half", rounds=rounds, callbacks=[TimelineFigure(rounds=3)], max_rounds=4
    )
    again = TimelineFigure(rounds=3)
    trained(
        tmp_path / "half",
        rounds=rounds,
        callbacks=[again],
        ckpt_path=str(half.run_dir),
        allow_changed=True,
    )
    assert again.seen == figure.seen


def test_bars_lie_where_the_ledger_says(tmp_path):
    bars = [[1, 7, "trained", 0.0, 2.0], [1, 3, "lost", 0.0, 1.5], [2, 7, "rejected", 2.0, 5.0]]
    axes, below = timeline_figure(bars, [0.0, 2.0, 5.0], {0: 3, 2: 1}, 0.5).axes
    drawn = Counter(
        (p.get_x(), p.get_width(), round(p.get_y() + p.get_height() / 2)) for p in axes.patches
    )
    assert drawn == Counter([(0.0, 2.0, 1), (0.0, 1.5, 0), (2.0, 3.0, 1)])
    assert [text.get_text() for text in axes.get_yticklabels()] == ["3", "7"]
    used, lost, rejected = sorted(
        axes.patches, key=lambda patch: (patch.get_x(), -patch.get_width())
    )
    assert lost.get_zorder() < min(used.get_zorder(), rejected.get_zorder()), (
        "asked anew while it is late"
    )
    assert [bar.get_height() for bar in below.patches] == [75.0, 25.0]
    assert "mean 0.50" in below.get_legend_handles_labels()[1]
    with pytest.raises(ValueError, match="at work"):
        timeline_figure([], [])


def test_edge_servers_are_no_clients():
    bars = [[1, 3, "trained", 0.0, 1.0], [1, -1, "edge", 1.0, 2.0]]
    (axes,) = timeline_figure(bars, [0.0, 2.0]).axes
    assert axes.get_title().endswith("1 client")
    assert [label.get_text() for label in axes.get_yticklabels()] == ["edge 0", "3"]


def test_without_a_clock_it_is_idle(tmp_path, caplog):
    trained(tmp_path, clock=None, callbacks=[TimelineFigure()], max_rounds=1)
    assert "no virtual time" in caplog.text


def test_curves_over_virtual_seconds():
    """Means over seeds of the rounds that all of them evaluated; nothing where one has no clock."""
    tested = Column("test/accuracy", "accuracy", 100.0)

    def run_of(*rows: dict[str, float]) -> SimpleNamespace:
        return SimpleNamespace(record=SimpleNamespace(history=list(rows)))

    one = run_of(
        {"round": 1, "clock/seconds": 2.0},
        {"round": 2, "clock/seconds": 5.0, "test/accuracy": 0.5},
    )
    two = run_of(
        {"round": 1, "clock/seconds": 1.0, "test/accuracy": 0.1},
        {"round": 2, "clock/seconds": 3.0, "test/accuracy": 0.7},
    )
    seconds, values = seconds_curve([one, two], tested)
    assert seconds.tolist() == [4.0]
    assert values.tolist() == [[50.0], [70.0]]
    none = run_of({"round": 1}, {"round": 2, "test/accuracy": 0.7})
    assert np.size(seconds_curve([one, none], tested)[0]) == 0
