"""Networks channels last: same gradients, and none of them is brought from one layout to the other at full size."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import profile

from fl_lightning.models import SmallCNN, build_network, lay_out

POOLS = {
    "max": nn.MaxPool2d(2),
    "average": nn.AvgPool2d(2),
    "adaptive": nn.AdaptiveAvgPool2d(7),
    "overlapping": nn.MaxPool2d(3, stride=2),
    "one": nn.AdaptiveAvgPool2d(1),
    "adaptive maximum": nn.AdaptiveMaxPool2d(7),
}


def with_pool(pool: nn.Module) -> nn.Module:
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), pool, nn.Flatten(), nn.LazyLinear(5))
    network(torch.zeros(1, 3, 30, 30))
    return network


def gradients(network: nn.Module, images: Tensor) -> list[Tensor]:
    network.zero_grad()
    network(images).square().sum().backward()
    return [parameter.grad for parameter in network.parameters()]


def copies(network: nn.Module, images: Tensor, shape: tuple[int, ...]) -> int:
    """Copies of tensors of this shape in a backward pass."""
    loss = network(images).square().sum()
    with profile(record_shapes=True) as seen:
        loss.backward()
    return sum(event.name == "aten::copy_" and list(event.input_shapes[0]) == list(shape) for event in seen.events())


@pytest.mark.parametrize("pool", POOLS)
def test_pools_give_the_gradients_that_they_gave(pool: str) -> None:
    torch.manual_seed(0)
    images, plain = torch.randn(4, 3, 30, 30), with_pool(POOLS[pool])
    ours = lay_out(deepcopy(plain))
    for expected, got in zip(gradients(plain, images), gradients(ours, images), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-4)


def test_pools_copy_nothing_of_their_inputs_size() -> None:
    images = torch.randn(4, 3, 30, 30)
    plain = with_pool(nn.MaxPool2d(2)).to(memory_format=torch.channels_last)
    assert copies(plain, images, (4, 8, 28, 28))  # else torch does by itself what lay_out is for
    assert not copies(lay_out(deepcopy(plain)), images, (4, 8, 28, 28))
    assert not copies(build_network("small_cnn", 10, (3, 32, 32)), torch.randn(4, 3, 32, 32), (4, 64, 8, 8))


@pytest.mark.parametrize("make", [lambda: with_pool(nn.MaxPool2d(2)), lambda: SmallCNN(10)])
def test_copies_of_a_network_and_vmap_keep_it(make: Callable[[], nn.Module]) -> None:
    images, network = torch.randn(4, 3, 30, 30), lay_out(make())
    assert all(map(torch.equal, gradients(network, images), gradients(deepcopy(network), images)))
    stacked = {
        name: value.detach().expand(2, *value.shape).clone().requires_grad_() for name, value in network.named_parameters()
    }
    outputs = torch.func.vmap(lambda tensors: torch.func.functional_call(network, tensors, (images,)))(stacked)
    outputs.square().sum().backward()
    for expected, got in zip(gradients(network, images), stacked.values(), strict=True):
        torch.testing.assert_close(got.grad[1], expected, rtol=1e-4, atol=1e-4)
