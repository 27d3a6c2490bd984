"""What a few seeds can say: pure functions of differences that are paired by seed. No run, no file,
no table.

Two methods under one seed meet the same partition, cohorts, drop-outs and noise, so what is tested
is the per-seed difference x_1 .. x_n of their metric, with mean m and standard deviation s (divided
by n - 1):

    t = m / (s / sqrt n), n - 1 degrees of freedom                                 (Student, 1908)
    interval m -+ t_{1 - a/2} s / sqrt n
    W = sum of the ranks of |x_i| with x_i > 0; its p is exact up to 50 seeds      (Wilcoxon, 1945)
    d_z = m / s;  g_z = J(n - 1) d_z,  J(v) = G(v/2) / (sqrt(v/2) G((v - 1)/2))    (Hedges, 1981)
    power(d, n) = P(|T| > t_{1 - a/2})
        T noncentral t with n - 1 degrees and noncentrality d sqrt n

The t interval is the one that decides. The bootstrap (BCa, Efron 1987) stands beside it: it assumes
no normal distribution, but it cannot know of values that it has not seen. Of normal differences it
holds the true mean in 73 % of cases with 3 seeds, 84 % with 5 and 90 % with 10 (2000 trials each),
the t interval in 95 % with any. With n seeds Wilcoxon's p is at least 2^(1 - n): 0.25 for three.

The t interval is valid for one look, at a number of seeds that was fixed before. Where seeds are
added until the answer is clear, a *confidence sequence* takes its place: one interval after every
seed, and with probability 1 - a all of them hold the true mean, whenever one looks and whatever
makes one stop (Wang & Ramdas, "Anytime-valid t-tests and confidence sequences for Gaussian means
with unknown variance", 2023, arXiv 2310.03722, theorem 4.9; S_n is the standard deviation divided
by n):

    m -+ S_n sqrt((n + c2)(1 - q) / max(q (n + c2) - c2, 0)),  q = (a^2 c2 / (n + c2))^(1/n)
    p_n = sqrt((n + c2) / c2) ((n + c2 + c2 r) / ((n + c2)(1 + r)))^(n/2),  r = m^2 / S_n^2

p_n is the level at which the interval after n seeds ends at 0. The theorem is about normal
differences.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import exp, inf, isnan, lgamma, log, log1p, nan, sqrt
from typing import Protocol

import numpy as np
from scipy import optimize, stats

from fl_lightning import rng

LEVEL = 0.05
"""Significance level of every test, two-sided; intervals hold with 1 - LEVEL."""
POWER = 0.8
RESAMPLES = 2000
SEQUENCE_C2 = 0.25
"""c2 of the confidence sequence, which mixes over effect sizes drawn from N(0, 1 / c2). It is fixed
before the first seed."""
MOST_SEEDS = 10_000
"""More seeds than these are not counted, but called ``inf``."""
MOST_EXACT = 50
"""More differences have the normal approximation of Wilcoxon's p; of fewer all signs count."""
ROUNDING = 1e-12
"""Differences that are closer are equal, up to the rounding of the subtraction that they come
from, in units of the largest, or of 1."""


@dataclass(frozen=True)
class PairedTest:
    """The mean of differences that are paired by seed, and what is known of it; what n seeds cannot
    give is NaN.

    Of a ``sequential`` test, ``low`` and ``high`` are those of the confidence sequence, ``p_t`` is
    its p, and ``detectable`` and ``seeds_needed`` are about one look at it.

    Args:
        differences: a - b of every seed ``[n]``.
        mean: their mean.
        std: their standard deviation, divided by n - 1.
        low, high: 95 % t interval of the mean, or that of the confidence sequence.
        bootstrap_low, bootstrap_high: 95 % BCa bootstrap interval of the mean.
        t: Student's t.
        p_t: its two-sided p, or that of the confidence sequence.
        p_wilcoxon: two-sided p of the signed ranks.
        d_z: Cohen's effect size: the mean in standard deviations of the differences.
        g_z: the same without its bias in small samples.
        detectable: smallest true mean that n seeds find with 80 % power, at the level of
            ``family``.
        seeds_needed: seeds that find an effect of ``g_z`` with 80 % power, at the level of
            ``family``.
        family: number of tests that are made together; power is of the strictest step of Holm's
            correction.
        p_holm: ``p_t`` corrected for ``family`` tests.
        sequential: whether interval and p are valid at every look, and not only at a number of
            seeds that was fixed before.
    """

    differences: tuple[float, ...]
    mean: float
    std: float
    low: float
    high: float
    bootstrap_low: float
    bootstrap_high: float
    t: float
    p_t: float
    p_wilcoxon: float
    d_z: float
    g_z: float
    detectable: float
    seeds_needed: float
    family: int = 1
    p_holm: float = nan
    sequential: bool = False

    @property
    def n(self) -> int:
        return len(self.differences)

    @property
    def is_significant(self) -> bool:
        return self.p_holm < LEVEL


