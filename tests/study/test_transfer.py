"""Negative transfer in ``compare``: clients under a method against the same clients alone."""

from __future__ import annotations

import json
from math import sqrt
from pathlib import Path

import pytest
import yaml
from compared import comparison_of, report_of
from outcomes import rows_of
from synthetic_runs import make_run, make_study

from fl_lightning.errors import InputError
from fl_lightning.study.plan.study import Study
from fl_lightning.study.report.compare import compare
from fl_lightning.study.report.transfer_figure import negative_transfer
from fl_lightning.study.report.verdicts import check_criteria, verdicts
from fl_lightning.study.results.gather import gather
from fl_lightning.tasks import LanguageModelling

pytestmark = pytest.mark.usefixtures("figures_only_where_looked_at")
PERPLEXITY = LanguageModelling()
ALONE = {0: [2.0, 3.0, 4.0], 1: [2.0, 2.0, 4.0], 2: [3.0, 3.0, 3.0]}
"""Perplexity of three clients, by seed."""
TOGETHER = {0: [3.0, 3.0, 2.0], 1: [4.0, 1.0, 1.0], 2: [4.0, 5.0, 3.0]}
"""Gains -1, 0, 2; -2, 1, 3; -1, -2, 0: their means are 1/3, 2/3, -1."""
T_2 = 4.302652729911275  # the 97.5 % quantile of Student's t with 2 degrees of freedom


def write_clients(
    run: Path, last: list[float], best: list[float], primary: str = "perplexity"
) -> None:
    """Rounds 3, which validation has chosen in made-up runs, and 5."""
    lines = [f"round,client,group,train_examples,val_examples,{primary},loss"]
    for round, values in ((3, best), (5, last)):
        lines += [
            f"{round},{id},g{id % 2},90,10,{value},{value / 10}" for id, value in enumerate(values)
        ]
    (run / "clients.csv").write_text("\n".join(lines) + "\n")


def study_of(
    root: Path, *, name: str = "study", task=PERPLEXITY, labels=("LocalOnly", "FedAvg"), **keys
) -> Path:
    """Clients of the last round are those above; in round 3 every client of the federation is worse
    by 1."""
    means = {label: dict.fromkeys(ALONE, 0.5) for label in labels}
    folder = make_study(root, means, name=name, task=task, **keys)
    for label in labels:
        values = ALONE if label.startswith("LocalOnly") else TOGETHER
        for seed, last in values.items():
            worse = last if values is ALONE else [other + 1 for other in ALONE[seed]]
            write_clients(folder / f"{label}-seed{seed}", last, worse, task.primary)
    return folder


