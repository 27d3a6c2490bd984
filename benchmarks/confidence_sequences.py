"""How often a confidence sequence is ever wrong, and how many seeds it needs: the tables of
docs/seeds.md.

    python benchmarks/confidence_sequences.py

Every sequence is looked at after each of its values. Beside it stands the t-test: with one look at
a number of seeds that was fixed before, and with a look after every seed, as who stops when p <
0.05 looks.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from math import exp, inf

import numpy as np
from scipy import stats

from fl_lightning.study.statistics import LEVEL, seeds_needed, sequence_width

Draw = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]
DISTRIBUTIONS: dict[str, tuple[Draw, float]] = {
    "normal": (lambda rng, size: rng.normal(size=size), 0.0),
    "Student's t, 3 degrees of freedom": (lambda rng, size: rng.standard_t(3, size), 0.0),
    "uniform": (lambda rng, size: rng.uniform(-1, 1, size), 0.0),
    "difference of two exponentials": (
        lambda rng, size: rng.exponential(size=size) - rng.exponential(size=size),
        0.0,
    ),
    "normal, rounded to whole standard deviations": (
        lambda rng, size: np.round(rng.normal(size=size)),
        0.0,
    ),
    "-1 or 1": (lambda rng, size: rng.choice([-1.0, 1.0], size), 0.0),
    "exponential": (lambda rng, size: rng.exponential(size=size), 1.0),
    "lognormal": (lambda rng, size: rng.lognormal(size=size), exp(0.5)),
    "normal, 5 % of runs ten deviations worse": (
        lambda rng, size: rng.normal(size=size) - 10 * (rng.random(size) < 0.05),
        -0.5,
    ),
    "1 in 10 % of cases, else 0": (lambda rng, size: (rng.random(size) < 0.1) * 1.0, 0.1),
}
"""What values are drawn from, and their mean."""
EFFECTS = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0)
"""True means, in standard deviations."""
MAX_SEEDS = 50
"""Seeds after which a study in the table of power gives up."""
FIRST_LOOKS = (1, 10, 20)
"""Numbers of values after which the first look is taken."""
ONE_LOOK = 10
"""Values at the one look of the t-test."""


def t_values(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return t of the first 1, 2, 3 ... values of each row ``[sequences, values]``, and whether
    they differ."""
    n = np.arange(1, x.shape[1] + 1)
    means = x.cumsum(1) / n
    spread = np.sqrt(np.maximum((x * x).cumsum(1) / n - means**2, 0.0))
    known = spread > 1e-9
    return np.where(
        known, means / np.where(known, spread, 1.0) * np.sqrt(np.maximum(n - 1, 0)), 0.0
    ), known


def thresholds(most: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the |t| of the confidence sequence and of the t-test after 1 .. ``most`` values."""
    counts = np.arange(1, most + 1)
    sequence = np.array([sequence_width(int(n)) * np.sqrt(n - 1) if n > 1 else inf for n in counts])
    student = np.array([stats.t.isf(LEVEL / 2, n - 1) if n > 1 else inf for n in counts])
    return sequence, student


def print_coverage(sequences: int, most: int) -> None:
    sequence, student = thresholds(most)
    looks = ", ".join(f"from {first}" for first in FIRST_LOOKS)
    print(
        f"Percent ever wrong in {sequences} sequences of {most} values: looks {looks}; t at {ONE_LOOK};"
    )
    print("t-test at every look from 3\n")
    heads = [f"from value {first}" for first in FIRST_LOOKS]
    print(
        "| differences |",
        " | ".join(heads),
        f"| t-test, once at {ONE_LOOK} | t-test, at every look |",
    )
    print("|---" * (len(FIRST_LOOKS) + 3) + "|")
    for name, (draw, mean) in DISTRIBUTIONS.items():
        t, known = t_values(draw(np.random.default_rng(0), (sequences, most)) - mean)
        out, peeked = (np.abs(t) > limit for limit in (sequence, student))
        wrong = [out[:, first - 1 :].any(1).mean() for first in FIRST_LOOKS]
        wrong += [peeked[:, ONE_LOOK - 1].mean(), peeked[:, 2:].any(1).mean()]
        assert known[:, -1].any()
        print("|", name, "|", " | ".join(f"{100 * share:.1f}" for share in wrong), "|")


def print_power(sequences: int) -> None:
    sequence, _ = thresholds(MAX_SEEDS)
    print(f"\nSeeds to find an effect, {sequences} sequences, {MAX_SEEDS} seeds at most\n")
    print("| true effect (d_z) | seeds of a fixed-n t-test, 80 % | until decided: median | 80 % within "
          f"| found within {MAX_SEEDS} |")  # fmt: skip
    print("|---" * 5 + "|")
    for effect in EFFECTS:
        t, _ = t_values(np.random.default_rng(1).normal(effect, 1.0, (sequences, MAX_SEEDS)))
        found = t > sequence
        first = np.where(found.any(1), found.argmax(1) + 1, MAX_SEEDS + 1)
        median, most = (
            int(np.quantile(first, share, method="inverted_cdf")) for share in (0.5, 0.8)
        )
        shown = [f"{n}" if n <= MAX_SEEDS else f"over {MAX_SEEDS}" for n in (median, most)]
        power = f"{100 * (first <= MAX_SEEDS).mean():.1f} %"
        print("|", effect, "|", int(seeds_needed(effect)), "|", " | ".join(shown), "|", power, "|")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, default=4000)
    parser.add_argument("--values", type=int, default=300)
    given = parser.parse_args()
    print_coverage(given.sequences, given.values)
    print_power(given.sequences)
