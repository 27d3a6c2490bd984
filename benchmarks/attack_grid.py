"""What four hostile clients of twenty do to each average, for each attack, over seeds.

    python benchmarks/attack_grid.py docs/results/attack_grid.csv --seeds 10
    python benchmarks/attack_grid.py docs/results/attack_grid.csv --table

The first command makes the runs that the file lacks and appends each as it ends: it can be stopped
and started again. The second one prints the Markdown tables of a file.

Digits, twenty clients (Dirichlet 0.5), all of them in every round, FedAvg, 12 rounds of 2 epochs;
averages that ask are told that f is 4. The public set of 100 examples, which no client has, is
there in all runs. Nothing was tuned: each average has the settings of ``AVERAGES`` against every
attack.
"""

from __future__ import annotations

import argparse
import csv
import logging
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from math import isnan
from pathlib import Path
from statistics import fmean

from torch.optim import SGD

from callbacks import ByzantineClients
from fl_lightning import methods as averages
from fl_lightning.aggregation.average import Average
from fl_lightning.data import Dirichlet, FederatedImages
from fl_lightning.study.statistics import paired_test, t_interval, with_holm
from fl_lightning.trainer import FederatedTrainer

F, CLIENTS = 4, 20
AVERAGES: dict[str, Callable[[], Average]] = {
    "WeightedMean": averages.WeightedMean,
    "NormClipping(1)": partial(averages.NormClipping, 1.0),
    "TrimmedMean(0.2)": partial(averages.TrimmedMean, F / CLIENTS),
    "CoordinateMedian": averages.CoordinateMedian,
    "Krum(4)": partial(averages.Krum, F),
    "MultiKrum(4, 12)": partial(averages.MultiKrum, F, 12),
    "Bulyan(4)": partial(averages.Bulyan, F),
    "GeometricMedian": averages.GeometricMedian,
    "CenteredClipping(1)": partial(averages.CenteredClipping, 1.0),
    "FLTrust(8)": partial(averages.FLTrust, 8),
}
MEAN = "WeightedMean"
ATTACKS = {
    "none": None,
    "sign_flip, 10": {"attack": "sign_flip", "strength": 10.0},
    "label_flip": {"attack": "label_flip"},
    "alie": {"attack": "alie"},
    "ipm, 0.1": {"attack": "ipm", "strength": 0.1},
    "ipm, 10": {"attack": "ipm", "strength": 10.0},
    "min_max": {"attack": "min_max"},
}
COLUMNS = ("average", "attack", "seed", "rounds", "accuracy", "refused")
Accuracies = Mapping[tuple[str, str], list[float]]
"""By average and attack, final test accuracies in the order of the seeds."""


def make_run(average: str, attack: str, seed: int, rounds: int) -> tuple[float, int]:
    """Return the final test accuracy, and how many uploads the server refused."""
    data = FederatedImages(
        dataset="digits", num_clients=CLIENTS, partition=Dirichlet(beta=0.5, min_size=10), batch_size=32,
        public_examples=100,
    )  # fmt: skip
    method = averages.FedAvg(
        optimizer=partial(SGD, lr=0.05, momentum=0.9), average=AVERAGES[average]()
    )
    settings = ATTACKS[attack]
    attackers = [] if settings is None else [ByzantineClients(clients=F / CLIENTS, **settings)]
    with tempfile.TemporaryDirectory() as folder:
        trainer = FederatedTrainer(
            max_rounds=rounds, participation=1.0, local_epochs=2, logger=False, default_root_dir=folder,
            callbacks=attackers, eval_every=rounds,
        )  # fmt: skip
        found = trainer.fit(method, data, seed=seed)
        return found["final/accuracy"], int(
            sum(row["clients/rejected"] for row in trainer.progress.history)
        )


def read_runs(path: Path) -> dict[tuple[str, str, int], dict[str, str]]:
    """Return the rows of a file by average, attack and seed."""
    with path.open(newline="") as file:
        return {
            (row["average"], row["attack"], int(row["seed"])): row for row in csv.DictReader(file)
        }


def make_runs(path: Path, seeds: int, rounds: int) -> None:
    """Make the runs that the file lacks, seed by seed."""
    if not path.exists():
        path.write_text(",".join(COLUMNS) + "\n")
    done = read_runs(path)
    for seed in range(seeds):
        for attack in ATTACKS:
            for average in AVERAGES:
                if (average, attack, seed) not in done:
                    row = (average, attack, seed, rounds, *make_run(average, attack, seed, rounds))
                    with path.open("a", newline="") as file:
                        csv.writer(file, lineterminator="\n").writerow(row)


def accuracies(path: Path) -> Accuracies:
    """Return what a file has of the seeds of which it has all runs."""
    runs = read_runs(path)
    pairs = [(average, attack) for attack in ATTACKS for average in AVERAGES]
    seeds = [
        seed
        for seed in sorted({seed for *_, seed in runs})
        if all((*pair, seed) in runs for pair in pairs)
    ]
    return {
        (average, attack): [float(runs[average, attack, seed]["accuracy"]) for seed in seeds]
        for average, attack in pairs
    }


def tables(found: Accuracies) -> str:
    """Return two Markdown tables: accuracies, and their differences to the mean's under the same
    attack."""
    head = f"| average | {' | '.join(ATTACKS)} |\n|---{'|---' * len(ATTACKS)}|\n"
    first = [
        f"| `{average}` | {' | '.join(_with_interval(found[average, attack]) for attack in ATTACKS)} |\n"
        for average in AVERAGES
    ]
    others = [average for average in AVERAGES if average != MEAN]
    pairs = [(average, attack) for average in others for attack in ATTACKS]
    tests = with_holm(
        [
            paired_test(
                [a - b for a, b in zip(found[pair], found[MEAN, pair[1]], strict=True)], len(pairs)
            )
            for pair in pairs
        ]
    )
    cells = {
        pair: f"{test.mean:+.3f}{'*' if test.p_holm < 0.05 else ''}"
        for pair, test in zip(pairs, tests, strict=True)
    }
    second = [
        f"| `{average}` | {' | '.join(cells[average, attack] for attack in ATTACKS)} |\n"
        for average in others
    ]
    return f"{head}{''.join(first)}\n{head}{''.join(second)}"


def _with_interval(values: list[float]) -> str:
    low, high = t_interval(values)
    return f"{fmean(values):.3f}" + ("" if isnan(low) else f" ± {(high - low) / 2:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, help="a CSV file with a row for each run")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument(
        "--table", action="store_true", help="print the tables of the file and run nothing"
    )
    given = parser.parse_args()
    logging.getLogger("fl_lightning").setLevel(logging.CRITICAL)
    if not given.table:
        make_runs(given.runs, given.seeds, given.rounds)
    print(tables(accuracies(given.runs)))


if __name__ == "__main__":
    main()
