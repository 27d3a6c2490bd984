"""Logits computed beforehand are the teacher's logits on the same inputs."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from ten import assert_same_within_rounding
from toy import run, sgd

from fl_lightning import rng
from fl_lightning.conformance.toy import images
from fl_lightning.methods import FedMPQKD, Method, teaching
from fl_lightning.models import SmallCNN
from fl_lightning.wire import Payload

NORMED = partial(SmallCNN, width=4, norm="batch")
UNEQUAL = {"crop": "pad", "flip": True}


def received(client_id: int, **settings):
    """A method that has just received, its client, and the data."""
    data = images(**settings)
    data.prepare_data()
    data.setup("fit")
    data.distribute(0, torch.device("cpu"))
    method = FedMPQKD(network=NORMED, bits=3, optimizer=sgd(0.05))
    with rng.torch_stream(0, "weights"):
        method.build(data)
    method.round, client = 1, data.client(client_id)
    for buffer in method.network.buffers():
        if buffer.is_floating_point():
            buffer.add_(torch.rand(buffer.shape, generator=torch.Generator().manual_seed(0)))
    method.server["weights"] = method.layout.read(method.network)
    method.receive(Payload.from_bytes(method.broadcast(client).to_bytes()), client)
    method.train()
    return method, client, data


@pytest.mark.parametrize("settings", [{}, UNEQUAL], ids=["as they are", "augmented"])
@pytest.mark.parametrize("ahead", [1, 3, 8])
@pytest.mark.parametrize(("client_id", "steps"), [(2, 8), (2, 5), (3, 2), (4, 3)])
def test_batches_are_the_same_and_logits_the_teachers(
    client_id, steps, ahead, settings, monkeypatch
):
    """Of clients with 38 examples in batches of 16, with one, which comes twice, and with 24; over
    several epochs, cut short."""
    monkeypatch.setattr(teaching, "pays", lambda *_: True)
    monkeypatch.setattr(teaching, "AHEAD", ahead)
    method, client, data = received(client_id, **settings)
    labels = data.labels(client).flip(0)
    work = {"epochs": 3, "labels": labels, "steps": steps}
    plain = list(Method.local_batches(method, data, client, **work))
    numbers = Method.local_batches(
        method, data, client, epochs=3, labels=torch.arange(len(labels)), steps=steps
    )
    found = list(
        teaching.with_logits(
            method.teacher, numbers, labels, repeats=not data.augments, ahead=ahead
        )
    )
    assert len(found) == len(plain) == min(steps, data.num_steps(client, 3))
    for (inputs, target), (same_inputs, same_target, logits) in zip(plain, found, strict=True):
        assert torch.equal(inputs, same_inputs)
        assert torch.equal(target, same_target)
        expected = method.teacher(inputs)
        torch.testing.assert_close(
            logits, expected, rtol=0, atol=1e-4 * float(expected.abs().max())
        )
        assert not logits.requires_grad


def test_a_step_that_is_told_the_logits_is_the_step_that_computes_them():
    method, client, data = received(2)
    batch = next(
        iter(
            Method.local_batches(
                method, data, client, epochs=1, labels=data.labels(client), steps=1
            )
        )
    )
    alone, told = (
        method.training_step(batch),
        method.training_step((*batch, method.teacher(batch[0]))),
    )
    assert alone.keys() == told.keys()
    assert all(torch.equal(alone[name], told[name]) for name in alone)


class Teacher(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, inputs):
        self.seen.append(len(inputs))
        return inputs.flatten(1)[:, :3]


@pytest.mark.parametrize(
    ("repeats", "ahead", "seen"),
    [(True, 1, [16, 16, 6]), (False, 1, [16, 16, 6] * 3), (False, 4, [54, 54, 6])],
)
def test_what_the_teacher_has_to_do(repeats, ahead, seen):
    """38 examples in batches of 16, three epochs."""
    method, client, data = received(2)
    numbers = Method.local_batches(method, data, client, epochs=3, labels=torch.arange(38), steps=9)
    teacher = Teacher()
    assert (
        len(
            list(
                teaching.with_logits(
                    teacher,
                    numbers,
                    data.labels(client),
                    repeats=repeats,
                    ahead=ahead,
                )
            )
        )
        == 9
    )
    assert teacher.seen == seen


def test_the_whole_run_is_the_same_within_rounding(tmp_path, monkeypatch):
    """And with one epoch, or with augmentation on a CPU, to the last bit: nothing is computed
    beforehand."""
    weights = {}
    for where in ("within", "beforehand"):
        if where == "within":
            monkeypatch.setattr(teaching, "pays", lambda *_: False)
        for name, data, epochs in (
            ("digits", images(), 2),
            ("once", images(), 1),
            ("augmented", images(**UNEQUAL), 2),
        ):
            method = FedMPQKD(network=NORMED, bits=3, optimizer=sgd(0.05, momentum=0.9))
            run(method, data, tmp_path / where / name, max_rounds=2, local_epochs=epochs, workers=1)
            weights[where, name] = method.server["weights"]
        monkeypatch.undo()
    for name in ("once", "augmented"):
        assert torch.equal(weights["within", name], weights["beforehand", name])
    within, beforehand = (
        {"weights": weights[where, "digits"]} for where in ("within", "beforehand")
    )
    assert_same_within_rounding("FedMPQKD", within, beforehand)


def test_transfers_in_one_piece(monkeypatch):
    """What is done for a device, done on the CPU: the same tensors."""
    method, _, _ = received(2)
    expected = method.unrounded()
    monkeypatch.setattr(FedMPQKD, "device", torch.device("cuda"))
    found = method._on_cpu(expected)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


class Pairs(FedMPQKD):
    """Reads a batch as the data yield it."""

    def training_step(self, batch, batch_idx=0):
        inputs, target = batch
        return super().training_step((inputs, target), batch_idx)


def test_a_subclass_that_reads_pairs_is_given_pairs(tmp_path, monkeypatch):
    monkeypatch.setattr(teaching, "with_logits", lambda *_, **__: pytest.fail("a triple"))
    run(
        Pairs(network=NORMED, bits=3, optimizer=sgd(0.05)),
        images(),
        tmp_path,
        max_rounds=1,
        local_epochs=2,
        workers=1,
    )


def test_the_teacher_is_as_precise_beforehand_as_within_a_step(tmp_path, monkeypatch):
    """In bf16-mixed, where a teacher outside autocast would give other logits by a hundredth."""
    weights = []
    for beforehand in (True, False):
        if not beforehand:
            monkeypatch.setattr(teaching, "pays", lambda *_: False)
        method = FedMPQKD(network=partial(SmallCNN, width=4), bits=3, optimizer=sgd(0.05))
        run(
            method,
            images(),
            tmp_path / str(beforehand),
            max_rounds=1,
            local_epochs=2,
            workers=1,
            precision="bf16-mixed",
        )
        weights.append(method.server["weights"])
    assert (weights[0] - weights[1]).abs().max() < 1e-3
