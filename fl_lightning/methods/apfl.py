"""APFL (Deng et al., 2020, Algorithm 1): the personal model is a mixture of the weights of the
global model and of one's own.

    v' = A v + (1 - A) w,  all gradients at the old values, K_k steps:
    w <- w - eta g(w)                          from x; averaged by p_k
    v <- v - eta A g(v')                       stays
    A <- clip(A - eta <v - w, g(v')>, 0, 1)    in the first step of a round; stays

g is the gradient of L_task. The personal model is A v + (1 - A) x.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.optim import SGD

from fl_lightning.client import Client
from fl_lightning.config.constraints import within
from fl_lightning.data import FederatedData
from fl_lightning.errors import require
from fl_lightning.methods.beside import BesideMethod, same_numbers
from fl_lightning.methods.corrected import require_plain_sgd
from fl_lightning.wire import Payload


class APFL(BesideMethod):
    """FedAvg, beside which each client trains what its mixture with the global model lacks.
    ``terms`` are those of the global model.

    Args:
        alpha: A before a client's first round, in [0, 1]: the share of v.
        adaptive: whether each client learns A.
    """

    stackable = True
    own_terms = frozenset({"personal"})
    module_optimizes = False

    def __init__(
        self,
        alpha: Annotated[float, within("[0, 1]", "a share lies in [0, 1]", 0.5)] = 0.5,
        adaptive: bool = True,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        self.alpha, self.adaptive = alpha, adaptive

    def build(self, data: FederatedData) -> None:
        super().build(data)
        statistics = [name for name in self.layout.shapes if name not in self.trained.shapes]
        require(
            not statistics,
            f"--model APFL with batch normalisation ({', '.join(statistics[:1])})",
            "the statistics of two networks are not those of their mixture",
            "use group normalisation, the default of small_cnn",
        )
        self.first["A"] = torch.tensor(float(self.alpha))
        self.A = nn.Parameter(self.first["A"].clone(), requires_grad=self.adaptive)
        require_plain_sgd(
            self, "v follows the gradient by its share of the mixture, and A that of one step"
        )

    def receive(self, message: Payload, client: Client) -> None:
        super().receive(message, client)
        with torch.no_grad():
            self.A.copy_(self.kept(client, "A"))

    def training_step(self, batch: Any, batch_idx: int = 0) -> dict[str, Tensor]:
        # it moves in the first step alone
        A = self.A if batch_idx == 0 else self.A.detach().clamp(0, 1)
        v, w = self.own_parameters(self.beside), self.own_parameters(self.network)
        mixed = [A * own + (1 - A) * shared.detach() for own, shared in zip(v, w, strict=True)]
        with same_numbers():
            weights = dict(zip(self.trained_names, mixed, strict=True))
            personal, _ = self.task_and_logits(batch, batch_idx, weights)
        outputs = super().training_step(batch, batch_idx)
        return {**outputs, "loss": outputs["loss"] + personal, "loss_personal": personal}

    def configure_optimizers(self) -> Any:
        return (
            super().configure_optimizers() if self.optimizer_spec else SGD(self.trainable(), 0.05)
        )

    def end_client(self, client: Client) -> None:
        super().end_client(client)
        self.keep(client, v=self.layout.read(self.beside), A=self.A.detach().cpu().clamp(0, 1))

    def deploy(self, client: Client | None = None) -> nn.Module:
        network = super().deploy()
        if client is not None:
            A, x = self.kept(client, "A"), self.adapters.cut(self.layout.read(network), client)
            self.layout.write(network, A * self.own_model(client) + (1 - A) * x)
        return network
