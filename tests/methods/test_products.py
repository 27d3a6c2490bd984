"""Gradients by hand are those of autograd, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fl_lightning.methods.products import inner_product, squared_distance


def plain_distance(weights, others):
    return torch.stack([(w - c).square().sum() for w, c in zip(weights, others, strict=True)]).sum()


def plain_product(weights, others):
    return torch.stack([(w * v).sum() for w, v in zip(weights, others, strict=True)]).sum()


@pytest.mark.parametrize(
    ("ours", "plain"), [(squared_distance, plain_distance), (inner_product, plain_product)]
)
def test_values_and_gradients(ours, plain):
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Linear(7, 5)).to(memory_format=torch.channels_last)
    weights = [*network.parameters()]
    others = [torch.randn_like(weight).contiguous() for weight in weights]
    found = []
    for function in (ours, plain):
        network.zero_grad()
        value = 0.3 * function(weights, others)
        value.backward()
        found.append([value.detach(), *(weight.grad.clone() for weight in weights)])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("ours", [squared_distance, inner_product])
def test_stacks_of_clients(ours):
    weights, others = torch.randn(3, 4, 2), torch.randn(3, 4, 2)
    stacked = torch.func.vmap(torch.func.grad(lambda w, o: ours([w], [o])))(weights, others)
    for number in range(3):
        one = nn.Parameter(weights[number].clone())
        ours([one], [others[number]]).backward()
        assert torch.allclose(stacked[number], one.grad)
