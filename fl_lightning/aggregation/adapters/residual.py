"""FedEx-LoRA (Singhal et al., ACL 2025, arXiv 2410.09432): the means of A and B, and what they lose
goes into the base.

    A <- mean(A),     B <- mean(B),     W <- W + c R,     R = mean(BA) - mean(B) mean(A)

R has rank (K - 1) r for K clients, and is sent as its factors, or as a matrix where that takes
fewer values.
"""

from __future__ import annotations

from typing import Annotated

from torch import Tensor, nn

from fl_lightning.aggregation.adapters import algebra
from fl_lightning.aggregation.adapters.algebra import Pair
from fl_lightning.aggregation.adapters.cohort import CohortAdapters
from fl_lightning.aggregation.adapters.moving_base import BaseChange, MovesBase
from fl_lightning.aggregation.adapters.plain_weights import Averaging
from fl_lightning.client import Client
from fl_lightning.config.constraints import within
from fl_lightning.models.adapters.low_rank import factor_sides
from fl_lightning.wire import Layout, Payload


class Residual(MovesBase):
    """The mean of each factor, and their residual in the base: exact where that is float32.
    With equal A it is ``factors``, bit for bit.

    Args:
        rank: largest rank of R in a round, at least 1; what a truncated singular value
            decomposition cuts off is lost. Null: R as it is.
        resend: whether clients are sent the whole change of the base in every round. Else a client
            that took part in the round that changed it last gets that round's alone, and keeps
            what came before.
    """

    name = "residual"

    def __init__(
        self,
        rank: Annotated[
            int | None, within("[1, inf)", "a rank is 1 or more, or null: the whole", 8)
        ] = None,
        resend: bool = False,
    ) -> None:
        self.rank, self.resend = rank, resend

    def round_values(self, network: nn.Module, layout: Layout, cohort: int) -> tuple[float, float]:
        down, up = super().round_values(network, layout, cohort)
        for r, m, n in factor_sides(network):
            rank = min((cohort - 1) * r, self.rank or (cohort - 1) * r)
            down += min(rank * (m + n), m * n)
        return down, up

    def broadcast(self, method: Averaging, client: Client) -> Payload:
        weights = super().broadcast(method, client)
        return Payload({**weights, **self.base.sent(method.server, client.id)})

    def receive(self, method: Averaging, message: Payload, client: Client) -> None:
        super().receive(method, message, client)
        sent = {name: message.tensor(name) for name in message}
        self.take_base(method, sent, client.state)

    def beside(self, method: Averaging, found: CohortAdapters, made: Tensor) -> dict[str, Tensor]:
        mean = self.pairs_in(method.layout, made)
        step = self._step(found, mean)
        both = zip(mean, self.moved(method, step), strict=True)
        deployed = [algebra.joined(one, two) for one, two in both]
        self.measure(method, found, deployed)
        return self.base.grown(method.server, step, method.round, method.served)

    def _step(self, found: CohortAdapters, mean: list[Pair]) -> BaseChange:
        """Return c R of each layer."""
        steps = []
        for pair, (a, b) in zip(self.pairs, found.residuals(mean), strict=True):
            if not (a.any() and b.any()):
                a, b = a[:0], b[:, :0]
            elif self.rank is not None and self.rank < len(a):
                u, s, vt = algebra.nearest((a, b), self.rank)
                a, b = vt, u * s
            steps.append((a, pair.scaling * b))
        return BaseChange.of(self.base.shapes, steps)