def paired_test(
    differences: Sequence[float], family: int = 1, sequential: bool = False
) -> PairedTest:
    """Return everything about one set of differences.

    What n seeds, or seeds that all say the same, cannot tell is NaN.

    Args:
        differences: a - b of every seed ``[n]``.
        family: number of tests that are made together.
        sequential: whether interval and p are those of the confidence sequence.
    """
    x = np.asarray(differences, np.float64)
    mean, std = mean_std(x)
    low, high = (sequence_interval if sequential else t_interval)(x)
    bootstrap_low, bootstrap_high = bootstrap_interval(x)
    t, p_t = t_test(x)
    if sequential:
        p_t = sequence_p(x)
    d_z = mean / std if std > 0 else nan
    g_z = d_z * hedges_correction(x.size)
    return PairedTest(
        differences=tuple(x.tolist()),
        mean=mean,
        std=std,
        low=low,
        high=high,
        bootstrap_low=bootstrap_low,
        bootstrap_high=bootstrap_high,
        t=t,
        p_t=p_t,
        p_wilcoxon=wilcoxon(x),
        d_z=d_z,
        g_z=g_z,
        detectable=std * detectable_effect(x.size, LEVEL / family, sequential) if std > 0 else nan,
        seeds_needed=seeds_needed(g_z, LEVEL / family, sequential),
        family=family,
        p_holm=p_t,
        sequential=sequential,
    )


def with_holm(tests: Sequence[PairedTest]) -> list[PairedTest]:
    """The tests of one family, each with its ``p_holm``."""
    return [
        replace(test, p_holm=p)
        for test, p in zip(tests, holm([test.p_t for test in tests]), strict=True)
    ]


