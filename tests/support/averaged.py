"""Digits of four clients, what each of them sends, and how long an entry is."""

from __future__ import annotations

import torch
from lightning.fabric import Fabric

from fl_lightning import rng
from fl_lightning.data import IID, FederatedImages
from fl_lightning.engines import ClientTask, SequentialEngine


def digits(num_clients: int = 4) -> FederatedImages:
    return FederatedImages(dataset="digits", num_clients=num_clients, partition=IID())


def sent(method, data, order=(0, 1, 2, 3)) -> dict[int, bytes]:
    """Uploads of round 1 of clients that train in this order."""
    data.prepare_data()
    data.setup()
    data.distribute(0, torch.device("cpu"))
    with rng.torch_stream(0, "weights"):
        method.build(data)
    method.round = 1
    engine, uploads = SequentialEngine(Fabric(accelerator="cpu", devices=1), method, data), {}
    for k in order:
        client = data.client(k)
        uploads[k] = engine.train_client(
            ClientTask(
                client, method.round, method.broadcast(client).to_bytes(), data.labels(client), 1, 2
            )
        ).upload
    return uploads


def entry(name: str, ndim: int, data: int) -> int:
    return 3 + len(name) + 4 * ndim + data
