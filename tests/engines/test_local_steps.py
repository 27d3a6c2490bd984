"""What a local step is made of beside the loss: clipped gradients, learning rates that follow a
schedule over rounds, and what an upload may know of them. In every engine."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import MixedPrecision
from places import CONFIGS
from refusals import refused
from ten import SMALL, assert_same_within_rounding, fit, make, same
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import SGD
from torch.optim import lr_scheduler as schedules
from toy import CENTRES, Points, Quadratic, point_network, run, sgd, trainer_in

from callbacks import StragglerDropout
from fl_lightning.__main__ import main
from fl_lightning.conformance.toy import images
from fl_lightning.engines.optimizers import (
    ELEMENTWISE,
    check_optimizer,
    check_optimizer_settings,
)
from fl_lightning.engines.sequential import local_step
from fl_lightning.engines.stacked.stack import clip_rows
from fl_lightning.errors import InputError
from fl_lightning.methods import SCAFFOLD, Ditto, FedAvg, FedNova, FedRep

FALLING = partial(schedules.ExponentialLR, gamma=0.5)
FUSED_TWICE = {"fused": True, "foreach": True}


def on_points(**settings) -> FedAvg:
    method = FedAvg(network=point_network, **settings)
    method.task_loss = Quadratic()
    return method


def by_hand(start, rounds, lr, clip=lambda parameters: None, counts=(3, 1), steps=2):
    """FedAvg on the points, by ``torch.optim.SGD``; ``lr`` of each round, ``clip`` of each step."""
    x = start.clone()
    for round in range(1, rounds + 1):
        ended = []
        for k in range(len(counts)):
            w = nn.Parameter(x.clone())
            optimizer = SGD([w], lr=lr(round), momentum=0.9)
            for _ in range(steps):
                optimizer.zero_grad()
                ((w - CENTRES[k]).square().sum() / 2).backward()
                clip([w])
                optimizer.step()
            ended.append(w.detach())
        x = sum(n / sum(counts) * w for n, w in zip(counts, ended, strict=True))
    return x


@pytest.mark.parametrize("engine", ["sequential", "batched"])
@pytest.mark.parametrize(
    ("settings", "clip"),
    [
        ({"gradient_clip_val": 0.5}, lambda parameters: clip_grad_norm_(parameters, 0.5)),
        (
            {"gradient_clip_val": 0.3, "gradient_clip_algorithm": "value"},
            lambda parameters: clip_grad_value_(parameters, 0.3),
        ),
    ],
    ids=["norm", "value"],
)
def test_clipping_is_that_of_a_plain_torch_loop(engine, settings, clip, tmp_path):
    method, starts = on_points(optimizer=sgd(0.1, momentum=0.9)), []
    build = method.build
    method.build = lambda data: (build(data), starts.append(method.server["weights"]))
    run(method, Points((3, 1)), tmp_path, max_rounds=3, engine=engine, **settings)
    torch.testing.assert_close(
        method.server["weights"], by_hand(starts[0], 3, lambda r: 0.1, clip), rtol=0, atol=1e-6
    )
    assert (
        float((method.server["weights"] - by_hand(starts[0], 3, lambda r: 0.1)).abs().max()) > 0.1
    )


@pytest.mark.slow
@pytest.mark.essential
@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("name", ["FedAvg", "FedMPQKD", "FedKD"])
def test_every_client_is_clipped_by_itself_in_every_engine(name, algorithm, tmp_path, caplog):
    settings = {
        "gradient_clip_val": 0.2 if algorithm == "norm" else 0.01,
        "gradient_clip_algorithm": algorithm,
    }
    one, _ = fit(make(name), tmp_path, engine="sequential", workers=1, **settings)
    pooled, _ = fit(make(name), tmp_path, engine="sequential", workers=3, **settings)
    stacked, _ = fit(make(name), tmp_path, engine="batched", workers=1, **settings)
    free, _ = fit(make(name), tmp_path, engine="sequential", workers=1)
    assert same(one, pooled)
    assert "one by one" not in caplog.text
    assert not torch.allclose(one["weights"], free["weights"], atol=1e-3)
    assert_same_within_rounding(name, one, stacked)


@pytest.mark.parametrize("still", ["clipped", "scheduled"])
def test_the_servers_student_steps_as_clients_do(still, tmp_path):
    """FedKD's: clipped to nothing, or at a learning rate of nothing, it stays where it began."""
    nothing = partial(schedules.LambdaLR, lr_lambda=lambda epoch: 0.0)
    method = make("FedKD", scheduler=nothing if still == "scheduled" else None)
    fit(method, tmp_path, gradient_clip_val=1e-12 if still == "clipped" else None)
    weights = {name for name, _ in method.network.named_parameters()}
    began, ended = (
        method.layout.unpack(vector)
        for vector in (method.first["weights"], method.server["weights"])
    )
    for name in weights:
        torch.testing.assert_close(ended[name], began[name], rtol=0, atol=1e-8)


