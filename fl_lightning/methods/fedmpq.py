"""FedMPQ: mixed-precision quantised federated learning (Chen & Vikalo, CVPR 2024), on BSQ's bit planes (Yang
et al., ICLR 2021).

    L = L_task + lambda_b * L_bit,     L_bit = 1 / (sum n_l) * sum_l n_l N_l * sum_b || [p_b ; n_b] ||_2

n_l weights of layer l, N_l its magnitude bits. Clients train the planes of every quantised layer, prune
planes that hardly any weight sets, and send codes of N_l + 1 bits; the server averages the de-quantised
weights and deals out bits within each client's budget.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import hardtanh_

from fl_lightning.client import Client
from fl_lightning.data import FederatedData
from fl_lightning.errors import InputError
from fl_lightning.methods.averaging import weighted_mean
from fl_lightning.methods.base import examples_of
from fl_lightning.methods.quantized import QuantizedMethod, encode_layers
from fl_lightning.quantization import allocate_bits, average_bits, prune, quantize
from fl_lightning.quantization.allocation import MAX_BITS
from fl_lightning.quantization.planes import PLANE_MAX, Layer, reconstruct, to_planes, units, views
from fl_lightning.wire import Codes, Payload, PayloadError


class FedMPQ(QuantizedMethod):
    """Every client trains, sends and is sent its own mix of bit-widths.

    Args:
        bits: budget in magnitude bits per weight on average, 1 to 8; one number, or one for each client.
        lambda_b: weight of the bit regulariser; 0.01 in the paper, 0.001 in its later configurations,
            meaningful with this normalisation only. L_bit does not fall with s, so nothing but the task holds
            the weights up against it: layers before a normalisation, whose size the task does not feel,
            shrink for as long as it acts, the faster the larger lambda_b.
        prune_threshold: share of set digits at which a client drops a bit plane, in [0, 1); 0.02 in the
            paper.
        rounding: of uploads: ``stochastic`` (unbiased) or ``nearest``, which loses every update below half a
            step.
        plane_lr: ``matched`` scales the gradient of a layer's planes so that a step on them moves W about as
            far as a step of the same lr on W (half as far where a plane is clamped); ``raw`` leaves it, 2 s^2
            sum 4^b / (2^N - 1)^2 of that: with s = max |W| below 1 the lr of every layer shrinks with s^2.
        download: what the client is sent: W_t in ``full`` precision, or ``quantised`` at its own bit-widths.
        activation_bits: magnitude bits of the inputs of quantised layers, 1 to 8, or null for full precision.
        quantise_shortcuts: whether 1x1 convolutions on shortcuts are quantised too.
        settings: those of every method.
    """

    stackable = True
    same_start = True
    own_terms = frozenset({"bit"})
    module_optimizes = False  # it would step on weights that are made of the planes

    def __init__(
        self,
        bits: float | list[float] = 4,
        lambda_b: float = 0.001,
        prune_threshold: float = 0.02,
        rounding: Literal["stochastic", "nearest"] = "stochastic",
        plane_lr: Literal["matched", "raw"] = "matched",
        download: Literal["full", "quantised"] = "full",
        activation_bits: int | None = None,
        quantise_shortcuts: bool = True,
        **settings: Any,
    ) -> None:
        super().__init__(bits, download, activation_bits, quantise_shortcuts, **settings)
        if not 0 <= lambda_b < float("inf"):
            raise InputError(
                f"--model.lambda_b {lambda_b}",
                "a regulariser weighs 0 or more",
                "write --model.lambda_b 0.01",
            )
        if not 0 <= prune_threshold < 1:
            raise InputError(
                f"--model.prune_threshold {prune_threshold}",
                "it is a share in [0, 1)",
                "write --model.prune_threshold 0.02",
            )
        self.lambda_b = lambda_b
        self.prune_threshold = prune_threshold
        self.rounding = rounding
        self.plane_lr = plane_lr

    def build(self, data: FederatedData) -> None:
        super().build(data)
        self.layers = self.codec.names
        self.layer_shapes, self.layer_sizes = self.codec.shapes, self.codec.sizes
        deep = any(
            not weight.is_contiguous() for weight in self.codec.weights.values()
        )  # those of 1x1 are contiguous either way
        self.channels_last = [deep and weight.ndim == 4 for weight in self.codec.weights.values()]
        for weight in self.codec.weights.values():
            weight.requires_grad_(False)
        self.layer_bits: list[int] = []
        self.planes = nn.Parameter(torch.empty(0))
        self.register_buffer("scales", torch.zeros(len(self.layers)))
        start = torch.full((len(self.layers),), int(self.mean_budget()), dtype=torch.int32)
        self.server |= {
            "bits": start,
            "delta": torch.ones_like(start),
            "aggregated": torch.zeros(1, dtype=torch.int32),
        }

    # The client's half

    def receive(self, message: Payload, client: Client) -> None:
        weights = self.codec.decode(message, sender="server")
        self.layout.write(self.network, weights)
        self.layer_bits = message.codes("bits").values.tolist()
        tensors = self.layout.unpack(weights.to(self.device))
        layers = self._plane_layers()
        planes = torch.empty(sum(layer.length for layer in layers), dtype=torch.float32, device=self.device)
        scales = [
            to_planes(self._in_memory(at, tensors[name]), self.layer_bits[at], out=own)[1]
            for at, (name, own) in enumerate(zip(self.layers, views(planes, layers), strict=True))
        ]
        self.planes = nn.Parameter(planes)
        self.scales = torch.stack(scales)
        self.remember_received()

    def _in_memory(self, layer: int, weight: Tensor) -> Tensor:
        """Return the weight, flat, in the order that the network's own has in memory."""
        return (weight.permute(0, 2, 3, 1) if self.channels_last[layer] else weight).reshape(-1)

    def _as_weight(self, layer: int, flat: Tensor) -> Tensor:
        """Back again: a view in the layer's shape."""
        shape = self.layer_shapes[layer]
        if not self.channels_last[layer]:
            return flat.view(shape)
        return flat.view(shape[0], *shape[2:], shape[1]).permute(0, 3, 1, 2)

    def _plane_layers(self) -> list[Layer]:
        return [Layer(bits, size) for bits, size in zip(self.layer_bits, self.layer_sizes, strict=True)]

    def unrounded(self) -> dict[str, Tensor]:
        """Return what the planes hold before rounding, by parameter name."""
        layers = self._plane_layers()
        each = zip(layers, views(self.planes.detach(), layers), self.scales, strict=True)
        values = [units(planes) * (scale / (2**layer.bits - 1)) for layer, planes, scale in each]
        return {name: self._as_weight(layer, values[layer]) for layer, name in enumerate(self.layers)}

    def quantized_weights(self) -> tuple[dict[str, Tensor], Tensor]:
        """W_q of each layer by parameter name, and L_bit."""
        with torch.autocast(self.planes.device.type, enabled=False):
            weights, penalty = reconstruct(
                self.planes, self.scales, self._plane_layers(), self.plane_lr == "matched"
            )
        return {
            name: self._as_weight(layer, weights[layer]) for layer, name in enumerate(self.layers)
        }, penalty

    def training_step(self, batch: Any, batch_idx: int = 0) -> dict[str, Tensor]:
        """``loss = loss_task + loss_bit``; ``loss_bit`` is lambda_b * L_bit, as it enters."""
        weights, bit_norm = self.quantized_weights()
        task, student = self.task_and_logits(batch, batch_idx, weights)
        bit = self.lambda_b * bit_norm
        return self.with_terms({"loss": task + bit, "loss_task": task, "loss_bit": bit}, batch, student)

    def trained_weights(self) -> dict[str, Tensor]:
        """Return what the clients train, before rounding: its gradient is that of W_q by the identity."""
        quantized, before = self.quantized_weights()[0], self.unrounded()
        straight = {name: before[name].detach() + (w - w.detach()) for name, w in quantized.items()}
        return {**super().trained_weights(), **straight}

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        hardtanh_(self.planes, 0, PLANE_MAX)  # clamp_ has no batching rule

    def upload(self, client: Client) -> Payload:
        noise = self.stream("rounding", client) if self.rounding == "stochastic" else None
        layers = []
        unrounded, scales = self._on_cpu(self.unrounded()), self.scales.tolist()
        for values, bits, scale in zip(unrounded.values(), self.layer_bits, scales, strict=True):
            grown = max(scale, float(values.abs().max()))
            layers.append(prune(quantize(values, bits, grown, noise), self.prune_threshold))
        return Payload(
            {"examples": examples_of(client), **encode_layers(layers), "rest": self.rest.read(self.network)}
        )

    def upload_limits(self, client: Client) -> Mapping[str, int]:
        return {"examples": 1, **self.codec.limits()}

    def _on_cpu(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return all layers on the CPU in one transfer: one by one, each layer would wait for the device."""
        if self.device.type == "cpu":
            return tensors
        pieces = torch.cat([tensor.reshape(-1) for tensor in tensors.values()]).cpu().split(self.layer_sizes)
        return {
            name: piece.view(tensor.shape)
            for (name, tensor), piece in zip(tensors.items(), pieces, strict=True)
        }

    # The server's half

    def broadcast(self, client: Client) -> Payload:
        if self.download == "quantised":
            return super().broadcast(client)
        bits = torch.tensor(self.allocate(self.budget(client)))
        return Payload({"bits": Codes(bits, 4), "weights": self.server["weights"]})

    def check(self, upload: Payload, client: Client) -> None:
        super().check(upload, client)
        sent, given = upload.codes("bits").values.tolist(), self.allocate(self.budget(client))
        if any(n > most for n, most in zip(sent, given, strict=True)):
            raise PayloadError(
                f"bits {sent} where {given} were dealt out", "a client prunes and never adds", "send no more"
            )

    def aggregate(self, uploads: Mapping[int, Payload]) -> None:
        """W_{t+1} from the de-quantised uploads; b_l and Delta_l weighted by n_k * budget_k."""
        weights = self.shares(uploads.values())
        budgets = [self.budgets[id % len(self.budgets)] for id in uploads]
        by_budget = [w * b for w, b in zip(weights, budgets, strict=True)]
        by_budget = [w / sum(by_budget) for w in by_budget]
        sent = [upload.codes("bits").values for upload in uploads.values()]
        removed = [torch.tensor(self.allocate(b)) - n for b, n in zip(budgets, sent, strict=True)]
        self.server = {
            "weights": self.average(
                [self.decode(upload) for upload in uploads.values()], weights, self.server["weights"]
            ),
            "bits": weighted_mean(sent, by_budget).round().to(torch.int32).clamp(1, MAX_BITS),
            "delta": (1 + weighted_mean(removed, by_budget)).round().to(torch.int32).clamp_min(1),
            "aggregated": torch.ones(1, dtype=torch.int32),
        }

    def server_metrics(self) -> dict[str, float]:
        return {"bits/average": average_bits(self.layer_sizes, self.server["bits"].tolist())}

    def allocate(self, budget: float) -> list[int]:
        """Bits of each layer for a budget: uniform before the first aggregation, FedMPQ's rule afterwards."""
        if not self.server["aggregated"]:
            return [int(budget)] * len(self.layers)
        return allocate_bits(
            self.layer_sizes, self.server["bits"].tolist(), self.server["delta"].tolist(), budget
        )
