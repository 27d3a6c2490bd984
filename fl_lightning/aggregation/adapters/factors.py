"""FedIT (Zhang et al. 2023, arXiv 2305.05644): A and B averaged apart, as FedAvg averages any
weights.

    A <- sum_k p_k A_k,     B <- sum_k p_k B_k

mean(B) mean(A) is not mean(BA). It is where all A, or all B, are equal.
"""

from __future__ import annotations

from fl_lightning.aggregation.adapters.base import AdapterAverage


class Factors(AdapterAverage):
    """The mean of each factor, with what that loses measured. The weights are those of a run
    without a rule, bit for bit."""

    name = "factors"
