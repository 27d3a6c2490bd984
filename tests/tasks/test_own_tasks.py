"""The tasks of the page on tasks of one's own: their metrics are other libraries', and they are
trained."""

from __future__ import annotations

import gc
import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from page_commands import PAGE
from refusals import refused
from sklearn.metrics import f1_score, mean_pinball_loss
from torch import Tensor, nn
from toy_tasks import Line

from fl_lightning import Task
from fl_lightning.__main__ import main
from fl_lightning.conformance.toy import run, sgd
from fl_lightning.errors import MisuseError
from fl_lightning.methods import FedAvg
from fl_lightning.tasks import Regression


@pytest.fixture
def page() -> dict:
    """What the page defines, which is gone afterwards: the commands would offer it to other
    tests."""
    blocks = PAGE.with_name("task.md").read_text().split("```python\n")[1:]
    names: dict = {"__name__": "task_page"}
    exec("\n".join(block.split("```")[0] for block in blocks), names)
    yield names
    names.clear()
    gc.collect()


def measured(task: Task, outputs: Tensor, target: Tensor) -> dict[str, float]:
    """Return the metrics of all examples from the sums of two parts of them."""
    parts = [task.sums(outputs[half], target[half]) for half in (slice(0, 7), slice(7, None))]
    totals = {name: [sum(part[name][i] for part in parts) for i in (0, 1)] for name in parts[0]}
    return {name: float(total / weight) for name, (total, weight) in totals.items()}


def test_metrics_of_parts_add_up_to_those_of_other_libraries(page):
    torch.manual_seed(0)
    labels, logits = (torch.rand(20, 4) > 0.6).float(), torch.randn(20, 4)
    found = measured(page["MultiLabel"](), logits, labels)
    assert found["f1"] == pytest.approx(f1_score(labels, logits > 0, average="micro"))
    assert found["loss"] == pytest.approx(
        float(page["MultiLabel"]().loss(logits, labels)), rel=1e-5
    )

    pixels, logits = torch.randint(0, 2, (20, 6, 5)), torch.randn(20, 2, 6, 5)
    found = measured(page["Segmentation"](), logits, pixels)
    assert found["dice"] == pytest.approx(f1_score(pixels.flatten(), logits.argmax(1).flatten()))
    assert found["loss"] == pytest.approx(
        float(page["Segmentation"]().loss(logits, pixels)), rel=1e-5
    )

    target, outputs = torch.randn(20), torch.randn(20, 1)
    found = measured(page["Quantile"](0.8), outputs, target)
    assert found["pinball"] == pytest.approx(
        mean_pinball_loss(target, outputs[:, 0], alpha=0.8), rel=1e-5
    )
    assert found["below"] == float(np.mean(target.numpy() <= outputs[:, 0].numpy()))


def other_data(page: dict, task: Task, x: Tensor, target: Tensor, num_classes: int):
    """Return the page's data with other examples and another task."""
    data = page["Traits"]()
    data.task, data.num_classes, data.example_shape = task, num_classes, tuple(x.shape[1:])

    def setup(stage: str | None = None) -> None:
        data.features = {"train": x[:300], "test": x[300:]}
        data.train_target, data.test_target = target[:300], target[300:]

    data.setup = setup
    return data


def test_a_segmentation_and_a_quantile_are_learnt(page, tmp_path):
    torch.manual_seed(0)
    settings = {"max_rounds": 10, "participation": 1.0, "local_epochs": 2}
    pixels = (torch.rand(400, 8, 8) > 0.7).long()
    images = pixels[:, None] + 0.3 * torch.randn(400, 1, 8, 8)
    # of which the first free argument is the number of classes
    network = partial(nn.Conv2d, 1, kernel_size=1)
    method = FedAvg(
        network=lambda num_classes: network(out_channels=num_classes), optimizer=sgd(0.5)
    )
    data = other_data(page, page["Segmentation"](), images, pixels, 2)
    result = run(method, data, tmp_path / "pixels", **settings).progress.summary
    assert result["final/dice"] > 0.9

    x = torch.rand(400, 1)
    data = other_data(page, page["Quantile"](0.9), x, 2 * x[:, 0] + torch.rand(400), 1)
    method = FedAvg(network=lambda num_classes: nn.Linear(1, num_classes), optimizer=sgd(0.3))
    trainer = run(method, data, tmp_path / "quantile", **settings)
    assert 0.8 < trainer.progress.history[-1]["test/below"] < 0.98
    # that of the best line is 0.045, of 0 it is 1.35
    assert trainer.progress.summary["final/pinball"] < 0.1


