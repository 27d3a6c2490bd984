"""Data of the user's own class are refused with one line before anything is created, if a round
would stumble over them."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from toy import run, sgd

from callbacks import ByzantineClients, LabelNoise
from fl_lightning.data import IID, FederatedData, FederatedImages, Natural
from fl_lightning.data.apart import own_holdings
from fl_lightning.errors import InputError
from fl_lightning.methods import FedAvg
from fl_lightning.tasks import Classification, Regression


class Own(FederatedData):
    """Twelve examples of three classes; ``changes`` are made to what ``setup`` sets.

    Args:
        shape: what the constructor says of an example.
        changes: by name, a function of the right value; None: it is left out.
    """

    def __init__(self, shape=(4,), **changes):
        super().__init__(
            dataset="own", num_clients=2, partition=IID(), batch_size=4, val_fraction=0.0
        )
        self.num_classes, self.example_shape, self.changes = 3, shape, changes
        self.task = changes.get("task", Classification())

    def setup(self, stage=None):
        targets = torch.arange(12) % 3
        self.values = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
        for name, value in (("train_target", targets), ("test_target", targets[:6])):
            change = self.changes.get(name, lambda right: right)
            if change is not None:
                setattr(self, name, change(value))

    def inputs(self, split, index, draws=None):
        return self.changes.get("inputs", lambda right: right)(self.values[index])

    @property
    def train_group(self):
        return self.changes.get("train_group", lambda right: right)(super().train_group)

    @property
    def test_group(self):
        return self.changes.get("test_group", lambda right: right)(super().test_group)

    @property
    def train_held_out(self):
        return self.changes.get("train_held_out")


class Converts(nn.Module):
    """It takes float32 of other numbers, and 0 for NaN."""

    def __init__(self, num_classes):
        super().__init__()
        self.linear = nn.Linear(4, num_classes)

    def forward(self, x):
        return self.linear(x.float().nan_to_num())


@pytest.mark.parametrize(
    "changes",
    [
        {"inputs": lambda x: x.double()},
        {"inputs": lambda x: x.half()},
        {"inputs": lambda x: torch.where(x > 1, torch.nan, x)},
        {"train_target": lambda y: y.byte(), "test_target": lambda y: y.byte()},
        {"train_group": lambda g: g.int()},
        {"shape": [4]},
    ],
)
def test_what_a_network_takes_is_taken(changes, tmp_path):
    trainer = run(FedAvg(network=Converts, optimizer=sgd()), Own(**changes), tmp_path, max_rounds=1)
    assert trainer.history["test/loss"].notna().all()


def test_it_is_said_that_nobody_has_a_validation_example(caplog):
    """One example each: none can be held out."""
    data = Own()
    data.num_clients, data.val_fraction = 12, 0.1
    for fraction, lines in ((0.1, 1), (0.0, 0)):
        caplog.clear()
        data.val_fraction = fraction
        data.setup()
        data.distribute(0, torch.device("cpu"))
        assert (
            len([line for line in caplog.messages if "no client has a validation example" in line])
            == lines
        )


def fit(data, folder):
    network = partial(nn.Linear, 4)
    return run(FedAvg(network=network, optimizer=sgd()), data, folder, max_rounds=1)


def test_data_as_they_should_be(tmp_path):
    assert fit(Own(), tmp_path).history.shape[0] == 1


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"train_target": lambda y: y + 1},
            "train_target has classes from 1 to 3; with num_classes=3 they",
        ),
        ({"test_target": lambda y: y - 1}, "test_target has classes from -1 to 1"),
        (
            {"train_target": lambda y: y.numpy()},
            "train_target is numpy.ndarray; .*write torch.as_tensor",
        ),
        (
            {"train_target": lambda y: y.int()},
            r"train_target is torch.int32 \[12\]; classes are int64",
        ),
        ({"train_target": lambda y: y.float()}, r"train_target is torch.float32 \[12\]"),
        ({"train_target": lambda y: y[:, None]}, r"train_target is torch.int64 \[12, 1\]"),
        ({"test_target": None}, "which has no test_target; setup sets test_target"),
        ({"test_target": lambda y: y[:0]}, "without a test example"),
        (
            {"inputs": lambda x: x.double()},
            "inputs of 2 examples are torch.float64; weights are float32",
        ),
        (
            {"inputs": lambda x: x.to(torch.int8)},
            "inputs of 2 examples are torch.int8; weights are float32",
        ),
        ({"task": "regression"}, "whose task is 'regression'; it is a fl_lightning.tasks.Task"),
        ({"task": Regression()}, "train_target is torch.int64; what is regressed on is float32"),
        ({"inputs": lambda x: x * torch.nan}, "hold NaN or infinity"),
        ({"inputs": lambda x: np.asarray(x)}, "are ndarray; they are tensors"),
        ({"shape": (5,)}, r"inputs of 2 examples are \[2, 4\] where example_shape=\(5,\)"),
        (
            {"train_group": lambda g: g - 1},
            r"train_group is torch.int64 \[12\]; .*groups are 0, 1, ...",
        ),
        ({"train_group": lambda g: g.float()}, r"train_group is torch.float32"),
        (
            {"train_group": lambda g: g.numpy()},
            r"train_group is numpy.ndarray; groups are a tensor",
        ),
    ],
)
def test_data_that_a_round_would_stumble_over(changes, says, tmp_path):
    with pytest.raises(InputError, match=says):
        fit(Own(**changes), tmp_path)
    assert not any(tmp_path.iterdir())


def of_clients(train=12, test=6, held=12, groups=6):
    """Data of two clients with marks of these lengths."""
    data = Own(
        train_held_out=np.arange(held) % 4 == 0, test_group=lambda right: right[:1].repeat(groups)
    )
    data.partition, data._owner, data._test_owner = (
        Natural(),
        np.arange(train) % 2,
        np.arange(test) % 2,
    )
    return data


@pytest.mark.parametrize("more", [-4, 2])
@pytest.mark.parametrize(
    ("name", "attribute", "says"),
    [
        ("train", "train_owner", r"it has one entry for each training example, int64 \[12\]"),
        ("held", "train_held_out", r"it has one entry for each training example, bool \[12\]"),
        ("test", "test_owner", r"it has one entry for each test example, int64 \[6\]"),
        ("groups", "test_group", "it has an integer for each of 6 examples"),
    ],
)
def test_marks_of_another_length_are_refused(name, attribute, says, more, tmp_path):
    count = (12 if name in ("train", "held") else 6) + more
    with pytest.raises(InputError, match=rf"whose {attribute} is \w+(.\w+)? \[{count}\]; {says}"):
        fit(of_clients(**{name: count}), tmp_path)


def test_marks_of_the_right_length_are_taken(tmp_path):
    assert fit(of_clients(), tmp_path).history.shape[0] == 1
    data = of_clients()
    data.changes["train_held_out"] = np.arange(12) % 4
    with pytest.raises(InputError, match=r"train_held_out is int64 \[12\]"):
        fit(data, tmp_path)


def test_an_example_of_nobody_is_refused_where_a_node_has_it():
    data = of_clients()
    data.setup()
    data._owner = np.arange(12) - 1
    with pytest.raises(InputError, match=r"train_owner; every training example has a client"):
        own_holdings(data, {}, 0, 2, 0)


class Bytes(FederatedImages):
    """Images whose classes are bytes, as files often have them."""

    def setup(self, stage=None):
        super().setup(stage)
        self.train_target, self.test_target = self.train_target.byte(), self.test_target.byte()


def test_noise_on_classes_in_bytes_is_that_on_other_ones(tmp_path):
    found = []
    for kind in (Bytes, FederatedImages):
        data = kind(num_clients=4, partition=IID())
        method = FedAvg(
            network=lambda classes: nn.Sequential(nn.Flatten(), nn.Linear(3072, classes))
        )
        noise = [LabelNoise(round=1, clients=1.0), ByzantineClients(0.5, "label_flip")]
        run(method, data, tmp_path, max_rounds=1, callbacks=noise)
        found.append((data.partition_hash, data.content_sha256, method.server["weights"]))
    assert found[0][:2] == found[1][:2]
    assert torch.equal(found[0][2], found[1][2])
