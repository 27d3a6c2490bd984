"""How the options of each token are chosen in one pass through a network: drawn, or under a budget.

``B`` sequences of ``T`` tokens, ``G`` groups, three options. The lengths of a batch say which tokens are a
sequence's prompt, which are read after it one by one, and which are padding.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fl_lightning.energy import (
    OPTIONS,
    REFUSED,
    BatchedEnergyLedger,
    TABSController,
    expected_energy,
    gumbel_choices,
)
from fl_lightning.methods.budgets.device import Device
from fl_lightning.metrics.text import IGNORED
from fl_lightning.models.options import TokenPlan
from fl_lightning.models.options.plan import counted

OFF, HIGH = OPTIONS.index("off"), OPTIONS.index("high")


@dataclass(frozen=True)
class Lengths:
    """What the tokens of a batch are.

    Args:
        prompts: tokens of each prompt, int64 ``[B]``, 1 or more: those before and at the first labelled one,
            whose next token is the first of the answer.
        new: tokens that are read after the prompt, one by one, int64 ``[B]``.
    """

    prompts: Tensor
    new: Tensor

    @classmethod
    def of(cls, target: Tensor, tokens: int) -> Lengths:
        """Return the lengths of sequences whose labels are ``target [B, T]``, of which ``tokens`` are read.

        A sequence without a label is a prompt.
        """
        labelled = target[:, :tokens] != IGNORED
        places = torch.arange(labelled.shape[1], device=target.device)
        last = torch.where(labelled, places, -1).amax(1)
        first = torch.where(labelled, places, labelled.shape[1]).amin(1)
        some = last >= 0
        prompts = torch.where(some, first + 1, labelled.shape[1])
        return cls(prompts.cpu(), torch.where(some, last - first, 0).cpu())

    @property
    def ends(self) -> Tensor:
        """The tokens of each sequence, int64 ``[B]``."""
        return self.prompts + self.new

    def read(self, tokens: int) -> Tensor:
        """Return which tokens are no padding, bool ``[B, T]``."""
        return torch.arange(tokens) < self.ends.unsqueeze(1)


def token_costs(device: Device, lengths: Lengths, tokens: int, kind: str = "mean") -> Tensor:
    """Return joules of each token by option, float64 ``[B, T, G, 3]``: a prompt's are shared out among its
    tokens, and padding costs nothing. Options that a step does not have cost infinity."""
    alone = device.token_costs(1, kind)
    rows = []
    for prompt, end in zip(lengths.prompts.tolist(), lengths.ends.tolist(), strict=True):
        row = alone.expand(tokens, -1, -1).clone()
        row[:prompt] = device.token_costs(prompt, kind)
        row[end:] = 0.0
        rows.append(row)
    return torch.stack(rows)


class SampledPlan(TokenPlan):
    """The options of a step of training: they are drawn layer by layer, with gradients.

    Args:
        theta: logits ``[B, T, G, 3]``, or the controller whose layers have their own.
        costs: joules of each token by option, ``[B, T, G, 3]``.
        noise: the client's stream for this step.
        temperature: tau of the Gumbel softmax.
    """

    def __init__(
        self, theta: Tensor | TABSController, costs: Tensor, noise: np.random.Generator, temperature: float
    ) -> None:
        self.theta, self.costs, self.noise, self.temperature = theta, costs, noise, temperature
        self.energies: list[Tensor] = []
        """Expected joules of each token at the layers so far, ``[B, T]``, with their gradients."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.costs.shape[:3]

    def weights_at(self, group: int, x: Tensor) -> Tensor:
        theta, costs = self.theta, self.costs[:, :, group].unsqueeze(-2).to(x.device)
        own = theta.logits_at(group, x) if isinstance(theta, TABSController) else theta[:, :, group]
        own = own.to(torch.promote_types(own.dtype, torch.float32))  # joules need it, also under autocast
        self.energies.append(expected_energy(own.unsqueeze(-2), costs))
        return gumbel_choices(own.unsqueeze(-2), costs, self.noise, self.temperature).squeeze(-2)

    def choices_at(self, group: int, x: Tensor) -> tuple[Tensor, list[int]]:
        raise AssertionError("options are drawn as weights")

    def energy(self) -> Tensor:
        """Return expected joules of each sequence, ``[B]``, with its gradient."""
        return torch.stack(self.energies).sum((0, 2))


class LayerwisePlan(TokenPlan):
    """Each layer chooses from its own input, and nothing holds a budget: TABS.

    Args:
        controller: the rule of each layer.
        costs: joules of each token by option, ``[B, T, G, 3]``; 0 for padding.
        price: lambda, logits per joule, ``[B]``.
    """

    def __init__(self, controller: TABSController, costs: Tensor, price: Tensor) -> None:
        self.controller, self.costs, self.price = controller, costs, price.reshape(-1, 1, 1)
        self.choices = torch.full(costs.shape[:3], OFF, dtype=torch.int64)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.choices.shape

    def choices_at(self, group: int, x: Tensor) -> tuple[Tensor, list[int]]:
        costs = self.costs[:, :, group]
        theta = self.controller.logits_at(group, x).double().cpu()
        worth = theta - self.price * costs.masked_fill(costs.isinf(), 0.0)
        taken = worth.masked_fill(costs.isinf(), -torch.inf).argmax(-1)
        taken = taken.masked_fill(costs.sum(-1) == 0, OFF)
        self.choices[:, :, group] = taken
        return taken.to(x.device), counted(taken)


def budgeted_ledger(device: Device, lengths: Lengths) -> BatchedEnergyLedger:
    """Return the ledger of a batch: each sequence owes the tokens after its prompt."""
    budgets = [
        device.budget(prompt, new, "q99")
        for prompt, new in zip(lengths.prompts.tolist(), lengths.new.tolist(), strict=True)
    ]
    return BatchedEnergyLedger(
        torch.tensor(budgets, dtype=torch.float64),
        device.fixed(1, "q99"),
        device.token_costs(1, "q99"),
        lengths.new,
    )


def choose_prompts(
    ledger: BatchedEnergyLedger, device: Device, theta: Tensor, lengths: Lengths, price: Tensor
) -> Tensor:
    """Choose the options of the prompts under the ledger, int64 ``[B, T, G]``; padding and what is refused
    take *off*, which is not computed for them.

    Args:
        theta: logits ``[B, T, G, 3]``.
        price: lambda, logits per joule, ``[B]``.
    """
    choices = torch.full(theta.shape[:3], OFF, dtype=torch.int64)
    for row, prompt in enumerate(lengths.prompts.tolist()):
        costs, fixed = device.prompt_costs(prompt, "q99"), device.fixed(prompt, "q99")
        found = ledger.decide_prompt(row, theta[row, :prompt], float(price[row]), fixed, costs)
        if found is not None:
            choices[row, :prompt] = found
    return choices


def choose_tokens(
    ledger: BatchedEnergyLedger, theta: Tensor, price: Tensor, active: Tensor
) -> tuple[Tensor, Tensor]:
    """Choose the options of one more token of each sequence.

    Args:
        theta: logits ``[B, G, 3]``.
        price: lambda, logits per joule, ``[B]``.
        active: bool ``[B]``, the sequences that have a token now.

    Returns:
        the options int64 ``[B, G]``, and which sequences have their token, bool ``[B]``.
    """
    found = ledger.decide(theta, price, active)
    granted = active & (found[:, 0] != REFUSED)
    return found.masked_fill(~granted.unsqueeze(1), OFF), granted
