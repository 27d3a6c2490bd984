"""What quantisation and distillation cost: a client's round of FedAvg, FedMPQ in both
representations, FedMPQ-KD, FedPQ and FedKD in turn, on one CPU thread.

    python benchmarks/prices.py [--network mobilenetv2] [--examples 256] [--epochs 2]
        [--repeats 5] [--no-augment]
    # as in kd_default
    python benchmarks/prices.py --network small_cnn --classes 10 --examples 17 --no-augment

Ratios of the medians of whole client rounds: receive, local training, upload. Without augmentation
the teacher's logits are computed in the first epoch and looked up in the others. FedKD distils once
over its public images before it trains.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter, process_time
from unittest.mock import patch

import torch
from lightning.fabric import Fabric

from fl_lightning import methods, rng
from fl_lightning.data import IID, FederatedImages
from fl_lightning.engines import ClientTask, SequentialEngine
from fl_lightning.methods import teaching
from fl_lightning.support.memory import keep_freed_memory

METHODS = {
    "FedAvg": methods.FedAvg,
    "FedMPQ": methods.FedMPQ,
    "FedMPQ planes": partial(methods.FedMPQ, representation="planes"),
    "FedMPQKD": methods.FedMPQKD,
    "FedPQ": methods.FedPQ,
    "FedKD": methods.FedKD,
}
IN_STEPS = "FedMPQKD, teacher in every step"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--network", default="mobilenetv2")
    parser.add_argument("--examples", type=int, default=256, help="images of the client")
    parser.add_argument("--classes", type=int, default=100, help="classes of the images")
    parser.add_argument("--public", type=int, default=400, help="public images of FedKD")
    parser.add_argument("--epochs", type=int, default=2, help="local epochs")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--augment",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="crop and flip the images",
    )
    parser.add_argument("--accelerator", default="cpu")
    options = parser.parse_args()
    keep_freed_memory()
    fabric = Fabric(accelerator=options.accelerator, devices=1)
    data = FederatedImages(
        dataset="synthetic", synthetic_classes=options.classes, num_clients=4, public_examples=options.public,
        synthetic_examples=4 * options.examples + options.public,
        partition=IID(), crop="shrink" if options.augment else "none", flip=options.augment, val_fraction=0.0,
    )  # fmt: skip
    data.prepare_data()
    data.setup("fit")
    data.distribute(0, fabric.device)
    rounds: dict[str, Callable[[], object]] = {
        name: client_round(name, data, fabric, options.network, options.epochs) for name in METHODS
    }
    rounds[IN_STEPS] = partial(in_steps, rounds["FedMPQKD"])
    # of one thread, whatever else the machine does
    clock = perf_counter if fabric.device.type == "cuda" else process_time
    times: dict[str, list[float]] = {name: [] for name in rounds}
    for repeat in range(options.repeats + 1):
        for name, one in rounds.items():
            started = clock()
            one()
            if fabric.device.type == "cuda":
                torch.cuda.synchronize()
            if repeat:  # the first warms up
                times[name].append(clock() - started)
    middle = {name: median(found) for name, found in times.items()}
    print(" ".join(f"{name} {1e3 * seconds:.0f} ms" for name, seconds in middle.items()))
    print(f"quantisation: FedMPQ / FedAvg   {middle['FedMPQ'] / middle['FedAvg']:.2f}")
    print(f"              planes / FedAvg   {middle['FedMPQ planes'] / middle['FedAvg']:.2f}")
    print(f"distillation: FedMPQKD / FedMPQ {middle['FedMPQKD'] / middle['FedMPQ']:.2f}")
    print(f"              {IN_STEPS} / FedMPQ {middle[IN_STEPS] / middle['FedMPQ']:.2f}")
    for name in ("FedPQ", "FedKD"):
        print(f"of others:    {name} / FedAvg    {middle[name] / middle['FedAvg']:.2f}")


def in_steps(one: Callable[[], object]) -> None:
    """No logits beforehand."""
    with patch.object(teaching, "pays", lambda *_: False):
        one()


def client_round(
    name: str, data: FederatedImages, fabric: Fabric, network: str, epochs: int
) -> partial:
    method = METHODS[name](
        network=network, optimizer=partial(torch.optim.SGD, lr=0.01, momentum=0.9)
    )
    with rng.torch_stream(0, "weights"):
        method.build(data)
    method.to(fabric.device)
    method.round, client = 1, data.client(0)
    # there are soft labels to distil, as from the second round on
    if "aggregated" in method.server:
        method.server["aggregated"].fill_(1)
    order = ClientTask(
        client,
        1,
        method.broadcast(client).to_bytes(),
        data.labels(client),
        epochs,
        data.num_steps(client, epochs),
    )
    return partial(
        lambda engine, order: list(engine.train([order])),
        SequentialEngine(fabric, method, data),
        order,
    )


if __name__ == "__main__":
    main()
