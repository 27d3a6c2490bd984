"""FedProx (Li et al., MLSys 2020): FedAvg whose clients are held back to the weights they received.

    L = L_task + mu / 2 * || w - w_t ||^2

The norm is over the trainable parameters.
"""

from __future__ import annotations

from typing import Annotated, Any

from fl_lightning.methods.base import Method
from fl_lightning.methods.terms import ProximalTerm, a_weight


class FedProx(Method):
    """FedAvg with :class:`~fl_lightning.methods.terms.ProximalTerm`, against client drift. ``mu`` 0
    is FedAvg, bit for bit.

    Args:
        mu: weight of the proximal term, 0 or more; 0.001 to 1 in the paper. Above 1 / lr the local
            steps overshoot.
    """

    kind = "drift correction"
    stackable = True
    same_start = True
    own_terms = frozenset({"prox"})

    def __init__(self, mu: Annotated[float, a_weight(0.01)] = 0.01, **settings: Any) -> None:
        super().__init__(**settings)
        self.mu = mu
        self.terms = [ProximalTerm(mu), *self.terms]
