"""The ten methods, small: what a test needs to build each of them on the toy images."""

from __future__ import annotations

from functools import partial

from fl_lightning.models import ResidualMLP, SmallCNN

SMALL = partial(SmallCNN, width=4)
SETTINGS = {
    "FedMPQ": {"bits": [2, 4, 4, 2, 4, 4]},
    "AQFL": {"bits": [3, 4, 4, 3, 4, 4]},
    "FedMPQKD": {"bits": 3},
    "FedMosaic": {"networks": [partial(ResidualMLP, width=16), partial(ResidualMLP, width=24)], "reference": SMALL},
}
TEN = ("FedAvg", "FedProx", "FedNTD", "QFedAvg", "AQFL", "FedPQ", "FedMPQ", "FedMPQKD", "FedKD", "FedMosaic")
