"""PQ-LoRA layers: adapters that have one shape in networks of any width and depth.

Source: Seo et al. 2025, arXiv 2506.11024.

    h = W x + scale * [ (1 - g) * B(P A x + Q) + g * B(Pg A x + Qg) ]

W and the projections A, B are frozen (the rows of A and the columns of B are orthonormal). P [r, r]
and Q [r] are the client's own and start at zero. Pg and Qg are its copy of the mixture that the
server made for it. The gate g, a number or a sigmoid of x, weighs the global adapter against the
own one. Only P, Q, Pg and Qg are sent: if all clients have one rank and one number of blocks, these
tensors have one shape for all clients.

``L`` layers of a network, ``r`` rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_lightning.errors import InputError

Gate = Literal["scalar", "input"]
INITIAL_GATE = 0.5


class PQLoRALinear(nn.Module):
    """A frozen linear layer with an adapter, whose A and B are drawn from torch's current
    generator.

    Args:
        base: the linear layer; this class freezes it.
        rank: r, at most the smaller side of the layer.
        scale: factor of the adapter.
        gate: g as one trained number (``scalar``), or as a trained sigmoid of the layer's input
            (``input``).
        full_gradient: whether P and Q get their gradient without the factor (1 - g), so that they
            learn even if the gate prefers the global copy; g and x get the exact derivative. False:
            all get the exact derivative.
    """

    A: Tensor
    B: Tensor
    global_P: Tensor
    global_Q: Tensor

    def __init__(
        self,
        base: nn.Linear,
        rank: int,
        scale: float = 1.0,
        gate: Gate = "scalar",
        full_gradient: bool = True,
    ) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.scale, self.full_gradient = scale, full_gradient
        like = base.weight
        self.register_buffer("A", orthonormal(base.in_features, rank).T.contiguous().to(like))
        self.register_buffer("B", orthonormal(base.out_features, rank).to(like))
        self.P, self.Q = (
            nn.Parameter(like.new_zeros(rank, rank)),
            nn.Parameter(like.new_zeros(rank)),
        )
        self.register_buffer("global_P", like.new_zeros(rank, rank))
        self.register_buffer("global_Q", like.new_zeros(rank))
        self.gate = (
            nn.Parameter(like.new_tensor(INITIAL_GATE)) if gate == "scalar" else _input_gate(base)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map inputs ``[..., in]`` to outputs ``[..., out]``."""
        low = F.linear(x, self.A)
        g = self.gate if isinstance(self.gate, Tensor) else self.gate(x).sigmoid()
        mixed = (1 - g) * self._own(low) + g * F.linear(low, self.global_P, self.global_Q)
        if self.full_gradient:
            own = F.linear(low.detach(), self.P, self.Q)
            # zero, with the derivative of B(P A x + Q) in P and Q
            mixed = mixed + (own - own.detach())
        return self.base(x) + self.scale * F.linear(mixed, self.B)

    def _own(self, low: Tensor) -> Tensor:
        if self.full_gradient:
            return F.linear(low, self.P.detach(), self.Q.detach())
        return F.linear(low, self.P, self.Q)


def _input_gate(base: nn.Linear) -> nn.Linear:
    gate = nn.Linear(base.in_features, 1).to(base.weight)
    nn.init.zeros_(gate.weight)
    nn.init.zeros_(gate.bias)  # sigmoid(0) = INITIAL_GATE
    return gate


def orthonormal(size: int, rank: int) -> Tensor:
    """Return a float64 matrix ``[size, rank]`` with orthonormal columns, from torch's current
    generator."""
    return torch.linalg.qr(torch.randn(size, rank, dtype=torch.float64))[0]


def attach(
    network: nn.Module,
    num_blocks: int,
    rank: int,
    scale: float = 1.0,
    gate: Gate = "scalar",
    full_gradient: bool = True,
) -> nn.Module:
    """Freeze the network and put an adapter on the last linear layer of each block.

    Args:
        network: the network; it is changed in place.
        num_blocks: number of adapted layers.
        rank: r of every adapter.
        scale: factor of the adapters.
        gate: kind of gate, see :class:`PQLoRALinear`.
        full_gradient: see :class:`PQLoRALinear`.

    Returns:
        The network; if it is itself a linear layer, the adapted layer in place of it.

    Raises:
        InputError: the network has fewer blocks, or a layer is narrower than the rank.
    """
    network.requires_grad_(False)
    for name in target_layers(network, num_blocks):
        layer = network.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        if rank > min(layer.in_features, layer.out_features):
            raise InputError(
                f"--model.rank {rank} on {name or 'a network'} of {layer.in_features} inputs and "
                f"{layer.out_features} outputs",
                "a rank is at most the smaller one",
                f"write --model.rank {min(layer.in_features, layer.out_features)}",
            )
        adapted = PQLoRALinear(layer, rank, scale, gate, full_gradient)
        if not name:
            return adapted
        network.set_submodule(name, adapted)
    return network


