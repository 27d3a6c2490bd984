"""What training costs, by hand formula; and that measuring and profiling change nothing."""

from __future__ import annotations

import csv
import gc
import json
from functools import partial

import pytest
import torch
from refusals import refused
from tiny_language import fit, method_of, set_up
from torch import nn
from torch.profiler import profile
from toy import run, sgd

from callbacks import EarlyStopping, Profile, StragglerDropout, TrainingCost
from callbacks.meters import training_cost
from fl_lightning.data import IID, FederatedImages
from fl_lightning.methods import (
    FedALA,
    FedAvg,
    FedKD,
    FedMosaic,
    FedMPQ,
    FedMPQKD,
    FedNTD,
    FedProx,
    FedRep,
    FedVEMoE,
    LinearSchedule,
    NotTrueTerm,
    ProximalTerm,
)
from fl_lightning.models import build_network
from fl_lightning.models.residual_mlp import ResidualMLP
from fl_lightning.models.step_memory import TensorMemory

D, H, C = 3 * 8 * 8, 5, 4
PUBLIC = 20
FORWARD = 2 * (D * H + H * C)
"""Operations of a forward pass of one example: a multiply-add is two."""
STEP = 2 * FORWARD + 2 * H * C
"""Forward, the gradient of both weights, and that of the hidden layer; nobody asks for that of the
input."""


class TwoLayers(nn.Sequential):
    def __init__(self, num_classes: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(D, H), nn.ReLU(), nn.Linear(H, num_classes))


def data(**settings) -> FederatedImages:
    small = {"synthetic_size": 8, "synthetic_examples": 130, "synthetic_test_examples": 8}
    small |= {"synthetic_classes": C, "num_clients": 3, "batch_size": 16, "val_fraction": 0.0}
    return FederatedImages(
        dataset="synthetic", partition=IID(), public_examples=PUBLIC, **(small | settings)
    )


