"""MoFedSAM (Qu et al., ICML 2022): FedCM with FedSAM's gradient.

Each of the K_i local steps from x:

    q = gradient of L_task at y
    d = rho q / (||q|| + 1e-7)
    g = gradient of L_task at y + d
    y_i <- y_i - eta (A g + (1 - A) M)

At the end of the round:

    M <- -1 / |S| sum_S (y_i - x) / (K_i eta)
    x <- x + eta_g / |S| sum_S (y_i - x)
"""

from __future__ import annotations

from fl_lightning.methods.fedcm import FedCM
from fl_lightning.methods.fedsam import FedSAM


class MoFedSAM(FedCM, FedSAM):
    """Sharpness-aware local steps with the momentum of all clients. ``A`` 1 is FedSAM of clients
    that count once, ``rho`` 0 is FedCM, and both are FedAvg of such clients, bit for bit.
    """

    kind = "flat minima"
    stackable = True
    same_start = True
    refuses = {**FedCM.refuses, **FedSAM.refuses}
