"""Fed-VEMoE with ``wire: private``: what noise hides, what no message exceeds, and what is refused."""

from __future__ import annotations

import pytest
import torch
from refusals import refused
from test_fedvemoe import D, built, rounds, upload_of
from tiny_language import fit, method_of

from fl_lightning.aggregation.averages import NormClipping
from fl_lightning.aggregation.clipped_sums import clip_addends
from fl_lightning.aggregation.receiving import check_upload
from fl_lightning.methods import FedVEMoE
from fl_lightning.privacy import ClientPrivacy
from fl_lightning.privacy.secure import SecureSum
from fl_lightning.wire import Codes, Payload, PayloadError


def private(**settings) -> FedVEMoE:
    return method_of(
        FedVEMoE, ffa=True, wire="private", weigh_by="clients", k_init=2, k_max=3, **settings
    )


@pytest.mark.slow
@pytest.mark.essential
def test_a_private_run_without_clip_and_noise_is_the_plain_one(tmp_path):
    pytest.importorskip("dp_accounting")
    plain = method_of(FedVEMoE, ffa=True, weigh_by="clients", k_init=2, k_max=3)
    fit(plain, tmp_path / "plain", max_rounds=3)
    method = private()
    wide = ClientPrivacy(noise_multiplier=0.0, clip_norm=1e3, delta=1e-2)
    fit(method, tmp_path / "private", max_rounds=3, privacy=wide)
    for name, values in plain.server.items():
        assert torch.allclose(method.server[name].double(), values.double(), atol=1e-5), name


def test_slots_stand_still_where_noise_hides_whether_anybody_used_them(tmp_path, caplog):
    pytest.importorskip("dp_accounting")
    method = private()
    noisy = ClientPrivacy(noise_multiplier=50.0, clip_norm=0.1, delta=1e-2)
    fit(method, tmp_path, privacy=noisy)
    untouched = built(ffa=True, wire="private", weigh_by="clients", k_init=2, k_max=3)[0]
    assert method.slots.mass.tolist() == [0, 0, 0, 0]
    assert method.server_metrics()["experts/effective"] == 0  # nothing is known of their use
    assert method.slots.active.tolist() == untouched.slots.active.tolist()
    assert float(method.slots.rejecters) == 0
    assert "no adapter ever moves" in caplog.text


def test_the_log_says_that_noise_hides_the_one_client_that_seeds_an_expert(tmp_path, caplog):
    pytest.importorskip("dp_accounting")
    noisy = ClientPrivacy(noise_multiplier=0.05, clip_norm=1.0, delta=1e-2)  # counts up to 2 of 4
    fit(private(birth="never"), tmp_path / "never", privacy=noisy, max_rounds=1)
    assert "so that none is born" not in caplog.text
    fit(private(), tmp_path / "test", privacy=noisy, max_rounds=1)
    assert "so that none is born" in caplog.text


def test_no_message_is_longer_than_the_clip_whatever_a_client_says():
    """Clipped by tensors, it could be the root of their number too long."""
    method, data = built(ffa=True, wire="private", weigh_by="clients", k_init=3, k_max=3, top_m=4)
    good, draws = upload_of(method, data, 0), torch.Generator().manual_seed(0)
    width = method.layout.size + D
    for _ in range(20):
        shares = torch.rand(3, generator=draws)
        forged = {
            **dict(good.items()),
            "slots": Codes(torch.ones(3, dtype=torch.int32), bits=1),
            "shares": shares / shares.sum(),
            "rows": 100 * torch.randn(4, width, generator=draws),
            "votes": Codes(torch.ones(2, dtype=torch.int32), bits=1),
            "own": 100 * torch.randn(method.layout.size, generator=draws),
        }
        addends = method.addends(Payload(forged), 0, 1)
        clipped, _ = clip_addends(addends, method.average, clip_norm=1.0, cohort=4)
        length = sum(float(each.values.double().square().sum()) for each in clipped.values()) ** 0.5
        assert 0.99 < length <= 1


def test_an_update_that_no_sum_has_room_for_is_refused():
    """Of rows that any upload may have: what is added up is their distance from those sent."""
    method, data = built(ffa=True, wire="private", weigh_by="clients", k_init=2, k_max=3)
    client, good = data.client(0), upload_of(method, data, 0)
    check_upload(method, good, client, set())
    method.server["experts"] = method.server["experts"] - 2.0
    far = {**dict(good.items()), "rows": torch.full_like(good.tensor("rows"), 2.0**20 - 1)}
    with pytest.raises(PayloadError, match="no sum has room"):
        check_upload(method, Payload(far), client, set())


@pytest.mark.parametrize("scale", [0.1, 2.0])
def test_counts_of_any_scale_are_added_up_in_secret(scale, tmp_path):
    method = private(mass_scale=scale)
    fit(method, tmp_path, max_rounds=1, secure_sum=SecureSum(threshold=0.67))
    assert rounds(tmp_path)[0]["clients/trained"] == "4"
    assert float(method.slots.mass.sum()) > 0


def test_privacy_needs_its_wire_and_a_frozen_a():
    with refused("A is trained", "ffa"):
        built(wire="private")
    for settings in ({"average": NormClipping(1.0)}, {"max_share": 0.5}):
        with refused("with wire private", "wire oblivious"):
            private(**settings)
    assert "private" in method_of(FedVEMoE).refuses["privacy"]


@pytest.mark.parametrize("name", ["server_lr", "mass_scale"])
def test_a_step_and_a_scale_are_finite(name):
    with refused(f"--model.{name} inf"):
        method_of(FedVEMoE, **{name: float("inf")})
