"""Controllers: which option each group takes for each token, as logits ``[B, T, G, 3]``.

The last axis is off, int8, high, and theta_off = 0. ``d`` is the width of the embedding, ``k`` the
number of features, ``G`` groups, ``L`` layers. No public work defines HEST, TABS or BHSP; these are
this project's definitions.

- :class:`HESTController`: all groups read the same k features of the token's embedding.
- :class:`TABSController`: each group reads its own input, and chooses between off and high.
- :class:`BHSPController`: free numbers, the same for every token.

Numbers of weights, without biases, at d = 4096 and L = 32: a HEST with k = 32 features and one
group a layer (G = L) has 2 k (d + G) = 264 192. A TABS that gates each of the R = 16 directions of
a layer's adapter has L R d = 2 097 152. So HEST has 87 % fewer. Where a group is a whole linear
layer, as it is here, both have the same groups: with 4 a layer, HEST has 2 k (d + 128) = 270 336
and TABS 128 d = 524 288, which is 48 % fewer.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fl_lightning.errors import require

HIGH_AT_START = 2.0
"""Bias of ``high`` at the start: beside theta_off = theta_int8 = 0, high has the probability
0.79."""
NORM_EPSILON = 1e-6


class TokenController(nn.Module, ABC):
    """A controller of which the logits of all groups are known before the network computes."""

    @abstractmethod
    def logits_of(self, embedded: Tensor) -> Tensor:
        """Return logits ``[B, T, G, 3]`` of embeddings ``[B, T, d]``."""


class HESTController(TokenController):
    """A controller that reads the token's embedding once for all groups.

        theta_gtz = sum_k (W_z h_t)_k (v_z)_gk + b_gz    for z in {int8, high}

    h_t is the token's embedding over its root mean square. W_z is random, v_z = 0, b_int8 = 0 and
    b_high = 2 at the start, so all tokens are at high until v is trained. A token costs O(d k + G
    k).

    Args:
        width: d.
        groups: G.
        features: k.
        generator: what W is drawn from; None: torch's current generator.

    Raises:
        InputError: a size is less than 1.
    """

    def __init__(
        self, width: int, groups: int, features: int, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        _require_sizes(width=width, groups=groups, features=features)
        drawn = torch.randn(2, features, width, generator=generator) / math.sqrt(width)
        self.projection = nn.Parameter(drawn)  # W_int8, W_high
        self.readout = nn.Parameter(torch.zeros(2, groups, features))  # v_int8, v_high
        self.bias = nn.Parameter(torch.tensor([0.0, HIGH_AT_START]).repeat(groups, 1))  # [G, 2]

    def logits_of(self, embedded: Tensor) -> Tensor:
        return self(embedded)

    def forward(self, embedding: Tensor) -> Tensor:
        """Return logits ``[..., G, 3]`` of embeddings ``[..., d]``; one row depends on one token
        alone."""
        h = nn.functional.rms_norm(embedding, embedding.shape[-1:], eps=NORM_EPSILON)
        features = torch.einsum("...d,zkd->...zk", h.to(self.projection.dtype), self.projection)
        theta = torch.einsum("...zk,zgk->...gz", features, self.readout) + self.bias
        return torch.cat((torch.zeros_like(theta[..., :1]), theta), dim=-1)


class TABSController(nn.Module):
    """A controller in which each group reads its own input, in the layer where it stands.

        theta_lti = <w_li, h_lt> + b_li    for high; int8 is never taken

    w = 0 and b = 2 at the start.

    Args:
        widths: features of h_lt of each group, in the order of the network.

    Raises:
        InputError: a size is less than 1.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        _require_sizes(groups=len(widths), widths=min(widths, default=0))
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in widths])
        self.bias = nn.Parameter(torch.full((len(widths),), HIGH_AT_START))

    def logits_at(self, group: int, hidden: Tensor) -> Tensor:
        """Return logits ``[..., 3]`` of one group.

        Args:
            group: its place in the network, from 0.
            hidden: its input ``[..., in]``.
        """
        weight = self.weights[group]
        high = hidden.to(weight.dtype) @ weight + self.bias[group]
        return torch.stack((torch.zeros_like(high), torch.full_like(high, -math.inf), high), dim=-1)


class BHSPController(TokenController):
    """A controller that reads no token: theta_gz are free numbers.

    The name stood once in a draft, as token-agnostic, and nowhere else.

    Args:
        groups: G.

    Raises:
        InputError: it is less than 1.
    """

    def __init__(self, groups: int) -> None:
        super().__init__()
        _require_sizes(groups=groups)
        self.bias = nn.Parameter(torch.tensor([0.0, HIGH_AT_START]).repeat(groups, 1))  # [G, 2]

    def logits_of(self, embedded: Tensor) -> Tensor:
        return self(*embedded.shape[:2])

    def forward(self, batch: int = 1, length: int = 1) -> Tensor:
        """Return logits ``[B, T, G, 3]``, the same for every token."""
        theta = torch.cat((torch.zeros_like(self.bias[:, :1]), self.bias), dim=-1)
        return theta.expand(batch, length, -1, -1)


def _require_sizes(**sizes: int) -> None:
    shown = ", ".join(f"{name}={size}" for name, size in sizes.items())
    require(
        min(sizes.values()) >= 1, f"a controller of {shown}", "sizes are 1 or more", "write e.g. 16"
    )
