"""FedAdagrad (Reddi et al., ICLR 2021, algorithm 2): adaptive steps of a server that forgets
nothing.

    D = sum_i p_i (y_i - x)
    m <- beta1 m + (1 - beta1) D
    v <- v + D^2
    x <- x + server_lr m / (sqrt v + tau)

m is 0 and v is tau^2 at first, and there is no bias correction.
"""

from __future__ import annotations

from typing import Any

from fl_lightning.aggregation.server_optimizers import Rate, ServerAdagrad, Share, Tau
from fl_lightning.methods.base import Method


class FedAdagrad(Method):
    """FedAvg with :class:`~fl_lightning.aggregation.server_optimizers.ServerAdagrad`.

    Args:
        server_lr: length of the server's step, above 0; tuned for each task in the paper, from 0.03
            to 0.3.
        beta1: share of m that is kept, in [0, 1); 0 in the paper.
        tau: what keeps the divisor from 0, above 0; the larger, the less adaptive.
    """

    kind = "server optimisers"
    owns = frozenset({"server_optimizer"})
    stackable = True
    same_start = True

    def __init__(
        self, server_lr: Rate = 0.1, beta1: Share = 0.0, tau: Tau = 1e-3, **settings: Any
    ) -> None:
        super().__init__(server_optimizer=ServerAdagrad(server_lr, (beta1, 1.0), tau), **settings)
