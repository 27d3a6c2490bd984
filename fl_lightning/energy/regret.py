"""A controller of levels: which level of a ladder a sequence or a token takes, by its predicted
loss.

    r_k(h) = <w_k, h> + b_k,    r_0 = 0,    k = argmin_k r_k + lambda c_k / c_0

h is the state after the first block, which is always computed. r_k is regressed on the measured
regret CE_k - CE_0 in nats, which every step of training knows for each token: nothing is drawn, and
no gate can die. lambda is in no loss. It only spends the budget: an integral controller raises it
where the wishes cost more than the budget, and lowers it where they cost less. Routers of layers
are known, such as D-LLM's (Jiang et al., NeurIPS 2024), and are trained by gates; to regress what a
level loses is this project's own.

``B`` sequences of ``T`` tokens, ``d`` features, ``K`` levels below the full network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_lightning.errors import require
from fl_lightning.metrics.text import IGNORED

LARGEST_PRICE = 4.0
"""Bound of lambda: nats for what a token costs at level 0."""
PRICE_STEP = 0.05
"""Step of the integral controller, in nats for spending twice the budget."""
HUBER_NATS = 1.0
"""Errors above this count linearly, so that single bytes of a large loss do not rule the fit."""


class Sequences(Protocol):
    """How long sequences are."""

    @property
    def prompts(self) -> Tensor:
        """Tokens of each prompt, int64 ``[B]``."""

    def after_prompts(self, tokens: int) -> Tensor:
        """Return which tokens are read one by one after the prompt, bool ``[B, T]``."""


class RegretController(nn.Module):
    """The predicted regret of each level, linear in a state.

    It begins with zeros: no level is predicted to lose anything.

    Args:
        width: d.
        levels: K.

    Raises:
        InputError: a size is less than 1.
    """

    def __init__(self, width: int, levels: int) -> None:
        super().__init__()
        require(
            min(width, levels) >= 1,
            f"a controller of width={width}, levels={levels}",
            "sizes are 1 or more",
            "write --model.levels 3",
        )
        self.weight = nn.Parameter(torch.zeros(levels, width))
        self.bias = nn.Parameter(torch.zeros(levels))

    def forward(self, states: Tensor) -> Tensor:
        """Return the predicted regrets ``[..., K + 1]`` in nats a token of states ``[..., d]``;
        that of level 0 is 0."""
        return F.pad(F.linear(states.to(self.weight.dtype), self.weight, self.bias), (1, 0))

    def priced(self, costs: Tensor, price: float) -> Callable[[Tensor], Tensor]:
        """Return what maps states ``[..., d]`` to r_k + lambda c_k / c_0, ``[..., M]``, in one
        product: a step of one token pays every call.

        Args:
            costs: what a token costs at each of the levels that there are, ``[M]``, the full
                network first, in any unit.
            price: lambda.
        """
        weight = F.pad(self.weight.detach(), (0, 0, 1, 0))[: len(costs)]
        bias = F.pad(self.bias.detach(), (1, 0))[: len(costs)]
        bias = bias + (price * costs.double() / float(costs[0])).to(bias)
        return lambda states: F.linear(states.to(weight.dtype), weight, bias)

    def regression(
        self,
        states: Tensor,
        labels: Tensor,
        levels: Tensor,
        full: Tensor,
        subset: Tensor,
        lengths: Sequences,
    ) -> Tensor:
        """Return the loss of the predictions for two passes that were made anyway.

        Args:
            states: after the first block, ``[B, T, d]``.
            labels: ``[B, T]``.
            levels: of the sequences of ``subset``, int64 ``[B]``: the mean regret of their labelled
                tokens is predicted from their prompts; or of its tokens, int64 ``[B, T]``: the
                regret of each token after a prompt is predicted from its own state.
            full: logits of all branches ``[B, T, V]``.
            subset: logits at the levels ``[B, T, V]``.
            lengths: of the sequences.
        """
        regret = token_losses(subset.detach(), labels) - token_losses(full.detach(), labels)
        labelled, levels = labels != IGNORED, levels.to(states.device)
        if levels.dim() == 1:
            mean = regret.sum(1) / labelled.sum(1).clamp_min(1)
            return self.loss(prompt_states(states, lengths.prompts), levels, mean)
        decided = labelled & lengths.after_prompts(labels.shape[1]).to(labelled.device)
        return self.loss(states[decided], levels[decided], regret[decided])

    def loss(self, states: Tensor, levels: Tensor, measured: Tensor) -> Tensor:
        """Return the mean Huber loss of the regrets of some levels against the measured ones; 0
        where all are at level 0, of which nothing is to be learnt.

        Args:
            states: ``[N, d]``; they get no gradient.
            levels: int64 ``[N]``.
            measured: CE_k - CE_0 in nats a token, ``[N]``.
        """
        predicted = self(states.detach()).float().gather(-1, levels.unsqueeze(-1))[:, 0]
        told = F.huber_loss(predicted, measured.detach(), reduction="none", delta=HUBER_NATS)
        counts = (levels > 0).to(told.dtype)
        return (told * counts).sum() / counts.sum().clamp_min(1)


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of each token in nats, ``[B, T]``, of logits ``[B, T, V]``; 0 where it has no
    label."""
    by_class = logits.float().transpose(1, 2)
    return F.cross_entropy(by_class, labels, ignore_index=IGNORED, reduction="none")


def next_price(price: float, spent: Tensor, granted: Tensor) -> float:
    """Return lambda after a batch: the integral of spent / granted - 1, within ``[0,
    LARGEST_PRICE]``.

    Args:
        price: lambda so far.
        spent: what the wishes of each sequence would cost, ``[B]``.
        granted: their budgets, ``[B]``, in the same unit.
    """
    excess = float((spent.double() / granted.double().clamp_min(1e-300)).mean()) - 1.0
    return min(max(price + PRICE_STEP * excess, 0.0), LARGEST_PRICE)


def prompt_states(states: Tensor, prompts: Tensor) -> Tensor:
    """Return the mean state of the tokens of each prompt, ``[B, d]``.

    Args:
        states: ``[B, T, d]``.
        prompts: tokens of each prompt, int64 ``[B]``, 1 or more.
    """
    inside = torch.arange(states.shape[1]) < prompts.unsqueeze(1)
    weights = (inside / prompts.unsqueeze(1)).to(states)
    return (states * weights.unsqueeze(-1)).sum(1)


@contextmanager
def acting_after(layer: nn.Module, act: Callable[[Tensor], None]) -> Iterator[None]:
    """Call ``act`` with the output of a layer in each of its passes within the block of code."""

    def hook(module: nn.Module, arguments: Any, output: Tensor) -> None:
        act(output)

    with layer.register_forward_hook(hook):
        yield
