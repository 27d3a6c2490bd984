"""Tables of merged adapters, of bfloat16, of networks of transformers, and of one common rest."""

from __future__ import annotations

import itertools
import json
import math
import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from budgeted import costs
from refusals import refused
from test_hest import built
from tiny_language import tiny

from fl_lightning.__main__ import main
from fl_lightning.energy import ModelledMeter, calibrate, from_json, read_table, shipped_table, to_json
from fl_lightning.energy.networks import adapted_network, calibration_advice, kind_and_rank
from fl_lightning.energy.samples import Measured, tables_of
from fl_lightning.energy.steps import steps_of
from fl_lightning.energy.works import LinearShape, prefix_of, step_work, switched_copy, without_groups
from fl_lightning.models import LlamaTiny
from fl_lightning.models.adapters import ADAPTERS
from fl_lightning.models.options import MergedLinear, add_switches, merge_adapters

LABEL = "modelled: CPU seconds x 15 W"


@pytest.fixture
def few_tokens(monkeypatch):
    monkeypatch.setattr(calibrate, "KNOTS", (1, 2, 4))
    monkeypatch.setattr(calibrate, "HELD_OUT", (3,))


def disturbed(network):
    """The network with random values in what is trained, so that its adapters do something."""
    draws = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in network.parameters():
            if weight.requires_grad:
                weight += 0.1 * torch.randn(weight.shape, generator=draws)
    return network


# Merged adapters


@pytest.mark.parametrize("kind", ADAPTERS)
def test_a_merged_network_computes_the_adapted_one_with_one_product_a_layer(kind):
    network = disturbed(LlamaTiny(259, rank=4, adapter=kind)).eval()
    ids = torch.randint(0, 256, (2, 7), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, names = network(ids), [layer.name for layer in switched_copy(network, "model")[1].values()]
        merge_adapters(network)
        torch.testing.assert_close(network(ids), expected, rtol=1e-4, atol=1e-4)
    assert not [name for name, weight in network.named_parameters() if weight.requires_grad and "proj" in name]
    switched, layers = switched_copy(network, "model")
    assert list(layers) == names
    products = []
    with torch.no_grad(), torch.overrides.TorchFunctionMode() if False else Counted(products):
        for layer in layers.values():
            layer.execute("high", torch.zeros(1, layer.shape[0]))
    assert products == [torch.nn.functional.linear] * len(layers)
    assert {type(layer.adapted) for layer in layers.values()} == {MergedLinear}
