"""A singular value decomposition whose signs are fixed, so that all machines find the same
directions.

    W = U diag(s) V^T,    U [out, n],  s [n],  V^T [n, in],  n = min(out, in)

A decomposition leaves the sign of each pair (u, v) open. Here the entry of u with the largest
magnitude is positive. Where two singular values are equal, the directions themselves are open, and
nothing can fix them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fl_lightning.errors import require


@torch.no_grad()
def signed_svd(weight: Tensor, rank: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return U ``[out, R]``, s ``[R]`` and V^T ``[R, in]`` of the R leading directions, float64 on
    the CPU.

    The precision is that of float64 and the place is the CPU, so that what is rounded to float32 is
    the same on clients with different devices. A layer of 4096 x 4096 takes about a minute on one
    thread.

    Args:
        weight: W ``[out, in]``.
        rank: R; None: all directions.

    >>> u, s, vt = signed_svd(torch.tensor([[0.0, -3.0], [1.0, 0.0]]))
    >>> s.tolist(), [column.tolist() for column in u.T], [row.tolist() for row in vt]
    ([3.0, 1.0], [[1.0, 0.0], [0.0, 1.0]], [[0.0, -1.0], [1.0, 0.0]])
    """
    place = weight.device if weight.is_meta else "cpu"  # of a dry run, which has shapes alone
    u, s, vt = torch.linalg.svd(weight.detach().to(place, torch.float64), full_matrices=False)
    largest = u.gather(0, u.abs().argmax(0, keepdim=True))[0]
    sign = torch.where(largest < 0, -1.0, 1.0).to(u)
    u, vt = u * sign + 0.0, vt * sign[:, None] + 0.0  # without negative zeros
    return u[:, :rank], s[:rank], vt[:rank]


def require_directions(kind: str, name: str, base: nn.Linear, rank: int) -> None:
    """Refuse a rank that exceeds a layer's number of singular directions.

    Args:
        kind: the adapter's kind, for the message.
        name: the layer's name, for the message.
        base: the layer.
        rank: R.

    Raises:
        InputError: R is more than min(out, in).
    """
    most = min(base.out_features, base.in_features)
    require(
        rank <= most,
        f"adapter {kind} of rank {rank} on {name or 'a layer'} of {base.in_features} x {base.out_features}",
        f"it takes singular directions of the weights, of which this layer has {most}",
        f"write rank {most} or less, or other targets",
    )