def test_the_page_is_trained_from_the_command_line(tmp_path, monkeypatch, page, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    blocks = PAGE.with_name("task.md").read_text().split("```python\n")[1:]
    Path("own_tasks.py").write_text("\n".join(block.split("```")[0] for block in blocks))
    flags = (
        "--data own_tasks.Traits --model.network mlp --trainer.max_rounds 5 --trainer.logger false"
    )
    assert main(["fit", "--config", "plain", *flags.split()]) == 0
    err = capsys.readouterr().err
    assert "final/f1" in err
    assert float(err.partition("final/f1")[2].split()[0]) > 0.7


class Weighed(Regression):
    """A regression, unless a test says otherwise."""


def sums(make):
    def examplewise(self, outputs, target):
        found = Regression.examplewise(self, outputs, target)
        return make(found, self.weight(target))

    return {"examplewise": examplewise}


def loss(make):
    return {"loss": lambda self, outputs, target: make((outputs[:, 0] - target).square())}


WRONG = {
    "no primary": sums(lambda found, weight: {"loss": found["loss"]}),
    "unknown per client": {"per_client": ("mse", "zzz")},
    "primary of no client": {"per_client": ("mae",)},
    "batch": sums(lambda found, weight: {**found, "mse": (found["mse"][0].sum(), weight.sum())}),
    "short": sums(lambda found, weight: {**found, "mse": (found["mse"][0][1:], weight[1:])}),
    "no weight": sums(lambda found, weight: {name: pair[0] for name, pair in found.items()}),
    "nothing": sums(lambda found, weight: None),
    "weights of 0": sums(lambda found, weight: {n: (s, 0 * w) for n, (s, w) in found.items()}),
    "below 0": sums(lambda found, weight: {**found, "mse": (found["mse"][0], -weight)}),
    "vector loss": loss(lambda squares: squares),
    "number": loss(lambda squares: squares.mean().item()),
    "detached": loss(lambda squares: squares.mean().detach()),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_task_that_cannot_be_learnt_is_named_before_anything_is_made(name, tmp_path):
    data = Line()
    data.task = type("Wrong", (Weighed,), WRONG[name])()
    with refused("Wrong", "", MisuseError):
        run(FedAvg(network=lambda count: nn.Linear(3, count)), data, tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("part", "wrong"),
    [
        ("examplewise", sums(lambda found, weight: {"mse": found["mse"], "mae": found["mae"]})),
        ("finish", {"finish": lambda self, means: {"mse": means["mse"], "mae": means["mae"]}}),
    ],
)
def test_a_task_without_the_loss_among_its_metrics_is_refused(part, wrong, tmp_path):
    data = Line()
    data.task = type("Silent", (Weighed,), wrong)()
    with refused(f"Silent.{part}, which returned no 'loss'", "", MisuseError):
        run(FedAvg(network=lambda count: nn.Linear(3, count)), data, tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_trying_a_task_out_changes_nothing(tmp_path):
    hashes = set()
    for task in (Regression(), Weighed()):
        data = Line()
        data.task = task
        method = FedAvg(network=lambda count: nn.Linear(3, count), optimizer=sgd(0.05))
        trainer = run(method, data, tmp_path / type(task).__name__, max_rounds=1)
        hashes.add(json.loads((trainer.run_dir / "metadata.json").read_text())["weights_sha256"])
    assert len(hashes) == 1
