"""The vector of a network is that of its weights in order, however they lie in memory."""

from __future__ import annotations

import pytest
import torch

from fl_lightning.models.tensors import tensors_of
from fl_lightning.wire import Layout


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_a_vector_does_not_depend_on_the_order_in_memory_nor_on_torchs_default(dtype, order):
    network = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Linear(2, 5)
    )
    network.to(dtype=dtype, memory_format=order)
    assert network[0].weight.is_contiguous() is (order == torch.contiguous_format)
    layout, tensors = Layout.of(network), tensors_of(network)
    expected = [value for name in layout.shapes for value in tensors[name].flatten().tolist()]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        vector = layout.read(network)
    finally:
        torch.set_default_dtype(before)
    assert vector.dtype == torch.float32
    assert vector.tolist() == expected
    vector.add_(1.0)
    # it is a copy
    assert tensors_of(network)["0.weight"].flatten().tolist() == expected[: 4 * 3 * 9]