def mean_std(values: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """Mean and standard deviation (divided by n - 1); NaN for what too few values do not have.

    >>> mean_std([1.0, 2.0, 3.0]), mean_std([5.0])
    ((2.0, 1.0), (5.0, nan))
    """
    x = np.asarray(values, np.float64)
    if is_constant(x):  # rounding would leave a spread of 1e-17, and a t of 1e15
        return float(x[0]), 0.0 if x.size > 1 else nan
    return (float(x.mean()), float(x.std(ddof=1))) if x.size else (nan, nan)


def is_constant(values: Sequence[float] | np.ndarray) -> bool:
    """Whether all values are the same, up to the rounding of the subtraction that they come
    from."""
    x = np.asarray(values, np.float64)
    if not x.size or not np.isfinite(x).all():
        return False
    return bool(np.ptp(x) <= ROUNDING * max(1.0, np.abs(x).max()))


class Interval(Protocol):
    """An interval of a mean that holds it with probability ``1 - level``, such as
    :func:`t_interval`.

    It is NaN where the values cannot tell, and may be infinite.
    """

    def __call__(
        self, values: Sequence[float] | np.ndarray, level: float = LEVEL
    ) -> tuple[float, float]: ...


def t_interval(values: Sequence[float] | np.ndarray, level: float = LEVEL) -> tuple[float, float]:
    """Return the t interval of the mean, two-sided, that holds it with probability ``1 - level``.

    It is NaN for one value and for equal ones, whose spread cannot be estimated.

    >>> [round(bound, 4) for bound in t_interval([1.0, 2.0, 3.0])]
    [-0.4841, 4.4841]
    """
    x = np.asarray(values, np.float64)
    mean, std = mean_std(x)
    if not std > 0:
        return nan, nan
    half = float(stats.t.ppf(1 - level / 2, x.size - 1)) * std / sqrt(x.size)
    return mean - half, mean + half


def sequence_width(n: int, level: float = LEVEL) -> float:
    """Return half the width of the confidence sequence after ``n`` values, in standard deviations
    (divided by n).

    It is infinite for the first values: fewer than four at a level of 0.05.
    """
    if n < 1:
        return inf
    q = (level**2 * SEQUENCE_C2 / (n + SEQUENCE_C2)) ** (1 / n)
    below = q * (n + SEQUENCE_C2) - SEQUENCE_C2
    return sqrt((n + SEQUENCE_C2) * (1 - q) / below) if below > 0 else inf


def sequence_threshold(n: int, level: float = LEVEL) -> float:
    """Return the |t| beyond which the confidence sequence after ``n`` values leaves 0 out.

    >>> [round(sequence_threshold(n), 2) for n in (5, 10, 20)]
    [5.36, 3.97, 3.63]
    """
    return sequence_width(n, level) * sqrt(n - 1) if n > 1 else inf


def sequence_interval(
    values: Sequence[float] | np.ndarray, level: float = LEVEL
) -> tuple[float, float]:
    """Return the confidence sequence's interval of the mean after all these values.

    With probability 1 - ``level`` the intervals after 1, 2, 3 ... normal values *all* hold the true
    mean. The interval is infinite after too few values, and NaN for equal ones, whose spread cannot
    be estimated.
    """
    x = np.asarray(values, np.float64)
    mean, std = mean_std(x)
    if not std > 0:
        return (nan, nan) if x.size != 1 else (-inf, inf)
    half = sequence_threshold(x.size, level) * std / sqrt(x.size)
    return mean - half, mean + half


def sequence_p(values: Sequence[float] | np.ndarray, least_std: float = 0.0) -> float:
    """Return the p of a mean of 0 that is valid at every look: it is below a when the interval of
    level a leaves 0 out.

    With probability 1 - a, it is never below a after any number of normal values of mean 0. It is
    NaN for equal values other than 0, and 1 for zeros. A standard deviation below ``least_std`` is
    taken as it.
    """
    x = np.asarray(values, np.float64)
    n = x.size
    mean, std = mean_std(x)
    std = max(std, least_std)
    if not std > 0:
        return 1.0 if n > 1 and mean == 0 else nan
    r = n / (n - 1) * (mean / std) ** 2
    log_p = 0.5 * log((n + SEQUENCE_C2) / SEQUENCE_C2)
    log_p += n / 2 * (log((n + SEQUENCE_C2 * (1 + r)) / (n + SEQUENCE_C2)) - log1p(r))
    return min(1.0, exp(log_p))


def bootstrap_interval(values: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """BCa interval of the mean; the percentile interval where BCa is not defined. The same values
    give the same interval."""
    x = np.asarray(values, np.float64)
    if x.size < 2 or is_constant(x):
        return nan, nan
    for method in ("BCa", "percentile"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about degenerate data, which is looked at below
            found = stats.bootstrap(
                (x,),
                np.mean,
                n_resamples=RESAMPLES,
                confidence_level=1 - LEVEL,
                method=method,
                rng=rng.stream(0, "bootstrap"),
            ).confidence_interval
        if np.isfinite([found.low, found.high]).all():
            break
    return float(found.low), float(found.high)


def t_test(values: Sequence[float] | np.ndarray, least_std: float = 0.0) -> tuple[float, float]:
    """t and its two-sided p against a mean of 0. Equal values: NaN, or t = 0 and p = 1 when all
    of them are 0. A standard deviation below ``least_std``, that of rounding, is taken as it."""
    x = np.asarray(values, np.float64)
    mean, std = mean_std(x)
    std = max(std, least_std)  # one value has none, and NaN stays
    if not std > 0:
        return (0.0, 1.0) if x.size > 1 and mean == 0 else (nan, nan)
    t = mean / (std / sqrt(x.size))
    return t, float(2 * stats.t.sf(abs(t), x.size - 1))


def wilcoxon(values: Sequence[float] | np.ndarray) -> float:
    """Two-sided p of the signed ranks; zeros are left out, and with none but zeros p is 1.

    Values that differ by rounding alone have one rank, and p is that of all signs of the ranks,
    each as likely as the others.
    """
    x = np.asarray(values, np.float64)
    if x.size < 2 or not np.isfinite(x).all():
        return nan
    x = np.round(x / (ROUNDING * max(1.0, np.abs(x).max())))
    x = x[x != 0]
    if not x.size:
        return 1.0
    if x.size > MOST_EXACT:
        return float(stats.wilcoxon(x).pvalue)
    twice = (2 * stats.rankdata(np.abs(x))).astype(int)  # integers, where ranks are shared too
    ways = np.ones(1)  # of each sum of the ranks that are positive
    for rank in twice:
        ways = np.pad(ways, (0, rank)) + np.pad(ways, (rank, 0))
    at = twice[x > 0].sum()
    return float(min(1.0, 2 * min(ways[: at + 1].sum(), ways[at:].sum()) / ways.sum()))


def holm(p_values: Sequence[float]) -> list[float]:
    """p corrected for all of them being looked at (Holm, 1979): p_(i) -> max over j <= i of min(1,
    (m - j + 1) p_(j)).

    The NaN of a test that could not be made stays, and counts: the family is what was asked, not
    what could be answered.

    >>> [round(p, 3) for p in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    corrected, running = list(p_values), 0.0
    for rank, index in enumerate(
        sorted((i for i, p in enumerate(p_values) if not isnan(p)), key=lambda i: p_values[i])
    ):
        running = max(running, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = running
    return corrected


def hedges_correction(n: int) -> float:
    """Factor J that takes the bias from d_z of ``n`` differences; NaN below 3, where it has none.

    >>> round(hedges_correction(10), 4)
    0.9139
    """
    v = n - 1
    return exp(lgamma(v / 2) - lgamma((v - 1) / 2)) / sqrt(v / 2) if v >= 2 else nan


def power(effect: float, n: int, level: float = LEVEL, sequential: bool = False) -> float:
    """Return the probability that ``n`` differences show an effect of that many standard
    deviations.

    It is the power of the two-sided t-test, or of one look at the confidence sequence; whoever also
    looked before has found the effect at least as often.

    >>> round(power(1.0, 10), 3)  # Cohen (1988) and every power table
    0.803
    """
    critical = sequence_threshold(n, level) if sequential else float(stats.t.isf(level / 2, n - 1))
    if critical == inf:
        return 0.0
    # T^2 is an F; scipy's noncentral t gives NaN for few seeds
    return float(stats.ncf.sf(critical**2, 1, n - 1, n * effect**2))


@lru_cache(maxsize=4096)
def detectable_effect(n: int, level: float = LEVEL, sequential: bool = False) -> float:
    """Return the smallest effect, in standard deviations, that ``n`` differences find with 80 %
    power.

    It is NaN below 2 differences, and where the confidence sequence is infinite.
    """
    if n < 2 or (sequential and sequence_threshold(n, level) == inf):
        return nan
    high = 1.0
    while power(high, n, level, sequential) < POWER:
        high *= 2
    return float(
        optimize.brentq(
            lambda effect: power(effect, n, level, sequential) - POWER, 0.0, high, xtol=1e-10
        )
    )


def seeds_needed(effect: float, level: float = LEVEL, sequential: bool = False) -> float:
    """Return the fewest seeds that find the effect with 80 % power; infinite beyond 10 000, NaN
    without an effect size."""
    if isnan(effect):
        return nan

    def enough(n: int) -> bool:  # the least effect of n seeds is found once, for all who ask
        return abs(effect) >= detectable_effect(n, level, sequential)

    low, high = 1, 2
    while not enough(high):
        low, high = high, 2 * high
        if low > MOST_SEEDS:
            return inf
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high if high <= MOST_SEEDS else inf
