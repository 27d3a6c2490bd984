"""FedAdam (Reddi et al., ICLR 2021, algorithm 2): adaptive steps of the server.

    D = sum_i p_i (y_i - x)
    m <- beta1 m + (1 - beta1) D
    v <- beta2 v + (1 - beta2) D^2
    x <- x + server_lr m / (sqrt v + tau)

m is 0 and v is tau^2 at first, and there is no bias correction.
"""

from __future__ import annotations

from typing import Any

from fl_lightning.aggregation.server_optimizers import (
    AdaptiveOptimizer,
    LongShare,
    Rate,
    ServerAdam,
    Share,
    Tau,
)
from fl_lightning.methods.base import Method


class FedAdam(Method):
    """FedAvg with :class:`~fl_lightning.aggregation.server_optimizers.ServerAdam`.

    Args:
        server_lr: length of the server's step, above 0; tuned for each task in the paper, from
            0.003 to 1.
        beta1: share of m that is kept, in [0, 1).
        beta2: share of v that is kept, in [0, 1].
        tau: what keeps the divisor from 0, above 0; the larger, the less adaptive.
    """

    kind = "server optimisers"
    owns = frozenset({"server_optimizer"})
    stackable = True
    same_start = True
    rule: type[AdaptiveOptimizer] = ServerAdam

    def __init__(
        self,
        server_lr: Rate = 0.1,
        beta1: Share = 0.9,
        beta2: LongShare = 0.99,
        tau: Tau = 1e-3,
        **settings: Any,
    ) -> None:
        super().__init__(server_optimizer=self.rule(server_lr, (beta1, beta2), tau), **settings)
