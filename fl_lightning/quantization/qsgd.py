"""QSGD (Alistarh et al., NeurIPS 2017): unbiased stochastic levels, with the L-infinity norm of a tensor or
of a bucket.

    Q(v) = norm * sign(v) * level / s,  level = floor(a) + Bernoulli(a - floor(a))
    a = |v| s / norm,  s = 2^(b-1) - 1

The largest magnitude instead of QSGD's L2 norm: over a layer of 36 864 Gaussian weights at 4 bits the noise
is then 0.06 times the signal's energy instead of 21 times. ``[n]`` values, ``[m]`` buckets.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F


def levels(bits: int) -> int:
    """s: levels above zero of codes of ``bits`` bits, the sign included."""
    return 2 ** (bits - 1) - 1


def num_buckets(size: int, bucket: int | None) -> int:
    """m: norms that ``size`` values need."""
    return 1 if bucket is None else max(1, -(-size // bucket))


def encode(
    values: Tensor, bits: int, noise: np.random.Generator, bucket: int | None = None
) -> tuple[Tensor, Tensor]:
    """Codes int32 ``[n]`` (the level, then the sign as the highest bit) and norms float32 ``[m]``.

    Args:
        values: any shape, float32. Where a bucket is not finite its norm says so, and its codes are zero.
        bits: b, 2 to 16, the sign included.
        bucket: values that share a norm; None: all.
    """
    rows = _rows(values.detach().reshape(-1).to("cpu", torch.float32), bucket)
    norms = rows.abs().amax(dim=1)
    position = (rows.abs() / norms.unsqueeze(1)).nan_to_num_(0.0, 0.0, 0.0) * levels(
        bits
    )  # 0 / 0 where the norm is zero
    draws = torch.from_numpy(noise.random(values.numel(), dtype=np.float32))
    level = (position.flatten()[: values.numel()] + draws).floor().clamp_(max=levels(bits)).to(torch.int32)
    negative = (rows.flatten()[: values.numel()] < 0) & (level > 0)
    return level | (negative.to(torch.int32) << (bits - 1)), norms


def decode(codes: Tensor, norms: Tensor, bits: int, bucket: int | None = None) -> Tensor:
    """float32 ``[n]``."""
    scales = norms / levels(bits)
    if bucket is None and codes.numel():
        return (_signed_levels(bits) * scales).index_select(0, codes)
    return (_rows(_signed_levels(bits).index_select(0, codes), bucket) * scales.unsqueeze(1)).flatten()[
        : codes.numel()
    ]


@cache
def _signed_levels(bits: int) -> Tensor:
    """float32 ``[2**bits]``, not to be written to: what each code stands for; to work it out takes five
    passes over the values."""
    level = torch.arange(2 ** (bits - 1), dtype=torch.float32)
    return torch.cat([level, -level])


def _rows(flat: Tensor, bucket: int | None) -> Tensor:
    """One row for each bucket, the last filled up with zeros."""
    if bucket is None and flat.numel():
        return flat.unsqueeze(0)
    count, width = num_buckets(flat.numel(), bucket), bucket or 1
    return F.pad(flat, (0, count * width - flat.numel())).view(count, width)
