"""FedKD: distillation through soft labels on a public set P (FedMD, Li & Wang 2019; DS-FL, Itahara
et al. 2020; CFD, Sattler et al. 2020).

    client k:  receive p, minimise T^2 KL(p || softmax(z / T)) on P,
               then L_task on its own examples,
               send p_k = softmax(z(P) / T)
    server:    p = sum_k n_k p_k / sum_k n_k,  sharpened: p = softmax(p / tau)
               (DS-FL's entropy reduction aggregation, tau 0.1)
               its own student minimises T^2 KL(p || softmax(z / T)) on P and is the global model
               that is evaluated

z logits, ``C`` classes. A client-round costs 2 |P| C fp32 values; in the first round there is no p
yet, and nothing to distil.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from fl_lightning import rng
from fl_lightning.client import Client
from fl_lightning.compatibility import only
from fl_lightning.config.constraints import within
from fl_lightning.data import FederatedData
from fl_lightning.errors import InputError
from fl_lightning.methods.base import Method
from fl_lightning.methods.losses import kl_divergence
from fl_lightning.methods.optimizing import clip_gradients, round_optimizer
from fl_lightning.methods.terms import a_temperature
from fl_lightning.wire import Limit, Payload, PayloadError

SUM_TOLERANCE = 1e-3  # of a row of soft labels: float32 sums of many classes


class FedKD(Method):
    """Clients exchange what they think of public examples; weights stay where they are.

    Every client keeps its own weights between rounds and starts, when it is first sampled, from the
    initial weights, which follow from the seed on both sides: the simulation holds one fp32 copy of
    the weights for each client that was ever sampled. The server's student is trained in fp32
    whatever ``trainer.precision``, with the clients' optimiser, schedule and clipping, built anew
    each round.

    Args:
        temperature: T that softens every soft label, above 0.
        distill_epochs: passes over the public set that a client makes each round before it trains,
            0 or more.
        server_epochs: passes over the public set that the server's student makes each round, at
            least 1, or 0 with ``average_weights``; then, with ``distill_epochs`` 0 too, the method
            is FedAvg that also pays for soft labels.
        sharpen: temperature tau of entropy reduction of the averaged soft labels, above 0; 0.1 in
            DS-FL; null: they stay as they are.
        average_weights: whether weights travel and are averaged as in FedAvg too; clients then keep
            nothing, and the server's student starts each round from the average.
    """

    kind = "exchange of logits"
    stackable = True
    own_terms = frozenset({"kd"})
    keeps_state = True
    refuses = {
        **only("classification", "its soft labels are one row of classes for each public example"),
        "secure_sum": "its server reads the soft labels of single clients",
        "own_data": "its public set is the same for all, and nodes have data of their own",
        "privacy": "its soft labels are probabilities, and a sum of them with noise is none",
        "server_optimizer": "a student that its server distils is the next model, and no mean",
    }

    def __init__(
        self,
        temperature: Annotated[float, a_temperature(1)] = 1.0,
        distill_epochs: Annotated[int, within("[0, inf)", "passes are 0 or more", 1)] = 1,
        server_epochs: int = 1,
        sharpen: Annotated[
            float | None, within("(0, inf]", "a temperature is above 0, or null", 0.1)
        ] = None,
        average_weights: bool = False,
        **settings: Any,
    ) -> None:
        if not average_weights:
            why = "its clients receive soft labels, and no weights unless they are averaged"
            self.refuses = {**self.refuses, "received_terms": why}
        super().__init__(**settings)
        if server_epochs < (0 if average_weights else 1):
            raise InputError(
                f"--model.server_epochs {server_epochs}",
                "a student makes 1 pass or more",
                "write --model.server_epochs 1",
            )
        self.temperature = temperature
        self.distill_epochs = distill_epochs
        self.server_epochs = server_epochs
        self.sharpen = sharpen
        self.average_weights = average_weights

    def build(self, data: FederatedData) -> None:
        self.take_task(data.task)
        if not len(data.public):
            raise InputError(
                "--model FedKD with no public set",
                "soft labels are given to public examples",
                "write --data.public_examples 200, or name another data set in --data.public_dataset",
            )
        super().build(data)
        self.public_data = data
        self.first = {} if self.average_weights else {"weights": self.server["weights"]}
        self.received: Tensor | None
        self.register_buffer("received", None, persistent=False)
        classes = self._outputs(data)
        self.server |= {
            "soft_labels": torch.full((len(data.public), classes), 1 / classes),
            "aggregated": torch.zeros(1, dtype=torch.int32),
        }

    def _outputs(self, data: FederatedData) -> int:
        """C, as the network has it."""
        example = tree_map(
            lambda tensor: tensor.cpu(),
            data.public_inputs(torch.zeros(1, dtype=torch.int64, device=data.device)),
        )
        with torch.no_grad():
            return self.network.eval()(example).shape[1]

    # The client's half

    def receive(self, message: Payload, client: Client) -> None:
        kept = (
            message.tensor("weights")
            if self.average_weights
            else client.state.get("weights", self.first["weights"])
        )
        self.layout.write(self.network, kept)
        self.remember_received()
        self.received = (
            message.tensor("soft_labels").to(self.device) if "soft_labels" in message else None
        )

    def local_batches(
        self, data: FederatedData, client: Client, *, epochs: int, labels: Tensor, steps: int
    ) -> Iterator[Any]:
        """Public inputs with soft labels float ``[B, C]`` and their positions in the public set,
        then the client's own with labels int64 ``[B]``."""
        if self.received is not None:
            yield from self._public_batches(data, self.received, self.distill_epochs, client)
        yield from super().local_batches(data, client, epochs=epochs, labels=labels, steps=steps)

    def _public_batches(
        self, data: FederatedData, soft_labels: Tensor, epochs: int, client: Client | None = None
    ) -> Iterator[tuple[Any, Tensor, Tensor]]:
        order = self.stream("public_batches", client)
        for _ in range(epochs):
            for inputs, position in data.public_batches(order):
                yield inputs, soft_labels[position], position

    def training_step(self, batch: Any, batch_idx: int = 0) -> dict[str, Tensor]:
        """``loss_kd`` of a public batch, which has positions, ``loss_task`` of the client's
        own."""
        inputs, target, *is_public = batch
        if not is_public:
            return super().training_step(batch, batch_idx)
        loss = soft_label_loss(self.network(inputs), target, self.temperature)
        return {"loss": loss, "loss_kd": loss}

    def upload(self, client: Client) -> Payload:
        weights = self.layout.read(self.network)
        sent: dict[str, Tensor] = {
            "examples": self.examples_of(client),
            "soft_labels": self._soft_labels(),
        }
        if self.average_weights:
            sent["weights"] = weights
        # a client that diverged keeps what it had, or it would be lost for good
        elif bool(torch.isfinite(weights).all()):
            client.state["weights"] = weights
        return Payload(sent)

    @torch.no_grad()
    def _soft_labels(self) -> Tensor:
        """softmax(z(P) / T) of the network as it is, float32 ``[|P|, C]`` on the CPU."""
        self.network.eval()
        outputs = [self.network(inputs).float() for inputs, _ in self.public_data.public_batches()]
        return torch.softmax(torch.cat(outputs) / self.temperature, dim=1).cpu()

    def upload_limits(self, client: Client) -> Mapping[str, Limit]:
        weights = super().upload_limits(client)
        return {
            **(weights if self.average_weights else {"examples": ()}),
            "soft_labels": self.server["soft_labels"].shape,
        }

    # The server's half

    def broadcast(self, client: Client) -> Payload:
        message = {"soft_labels": self.server["soft_labels"]} if self.server["aggregated"] else {}
        return Payload(
            message | ({"weights": self.server["weights"]} if self.average_weights else {})
        )

    def check(self, upload: Payload, client: Client) -> None:
        upload.tensor("examples")
        soft_labels = upload.tensor("soft_labels")
        low = soft_labels.min()
        high = soft_labels.max()
        off = (soft_labels.double().sum(dim=1) - 1).abs().max()
        if low < 0 or high > 1 or off > SUM_TOLERANCE:
            raise PayloadError(
                f"soft labels of client {client.id} from {float(low):g} to {float(high):g}, rows up to "
                f"{float(off):g} away from a sum of 1",
                "they are probabilities",
                "send the softmax of the outputs",
            )
        if self.average_weights:
            super().check(upload, client)

    def aggregate(self, uploads: Mapping[int, Payload]) -> None:
        sent = [upload.tensor("soft_labels") for upload in uploads.values()]
        start = self.server["soft_labels"]
        vectors, flat = [p.flatten() for p in sent], start.flatten()
        found = self.average.of(vectors, self.shares(uploads.values()), flat)
        mean = normalised(found.view_as(start))
        self.server["soft_labels"] = (
            mean if self.sharpen is None else torch.softmax(mean / self.sharpen, dim=1)
        )
        self.server["aggregated"] = torch.ones_like(self.server["aggregated"])
        if self.average_weights:
            super().aggregate(uploads)
        if self.server_epochs:
            self.server["weights"] = self._distilled(self.server["weights"])

    def _distilled(self, weights: Tensor) -> Tensor:
        """Return the student that starts from ``weights``, after this round's passes over the
        public set."""
        self.layout.write(self.network, weights)
        self.unsent.restore()
        self.train()
        soft_labels = self.server["soft_labels"].to(self.device)
        optimizer = round_optimizer(self)
        with rng.torch_stream(self.seed, "dropout", self.round, -1):
            for batch in self._public_batches(self.public_data, soft_labels, self.server_epochs):
                optimizer.zero_grad()
                self.training_step(batch)["loss"].backward()
                if self.gradient_clip_val is not None:
                    clip_gradients(optimizer, self.gradient_clip_val, self.gradient_clip_algorithm)
                optimizer.step()
        return self.layout.to_wire(self.layout.read(self.network))


def normalised(rows: Tensor) -> Tensor:
    """Return rows ``[P, C]`` of values of 0 or more, each scaled to a sum of 1.

    A median of probabilities need not add up to 1. It is zero for every class where confident
    clients disagree; such a row becomes uniform, since the clients as a whole say nothing about
    that example.
    """
    total = rows.sum(dim=1, keepdim=True)
    return torch.where(
        total > 0, rows / total.clamp_min(torch.finfo(rows.dtype).tiny), 1 / rows.shape[1]
    )


def soft_label_loss(outputs: Tensor, soft_labels: Tensor, temperature: float) -> Tensor:
    """T^2 * KL(p || softmax(z / T)), mean over the batch.

    Args:
        outputs: logits z ``[B, C]``.
        soft_labels: probabilities p ``[B, C]``.
        temperature: T of both.
    """
    return (
        temperature**2
        * kl_divergence(soft_labels, F.log_softmax(outputs / temperature, dim=1)).mean()
    )
