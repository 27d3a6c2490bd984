"""AdaLoRA, the layer's half: P diag(lambda) Q, a mask of directions, importance scores, a budget's
schedule.

    h = W x + (alpha / r) P diag(lambda * mask) Q x,    P [out, r],  lambda [r],  Q [r, in]

Source: Zhang et al. 2023, arXiv 2303.10512. The names of tensors are those of peft: ``lora_A`` is
Q, ``lora_E`` is lambda and ``lora_B`` is P. The server keeps the global budget: it averages the
scores of clients, asks :func:`budget_at` how many directions all layers may have together,
:func:`choose_masks` which ones, and broadcasts the masks. A mask is no part of what is averaged or
saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_lightning.errors import InputError, MisuseError, require
from fl_lightning.models.adapters.layer import AdaptedLinear, adapter_layers

FACTOR_STD = 0.02
SMOOTHING = 0.85
PARTS = ("lora_A", "lora_E", "lora_B")
"""Names of Q, lambda and P."""


class AdaLoRALinear(AdaptedLinear):
    """A frozen linear layer with directions that can be masked. P and Q are normal, lambda is zero.

    Args:
        base: the linear layer; this class freezes it.
        rank: r, directions at the start, at least 1.
        alpha: the adapter's factor is alpha / r.
    """

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__(base)
        new = base.weight.new_zeros
        self.lora_A = nn.Parameter(new(rank, base.in_features).normal_(std=FACTOR_STD))
        self.lora_E = nn.Parameter(new(rank, 1))
        self.lora_B = nn.Parameter(new(base.out_features, rank).normal_(std=FACTOR_STD))
        self.scaling = alpha / rank
        self.mask: Tensor
        self.register_buffer("mask", torch.ones_like(self.lora_E), persistent=False)

    def set_mask(self, mask: Tensor) -> None:
        """Keep some directions; the others add nothing and have no gradient until they are kept
        again.

        Args:
            mask: bool ``[r]``, true for a direction that is kept.

        Raises:
            MisuseError: it has another shape or type.
        """
        if mask.shape != self.mask.shape[:1] or mask.dtype != torch.bool:
            raise MisuseError(
                f"a mask {mask.dtype} of shape {tuple(mask.shape)}",
                f"a mask is bool of shape ({len(self.mask)},)",
                "take what choose_masks returns for this layer",
            )
        self.mask.copy_(mask[:, None])

    def _inner(self) -> Tensor:
        return self.lora_A * (self.lora_E * self.mask * self.scaling)

    def added(self, x: Tensor) -> Tensor:
        """Return (alpha / r) P diag(lambda * mask) Q x, ``[..., out]``, of inputs ``[..., in]``."""
        return F.linear(F.linear(x, self._inner()), self.lora_B)

    def product(self) -> Tensor:
        """Return (alpha / r) P diag(lambda * mask) Q, ``[out, in]``."""
        return self.lora_B @ self._inner()

    def low_rank(self) -> tuple[Tensor, Tensor, float]:
        return self.lora_A * (self.lora_E * self.mask), self.lora_B, self.scaling


def adalora_layers(network: nn.Module) -> dict[str, AdaLoRALinear]:
    """Return the layers with AdaLoRA by name, in the order of the network."""
    layers = adapter_layers(network).items()
    return {name: layer for name, layer in layers if isinstance(layer, AdaLoRALinear)}


def factor_names(names: Iterable[str]) -> dict[str, tuple[str, str, str]]:
    """Return the names of Q ``[r, in]``, lambda ``[r, 1]`` and P ``[out, r]`` of each layer with
    AdaLoRA, by the layer's name, in the order in which they are given. They are found by their
    names, peft's too.

    Args:
        names: of parameters.

    >>> factor_names(["up.bias", "up.lora_A.default", "up.lora_E.default", "up.lora_B.default"])
    {'up': ('up.lora_A.default', 'up.lora_E.default', 'up.lora_B.default')}
    """
    found = {}
    for name in names:
        layer, scales, rest = name.rpartition("lora_E")
        if scales:
            found[layer[:-1]] = (f"{layer}lora_A{rest}", name, f"{layer}lora_B{rest}")
    return found


def _factors(network: nn.Module) -> dict[str, dict[str, nn.Parameter]]:
    """Return the trained parameters lora_A, lora_E and lora_B of each layer, by its name."""
    parameters = dict(network.named_parameters())
    return {
        layer: {part: parameters[name] for part, name in zip(PARTS, names, strict=True)}
        for layer, names in factor_names(parameters).items()
    }


def orthogonality(network: nn.Module) -> Tensor:
    """Return the regulariser that keeps directions apart, the sum over layers of
    ``|P^T P - I|^2 + |Q Q^T - I|^2`` in Frobenius' norm, a scalar.

    Raises:
        InputError: the network has no layer with AdaLoRA.
    """
    layers = _factors(network).values()
    require(
        layers,
        f"{type(network).__name__} without AdaLoRA",
        "the regulariser is one of its factors P and Q",
        "write adapter adalora",
    )
    terms = []
    for factor in layers:
        q, p = factor["lora_A"], factor["lora_B"]
        eye = torch.eye(len(q), device=q.device, dtype=q.dtype)
        terms.append((p.mT @ p - eye).square().sum())
        terms.append((q @ q.mT - eye).square().sum())
    return torch.stack(terms).sum()


class Importance:
    """The smoothed importance of each direction of each layer in Zhang et al. (2023).

    For a weight w with gradient g the sensitivity is I = |w g|; M is its mean, U its uncertainty:

        M <- b1 M + (1 - b1) I
        U <- b2 U + (1 - b2) |I - M|

    The score of a weight is M U; that of direction i is the score of lambda_i, plus the mean score
    of column i of P, plus the mean score of row i of Q.

    Args:
        beta1, beta2: b1 and b2, above 0 and below 1.
    """

    def __init__(self, beta1: float = SMOOTHING, beta2: float = SMOOTHING) -> None:
        require(
            0 < beta1 < 1 and 0 < beta2 < 1,
            f"beta1={beta1}, beta2={beta2}",
            "the factors of the smoothing are above 0 and below 1",
            f"write {SMOOTHING}",
        )
        self.beta1, self.beta2 = beta1, beta2
        self._moments: dict[tuple[str, str], tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def update(self, network: nn.Module) -> None:
        """Take in the gradients of one step; call it after the backward pass. Nothing is taken of a
        step with a gradient that is not finite, which a scaler of half precision leaves out.

        Raises:
            MisuseError: a factor has no gradient.
        """
        found: dict[tuple[str, str], tuple[Tensor, Tensor]] = {}
        for name, factor in _factors(network).items():
            for part, weight in factor.items():
                if weight.grad is None:
                    raise MisuseError(
                        f"{name}.{part} without a gradient",
                        "importance is that of a weight times its gradient",
                        "call update after backward and before zero_grad",
                    )
                found[name, part] = weight, weight.grad
        # a tensor, so that nothing waits for the device
        counts = torch.stack([grad.isfinite().all() for _, grad in found.values()]).all()
        for place, (value, grad) in found.items():
            sensitivity = (value * grad).abs()
            zero = torch.zeros_like(sensitivity)
            before = self._moments.get(place, (zero, zero))
            mean = self.beta1 * before[0] + (1 - self.beta1) * sensitivity
            spread = self.beta2 * before[1] + (1 - self.beta2) * (sensitivity - mean).abs()
            self._moments[place] = mean.where(counts, before[0]), spread.where(counts, before[1])

    def scores(self) -> dict[str, Tensor]:
        """Return the score of each direction by the layer's name, ``[r]``."""
        entry = {key: mean * spread for key, (mean, spread) in self._moments.items()}
        layers = dict.fromkeys(name for name, _ in entry)
        return {
            name: entry[name, "lora_E"][:, 0]
            + entry[name, "lora_B"].mean(0)
            + entry[name, "lora_A"].mean(1)
            for name in layers
        }


