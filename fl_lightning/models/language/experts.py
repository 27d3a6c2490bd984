"""A network whose LoRA layers have experts beside the adapter that all clients share.

    h = W x + (alpha / r) (B_0 A_0 x + sum_s a_ts B_s A_s x)

A client trains few of a server's experts at a time; those are in the network's S *seats*. The
weights a_t of the seats at token t come from its embedding, which no expert changes:

    a_t = softmax over s of (log share_s + <router_s, e_t> / gamma)
    e_t = embedding / its root mean square

One seat has the weight 1. ``P`` are the values of one adapter over all layers, ``d`` features of a
token, ``T`` tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_lightning.errors import InputError
from fl_lightning.models.adapters.low_rank import (
    FactorNames,
    LowRankLayer,
    factor_pairs,
    low_rank_layers,
)

EPSILON = 1e-6


def factors_of(network: nn.Module) -> list[FactorNames]:
    """Return the factors of a network's adapters, ours or peft's, in its order.

    Raises:
        InputError: it has none, or trains something else than adapters.
    """
    found = factor_pairs(network)
    adapters = {name for each in found for name in (each.a, each.b)}
    others = [n for n, p in network.named_parameters() if p.requires_grad and n not in adapters]
    if not found or others:
        raise InputError(
            f"a network {type(network).__name__} that trains {others[0] if others else 'no adapter'}",
            "experts are LoRA adapters on a frozen network",
            "write network: llama_tiny, or hf:NAME, with a rank of 1 or more",
        )
    return found


class TokenGate(nn.Module):
    """The weights a_t of the seats at each token, from its embedding.

    Args:
        seats: S.
        width: d, features of an embedding.
        gamma: temperature, above 0; .inf: the weights are the shares at every token.
    """

    def __init__(self, seats: int, width: int, gamma: float) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.zeros(seats, width))
        self.gamma = gamma
        self.log_shares: Tensor
        self.register_buffer("log_shares", torch.zeros(seats), persistent=False)
        self.log_weights: Tensor | None = None
        """Logarithms of the seats' weights at each of the tokens that were embedded last, ``[B, T,
        S]``; None before the first."""

    def remember(self, embedding: nn.Module, arguments: Any, embedded: Tensor) -> None:
        """Compute the weights of tokens that are just embedded, ``[B, T, d]``: a forward hook."""
        tokens = embedded.detach().to(self.router.dtype)
        tokens = tokens * (tokens.square().mean(-1, keepdim=True) + EPSILON).rsqrt()
        score = self.log_shares + F.linear(tokens, self.router) / self.gamma
        self.log_weights = score.log_softmax(-1)


class ExpertLoRA(nn.Module):
    """An adapted layer with S seats for experts.

    Args:
        adapted: the layer with the adapter that all share.
        factors: base layer, A ``[r, in]``, B ``[out, r]`` and alpha / r of that adapter, from which
            the experts start.
        gate: of all layers of the network.
        shared: whether the shared adapter is part of the sum.
    """

    def __init__(
        self, adapted: nn.Module, factors: LowRankLayer, gate: TokenGate, shared: bool
    ) -> None:
        super().__init__()
        base, a, b, self.scaling, _ = factors
        seats = len(gate.router)
        self.shared, self.common = shared, adapted if shared else base
        self.expert_A = nn.Parameter(a.detach().repeat(seats, 1, 1), requires_grad=a.requires_grad)
        self.expert_B = nn.Parameter(b.detach().repeat(seats, 1, 1))
        self._gate = [gate]  # in a list: it is a module of the network and not of each layer

    def forward(self, x: Tensor, *arguments: Any, **named: Any) -> Tensor:
        """Map inputs ``[B, T, in]`` to outputs ``[B, T, out]``."""
        common = self.common(x, *arguments, **named)
        seats, rank, _ = self.expert_A.shape
        inner = F.linear(x.to(self.expert_A.dtype), self.expert_A.flatten(0, 1)) * self.scaling
        log_weights = self._gate[0].log_weights
        if seats > 1 and log_weights is not None:
            inner = (inner.unflatten(-1, (seats, rank)) * log_weights.exp().unsqueeze(-1)).flatten(
                -2
            )
        return common + F.linear(inner, self.expert_B.transpose(0, 1).flatten(1)).to(common.dtype)


class Seats:
    """The seats of a network, and the shared adapter, as vectors.

    Args:
        network: it has adapters, and gets seats in place.
        seats: S, at least 1.
        gamma: temperature of the token gate.
        shared: whether there is a shared adapter.
    """

    def __init__(self, network: nn.Module, seats: int, gamma: float, shared: bool) -> None:
        self.factors = factors_of(network)
        layers = low_rank_layers(network)
        embedding = _embedding_of(network)
        self.gate = TokenGate(seats, embedding.weight.shape[1], gamma)
        self.layers: list[ExpertLoRA] = []
        for name, parts in layers.items():
            layer = ExpertLoRA(network.get_submodule(name), parts, self.gate, shared)
            network.set_submodule(name, layer)
            self.layers.append(layer)
        network.add_module("expert_gate", self.gate)
        if seats > 1:
            embedding.register_forward_hook(self.gate.remember)
        self.shared = [(parts[1], parts[2]) for parts in layers.values()] if shared else []
        self.paths = [*layers]

    def tensors(self, seat: int) -> dict[str, Tensor]:
        """Return the factors of the expert in one seat as views, by the names of a plain
        adapter's."""
        pairs = ((layer.expert_A[seat], layer.expert_B[seat]) for layer in self.layers)
        return self._named(pairs)

    def shared_tensors(self) -> dict[str, Tensor]:
        """Return the factors of the shared adapter, by the names of a plain adapter's."""
        return self._named(self.shared)

    def _named(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        return {
            name: tensor
            for each, pair in zip(self.factors, pairs, strict=True)
            for name, tensor in zip((each.a, each.b), pair, strict=True)
        }

    def replacing(self, expert: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors to compute with in place of the network's own, by their names in it: one
        expert in the only seat.

        Args:
            expert: factors by the names of a plain adapter's; those that are missing are frozen.
        """
        found: dict[str, Tensor] = {}
        for path, each, layer in zip(self.paths, self.factors, self.layers, strict=True):
            for name, side in ((each.a, "expert_A"), (each.b, "expert_B")):
                own = getattr(layer, side).detach()[:1]
                found[f"{path}.{side}"] = expert[name].unsqueeze(0) if name in expert else own
        return found


def _embedding_of(network: nn.Module) -> nn.Embedding:
    found = [module for module in network.modules() if isinstance(module, nn.Embedding)]
    if not found:
        raise InputError(
            f"a network {type(network).__name__} without an embedding of tokens",
            "experts are chosen by it at each token",
            "write network: llama_tiny, or hf:NAME",
        )
    return found[0]