def test_gains_are_those_computed_by_hand(tmp_path):
    study_of(tmp_path)
    compare("study", tmp_path / "out", tmp_path)
    report = report_of(tmp_path / "out")["transfer"]
    assert report["alone"] == "LocalOnly"
    (level,) = report["levels"]
    found = level["methods"]["FedAvg"]["perplexity"]
    mean, harmed, worst = (found[f"transfer/{name}"] for name in ("mean", "below_zero", "worst"))
    assert mean["values"] == pytest.approx({"0": 1 / 3, "1": 2 / 3, "2": -1.0})
    half = T_2 * sqrt(7 / 9) / sqrt(3)  # the variance of 1/3, 2/3, -1 is 7/9
    assert (mean["mean"], mean["low"], mean["high"]) == pytest.approx((0.0, -half, half), abs=1e-9)
    assert mean["bootstrap_low"] < 0 < mean["bootstrap_high"]
    assert harmed["values"] == pytest.approx({"0": 1 / 3, "1": 1 / 3, "2": 2 / 3})
    assert worst["values"] == {"0": -1.0, "1": -2.0, "2": -2.0}
    assert found["client/worst_perplexity"]["values"] == {"0": 3.0, "1": 4.0, "2": 5.0}
    alone = level["methods"]["LocalOnly"]["perplexity"]
    assert alone["client/worst_perplexity"]["values"] == {"0": 4.0, "1": 4.0, "2": 3.0}
    assert "transfer/mean" not in alone
    assert level["methods"]["FedAvg"]["loss"]["transfer/mean"]["values"]["2"] == pytest.approx(-0.1)
    text = (tmp_path / "out" / "report.md").read_text()
    assert "## Negative transfer in perplexity\n\nGain of a client against LocalOnly.\n" in text
    assert "| LocalOnly (alone) | 3 | 3 | - | - | - | - | - | 3.667 [" in text
    row = next(line for line in text.splitlines() if line.startswith("| FedAvg | 3 | 3 | "))
    low, high = -5 / 3 - T_2 / 3, -5 / 3 + T_2 / 3  # the variance of -1, -2, -2 is 1/3
    assert f"−1.667 [{low:+.3f}, {high:+.3f}]".replace("-", "−") in row
    assert "44.4 [0.0, 92.3]" in row  # the lower end would be below nothing
    rows = rows_of(tmp_path / "out" / "transfer.csv")
    assert len(rows) == 2 * 3 * 3 * 2  # methods, seeds, clients, metrics
    of_one = {"method": "FedAvg", "seed": "1", "name": "0", "metric": "perplexity", "group": "g0"}
    (row,) = [row for row in rows if of_one.items() <= row.items()]
    assert [float(row[name]) for name in ("value", "alone", "gain")] == [4.0, 2.0, -2.0]
    assert (
        "Negative transfer in perplexity: gain of a client against LocalOnly."
        in (tmp_path / "out" / "tables.tex").read_text()
    )


# the interval of the mean gain is -2.19 to 2.19, of the share -0.03 to 0.92, of the worst -3.1 to
# -0.2
CRITERIA = {
    "gain(FedAvg) > -2.2": "holds",
    "gain(FedAvg) > -2.1": "undecided",
    "gain(FedAvg) > 2.2": "fails",
    "below_zero(FedAvg) <= 0.93": "holds",
    "below_zero(FedAvg) <= 0.9": "undecided",
    "worst_gain(FedAvg) >= -0.2": "fails",
    "worst_gain(FedAvg) < -0.2": "holds",
    "worst_client(FedAvg) - worst_client(LocalOnly) > 3": "undecided",  # -1, 0, 2
    "worst_client(FedAvg) - worst_client(LocalOnly) > 4.2": "fails",
    "gain(FedAvg) + 0 * primary(LocalOnly) > -2.2": "holds",
    "no_increase(below_zero, FedAvg, Other)": "undecided",  # equal in every seed
}


def test_criteria_are_about_the_gains(tmp_path):
    labels = ("LocalOnly", "FedAvg", "Other")
    study_of(
        tmp_path,
        labels=labels,
        alone="LocalOnly",
        criteria=[*CRITERIA, 'metric("transfer/mean", Other) > -2.2'],
    )
    comparison = comparison_of(tmp_path)
    found = {one.criterion.text: one.decision for one in verdicts(comparison)}
    assert found == {**CRITERIA, 'metric("transfer/mean", Other) > -2.2': "holds"}
    ((_, judgement),) = verdicts(comparison)[0].judgements
    assert judgement.high == pytest.approx(2.2 + T_2 * sqrt(7 / 9) / sqrt(3))
    assert judgement.seeds == (0, 1, 2)
    check_criteria(comparison)


@pytest.mark.parametrize("diverged", ["FedAvg", "LocalOnly"])
def test_a_seed_of_which_a_client_has_no_number_decides_nothing(tmp_path, diverged):
    """Seed 3, of which the reference has no run, is not named."""
    criteria = ["gain(FedAvg) > -99", "worst_client(FedAvg) < 99"]
    folder = study_of(tmp_path, alone="LocalOnly", criteria=criteria)
    make_run(folder, "FedAvg", 3, 0.5, task=PERPLEXITY)
    document = yaml.safe_load((folder / "study.yaml").read_text())
    (folder / "study.yaml").write_text(json.dumps(document | {"seeds": [0, 1, 2, 3]}))
    values = [float("nan"), *(TOGETHER if diverged == "FedAvg" else ALONE)[0][1:]]
    write_clients(folder / f"{diverged}-seed0", values, values)
    comparison = comparison_of(tmp_path)
    reasons = [one.judgements[0][1] for one in verdicts(comparison)]
    assert [(one.decision, one.reason) for one in reasons] == [
        ("undecided", f"no {what}(FedAvg) in seed 0; without them it holds")
        for what in ("gain", "worst_client")
    ]
    assert [one.seeds for one in reasons] == [(1, 2)] * 2
    assert comparison.transfer.clients({}, "FedAvg", "perplexity").gain.values == {1: 2 / 3, 2: -1}
    assert f"client 0 of {diverged}-seed0" in [one.name for one in comparison.not_counted]


