"""FedDC (Gao et al., CVPR 2022): FedDyn with control variates, so that a client's own drift and the
way that all go are told apart.

    L = L_task + a_i (<h_i, y - x> + 1/2 ||y - x||^2) + <G / w_i - g_i, y>    K_i local steps from x
    h_i <- h_i + y_i - x
    g_i+ = g_i - G / w_i - (y_i - x) / (K_i eta)
    G <- G + 1 / N sum_S w_i (g_i+ - g_i)
    x <- 1 / |S| sum_S y_i + 1 / N sum_all h_i

a_i = alpha / w_i, and w_i is 1 or N n_i / sum_k n_k. The first term is that of
a_i / 2 ||y - (x - h_i)||^2.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fl_lightning.client import Client
from fl_lightning.data import FederatedData
from fl_lightning.methods.corrected import ChangingMethod
from fl_lightning.methods.feddyn import FedDyn
from fl_lightning.methods.products import distance_and_product
from fl_lightning.wire import Payload


class FedDC(ChangingMethod, FedDyn):
    """FedDyn whose clients also step along G - g_i, as SCAFFOLD's do. Clients count once each.

    h_i is kept as FedDyn's H_i, and their mean over all clients on the server, H.

    Args:
        settings: those of FedDyn, whose ``alpha`` 0 is FedAvg, bit for bit where ``weigh_by`` is
            the same, and those of every method.
    """

    kind = "drift correction"
    stackable = True
    mean_name = "G"
    plain_sgd_why = (
        "g_i is a mean gradient, (x - y) / (K lr), where a step is minus lr times a gradient"
    )

    def build(self, data: FederatedData) -> None:
        super().build(data)
        if self.corrects:
            self.make_room("correction")

    def receive(self, message: Payload, client: Client) -> None:
        super().receive(message, client)
        if self.corrects:
            G = message.tensor("G") * self.inverse_share(client)
            self.correction = (G - self.kept(client, "g_i")).to(self.device)

    def quadratic_and_linear(self, centres: Sequence[Tensor]) -> tuple[Tensor, Tensor | float]:
        weights = [weight for _, weight in self.own_parameters()]
        return distance_and_product(
            weights, centres, [*self.trained.unpack(self.correction).values()]
        )

    def change(self, client: Client) -> Tensor:
        g_i, way = self.kept(client, "g_i"), self.local_steps * self.local_lr
        if way:  # a rate of 0 moves nothing and says nothing of the gradient
            moved = self.trained.read(self.network) - self.start.cpu()
            client.state["g_i"] = -self.correction.cpu() - moved / way
        else:
            client.state["g_i"] = g_i
        return (client.state["g_i"] - g_i) / self.inverse_share(client)
