"""Meters that draw: what they show is what the run did, they leave its result alone, and no figure
ever ends it."""

from __future__ import annotations

import csv
import io
import json
import logging
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from outcomes import rows_of
from places import ROOT
from refusals import refused
from tiny_language import fit, method_of
from torch import nn
from torch.nn import functional as F
from toy import run_for_nothing

import callbacks
from callbacks import (
    AccuracyBytesFigure,
    BitWidthFigure,
    ClientAccuracyFigure,
    ConfusionMatrix,
    FeatureMap,
    GradientNorms,
    LossLandscape,
)
from callbacks.figures.accuracy_bytes_figure import accuracy_bytes_figure
from callbacks.figures.bit_width_figure import bit_width_figure, layer_bits
from callbacks.figures.client_accuracy_figure import client_accuracy_figure
from callbacks.figures.confusion_matrix import as_csv, confusion_counts, confusion_figure
from callbacks.figures.drawing import student_and_teacher
from callbacks.figures.feature_map import embed, feature_figure, penultimate
from callbacks.figures.loss_landscape import contour_figure, curve_figure, filter_normalised
from callbacks.meters.gradient_norms import gradient_figure
from fl_lightning.conformance.toy import CENTRES, Points, images, on_images, on_points, run, sgd
from fl_lightning.federation import weights_hash
from fl_lightning.hooks import RoundRecord, Stressor
from fl_lightning.methods import (
    AQFL,
    FedAvg,
    FedExP,
    FedKD,
    FedMosaic,
    FedMPQ,
    FedMPQKD,
    FedProx,
    FedRep,
    FedVEMoE,
)
from fl_lightning.models import SmallCNN
from fl_lightning.tasks import Classification

FIGURES = {
    "accuracy_bytes", "bit_widths", "client_accuracy", "confusion_matrix", "feature_map", "gradient_norms", "loss_landscape",
}  # fmt: skip


