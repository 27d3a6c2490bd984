"""A client's batches and steps on a GPU, as far as they can be seen without one: on tensors of a
device and a shape, without values.

Reading a value or mixing devices raises; what moves between them is counted. The backward pass
needs a card.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from ten import SETTINGS, TEN
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from toy import sgd

from fl_lightning import methods, rng
from fl_lightning.conformance.toy import images
from fl_lightning.methods import fedmosaic
from fl_lightning.models import SmallCNN
from fl_lightning.wire import Payload

CUDA = torch.device("cuda", 0)
NORMED = partial(SmallCNN, width=4, norm="batch")


class Crossings(TorchDispatchMode):
    """Operations from one device to another."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        there = {
            leaf.device.type
            for leaf in tree_leaves((args, kwargs, out))
            if isinstance(leaf, Tensor)
        }
        if len(there) > 1:
            self.seen.append(str(operation))
        return out


def on_cuda(tensor: Tensor) -> Tensor:
    moved = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=CUDA)
    return (
        nn.Parameter(moved, requires_grad=tensor.requires_grad)
        if isinstance(tensor, nn.Parameter)
        else moved
    )


def places_of_tensors(module: nn.Module) -> list[tuple[dict[str, Tensor], str]]:
    """Where a module and its children hold a tensor."""
    return [
        (held, name)
        for child in module.modules()
        for held in (child._parameters, child._buffers)
        for name, tensor in held.items()
        if tensor is not None
    ]


PLAIN = ("SCAFFOLD", "FedDyn", "FedCM", "FedDC")
"""Methods of plain SGD alone."""


@pytest.mark.parametrize("name", [*TEN, *PLAIN, "FedLC", "MOON"])
def test_batches_and_steps_stay_on_the_device(name, monkeypatch):
    momentum = 0.0 if name in PLAIN else 0.9
    settings = {
        "network": NORMED,
        "optimizer": sgd(0.05, momentum=momentum),
        **SETTINGS.get(name, {}),
    }
    method, data = getattr(methods, name)(**settings), images(crop="pad", flip=True)
    data.prepare_data()
    data.setup("fit")
    data.distribute(0, torch.device("cpu"))
    with rng.torch_stream(0, "weights"):
        method.build(data)
    method.round, client = 1, data.client(0)
    labels = data.labels(client)
    method.receive(Payload.from_bytes(method.broadcast(client).to_bytes()), client)
    method.start_terms(client, labels)
    method.train()
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(
        fedmosaic, "gradient_of", lambda *_: torch.zeros_like(method.gradient, device=CUDA)
    )
    with FakeTensorMode(allow_non_fake_inputs=True):
        moved: dict[int, Tensor] = {}
        for held, key in places_of_tensors(method):
            moved.setdefault(id(held[key]), on_cuda(held[key]))
            held[key] = moved[id(held[key])]
        for module in method.modules():
            if hasattr(module, "_device"):
                module._device = CUDA
        data.move(CUDA)
        with Crossings() as crossings:
            batches = list(
                method.local_batches(data, client, epochs=2, labels=on_cuda(labels), steps=4)
            )
        assert [leaf.device for leaf in tree_leaves(batches)] == [CUDA] * len(tree_leaves(batches))
        assert len(crossings.seen) <= 3  # positions, indices and augmentation of the whole round
        with Crossings() as crossings:
            outputs = method.training_step(batches[0], 0)
            with torch.no_grad():
                method.on_train_batch_end(outputs, batches[0], 0)
    assert crossings.seen == []
    assert all(value.device == CUDA for value in outputs.values())