def test_what_is_not_reached_or_not_set_changes_no_bit(tmp_path):
    plain, _ = fit(make("FedMPQ"), tmp_path)
    assert same(plain, fit(make("FedMPQ"), tmp_path, gradient_clip_val=None)[0])
    assert same(
        plain,
        fit(make("FedMPQ"), tmp_path, gradient_clip_val=1e6, gradient_clip_algorithm="value")[0],
    )
    constant = partial(schedules.ConstantLR, factor=1.0)
    assert same(plain, fit(make("FedMPQ", scheduler=constant), tmp_path)[0])


def test_rows_are_clipped_as_torch_clips_each():
    torch.manual_seed(0)
    rows = [
        torch.randn(5, 3, 2) * torch.tensor([0.01, 1, 10, 0, float("nan")]).view(-1, 1, 1),
        None,
        torch.randn(5, 4),
    ]
    expected = [rows[0].clone(), rows[2].clone()]
    for at in range(5):
        parameters = [nn.Parameter(torch.zeros_like(full[at])) for full in expected]
        for parameter, full in zip(parameters, expected, strict=True):
            parameter.grad = full[at].clone()
        clip_grad_norm_(parameters, 1.5)
        for parameter, full in zip(parameters, expected, strict=True):
            full[at] = parameter.grad
    clip_rows(rows, 1.5, "norm")
    torch.testing.assert_close([rows[0], rows[2]], expected, equal_nan=True)


def test_scaled_gradients_are_clipped_unscaled():
    """The clipped step has the length lr times the clipped norm, whatever the loss scale of
    16-mixed."""
    fabric = Fabric(accelerator="cpu")
    fabric.strategy.precision = MixedPrecision(
        "16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10)
    )
    method = on_points()
    method.network, method.gradient_clip_val = point_network(6), 0.5
    before = method.network.weight.detach().clone()
    local_step(
        fabric, method, SGD(method.parameters(), lr=0.1), (torch.ones(1, 1), torch.tensor([1])), 0
    )
    assert float((method.network.weight.detach() - before).norm()) == pytest.approx(0.05, rel=1e-3)


class LargeScale(torch.amp.GradScaler):
    """So large that the first steps overflow."""

    def __init__(self, device: str) -> None:
        super().__init__(device, init_scale=2.0**127)


def test_a_step_that_a_loss_scale_leaves_out_is_none_of_the_local_steps(tmp_path):
    """c_i is a mean gradient: with one label and a rate near 0, that at the start."""
    trainer = trainer_in(tmp_path, max_rounds=1, local_epochs=1)
    trainer.fabric.strategy.precision = MixedPrecision("16-mixed", "cpu", LargeScale("cpu"))
    method, plain = (SCAFFOLD(network=point_network, optimizer=sgd(1e-3)) for _ in range(2))
    method.task_loss = plain.task_loss = Quadratic()
    seen = []
    upload = method.upload
    method.upload = lambda client: (seen.append(method.local_steps), upload(client))[1]
    trainer.fit(method, Points((8, 8), labels=(1, 2), batch_size=1))
    assert all(0 < made < 8 for made in seen), seen
    run(
        plain,
        Points((8, 8), labels=(1, 2), batch_size=1),
        tmp_path / "plain",
        max_rounds=1,
        local_epochs=1,
    )
    torch.testing.assert_close(method.server["c"], plain.server["c"], rtol=0.02, atol=0.01)


