"""FedCM on the quadratic, written out without the code of any method.

Source: Xu et al., 2021. p_i are alike, or by n_i where A is 1; c_i* is the client's centre; all
values are float64.

    y_i <- y_i - eta (A (y_i - c_i*) + (1 - A) M),  K times from x
    x <- x + sum p_i D_i,  M <- -sum p_i D_i / (K eta),  D_i = y_i - x
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fl_lightning.conformance.expectations import Expectation, QuadraticRun
from fl_lightning.conformance.formulas import num_sent
from fl_lightning.conformance.references import History
from fl_lightning.conformance.toy import CENTRES, LR
from fl_lightning.conformance.verdicts import expect, show
from fl_lightning.methods import Method


class ClientMomentum(Expectation):
    """The path of FedCM when all clients make the same number of local steps."""

    def expect_limit(self, run: QuadraticRun) -> None:
        (x,), (end,), A = run.start, run.end, float(run.method.A)
        x, M = x.double(), torch.zeros(len(x), dtype=torch.float64)
        for cohort in run.cohorts:
            ended = []
            for k in cohort:
                y = x
                for _ in range(run.epochs):
                    y = y - LR * (A * (y - CENTRES[k]) + (1 - A) * M)
                ended.append(y)
            weights = torch.tensor([run.weights[k] for k in cohort]).double()
            moved = weights @ torch.stack(ended) / weights.sum() - x
            x, M = x + moved, -moved / (run.epochs * LR)
        right = bool(((end - x).abs() <= run.noise).all())
        expect(right, f"it ends at {show(end)}", f"{show(x)}, where FedCM ends")

    expect_one_step = expect_limit


def mean_step(history: History, sizes: Sequence[int], method: Method, client: int) -> Tensor:
    """Return M after the last round of a history, float64 ``[P]``, at the optimiser's own learning
    rate."""
    (group,), P = method.configure_optimizers().param_groups, num_sent(method, trained=True)
    x = method.server["weights"][:P].double()
    steps = [
        (x - upload.tensor("weights")[:P].double()) / float(upload.tensor("steps"))
        for upload in history[-1].values()
    ]
    return torch.stack(steps).mean(0) / float(group["lr"])