class Dropping(nn.Module):
    """Has what a careless measurement would disturb: BatchNorm's statistics and counter, and the
    dropout stream."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.first, self.normal = nn.Conv2d(3, 4, 3, stride=4), nn.BatchNorm2d(4, momentum=None)
        self.drop, self.last = nn.Dropout(0.3), nn.Linear(4 * 4 * 4, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(F.relu(self.normal(self.first(x))).flatten(1)))


def meters() -> list[Any]:
    return [
        BitWidthFigure(), GradientNorms(every=2, clients=2), FeatureMap(examples=30, perplexity=5),
        LossLandscape(points=3, examples=20, dimensions=1), ClientAccuracyFigure(), ConfusionMatrix(every=2),
        AccuracyBytesFigure(),
    ]  # fmt: skip


def rows(run_dir: Path) -> list[dict[str, str]]:
    return rows_of(run_dir / "metrics.csv")


def drawn(run_dir: Path) -> set[str]:
    assert {path.stem for path in (run_dir / "figures").glob("*.pdf")} == {
        p.stem for p in (run_dir / "figures").glob("*.png")
    }
    return {path.stem for path in (run_dir / "figures").glob("*.png")}


def dropping(method: Any) -> Any:
    method.network_spec, method.optimizer_spec = Dropping, sgd(0.05)
    return method


METHODS = {
    "FedMPQKD": lambda: dropping(FedMPQKD(teacher="joint", activation_bits=4)),
    "FedKD": lambda: dropping(FedKD()),
    "FedMosaic": lambda: FedMosaic(
        reference=lambda C: SmallCNN(C, width=4), rank=2, num_blocks=2, optimizer=sgd(0.05)
    ),
}


@pytest.mark.slow
@pytest.mark.essential
@pytest.mark.parametrize("name", METHODS)
def test_the_result_is_the_same_bit_for_bit(name, tmp_path, caplog):
    settings = {"max_rounds": 3, "participation": 0.5}
    plain = run(METHODS[name](), images(val_fraction=0.1), tmp_path / "plain", **settings)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()  # noqa: NPY002
    watched = run(
        METHODS[name](),
        images(val_fraction=0.1),
        tmp_path / "watched",
        callbacks=meters(),
        **settings,
    )
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == np.random.get_state()[1].tolist()  # noqa: NPY002
    assert weights_hash(plain) == weights_hash(watched)
    for before, after in zip(rows(plain.run_dir), rows(watched.run_dir), strict=True):
        same = {
            key: value for key, value in after.items() if not key.startswith(("gradient/", "time/"))
        }
        assert same == {key: value for key, value in before.items() if not key.startswith("time/")}
    assert (plain.run_dir / "ledger.csv").read_text() == (
        watched.run_dir / "ledger.csv"
    ).read_text()
    idle = {"FedMPQKD": set(), "FedMosaic": {"bit_widths", "feature_map", "loss_landscape"}}.get(
        name, {"bit_widths"}
    )
    assert {figure for figure in drawn(watched.run_dir) if "round" not in figure} == FIGURES - idle
    assert drawn(watched.run_dir) - FIGURES == {"confusion_matrix_round_0002"}
    for message in caplog.messages:
        assert message.count("; ") == 2, "what was given; the rule; what to write instead"
    assert len(caplog.messages) == len(idle)


class Stop(Stressor):
    def change_cohort(self, cohort, *, round, context):
        if round == 3 and not (context.run_dir / "stopped").exists():
            (context.run_dir / "stopped").touch()
            raise KeyboardInterrupt
        return cohort


@pytest.mark.slow
@pytest.mark.essential
def test_history_survives_a_resume(tmp_path):
    def fit(folder: str, *, last: Stressor, ckpt_path: str | None = None) -> tuple[Any, list[Any]]:
        watching = meters()
        method, data = (
            on_images(FedMPQ(bits=4, lambda_b=0.05, prune_threshold=0.3)),
            images(val_fraction=0.1),
        )
        settings = {"max_rounds": 5, "participation": 0.5, "checkpoint_every": 1}
        return run(
            method,
            data,
            tmp_path / folder,
            callbacks=[*watching, last],
            ckpt_path=ckpt_path,
            **settings,
        ), watching

    whole, expected = fit("whole", last=Stressor())
    with pytest.raises(KeyboardInterrupt):
        fit("stopped", last=(stop := Stop()))
    continued, found = fit("stopped", last=stop, ckpt_path="last")
    assert [json.dumps(meter.state_dict()) for meter in found] == [
        json.dumps(meter.state_dict()) for meter in expected
    ]
    assert drawn(continued.run_dir) == drawn(whole.run_dir) >= FIGURES
    for name in FIGURES:
        assert (continued.run_dir / f"figures/{name}.png").read_bytes() == (
            whole.run_dir / f"figures/{name}.png"
        ).read_bytes()
    bits = found[0].state_dict()
    assert bits["rounds"] == [0, 1, 2, 3, 4, 5]
    assert bits["bits"][0] == [4] * len(bits["bits"][0])
    assert bits["bits"][-1] != bits["bits"][0]
    sizes = np.array(continued.method.codec.sizes)
    for row, per_layer in zip(rows(continued.run_dir), bits["bits"][1:], strict=True):
        assert float(row["bits/average"]) == pytest.approx(sizes @ per_layer / sizes.sum())


def test_gradient_norms_of_a_quadratic(tmp_path):
    """L_k = |w - c_k|^2 / 2: the gradient at the broadcast w is w - c_k. FedProx's term starts at
    its minimum."""
    counts, seen = (3, 1), []

    class Sent(callbacks.ProgressBar):
        def on_client_start(self, client, message, labels, round, context):
            seen.append(float((context.method.server["weights"] - CENTRES[client.id]).norm()))

    method = on_points(FedProx(mu=0.5))
    trainer = run(
        method,
        Points(counts),
        tmp_path,
        callbacks=[GradientNorms(every=2, clients=2), Sent()],
        max_rounds=3,
    )
    found = rows(trainer.run_dir)
    for round, (first, second) in ((1, seen[0:2]), (3, seen[4:6])):
        assert float(found[round - 1]["gradient/task"]) == pytest.approx(
            (first + second) / 2, rel=1e-6
        )
        assert float(found[round - 1]["gradient/prox"]) == 0
    assert found[1]["gradient/task"] == ""
    assert drawn(trainer.run_dir) == {"gradient_norms"}


def test_gradient_norms_of_groups_of_parameters(tmp_path):
    """FedRep steps on head and body as two groups."""
    trainer = run(
        on_images(FedRep()), images(), tmp_path, callbacks=[GradientNorms()], max_rounds=1
    )
    assert float(rows(trainer.run_dir)[0]["gradient/task"]) > 0


def test_gradient_norms_of_a_method_with_two_passes(tmp_path):
    """FedVEMoE's clients train experts, and then an adapter of their own on the same batches."""
    meter = GradientNorms(last_step=True)
    trainer = fit(method_of(FedVEMoE, k_init=2, k_max=3), tmp_path, max_rounds=1, callbacks=[meter])
    (row,) = rows(trainer.run_dir)
    found = {name: float(row[f"gradient/{name}"]) for name in ("task", "own", "last_own")}
    assert all(value > 0 for value in found.values()), found
    assert found["own"] != found["last_own"]
    assert "gradient/last_task" not in row


