"""FedACG (Kim et al., CVPR 2024): clients start where the server's momentum leads, and are held
there.

    sent is x' = x + lam M
    L = L_task + beta / 2 * || w - x' ||^2
    x <- sum_i p_i y_i
    M <- lam M + sum_i p_i (y_i - x')
"""

from __future__ import annotations

from typing import Annotated, Any

from fl_lightning.aggregation.server_optimizers import Lookahead, Share
from fl_lightning.methods.base import Method
from fl_lightning.methods.terms import ProximalTerm, a_weight


class FedACG(Method):
    """FedProx with :class:`~fl_lightning.aggregation.server_optimizers.Lookahead`. ``lam`` 0 and
    ``beta`` 0 are FedAvg, bit for bit.

    Args:
        lam: share of the momentum M that is kept, in [0, 1).
        beta: weight of the proximal term, 0 or more; 0.001 to 0.1 in the paper.
    """

    kind = "server optimisers"
    owns = frozenset({"server_optimizer"})
    stackable = True
    same_start = True
    own_terms = frozenset({"prox"})

    def __init__(
        self, lam: Share = 0.85, beta: Annotated[float, a_weight(0.01)] = 0.01, **settings: Any
    ) -> None:
        super().__init__(server_optimizer=Lookahead(lam), **settings)
        self.terms = [ProximalTerm(beta), *self.terms]
