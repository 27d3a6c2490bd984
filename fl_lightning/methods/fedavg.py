"""FedAvg (McMahan et al., AISTATS 2017)."""

from __future__ import annotations

from fl_lightning.methods.base import Method


class FedAvg(Method):
    """Weights of the clients that returned, averaged with n_k / sum n_k. Full precision both
    ways."""

    stackable = True
    same_start = True