def test_gradient_norms_of_the_loss_terms(tmp_path):
    """Of one and the same start: bit grows with lambda_b, kd with alpha, task with neither; without
    a term it is 0."""

    def norms(clients: int = 2, **settings: float) -> dict[str, float]:
        trainer = run(
            on_images(FedMPQKD(**settings)),
            images(),
            tmp_path / f"{clients}-{settings}",
            callbacks=[GradientNorms(clients=clients)],
            max_rounds=1,
        )
        return {
            key: float(value)
            for key, value in rows(trainer.run_dir)[0].items()
            if key.startswith("gradient/")
        }

    def of_terms(found: dict[str, float]) -> dict[str, float]:
        return {key: value for key, value in found.items() if not key.endswith("_over_task")}

    one, two, none = (
        norms(lambda_b=0.01, alpha=0.5),
        norms(lambda_b=0.02, alpha=1.0),
        norms(lambda_b=0.0, alpha=0.0),
    )
    # a ratio is the mean of the two clients' ratios, not the ratio of their means
    first = norms(clients=1, lambda_b=0.01, alpha=0.5)
    for term in ("bit", "kd"):
        bits, tasks = (
            np.array([first[name], 2 * one[name] - first[name]])
            for name in (f"gradient/{term}", "gradient/task")
        )
        assert one[f"gradient/{term}_over_task"] == pytest.approx(np.mean(bits / tasks), rel=1e-6)
        assert bits.mean() / tasks.mean() != pytest.approx(np.mean(bits / tasks), rel=1e-5)
    one, two, none = map(of_terms, (one, two, none))
    assert two == pytest.approx(
        {
            "gradient/task": one["gradient/task"],
            **{k: 2 * one[k] for k in ("gradient/bit", "gradient/kd")},
        }
    )
    assert none == pytest.approx(
        {"gradient/task": one["gradient/task"], "gradient/bit": 0, "gradient/kd": 0}
    )
    assert min(one.values()) > 0


@pytest.mark.parametrize(("bound", "steps"), [(None, 3), (2, 2)])
def test_gradient_norms_at_the_last_step(tmp_path, bound, steps):
    """Of |w - c|^2 / 2: every step of SGD leaves 1 - lr of w - c, and a round has one step an
    epoch, within the bound."""
    method = on_points(FedAvg())
    settings = {
        "max_rounds": 1,
        "local_epochs": 3,
        "callbacks": [GradientNorms(clients=1, last_step=True)],
        "max_local_steps": bound,
    }
    (row,) = rows(run(method, Points((1,)), tmp_path, **settings).run_dir)
    lr = method.configure_optimizers().param_groups[0]["lr"]
    expected = float(row["gradient/task"]) * (1 - lr) ** (steps - 1)
    assert float(row["gradient/last_task"]) == pytest.approx(expected, rel=1e-5)


def test_gradients_are_of_the_labels_that_the_client_trains_on(tmp_path):
    class Flip(Stressor):
        def change_labels(self, labels, *, client, round, context):
            return 1 - labels

    trainer = run(
        on_points(FedAvg()),
        Points((1, 1)),
        tmp_path,
        callbacks=[Flip(), GradientNorms(clients=1)],
        max_rounds=1,
    )
    torch.testing.assert_close(
        float(rows(trainer.run_dir)[0]["gradient/task"]),
        float((initial(tmp_path) - CENTRES[1]).norm()),
        rtol=1e-5,
        atol=0,
    )