@pytest.mark.parametrize(
    ("criterion", "keys", "said"),
    [
        (
            "gain(FedAvg) > 0",
            {},
            "gain(...); a gain is against the clients alone; add 'alone: LABEL' to the study",
        ),
        (
            "below_zero(LocalOnly) < 1",
            {"alone": "LocalOnly"},
            "below_zero(LocalOnly); it is what the gains are meas",
        ),
        (
            "gain(Other) < 1",
            {"alone": "LocalOnly", "controls": ["Other"]},
            "gain(Other); the clients of a control",
        ),
        ("gains(FedAvg) > 0", {"alone": "LocalOnly"}, "write gain(...)"),
    ],
)
def test_a_gain_of_nothing_is_refused_before_anything_runs(tmp_path, criterion, keys, said):
    folder = study_of(
        tmp_path, labels=("LocalOnly", "FedAvg", "Other"), criteria=[criterion], **keys
    )
    with pytest.raises(InputError) as error:
        Study.read(folder / "study.yaml", find_configs=False)
    assert said in str(error.value)


def test_gains_are_of_the_selected_model_and_of_the_metric_s_direction(tmp_path):
    study_of(tmp_path, selection="best_val")
    found = comparison_of(tmp_path).transfer.clients({}, "FedAvg", "perplexity")
    assert found.gain.values == dict.fromkeys(ALONE, -1.0)
    # equal seeds: no interval
    assert (found.harmed.mean, found.gain.low != found.gain.low) == (1.0, True)
    from fl_lightning.tasks import Classification

    study_of(tmp_path, name="shares", task=Classification())
    found = comparison_of(tmp_path, "shares").transfer.clients({}, "FedAvg", "accuracy")
    assert found.gain.values == pytest.approx({0: -1 / 3, 1: -2 / 3, 2: 1.0})
    assert found.worst.values == {0: 2.0, 1: 1.0, 2: 3.0}


def test_kinds_of_test_examples_are_compared_too(tmp_path):
    folder = study_of(tmp_path)
    for label, seed, value in (
        ("LocalOnly", 0, 2.0),
        ("FedAvg", 0, 3.5),
        ("LocalOnly", 1, 2.0),
        ("FedAvg", 1, 4.5),
    ):
        document = {
            "chosen": "last",
            "round": 5,
            "metrics": {"kind/task_house (code)/perplexity": value},
        }
        (folder / f"{label}-seed{seed}" / "test.json").write_text(json.dumps(document))
    compare("study", tmp_path / "out", tmp_path)
    (level,) = report_of(tmp_path / "out")["transfer"]["levels"]
    found = level["kinds"]["FedAvg"]["perplexity"]["task_house (code)"]
    assert found["values"] == {"0": -1.5, "1": -2.5}
    text = (tmp_path / "out" / "report.md").read_text()
    assert "| kind | LocalOnly (alone) | FedAvg |" in text
    assert "| task_house (code) | 2.000 | −2.000 [" in text


