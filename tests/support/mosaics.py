"""Federations of FedMosaic, small enough to follow by hand."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import nn
from toy import Quadratic, point_network, sgd

from fl_lightning import rng
from fl_lightning.client import Client
from fl_lightning.data import FederatedImages, Shards
from fl_lightning.hooks import Stressor
from fl_lightning.methods import FedMosaic
from fl_lightning.models import ResidualMLP, SmallCNN

SMALL, LARGE = partial(ResidualMLP, width=12, depth=3), partial(ResidualMLP, width=20, depth=5)


REFERENCE = partial(SmallCNN, width=4)


def mosaic(**settings) -> FedMosaic:
    settings = {
        "networks": [SMALL, LARGE],
        "reference": REFERENCE,
        "rank": 4,
        "num_blocks": 3,
        "optimizer": sgd(0.05),
        **settings,
    }
    return FedMosaic(**settings)


def digits(num_clients: int = 6, **settings) -> FederatedImages:
    return FederatedImages(
        num_clients=num_clients,
        partition=Shards(2),
        **{"batch_size": 32, "val_fraction": 0.2, **settings},
    )


def built(method: FedMosaic, data=None, seed: int = 0) -> FedMosaic:
    data = data or digits()
    data.setup()
    data.distribute(seed, torch.device("cpu"))
    method.seed = seed
    with rng.torch_stream(seed, "weights"):
        method.build(data)
    return method


def point_client(id: int, **state: torch.Tensor) -> Client:
    return Client(id, np.arange(1), np.arange(0), dict(state))


def two_layers(classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(1, 6), nn.Linear(6, classes))


def mosaic_on_points(**settings) -> FedMosaic:
    """Rank 6 of 6: every client can reach its own centre."""
    own = {"network": two_layers, "reference": point_network, "sigma": 0.0, "sketch_rows": 1.0}
    method = FedMosaic(rank=6, num_blocks=1, optimizer=sgd(0.05), **{**own, **settings})
    method.task_loss = Quadratic()
    return method


class Nobody(Stressor):
    def change_upload(self, upload, *, client, round, context):
        return None
