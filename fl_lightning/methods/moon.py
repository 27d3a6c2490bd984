"""MOON: model-contrastive learning (Li et al., CVPR 2021). Clients' features are drawn to those of
the global model, away from those of their own last one.

    L = L_task + mu mean -log softmax([cos(z, z_x), cos(z, z_prev)] / T)[0]

z is what enters the last linear layer. x is the model as received, prev the client's y_i of its
last round that counted, else x; both frozen and in evaluation mode. Nothing more travels than in
FedAvg.
"""

from __future__ import annotations

from typing import Annotated, Any

from fl_lightning.methods.base import Method
from fl_lightning.methods.terms import ContrastiveTerm, a_temperature, a_weight


class MOON(Method):
    """FedAvg with :class:`~fl_lightning.methods.terms.ContrastiveTerm`. ``mu`` 0 is FedAvg, bit for
    bit.

    Args:
        mu: weight of the contrastive term, 0 or more; 1, 5 or 10 in the paper.
        temperature: T, above 0; 0.5 in the paper.
    """

    kind = "labels and features"
    stackable = True
    own_terms = frozenset({"contrast"})

    def __init__(
        self,
        mu: Annotated[float, a_weight(1)] = 1.0,
        temperature: Annotated[float, a_temperature(0.5)] = 0.5,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        self.mu, self.temperature = mu, temperature
        self.terms = [ContrastiveTerm(mu, temperature), *self.terms]
