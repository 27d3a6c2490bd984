"""FineTune: FedAvg, and every client tunes a copy of the global model on its own data before it is
evaluated.

    x <- sum_i p_i y_i
    v_i = x after ``finetune_steps`` local steps on the client's examples, which are not kept

The baseline that often wins (FedBench, 2022, arXiv 2206.13190).
"""

from __future__ import annotations

from typing import Annotated, Any

from fl_lightning.config.constraints import within
from fl_lightning.methods.base import Method
from fl_lightning.methods.personal import FineTuning, Part, TuningRate


class FineTune(Method):
    """FedAvg with :class:`~fl_lightning.methods.personal.FineTuning`. What the server has is
    FedAvg's, bit for bit; ``finetune_steps`` 0 evaluates it client by client.

    Args:
        finetune_steps: local steps on the copy, 0 or more.
        finetune_lr: their learning rate, above 0; null: that of the round.
        finetune_part: ``full``, or ``head``, the last linear layer alone.
    """

    kind = "personal models"
    stackable = True
    same_start = True
    owns = frozenset({"finetune"})

    def __init__(
        self,
        finetune_steps: Annotated[int, within("[0, inf)", "0 steps or more are made", 5)] = 5,
        finetune_lr: TuningRate = None,
        finetune_part: Part = "full",
        **settings: Any,
    ) -> None:
        super().__init__(
            finetune=FineTuning(finetune_steps, finetune_lr, finetune_part), **settings
        )
