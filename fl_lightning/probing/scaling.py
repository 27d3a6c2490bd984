"""Temperature scaling: probabilities softmax(z / T) with the T that fits held-out examples best.

Source: Guo et al., ICML 2017.

``n`` examples, ``C`` classes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import LBFGS

from fl_lightning.metrics import brier_score, expected_calibration_error

TEMPERATURE_BOUNDS = (0.05, 20.0)
"""Bounds of T; without them T would be 0 or infinite if all held-out answers are right, or all are
wrong."""


def fit_temperature(logits: Tensor, target: Tensor) -> float:
    """Return the temperature T with the smallest negative log-likelihood, within
    ``TEMPERATURE_BOUNDS``.

    The likelihood has a single maximum in log T.

    Args:
        logits: logits ``[n, C]`` of examples that belong neither to training nor to the test.
        target: int64 ``[n]``.
    """
    z = logits.double()
    log_t = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimizer = LBFGS(
        [log_t],
        max_iter=100,
        tolerance_grad=1e-10,
        tolerance_change=1e-12,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(z / log_t.exp(), target)
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]
    low, high = TEMPERATURE_BOUNDS
    return min(max(float(log_t.detach().exp()), low), high)


def calibration(logits: Tensor, target: Tensor, temperature: float = 1.0) -> dict[str, float]:
    """Return ``ece`` in [0, 1], ``nll`` in nats and ``brier`` in [0, 2] of softmax(z / T).

    Args:
        logits: z, ``[n, C]``.
        target: int64 ``[n]``.
        temperature: T.
    """
    z = logits.double() / temperature
    probs = z.softmax(1)
    return {
        # of float32 as in the rounds, so that it is test/ece to the last bit where T is 1
        "ece": expected_calibration_error((logits.float() / temperature).softmax(1), target),
        "nll": F.cross_entropy(z, target).item(),
        "brier": brier_score(probs, target),
    }
