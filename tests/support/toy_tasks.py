"""Data of tasks that are not classification, and small networks for them."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from fl_lightning import FederatedData
from fl_lightning.data import IID, Dirichlet
from fl_lightning.rng import stream
from fl_lightning.tasks import LanguageModelling, Regression

TRUE = torch.tensor([[2.0, -1.0, 0.5]])


class Line(FederatedData):
    """y = a x with a little noise, for four clients."""

    task = Regression()
    num_classes, example_shape = 1, (3,)

    def __init__(self, num_clients: int = 4):
        super().__init__(
            dataset="line",
            num_clients=num_clients,
            partition=IID(),
            batch_size=16,
            val_fraction=0.2,
        )

    def setup(self, stage=None):
        numbers = torch.from_numpy(stream(0, "line").standard_normal((240, 4)).astype(np.float32))
        self.x, target = numbers[:, :3], (numbers[:, :3] @ TRUE.T).squeeze(1) + 0.1 * numbers[:, 3]
        self.train_target, self.test_target = target[:200], target[200:]

    def inputs(self, split, index, draws=None):
        return (self.x[:200] if split == "train" else self.x[200:])[index]


class Counting(FederatedData):
    """Sequences that count upwards modulo 7, from clients that count in steps of 1, 2 or 3: the
    group. The first two tokens are a prompt."""

    task = LanguageModelling()
    num_classes, example_shape = 7, (8,)

    def __init__(self, num_clients: int = 6, partition=None):
        super().__init__(
            dataset="counting",
            num_clients=num_clients,
            partition=partition or Dirichlet(0.1),
            batch_size=8,
            val_fraction=0.2,
        )

    def setup(self, stage=None):
        start, step = np.arange(210) % 7, np.arange(210) // 7 % 3
        tokens = torch.from_numpy((start[:, None] + (step[:, None] + 1) * np.arange(9)) % 7)
        self.tokens, self.group = tokens[:, :-1], torch.from_numpy(step)
        target = tokens[:, 1:].clone()
        target[:, 0] = -100
        self.train_target, self.test_target = target[:168], target[168:]

    @property
    def train_group(self):
        return self.group[:168]

    @property
    def test_group(self):
        return self.group[168:]

    def example_inputs(self):
        return {"input_ids": torch.zeros(2, 8, dtype=torch.int64)}

    def inputs(self, split, index, draws=None):
        return {"input_ids": (self.tokens[:168] if split == "train" else self.tokens[168:])[index]}


class Bigrams(nn.Module):
    """The next token from the last two."""

    def __init__(self, num_classes):
        super().__init__()
        self.embedding = nn.Embedding(num_classes, 8)
        self.head = nn.Linear(16, num_classes)

    def forward(self, inputs):
        x = self.embedding(inputs["input_ids"])
        before = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
        return self.head(torch.cat([x, before], -1))
