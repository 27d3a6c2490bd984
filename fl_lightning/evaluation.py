"""Evaluation of what a method deploys: the global test set, and each client's validation examples.

Of a personalised method every client's own model is evaluated. The global test set is then dealt to the
clients, each class in proportion to the training examples of it that they hold: one pass over the test set
whatever their number, and ``test/accuracy`` is the accuracy where the examples would turn up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from types import MappingProxyType
from typing import TypeVar

import numpy as np
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn import functional as F

from fl_lightning.client import Client
from fl_lightning.data import FederatedData
from fl_lightning.distributed import collectives
from fl_lightning.methods import Method
from fl_lightning.rng import stream

T = TypeVar("T")
States = Mapping[int, dict[str, Tensor]]
NO_STATES: States = MappingProxyType({})


def predict(fabric: Fabric, network: nn.Module, batches: Iterable[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Evaluate the network and return logits float32 ``[n, C]`` and then whatever followed the inputs in each
    batch, concatenated; on the CPU.

    The batches are dealt to the ranks; every rank gets all of them back.
    """
    return gather_columns((number, _forward(fabric, network, [batch])) for number, batch in share(batches))


@torch.no_grad()
def _forward(fabric: Fabric, network: nn.Module, batches: Iterable[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    with evaluation_mode(network), fabric.autocast():
        columns = [(network(inputs).float(), *rest) for inputs, *rest in batches]
    return tuple(torch.cat(column) for column in zip(*columns, strict=True))


def share(items: Iterable[T]) -> Iterator[tuple[int, T]]:
    """Yield this rank's share of the items, each with its number among all."""
    return islice(enumerate(items), collectives.rank(), None, collectives.world_size())


def gather_columns(pieces: Iterable[tuple[int, tuple[Tensor, ...]]]) -> tuple[Tensor, ...]:
    """Return the pieces of all ranks: column by column, concatenated in the order of their numbers, on the
    CPU. ``()`` when there are none."""
    mine = {
        f"{number}/{column}": tensor for number, columns in pieces for column, tensor in enumerate(columns)
    }
    columns: dict[int, list[Tensor]] = {}
    for name, tensor in sorted(
        collectives.gather_parts(mine).items(), key=lambda item: int(item[0].split("/")[0])
    ):
        columns.setdefault(int(name.split("/")[1]), []).append(tensor)
    return tuple(torch.cat(columns[column]).cpu() for column in sorted(columns))


@contextmanager
def evaluation_mode(network: nn.Module) -> Iterator[nn.Module]:
    """Put the network into evaluation mode within the block."""
    was_training = network.training
    network.eval()
    try:
        yield network
    finally:
        network.train(was_training)


def on_test_set(
    fabric: Fabric, method: Method, data: FederatedData, states: States = NO_STATES
) -> tuple[dict[str, float], Tensor, Tensor]:
    """Evaluate the global model, or each client's own: metrics, probabilities ``[n, C]`` and targets ``[n]``.

    Args:
        states: what clients keep, by id.
    """
    if method.personalised:
        logits, target = _predict_dealt(fabric, method, data, states)
    else:
        logits, target = predict(fabric, method.deploy(), data.test_batches())
    return (
        {"test/accuracy": accuracy(logits, target), "test/loss": loss(logits, target)},
        logits.softmax(1),
        target,
    )


def accuracy(logits: Tensor, target: Tensor) -> float:
    """Return the share of logits ``[n, C]`` whose largest is that of the target, in [0, 1]."""
    return (logits.argmax(1) == target).double().mean().item()


def loss(logits: Tensor, target: Tensor) -> float:
    """Return the mean cross-entropy, in nats."""
    return F.cross_entropy(logits.double(), target).item()


def _predict_dealt(
    fabric: Fabric, method: Method, data: FederatedData, states: States
) -> tuple[Tensor, Tensor]:
    """Return the answer to each test example of the client that it is dealt to, in the order of the test
    set."""
    owner = deal_test_set(data)
    order, answers = np.argsort(owner, kind="stable"), []
    for number, id in share(np.unique(owner)):
        network = method.deploy(data.client(int(id), states.get(int(id))))
        mine = torch.from_numpy(np.flatnonzero(owner == id)).to(data.device)
        batches = ((data.inputs("test", index), data.test_target[index]) for index in mine.split(512))
        answers.append((number, _forward(fabric, network, batches)))
    back = torch.from_numpy(np.argsort(order))
    logits, target = (column[back] for column in gather_columns(answers))
    return logits, target


def deal_test_set(data: FederatedData) -> np.ndarray:
    """Return the client that each test example is dealt to, int64 ``[n]``: drawn in proportion to the
    examples of its class that clients hold, evenly where nobody holds any; the same in every round and for
    every method."""
    target, held = data.test_target.cpu().numpy(), data.class_counts().astype(np.float64)
    rng, owner = stream(data.seed, "test_owners"), np.empty(len(target), np.int64)
    for label in np.unique(target):
        share = held[:, label] if held[:, label].any() else np.ones(len(held))
        owner[target == label] = rng.choice(
            len(held), size=int((target == label).sum()), p=share / share.sum()
        )
    return owner


def validate(
    fabric: Fabric, method: Method, data: FederatedData, states: States = NO_STATES
) -> dict[int, float]:
    """Return the accuracy on its own validation examples of each client that has any, by id."""
    answers = predict_validation(fabric, method, data, states)
    return client_accuracies(*answers) if answers else {}


def predict_validation(
    fabric: Fabric, method: Method, data: FederatedData, states: States = NO_STATES
) -> tuple[Tensor, ...]:
    """Return logits ``[n, C]``, targets ``[n]`` and owners ``[n]`` of all clients' validation examples, on
    the CPU; ``()`` when there are none."""
    if method.personalised:
        held = data.validating.tolist()
        return gather_columns(
            (number, _validate_own(fabric, method, data, data.client(id, states.get(id))))
            for number, id in share(held)
        )
    return predict(fabric, method.deploy(), data.val_batches())


def client_accuracies(logits: Tensor, target: Tensor, owners: Tensor) -> dict[int, float]:
    """Return the accuracy of each client that has examples, by id, from :func:`predict_validation`."""
    hits = (logits.argmax(1) == target).numpy()
    ids, index, counts = np.unique(owners.numpy(), return_inverse=True, return_counts=True)
    return dict(zip(ids.tolist(), (np.bincount(index, weights=hits) / counts).tolist(), strict=True))


def _validate_own(fabric: Fabric, method: Method, data: FederatedData, client: Client) -> tuple[Tensor, ...]:
    return _forward(fabric, method.deploy(client), data.val_batches([client]))
