"""Who learns what I learn: similarity of clients from sketches of a gradient (Seo et al. 2025,
arXiv 2506.11024).

    e <- ema * grad + (1 - ema) * e       the last layer of a small model that all clients have
                                          and nobody trains
    sketch = (e + N(0, sigma^2))[kept]    the only part that travels
    w_ij = softmax_j(cos(sketch_i, sketch_j) / tau)

``K`` clients, ``M`` of them, ``C`` classes, ``D`` inputs of the last layer.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from fl_lightning.errors import InputError

EPSILON = 1e-9  # in the denominator of the cosine


def last_linear(network: nn.Module) -> str:
    """Name of the last linear layer's weight.

    Raises:
        ValueError: there is none.
    """
    names = [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]
    if not names:
        raise InputError(
            f"--model.reference {type(network).__name__}",
            "its last layer is linear",
            "write --model.reference small_cnn",
        )
    return f"{names[-1]}.weight" if names[-1] else "weight"


def gradient_of(
    model: nn.Module,
    name: str,
    loss: Callable[[Tensor, Tensor], Tensor],
    inputs: Tensor,
    target: Tensor,
) -> Tensor:
    """Gradient of ``loss(model(inputs), target)`` in the parameter ``name``; the model stays as it
    is."""
    weight = model.get_parameter(name).detach().requires_grad_()
    with torch.enable_grad():
        value = loss(functional_call(model, {name: weight}, (inputs,)), target)
    return torch.autograd.grad(value, weight)[0]


def update_ema(before: Tensor, value: Tensor, rate: float) -> Tensor:
    """``rate * value + (1 - rate) * before``. Starting at zero only scales it, which the cosine
    does not see."""
    return rate * value + (1 - rate) * before


def kept_rows(classes: int, features: int, share: float, rng: np.random.Generator) -> Tensor:
    """Flat positions in a gradient ``[C, D]`` of a random share of its D feature rows, all classes
    of each; int64, increasing.

    Rows of features, not of classes: clients whose classes were left out could not be told apart.
    """
    rows = np.sort(rng.choice(features, size=max(1, round(share * features)), replace=False))
    return torch.from_numpy((np.arange(classes)[:, None] * features + rows).reshape(-1))


def sketch(gradient: Tensor, noise: Tensor, kept: Tensor) -> Tensor:
    """Return the noisy values at the flat positions ``kept``."""
    return (gradient + noise).flatten()[kept]


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Return the cosine of each row of ``a`` ``[M, D]`` with each of ``b`` ``[K, D]``, in float64
    ``[M, K]``; 0 where a row is zero."""
    a, b = a.double(), b.double()
    return a @ b.T / (torch.outer(a.norm(dim=1), b.norm(dim=1)) + EPSILON)


def relevance_weights(relevance: Tensor, tau: float, exclude: Tensor | None = None) -> Tensor:
    """Return the softmax over the last dimension of ``relevance / tau`` ``[M, K]``, without what
    ``exclude`` marks; rows with nothing left are 0.

    >>> exclude = torch.tensor([[True, False, False]])
    >>> relevance_weights(torch.tensor([[1.0, 0.5, 0.5]]), tau=float("inf"), exclude=exclude)
    tensor([[0.0000, 0.5000, 0.5000]])
    """
    logits = relevance / tau
    if exclude is not None:
        logits = logits.masked_fill(exclude, -torch.inf)
    return logits.softmax(dim=-1).nan_to_num(0.0)


def mix(weights: Tensor, adapters: Tensor) -> Tensor:
    """sum_j w_ij a_j of ``weights`` ``[M, K]`` and ``adapters`` ``[K, ...]``, in float64 and in the
    order given; ``[M, ...]``."""
    total = torch.zeros(len(weights), *adapters.shape[1:], dtype=torch.float64)
    for weight, adapter in zip(weights.double().unbind(dim=1), adapters.double(), strict=True):
        total += weight.view(-1, *[1] * adapter.ndim) * adapter
    return total.to(adapters.dtype)
