"""FLoRA (Wang et al., NeurIPS 2024, arXiv 2409.05976): the clients' adapters stacked, merged into
the base, and new adapters in every round.

    W <- W + c sum_k p_k B_k A_k,     A drawn anew, B <- 0

The sum is sent as its stacked factors, of rank sum r_k, or as a matrix where that takes fewer
values. A of a round follows from the run's seed, so that nothing else is sent.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fl_lightning import rng
from fl_lightning.aggregation.adapters.cohort import CohortAdapters
from fl_lightning.aggregation.adapters.moving_base import BaseChange, MovesBase
from fl_lightning.aggregation.adapters.plain_weights import Averaging
from fl_lightning.aggregation.adapters.vectors import packed, values_of_rank
from fl_lightning.client import Client
from fl_lightning.models.adapters.low_rank import factor_sides
from fl_lightning.wire import Layout, Payload


class Stack(MovesBase):
    """The sum of all adapters in the base: exact where that is float32, whatever the ranks. The
    network's ``rank`` may be a list.

    Args:
        resend: as ``Residual`` has it.
    """

    name = "stack"
    needs_both = True
    takes_ranks = True
    replaces_adapters = True

    def __init__(self, resend: bool = False) -> None:
        self.resend = resend

    def bind(self, method: Averaging, clients: int) -> dict[str, Tensor]:
        entries = super().bind(method, clients)
        self.first = method.layout.read(method.network)
        factors = values_of_rank(method.layout, self.pairs, 0)
        self.others = factors if bool(factors.any()) else None  # such as the head of a classifier
        return entries

    def round_values(self, network: nn.Module, layout: Layout, cohort: int) -> tuple[float, float]:
        _, up = super().round_values(network, layout, cohort)
        sides = factor_sides(network)
        other = layout.size - sum(r * (m + n) for r, m, n in sides)
        ranks = list(getattr(network, "client_ranks", ())) or [1]
        share = sum(ranks) / len(ranks) / max(ranks)
        down = sum(min(cohort * share * r * (m + n), m * n) for r, m, n in sides)
        return other + down, up

    def started(self, method: Averaging, round: int, others: Tensor) -> Tensor:
        """Return the weights that a round starts from, float32 ``[P]``: new adapters, all else as
        it is.

        A is drawn as peft draws it, from the stream (seed, "adapter", round); that of the first
        round is the network's own.

        Args:
            method: the method.
            round: its number, from 1.
            others: what is no factor, of a vector of ``layout``, float32.
        """
        weights = self.first.clone()
        if self.others is not None:
            weights[self.others] = others
        if round == 1:
            return weights
        made = []
        with rng.torch_stream(method.seed, "adapter", round):
            for a, b in self.pairs_in(method.layout, self.first):
                made.append((nn.init.kaiming_uniform_(a.float(), a=5**0.5), torch.zeros_like(b)))
        return packed(method.layout, weights, self.pairs, made)

    def broadcast(self, method: Averaging, client: Client) -> Payload:
        entries = self.base.sent(method.server, client.id)
        if self.others is not None:
            entries["weights"] = method.server["weights"][self.others]
        return Payload(entries)

    def receive(self, method: Averaging, message: Payload, client: Client) -> None:
        sent = {name: message.tensor(name) for name in message}
        weights = self.started(method, method.round, sent.get("weights", self.first[:0]).float())
        method.layout.write(method.network, self.cut(weights, client))
        self.take_base(method, sent, client.state)

    def beside(self, method: Averaging, found: CohortAdapters, made: Tensor) -> dict[str, Tensor]:
        layers = zip(found.products(compact=True), self.pairs, strict=True)
        step = BaseChange.of(self.base.shapes, [(a, pair.scaling * b) for (a, b), pair in layers])
        self.measure(method, found, self.moved(method, step))
        others = made[:0] if self.others is None else made[self.others]
        weights = method.layout.to_wire(self.started(method, method.round + 1, others))
        return {
            "weights": weights,
            **self.base.grown(method.server, step, method.round, method.served),
        }
