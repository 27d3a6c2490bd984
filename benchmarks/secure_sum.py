"""Seconds and bytes of a secure sum against the plain one, by phase.

    python benchmarks/secure_sum.py                       # cohorts of 10, 100 and 1 000 clients
    python benchmarks/secure_sum.py --cohorts 10 100 --values 3200000

Plain: the integers of every client added up. Secure: all clients and the server in one process and
on one thread, one client in ten dropped out before it sent its vector, which is the costly phase
for the server. Bytes are of one client that stays; seconds are CPU time of all clients and the
server together.
"""

from __future__ import annotations

import argparse
from time import process_time

import torch

from fl_lightning.aggregation.exact_sum import ExactSum
from fl_lightning.privacy.secure import PHASES, SecureSum
from fl_lightning.privacy.secure.simulation import run_round


def plain_seconds(vectors: torch.Tensor, cohort: int) -> float:
    """Return the seconds of the plain exact sum of ``cohort`` vectors."""
    started, total = process_time(), ExactSum(vectors.shape[1], cohort)
    for client in range(cohort):
        total.add([vectors[client % len(vectors)]], [1.0])
    return process_time() - started


def row(cohort: int, values: int, settings: SecureSum, dropped: float) -> list[str]:
    """Return one line of the table."""
    vectors = torch.randn(min(cohort, 10), values)
    plain = plain_seconds(vectors, cohort)
    integers = (vectors.double() * 2**30).round().to(torch.int64)
    gone = set(range(0, cohort, round(1 / dropped))) if dropped else set()
    outcome = run_round(
        settings,
        seed=0,
        round=1,
        leaves_before={id: "masked" if id in gone else "" for id in range(cohort)},
        length=values,
        vectors={
            id: (lambda id=id: integers[id % len(integers)])
            for id in range(cohort)
            if id not in gone
        },
    )
    living = set(range(cohort)) - gone
    assert not outcome.void, outcome.void
    assert torch.equal(outcome.total, sum(integers[id % len(integers)] for id in living))
    traffic, one = outcome.traffic, min(living)
    seconds = [f"{traffic.seconds[phase]:.2f}" for phase in PHASES]
    total = sum(traffic.seconds.values())
    by_phase = [f"{traffic.phases[phase] / 1e6:.2f}" for phase in PHASES]
    return [
        *(f"{cohort:,}", str(settings.neighbours), f"{plain:.2f}", *seconds, f"{total:.1f}"),
        *(*by_phase, f"{(traffic.up[one] + traffic.down[one]) / (4 * values):.2f}"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cohorts", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--values", type=int, default=34_000, help="values of a vector")
    parser.add_argument(
        "--neighbours", type=int, default=50, help="of cohorts of more than 100 clients"
    )
    parser.add_argument("--dropped", type=float, default=0.1, help="share of clients that drop out")
    options = parser.parse_args()
    torch.set_num_threads(1)
    phases = [f"{phase} s" for phase in PHASES] + ["all s"] + [f"{phase} MB" for phase in PHASES]
    print(
        "|",
        " | ".join(["cohort", "neighbours", "plain s", *phases, "bytes of a client / fp32 vector"]),
        "|",
    )
    print("|", " | ".join(["--:"] * 13), "|")
    for cohort in options.cohorts:
        settings = SecureSum(neighbours="all" if cohort <= 100 else options.neighbours)
        print(
            "|", " | ".join(row(cohort, options.values, settings, options.dropped)), "|", flush=True
        )


if __name__ == "__main__":
    main()
