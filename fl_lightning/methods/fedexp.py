"""FedExP (Jhunjhunwala et al., ICLR 2023): the more the clients disagree, the further the server
goes.

    D = sum_i p_i (y_i - x)
    G = max(1, sum_i p_i ||y_i - x||^2 / (2 (||D||^2 + eps_t)))
    x <- x + G D
    eps_t = eps eps_decay^(t - 1) in round t = 1, 2, ...
"""

from __future__ import annotations

from typing import Any

from fl_lightning.aggregation.server_optimizers import Decay, Eps, Extrapolation
from fl_lightning.compatibility import SQUARES_UNKNOWN
from fl_lightning.methods.base import Method


class FedExP(Method):
    """FedAvg with :class:`~fl_lightning.aggregation.server_optimizers.Extrapolation`. ``eps`` .inf
    without ``mean_of_two`` is FedAvg, bit for bit.

    Args:
        eps: what keeps the divisor from 0, above 0; 0.001 in the paper, 0.1 on EMNIST.
        eps_decay: factor of eps from round to round, in (0, 1].
        mean_of_two: whether the mean of the last two x is evaluated; else x is.
    """

    kind = "server optimisers"
    owns = frozenset({"server_optimizer"})
    refuses = {"privacy": SQUARES_UNKNOWN}
    stackable = True
    same_start = True

    def __init__(
        self, eps: Eps = 1e-3, eps_decay: Decay = 1.0, mean_of_two: bool = True, **settings: Any
    ) -> None:
        super().__init__(server_optimizer=Extrapolation(eps, eps_decay, mean_of_two), **settings)
