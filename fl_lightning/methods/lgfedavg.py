"""LG-FedAvg (Liang et al., 2020): each client keeps a representation of its own; the last layer is
averaged.

    y_i, b_i <- K_i local steps on head and body together, from x and the client's own b_i
    x <- sum_i p_i y_i

The body b_i stays.
"""

from __future__ import annotations

from fl_lightning.methods.fedper import FedPer


class LGFedAvg(FedPer):
    """FedAvg of the last linear layer alone; all else stays on its client, and all parameters train
    together."""

    stackable = True
    stays = "body"
    refuses = {"adapter_average": "adapters stay on their clients, all but those of the last layer"}
