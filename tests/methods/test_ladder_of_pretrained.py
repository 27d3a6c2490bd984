"""A ladder of the branches of a model from a folder, and what its branches cost."""

from __future__ import annotations

from functools import partial

import pytest
from laddered import branch_costs, ladder_of, rows_of
from refusals import refused
from tiny_language import fit, records
from tiny_transformers import save_base, tokenizer_of_bytes

from fl_lightning.data.text.tokens import HuggingFaceTokenizer
from fl_lightning.energy.calibration.networks import adapted_network
from fl_lightning.energy.switched.branches import switch_branches
from fl_lightning.models import LlamaPretrained
from fl_lightning.models.language.hf import TransformersLM


def test_a_ladder_is_found_and_budgets_are_kept(tmp_path):
    base = save_base(tmp_path / "base", "SmolLM2")
    data = records(generate=False, tokenizer=HuggingFaceTokenizer(tokenizer=tokenizer_of_bytes()))
    network = partial(LlamaPretrained, name=str(base), rank=2)
    method = ladder_of(network=network, costs=branch_costs(2), budget=0.7)
    found = rows_of(fit(method, tmp_path, data, max_rounds=5))[-1]
    assert not method.server["ladder"].bool().all()
    assert found["energy/levels"] >= 2
    assert found["energy/refused"] == found["energy/over_budget"] == 0


def test_a_model_without_switched_blocks_is_refused_by_what_it_lacks(tmp_path):
    network = partial(TransformersLM, name=str(save_base(tmp_path / "base", "Llama 3")))
    with refused("network TransformersLM", "LlamaPretrained"):
        fit(ladder_of(network=network), tmp_path)


def test_a_model_is_calibrated_in_blocks_whose_branches_are_switched(tmp_path):
    base = save_base(tmp_path / "base", "Llama 3")
    network = adapted_network(f"hf:{base}", "merged", of_blocks=True)
    assert isinstance(network, LlamaPretrained)
    assert switch_branches(network).branches == 4
    with pytest.raises(ValueError, match="blocks of the project's own Llama"):
        switch_branches(adapted_network(f"hf:{base}", "merged"))
