"""The mathematics of averages of low-rank factors, layer by layer, in the precision of the tensors
given.

A client's adapter is a pair (A, B) with A ``[r, n]`` and B ``[m, r]``; it adds c B A to a layer
``[m, n]``. p are the clients' shares, which add up to 1; K clients, q the rank of a sum. c is the
same for all and left out.

    mean(BA) = sum_k p_k B_k A_k = [p_1 B_1 ... p_K B_K] [A_1; ...; A_K]
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

EXACT_SHARE = 1e-6
"""A difference that is a smaller share of the mean of the products is rounding."""

Pair = tuple[Tensor, Tensor]
"""A ``[r, n]`` and B ``[m, r]``."""

ZERO_SHARE = 1e-7
"""A singular value that is a smaller share of the largest one is taken for 0, as float32 cannot
hold it."""


def stacked(pairs: Sequence[Pair], shares: Sequence[float]) -> Pair:
    """Return one pair of rank sum r_k whose product is mean(BA), whatever the ranks (FLoRA, Wang et
    al. 2024, NeurIPS, arXiv 2409.05976): B is scaled by the share, once."""
    b = torch.cat([share * b for (_, b), share in zip(pairs, shares, strict=True)], 1)
    return torch.cat([a for a, _ in pairs], 0), b


def residual(pairs: Sequence[Pair], shares: Sequence[float], mean_b: Tensor) -> Pair:
    """Return a pair of rank (K - 1) r whose product is R = mean(BA) - mean(B) mean(A) (FedEx-LoRA,
    Singhal et al. 2025, ACL, arXiv 2410.09432).

    R = sum_k p_k (B_k - mean(B)) (A_k - A_1), since the deviations of B add up to 0. The first
    client adds nothing, and where all A are equal R is 0 in every bit.

    Args:
        pairs: of one rank.
        shares: p.
        mean_b: mean(B).
    """
    first = pairs[0][0]
    a = torch.cat([first[:0], *(a - first for a, _ in pairs[1:])], 0)
    parts = [share * (b - mean_b) for (_, b), share in zip(pairs[1:], shares[1:], strict=True)]
    return a, torch.cat([mean_b[:, :0], *parts], 1)


def nearest(pair: Pair, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return U ``[m, r]``, s ``[r]`` and V^T ``[r, n]`` of the matrix of this rank that is nearest
    to the product of a pair, r = min(rank, m, n); beyond the pair's own rank s is 0.

    Eckart and Young 1936, from the QR decompositions of both factors: the product is never formed.
    The entry of each column of U with the largest magnitude is positive.
    """
    (a, b), (m, n) = pair, (len(pair[1]), pair[0].shape[1])
    left, r_left = torch.linalg.qr(b)
    right, r_right = torch.linalg.qr(a.T)
    inner_u, s, inner_vt = torch.linalg.svd(r_left @ r_right.T, full_matrices=False)
    u, vt = left @ inner_u, inner_vt @ right.T
    largest = u.gather(0, u.abs().argmax(0, keepdim=True))[0]
    sign = torch.where(largest < 0, -1.0, 1.0).to(u)
    u, vt, kept = u * sign, vt * sign[:, None], min(rank, m, n)
    missing = max(0, kept - len(s))
    u = torch.cat([u[:, :kept], u.new_zeros(m, missing)], 1)
    vt = torch.cat([vt[:kept], vt.new_zeros(missing, n)], 0)
    return u, torch.cat([s[:kept], s.new_zeros(missing)]), vt


def of_matrix(matrix: Tensor, rank: int) -> Pair:
    """Return a pair whose product is a matrix that has at most this rank; one of fewer values than
    the matrix, where there is one."""
    m, n = matrix.shape
    if rank * (m + n) >= m * n:
        return torch.eye(n).to(matrix), matrix
    u, s, vt = torch.linalg.svd(matrix, full_matrices=False)
    return vt[:rank], u[:, :rank] * s[:rank]


def balanced(pair: Pair, rank: int, spare: Tensor) -> Pair:
    """Return the pair of this rank whose product is nearest to a pair's (FlexLoRA, Bai et al. 2024,
    NeurIPS, arXiv 2402.11505): B = U S^(1/2), A = S^(1/2) V^T, the largest directions first.

    The first r_k of them are therefore the pair nearest in rank r_k. A direction that the product
    lacks would have neither factor, and no gradient ever after: it gets a row of ``spare``, and
    adds nothing.

    Args:
        pair: any rank.
        rank: r, the rank of the result.
        spare: rows for A, ``[r, n]``.
    """
    u, s, vt = nearest(pair, rank)
    width, root = len(s), s.sqrt()
    a, b = spare.clone(), pair[1].new_zeros(len(pair[1]), rank)
    there = s > ZERO_SHARE * s[:1]
    a[:width] = torch.where(there[:, None], root[:, None] * vt, spare[:width])
    b[:, :width] = torch.where(there, u * root, 0.0)
    return a, b


def solved(pair: Pair, start: Pair, steps: int) -> Pair:
    """Return factors of the rank of ``start`` whose product is near to a pair's: alternating least
    squares, a fixed number of times.

        B <- M A^T (A A^T)^+,     A <- (B^T B)^+ B^T M,     M the product of ``pair``

    It comes nearer to M with each step, and where the product of ``start`` is M already, it stays
    there.
    """
    (wide_a, wide_b), (a, b) = pair, start
    for _ in range(steps):
        b = wide_b @ (wide_a @ a.T) @ torch.linalg.pinv(a @ a.T, hermitian=True)
        a = torch.linalg.pinv(b.T @ b, hermitian=True) @ (b.T @ wide_b) @ wide_a
    return a, b


def norm_shares(adapters: Sequence[Sequence[Pair]], shares: Sequence[float]) -> list[float]:
    """Return p_k s_k / sum_j p_j s_j with s_k = ||c B_k A_k|| over all layers (HetLoRA, Cho et al.
    2024, EMNLP, arXiv 2401.06432, there with equal p). Equal norms leave the shares as they
    are, bit for bit; so do adapters that add nothing.

    Args:
        adapters: the pairs of each client, layer by layer.
        shares: p.
    """
    norms = [sum(norm(pair) ** 2 for pair in pairs) ** 0.5 for pairs in adapters]
    if max(norms) - min(norms) <= 1e-9 * max(norms):
        return list(shares)
    weights = [share * size for share, size in zip(shares, norms, strict=True)]
    return [weight / sum(weights) for weight in weights]


def norm(pair: Pair) -> float:
    """Return ||B A||, in the Frobenius norm."""
    a, b = pair
    if not len(a):
        return 0.0
    return float((torch.linalg.qr(b)[1] @ torch.linalg.qr(a.T)[1].T).norm())


def without_zeros(pair: Pair) -> Pair:
    """Return a pair without the directions that are zero in both factors, which a client of a lower
    rank has."""
    a, b = pair
    there = a.ne(0).any(1) | b.ne(0).any(0)
    return a[there], b[:, there]


def joined(*pairs: Pair) -> Pair:
    """Return one pair whose product is the sum of the products."""
    return torch.cat([a for a, _ in pairs], 0), torch.cat([b for _, b in pairs], 1)


def minus(pair: Pair) -> Pair:
    """Return a pair whose product is that of the pair times -1."""
    return pair[0], -pair[1]