def initial(folder: Path) -> torch.Tensor:
    method, data = on_points(FedAvg(optimizer=sgd(0.0))), Points((1, 1))
    method.optimizer_spec = sgd(0.0)
    return run(method, data, folder / "initial", max_rounds=1).method.server["weights"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Any:
    watching = [
        LossLandscape(points=3, examples=1000),
        ClientAccuracyFigure(),
        ConfusionMatrix(),
        AccuracyBytesFigure(),
    ]
    data = images(val_fraction=0.2)
    return run(
        on_images(FedMPQKD(bits=2)),
        data,
        tmp_path_factory.mktemp("trained"),
        callbacks=watching,
        max_rounds=2,
    )


@pytest.mark.slow
@pytest.mark.essential
def test_the_centre_of_the_landscape_is_the_run(trained):
    """Over all test images the student's loss at 0 is the run's test/loss; a step to the side is a
    step in the weights."""
    landscape = trained.callbacks[0]
    losses, count = landscape._losses(trained, np.array([-1.0, 0.0, 1.0]))
    assert count == len(trained.data.test_target)
    student, teacher = losses.values()
    assert student[1, 1] == pytest.approx(float(rows(trained.run_dir)[-1]["test/loss"]), rel=1e-6)
    assert student.shape == teacher.shape == (3, 3)
    assert len({*student.ravel().tolist(), *teacher.ravel().tolist()}) == 18
    full = student_and_teacher(trained.method)["teacher (full precision)"]
    logits = torch.cat([full(inputs).detach() for inputs, _ in trained.data.test_batches()])
    assert teacher[1, 1] == pytest.approx(
        float(F.cross_entropy(logits, trained.data.test_target)), rel=1e-6
    )


def test_directions_are_filter_normalised(trained):
    method, rng = trained.method, np.random.default_rng(0)
    weights = method.server["weights"]
    direction = method.layout.unpack(filter_normalised(method.layout, method.network, weights, rng))
    for name, tensor in method.layout.unpack(weights).items():
        if tensor.ndim > 1:
            torch.testing.assert_close(
                direction[name].flatten(1).norm(dim=1), tensor.flatten(1).norm(dim=1)
            )
        else:
            assert not direction[name].any(), name


def test_a_landscape_of_full_precision_has_one_panel(tmp_path):
    trainer = run(on_images(FedAvg()), images(), tmp_path, max_rounds=1)
    losses, _ = LossLandscape(points=3, dimensions=1)._losses(trainer, np.array([-1.0, 0.0, 1.0]))
    assert list(losses) == ["deployed in full precision"]
    assert list(student_and_teacher(trainer.method)) == ["deployed in full precision"]


def test_a_landscape_is_around_the_weights_that_are_evaluated(tmp_path):
    """A server optimiser that evaluates others than those it goes on from hides no step."""
    trainer = run(on_images(FedExP()), images(), tmp_path, max_rounds=2)
    method = trainer.method
    assert not torch.equal(method.evaluated_weights, method.server["weights"])
    landscape = LossLandscape(points=3, dimensions=1, examples=1000)
    losses, _ = landscape._losses(trainer, np.array([-1.0, 0.0, 1.0]))
    (found,) = losses.values()
    assert len({*found.tolist()}) == 3
    assert found[1] == pytest.approx(trainer.progress.history[-1]["test/loss"], rel=1e-6)


@pytest.mark.parametrize("method", [FedMPQ(bits=2), AQFL(bits=2)], ids=["FedMPQ", "AQFL"])
def test_features_are_what_the_last_layer_sees(method, tmp_path):
    trainer = run(on_images(method), images(), tmp_path, max_rounds=1)
    position = torch.arange(20)
    found = student_and_teacher(trainer.method)
    student, teacher = found.values()
    for network in (student, teacher):
        features = torch.from_numpy(penultimate(network, trainer.data, position))
        torch.testing.assert_close(
            network.classifier(features), network(trainer.data.inputs("test", position))
        )
    torch.testing.assert_close(
        trainer.method.layout.read(teacher), trainer.method.server["weights"], rtol=0, atol=0
    )
    assert not torch.equal(trainer.method.layout.read(student), trainer.method.server["weights"])
    assert set(layer_bits(trainer.method)) == {2}


def test_separate_classes_are_separate_on_the_map():
    rng, target = np.random.default_rng(0), np.repeat([0, 1], 30)
    features = rng.normal(size=(60, 5)) + 20 * target[:, None]
    points = embed(features, 10, np.random.default_rng(1))
    np.testing.assert_array_equal(points, embed(features, 10, np.random.default_rng(1)))
    centres = np.stack([points[target == label].mean(0) for label in (0, 1)])
    nearest = np.linalg.norm(points[:, None] - centres, axis=2).argmin(1)
    np.testing.assert_array_equal(nearest, target)


def test_confusion_by_hand(trained):
    probs = torch.eye(3)[[0, 0, 2, 1, 1]]
    counts = confusion_counts(probs, torch.tensor([0, 1, 2, 1, 2]))
    assert counts.tolist() == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    assert as_csv(counts) == "true class,0,1,2\n0,1,0,0\n1,1,1,0\n2,0,1,1\n"
    written = list(
        csv.reader((trained.run_dir / "figures" / "confusion_matrix.csv").read_text().splitlines())
    )[1:]
    kept = np.array(written, int)[:, 1:]
    assert kept.sum(axis=1).tolist() == torch.bincount(trained.data.test_target).tolist()
    assert np.trace(kept) / kept.sum() == pytest.approx(
        float(rows(trained.run_dir)[-1]["test/accuracy"])
    )


def test_client_accuracies_are_those_of_the_metrics(trained):
    state = trained.callbacks[1].state_dict()
    assert state["ids"] == [
        id for id in range(trained.data.num_clients) if len(trained.data.client(id).val)
    ]
    assert np.mean(state["accuracies"]) == pytest.approx(
        float(rows(trained.run_dir)[-1]["val/accuracy"])
    )


def test_bits_of_release_0_1_are_drawn_without_what_was_pruned():
    figure, bits = BitWidthFigure(), [[4, 4], [3, 5]]
    figure.load_state_dict({"rounds": [0, 1], "bits": bits})
    assert figure.state_dict() == {"rounds": [0, 1], "bits": bits, "pruned": [0.0, 0.0]}


def test_megabytes_are_those_of_the_ledger():
    down, up, wasted = np.array([4e6, 4e6]), np.array([1e6, 2e6]), np.array([0, 5e5])
    figure = accuracy_bytes_figure(down, up, wasted, np.array([0.5, 0.75]))
    (curve, _), bars = figure.axes[0].lines, figure.axes[1].patches
    assert curve.get_xydata().tolist() == [[5.0, 50.0], [11.0, 75.0]]
    assert [bar.get_width() for bar in bars] == [8.0, 2.5, 0.5]


def test_the_end_of_a_run_that_diverges_is_where_it_ended():
    """A round that was not evaluated is another thing than one that was, as NaN."""
    data, meter = SimpleNamespace(task=Classification()), AccuracyBytesFigure()
    context: Any = SimpleNamespace(data=data)
    for metrics in ({"test/accuracy": 0.31}, {"test/accuracy": math.nan}, {}):
        bytes_of = dict.fromkeys(("comm/download_bytes", "comm/upload_bytes"), 1e6)
        record = RoundRecord(1, {**bytes_of, "comm/wasted_bytes": 0, **metrics})
        meter.on_round_end(record, context)
    meter.load_state_dict(json.loads(json.dumps(meter.state_dict())))
    title = meter.figure(context).axes[0].get_title()
    assert "31.0 % at best" in title
    assert "31.0 % at the end" not in title
    assert "nan % at the end" in title


def test_figures_of_extreme_runs_can_be_drawn():
    ones, rng = np.ones(1), np.random.default_rng(0)
    nothing = np.full(3, np.nan)
    figures = [
        bit_width_figure([7], np.array([[3, 8]]), np.zeros(1), ["a", "b"], np.array([10, 20])),
        client_accuracy_figure(ones, np.array([1]), 1),
        client_accuracy_figure(np.array([1.0, np.nan, np.inf]), np.array([1, 2, 3]), 1),
        confusion_figure(np.diag([1, 0, 2]), "a class without examples"),
        confusion_figure(rng.integers(0, 9, (100, 100)), "many classes"),
        feature_figure(
            {"one": rng.normal(size=(60, 3))},
            [rng.normal(size=(60, 2))],
            np.arange(60) % 30,
            "many classes",
        ),
        gradient_figure([(1, {"task": 1.0, "kd": 0.0}), (6, {"task": float("nan")})]),
        contour_figure(np.array([-1.0, 0, 1]), {"flat": np.full((3, 3), 2.3)}, "flat"),
        contour_figure(
            np.array([-1.0, 0, 1]), {"steep": np.array([[1e-3, 1, np.inf]] * 3)}, "steep"
        ),
        curve_figure(np.array([-1.0, 0, 1]), {"a": np.array([1.0, np.nan, 500])}, "curve"),
        accuracy_bytes_figure(0 * ones, 0 * ones, 0 * ones, ones),
    ]
    for figure in figures:
        figure.savefig(io.BytesIO(), dpi=30)
    for impossible in (
        lambda: gradient_figure([]),
        lambda: contour_figure(nothing, {"a": np.full((3, 3), np.nan)}, ""),
        lambda: accuracy_bytes_figure(nothing, nothing, nothing, nothing),
        lambda: client_accuracy_figure(np.empty(0), np.empty(0), 1),
        lambda: client_accuracy_figure(nothing, np.ones(3), 1),
        lambda: embed(np.full((5, 2), np.nan), 1, rng),
    ):
        with pytest.raises(ValueError, match=r"finite|no round|no client"):
            impossible()


class Fails:
    """A context that can draw nothing."""

    method = SimpleNamespace(personalised=False)
    seed, max_rounds = 0, 3

    def log_figure(self, name: str, figure: Any) -> None:
        raise OSError("no space left")

    log_text = log_figure


def test_a_figure_that_cannot_be_drawn_never_ends_the_run(caplog):
    matrix, bad = ConfusionMatrix(), torch.full((2, 3), float("nan"))
    with caplog.at_level(logging.WARNING):
        matrix.on_evaluate(bad, torch.tensor([0, 1]), RoundRecord(1), Fails())
        matrix.on_fit_end({}, Fails())
        matrix.on_evaluate(torch.eye(3)[:2], torch.tensor([0, 1]), RoundRecord(2), Fails())
        matrix.on_fit_end({}, Fails())
        FeatureMap().on_fit_end({}, Fails())
        LossLandscape().on_fit_end({}, Fails())
        GradientNorms().on_client_start(
            SimpleNamespace(id=4), b"damaged", torch.zeros(1), 1, Fails()
        )
    text = caplog.text
    assert "round 1: the model's probabilities are not finite" in text
    assert (
        "figures/confusion_matrix is left out (ValueError: no round had finite probabilities)"
        in text
    )
    assert text.count("(OSError: no space left)") == 2
    for name in (
        "figures/feature_map",
        "figures/loss_landscape",
        "round 1: gradient norms of client 4",
    ):
        assert f"{name} is left out" in text


@pytest.mark.slow
@pytest.mark.essential
def test_a_run_that_diverges_ends_with_its_figures(tmp_path, caplog):
    method = on_images(FedAvg())
    method.optimizer_spec = sgd(1e30)
    trainer = run_for_nothing(
        method, images(val_fraction=0.1), tmp_path, callbacks=meters(), max_rounds=2
    )
    assert {"client_accuracy", "accuracy_bytes", "gradient_norms"} <= drawn(trainer.run_dir)


@pytest.mark.parametrize(
    ("make", "given", "instead"),
    [
        (lambda: ConfusionMatrix(every=-1), "ConfusionMatrix(every=-1)", "every: 0"),
        (lambda: GradientNorms(every=0), "GradientNorms(every=0)", "every: 5"),
        (lambda: GradientNorms(clients=0), "GradientNorms(clients=0)", "clients: 2"),
        (lambda: FeatureMap(examples=3), "FeatureMap(examples=3)", "examples: 1000"),
        (lambda: FeatureMap(perplexity=0), "FeatureMap(perplexity=0)", "perplexity: 30"),
        (lambda: LossLandscape(dimensions=3), "LossLandscape(dimensions=3)", "dimensions: 2"),
        (lambda: LossLandscape(points=4), "LossLandscape(points=4)", "points: 11"),
        (lambda: LossLandscape(span=float("inf")), "LossLandscape(span=inf)", "span: 1"),
        (lambda: LossLandscape(examples=0), "LossLandscape(examples=0)", "examples: 500"),
    ],
)
def test_bad_arguments(make, given, instead):
    with refused(given, instead):
        make()


def test_the_overlay_has_every_diagnostic_with_its_settings():
    overlay = yaml.safe_load((ROOT / "configs" / "overlays" / "diagnostics.yaml").read_text())
    entries = {
        entry["class_path"].split(".")[1]: entry["init_args"]
        for entry in overlay["trainer"]["callbacks+"]
    }
    assert entries.keys() == {type(meter).__name__ for meter in meters()}
    for name, settings in entries.items():
        assert vars(getattr(callbacks, name)(**settings)).keys() >= settings.keys()


@pytest.mark.slow
@pytest.mark.essential
def test_figures_are_artifacts_of_the_mlflow_run(tmp_path, monkeypatch, database):
    mlflow = pytest.importorskip("mlflow")
    shutil.copy(database, tmp_path / "mlflow.db")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    trainer = run(
        on_images(FedAvg()),
        images(),
        tmp_path,
        callbacks=[ConfusionMatrix()],
        max_rounds=1,
        logger=True,
    )
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    kept = {item.path for item in client.list_artifacts(trainer.journal.tracker.run_id, "figures")}
    assert kept == {f"figures/confusion_matrix.{suffix}" for suffix in ("png", "pdf", "csv")}
