"""FedRep (Collins et al., ICML 2021, algorithm 1): each client trains its own head first, then the
shared body.

    h_i <- ``head_steps`` local steps on the head at ``head_lr``, from the client's own, body frozen
    y_i <- K_i local steps on the body from x, head frozen
    x <- sum_i p_i y_i
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any

from torch import Tensor

from fl_lightning.client import Client
from fl_lightning.config.constraints import at_least
from fl_lightning.data import FederatedData
from fl_lightning.errors import require
from fl_lightning.methods.base import Method
from fl_lightning.methods.personal import TuningRate


class FedRep(Method):
    """FedAvg of the body; the last linear layer stays on its client, which trains it first.

    K_i counts the steps on the body. The steps on the head come before them and are the same for a
    straggler. A part that is frozen takes no step at all, also none of momentum or weight decay.

    Args:
        head_steps: local steps on the head, at least 1; ten epochs in the paper.
        head_lr: their learning rate, above 0, which the schedule scales as the other; null: that of
            the body.
    """

    kind = "personal models"
    stackable = True
    owns = frozenset({"personal"})
    frozen: Collection[str] = frozenset()
    """Names of the weights that the local step that runs leaves as they are."""

    def __init__(
        self,
        head_steps: Annotated[int, at_least(1)] = 10,
        head_lr: TuningRate = None,
        **settings: Any,
    ) -> None:
        super().__init__(personal="head", **settings)
        self.head_steps, self.head_lr = head_steps, head_lr
        require(
            head_lr is None or self.module is None,
            f"--model.head_lr {head_lr} beside --model.module {type(self.module).__name__}",
            "its configure_optimizers sets the learning rates",
            "leave head_lr out, and give the head a group of its own there",
        )

    def trainable(self) -> Any:
        trained = self.trained_weights()
        body = {"params": [p for name, p in trained.items() if name not in self.own.shapes]}
        head = {"params": [p for name, p in trained.items() if name in self.own.shapes]}
        return [body, head if self.head_lr is None else {**head, "lr": self.head_lr}]

    def local_batches(
        self, data: FederatedData, client: Client, *, epochs: int, labels: Tensor, steps: int
    ) -> Iterator[Any]:
        passes, first = data.epochs_for(client, self.head_steps), self.head_steps
        yield from super().local_batches(data, client, epochs=passes, labels=labels, steps=first)
        yield from super().local_batches(data, client, epochs=epochs, labels=labels, steps=steps)

    def step_kind(self, batch_idx: int) -> str:
        return "head" if batch_idx < self.head_steps else "body"

    def training_step(self, batch: Any, batch_idx: int = 0) -> dict[str, Tensor]:
        trains_head = self.step_kind(batch_idx) == "head"
        self.frozen = {
            name for name in self.trained_names if (name in self.own.shapes) != trains_head
        }
        try:
            return super().training_step(batch, batch_idx)
        finally:
            del self.frozen  # nothing of a step is left, as a stack of clients needs it

    def task_and_logits(
        self, batch: Any, batch_idx: int, weights: Mapping[str, Tensor] | None = None
    ) -> tuple[Tensor, Tensor | None]:
        frozen = {
            name: weight for name, weight in self.trained_weights().items() if name in self.frozen
        }
        return super().task_and_logits(batch, batch_idx, {**frozen, **(weights or {})} or None)

    def trained_weights(self) -> dict[str, Tensor]:
        """Return the network's weights by name; those of the part that is frozen lead no gradient
        back."""
        weights = super().trained_weights()
        return {name: w.detach() if name in self.frozen else w for name, w in weights.items()}
