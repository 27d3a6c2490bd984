"""``modules_of`` and ``tensors_of`` give what torch's own iterators give, ties, gaps and shared
modules included."""

import pytest
from torch import nn

from fl_lightning.models import build_network
from fl_lightning.models.tensors import modules_of, tensors_of


def tied():
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    module = nn.Sequential(first, nn.BatchNorm1d(3), second)
    module.again = module[0]
    module.register_parameter("none", None)
    module.register_buffer("nothing", None)
    module.register_module("absent", None)
    return module


@pytest.mark.parametrize(
    "make", [tied, lambda: build_network("resnet20", 4, (3, 32, 32)), lambda: nn.ParameterList([])]
)
def test_as_torch_gives_them(make):
    module = make()
    expected = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    found = tensors_of(module)
    assert list(found) == list(expected)
    assert all(found[name] is expected[name] for name in expected)
    assert modules_of(module) == list(module.modules())
