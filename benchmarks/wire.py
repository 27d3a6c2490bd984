"""What the wire costs a client: encode and decode of a MobileNet-V2 upload against that client's
training, on one CPU thread.

    python benchmarks/wire.py [--examples 500] [--epochs 2]
"""

from __future__ import annotations

import argparse
from functools import partial
from statistics import median
from time import perf_counter

import torch

from fl_lightning import methods, rng
from fl_lightning.data import IID, FederatedImages
from fl_lightning.wire import Payload

METHODS = ("FedAvg", "QFedAvg", "AQFL", "FedMPQ", "FedMPQKD")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=500, help="images of the client")
    parser.add_argument("--epochs", type=int, default=2, help="local epochs")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    data = FederatedImages(
        dataset="synthetic", synthetic_classes=100, synthetic_examples=10 * arguments.examples, num_clients=10,
        partition=IID(), crop="shrink", flip=True, val_fraction=0.0,
    )  # fmt: skip
    data.prepare_data()
    data.setup("fit")
    data.distribute(0, torch.device("cpu"))
    steps = data.num_steps(data.client(0), arguments.epochs)
    print(
        f"{'method':10}{'bytes up':>12}{'train s':>10}{'encode s':>10}{'decode s':>10}{'share %':>9} "
        f"  {steps} steps"
    )
    for name in METHODS:
        measure(name, data, steps)


def measure(name: str, data: FederatedImages, steps: int) -> None:
    optimizer = partial(torch.optim.AdamW, lr=3e-4, fused=True)
    method = getattr(methods, name)(network="mobilenetv2", optimizer=optimizer)
    with rng.torch_stream(0, "weights"):
        method.build(data)
    method.round, client = 1, data.client(0)
    method.receive(method.broadcast(client), client)
    method.train()
    local, times = method.configure_optimizers(), []
    for step, batch in enumerate(data.train_batches(client, round=1, epochs=1, steps=4)):
        started = perf_counter()
        outputs = method.training_step(batch, step)
        local.zero_grad()
        outputs["loss"].backward()
        local.step()
        method.on_train_batch_end(outputs, batch, step)
        times.append(perf_counter() - started)
    encodes, decodes = [], []
    for _ in range(5):
        started = perf_counter()
        with torch.no_grad():
            sent = method.upload(client).to_bytes()
        encoded = perf_counter()
        method.decode(Payload.from_bytes(sent))
        encodes.append(encoded - started)
        decodes.append(perf_counter() - encoded)
    train, encode, decode = median(times) * steps, median(encodes), median(decodes)
    share = 100 * (encode + decode) / train
    print(f"{name:10}{len(sent):12}{train:10.2f}{encode:10.3f}{decode:10.3f}{share:9.2f}")


if __name__ == "__main__":
    main()