@pytest.mark.parametrize(
    ("scheduler", "lr"),
    [
        (FALLING, lambda r: 0.1 * 0.5 ** (r - 1)),
        (
            partial(schedules.LinearLR, start_factor=0.25, total_iters=3),
            lambda r: 0.1 * (0.25 + 0.25 * min(r - 1, 3)),
        ),
        (
            partial(schedules.CosineAnnealingLR, T_max=4),
            lambda r: 0.05 * (1 + torch.cos(torch.tensor((r - 1) * torch.pi / 4))),
        ),
        (partial(schedules.StepLR, step_size=2), lambda r: 0.1 * 0.1 ** ((r - 1) // 2)),
    ],
)
@pytest.mark.parametrize("engine", ["sequential", "batched"])
def test_the_learning_rate_follows_the_round(scheduler, lr, engine, tmp_path):
    method, starts = on_points(optimizer=sgd(0.1, momentum=0.9), scheduler=scheduler), []
    build = method.build
    method.build = lambda data: (build(data), starts.append(method.server["weights"]))
    run(method, Points((3, 1)), tmp_path, max_rounds=4, engine=engine)
    torch.testing.assert_close(
        method.server["weights"], by_hand(starts[0], 4, lambda r: float(lr(r))), rtol=0, atol=1e-6
    )


@pytest.mark.slow
@pytest.mark.essential
@pytest.mark.parametrize("name", ["FedAvg", "FedMPQKD", "FedKD"])
def test_a_schedule_is_the_same_after_a_resume_and_in_a_pool(name, tmp_path):
    def go(rounds, **settings):
        method = make(name, scheduler=partial(schedules.OneCycleLR, max_lr=0.1, total_steps=4))
        trainer = run(method, images(), tmp_path, participation=0.5, max_rounds=rounds, **settings)
        return method.server, str(trainer.run_dir)

    whole, _ = go(4, workers=1)
    _, half = go(2, workers=1)
    rest, _ = go(4, workers=3, engine="sequential", ckpt_path=half, allow_changed=True)
    assert same(whole, rest)


@pytest.mark.parametrize("changes", [{}, {"scheduler": FALLING}], ids=["constant", "falling"])
def test_control_variates_are_the_same_in_every_engine(changes, tmp_path, caplog):
    """Stragglers make fewer steps; what an upload is told of them decides what the client keeps."""
    settings = {
        "callbacks": [StragglerDropout(0.5, mode="partial", work=0.5)],
        "participation": 0.7,
        "max_rounds": 3,
    }

    def go(**more):
        method = SCAFFOLD(network=SMALL, optimizer=sgd(0.05), **changes)
        run(method, images(), tmp_path, **settings, **more)
        return method.server

    one, pooled, stacked = (
        go(workers=1),
        go(workers=3, engine="sequential"),
        go(workers=1, engine="batched"),
    )
    assert same(one, pooled)
    assert "one by one" not in caplog.text
    assert float(one["c"].abs().max()) > 0.01
    torch.testing.assert_close(one, stacked, rtol=0, atol=2e-4)


def test_the_local_work_is_known_in_upload_and_nowhere_else(tmp_path):
    method = on_points(
        optimizer=lambda parameters: SGD(
            [{"params": list(parameters), "lr": 0.1}, {"params": [], "lr": 0.2}], lr=0.1
        )
    )
    with pytest.raises(RuntimeError, match="known while upload runs"):
        method.local_steps  # noqa: B018
    seen = []
    method.upload = lambda client: (seen.append(method.local_steps), method.local_lr)
    with pytest.raises(ValueError, match=r"learning rates \[0.1, 0.2\]"):
        run(method, Points((3,)), tmp_path, max_rounds=1)
    assert seen == [2]
    assert method.local_work is None


@pytest.mark.parametrize(
    ("scheduler", "says"),
    [
        (
            partial(schedules.OneCycleLR, max_lr=0.1, total_steps=3),
            "cannot be played to round 5 of 5",
        ),
        (schedules.ReduceLROnPlateau, "not from a metric"),
        (
            partial(schedules.LambdaLR, lr_lambda=lambda epoch: 1 - epoch),
            r"gives \[-0.1\] in round 3",
        ),
        (partial(schedules.CosineAnnealingLR, T_max=0), "--model.scheduler"),
        (schedules.LRScheduler, "--model.scheduler; it cannot be built"),
        (schedules.StepLR, "--model.scheduler; it cannot be built .*step_size"),
    ],
)
def test_a_schedule_that_cannot_be_played_is_refused_before_anything_is_made(
    scheduler, says, tmp_path
):
    with pytest.raises(InputError, match=says):
        run(
            on_points(optimizer=sgd(0.1), scheduler=scheduler),
            Points((3, 1)),
            tmp_path / "runs",
            max_rounds=5,
        )
    assert not (tmp_path / "runs").exists()


class MakesItself(FedAvg):
    def configure_optimizers(self):
        return torch.optim.SparseAdam(self.trainable())


@pytest.mark.parametrize(
    ("method", "says"),
    [
        (
            partial(FedAvg, optimizer=partial(torch.optim.AdamW, **FUSED_TWICE)),
            "it cannot be built",
        ),
        (partial(FedNova, optimizer=partial(torch.optim.SGD, **FUSED_TWICE)), "it cannot be built"),
        (
            partial(FedAvg, optimizer=torch.optim.SparseAdam),
            "optimizer SparseAdam; .* no local step",
        ),
        (MakesItself, "configure_optimizers returns SparseAdam; .* no local step"),
        (
            partial(FedAvg, optimizer=partial(torch.optim.Adam, differentiable=True)),
            "no local step",
        ),
        (partial(FedAvg, optimizer=partial(torch.optim.Adam, capturable=True)), "no local step"),
    ],
)
def test_an_optimizer_of_torch_that_makes_no_step_is_refused_before_anything_is_made(
    method, says, tmp_path
):
    with pytest.raises(InputError, match=says):
        run(method(network=SMALL), images(), tmp_path / "runs", max_rounds=1, accelerator="cpu")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("kind", [*ELEMENTWISE, torch.optim.Adafactor, torch.optim.Muon])
@pytest.mark.parametrize("lr", [0.01, torch.tensor(0.01)], ids=["number", "tensor"])
def test_every_other_optimizer_of_torch_is_let_pass(kind, lr):
    method = FedAvg(optimizer=partial(kind, lr=lr), scheduler=FALLING)
    method.network = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 2, bias=False))
    check_optimizer_settings(method)
    check_optimizer(method, 2)


