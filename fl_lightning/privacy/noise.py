"""Gaussian noise in integers, which is added to sums of integers
(:mod:`fl_lightning.aggregation.exact_sum`).

All draws come from a generator that is given: one of the run's seed, so that a simulation can be
repeated and continued, or in a deployment the operating system's. Libraries that sample the
discrete Gaussian, such as OpenDP, draw from the operating system alone.
"""

from __future__ import annotations

import math

import numpy as np

from fl_lightning.privacy.randomness import Generator


def rounded_gaussian(generator: Generator, size: int, deviation: float) -> np.ndarray:
    """Return N(0, deviation^2) rounded to integers, float64 ``[size]``.

    A sum of integers with it is the rounding of a sum with the continuous Gaussian, so it is as
    private.
    """
    return np.rint(generator.standard_normal(size) * deviation)


def discrete_gaussian(generator: Generator, size: int, deviation: float) -> np.ndarray:
    """Return draws of the discrete Gaussian, P(x) proportional to exp(-x^2 / (2 deviation^2)) for
    integers x, float64 ``[size]``.

    Rejection from a discrete Laplace distribution of scale floor(deviation) + 1 (Canonne, Kamath
    and Steinke, NeurIPS 2020, algorithm 3), for many values at once and with probabilities in
    float64, where the paper has fractions. Sums of K such draws have a variance of K deviation^2
    and are as private as one discrete Gaussian of that variance, up to terms of exp(-pi^2
    deviation^2) (Kairouz, Liu and Steinke, ICML 2021, theorem 1): none where the deviation is
    thousands of integers.
    """
    if deviation == 0:
        return np.zeros(size)
    scale = math.floor(deviation) + 1
    kept: list[np.ndarray] = []
    left = size
    while left:
        values = _discrete_laplace(generator, 2 * left + 16, scale)
        distance = (np.abs(values) - deviation**2 / scale) / deviation
        accepted = values[generator.random(len(values)) < np.exp(-(distance**2) / 2)][:left]
        kept.append(accepted)
        left -= len(accepted)
    return np.concatenate([*kept, np.empty(0)])


def _discrete_laplace(generator: Generator, size: int, scale: int) -> np.ndarray:
    """Return draws of P(x) proportional to exp(-|x| / scale), the difference of two geometric
    ones."""
    p = -math.expm1(-1 / scale)
    return (generator.geometric(p, size) - generator.geometric(p, size)).astype(np.float64)
