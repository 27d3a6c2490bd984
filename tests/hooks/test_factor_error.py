"""What a mean of factors loses is measured where both factors of a layer travel."""

from __future__ import annotations

import pytest
from tiny_language import fit, method_of
from torch import nn
from toy import run

from callbacks import FactorError
from fl_lightning.conformance.toy import images
from fl_lightning.errors import InputError
from fl_lightning.hooks import Meter
from fl_lightning.methods import FedAvg, FedPer
from fl_lightning.models.adapters import add_adapter


@pytest.mark.parametrize(
    "setting",
    [{"adapter_average": "share_a"}, {"personal": "*lora_B.*"}, {"personal": "*lora_A.*"}],
)
def test_a_factor_that_stays_on_each_client_is_refused(setting, tmp_path):
    with pytest.raises(InputError, match=r"FactorError; .*lora_[AB]\S* stays on each client"):
        fit(method_of(**setting), tmp_path / "run", callbacks=[FactorError()], max_rounds=1)
    assert not (tmp_path / "run").exists()


def beside_a_head(num_classes):
    network = nn.Sequential(nn.Flatten(), nn.Linear(768, 8), nn.Linear(8, num_classes))
    add_adapter(network, "lora", rank=2, targets=["1"])[2].requires_grad_(True)
    return network


@pytest.mark.parametrize(
    ("network", "trains"), [("small_cnn", "features.0.weight"), (beside_a_head, "2.weight")]
)
def test_a_network_that_trains_no_adapter_or_more_is_refused(network, trains, tmp_path):
    method = FedAvg(network=network)
    with pytest.raises(
        InputError, match=f"^callbacks.FactorError .* trains {trains}; .*; leave it out"
    ):
        run(method, images(), tmp_path / "run", callbacks=[FactorError()])
    assert not (tmp_path / "run").exists()


def test_a_layer_that_stays_as_a_whole_leaves_the_others_measured(tmp_path):
    class Last(Meter):
        def on_round_end(self, record, context):
            self.found = record.metrics["average/factor_error"]

    last = Last()
    fit(method_of(FedPer), tmp_path, callbacks=[FactorError(), last], max_rounds=1)
    assert last.found > 1e-3
