"""FedNova (Wang et al., NeurIPS 2020): updates are divided by the length of their clients' local
work, so that who makes more steps does not pull the model towards its own optimum.

    x <- x + tau sum_i p_i (y_i - x) / a_i
    a_i = u after K_i times:  s <- r s + 1 - eta mu u,  u <- u + s, both from 0
    tau = sum_i p_i a_i, with mu > 0 sum_i p_i K_i

a_i is what K_i steps of SGD with momentum r and a proximal term make of gradients of 1: K_i for
plain SGD. K_i is the number of steps that the client made, fewer for a straggler. With
server_momentum q the server moves by eta B, B <- q B + step / eta.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import torch
from torch import Tensor

from fl_lightning.aggregation.exact_sum import MAX_MAGNITUDE, largest
from fl_lightning.aggregation.sums import Addend, Sums
from fl_lightning.client import Client
from fl_lightning.config.constraints import within
from fl_lightning.data import FederatedData
from fl_lightning.errors import require
from fl_lightning.methods.base import Method
from fl_lightning.methods.corrected import require_plain_sgd
from fl_lightning.methods.local_work import check_steps
from fl_lightning.methods.optimizing import round_lr, round_optimizer
from fl_lightning.methods.terms import ProximalTerm, a_weight
from fl_lightning.wire import Limit, Payload, PayloadError

SWING_STEPS = 99
"""Steps within which a_i is least, where momentum takes it back."""


class FedNova(Method):
    """FedAvg of normalised updates, for local SGD with or without momentum and a proximal term.

    Args:
        mu: weight of a proximal term, 0 or more, as in FedProx.
        server_momentum: share of the last steps that the server makes again, in [0, 1).
        normalize: whether updates are normalised; False, without the others, is FedAvg, bit for
            bit.
    """

    kind = "drift correction"
    stackable = True
    same_start = True
    own_terms = frozenset({"prox"})
    refuses = {"privacy": "a number of steps cannot be clipped together with weights"}

    def __init__(
        self,
        mu: Annotated[float, a_weight(0.0)] = 0.0,
        server_momentum: Annotated[float, within("[0, 1)", "it is a share in [0, 1)", 0.9)] = 0.0,
        normalize: bool = True,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        self.mu, self.server_momentum, self.normalize = mu, server_momentum, normalize
        self.terms = [ProximalTerm(mu), *self.terms]

    def build(self, data: FederatedData) -> None:
        super().build(data)
        why = "a_i is how far steps of SGD go, with momentum and a proximal term"
        require_plain_sgd(self, why, momentum=True, decay=True, clipping=True)
        self.check_rates()
        if self.server_momentum:
            self.server["momentum"] = torch.zeros(self.trained_values)

    def check_rates(self) -> None:
        lr = round_lr(self)
        given = f"mu {self.mu:g} at a learning rate of {lr:g}"
        given += f", that of round {self.round}" if self.round > 1 else ""
        above = self.mu * lr <= 1 and min(self._works(SWING_STEPS)[1:]) > 0
        why = "mu lr is at most 1, or a_i need not be above 0"
        require(above, given, why, "write --model.mu 0.01")

    def upload(self, client: Client) -> Payload:
        steps = torch.tensor(float(self.local_steps))
        return Payload({**super().upload(client), "steps": steps})

    def upload_limits(self, client: Client) -> Mapping[str, Limit]:
        return {**super().upload_limits(client), "steps": ()}

    def check(self, upload: Payload, client: Client) -> None:
        super().check(upload, client)
        check_steps(upload, self.steps_asked.get(client.id))
        work = self.work_of(int(upload.tensor("steps")))
        if work < 1 and not largest(self._normalised(self.decode(upload), work)) < MAX_MAGNITUDE:
            raise PayloadError(
                f"an update that is too large for work of {work:.3g}",
                "it is divided by that",
                "lower the lr",
            )

    def work_of(self, steps: int) -> float:
        """Return a_i of a client that made so many steps in this round."""
        return self._works(steps)[-1]

    def _works(self, steps: int) -> list[float]:
        """Return a_i after 0, 1, ... and so many steps."""
        (group, *_) = round_optimizer(self).param_groups
        momentum, shrinks, last, found = group["momentum"], group["lr"] * self.mu, 0.0, [0.0]
        for _ in range(steps if self.normalize else 1):
            last = momentum * last + 1 - shrinks * found[-1]
            found.append(found[-1] + last)
        return found

    def addends(self, upload: Payload, client_id: int, weight: int) -> dict[str, Addend]:
        steps = int(upload.tensor("steps"))
        start = self.starts()["weights"]
        most = self.largest_weight
        # a bound on an update's length is on what the client has moved, and not on a step's share
        moved = self.average.bounded(self.decode(upload), start)
        ended = self._normalised(moved, self.work_of(steps))
        return {
            "weights": Addend(ended, weight, most, start),
            "lengths": Addend(torch.tensor([self._length_of(steps)]), weight, most),
        }

    def _normalised(self, ended: Tensor, work: float) -> Tensor:
        """Return x + (y_i - x) / a_i, and statistics as they are, ``[P]``."""
        start, P = self.starts()["weights"], self.trained_values
        if work == 1:
            return ended
        return torch.cat([start[:P] + (ended[:P] - start[:P]) / work, ended[P:]])

    def _length_of(self, steps: int) -> float:
        """Return what a client of so many steps adds to tau."""
        return (float(steps) if self.mu else self.work_of(steps)) if self.normalize else 1.0

    def largest_value(self, name: str) -> float:
        if name == "lengths" and self.steps_asked:
            return self._length_of(max(self.steps_asked.values()))
        return super().largest_value(name)

    def next_state(self, sums: Sums) -> None:
        P, mean, tau = self.trained_values, sums.mean("weights"), float(sums.mean("lengths"))
        start, ended = self.server["weights"][:P].double(), mean[:P].double()
        weights = ended + (tau - 1) * (ended - start)
        if self.server_momentum:
            lr = round_lr(self)
            moved = (weights - start) / lr if lr else torch.zeros_like(start)
            pace = self.server_momentum * self.server["momentum"].double() + moved
            self.server["momentum"], weights = pace.float(), start + lr * pace
        self.server["weights"] = self.layout.to_wire(torch.cat([weights.float(), mean[P:]]))