def rows_of(trainer) -> list[dict[str, str]]:
    with (trainer.run_dir / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def flops_of(method, tmp_path, *callbacks, federation=None, **settings) -> list[int]:
    settings = {"max_rounds": 2, "engine": "sequential", "local_epochs": 2, **settings}
    method.network_spec, method.optimizer_spec = TwoLayers, sgd(0.01, momentum=0.9)
    trainer = run(
        method, federation or data(), tmp_path, callbacks=[*callbacks, TrainingCost()], **settings
    )
    return [int(float(row["cost/train_flops"])) for row in rows_of(trainer)]


EXAMPLES = 130 - PUBLIC


@pytest.mark.parametrize(
    ("method", "settings", "expected"),
    [
        (FedAvg, {}, 2 * EXAMPLES * STEP),
        (FedProx, {}, 2 * EXAMPLES * STEP),
        (partial(FedAvg, terms=[ProximalTerm()]), {}, 2 * EXAMPLES * STEP),
        (FedNTD, {}, 2 * EXAMPLES * (STEP + FORWARD)),
        (partial(FedNTD, beta=0.0), {}, 2 * EXAMPLES * STEP),
    ],
    ids=["FedAvg", "FedProx", "term", "FedNTD", "FedNTD beta 0"],
)
def test_flops_by_hand(method, settings, expected, tmp_path):
    """Forward and backward of every example in both epochs, and the teacher's passes."""
    assert flops_of(method(), tmp_path, federation=data(**settings)) == [expected, expected]


@pytest.mark.parametrize(
    ("method", "settings", "teacher"),
    [
        (FedMPQKD, {}, EXAMPLES * FORWARD),  # logits of the second epoch are looked up
        (FedMPQKD, {"flip": True}, 2 * EXAMPLES * FORWARD),
        (partial(FedMPQKD, teacher="joint"), {}, 2 * EXAMPLES * STEP),
        (partial(FedMPQ, terms=[NotTrueTerm()]), {}, 2 * EXAMPLES * FORWARD),
        (partial(FedMPQKD, alpha=0.0), {}, 0),
    ],
    ids=["cached", "augmented", "joint", "term", "alpha 0"],
)
def test_flops_of_the_teacher_by_hand(method, settings, teacher, tmp_path):
    """The teacher's passes that truly run, on top of FedMPQ, whose making of weights counts as
    well."""
    student = flops_of(FedMPQ(), tmp_path / "student", federation=data(**settings))
    assert student[0] >= 2 * EXAMPLES * STEP
    both = flops_of(method(), tmp_path / "both", federation=data(**settings))
    assert [b - s for b, s in zip(both, student, strict=True)] == pytest.approx(
        [teacher] * 2, rel=1e-6
    )


def test_flops_of_soft_labels_by_hand(tmp_path):
    """Every client makes soft labels of the public set; there is something to distil from round 2
    on."""
    own, labels = EXAMPLES * STEP, 3 * PUBLIC * FORWARD
    expected = [own + labels, own + labels + 3 * 2 * PUBLIC * STEP]
    assert flops_of(FedKD(distill_epochs=2), tmp_path, local_epochs=1) == expected


def test_steps_of_two_kinds_are_measured_each(tmp_path):
    """FedRep's four steps on the head, of 16, 16, 5 and 16 of 37 examples, and two epochs on the
    body, whose gradient is that of a head that rests."""
    head, body = FORWARD + 2 * H * C, 2 * FORWARD
    federation = data(synthetic_examples=PUBLIC + 111)
    found = flops_of(FedRep(head_steps=4), tmp_path, federation=federation)
    assert found == 2 * [3 * 53 * head + 2 * 111 * body]


def test_a_pass_before_the_steps_is_of_the_clients_own_examples(tmp_path):
    """FedALA learns W of its head on all 36 or 37, whatever the number of steps."""
    found = flops_of(FedALA(), tmp_path, max_local_steps=1)
    assert found == 2 * [EXAMPLES * (FORWARD + 2 * H * C) + 3 * 16 * STEP]


def test_the_work_of_experts_is_that_of_their_number_and_of_two_passes(tmp_path):
    method, federation = set_up(method_of(FedVEMoE, k_init=2, k_max=3))
    client, labels = federation.client(0), federation.labels(federation.client(0))
    method.start_client(method.broadcast(client), client, labels)
    batches = method.local_batches(federation, client, epochs=1, labels=labels, steps=2)
    kinds = [method.step_kind(number) for number, _ in enumerate(batches)]
    assert kinds == 2 * ["experts"] + 2 * ["own"]
    before = method.work_kind(client)
    method.server["active"] = torch.ones_like(method.server["active"])
    assert method.work_kind(client) != before
    costs = TrainingCost()
    (row,) = rows_of(fit(method, tmp_path, max_rounds=1, callbacks=[costs]))
    probes = {len(method._probe_places(federation.client(id))) for id in federation.active}
    assert len(costs.state_dict()) == len(probes) > 1  # each number of them is measured
    least = min(cost["pass_flops"] for cost in costs.state_dict().values())
    assert float(row["cost/train_flops"]) > 4 * least * 12 > 0


def test_a_schedule_is_measured_where_it_changes_the_work(tmp_path, monkeypatch):
    asked = []
    measure = training_cost.measure
    monkeypatch.setattr(
        training_cost, "measure", lambda *args: asked.append(args) or measure(*args)
    )
    flops = flops_of(FedMPQKD(alpha=LinearSchedule(0.0, 1.0, 3)), tmp_path, max_rounds=3)
    assert flops[1] == flops[2] == pytest.approx(flops[0] + EXAMPLES * FORWARD, rel=1e-6)
    assert len(asked) == 2


def test_who_drops_out_costs_nothing_and_a_straggler_what_it_does(tmp_path):
    """36 or 37 examples a client: steps of 16, 16 and the rest; half of the steps of two epochs is
    an epoch."""
    before, partly = (
        StragglerDropout(probability=1.0, mode=mode, **more)
        for mode, more in (("before", {}), ("partial", {"work": 0.5}))
    )
    federation = data(synthetic_examples=PUBLIC + 111)  # 37 each
    assert flops_of(FedAvg(), tmp_path / "half", partly, federation=federation) == 2 * [111 * STEP]
    with pytest.raises(Exception, match="was ever counted"):
        flops_of(FedAvg(), tmp_path / "none", before)
    metrics = next((tmp_path / "none").rglob("metrics.csv")).read_text()
    found = [*csv.DictReader(metrics.splitlines())]
    assert {row["cost/train_flops"] for row in found} == {"0.0"}
    assert not any(row.get("cost/train_memory") for row in found), "there was no step"


def test_steps_are_bounded_as_the_engine_bounds_them(tmp_path):
    """Two steps of 16 of the six of two epochs; a tenth of 30 steps are 3, as of the engine."""
    assert flops_of(FedAvg(), tmp_path / "two", max_local_steps=2) == 2 * [3 * 32 * STEP]
    tenth = StragglerDropout(probability=1.0, mode="partial", work=0.1)
    federation = data(synthetic_examples=PUBLIC + 30, batch_size=1)  # 10 each
    found = flops_of(FedAvg(), tmp_path, tenth, federation=federation, local_epochs=3)
    assert found == 2 * [3 * 3 * STEP]


def test_families_are_measured_each(tmp_path):
    """Clients of FedMosaic differ in width."""
    costs = TrainingCost()
    widths = [partial(ResidualMLP, width=width) for width in (16, 32)]
    method = FedMosaic(networks=widths, num_blocks=2, rank=2, optimizer=sgd())
    run(method, data(synthetic_size=16), tmp_path, max_rounds=1, callbacks=[costs])
    narrow, wide = (cost["example_flops"] for cost in costs.state_dict().values())
    assert narrow < wide


def test_flops_of_convolutions_by_hand(tmp_path):
    """Dense, in groups, depthwise: of each layer forward and two gradients, of the first one no
    input's."""

    def layers(classes):
        return nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1, bias=False),  # 8x8 outputs
            nn.Conv2d(6, 6, 3, stride=2, padding=1, groups=6, bias=False),  # 4x4
            nn.Conv2d(6, 4, 1, groups=2, bias=False),
            nn.Flatten(),
            nn.Linear(4 * 16, classes, bias=False),
        )

    method = FedAvg(network=layers, optimizer=sgd(0.01))
    trainer = run(
        method, data(), tmp_path, max_rounds=1, local_epochs=1, callbacks=[TrainingCost()]
    )
    first, others = 2 * 64 * 6 * 27, [2 * 16 * 6 * 9, 2 * 16 * 4 * 3, 2 * 64 * C]
    expected = EXAMPLES * (2 * first + 3 * sum(others))
    assert float(rows_of(trainer)[0]["cost/train_flops"]) == expected


