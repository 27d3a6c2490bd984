"""FedBABU (Oh et al., ICLR 2022): the body is averaged below a head that keeps its initial values;
a client tunes a copy of both before it is evaluated.

    x <- sum_i p_i y_i, y_i of the body alone
    v_i = x with the initial head, after ``finetune_steps`` local steps on the client's examples

v_i is not kept.
"""

from __future__ import annotations

from typing import Any

from fl_lightning.methods.finetune import FineTune


class FedBABU(FineTune):
    """FineTune of the body, below a last linear layer that nobody trains in rounds.

    Args:
        settings: those of FineTune.
    """

    stackable = True
    owns = frozenset({"personal", "finetune"})
    own_part_learns = False

    def __init__(self, **settings: Any) -> None:
        super().__init__(personal="head", **settings)