def budget_at(step: int, start: int, end: int, warmup: int, cooldown: int, total: int) -> int:
    """Return how many directions all layers may have together at a step, as in
    Zhang et al. (2023).

    The budget is ``start`` during the warm-up, falls as a cubic, and is ``end`` in the last steps.

    Args:
        step: the step, from 0; or the round, with all others counted in rounds too.
        start, end: directions of all layers together, at first and in the end.
        warmup: steps before the fall.
        cooldown: steps after it.
        total: steps of the whole training.

    Raises:
        InputError: the fall has no step, or the budget is to rise or is negative.

    >>> [budget_at(step, start=80, end=16, warmup=2, cooldown=2, total=12) for step in (0, 2, 6, 10, 12)]
    [80, 80, 24, 16, 16]
    """
    require(
        warmup >= 0 and cooldown >= 0 and warmup + cooldown < total,
        f"warmup={warmup} and cooldown={cooldown} of total={total} steps",
        "some steps are between the warm-up and the end, in which the budget falls",
        "write more steps, or a shorter warm-up",
    )
    require(
        0 <= end <= start,
        f"a budget from {start} to {end} directions",
        "it falls, and is not negative",
        "write an end of at most the start",
    )
    left = 1 - (step - warmup) / (total - cooldown - warmup)
    return int((start - end) * min(max(left, 0.0), 1.0) ** 3 + end)


def choose_masks(scores: Mapping[str, Tensor], budget: int) -> dict[str, Tensor]:
    """Return the mask of each layer, bool ``[r]``: the ``budget`` directions with the largest
    scores over all layers are kept. Of equal scores the earlier one is kept.

    Args:
        scores: of each direction by the layer's name, ``[r]``; of several clients, their mean.
        budget: number of directions that are kept; all, if there are fewer.

    Raises:
        InputError: the budget is negative, or there are no scores.

    >>> choose_masks({"a": torch.tensor([1.0, 5.0]), "b": torch.tensor([3.0, 0.5])}, budget=2)
    {'a': tensor([False,  True]), 'b': tensor([ True, False])}
    """
    if budget < 0 or not scores:
        raise InputError(
            f"a budget of {budget} directions for {len(scores)} layers",
            "masks keep 0 directions or more of one layer or more",
            "write a budget of at least 0, and a network with adapter adalora",
        )
    everything = torch.cat([score.flatten() for score in scores.values()])
    kept = torch.zeros(len(everything), dtype=torch.bool, device=everything.device)
    kept[everything.argsort(descending=True, stable=True)[:budget]] = True
    pieces = kept.split([score.numel() for score in scores.values()])
    return dict(zip(scores, pieces, strict=True))