def test_what_cannot_be_compared_is_named(tmp_path):
    """A run of an earlier release, one whose file is damaged, and a control of another
    partition."""
    folder = study_of(
        tmp_path, methods={"LocalOnly": {}, "FedAvg": {}, "FedAvg IID": {}}, controls=["FedAvg IID"]
    )
    make_run(folder, "FedAvg IID", 0, 0.5, task=PERPLEXITY, partition="f" * 64)
    make_run(folder, "FedAvg IID", 1, 0.5, task=PERPLEXITY)  # by chance the partition of the others
    write_clients(folder / "FedAvg IID-seed1", ALONE[1], ALONE[1])
    (folder / "FedAvg-seed1" / "clients.csv").unlink()
    (folder / "FedAvg-seed2" / "clients.csv").write_text("round,client\nx,0\n")
    compare("study", tmp_path / "out", tmp_path)
    report, text = report_of(tmp_path / "out"), (tmp_path / "out" / "report.md").read_text()
    (level,) = report["transfer"]["levels"]
    assert level["methods"]["FedAvg"]["perplexity"]["transfer/mean"]["values"] == {
        "0": pytest.approx(1 / 3)
    }
    assert "FedAvg IID" not in level["methods"]
    assert "- clients.csv of FedAvg-seed1: there is none" in text
    assert "- clients.csv of FedAvg-seed2: it cannot be read" in text
    assert "Left out, since clients hold other examples there: FedAvg IID." in text
    assert "the same for every method of a seed; the controls (FedAvg IID) have others." in text


def test_without_a_reference_nothing_is_said(tmp_path):
    study_of(tmp_path, labels=("FedAvg", "Oracle"))
    compare("study", tmp_path / "out", tmp_path)
    assert "transfer" not in report_of(tmp_path / "out")
    assert "transfer" not in (tmp_path / "out" / "report.md").read_text()
    assert not (tmp_path / "out" / "transfer.csv").exists()


def test_the_reference_is_the_only_one_or_the_one_that_is_named(tmp_path):
    labels = ("LocalOnly", "LocalOnly slow", "FedAvg")
    folder = study_of(tmp_path, labels=labels)
    found = comparison_of(tmp_path)
    assert found.transfer.alone == ""
    assert [entry.reason for entry in found.not_counted] == [
        "clients train alone in LocalOnly and in LocalOnly slow; write alone: LocalOnly in the study file"
    ]
    path = folder / "study.yaml"
    document = yaml.safe_load(path.read_text())
    path.write_text(json.dumps(document | {"alone": "LocalOnly slow"}))
    found = comparison_of(tmp_path).transfer
    assert (found.alone, found.labels("client")) == (
        "LocalOnly slow",
        ["LocalOnly slow", "LocalOnly", "FedAvg"],
    )
    assert found.clients({}, "LocalOnly", "perplexity").gain.mean == 0.0
    for wrong, said in (
        ({"alone": "LocalOnyl"}, r"alone: LocalOnyl; one of LocalOnly, .*; write LocalOnly$"),
        ({"controls": ["IID"]}, "controls: IID; one of LocalOnly"),
        ({"alone": "LocalOnly", "controls": ["LocalOnly"]}, "LocalOnly is alone too"),
        ({"alone": [1]}, "it is the label of the method"),
    ):
        path.write_text(json.dumps(document | wrong))
        with pytest.raises(InputError, match=said):
            Study.read(path)
    path.write_text(json.dumps(document))
    make_run(folder, "FedAvg", 9, 0.5, task=PERPLEXITY, name="other", partition="f" * 64)
    assert gather("study", tmp_path).runs  # a run of no cell changes nothing


def test_clients_are_drawn_by_name_where_they_are_the_same_with_every_seed(tmp_path):
    folder = study_of(tmp_path)
    figure = negative_transfer(comparison_of(tmp_path), {})
    (axes,) = figure.axes  # partitions differ by seed: the distribution
    assert "at most" in axes.get_ylabel()
    for path in folder.glob("*-seed*/metadata.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"partition_sha256": "0" * 64}))
    (axes,) = negative_transfer(comparison_of(tmp_path), {}).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["g0 0", "g0 2", "g1 1"]
    (worst,) = [line for line in axes.lines if line.get_marker() == "X" and len(line.get_xdata())]
    # client 0: -1, -2, -1
    assert (worst.get_xdata()[0], worst.get_ydata()[0]) == (pytest.approx(-4 / 3), 0)
