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