def test_sparse_gradients_are_those_of_an_embedding():
    method = FedAvg(optimizer=torch.optim.SparseAdam)
    method.network = nn.Embedding(4, 2, sparse=True)
    check_optimizer(method)


@pytest.mark.parametrize(
    "method",
    [
        partial(Ditto, personal_lr=0.01),
        partial(FedRep, head_lr=0.01, head_steps=1),
    ],
)
def test_a_schedule_that_would_set_a_second_rate_is_refused(method, tmp_path):
    settings = {"network": SMALL, "optimizer": sgd(0.1, momentum=0.9)}
    cycle = partial(schedules.OneCycleLR, total_steps=5)
    with refused("with learning rates [0.1, 0.01]", "max_lr: [0.1, 0.01]"):
        run(method(scheduler=partial(cycle, max_lr=0.1), **settings), images(), tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
    both = method(scheduler=partial(cycle, max_lr=[0.1, 0.01]), **settings)
    run(both, images(), tmp_path / "runs", max_rounds=1)
    falling = method(scheduler=FALLING, **settings)
    run(falling, images(), tmp_path / "runs", max_rounds=1)


@pytest.mark.slow
@pytest.mark.essential
def test_from_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    config = str(CONFIGS / "fedavg.yaml")
    small = [
        "--data.num_clients",
        "5",
        "--trainer.callbacks",
        "[]",
        "--trainer.logger",
        "false",
        "--trainer.max_rounds",
        "2",
    ]
    common = ["fit", "--config", config, *small]
    clipped = ["--trainer.gradient_clip_val", "0.5"]
    scheduled = ["--model.scheduler", "StepLR", "--model.scheduler.step_size", "1"]
    hashes = set()
    for name, flags in {"plain": [], "clipped": clipped, "scheduled": scheduled}.items():
        assert main([*common, "--trainer.run_name", name, *flags]) == 0
        hashes.add(
            json.loads(Path(f"runs/fedavg/{name}/metadata.json").read_text())["weights_sha256"]
        )
    assert len(hashes) == 3
    assert main([*common, "--ckpt_path", "runs/fedavg/scheduled", *scheduled]) == 0
    assert main([*common, "--ckpt_path", "runs/fedavg/plain", *clipped, *scheduled]) == 2
    refused = capsys.readouterr().err.splitlines()[-1]
    assert "gradient_clip_val: not set -> 0.5" in refused
    assert "model.init_args.scheduler.class_path: not set -> " in refused
    for flags in (
        ["--trainer.gradient_clip_val", "0"],
        ["--model.scheduler", "torch.optim.lr_scheduler.ReduceLROnPlateau"],
    ):
        assert main([*common, "--trainer.experiment", "refused", *flags]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert not Path("runs/refused").exists()


def test_runs_from_before_these_settings_are_still_the_same_runs():
    from fl_lightning.config.settings import changed_settings, settings_hash

    before = {"trainer.max_rounds": 3, "model.init_args.network": "small_cnn"}
    after = {
        **before,
        "trainer.gradient_clip_val": None,
        "trainer.gradient_clip_algorithm": "norm",
        "model.init_args.scheduler": None,
    }
    assert changed_settings(before, after) == []
    assert settings_hash(before) == settings_hash(after)
    assert changed_settings(before, {**after, "trainer.gradient_clip_val": 1.0}) == [
        "trainer.gradient_clip_val: not set -> 1.0"
    ]
    assert settings_hash(before) != settings_hash({**after, "trainer.gradient_clip_val": 1.0})
