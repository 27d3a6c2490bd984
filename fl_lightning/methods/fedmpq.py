"""FedMPQ: mixed-precision quantised federated learning (Chen & Vikalo, CVPR 2024), on BSQ's bit
planes (Yang et al., ICLR 2021).

    L = L_task + lambda_b * L_bit,     L_bit = 1 / (sum n_l) * sum_l n_l N_l * sum_b || p_b ||_2

n_l weights of layer l, N_l its magnitude bits, p_b its bit plane b. Clients train every quantised
layer through its grid, prune planes that hardly any weight sets, and send codes of N_l + 1 bits;
the server averages the de-quantised weights and deals out bits within each client's budget.

The grid of a layer, s_l / (2^N_l - 1), belongs to the server and travels down. s_l starts at max
|W_0|, is halved with every plane that clients dropped at the top on average, and doubles while
``GROWTH`` times the pruning threshold of the weights lie above it. A client that makes a few
weights large keeps its grid: read off max |W| again in each round, the grid follows outliers,
empties its own top plane, and clients prune whatever the regulariser weighs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from fl_lightning import rng
from fl_lightning.aggregation.server_optimizers import SQUARES
from fl_lightning.aggregation.sums import Addend, Sums
from fl_lightning.client import Client
from fl_lightning.config.constraints import within
from fl_lightning.data import FederatedData
from fl_lightning.errors import InputError, require
from fl_lightning.methods.quantized import QuantizedMethod, encode_layers
from fl_lightning.methods.supernet import narrower, narrower_loss
from fl_lightning.quantization import allocate_bits, quantize_and_prune
from fl_lightning.quantization.allocation import MAX_BITS
from fl_lightning.quantization.latent import Latent
from fl_lightning.quantization.layer import Grid, Layer, Representation
from fl_lightning.quantization.planes import Planes
from fl_lightning.quantization.uniform import SMALLEST_SCALE, nearest_scale
from fl_lightning.tasks import ClassRows
from fl_lightning.wire import Codes, Limit, Payload, PayloadError

GROWTH = 2.5
"""Share of a layer's weights above s, in units of the pruning threshold, at which s doubles. At 1 a
grid that has just grown has a top plane that clients prune again."""
LEAST_GROWTH = 1e-3
"""That share where the threshold is zero."""
BUDGET_UNITS = 2**16
"""Budgets weigh uploads as integers, in units of 1 / 2^16 bit."""


class FedMPQ(QuantizedMethod):
    """Every client trains, sends and is sent its own mix of bit-widths.

    In W, the gradient of L_bit is ``pull / c * n_l N_l / (sum n_l) * sign(W) sum_b 2^b p_b /
    ||p_b|| / sum_b 4^b``, c the step of the grid: behind the task's gradient as far as in the
    paper's own planes where pull is 1, as it is at the start. ``pull = min(1, (m / s_0)^2) s / m``,
    m the larger of s and max |W|: a layer that shrinks below what it started with, s_0, is pulled
    the less.

    Args:
        bits: budget in magnitude bits per weight on average, 1 to 8; one number, or one for each
            client.
        lambda_b: weight of the bit regulariser; 0.01 in the paper, 0.001 in its later
            configurations, meaningful with this normalisation only.
        prune_threshold: share of set digits at which a client drops a bit plane, in [0, 1); 0.02 in
            the paper.
        representation: what clients' optimisers step on: ``latent``, W itself, or ``planes``, two
            for each bit, as in the paper, 2 N numbers a weight; Adam moves W there by up to 2 s
            times its lr.
        rounding: of uploads: ``stochastic`` (unbiased), or ``nearest``: updates below half a step
            are lost.
        plane_lr: of ``planes``: ``matched`` divides their gradients, the task's and the
            regulariser's, by c^2 sum_b 4^b, so that a step of SGD on them moves W about as far as a
            step of the same lr on W; ``raw`` leaves them: with s = max |W| below 1 the lr of every
            layer shrinks with s^2.
        download: what the client is sent: W_t in ``full`` precision, or ``quantised`` at its own
            bit-widths.
        activation_bits: magnitude bits of the inputs of quantised layers, 1 to 8, or null for full
            precision.
        quantise_shortcuts: whether layers inside modules whose names have ``shortcut`` or
            ``downsample`` in them, such as 1x1 convolutions, are quantised too.
        supernet: whether each step also trains three narrower allocations, taught by the client's
            own, so that the one model serves every budget below; of FedMPQ with ``representation:
            latent`` alone.
    """

    kind = "quantised"
    stackable = True
    calls_server_optimizer = sums_over_any = True
    same_start = True
    own_terms = frozenset({"bit"})
    module_optimizes = False  # it would step on weights that are made of the variables
    refuses = {
        "privacy": "bit-widths travel beside weights, and noise for both leaves nothing of them"
    }

    def __init__(
        self,
        bits: float | list[float] = 4,
        lambda_b: Annotated[
            float, within("[0, inf)", "a regulariser weighs 0 or more", 0.01)
        ] = 0.01,
        prune_threshold: Annotated[float, within("[0, 1)", "it is a share in [0, 1)", 0.02)] = 0.02,
        representation: Literal["latent", "planes"] = "latent",
        rounding: Literal["stochastic", "nearest"] = "stochastic",
        plane_lr: Literal["matched", "raw"] = "matched",
        download: Literal["full", "quantised"] = "full",
        activation_bits: int | None = None,
        quantise_shortcuts: bool = True,
        supernet: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(bits, download, activation_bits, quantise_shortcuts, **settings)
        require(
            not supernet
            or (type(self).training_step is FedMPQ.training_step and representation == "latent"),
            f"--model.supernet true with --model {type(self).__name__} "
            f"--model.representation {representation}",
            "other allocations are other grids of the same weights, and the client's own is their teacher",
            "write --model FedMPQ --model.representation latent",
        )
        self.supernet = supernet
        self.stackable = type(self).stackable and not supernet  # allocations are drawn in Python
        self.lambda_b = lambda_b
        self.prune_threshold = prune_threshold
        self.rounding = rounding
        self.representation: Representation = (
            Latent() if representation == "latent" else Planes(plane_lr == "matched")
        )

    def build(self, data: FederatedData) -> None:
        super().build(data)
        require(
            not self.supernet or (self.module is None and self.task.has_classes),
            f"--model.supernet true with {'a module' if self.module else type(self.task).__name__}",
            "narrower allocations learn from logits of classes",
            "leave supernet out",
        )
        if any(p.dtype != torch.float32 for p in self.network.parameters() if p.requires_grad):
            raise InputError(
                f"--model {type(self).__name__} with a network that is not in float32",
                "it trains weights through a quantiser in float32",
                "take a float32 network, and --trainer.precision bf16-mixed for speed",
            )
        self.layers = self.codec.names
        self.layer_shapes, self.layer_sizes = self.codec.shapes, self.codec.sizes
        # those of 1x1 are contiguous either way
        deep = any(not weight.is_contiguous() for weight in self.codec.weights.values())
        self.permuted = [deep and weight.ndim == 4 for weight in self.codec.weights.values()]
        for weight in self.codec.weights.values():
            weight.requires_grad_(False)
        self.layer_bits: list[int] = []
        self.variables = nn.Parameter(torch.empty(0))
        self.register_buffer("scales", torch.zeros(len(self.layers)))
        self.register_buffer("pull", torch.ones(len(self.layers)))
        start = torch.full((len(self.layers),), int(self.mean_budget()), dtype=torch.int32)
        self.server |= {
            "bits": start,
            "delta": torch.ones_like(start),
            "aggregated": torch.zeros(1, dtype=torch.int32),
        }
        largest = self._largest(self.server["weights"])
        # a layer of zeros, such as a head that starts at zero, could never leave zero with s = 0
        scales = torch.where(largest > 0, largest, torch.tensor(self.layer_sizes).float().rsqrt())
        self.server |= {"grid": scales, "first_grid": scales.clone()}
        self.changes = BitChanges()

    # The client's half

    def receive(self, message: Payload, client: Client) -> None:
        weights = self.codec.decode(message, sender="server")
        self.layout.write(self.network, weights)
        self.layer_bits = message.codes("bits").values.tolist()
        tensors = self.layout.unpack(weights.to(self.device))
        self.scales, self.pull = (message.tensor(name).to(self.device) for name in ("grid", "pull"))
        flat = [self._in_memory(at, tensors[name]) for at, name in enumerate(self.layers)]
        self.variables = nn.Parameter(self.representation.variables(flat, self.grid))
        # narrower allocations are trained on the grids that they will be deployed on
        if self.supernet:
            pairs = zip(flat, self.layer_bits, strict=True)
            self.nearest = [
                [nearest_scale(each, n) for n in range(1, most + 1)] for each, most in pairs
            ]
        self.remember_received()

    @property
    def grid(self) -> Grid:
        """The grids that this client trains on."""
        layers = [
            Layer(bits, size) for bits, size in zip(self.layer_bits, self.layer_sizes, strict=True)
        ]
        return Grid(layers, self.scales, self.pull)

    def _in_memory(self, layer: int, weight: Tensor) -> Tensor:
        """Return the weight, flat, in the order that the network's own has in memory."""
        return (weight.permute(0, 2, 3, 1) if self.permuted[layer] else weight).reshape(-1)

    def _as_weight(self, layer: int, flat: Tensor) -> Tensor:
        """Back again: a view in the layer's shape."""
        shape = self.layer_shapes[layer]
        if not self.permuted[layer]:
            return flat.view(shape)
        return flat.view(shape[0], *shape[2:], shape[1]).permute(0, 3, 1, 2)

    def _by_name(self, values: Iterable[Tensor]) -> dict[str, Tensor]:
        """Return flat layers in the network's shapes, by parameter name."""
        pairs = zip(self.layers, values, strict=True)
        return {name: self._as_weight(layer, flat) for layer, (name, flat) in enumerate(pairs)}

    def unrounded(self) -> dict[str, Tensor]:
        """Return the weights of each layer before rounding, by parameter name."""
        return self._by_name(self.representation.unrounded(self.variables.detach(), self.grid))

    def quantized_weights(self) -> tuple[dict[str, Tensor], Tensor]:
        """W_q of each layer by parameter name, and L_bit."""
        with torch.autocast(self.variables.device.type, enabled=False):
            weights, penalty = self.representation.quantized(self.variables, self.grid)
        return self._by_name(weights), penalty

    def training_step(self, batch: Any, batch_idx: int = 0) -> dict[str, Tensor]:
        """``loss = loss_task + loss_bit``; ``loss_bit`` is lambda_b * L_bit, as it enters. Of a
        supernet also ``loss_narrow``, the sum over the narrower allocations of KL(own ||
        narrower)."""
        weights, bit_norm = self.quantized_weights()
        task, student = self.task_and_logits(batch, batch_idx, weights)
        bit = self.lambda_b * bit_norm
        losses = {"loss": task + bit, "loss_task": task, "loss_bit": bit}
        if self.supernet:
            narrow = self._narrower_loss(batch, batch_idx, student)
            losses |= {"loss": losses["loss"] + narrow, "loss_narrow": narrow}
        return self.with_terms(losses, batch, student)

    def _narrower_loss(self, batch: Any, batch_idx: int, own: Tensor | None) -> Tensor:
        """Return what a supernet adds to the loss of a step, given the logits of the client's own
        bits."""
        assert own is not None, "a module gives no logits"
        inputs, target = batch

        def rows_at(bits: Sequence[int]) -> ClassRows:
            layers = [Layer(n, size) for n, size in zip(bits, self.layer_sizes, strict=True)]
            scales = [known[n - 1] for known, n in zip(self.nearest, bits, strict=True)]
            grid = Grid(layers, self.scales.new_tensor(scales), self.pull)
            found, _ = self.representation.quantized(self.variables, grid)
            within = [each.clamp(-most, most) for each, most in zip(found, scales, strict=True)]
            return self.task.class_rows(self._logits(inputs, self._by_name(within)), target)

        noise = rng.stream(self.seed, f"allocations/{batch_idx}", self.round)
        return narrower_loss(
            self.task.class_rows(own, target), narrower(self.layer_bits, noise), rows_at
        )

    def trained_weights(self) -> dict[str, Tensor]:
        """Return what the clients train, before rounding: its gradient is that of W_q by the
        identity."""
        quantized, before = self.quantized_weights()[0], self.unrounded()
        straight = {name: before[name].detach() + (w - w.detach()) for name, w in quantized.items()}
        return {**super().trained_weights(), **straight}

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.representation.project(self.variables, self.grid)

    def upload(self, client: Client) -> Payload:
        noise = self.stream("rounding", client) if self.rounding == "stochastic" else None
        values = self._on_cpu(self.unrounded()).values()
        layers, tops = [], []
        for each, bits, scale in zip(values, self.layer_bits, self.scales.tolist(), strict=True):
            layer, top = quantize_and_prune(each, bits, scale, self.prune_threshold, noise)
            layers.append(layer)
            tops.append(top)
        return Payload(
            {
                "examples": self.examples_of(client),
                **encode_layers(layers),
                "tops": Codes(torch.tensor(tops, dtype=torch.int32), 4),
                "rest": self.rest.read(self.network),
            }
        )

    def upload_limits(self, client: Client) -> Mapping[str, Limit]:
        return {"examples": (), "tops": (len(self.layers),), **self.codec.limits()}

    def _on_cpu(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return all layers on the CPU in one transfer: one by one, each layer would wait for the
        device."""
        if self.device.type == "cpu":
            return tensors
        pieces = (
            torch.cat([tensor.reshape(-1) for tensor in tensors.values()])
            .cpu()
            .split(self.layer_sizes)
        )
        return {
            name: piece.view(tensor.shape)
            for (name, tensor), piece in zip(tensors.items(), pieces, strict=True)
        }

    # The server's half

    def broadcast(self, client: Client) -> Payload:
        largest = torch.maximum(self.server["grid"], self._largest(self.server["weights"]))
        shrunk = (largest / self.server["first_grid"]).square().clamp(max=1)
        grid = {"grid": self.server["grid"], "pull": shrunk * self.server["grid"] / largest}
        if self.download == "quantised":
            return Payload({**super().broadcast(client), **grid})
        bits = torch.tensor(self.allocate(self.budget(client)))
        return Payload({"bits": Codes(bits, 4), **grid, "weights": self.server["weights"]})

    def _largest(self, vector: Tensor) -> Tensor:
        """Return max |W| of each quantised layer, ``[L]``."""
        tensors = self.layout.unpack(vector)
        return torch.stack([tensors[name].abs().max() for name in self.layers])

    def check(self, upload: Payload, client: Client) -> None:
        super().check(upload, client)
        sent, given = upload.codes("bits").values.tolist(), self.allocate(self.budget(client))
        if any(n > most for n, most in zip(sent, given, strict=True)):
            raise PayloadError(
                f"bits {sent} where {given} were dealt out",
                "a client prunes and never adds",
                "send no more",
            )
        tops = upload.codes("tops").values.tolist()
        if any(top > most - n for top, n, most in zip(tops, sent, given, strict=True)):
            raise PayloadError(
                f"tops {tops} with bits {sent} where {given} were dealt out",
                "it counts the bits of each layer that were dropped at the top",
                "count no more",
            )

    def beside_upload(self, client_id: int) -> Mapping[str, Tensor | Codes]:
        budget = self.budgets[client_id % len(self.budgets)]
        return {"given": Codes(torch.tensor(self.allocate(budget), dtype=torch.int32), 4)}

    def addends(self, upload: Payload, client_id: int, weight: int) -> dict[str, Addend]:
        """Return what an upload adds: weights with n_k; bits and planes removed, with n_k times the
        client's budget; and planes removed once more, to be counted."""
        budget = self.budgets[client_id % len(self.budgets)]
        sent = upload.codes("bits").values
        removed = torch.tensor(self.allocate(budget)) - sent
        by_budget = (
            weight * self._budget_units(client_id),
            self.largest_weight * MAX_BITS * BUDGET_UNITS,
        )
        return {
            **super().addends(upload, client_id, weight),
            "bits": Addend(sent, *by_budget),
            "removed": Addend(removed, *by_budget),
            "tops": Addend(upload.codes("tops").values, *by_budget),
            "planes": Addend(removed),
        }

    def weight_bounds(self, name: str, most: int, client_id: int, examples: int) -> tuple[int, int]:
        if name in ("weights", SQUARES):
            return super().weight_bounds(name, most, client_id, examples)
        units = 1 if name == "planes" else self._budget_units(client_id)
        return units, units if name == "planes" else examples * units

    def largest_value(self, name: str) -> float:
        return super().largest_value(name) if name in ("weights", SQUARES) else float(MAX_BITS)

    def _budget_units(self, client_id: int) -> int:
        return round(self.budgets[client_id % len(self.budgets)] * BUDGET_UNITS)

    def next_state(self, sums: Sums) -> None:
        """W_{t+1} from the de-quantised uploads; b_l and Delta_l weighted by n_k * budget_k."""
        deployed = self.allocate(self.mean_budget())
        weights = self.next_weights(sums)
        self.server |= {
            "weights": weights,
            "bits": sums.mean("bits").round().to(torch.int32).clamp(1, MAX_BITS),
            "delta": (1 + sums.mean("removed")).round().to(torch.int32).clamp_min(1),
            "aggregated": torch.ones(1, dtype=torch.int32),
            "grid": self._next_grid(weights, sums.mean("tops")),
        }
        pairs = zip(deployed, self.allocate(self.mean_budget()), strict=True)
        self.changes = BitChanges(
            self.round,
            pruned=int(sums.total("planes").sum()),
            moved=sum(before != after for before, after in pairs),
        )

    def _next_grid(self, vector: Tensor, tops: Tensor) -> Tensor:
        """Return s of each layer ``[L]``: half for each plane that was dropped at the top on
        average, twice while too many weights lie above it."""
        tensors, scales = self.layout.unpack(vector), []
        share = max(GROWTH * self.prune_threshold, LEAST_GROWTH)
        for name, scale, top in zip(
            self.layers, self.server["grid"].tolist(), tops.tolist(), strict=True
        ):
            sizes = tensors[name].abs().flatten()
            rank = min(math.ceil(share * len(sizes)), len(sizes))
            edge = float(sizes.topk(rank).values[-1])
            planes = min(max(round(top), 0), MAX_BITS)
            scale = max(scale * 2.0**-planes, SMALLEST_SCALE)
            while scale < edge:  # so many weights lie above it
                scale *= 2
            scales.append(scale)
        return torch.tensor(scales, dtype=torch.float32)

    def server_metrics(self) -> dict[str, float]:
        kept = self.changes.round == self.round and self.served
        changes = self.changes if kept else BitChanges()
        return {
            **super().server_metrics(),
            "bits/pruned": float(changes.pruned),
            "bits/moved": float(changes.moved),
        }

    def quantized(self, bits: Sequence[int], weights: Tensor) -> Payload:
        """Return ``weights``, ``[P]``, with layer l at ``bits[l]``, on the grid of these bits that
        is nearest to it."""
        tensors = self.layout.unpack(weights)
        scales = [
            nearest_scale(tensors[name], n) for name, n in zip(self.layers, bits, strict=True)
        ]
        return self.codec.encode(weights, bits, scales=scales)

    def deploy_at(self, budget: float) -> nn.Module:
        """Return W_t on the grid at the bit-widths of another budget, in magnitude bits per weight:
        what a supernet is trained for."""
        payload = self.quantized(self.allocate(budget), self.evaluated_weights)
        return self.deployed(self.codec.decode(payload, sender="server"), None)

    def allocate(self, budget: float) -> list[int]:
        """Bits of each layer for a budget: uniform before the first aggregation, FedMPQ's rule
        afterwards."""
        if not self.server["aggregated"]:
            return [int(budget)] * len(self.layers)
        return allocate_bits(
            self.layer_sizes, self.server["bits"].tolist(), self.server["delta"].tolist(), budget
        )


@dataclass(frozen=True, slots=True)
class BitChanges:
    """What a round did to the bits.

    Args:
        round: the round.
        pruned: planes that clients removed, summed over clients and layers.
        moved: layers whose width in the deployed model the server changed.
    """

    round: int = 0
    pruned: int = 0
    moved: int = 0
