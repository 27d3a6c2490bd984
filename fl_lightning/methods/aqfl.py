"""AQFL: fixed-precision quantised federated learning, the baseline of FedMPQ (Chen & Vikalo, CVPR 2024; after
Abdelmoniem & Canini, 2021).

    W_q = s / (2^N - 1) * R( W (2^N - 1) / s ),     s = max|W|,     R rounds; its backward is the identity

Every layer of a client has that client's one bit-width N. Clients train fp32 weights through W_q, with
neither bit regulariser nor pruning, and send codes of N + 1 bits, rounded so that their mean is W; the server
averages the de-quantised weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from torch import Tensor, nn
from torch.func import functional_call

from fl_lightning.client import Client
from fl_lightning.data import FederatedData
from fl_lightning.errors import InputError
from fl_lightning.methods.base import Method, examples_of
from fl_lightning.methods.lit_module import module_loss
from fl_lightning.methods.quantized import LayerCodec, check_budgets
from fl_lightning.quantization.activations import fake_quantize, quantize_activations
from fl_lightning.quantization.allocation import MAX_BITS
from fl_lightning.wire import Payload, PayloadError


class AQFL(Method):
    """Quantisation-aware training at one bit-width per client; what FedMPQ is without its mixing of
    precisions.

    Args:
        bits: N, magnitude bits of every layer, 1 to 8, the sign not counted, as in FedMPQ; one number, or one
            for each client.
        download: what the client is sent: W_t in ``full`` precision, or ``quantised`` at its own bit-width.
        activation_bits: magnitude bits of the inputs of quantised layers, 1 to 8, or null for full precision.
        quantise_shortcuts: whether 1x1 convolutions on shortcuts are quantised too.
        settings: those of every method.
    """

    stackable = True

    def __init__(
        self,
        bits: int | list[int] = 4,
        download: Literal["full", "quantised"] = "full",
        activation_bits: int | None = None,
        quantise_shortcuts: bool = True,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        self.budgets = [int(b) for b in check_budgets(bits)]
        if activation_bits is not None and not 1 <= activation_bits <= MAX_BITS:
            raise InputError(
                f"--model.activation_bits {activation_bits}",
                f"1 to {MAX_BITS} bits, or null",
                "write --model.activation_bits 4",
            )
        self.download = download
        self.activation_bits = activation_bits
        self.quantise_shortcuts = quantise_shortcuts

    def build(self, data: FederatedData) -> None:
        check_budgets(self.budgets, data.num_clients)
        super().build(data)
        self.codec = LayerCodec(self.network, self.layout, self.quantise_shortcuts)
        self.rest = self.codec.rest
        if self.activation_bits is not None:
            quantize_activations(self.network, self.codec.names, self.activation_bits)
        self.bits = self.budgets[0]

    def bits_of(self, client: Client) -> int:
        return self.budgets[client.id % len(self.budgets)]

    # The client's half

    def receive(self, message: Payload, client: Client) -> None:
        self.layout.write(self.network, self.codec.decode(message, sender="server"))
        self.bits = self.bits_of(client)

    def training_step(self, batch: Any, batch_idx: int = 0) -> dict[str, Tensor]:
        inputs, target = batch
        parameters = dict(self.network.named_parameters())
        weights = {name: fake_quantize(parameters[name], self.bits) for name in self.codec.names}
        if self.module is not None:
            loss = module_loss(self.module, batch, batch_idx, weights)
        else:
            loss = self.task_loss(functional_call(self.network, weights, (inputs,)), target)
        return {"loss": loss, "loss_task": loss}

    def upload(self, client: Client) -> Payload:
        coded = self._encode(self.layout.read(self.network), self.bits, self.stream("rounding", client))
        return Payload({"examples": examples_of(client), **coded})

    def upload_limits(self, client: Client) -> Mapping[str, int]:
        return {"examples": 1, **self.codec.limits()}

    # The server's half

    def broadcast(self, client: Client) -> Payload:
        return (
            super().broadcast(client)
            if self.download == "full"
            else self._encode(self.server["weights"], self.bits_of(client))
        )

    def check(self, upload: Payload, client: Client) -> None:
        super().check(upload, client)
        if set(upload.codes("bits").values.tolist()) != {self.bits_of(client)}:
            raise PayloadError(
                f"codes of other bits than the client's {self.bits_of(client)}",
                "every layer has them",
                "encode them again",
            )

    def decode(self, upload: Payload) -> Tensor:
        return self.codec.decode(upload, sender="a client")

    def server_metrics(self) -> dict[str, float]:
        return {"bits/average": sum(self.budgets) / len(self.budgets)}

    def deploy(self, client: Client | None = None) -> nn.Module:
        """W_t on the grid (nearest) at the clients' mean bit-width, rounded down."""
        payload = self._encode(self.server["weights"], sum(self.budgets) // len(self.budgets))
        self.layout.write(self.network, self.codec.decode(payload, sender="server"))
        return self.network

    def full_precision(self) -> nn.Module:
        return self.codec.full_precision(self.network, self.server["weights"])

    def _encode(self, vector: Tensor, bits: int, noise: np.random.Generator | None = None) -> Payload:
        return self.codec.encode(vector, [bits] * len(self.codec.names), noise)
