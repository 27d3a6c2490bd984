"""An adapted linear layer with three options for each token: off, int8 and high.

| option | computes |
|---|---|
| off | the base without the adapter (scope adapter), or nothing: zeros (scope model) |
| int8 | W + dW and the inputs in int8, see :mod:`fl_lightning.energy.switched.integers` |
| high | the adapted layer, in the network's precision or in bfloat16 |

In scope model a residual branch whose last linear layer is off is skipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_lightning.energy.options import HIGH, INT8, OFF, OPTIONS, HighPrecision, Scope
from fl_lightning.energy.switched.integers import Int8Rows, integer_linear, quantised_rows
from fl_lightning.energy.switched.plan import Switchboard
from fl_lightning.errors import MisuseError
from fl_lightning.models.adapters import AdaptedLinear
from fl_lightning.models.tensors import under_autocast


class SwitchedLinear(nn.Module):
    """An adapted layer that computes, for each token, the option that the network's plan names.

    Args:
        adapted: the adapted layer, ours or peft's.
        name: its name in the network, as ``layers.0.self_attn.qkv_proj``.
        group: its index g among the switched layers.
        board: where the plan is.
        scope: what off means, see above.
        high: precision of the option high; ``float32`` is that of the network.
    """

    def __init__(
        self,
        adapted: Any,
        name: str,
        group: int,
        board: Switchboard,
        scope: Scope = "adapter",
        high: HighPrecision = "float32",
    ) -> None:
        super().__init__()
        self.adapted = adapted
        self.name, self.group, self.board, self.scope, self.high = name, group, board, scope, high
        self.available = (True, True, True)
        """Which options may be computed, in the order of ``OPTIONS``."""
        self._keep = False
        self._kept: dict[int, tuple[LayerState, Any]] = {}

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of inputs and outputs."""
        return self.adapted.base_layer.in_features, self.adapted.base_layer.out_features

    def forward(self, x: Tensor) -> Tensor:
        """Map inputs ``[B, T, in]`` to outputs ``[B, T, out]``.

        Without a plan it is the adapted layer bit for bit. With weights all available options are
        computed and added up; the gradient of int8 and bfloat16 is that of the adapted layer in
        full precision. With choices each option computes its own tokens, and what it computes
        narrowly carries no gradient.

        Raises:
            MisuseError: the plan is for other tokens, or names an option that is not available.
        """
        plan = self.board.plan
        if plan is None:
            return self.adapted(x)
        if x.shape[:-1] != plan.shape[:2]:
            raise MisuseError(
                f"{self.name} on tokens of shape {tuple(x.shape[:-1])}",
                f"the plan is for tokens of shape {tuple(plan.shape[:2])}",
                "set board.plan before each step, or to None",
            )
        weights = plan.weights_at(self.group, x)
        if weights is not None:
            return self._weighted(x, weights)
        return self._chosen(x, *plan.choices_at(self.group, x))

    def _weighted(self, x: Tensor, weights: Tensor) -> Tensor:
        """Return the sum of the options' outputs ``[B, T, out]`` with weights ``[B, T, 3]``."""
        full = self.adapted(x) if self.available[INT8] or self.available[HIGH] else None
        total = x.new_zeros(*x.shape[:-1], self.shape[1])
        for z in range(len(OPTIONS)):
            if not self.available[z]:
                if bool((weights[..., z] != 0).any()):
                    raise self._not_available(z)
            elif z != OFF:
                assert full is not None
                total = total + weights[..., z : z + 1] * self._through(z, x, full)
            elif self.scope == "adapter":
                total = total + weights[..., z : z + 1] * self._base(x)
        # weights are float32 also on a narrower base, whose next layer takes its own precision
        # alone
        return total if under_autocast(x) else total.to(x.dtype)

    def _through(self, z: int, x: Tensor, full: Tensor) -> Tensor:
        """Return the value of an option with the derivative of the adapted layer, whose value is
        ``full``."""
        if z == HIGH and self.high == "float32":
            return full
        value = self._narrow(z, x.detach().flatten(0, -2)).view_as(full)
        return StraightThrough.apply(value.to(full.dtype), full)

    def _chosen(self, x: Tensor, choices: Tensor, counts: Sequence[int]) -> Tensor:
        """Return outputs ``[B, T, out]`` of which each token's is that of its option.

        Args:
            x: inputs ``[B, T, in]``.
            choices: int64 ``[B, T]``.
            counts: tokens of each option.
        """
        dtype = computed_dtype(x)
        if max(counts) == choices.numel():  # as in every step of one token
            return self.execute(OPTIONS[counts.index(max(counts))], x).to(dtype)
        flat, choices = x.flatten(0, -2), choices.flatten()
        found = flat.new_zeros(len(flat), self.shape[1], dtype=dtype)
        for z, count in enumerate(counts):
            if count:
                rows = (choices == z).nonzero()[:, 0]
                found = found.index_copy(0, rows, self.execute(OPTIONS[z], flat[rows]).to(dtype))
        return found.view(*x.shape[:-1], self.shape[1])

    def execute(self, option: str, x: Tensor) -> Tensor:
        """Return the outputs ``[..., out]`` of one option for all of ``x [..., in]``, whatever the
        plan is.

        Raises:
            MisuseError: there is no such option, or it is not available.
        """
        if option not in OPTIONS:
            raise MisuseError(
                f"option {option!r}", f"one of {', '.join(OPTIONS)}", f"give {OPTIONS[-1]!r}"
            )
        z = OPTIONS.index(option)
        if not self.available[z]:
            raise self._not_available(z)
        if z == OFF:
            if self.scope == "model":
                return x.new_zeros(*x.shape[:-1], self.shape[1])
            return self._base(x)
        if z == HIGH and self.high == "float32":
            return self.adapted(x)
        return self._narrow(z, x.flatten(0, -2)).to(x.dtype).view(*x.shape[:-1], self.shape[1])

    def _not_available(self, z: int) -> MisuseError:
        return MisuseError(
            f"option {OPTIONS[z]} of {self.name}",
            f"it is not available there: {self.available} of {OPTIONS}",
            "give it no token, or make it available",
        )

    def _base(self, x: Tensor) -> Tensor:
        """Return the outputs without the adapter."""
        base = self.adapted.base_layer
        if isinstance(self.adapted, AdaptedLinear) and self.adapted.merged:
            return F.linear(x, self.adapted.unmerged_weight(), base.bias)
        return base(x)

    @torch.no_grad()
    def _narrow(self, z: int, x: Tensor) -> Tensor:
        """Return the outputs ``[n, out]`` of int8, or of high in bfloat16, for ``x [n, in]``."""
        bias = self.adapted.base_layer.bias
        if z == INT8:
            return integer_linear(x, self.narrow_weight("int8"), bias)
        weight = self.narrow_weight("high")
        rows = x.to(weight.dtype)
        if not x.is_cuda:
            rows = F.pad(rows, (0, 0, 0, padded_count(len(x)) - len(x)))
        return F.linear(rows, weight, None if bias is None else bias.to(weight.dtype))[: len(x)]

    @property
    def keeps_narrow(self) -> bool:
        """Whether the narrow weights are kept between calls."""
        return self._keep

    def keep_narrow(self, keep: bool) -> None:
        """Keep the narrow weights between calls, or let them go.

        Weights that are kept are made again where the adapter has other values, or the base was
        written to.

        Args:
            keep: whether to keep them; False also frees them.
        """
        self._keep = keep
        self._kept.clear()

    def narrow_weight(self, option: Literal["int8", "high"]) -> Any:
        """Return W + dW as an option computes with it: of int8 an ``Int8Rows``, of high in bfloat16
        a tensor, both ``[out, in]``."""
        z = OPTIONS.index(option)
        if z in self._kept and self._kept[z][0].is_unchanged():
            return self._kept[z][1]
        with torch.no_grad():
            full = full_weight(self.adapted)
        made: Int8Rows | Tensor = quantised_rows(full) if z == INT8 else full.to(torch.bfloat16)
        if self._keep:
            self._kept[z] = LayerState(self.adapted), made
        return made


