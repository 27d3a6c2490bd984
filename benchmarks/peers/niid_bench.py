"""A method of NIID-Bench, by its own code from a checkout, on Fashion-MNIST as it deals it: accuracy
of the global model on the test set after each round, a row of a CSV file each.

    python benchmarks/peers/niid_bench.py CHECKOUT labels2 SCAFFOLD --epochs 2 --rounds 5 --out theirs.csv

``benchmarks/peers/README.md`` says what a checkout needs. Two things are other than in NIID-Bench: only the
global model is evaluated, and on the test set alone (its evaluations on training images draw orders of
examples, so that those of training are others, as with another seed); and images are made tensors at once,
not each by PIL when it is read.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import os
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from fl_lightning.data.fashion_mnist import DEBIAN_FOLDER

SETTINGS = {  # as in configs/published/niid_bench.yaml
    "iid": ["--partition", "homo"],
    "dirichlet05": ["--partition", "noniid-labeldir", "--beta", "0.5"],
    "labels1": ["--partition", "noniid-#label1"],
    "labels2": ["--partition", "noniid-#label2"],
    "labels3": ["--partition", "noniid-#label3"],
    "quantity": ["--partition", "iid-diff-quantity", "--beta", "0.5"],
    "noise": ["--partition", "homo", "--noise", "0.1"],
}
METHODS = {
    "FedAvg": ["--alg", "fedavg"],
    "FedProx": ["--alg", "fedprox", "--mu", "0.01"],
    "SCAFFOLD": ["--alg", "scaffold"],
    "FedNova": ["--alg", "fednova"],
}
PROTOCOL = ["--model", "simple-cnn", "--dataset", "fmnist", "--lr", "0.01", "--rho", "0.9"]
PROTOCOL += ["--batch-size", "64", "--n_parties", "10", "--device", "cpu"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("setting", choices=SETTINGS)
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    out = given.out.absolute()
    sys.path.insert(0, str(given.checkout.absolute()))
    record([given.setting, given.method, given.seed], out)
    keep_tensors()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        unpack(Path("data/FashionMNIST/raw"))
        sys.argv = ["experiments.py", *PROTOCOL, *SETTINGS[given.setting], *METHODS[given.method]]
        sys.argv += ["--epochs", str(given.epochs), "--comm_round", str(given.rounds)]
        sys.argv += ["--init_seed", str(given.seed)]
        runpy.run_path(str(Path(sys.path[0]) / "experiments.py"), run_name="__main__")


def unpack(folder: Path) -> None:
    """Write the images where torchvision looks for them."""
    folder.mkdir(parents=True)
    for packed in DEBIAN_FOLDER.glob("*.gz"):
        (folder / packed.stem).write_bytes(gzip.decompress(packed.read_bytes()))


def record(label: list[str | int], out: Path) -> None:
    """Make NIID-Bench write what the global model's evaluations on the test set find, and skip all
    others."""
    import utils

    original, rounds = utils.compute_accuracy, 0

    def compute_accuracy(*args: Any, get_confusion_matrix: bool = False, **kwargs: Any) -> Any:
        nonlocal rounds
        of_the_server = sys._getframe(1).f_code.co_name == "<module>"
        if not (of_the_server and get_confusion_matrix):  # asked for on test images alone
            return (0.0, None) if get_confusion_matrix else 0.0
        accuracy, matrix = original(*args, get_confusion_matrix=True, **kwargs)
        rounds += 1
        with out.open("a", newline="") as file:
            csv.writer(file).writerow([*label, rounds, f"{accuracy:.6f}"])
        return accuracy, matrix

    utils.compute_accuracy = compute_accuracy


def keep_tensors() -> None:
    """Make a dataset's images ``[N, 1, 28, 28]`` in [0, 1] once; what is drawn for each is added as
    before."""
    from datasets import FashionMNIST_truncated

    def image_and_label(self: Any, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if "images" not in self.__dict__:
            self.images = self.data.unsqueeze(1).float() / 255
        _, noise = self.transform.transforms
        return noise(self.images[index]), self.target[index]

    FashionMNIST_truncated.__getitem__ = image_and_label


if __name__ == "__main__":
    main()
