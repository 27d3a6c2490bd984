"""FedYogi (Reddi et al., ICLR 2021, algorithm 2): FedAdam whose steps grow slowly.

    D = sum_i p_i (y_i - x)
    m <- beta1 m + (1 - beta1) D
    v <- v - (1 - beta2) D^2 sign(v - D^2)
    x <- x + server_lr m / (sqrt v + tau)

m is 0 and v is tau^2 at first, and there is no bias correction.
"""

from __future__ import annotations

from fl_lightning.aggregation.server_optimizers import ServerYogi
from fl_lightning.methods.fedadam import FedAdam


class FedYogi(FedAdam):
    """FedAvg with :class:`~fl_lightning.aggregation.server_optimizers.ServerYogi`."""

    stackable = True
    same_start = True
    rule = ServerYogi
