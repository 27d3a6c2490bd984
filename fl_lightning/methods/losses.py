"""Terms that several methods share."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fl_lightning.tasks import ClassRows, likeliest


def kl_divergence(p: Tensor, log_q: Tensor, log_p: Tensor | None = None) -> Tensor:
    """Return KL(p || q) of distributions ``[B, C]``, of each row ``[B]``.

    torch's own ``kl_div`` has no batching rule for ``vmap``.

    Args:
        p: probabilities.
        log_q: logarithms of the other probabilities.
        log_p: logarithm of p, where it is known to more digits than from p.
    """
    entropy = torch.xlogy(p, p) if log_p is None else p * log_p
    return (entropy - p * log_q).sum(dim=1)


def distillation(
    student: ClassRows,
    teacher: Tensor,
    temperature: float,
    kl: Literal["forward", "reverse"] = "forward",
) -> Tensor:
    """T^2 * KL between softened distributions, ``batchmean``.

    Args:
        student: logits ``[M, C]`` and the weight of each row.
        teacher: logits ``[M, C]``.
        kl: ``forward``: KL(teacher || student); ``reverse``: KL(student || teacher).
    """
    # in bfloat16 the difference of two near logits is noise
    log_student = F.log_softmax(student.logits.float() / temperature, dim=1)
    log_teacher = F.log_softmax(teacher.float() / temperature, dim=1)
    log_p, log_q = (log_teacher, log_student) if kl == "forward" else (log_student, log_teacher)
    return temperature**2 * student.mean(kl_divergence(log_p.exp(), log_q, log_p))


def not_true_distillation(local: ClassRows, received: Tensor, tau: float) -> Tensor:
    """tau^2 * KL(q_g || q) over the classes other than the target, mean over the rows.

    Args:
        local: logits ``[M, C]`` of the client's model, C at least 2, with targets and weights.
        received: logits ``[M, C]`` of the global model.
    """
    log_local = F.log_softmax(not_true(local.logits, local.target) / tau, dim=1)
    log_received = F.log_softmax(not_true(received, local.target) / tau, dim=1)
    return tau**2 * local.mean(kl_divergence(log_received.exp(), log_local, log_received))


def not_true(logits: Tensor, target: Tensor) -> Tensor:
    """``[B, C - 1]``: the logits without the target's, of shares the largest one's.

    >>> not_true(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), torch.tensor([0, 2])).tolist()
    [[2.0, 3.0], [4.0, 5.0]]
    """
    index = torch.arange(logits.shape[1] - 1, device=logits.device)
    return logits.gather(1, index + (index >= likeliest(target).unsqueeze(1)))
