"""Client-level privacy under a secure sum: the same model, bit for bit, as where the server sees
messages."""

from __future__ import annotations

from functools import partial

import pytest

from callbacks import SecureDropout
from fl_lightning.conformance import toy
from fl_lightning.errors import InputError
from fl_lightning.methods import FedAvg
from fl_lightning.models import SmallCNN
from fl_lightning.privacy import ClientPrivacy
from fl_lightning.privacy.secure import SecureSum

pytest.importorskip("dp_accounting")
pytest.importorskip("Crypto")


def weights_of(folder, secure_sum, callbacks, **privacy):
    method = FedAvg(network=partial(SmallCNN, width=4), optimizer=toy.sgd(0.05), weigh_by="clients")
    settings = ClientPrivacy(noise_multiplier=0.5, clip_norm=1.0, **privacy)
    trainer = toy.run(
        method,
        toy.images(),
        folder,
        max_rounds=2,
        privacy=settings,
        secure_sum=secure_sum,
        callbacks=callbacks,
    )
    return trainer.run.read_json("metadata.json")["weights_sha256"]


@pytest.mark.parametrize("quantile", [None, 0.5])
@pytest.mark.parametrize("where", ["central", "distributed"])
def test_masks_change_nothing_of_a_private_run(where, quantile, tmp_path):
    settings = {"where": where, "target_quantile": quantile}
    plain = weights_of(tmp_path / "plain", None, [], **settings)
    assert weights_of(tmp_path / "secure", SecureSum(), [], **settings) == plain


def test_a_sum_with_too_little_noise_is_never_unmasked(tmp_path):
    with pytest.raises(InputError, match="fewer shares of noise than the whole noise"):
        weights_of(tmp_path, SecureSum(threshold=0.6), [], where="distributed", min_returned=0.9)


def test_the_same_clients_count_with_drop_outs(tmp_path):
    leaves = [SecureDropout(0.3, "masked")]
    settings = {"where": "distributed", "min_returned": 0.51}
    plain = weights_of(tmp_path / "plain", None, leaves, **settings)
    assert weights_of(tmp_path / "secure", SecureSum(threshold=0.51), leaves, **settings) == plain
    assert weights_of(tmp_path / "all", None, [], **settings) != plain
