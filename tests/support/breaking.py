"""Methods that are broken on purpose: how they say which checks must fail, and what they share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import pytest
import torch

from fl_lightning.conformance import CHECKS, method_under_test, run_checks
from fl_lightning.methods import Method

OPTIMA = {"known optimum", "agreement", "partial participation"}
BY_N = {"known optimum", "partial participation", "weights by examples", "broadcast"}


class Dynamic(Method):
    """FedDyn (Acar et al., ICLR 2021) as a stranger writes it, after docs/howto/method.md."""

    uniform_clients = scales_with_federation = dynamic_regularisation = True
    sign = 1.0

    def __init__(self, alpha=0.1, weigh_by="clients", **settings):
        super().__init__(weigh_by=weigh_by, **settings)
        self.alpha = alpha

    def build(self, data):
        super().build(data)
        self.clients = len(data.active)
        self.moves = (torch.arange(self.layout.size) < self.trained_values).float()
        self.server["H"] = torch.zeros(self.layout.size)

    def receive(self, message, client):
        super().receive(message, client)
        self.register_buffer("start", self.weights().detach())
        self.register_buffer("history", self.kept(client))

    def kept(self, client):
        return client.state.get("history", torch.zeros_like(self.start))

    def training_step(self, batch, batch_idx=0):
        outputs, step = super().training_step(batch, batch_idx), self.weights() - self.start
        term = self.alpha * (self.sign * self.history @ step + step @ step / 2)
        return {**outputs, "loss": outputs["loss"] + term, "loss_dynamic": term}

    def upload(self, client):
        client.state["history"] = self.history + (self.weights() - self.start).detach()
        return super().upload(client)

    def next_state(self, sums):
        mean, share = sums.mean("weights"), len(self.served) / self.clients
        H = self.server["H"] + share * self.moves * (mean - self.server["weights"])
        self.server |= {"weights": mean + H, "H": H}

    def weights(self):
        return torch.cat([p.flatten() for p in self.network.parameters()])


class DividesByTheRound(Dynamic):
    """It divides the sum by |S|."""

    def next_state(self, sums):
        self.clients = len(self.served)
        super().next_state(sums)


class KeepsInAnAttribute(Dynamic):
    """It keeps H_i by the client's number, where no checkpoint has it."""

    def build(self, data):
        super().build(data)
        self.histories = {}

    def kept(self, client):
        return self.histories.get(client.id, torch.zeros_like(self.start))

    def upload(self, client):
        message = super().upload(client)
        self.histories[client.id] = client.state.pop("history")
        return message


class Repels(Dynamic):
    """Its linear term has the wrong sign."""

    sign = -1.0


class Breaks(list):
    """Broken classes, as parameters of a test."""

    def fails(self, *checks: str | Iterable[str]):
        """The class below it must fail these checks."""
        names = {
            name for check in checks for name in ([check] if isinstance(check, str) else check)
        }

        def register(broken):
            self.append(pytest.param(broken, names, id=broken.__name__))
            return broken

        return register


def failed_checks(broken, names):
    """Which of these checks fail, with what is known of the method that was broken."""
    base = next(c for c in broken.__mro__[1:] if c.__module__.startswith("fl_lightning."))
    known = method_under_test(base)
    subject = replace(known, make=partial(broken, **known.make.keywords))
    checks = [check for check in CHECKS if check.__name__.replace("_", " ") in names]
    assert len(checks) == len(names)
    return {outcome.check for outcome in run_checks(subject, checks) if outcome.verdict == "failed"}


def padded(batches, size):
    """Batches filled up to ``size`` with blank examples of class 0, which count in the mean."""
    for inputs, target in batches:
        pad = max(0, size - len(target))
        blank = target.new_zeros(pad, *target.shape[1:])
        yield torch.cat([inputs, torch.zeros(pad, *inputs.shape[1:])]), torch.cat([target, blank])
