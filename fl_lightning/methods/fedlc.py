"""FedLC: calibrated logits (Zhang et al., ICML 2022). The rarer a class is on a client, the larger
the margin by which its examples are told apart.

    L = cross-entropy of z_c - tau n_c^(-1/4),   n_c the client's training examples of class c

over all classes; those without examples are left out. Nothing more travels than in FedAvg.
"""

from __future__ import annotations

from typing import Annotated, Any

from fl_lightning.config.constraints import within
from fl_lightning.methods.base import Method
from fl_lightning.methods.terms import CalibratedLogits


class FedLC(Method):
    """FedAvg with :class:`~fl_lightning.methods.terms.CalibratedLogits` in place of the task loss.
    ``tau`` 0 is FedAvg, bit for bit.

    Args:
        tau: weight of the shift, 0 or more; 1 in most public code.
    """

    kind = "labels and features"
    stackable = True
    own_terms = frozenset({"calibrated"})

    def __init__(
        self,
        tau: Annotated[float, within("[0, inf)", "a shift weighs 0 or more", 1)] = 1.0,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        self.tau = tau
        self.terms = [CalibratedLogits(tau), *self.terms]
        if tau:
            self.refuses = {**self.refuses, "no_classes": "it shifts logits of classes"}
