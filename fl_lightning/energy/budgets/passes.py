"""How the options of each token are chosen in one pass through a network: drawn, or under a budget.

``B`` sequences of ``T`` tokens, ``G`` groups, three options. The lengths of a batch say which
tokens are a sequence's prompt, which are read after it one by one, and which are padding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fl_lightning.energy.budgets.device import Device
from fl_lightning.energy.budgets.ledger import REFUSED, BatchedEnergyLedger
from fl_lightning.energy.controllers import TABSController
from fl_lightning.energy.gating import bounded, expected_energy, gumbel_choices, probabilities
from fl_lightning.energy.options import OFF
from fl_lightning.energy.switched import TokenPlan
from fl_lightning.energy.switched.plan import counted
from fl_lightning.metrics.text import IGNORED


@dataclass(frozen=True)
class Lengths:
    """What the tokens of a batch are.

    Args:
        prompts: tokens of each prompt, int64 ``[B]``, 1 or more: those before and at the first
            labelled one, whose next token is the first of the answer.
        new: tokens that are read after the prompt, one by one, int64 ``[B]``.
    """

    prompts: Tensor
    new: Tensor

    @classmethod
    def of(cls, target: Tensor, tokens: int) -> Lengths:
        """Return the lengths of sequences whose labels are ``target [B, T]``, of which ``tokens``
        are read.

        A sequence without a label is a prompt.
        """
        labelled = target[:, :tokens] != IGNORED
        places = torch.arange(labelled.shape[1], device=target.device)
        last = torch.where(labelled, places, -1).amax(1)
        first = torch.where(labelled, places, labelled.shape[1]).amin(1)
        some = last >= 0
        prompts = torch.where(some, first + 1, labelled.shape[1])
        return cls(prompts.cpu(), torch.where(some, last - first, 0).cpu())

    def with_answers(self, most: int) -> Lengths:
        """Return these sequences, and each prompt with an answer of so many tokens at most, the
        first of which comes with the prompt."""
        answers = torch.full_like(self.new, most - 1)
        return Lengths(self.prompts.repeat(2), torch.cat((self.new, answers)))

    @property
    def ends(self) -> Tensor:
        """The tokens of each sequence, int64 ``[B]``."""
        return self.prompts + self.new

    def each(self, of: Callable[..., float], *settings: str) -> Tensor:
        """Return a number of each sequence, given the tokens of its prompt and those after it,
        float64 ``[B]``."""
        each = zip(self.prompts.tolist(), self.new.tolist(), strict=True)
        return torch.tensor([of(*one, *settings) for one in each], dtype=torch.float64)

    def after_prompts(self, tokens: int) -> Tensor:
        """Return which tokens are read one by one after the prompt, bool ``[B, T]``."""
        return self.read(tokens) & (torch.arange(tokens) >= self.prompts.unsqueeze(1))

    def read(self, tokens: int) -> Tensor:
        """Return which tokens are no padding, bool ``[B, T]``."""
        return torch.arange(tokens) < self.ends.unsqueeze(1)


def token_costs(device: Device, lengths: Lengths, tokens: int, kind: str = "mean") -> Tensor:
    """Return joules of each token by option, float64 ``[B, T, G, 3]``: a prompt's are shared out
    among its tokens, and padding costs nothing. Options that a step does not have cost infinity."""
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
        device: what the options cost.
        lengths: of the sequences.
        tokens: T.
        noise: the client's stream for this step.
        temperature: tau of the Gumbel softmax.
    """

    def __init__(
        self,
        theta: Tensor | TABSController,
        device: Device,
        lengths: Lengths,
        tokens: int,
        noise: np.random.Generator,
        temperature: float,
    ) -> None:
        self.theta, self.device, self.lengths = theta, device, lengths
        self.costs = token_costs(device, lengths, tokens)
        self.noise, self.temperature = noise, temperature
        self.chances: dict[int, Tensor] = {}
        """Probabilities of the options at each layer so far, ``[B, T, 3]``, with their
        gradients."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.costs.shape[:3]

    def weights_at(self, group: int, x: Tensor) -> Tensor:
        theta, costs = self.theta, self.costs[:, :, group].to(x.device)
        own = theta.logits_at(group, x) if isinstance(theta, TABSController) else theta[:, :, group]
        # joules need it under autocast
        own = bounded(own.to(torch.promote_types(own.dtype, torch.float32)))
        self.chances[group] = probabilities(own, costs)
        return gumbel_choices(own, costs, self.noise, self.temperature)

    def choices_at(self, group: int, x: Tensor) -> tuple[Tensor, list[int]]:
        raise AssertionError("options are drawn as weights")

    def energy(self) -> Tensor:
        """Return expected joules of each sequence, ``[B]``, with its gradient: of its prompt as one
        step, and of the tokens after it, each a step of its own. Padding costs nothing."""
        every = torch.stack([self.chances[group] for group in range(self.shape[2])], dim=2)
        return expected_joules(self.device, self.lengths, every)


def expected_joules(device: Device, lengths: Lengths, chances: Tensor) -> Tensor:
    """Return expected joules of each sequence whose tokens draw their options independently,
    ``[B]``.

    Args:
        device: what the options cost; the mean is taken.
        lengths: of the sequences.
        chances: the probability of each option ``[B, T, G, 3]``, 0 where there is no such option.
    """
    prompts, longest = lengths.prompts.tolist(), int(lengths.prompts.max())
    costs = chances.new_zeros(len(prompts), *chances.shape[2:], longest + 1)
    for row, prompt in enumerate(prompts):
        costs[row, ..., : prompt + 1] = device.prompt_costs(prompt, "mean")
    in_prompt = (torch.arange(longest) < lengths.prompts.unsqueeze(1)).to(chances.device)
    read = lengths.read(chances.shape[1]).to(chances.device)
    later = read & ~F.pad(in_prompt, (0, chances.shape[1] - longest))
    first = expected_energy(chances[:, :longest] * in_prompt[..., None, None], costs)
    alone = device.token_costs(1).to(chances)
    alone = alone.masked_fill(alone.isinf(), 0.0)
    return first + ((chances * alone).sum((-2, -1)) * later).sum(1)


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
    return BatchedEnergyLedger(
        lengths.each(device.budget, "q99"),
        device.fixed(1, "q99"),
        device.token_costs(1, "q99"),
        lengths.new,
    )


def choose_prompts(
    ledger: BatchedEnergyLedger, device: Device, theta: Tensor, lengths: Lengths, price: Tensor
) -> Tensor:
    """Choose the options of the prompts under the ledger, int64 ``[B, T, G]``; padding and what is
    refused take *off*, which is not computed for them.

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