def target_layers(network: nn.Module, num_blocks: int) -> list[str]:
    """Return the name of the last linear layer of each of ``num_blocks`` blocks.

    The blocks are groups of the network's trunk of as equal size as possible. The trunk is the
    longest list of children that all hold a linear layer. A network without a trunk of that length
    is cut by its linear layers. Block i of a network corresponds to block i of a network of another
    depth.

    Raises:
        InputError: the network has fewer linear layers than blocks.

    >>> blocks = [nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)) for _ in range(6)]
    >>> target_layers(nn.Sequential(*blocks), 2)
    ['2.2', '5.2']
    """
    linear = [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]
    trunk: list[str] = []  # for each child of the trunk, its last linear layer
    for path, module in network.named_modules():
        if isinstance(module, (nn.Sequential, nn.ModuleList)):
            prefix = f"{path}." if path else ""
            inside = [
                [n for n in linear if f"{n}.".startswith(f"{prefix}{child}.")]
                for child, _ in module.named_children()
            ]
            if all(inside) and len(inside) > len(trunk):
                trunk = [names[-1] for names in inside]
    layers = trunk if len(trunk) >= num_blocks else linear
    if len(layers) < num_blocks:
        raise InputError(
            f"--model.num_blocks {num_blocks} for {type(network).__name__}, where {len(layers)} layers can "
            "be adapted",
            "each block needs a linear layer",
            f"write --model.num_blocks {max(len(layers), 1)}, or a deeper network such as residual_mlp",
        )
    return [layers[(i + 1) * len(layers) // num_blocks - 1] for i in range(num_blocks)]


def adapted_layers(network: nn.Module) -> list[PQLoRALinear]:
    """Return the adapted layers in the order of the blocks."""
    return [module for module in network.modules() if isinstance(module, PQLoRALinear)]


@torch.no_grad()
def align(network: nn.Module, to: nn.Module, inputs: Tensor) -> None:
    """Align A and B of every layer with its partner in ``to``, so that P means the same in both
    networks.

    Each layer solves two orthogonal Procrustes problems (Schönemann 1966): A is the matrix with
    orthonormal rows whose A x comes closest to the partner's on these inputs, and B the matrix with
    orthonormal columns whose B^T W x does.

    Args:
        network: network with adapters; it is changed in place.
        to: network with as many adapters.
        inputs: examples, ``[n, ...]``.
    """
    pairs = zip(
        adapted_layers(network),
        adapted_layers(to),
        _layer_inputs_and_outputs(network, inputs),
        _layer_inputs_and_outputs(to, inputs),
        strict=True,
    )
    for layer, partner, (x, h), (partner_x, partner_h) in pairs:
        layer.A.copy_(_procrustes(x, partner_x @ partner.A.T).T)
        layer.B.copy_(_procrustes(h, partner_h @ partner.B))


def _procrustes(features: Tensor, wanted: Tensor) -> Tensor:
    """Return the matrix with orthonormal columns that maps ``features`` closest to ``wanted``, both
    centred.

    Args:
        features: ``[n, d]``.
        wanted: ``[n, r]``.
    """
    left, _, right = torch.linalg.svd(
        (features - features.mean(0)).double().T @ (wanted - wanted.mean(0)).double(),
        full_matrices=False,
    )
    return (left @ right).to(features)


def _layer_inputs_and_outputs(network: nn.Module, inputs: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return the inputs ``[n, in]`` and base outputs ``[n, out]`` of every adapted layer."""
    seen: list[tuple[Tensor, Tensor]] = []
    hooks = [
        layer.register_forward_hook(
            lambda layer, args, out: seen.append((args[0].flatten(0, -2), out.flatten(0, -2)))
        )
        for layer in adapted_layers(network)
    ]
    training = network.training
    network.eval()(inputs)
    network.train(training)
    for hook in hooks:
        hook.remove()
    return seen


def read_adapters(layers: Iterable[PQLoRALinear]) -> Tensor:
    """Return a copy of P and Q of all layers, ``[L, r, r + 1]``, with Q in the last column."""
    return torch.stack(
        [torch.cat([layer.P, layer.Q.unsqueeze(1)], dim=1) for layer in layers]
    ).detach()


@torch.no_grad()
def write_global(layers: Iterable[PQLoRALinear], adapters: Tensor) -> None:
    """Set Pg and Qg of all layers from ``[L, r, r + 1]``, with Qg in the last column."""
    for layer, adapter in zip(layers, adapters, strict=True):
        layer.global_P.copy_(adapter[:, :-1])
        layer.global_Q.copy_(adapter[:, -1])
