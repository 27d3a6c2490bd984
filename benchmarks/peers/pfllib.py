"""A method of PFLlib, by its own code from a checkout, on Fashion-MNIST as it deals it: accuracy on
the clients' test sets after each round, a row of a CSV file each.

    python benchmarks/peers/pfllib.py CHECKOUT FedPer --rounds 6 --out theirs.csv

``benchmarks/peers/README.md`` says what a checkout needs. Four things are other than in PFLlib: the
training loss of an evaluation is not computed (it draws orders of examples, so that those of training are
others, as with another seed), clients' files are read once, libraries of other methods are stood in for,
and training stops after the last evaluation.
"""

from __future__ import annotations

import argparse
import csv
import os
import runpy
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch

ABSENT = ("calmsize", "cvxpy", "h5py", "torchtext", "ujson")
OPTIONS = {  # what configs/published/pfllib.yaml has, where it is not PFLlib's default
    "FedProx": ["-mu", "0.001"],
    "Ditto": ["-mu", "0.1"],
}


class Done(Exception):
    """The last evaluation has been made."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("method")
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0, help="of torch, not of the partition")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--own_head", action="store_true", help="FedProto: not by prototypes")
    given = parser.parse_args()
    out = given.out.absolute()
    os.chdir(given.checkout / "system")
    sys.path.insert(0, os.getcwd())
    for name in ABSENT:
        sys.modules.setdefault(name, MagicMock(__spec__=None))
    record(given.method, given.rounds, given.seed, out, own_head=given.own_head)
    torch.manual_seed(given.seed)
    sys.argv = ["main.py", "-dev", "cpu", "-data", "FashionMNIST", "-m", "CNN"]
    sys.argv += ["-algo", given.method, "-gr", str(given.rounds), *OPTIONS.get(given.method, [])]
    with suppress(Done):
        runpy.run_path("main.py", run_name="__main__")


def record(method: str, rounds: int, seed: int, out: Path, *, own_head: bool) -> None:
    """Make PFLlib's server write what each evaluation finds.

    Args:
        own_head: whether clients of FedProto are tested by their last layer and not by the nearest
            prototype.
    """
    import utils.data_utils as data

    data.read_client_data = cache(data.read_client_data)  # before anybody imports it
    from flcore.clients.clientbase import Client
    from flcore.clients.clientproto import clientProto
    from flcore.servers.serverbase import Server
    from flcore.servers.serverditto import Ditto
    from flcore.servers.serverproto import FedProto

    label = method
    if own_head:
        clientProto.test_metrics, label = Client.test_metrics, f"{method} (own head)"
    for owner in (Server, FedProto):
        owner.train_metrics = lambda self: ([0], [1], [0.0])
    Ditto.train_metrics_personalized = lambda self: ([0], [1], [0.0])

    def wrap(owner: Any, name: str, kind: str) -> None:
        original = getattr(owner, name)

        def evaluate(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            done = self.__dict__.setdefault("evaluated", {})
            round = done[kind] = done.get(kind, -1) + 1
            with out.open("a", newline="") as file:
                accuracy = f"{self.rs_test_acc[-1]:.6f}"
                csv.writer(file).writerow([label, kind, seed, round, accuracy])
            if round == rounds and (kind == "personal" or method != "Ditto"):
                raise Done

        setattr(owner, name, evaluate)

    wrap(Server, "evaluate", "own")
    if FedProto.evaluate is not Server.evaluate:
        wrap(FedProto, "evaluate", "own")
    wrap(Ditto, "evaluate_personalized", "personal")


if __name__ == "__main__":
    main()
