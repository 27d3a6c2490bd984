"""RoLoRA (Chen et al. 2025, arXiv 2502.01755): a round trains B, the next one A, and the other
factor is the same everywhere.

    odd rounds:   B <- sum_k p_k B_k          even rounds:   A <- sum_k p_k A_k

B comes first, since with B = 0 A has no gradient. Each round's mean of factors is the mean of the
products.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fl_lightning.aggregation.adapters.base import AdapterAverage
from fl_lightning.aggregation.adapters.plain_weights import Averaging
from fl_lightning.aggregation.server_optimizers import EVALUATED
from fl_lightning.client import Client
from fl_lightning.errors import LostStateError
from fl_lightning.models.adapters.low_rank import factor_sides
from fl_lightning.models.tensors import tensors_of
from fl_lightning.wire import Layout, Payload, PayloadError

KEPT, SERVED = "adapter_factor", "adapter_served"
"""What a client keeps: the factor that its last round left alone, float32. What the server knows:
the last round of each client that counted, int64 ``[N]``."""


class Alternate(AdapterAverage):
    """Half of the adapter is trained and sent in a round: exact. Half is received too, by a client
    that took part in the round before; another one gets both factors.

    A server optimiser steps with the factor that was trained, and its state of the other one rests.
    """

    name = "alternate"
    needs_both = True
    own_messages = True
    not_summed = frozenset({SERVED})

    def bind(self, method: Averaging, clients: int) -> dict[str, Tensor]:
        entries = super().bind(method, clients)
        b_names, a_names = {pair.b for pair in self.pairs}, {pair.a for pair in self.pairs}
        self.halves = {
            odd: method.layout.pack(
                {
                    name: torch.full(shape, float(name not in resting))
                    for name, shape in method.layout.shapes.items()
                }
            ).bool()
            for odd, resting in ((1, a_names), (0, b_names))
        }
        return {**entries, SERVED: torch.zeros(clients, dtype=torch.int64)}

    def round_values(self, network: nn.Module, layout: Layout, cohort: int) -> tuple[float, float]:
        # a half of each layer in turn, both ways; others are sent the whole
        sides = factor_sides(network)
        half = layout.size - sum(r * (m + n) for r, m, n in sides) / 2
        return half, half

    def moving(self, method: Averaging) -> Tensor:
        return self.halves[method.round % 2]

    def broadcast(self, method: Averaging, client: Client) -> Payload:
        weights, last = method.server["weights"], int(method.server[SERVED][client.id])
        has_rest = 0 < last == method.round - 1
        return Payload({"weights": weights[self.halves[last % 2]] if has_rest else weights})

    def receive(self, method: Averaging, message: Payload, client: Client) -> None:
        sent = message.tensor("weights")
        if len(sent) < method.layout.size:  # the rest is what the client left alone before
            if KEPT not in client.state:
                raise LostStateError(
                    f"client {client.id}, which took part in round {method.round - 1}",
                    "the factor that it kept then is not there, and is not sent again",
                    "put back what it kept, or start the run anew",
                )
            sent = self._whole(
                sent, client.state[KEPT].to(sent.dtype), self.halves[(method.round - 1) % 2]
            )
        method.layout.write(method.network, sent)
        client.state[KEPT] = sent[~self.moving(method)].float()
        tensors = tensors_of(method.network)
        for pair in self.pairs:
            tensors[pair.a].requires_grad_(method.round % 2 == 0)
            tensors[pair.b].requires_grad_(method.round % 2 == 1)

    @staticmethod
    def _whole(moved: Tensor, rest: Tensor, half: Tensor) -> Tensor:
        vector = torch.empty(len(half), dtype=moved.dtype)
        vector[half], vector[~half] = moved, rest
        return vector

    def sent(self, method: Averaging, client: Client) -> Tensor:
        return super().sent(method, client)[self.moving(method)]

    def sent_values(self, method: Averaging, client: Client) -> int:
        return int(self.moving(method).sum())

    def decode(self, method: Averaging, sent: Tensor) -> Tensor:
        half = self.moving(method)
        if sent.shape != (int(half.sum()),):
            raise PayloadError(
                f"weights of shape {tuple(sent.shape)}",
                f"this round trains [{int(half.sum())}]",
                "send those",
            )
        return self._whole(sent.float(), method.server["weights"].float()[~half], half)

    def next_entries(self, method: Averaging, before: Mapping[str, Tensor]) -> dict[str, Tensor]:
        served = before[SERVED].clone()
        served[list(method.served)] = method.round
        entries, half = {SERVED: served}, self.moving(method)
        optimizer = method.server_optimizer
        made = {SERVED, *([EVALUATED] if optimizer and optimizer.evaluates_iterates else [])}
        for name, tensor in method.server.items():
            if (
                name not in made
                and tensor.is_floating_point()
                and tensor.ndim == 1
                and len(tensor) > 1
            ):
                entries[name] = torch.where(half[: len(tensor)], tensor, before[name].to(tensor))
        return entries
