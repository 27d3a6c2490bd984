"""Rules for adapters under masks: sums of what travels, and of the products that a rule reads."""

from __future__ import annotations

import pytest
import torch
from adapter_runs import OF_SINGLE_UPLOADS, Extreme, deployed_weights, fitted
from refusals import refused
from tiny_language import fit, method_of

from fl_lightning.aggregation.adapters import RULES
from fl_lightning.models.adapters import adapter_layers
from fl_lightning.privacy.secure import SecureSum


@pytest.mark.parametrize("rule", sorted(RULES))
def test_sums_under_masks_and_with_noise(rule, tmp_path):
    """The masked sum is the plain one of a rule that is linear in what travels. One that reads
    products adds up those too, and ends where it does with single uploads; one that weighs by them
    is refused."""
    pytest.importorskip("Crypto")
    masked = {"secure_sum": SecureSum()}
    if rule == "padded":
        with refused(f"--model.adapter_average {rule} with --trainer.secure_sum", "frozen_a"):
            fitted(tmp_path, rule, **masked)
        return
    plain, rows = fitted(tmp_path, rule)
    secret, hidden = fitted(tmp_path, rule, **masked)
    errors = [
        [float(row.get("average/factor_error") or -1) for row in some] for some in (rows, hidden)
    ]
    if rule not in OF_SINGLE_UPLOADS:
        assert plain.server["weights"].equal(secret.server["weights"])
        assert errors[1] == [-1.0, -1.0]
        return
    torch.testing.assert_close(
        deployed_weights(secret), deployed_weights(plain), rtol=1e-4, atol=1e-5
    )
    assert errors[1] == pytest.approx(errors[0], rel=1e-2, abs=1e-6)
    assert [row["secure/void"] for row in hidden] == ["0", "0"]


@pytest.mark.parametrize("rule", ["product", "stack"])
def test_products_under_masks_of_clients_with_ranks_of_their_own(rule, tmp_path):
    pytest.importorskip("Crypto")
    plain, _ = fitted(tmp_path, rule, rank=[1, 3])
    secret, _ = fitted(tmp_path, rule, rank=[1, 3], secure_sum=SecureSum())
    torch.testing.assert_close(
        deployed_weights(secret), deployed_weights(plain), rtol=1e-4, atol=1e-5
    )


def test_masked_products_are_counted_and_equal_a_leaves_nothing(tmp_path):
    """A product has m n values of 8 bytes, and one more for its weights; with one A, `residual` is
    `factors`."""
    pytest.importorskip("Crypto")
    masked = {"secure_sum": SecureSum(), "ffa": True}
    factors, plain = fitted(tmp_path, "factors", **masked)
    ours, rows = fitted(tmp_path, "residual", **masked)
    assert ours.server["weights"].equal(factors.server["weights"])
    assert not ours.adapters.base_moved(ours)
    added = sum(
        len(layer.lora_B.weight) * layer.lora_A.weight.shape[1]
        for layer in adapter_layers(ours.network).values()
    )
    for row, other in zip(rows, plain, strict=True):
        more = float(row["comm/masked_bytes"]) - float(other["comm/masked_bytes"])
        assert more == pytest.approx(4 * 8 * (added + 1), abs=4 * 64)


def test_a_product_beyond_the_range_of_sums_is_cut(tmp_path):
    """Factors of 1e6 add 1e12: under masks no round ends the run, and what is deployed stays
    finite."""
    pytest.importorskip("Crypto")
    made = fit(
        method_of(Extreme, adapter_average="product"), tmp_path, secure_sum=SecureSum()
    ).method
    assert deployed_weights(made).isfinite().all()
