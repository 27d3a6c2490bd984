"""Evaluation of what a method deploys: the global test set, and each client's validation examples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn import functional as F

from fl_lightning.client import Client
from fl_lightning.data import FederatedData
from fl_lightning.methods import Method
from fl_lightning.metrics import client_spread


@torch.no_grad()
def predict(fabric: Fabric, network: nn.Module, batches: Iterable[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Logits float32 ``[n, C]`` in evaluation mode, then whatever followed the inputs in each batch, concatenated; on the CPU."""
    with _evaluation_mode(network), fabric.autocast():
        columns = [(network(inputs).float(), *rest) for inputs, *rest in batches]
    return tuple(torch.cat(column).cpu() for column in zip(*columns, strict=True))


@contextmanager
def _evaluation_mode(network: nn.Module) -> Iterator[None]:
    was_training = network.training
    network.eval()
    try:
        yield
    finally:
        network.train(was_training)


def test(fabric: Fabric, method: Method, data: FederatedData) -> tuple[dict[str, float], Tensor, Tensor]:
    """The global test set: metrics, probabilities ``[n, C]`` and targets ``[n]``."""
    logits, target = predict(fabric, method.deploy(), data.test_batches())
    metrics = {
        "test/accuracy": (logits.argmax(1) == target).double().mean().item(),
        "test/loss": F.cross_entropy(logits.double(), target).item(),
    }
    return metrics, logits.softmax(1), target


def validate(fabric: Fabric, method: Method, data: FederatedData) -> dict[str, float]:
    """Accuracy on each client's validation examples; the mean over clients weights them equally."""
    hits, owners = [], []
    for network, clients in _deployments(method, data):
        for images, target, owner in data.val_batches(clients):
            logits, target, owner = predict(fabric, network, [(images, target, owner)])
            hits.append((logits.argmax(1) == target).numpy())
            owners.append(owner.numpy())
    if not hits:
        return {}
    _, index, counts = np.unique(np.concatenate(owners), return_inverse=True, return_counts=True)
    return client_spread(np.bincount(index, weights=np.concatenate(hits)) / counts)


def _deployments(method: Method, data: FederatedData) -> Iterator[tuple[nn.Module, list[Client]]]:
    if not method.personalised:
        yield method.deploy(), [data.client(id) for id in range(data.num_clients)]
        return
    for id in range(data.num_clients):
        client = data.client(id)
        yield method.deploy(client), [client]
