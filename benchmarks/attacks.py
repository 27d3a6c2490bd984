"""What one hostile client of ten does to each average: with its true number of examples, and with a
lie about it.

    python benchmarks/attacks.py --seeds 3

Digits, ten clients (Dirichlet 0.5), all of them in every round, FedAvg, 12 rounds of 2 epochs. The
attacker sends x - u in place of x + u, u its honest update; ``claims 2**62`` is its ``examples``,
which the server refuses, as it knows what the client enrolled with. Prints a Markdown table: final
test accuracy, mean over the seeds (lowest to highest). ``benchmarks/attack_grid.py`` has all
averages and all attacks.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from functools import partial

from torch.optim import SGD

from callbacks import ByzantineClients
from fl_lightning.aggregation.average import Average
from fl_lightning.aggregation.averages import (
    CoordinateMedian,
    NormClipping,
    TrimmedMean,
    WeightedMean,
)
from fl_lightning.data import Dirichlet, FederatedImages
from fl_lightning.methods import FedAvg
from fl_lightning.trainer import FederatedTrainer

ATTACKS = {
    "no attacker": None,
    "true n_k": {},
    "claims 2**62": {"claimed_examples": 2**62},
}
AVERAGES = (WeightedMean(), NormClipping(1.0), TrimmedMean(0.1), CoordinateMedian())


def accuracy(average: Average, attack: dict | None, seed: int, rounds: int) -> tuple[float, int]:
    """Final test accuracy, and the uploads that the server refused."""
    data = FederatedImages(
        dataset="digits", num_clients=10, partition=Dirichlet(beta=0.5, min_size=10), batch_size=32
    )
    method = FedAvg(optimizer=partial(SGD, lr=0.05, momentum=0.9), average=average)
    attackers = (
        []
        if attack is None
        else [ByzantineClients(clients=0.1, attack="sign_flip", strength=1.0, **attack)]
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = FederatedTrainer(
            max_rounds=rounds, participation=1.0, local_epochs=2, logger=False, default_root_dir=folder, callbacks=attackers,
            eval_every=rounds,
        )  # fmt: skip
        found = trainer.fit(method, data, seed=seed)
        return found["final/accuracy"], int(
            sum(row["clients/rejected"] for row in trainer.progress.history)
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=12)
    given = parser.parse_args()
    logging.getLogger("fl_lightning").setLevel(logging.CRITICAL)
    print("| average |", " | ".join(ATTACKS), "|")
    print("|---" * (1 + len(ATTACKS)) + "|")
    for average in AVERAGES:
        cells = []
        for attack in ATTACKS.values():
            each = [accuracy(average, attack, seed, given.rounds) for seed in range(given.seeds)]
            values, refused = [value for value, _ in each], sum(count for _, count in each)
            shown = f"{sum(values) / len(values):.3f} ({min(values):.3f} to {max(values):.3f})"
            cells.append(shown + (f", {refused} uploads refused" if refused else ""))
        print(f"| {type(average).__name__} |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
