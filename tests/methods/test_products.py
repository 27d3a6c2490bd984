"""Gradients by hand are those of autograd, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fl_lightning.methods.products import (
    distance_and_product,
    inner_product,
    moved_along,
    squared_distance,
)


def plain_distance(weights, others):
    return torch.stack([(w - c).square().sum() for w, c in zip(weights, others, strict=True)]).sum()


def plain_product(weights, others):
    return torch.stack([(w * v).sum() for w, v in zip(weights, others, strict=True)]).sum()


@pytest.mark.parametrize(
    ("ours", "plain"), [(squared_distance, plain_distance), (inner_product, plain_product)]
)
def test_values_and_gradients(ours, plain):
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Linear(7, 5)).to(
        memory_format=torch.channels_last
    )
    weights = [*network.parameters()]
    others = [torch.randn_like(weight).contiguous() for weight in weights]
    found = []
    for function in (ours, plain):
        network.zero_grad()
        value = 0.3 * function(weights, others)
        value.backward()
        found.append([value.detach(), *(weight.grad.clone() for weight in weights)])
    assert all(map(torch.equal, *found))


def test_both_at_once_and_a_sum_with_the_strides_of_the_weights():
    network = nn.Conv2d(3, 8, 1).to(memory_format=torch.channels_last)
    weights = [*network.parameters()]
    centres, vectors = ([torch.randn_like(weight) for weight in weights] for _ in range(2))
    squares, product = distance_and_product(weights, centres, vectors)
    assert torch.equal(squares, plain_distance(weights, centres))
    assert torch.equal(product, plain_product(weights, vectors))
    (0.3 * squares + 2 * product).backward()
    for weight, centre, vector in zip(weights, centres, vectors, strict=True):
        torch.testing.assert_close(weight.grad, 0.6 * (weight - centre) + 2 * vector)
    moved = moved_along(weights, vectors, torch.tensor(0.5))
    for weight, vector, there in zip(weights, vectors, moved, strict=True):
        assert there.stride() == weight.stride()
        assert torch.equal(there, weight + 0.5 * vector)


@pytest.mark.parametrize("ours", [squared_distance, inner_product])
def test_stacks_of_clients(ours):
    weights, others = torch.randn(3, 4, 2), torch.randn(3, 4, 2)
    stacked = torch.func.vmap(torch.func.grad(lambda w, o: ours([w], [o])))(weights, others)
    for number in range(3):
        one = nn.Parameter(weights[number].clone())
        ours([one], [others[number]]).backward()
        assert torch.allclose(stacked[number], one.grad)
