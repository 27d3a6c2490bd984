"""FedBN (Li et al., ICLR 2021): layers of normalisation stay on their client, weights, biases and
statistics; everything else is averaged.

    y_i, b_i <- K_i local steps on all parameters together, from x and the client's own b_i
    x <- sum_i p_i y_i
"""

from __future__ import annotations

from fl_lightning.methods.fedper import FedPer


class FedBN(FedPer):
    """FedAvg whose layers of normalisation stay on their client. Without such a layer it is FedAvg,
    bit for bit."""

    stackable = True
    stays = "norm"
