"""FedAvgM (Hsu et al., 2019): FedAvg with momentum on the server.

The server's step:

    v <- beta v + (x - sum_i p_i y_i)
    x <- x - server_lr v
"""

from __future__ import annotations

from typing import Any

from fl_lightning.aggregation.server_optimizers import Rate, ServerSGD, Share
from fl_lightning.methods.base import Method


class FedAvgM(Method):
    """FedAvg with :class:`~fl_lightning.aggregation.server_optimizers.ServerSGD`. ``beta`` 0 and
    ``server_lr`` 1 are FedAvg, bit for bit.

    Args:
        beta: share of the last steps that the server makes again, in [0, 1); 0.7 to 0.997 in the
            paper.
        server_lr: length of the server's step, above 0.
        nesterov: whether the step looks ahead.
    """

    kind = "server optimisers"
    owns = frozenset({"server_optimizer"})
    stackable = True
    same_start = True

    def __init__(
        self, beta: Share = 0.9, server_lr: Rate = 1.0, nesterov: bool = False, **settings: Any
    ) -> None:
        super().__init__(server_optimizer=ServerSGD(server_lr, beta, nesterov), **settings)
