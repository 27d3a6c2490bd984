"""A language model that is read and continued at the levels of a ladder, within an energy budget."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_lightning.energy.budgets.device import Device
from fl_lightning.energy.budgets.ladder import LARGEST_LOSS, BranchCosts, distinct
from fl_lightning.energy.budgets.levels import LevelLedger, levels_of
from fl_lightning.energy.budgets.measuring import Measurements
from fl_lightning.energy.budgets.passes import Lengths
from fl_lightning.energy.options import HIGH, OFF
from fl_lightning.energy.switched.branches import BranchPlan, switch_branches
from fl_lightning.metrics.text import IGNORED
from fl_lightning.models import MeasuredNetwork
from fl_lightning.models.adapters import merged_lora
from fl_lightning.models.language.generating import Generating
from fl_lightning.models.language.llama import TokenInputs

EVALUATED_SEQUENCES = 64
"""Sequences of a batch whose losses under many masks are computed."""


class LadderNetwork(MeasuredNetwork, Generating):
    """A network of switched branches, the ladder that its levels are of, and the device that it runs on.

    In training all branches are computed, or two passes are made side by side (:meth:`sandwich`). In
    evaluation every sequence keeps the budget of its device: it takes the best level that it can afford
    to its last token, and a ledger charges each token before it is computed. Adapters are merged into
    their base meanwhile, since that is what the costs are of. ``B`` sequences of ``T`` tokens, ``G``
    branches, ``K`` levels below the full network, ``V`` tokens of the vocabulary.

    Args:
        network: a :class:`~fl_lightning.models.language.llama.Llama`, perhaps with adapters; it is changed in
            place.
        device: what a sequence may cost; :meth:`run_on` changes it.
        full_prompt: whether prompts are read with all branches where the budget allows it.
    """

    reads_tokens = True

    def __init__(self, network: nn.Module, device: Device, full_prompt: bool) -> None:
        super().__init__()
        self.board = switch_branches(network)
        self.network: Any = network
        self.full_prompt = full_prompt
        self.run_on(device, torch.ones(1, self.board.branches, dtype=torch.bool))

    def run_on(self, device: Device, ladder: Tensor) -> None:
        """Take a client's device, and the ladder, bool ``[K + 1, G]``, the full network first."""
        self.on, self.levels = device, distinct(ladder)
        self._masks = torch.cat((self.levels, torch.zeros_like(self.levels[:1])))  # the last: of no level
        self._expected: Tensor | None = None
        self._measured = Measurements()

    def forward(self, inputs: TokenInputs) -> Tensor:
        """Return the logits ``[B, T, V]``: in training of all branches, else within the budget of the
        sequences. Tokens that are refused have the logits 0."""
        if self.training:
            return self.network(inputs)
        return self._read(inputs)[0]

    def ledger(self, lengths: Lengths) -> LevelLedger:
        """Return the ledger of sequences of these lengths."""
        each = list(zip(lengths.prompts.tolist(), lengths.new.tolist(), strict=True))
        budgets = torch.tensor([self.on.budget(*one, "q99") for one in each], dtype=torch.float64)
        prompts = [BranchCosts.of(self.on, "q99", prompt).units(self.levels) for prompt, _ in each]
        costs = BranchCosts.of(self.on, "q99").units(self.levels)
        return LevelLedger(budgets, torch.stack(prompts), costs, lengths.new)

    # Training, and the losses of subsets

    def sandwich(self, inputs: TokenInputs, target: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of all branches and those of subsets, both ``[B, T, V]`` with gradients.

        Args:
            inputs: of the network.
            target: labels ``[B, T]``.
            masks: the subset of each sequence, bool ``[B, G]``.
        """
        full = self.network(inputs)
        with self.board.using(self._plan(masks, target, full.shape[1])):
            return full, self.network(inputs)

    def _plan(self, masks: Tensor, target: Tensor, tokens: int) -> BranchPlan:
        if not self.full_prompt:
            return BranchPlan.of_sequences(masks, tokens)
        prompts = Lengths.of(target, tokens).prompts.unsqueeze(1)
        in_prompt = (torch.arange(tokens) < prompts).unsqueeze(2)
        return BranchPlan(masks.unsqueeze(1) | in_prompt)

    @torch.no_grad()
    def losses(self, inputs: TokenInputs, target: Tensor, masks: Tensor) -> Tensor:
        """Return the loss of sequences under each mask in nats a labelled token, float64 ``[M]``, none above
        ``LARGEST_LOSS``.

        Args:
            inputs: of the network.
            target: labels ``[B, T]``.
            masks: bool ``[M, G]``.
        """
        known: dict[tuple[bool, ...], Tensor] = {}
        tokens = ids_of(inputs).shape[1]
        labels = target[:, :tokens].flatten()
        with merged_lora(self.network):
            for mask in masks:
                key = tuple(mask.tolist())
                if key in known:
                    continue
                each = mask.expand(len(target), -1)
                with self.board.using(self._plan(each, target, tokens)):
                    outputs = self.network(inputs)
                loss = F.cross_entropy(outputs.flatten(0, 1).float(), labels, ignore_index=IGNORED)
                known[key] = loss.double().nan_to_num(nan=LARGEST_LOSS).clamp(0, LARGEST_LOSS).cpu()
        return torch.stack([known[tuple(mask.tolist())] for mask in masks])

    # Evaluation

    def expect(self, target: Tensor) -> None:
        self._expected, self._measured = target, Measurements()

    def measured(self) -> Mapping[str, Tensor]:
        self._expected = None
        return self._measured.metrics()

    @torch.no_grad()
    def options_of(self, inputs: TokenInputs, target: Tensor) -> tuple[Tensor, Lengths]:
        """Return the option of each branch at each token of sequences that are read within their budgets,
        int64 ``[B, T, G]``, and their lengths.

        Args:
            inputs: of the network.
            target: labels ``[B, T]``.
        """
        self.expect(target)
        _, choices, lengths = self._read(inputs)
        self._expected = None
        return choices, lengths

    @torch.no_grad()
    def _read(self, inputs: TokenInputs) -> tuple[Tensor, Tensor, Lengths]:
        """Read whole sequences, and return logits, options and lengths."""
        ids = ids_of(inputs)
        target = self._expected
        if target is None or len(target) != len(ids):
            target = torch.full_like(ids, IGNORED)
        lengths = Lengths.of(target, ids.shape[1])
        ledger = self.ledger(lengths)
        levels, granted = levels_of(ledger, lengths, ids.shape[1], self.full_prompt)
        gates = self._masks[levels]
        with merged_lora(self.network), self.board.using(BranchPlan(gates)):
            outputs = self.network(inputs)
        choices = options(gates)
        self._measured.count(ledger)
        self._measured.read(self.on, choices, lengths, granted)
        return outputs * granted.to(outputs).reshape(-1, 1, 1), choices, lengths

    def continued(
        self, ids: Tensor, lengths: Tensor, max_new_tokens: int, eos: int | None, filler: int
    ) -> Tensor:
        """Return what ``generate`` returns, within the budget of each sequence: of its prompt and
        ``max_new_tokens - 1`` tokens after it. A sequence that is refused ends."""
        prompts = lengths.cpu()
        allowed = Lengths(prompts, torch.full_like(prompts, max_new_tokens - 1))
        decoding = Decoding(self, allowed, eos)
        hook = self.network.embed_tokens.register_forward_hook(decoding.choose)
        try:
            with merged_lora(self.network), self.board.using(None):
                found = self.network.continued(ids, lengths, max_new_tokens, eos, filler)
        finally:
            hook.remove()
        decoding.finish(self._measured)
        places = torch.arange(found.shape[1])
        refused = decoding.ledger.refused.unsqueeze(1) & (places >= decoding.granted_tokens.unsqueeze(1))
        return found.masked_fill(refused.to(found.device), filler if eos is None else eos)

    def gates_of(self, levels: Tensor) -> Tensor:
        """Return which branches tokens at these levels ``[B, T]`` are computed by, bool ``[B, T, G]``."""
        return self._masks[levels]


def ids_of(inputs: TokenInputs) -> Tensor:
    """Return the token ids ``[B, T]`` of a network's inputs."""
    return inputs if isinstance(inputs, Tensor) else inputs["input_ids"]


def options(gates: Tensor) -> Tensor:
    """Return branches that are computed or not as options, int64 of the same shape."""
    return torch.where(gates, HIGH, OFF)


class Decoding:
    """The levels of sequences that are generated: those of the prompts, then of one token at a time.

    Args:
        network: what generates.
        lengths: of the prompts, and the tokens that may be read after them.
        eos: the token that ends a sequence.
    """

    def __init__(self, network: LadderNetwork, lengths: Lengths, eos: int | None) -> None:
        self.network, self.lengths, self.eos = network, lengths, eos
        self.ledger = network.ledger(lengths)
        wishes = self.ledger.after_full_prompt() if network.full_prompt else (self.ledger.constant(),) * 2
        self.prompt_wish, self.wish = wishes
        self.active = torch.ones(len(lengths.prompts), dtype=torch.bool)
        self.granted_tokens = torch.zeros(len(lengths.prompts), dtype=torch.int64)
        """Tokens that each sequence has been given, before it ended or was refused more."""
        self.steps: list[Tensor] = []
        """Levels of each step, int64 ``[B, T]`` or ``[B, 1]``; -1 for padding and where there is no token."""

    def choose(self, embedding: nn.Module, arguments: Any, embedded: Tensor) -> None:
        """Choose the levels of tokens that are just embedded, ``[B, T, d]``: a forward hook."""
        if not self.steps:
            taken = self.ledger.decide_prompts(self.prompt_wish)
            self.active &= ~self.ledger.refused
            in_prompt = torch.arange(embedded.shape[1]) < self.lengths.prompts.unsqueeze(1)
            levels = torch.where(in_prompt, taken.unsqueeze(1), -1)
        else:
            if self.eos is not None:
                self.active &= (arguments[0][:, -1] != self.eos).cpu()
            taken = self.ledger.decide(self.wish, self.active)
            self.active &= ~self.ledger.refused
            levels = taken.unsqueeze(1)
        self.steps.append(levels)
        self.granted_tokens += self.active.long()
        self.network.board.plan = BranchPlan(self.network.gates_of(levels))

    def finish(self, measured: Measurements) -> None:
        """Tell what the sequences have cost."""
        prompts, *later = self.steps
        longest = int(self.lengths.prompts.max()) + len(later)
        levels = torch.full((len(prompts), longest), -1)
        levels[:, : prompts.shape[1]] = prompts
        rows = torch.arange(len(prompts))
        for step, one in enumerate(later):
            levels[rows, self.lengths.prompts + step] = one[:, 0]
        given = Lengths(self.lengths.prompts, (self.granted_tokens - 1).clamp_min(0))
        choices = options(self.network.gates_of(levels))
        measured.count(self.ledger)
        measured.generated(self.network.on, choices, given, ~self.ledger.refused, self.lengths)
