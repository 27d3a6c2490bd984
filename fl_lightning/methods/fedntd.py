"""FedNTD: not-true distillation (Lee et al., NeurIPS 2022). Clients keep what the global model
knows of the classes they do not see.

    L = L_task + beta * tau^2 * KL(q_g || q),   q = softmax(z / tau) over the classes other than y

q_g is the same of the global model as received, frozen and in evaluation mode. Nothing more travels
than in FedAvg.
"""

from __future__ import annotations

from typing import Annotated, Any

from fl_lightning.methods.base import Method
from fl_lightning.methods.terms import NotTrueTerm, a_temperature, a_weight


class FedNTD(Method):
    """FedAvg with :class:`~fl_lightning.methods.terms.NotTrueTerm`: the not-true classes are
    distilled from the received weights. ``beta`` 0 is FedAvg, bit for bit.

    Args:
        beta: weight of the distillation term, 0 or more; 1 in the paper.
        tau: temperature of both distributions, above 0; 1 in the paper.
    """

    stackable = True
    same_start = True
    own_terms = frozenset({"ntd"})

    def __init__(
        self,
        beta: Annotated[float, a_weight(1)] = 1.0,
        tau: Annotated[float, a_temperature(1)] = 1.0,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        self.beta, self.tau = beta, tau
        self.terms = [NotTrueTerm(beta, tau), *self.terms]
        if beta:
            self.refuses = {**self.refuses, "no_classes": "it compares logits of classes"}