def computed_dtype(x: Tensor) -> torch.dtype:
    """Return the precision of a linear layer's outputs for inputs ``x``, under autocast that of
    autocast: all options have it, because a cache of keys and values has one precision."""
    return torch.get_autocast_dtype(x.device.type) if under_autocast(x) else x.dtype


def padded_count(rows: int) -> int:
    """Return with how many rows a product in bfloat16 is computed on a CPU: the next power of two
    up to 64, then the next multiple of 64.

    oneDNN compiles a kernel for every new number of rows, which took 1 to 13 ms for a layer of 96 x
    288 whose product takes 0.05 ms, and the number of tokens that choose an option is a new one all
    the time.

    >>> [padded_count(rows) for rows in (0, 1, 3, 33, 64, 65, 200)]
    [0, 1, 4, 64, 64, 128, 256]
    """
    if rows > 64:
        return -(-rows // 64) * 64
    return 1 << (rows - 1).bit_length() if rows else 0


class LayerState:
    """The values of a layer's adapter, and which writes its frozen tensors have seen.

    Of what is trained the values are compared: torch's fused optimisers write without a trace. They
    are few. The layer's modules are gone through once, because that takes longer than the
    comparison.

    Args:
        layer: the layer.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.trained: list[tuple[dict[str, Any], str, Tensor]] = []
        self.frozen: list[tuple[dict[str, Any], str, Tensor, int, int]] = []
        for module in layer.modules():
            for owned in (vars(module)["_parameters"], vars(module)["_buffers"]):
                for name, tensor in owned.items():
                    if tensor is None:
                        continue
                    if tensor.requires_grad:
                        self.trained.append((owned, name, tensor.detach().clone()))
                    else:
                        self.frozen.append(
                            (owned, name, tensor, tensor._version, tensor.data_ptr())
                        )

    def is_unchanged(self) -> bool:
        """Return whether the layer has the values from when this was made."""
        for owned, name, tensor, version, address in self.frozen:
            now = owned[name]
            if now is not tensor or now._version != version or now.data_ptr() != address:
                return False
        for owned, name, values in self.trained:
            now = owned[name]
            if (
                now.device != values.device
                or now.dtype != values.dtype
                or not torch.equal(now, values)
            ):
                return False
        return True


class StraightThrough(torch.autograd.Function):
    """The value of one tensor with the derivative of another one of the same shape."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, through: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        return None, gradients[0]


def full_weight(adapted: Any) -> Tensor:
    """Return W + dW, ``[out, in]``, of a layer of ours or of peft's."""
    if isinstance(adapted, AdaptedLinear):
        return adapted.full_weight()
    weight: Tensor = adapted.base_layer.weight
    if adapted.merged:
        return weight
    for adapter in adapted.active_adapters:
        weight = weight + adapted.get_delta_weight(adapter)
    return weight
