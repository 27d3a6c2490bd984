"""The ten methods, small: what a test needs to build and run each of them on the toy images."""

from __future__ import annotations

from functools import partial

import torch
from toy import run, sgd

from fl_lightning import methods
from fl_lightning.conformance.toy import images
from fl_lightning.methods import Method
from fl_lightning.models import ResidualMLP, SmallCNN

SMALL = partial(SmallCNN, width=4)
SETTINGS = {
    "FedMPQ": {"bits": [2, 4, 4, 2, 4, 4]},
    "AQFL": {"bits": [3, 4, 4, 3, 4, 4]},
    "FedMPQKD": {"bits": 3},
    "FedMosaic": {
        "networks": [partial(ResidualMLP, width=16), partial(ResidualMLP, width=24)],
        "reference": SMALL,
    },
}
REFERENCES = ("LocalOnly", "Oracle")
TEN = (
    "FedAvg",
    "FedProx",
    "FedNTD",
    "QFedAvg",
    "AQFL",
    "FedPQ",
    "FedMPQ",
    "FedMPQKD",
    "FedKD",
    "FedMosaic",
)


CODED = {"QFedAvg", "AQFL", "FedPQ", "FedMPQ", "FedMPQKD"}


def make(name: str, **settings) -> Method:
    return getattr(methods, name)(
        **{
            "network": SMALL,
            "optimizer": sgd(0.05, momentum=0.9),
            **SETTINGS.get(name, {}),
            **settings,
        }
    )


def fit(method: Method, folder, **settings):
    """Two rounds of six unequal clients, one with a single example; the server's tensors and the
    run directory."""
    trainer = run(method, images(), folder, **{"max_rounds": 2} | settings)
    return method.server, trainer.run_dir


def same(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def assert_same_within_rounding(name: str, expected: dict, found: dict, atol: float = 2e-5) -> None:
    """Compare what a method ends with. Where it sends codes, a few of them may fall on the other
    side of a threshold, and a weight is then off by a client's share of one step of the grid: of
    two bits a step is the largest weight."""
    assert expected.keys() == found.keys()
    for key, value in expected.items():
        difference = (found[key].double() - value.double()).abs()
        off = difference > atol
        if name not in CODED or not off.any():
            assert not off.any(), key
            continue
        assert off.double().mean() < 2e-3, key
        assert difference.max() < value.double().abs().max() / 2, key