def bytes_at_peak(step) -> int:
    """The peak of torch's CPU allocator during a call, by the profiler's own events."""
    import tempfile
    from pathlib import Path

    gc.collect()
    with profile(profile_memory=True) as seen:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        seen.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    now = peak = 0
    for event in sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: e["ts"]):
        now += event["args"]["Bytes"]
        peak = max(peak, now)
    return peak


def test_memory_agrees_with_the_allocator():
    """Forward and backward of a CNN: what is alive at once, against what the allocator says."""
    network, images = build_network("small_cnn", 10, (3, 32, 32)), torch.randn(32, 3, 32, 32)

    def step() -> None:
        network.zero_grad()
        network(images).square().sum().backward()

    step()
    memory = TensorMemory()
    with memory:
        step()
    allocated = bytes_at_peak(step)
    assert 0.8 * allocated <= memory.peak <= 1.05 * allocated
    network.zero_grad()
    gc.collect()
    assert memory.now == 0


def test_memory_of_a_step_by_hand(tmp_path):
    """Two linear layers: weights, gradients and momentum are alive at once, and a batch of 16
    images; of the hidden layer there are outputs and gradients."""

    def wide(classes):
        return nn.Sequential(nn.Flatten(), nn.Linear(D, 5000, bias=False), nn.Linear(5000, classes))

    method = FedAvg(network=wide, optimizer=sgd(0.01, momentum=0.9))
    trainer = run(method, data(), tmp_path, max_rounds=1, callbacks=[TrainingCost()])
    found = float(rows_of(trainer)[0]["cost/train_memory"])
    weights, batch, hidden = 4 * 5000 * (D + C), 4 * 16 * D, 4 * 16 * 5000
    assert 3 * weights + batch <= found <= 3 * weights + 2 * batch + 3 * hidden


