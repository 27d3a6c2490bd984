"""FedSpeed (Sun et al., ICLR 2023): FedDyn's terms with FedSAM's gradient.

Each of the K_i local steps from x:

    q = gradient of L_task at y
    d = rho q / (||q|| + 1e-7)
    g = gradient of L_task at y + d
    y_i <- y_i - eta (g + lamb (y_i - x + H_i))

At the end of the round:

    H_i <- H_i + y_i - x
    x <- 1 / |S| sum_S y_i + 1 / N sum_all H_i
"""

from __future__ import annotations

from typing import Annotated, Any

from fl_lightning.methods.feddyn import FedDyn
from fl_lightning.methods.fedsam import FedSAM
from fl_lightning.methods.terms import a_weight


class FedSpeed(FedDyn, FedSAM):
    """Sharpness-aware local steps with a proximal and a dual term. Clients count once each.
    ``lamb`` 0 is FedSAM of such clients, ``rho`` 0 is FedDyn, and both are FedAvg of such clients,
    bit for bit.

    Args:
        lamb: weight of both terms, 0 or more; 0.1 in the paper, which writes 1 / lambda.
        settings: those of FedDyn, but for ``alpha``, and of FedSAM, and those of every method.
    """

    kind = "flat minima"
    stackable = True
    refuses = {**FedDyn.refuses, **FedSAM.refuses}

    def __init__(self, lamb: Annotated[float, a_weight(0.1)] = 0.1, **settings: Any) -> None:
        super().__init__(alpha=lamb, **settings)
