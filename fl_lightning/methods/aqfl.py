"""AQFL: fixed-precision quantised federated learning, the baseline of FedMPQ (Chen & Vikalo, CVPR
2024; after Abdelmoniem & Canini, 2021).

    W_q = s / (2^N - 1) * R( W (2^N - 1) / s )
    s = max|W|

R rounds; its backward is the identity. Every layer of a client has that client's one bit-width N.
Clients train fp32 weights through W_q, with neither bit regulariser nor pruning, and send codes of
N + 1 bits, rounded so that their mean is W; the server averages the de-quantised weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor

from fl_lightning.client import Client
from fl_lightning.data import FederatedData
from fl_lightning.methods.quantized import QuantizedMethod, check_budgets
from fl_lightning.quantization.activations import fake_quantize
from fl_lightning.wire import Limit, Payload, PayloadError


class AQFL(QuantizedMethod):
    """Quantisation-aware training at one bit-width per client, on grids that reach max |W|.

    Args:
        bits: N, magnitude bits of every layer, 1 to 8, the sign not counted, as in FedMPQ; one
            number, or one for each client.
        download: what the client is sent: W_t in ``full`` precision, or ``quantised`` at its own
            bit-width.
        activation_bits: magnitude bits of the inputs of quantised layers, 1 to 8, or null for full
            precision.
        quantise_shortcuts: whether layers inside modules whose names have ``shortcut`` or
            ``downsample`` in them, such as 1x1 convolutions, are quantised too.
    """

    kind = "quantised"
    stackable = True

    def __init__(
        self,
        bits: int | list[int] = 4,
        download: Literal["full", "quantised"] = "full",
        activation_bits: int | None = None,
        quantise_shortcuts: bool = True,
        **settings: Any,
    ) -> None:
        budgets: list[float] = [int(b) for b in check_budgets(bits)]
        super().__init__(budgets, download, activation_bits, quantise_shortcuts, **settings)

    def build(self, data: FederatedData) -> None:
        super().build(data)
        self.bits = int(self.budgets[0])

    def allocate(self, budget: float) -> list[int]:
        """Return the same bit-width for every layer: the budget, rounded down."""
        return [int(budget)] * len(self.codec.names)

    # The client's half

    def receive(self, message: Payload, client: Client) -> None:
        self.layout.write(self.network, self.codec.decode(message, sender="server"))
        self.bits = int(self.budget(client))
        self.remember_received()

    def training_step(self, batch: Any, batch_idx: int = 0) -> dict[str, Tensor]:
        parameters = dict(self.network.named_parameters())
        weights = {name: fake_quantize(parameters[name], self.bits) for name in self.codec.names}
        task, logits = self.task_and_logits(batch, batch_idx, weights)
        return self.with_terms({"loss": task, "loss_task": task}, batch, logits)

    def upload(self, client: Client) -> Payload:
        weights, noise = self.layout.read(self.network), self.stream("rounding", client)
        coded = self.codec.encode(weights, self.allocate(self.bits), noise)
        return Payload({"examples": self.examples_of(client), **coded})

    def upload_limits(self, client: Client) -> Mapping[str, Limit]:
        return {"examples": (), **self.codec.limits()}

    # The server's half

    def check(self, upload: Payload, client: Client) -> None:
        super().check(upload, client)
        given = int(self.budget(client))
        if set(upload.codes("bits").values.tolist()) != {given}:
            raise PayloadError(
                f"codes of other bits than the client's {given}",
                "every layer has them",
                "encode them again",
            )