@pytest.mark.parametrize("engine", ["sequential", "batched"])
def test_cost_and_profile_leave_the_run_as_it_is(engine, tmp_path):
    """Weights and all other metrics bit for bit; a run that was cut and resumed has the same
    costs."""

    def fit(folder, callbacks, method=None, **settings):
        method = method or FedMPQKD(optimizer=sgd(0.05, momentum=0.9))
        settings = {"max_rounds": 3, "participation": 0.7, "engine": engine, **settings}
        return method, run(
            method,
            data(synthetic_size=16),
            tmp_path / folder,
            callbacks=callbacks,
            seed=3,
            **settings,
        )

    plain, alone = fit("plain", [])
    costly, trainer = fit("costly", [TrainingCost(), Profile(start=2, rounds=2)])
    assert torch.equal(plain.server["weights"], costly.server["weights"])
    for mine, theirs in zip(rows_of(trainer), rows_of(alone), strict=True):
        extra = {"cost/train_flops", "cost/train_memory"}
        assert set(mine) - set(theirs) == extra
        for name in set(theirs):
            assert mine[name] == theirs[name] or name.startswith("time/"), name
    trace = json.loads((trainer.run_dir / "figures" / "profile_rounds_0002_0003.json").read_text())
    names = {event.get("name") for event in trace["traceEvents"]}
    assert {"round 2", "round 3"} <= names
    assert any(str(name).startswith("aten::") for name in names)
    assert "round 1" not in names

    _, half = fit("cut", [TrainingCost()], max_rounds=1)
    _, rest = fit("cut", [TrainingCost()], ckpt_path=str(half.run_dir), allow_changed=True)
    assert [row["cost/train_flops"] for row in rows_of(rest)] == [
        row["cost/train_flops"] for row in rows_of(trainer)
    ]


def test_a_run_that_fails_in_a_profiled_round_ends_the_profile(tmp_path):
    class Broken(FedAvg):
        def server_metrics(self):
            raise RuntimeError("broken")

    for _ in range(2):  # a profile that was left on could not be begun again
        with pytest.raises(RuntimeError, match="broken"):
            run(
                Broken(),
                data(synthetic_size=16),
                tmp_path,
                max_rounds=2,
                callbacks=[Profile(start=1)],
            )
    gc.collect()


def test_a_run_that_ends_early_has_its_profile(tmp_path):
    for folder in ("one", "two"):  # a profile that was left on could not be begun again
        trainer = run(
            FedAvg(),
            data(synthetic_size=16),
            tmp_path / folder,
            max_rounds=9,
            callbacks=[Profile(start=1, rounds=9), EarlyStopping("train/loss", 1, min_delta=9.0)],
        )
        last = len(trainer.progress.history)
        assert last < 9
        assert (trainer.run_dir / "figures" / f"profile_rounds_0001_{last:04d}.json").is_file()


def test_a_profile_of_later_rounds_says_that_there_is_none(tmp_path, caplog):
    small = data(synthetic_size=16)
    run(FedAvg(), small, tmp_path, max_rounds=1, callbacks=[Profile()])
    assert "it profiles none" in caplog.text


def test_bad_settings_of_profile():
    for settings in ({"start": 0}, {"rounds": 0}):
        with refused(f"Profile({next(iter(settings))}=0)", "write"):
            Profile(**settings)
