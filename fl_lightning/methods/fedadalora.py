"""FedAdaLoRA: AdaLoRA (Zhang et al., ICLR 2023, arXiv 2303.10512) whose masks are the server's.

    L = L_task + gamma sum_l (||P_l^T P_l - I||^2 + ||Q_l Q_l^T - I||^2)

Clients train the directions of all adapted layers, dW_l = (alpha / r) P_l diag(lambda_l) Q_l, and
report how important each one was to their loss. The server averages both as FedAvg does, keeps the
b(t) directions that are the most important over all layers, and broadcasts which ones: t counts
rounds, where the paper counts steps. A direction that is not kept is zero in P, lambda and Q on
both sides. It then has no gradient, nothing of it travels, and it never returns; in the paper,
which trains in one place, it may.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import torch
from torch import Tensor

from fl_lightning.aggregation.adapters.vectors import spread
from fl_lightning.aggregation.averages import WeightedMean
from fl_lightning.aggregation.server_optimizers import EVALUATED
from fl_lightning.aggregation.sums import Addend, Sums
from fl_lightning.client import Client
from fl_lightning.config.constraints import within
from fl_lightning.data import FederatedData
from fl_lightning.errors import require
from fl_lightning.methods.base import KnownNetwork, Method
from fl_lightning.models.adapters import (
    Importance,
    budget_at,
    choose_masks,
    factor_names,
    orthogonality,
)
from fl_lightning.wire import Codes, Limit, Payload, PayloadError


class FedAdaLoRA(Method):
    """FedAvg of AdaLoRA's directions, of which fewer and fewer are kept. Without a regulariser and
    with a ``final_rank`` of at least the network's rank it is FedAvg, bit for bit.

    Args:
        network: one with AdaLoRA, ``adapter: adalora``.
        final_rank: directions of a layer that are kept in the end, in the mean over the layers;
            some keep more and some none.
        warmup: rounds before the number of directions falls.
        fall: rounds in which it falls, as a cubic.
        orthogonality: gamma, weight of the regulariser that keeps directions apart; 0.1 in the
            paper.
        importance_scale: what importance is multiplied by in a sum, beside the updates with which
            privacy clips it: its norm lies between 1 / sqrt(R) and 1 for R directions.

    Raises:
        InputError: a setting is out of its range; or, by ``build``, the network has no AdaLoRA.
    """

    kind = "language models"
    refuses = {"personal": "its server drops directions, of which every client has all parts"}
    calls_server_optimizer = True

    def __init__(
        self,
        network: KnownNetwork = "llama_tiny",
        final_rank: Annotated[float, within("[0, inf)", "it is 0 or more", "leave it out")] = 4.0,
        warmup: Annotated[int, within("[0, inf)", "it is 0 rounds or more", "leave it out")] = 2,
        fall: Annotated[int, within("[1, inf)", "it is 1 rounds or more", "leave it out")] = 10,
        orthogonality: Annotated[
            float, within("[0, inf)", "it is 0 or more", "leave it out")
        ] = 0.1,
        importance_scale: Annotated[float, within("(0, 1]", "above 0, at most 1", 0.1)] = 1.0,
        **settings: Any,
    ) -> None:
        super().__init__(network=network, **settings)
        self.final_rank, self.warmup, self.fall = final_rank, warmup, fall
        self.gamma, self.importance_scale = orthogonality, importance_scale

    def build(self, data: FederatedData) -> None:
        super().build(data)
        self.factors = factor_names(self.layout.shapes)
        require(
            self.factors,
            f"--model {type(self).__name__} on a network without AdaLoRA",
            "it keeps and drops AdaLoRA's directions",
            "write --model.network LlamaTiny --model.network.adapter adalora",
        )
        self.ranks = [self.layout.shapes[scales][0] for _, scales, _ in self.factors.values()]
        self.directions = sum(self.ranks)
        self.end = min(self.directions, round(self.final_rank * len(self.ranks)))
        self.drops = self.end < self.directions
        if self.drops:
            self.server["kept"] = torch.ones(self.directions, dtype=torch.uint8)

    def values_of(self, kept: Tensor) -> Tensor:
        """Return which values of ``layout`` travel: those of kept directions, and of other layers
        all; bool ``[P]``.

        Args:
            kept: which directions are kept, layer after layer, uint8 ``[R]``.
        """
        travels = {name: torch.ones(shape) for name, shape in self.layout.shapes.items()}
        for (rows, scales, columns), mask in zip(
            self.factors.values(), kept.split(self.ranks), strict=True
        ):
            travels[rows] *= mask[:, None]
            travels[scales] *= mask[:, None]
            travels[columns] *= mask
        return self.layout.pack(travels).bool()

    # The client's half

    def receive(self, message: Payload, client: Client) -> None:
        self.importance = Importance()
        if not self.drops:
            super().receive(message, client)
            return
        self.kept = message.codes("kept").values.to(torch.uint8)
        weights = spread(message.tensor("weights"), self.values_of(self.kept))
        self.layout.write(self.network, weights)
        self.remember_received()

    def training_step(self, batch: Any, batch_idx: int = 0) -> dict[str, Tensor]:
        """Return the loss, the task's, and ``loss_orthogonal``: gamma times the regulariser."""
        task, logits = self.task_and_logits(batch, batch_idx)
        losses = {"loss": task, "loss_task": task}
        if self.gamma:
            apart = self.gamma * orthogonality(self.network)
            losses |= {"loss": task + apart, "loss_orthogonal": apart}
        return self.with_terms(losses, batch, logits)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.drops:
            self.importance.update(self.network)

    def upload(self, client: Client) -> Payload:
        """Return n_k, the values of the kept directions and their importance: each one's share of
        the client's, so that clients with large gradients count no more than others."""
        if not self.drops:
            return super().upload(client)
        weights = self.layout.to_wire(self.layout.read(self.network))
        scores = self.importance.scores()
        layers = zip(self.factors, self.ranks, strict=True)
        found = torch.cat([scores.get(name, torch.zeros(rank)).cpu() for name, rank in layers])
        found = found[self.kept.bool()]
        shares = found / found.sum().clamp_min(torch.finfo(found.dtype).tiny)
        return Payload(
            {
                "examples": self.examples_of(client),
                "weights": weights[self.values_of(self.kept)],
                "importance": shares,
            }
        )

    def upload_limits(self, client: Client) -> Mapping[str, Limit]:
        if not self.drops:
            return super().upload_limits(client)
        kept = self.server["kept"]
        values, directions = int(self.values_of(kept).sum()), int(kept.sum())
        return {"examples": (), "weights": (values,), "importance": (directions,)}

    # The server's half

    def broadcast(self, client: Client) -> Payload:
        if not self.drops:
            return super().broadcast(client)
        kept, weights = self.server["kept"], self.server["weights"]
        return Payload({"kept": Codes(kept.int(), 1), "weights": weights[self.values_of(kept)]})

    def check(self, upload: Payload, client: Client) -> None:
        super().check(upload, client)
        if not self.drops:
            return
        shares = upload.tensor("importance")
        if bool((shares < 0).any()) or float(shares.sum()) > 1.001:
            raise PayloadError(
                f"importance from {float(shares.min()):.4g} that adds up to {float(shares.sum()):.4g}",
                "it is at least 0 and at most 1 together",
                "divide each score by the sum of all",
            )

    def decode(self, upload: Payload) -> Tensor:
        weights = super().decode(upload)
        return spread(weights, self.values_of(self.server["kept"])) if self.drops else weights

    def addends(self, upload: Payload, client_id: int, weight: int) -> dict[str, Addend]:
        """Return FedAvg's addend, and the scaled importance of all directions, 0 of those that are
        not kept: the server goes by its order alone."""
        found = super().addends(upload, client_id, weight)
        if self.drops:
            shares = torch.zeros(self.directions)
            shares[self.server["kept"].bool()] = upload.tensor("importance")
            shares *= self.importance_scale
            found["importance"] = Addend(shares, weight, self.largest_weight)
        return found

    def summing_state(self) -> Mapping[str, Tensor]:
        # what a client started from enters no addend of the plain mean
        plain = isinstance(self.average, WeightedMean) and not self.adds_squares
        state = super().summing_state()
        return {name: tensor for name, tensor in state.items() if name == "kept" or not plain}

    def next_state(self, sums: Sums) -> None:
        """Average the weights, and drop the directions that are beyond the next round's budget."""
        super().next_state(sums)
        if not self.drops:
            return
        budget = budget_at(
            self.round + 1,
            self.directions,
            self.end,
            self.warmup,
            cooldown=0,
            total=self.warmup + self.fall,
        )
        kept = self.server["kept"].bool()
        # what is dropped stays so
        importance = sums.mean("importance").masked_fill(~kept, float("-inf"))
        mask = choose_masks({"all": importance}, min(budget, int(kept.sum())))["all"]
        self.server["kept"] = mask.to(torch.uint8)
        for name in {"weights", EVALUATED}.intersection(self.server):
            self.server[name] = self.server[name] * self.values_of(self.server["kept"])

    def server_metrics(self) -> dict[str, float]:
        kept = int(self.server["kept"].sum()) if self.drops else self.directions
        return {**super().server_metrics(), "adapter/directions": float(kept)}
