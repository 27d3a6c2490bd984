"""FedPer (Arivazhagan et al., 2019): the last layer stays on its client, everything else is
averaged.

    y_i, h_i <- K_i local steps on body and head together, from x and the client's own h_i
    x <- sum_i p_i y_i

The head h_i stays.
"""

from __future__ import annotations

from typing import Any

from fl_lightning.methods.base import Method


class FedPer(Method):
    """FedAvg whose last linear layer stays on its client; all parameters train together."""

    kind = "personal models"
    stackable = True
    owns = frozenset({"personal"})
    stays = "head"
    """The value of ``personal``."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(personal=self.stays, **settings)
