"""Power-of-Choice (Cho, Wang and Joshi, AISTATS 2022): of some candidates those with the largest
loss."""

from __future__ import annotations

import math
from typing import Annotated, Any

import numpy as np

from fl_lightning.config.constraints import at_least
from fl_lightning.errors import require
from fl_lightning.hooks import Context
from fl_lightning.sampling.base import Sampler, ServerView


class PowerOfChoice(Sampler):
    """Draws d candidates by their share of all examples without replacement, sends them the model,
    asks for their mean loss F_k(x) over their training examples, and takes the m largest: pi_pow-d,
    of section 4.

    Those that are taken have the model already; the other d - m downloads, and all answers, are in
    the ledger (status ``asked``). Equal losses are in the order of ids, and one that is not finite
    comes last. With d = m clients are drawn by n_k.

    Args:
        candidates: d, at least as many as are asked to train; where fewer are online, all of them.
    """

    def __init__(self, candidates: Annotated[int, at_least(1)] = 20) -> None:
        self.candidates = candidates

    def on_check(self, context: Context) -> None:
        """Refuse fewer candidates than are asked to train, or more than there are clients, and
        devices that do not say how long a pass takes."""
        fed: Any = context
        least, most = fed.invited, len(context.data.active)
        require(
            least <= self.candidates <= most,
            f"--trainer.sampler.candidates {self.candidates}",
            f"of the candidates {least} are asked to train, and {most} clients have training data",
            f"write {min(2 * least, most)}",
        )
        if fed.timing is not None:
            require(
                fed.timing.clock.devices.by_examples,
                "--trainer.sampler PowerOfChoice with --trainer.clock.devices.per client",
                "a candidate that is asked makes one pass, which would take as long as its round",
                "write --trainer.clock.devices.per example and the seconds of one",
            )

    def draw(self, view: ServerView, among: np.ndarray, count: int) -> list[int]:
        sizes = view.sizes[among]
        asked = min(self.candidates, len(among))
        drawn = view.stream().choice(
            among, asked, replace=False, p=sizes / sizes.sum(), shuffle=False
        )
        losses = view.ask(drawn.tolist())
        told = {
            client: loss if math.isfinite(loss) else -math.inf for client, loss in losses.items()
        }
        return sorted(told, key=lambda client: (-told[client], client))[:count]
