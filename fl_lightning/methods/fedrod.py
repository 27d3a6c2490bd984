"""FedRoD (Chen & Chao, ICLR 2022): a global head that is fair to all classes, and beside it a
personal one that knows which of them its client has.

    client k:  base and G minimise the cross-entropy of G(z)_c + gamma log n_kc,
               P that of stop(G(z)) + P(stop(z)), in the same steps
    server:    base and G are averaged by p_k; P stays

z is what enters the last linear layer G, n_kc the client's training examples of class c; absent
classes are left out. The personal model is G(z) + P(z).
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch import Tensor, nn

from fl_lightning.client import Client
from fl_lightning.compatibility import only
from fl_lightning.config.constraints import within
from fl_lightning.data import FederatedData
from fl_lightning.errors import require
from fl_lightning.methods.beside import PersonalMethod
from fl_lightning.methods.terms import BalancedSoftmax
from fl_lightning.models.features import FeatureTap
from fl_lightning.wire import Layout, Payload


class FedRoD(PersonalMethod):
    """FedAvg with :class:`~fl_lightning.methods.terms.BalancedSoftmax` in place of the task loss,
    and a linear personal head P on features that it does not train.

    Args:
        gamma: weight of the shift, 0 or more; 1 in the paper. 0: the global model is FedAvg's, bit
            for bit.
    """

    stackable = True
    trains_apart = True
    own_terms = frozenset({"calibrated", "personal"})
    refuses = {
        **PersonalMethod.refuses,
        **only("classification", "its heads tell classes of examples apart"),
        "module": "its personal head needs the network's last layer, and a module gives its loss alone",
    }

    def __init__(
        self,
        gamma: Annotated[float, within("[0, inf)", "a shift weighs 0 or more", 1)] = 1.0,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        self.gamma = gamma
        self.terms = [BalancedSoftmax(gamma), *self.terms]

    def build(self, data: FederatedData) -> None:
        super().build(data)
        self.tap = FeatureTap(self.network)
        with torch.no_grad():
            logits = self.network.eval()(data.example_inputs())
            shared = self.tap.layer
            ends = torch.equal(logits, shared(self.tap.take()))
            require(
                ends and all(weight.requires_grad for weight in shared.parameters()),
                f"--model FedRoD with {type(self.network).__name__}, which does not end with a linear layer "
                "that is trained",
                "its personal head is added to that",
                "take a network that does, such as small_cnn",
            )
        bias, dtype = shared.bias is not None, shared.weight.dtype
        self.head = nn.Linear(shared.in_features, shared.out_features, bias, dtype=dtype)
        self.of_head = Layout.of(self.head)
        self.first["P"] = torch.zeros(self.of_head.size)

    def receive(self, message: Payload, client: Client) -> None:
        super().receive(message, client)
        self.of_head.write(self.head, self.kept(client, "P"))

    def training_step(self, batch: Any, batch_idx: int = 0) -> dict[str, Tensor]:
        task, logits = self.task_and_logits(batch, batch_idx)
        assert logits is not None, "a module is refused"
        personal = self.task_loss(logits.detach() + self.head(self.tap.take().detach()), batch[1])
        outputs = self.with_terms({"loss": task, "loss_task": task}, batch, logits)
        return {**outputs, "loss": outputs["loss"] + personal, "loss_personal": personal}

    def end_client(self, client: Client) -> None:
        super().end_client(client)
        self.keep(client, P=self.of_head.read(self.head))

    @torch.no_grad()
    def deploy(self, client: Client | None = None) -> nn.Module:
        network = super().deploy()
        if client is not None:
            self.of_head.write(self.head, self.kept(client, "P"))
            for shared, own in zip(
                self.tap.layer.parameters(), self.head.parameters(), strict=True
            ):
                shared.add_(own)  # G(z) + P(z) is one linear layer
        return network
