"""What FedMPQ and AQFL share: the quantised layers of a network, how they travel and what is
deployed."""

from __future__ import annotations

import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from fl_lightning.client import Client
from fl_lightning.config.constraints import within
from fl_lightning.data import FederatedData
from fl_lightning.errors import InputError, require
from fl_lightning.methods.base import Method
from fl_lightning.models.recipe import copied
from fl_lightning.quantization import Quantized, average_bits, dequantize_codes, quantize
from fl_lightning.quantization.activations import keep_activations, quantize_activations
from fl_lightning.quantization.allocation import MAX_BITS
from fl_lightning.wire import Codes, Layout, Limit, Payload, PayloadError

log = logging.getLogger("fl_lightning")


class QuantizedMethod(Method, ABC):
    """A method whose clients train and send quantised layers, within a budget of bits for each
    client.

    Args:
        bits: budget in magnitude bits per weight, 1 to 8; one number, or one for each client.
        download: what the client is sent: W_t in ``full`` precision, or ``quantised`` within its
            budget.
        activation_bits: magnitude bits of the inputs of quantised layers, 1 to 8, or null for full
            precision.
        quantise_shortcuts: whether layers inside modules whose names have ``shortcut`` or
            ``downsample`` in them, such as 1x1 convolutions, are quantised too.

    Raises:
        InputError: ``bits`` or ``activation_bits`` out of range, or a ``download`` that there is
            not.
    """

    shows = frozenset({"bit_widths"})
    codes_weights = True
    """Whether an upload codes all weights, so that no client may have a part of them."""

    def __init__(
        self,
        bits: float | list[float] = 4,
        download: Literal["full", "quantised"] = "full",
        activation_bits: Annotated[
            int | None, within(f"[1, {MAX_BITS}]", f"1 to {MAX_BITS} bits, or null", 4)
        ] = None,
        quantise_shortcuts: bool = True,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        self.budgets = check_budgets(bits)
        self.download = download
        self.activation_bits = activation_bits
        self.quantise_shortcuts = quantise_shortcuts

    def build(self, data: FederatedData) -> None:
        check_budgets(self.budgets, data.num_clients)
        super().build(data)
        self.codec = LayerCodec(self.network, self.layout, self.quantise_shortcuts)
        self.rest = self.codec.rest
        require(
            self.codec.names,
            f"--model {type(self).__name__} with a network of which no layer travels as codes",
            "convolutions in two dimensions, linear layers and embeddings do, unless they stay on a client",
            "write --model.personal head or norm, take another network, or --model FedAvg",
        )
        if whole := self.codec.unquantized_matrices(self.network):
            log.warning(
                "not quantised, and sent in full precision, are %s: quantised are convolutions in two "
                "dimensions, linear layers and embeddings",
                ", ".join(f"{name} {list(shape)}" for name, shape in whole.items()),
            )
        if self.activation_bits is not None:
            quantize_activations(self.network, self.codec.names, self.activation_bits)

    def budget(self, client: Client) -> float:
        """Return the client's budget in magnitude bits per weight."""
        return self.budgets[client.id % len(self.budgets)]

    def mean_budget(self) -> float:
        """Return the clients' mean budget in magnitude bits per weight."""
        return sum(self.budgets) / len(self.budgets)

    def summing_state(self) -> Mapping[str, Tensor]:
        # what a client started from enters no addend where it was sent something else
        # (compatibility)
        exact = self.download == "full"
        state = super().summing_state()
        return {name: tensor for name, tensor in state.items() if exact or name != "weights"}

    @abstractmethod
    def allocate(self, budget: float) -> list[int]:
        """Magnitude bits of each quantised layer for a budget in bits per weight."""

    def broadcast(self, client: Client) -> Payload:
        if self.download == "full":
            return super().broadcast(client)
        return self.quantized(self.allocate(self.budget(client)), self.server["weights"])

    def quantized(self, bits: Sequence[int], weights: Tensor) -> Payload:
        """Return ``weights``, ``[P]``, with layer l at ``bits[l]``, rounded to the nearest
        point."""
        return self.codec.encode(weights, bits)

    def server_metrics(self) -> dict[str, float]:
        """Return the magnitude bits of the deployed model: per weight on average, and of each
        layer."""
        bits = self.allocate(self.mean_budget())
        names = [name.removesuffix(".weight") for name in self.codec.names]
        return {
            **super().server_metrics(),
            "bits/average": average_bits(self.codec.sizes, bits),
            **{f"bits/layer/{name}": float(n) for name, n in zip(names, bits, strict=True)},
        }

    def decode(self, upload: Payload) -> Tensor:
        return self.codec.decode(upload, sender="a client")

    def deploy(self, client: Client | None = None) -> nn.Module:
        """W_t on the grid (nearest) at the bit-widths that the mean budget gives; what stays on a
        client, and what is fine-tuned there, is in full precision."""
        payload = self.quantized(self.allocate(self.mean_budget()), self.evaluated_weights)
        return self.deployed(self.codec.decode(payload, sender="server"), client)

    def full_precision(self) -> nn.Module:
        self.take_own(None)  # and not what stays on the client that was deployed last
        return self.codec.full_precision(self.network, self.evaluated_weights)


class LayerCodec:
    """Weights of convolutions, linear layers and embeddings as codes of N_l + 1 bits, everything
    else that travels in fp32.

    Args:
        network: of which the tensors in ``layout`` travel.
        layout: of a vector of weights.
        shortcuts: whether layers inside modules whose names have ``shortcut`` or ``downsample`` in
            them are quantised too.
    """

    def __init__(self, network: nn.Module, layout: Layout, shortcuts: bool = True) -> None:
        found, travels = quantized_layers(network, shortcuts), layout.shapes.keys()
        self.weights = {name: weight for name, weight in found.items() if name in travels}
        self.layout = layout
        self.rest = Layout.of(network, include=(travels - self.weights.keys()).__contains__)
        self.shapes = [layout.shapes[name] for name in self.names]
        self.sizes = [shape.numel() for shape in self.shapes]

    @property
    def names(self) -> list[str]:
        return list(self.weights)

    def unquantized_matrices(self, network: nn.Module) -> dict[str, torch.Size]:
        """Return the shapes of trained tensors of two or more dimensions that stay in full
        precision, such as the weight of a layer of another kind; without those that ``shortcuts``
        leaves out."""
        kept = quantized_layers(network, shortcuts=True).keys()
        return {
            name: parameter.shape
            for name, parameter in network.named_parameters()
            if name in self.layout.shapes
            and parameter.requires_grad
            and parameter.ndim > 1
            and name not in kept
        }

    def encode(
        self,
        vector: Tensor,
        bits: Sequence[int],
        noise: np.random.Generator | None = None,
        scales: Sequence[float] | None = None,
    ) -> Payload:
        """Return a vector of ``layout`` with layer l at ``bits[l]``, rounded stochastically with
        ``noise``, to the nearest without.

        Args:
            scales: s of each layer, above which weights saturate; None: max |W|.
        """
        tensors = self.layout.unpack(vector)
        each = zip(self.names, bits, scales or repeat(None), strict=False)
        layers = [quantize(tensors[name], n, scale, noise) for name, n, scale in each]
        return Payload({**encode_layers(layers), "rest": self.rest.pack(tensors)})

    def decode(self, payload: Payload, sender: str) -> Tensor:
        """Return the weights in a payload, de-quantised where they are codes, as one vector of
        ``layout``.

        Raises:
            PayloadError: an entry that is missing, or says other things than its codes.
        """
        if sender == "server" and "weights" in payload:
            return payload.tensor("weights")
        tensors = self.rest.unpack(payload.tensor("rest"))
        bits, scales = payload.codes("bits").values.tolist(), payload.tensor("scales").tolist()
        if any(scale < 0 for scale in scales):
            raise PayloadError(
                f"weights of {sender} with scales {scales}",
                "a scale is 0 or more",
                "encode them again",
            )
        if not all(1 <= n <= MAX_BITS for n in bits):
            raise PayloadError(
                f"weights of {sender} with bits {bits}",
                f"{len(self.names)} layers of 1 to {MAX_BITS}",
                "encode them again",
            )
        for layer, name in enumerate(self.names):
            codes, shape = payload.codes(f"w{layer}"), self.shapes[layer]
            if codes.bits != bits[layer] + 1:
                raise PayloadError(
                    f"codes of {sender} for {name}",
                    f"they have {bits[layer] + 1} bits",
                    "encode them again",
                )
            tensors[name] = dequantize_codes(codes.values, scales[layer], bits[layer]).view(shape)
        return self.layout.pack(tensors)

    def limits(self) -> dict[str, Limit]:
        """Return the shape of each entry of an encoded vector."""
        layers = (len(self.names),)
        each = {f"w{layer}": (size,) for layer, size in enumerate(self.sizes)}
        return {"bits": layers, "scales": layers, "rest": (self.rest.size,), **each}

    def full_precision(self, network: nn.Module, vector: Tensor) -> nn.Module:
        """Return a copy of ``network`` with these weights as they are, and activations that nobody
        quantises."""
        copy = copied(network)
        keep_activations(copy)
        self.layout.write(copy, vector)
        return copy


def quantized_layers(network: nn.Module, shortcuts: bool) -> dict[str, Tensor]:
    """Weights of convolutions, linear layers and embeddings by name, in the order of the network.

    Linear layers are also those of GPT-2, transformers' ``Conv1D``, whose weight is ``[in, out]``.
    A weight that two layers share is there once, by the name that ``named_parameters`` gives it.
    """
    found: dict[str, Tensor] = {}
    # imported, if the network has its layers
    transformers = sys.modules.get("transformers.pytorch_utils")
    kinds = (nn.Conv2d, nn.Linear, nn.Embedding, *([transformers.Conv1D] if transformers else []))
    for name, module in network.named_modules():
        on_shortcut = "shortcut" in name or "downsample" in name
        if (
            isinstance(module, kinds)
            and (shortcuts or not on_shortcut)
            and module.weight.requires_grad
            and not any(module.weight is weight for weight in found.values())
        ):
            found[f"{name}.weight" if name else "weight"] = module.weight
    return found


def encode_layers(layers: Sequence[Quantized]) -> dict[str, Tensor | Codes]:
    """Per layer N (4 bits), s (fp32) and codes of N + 1 bits, without padding between weights."""
    return {
        "bits": Codes(torch.tensor([layer.bits for layer in layers], dtype=torch.int32), 4),
        "scales": torch.tensor([layer.scale for layer in layers], dtype=torch.float32),
        **{f"w{index}": Codes(layer.codes(), layer.bits + 1) for index, layer in enumerate(layers)},
    }


def check_budgets(bits: float | Sequence[float], num_clients: int | None = None) -> list[float]:
    """Return the budgets in ``--model.bits``: one, or one for each client.

    Raises:
        InputError: a value out of range, or, once ``num_clients`` is known, a list of another
            length.
    """
    budgets = [bits] if isinstance(bits, (int, float)) else list(bits or [])
    numbers = all(isinstance(b, (int, float)) and not isinstance(b, bool) for b in budgets)
    if not budgets or not numbers or not all(1 <= b <= MAX_BITS for b in budgets):
        raise InputError(
            f"--model.bits {bits}",
            f"a budget is 1 to {MAX_BITS} bits per weight",
            "write --model.bits 4",
        )
    if num_clients is not None and len(budgets) not in (1, num_clients):
        raise InputError(
            f"--model.bits with {len(budgets)} budgets for {num_clients} clients",
            "one number, or one for each client",
            f"write --model.bits 4 or a list of {num_clients}",
        )
    return budgets
