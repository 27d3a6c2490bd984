"""A language model that is read and continued at the levels of a ladder, within an energy
budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_lightning.energy.budgets.decoding import DecodedSequences
from fl_lightning.energy.budgets.device import Device
from fl_lightning.energy.budgets.gates import BranchGates
from fl_lightning.energy.budgets.keeping import BudgetKeeper, ids_of
from fl_lightning.energy.budgets.ladder import LARGEST_LOSS, BranchCosts, distinct
from fl_lightning.energy.budgets.layer_gates import LayerGates, masks_by_cost
from fl_lightning.energy.budgets.ledger import REFUSED
from fl_lightning.energy.budgets.levels import LevelLedger, levels_of, mixed_levels
from fl_lightning.energy.budgets.measuring import Measurements
from fl_lightning.energy.budgets.passes import Lengths
from fl_lightning.energy.options import HIGH, OFF
from fl_lightning.energy.regret import RegretController, acting_after, prompt_states
from fl_lightning.energy.switched.branches import BranchPlan, BranchWeights, switch_branches
from fl_lightning.metrics.text import IGNORED
from fl_lightning.models.adapters import merged_lora
from fl_lightning.models.language.llama import TokenInputs, rotary_tables

EVALUATED_SEQUENCES = 64
"""Sequences of a batch whose losses under many masks are computed."""


def options(gates: Tensor) -> Tensor:
    """Return branches that are computed or not as options, int64 of the same shape."""
    return torch.where(gates, HIGH, OFF)


class LadderNetwork(BudgetKeeper):
    """A network of switched branches, the ladder that its levels are of, and the device that it
    runs on.

    In training all branches are computed, or two passes are made side by side (:meth:`sandwich`).
    In evaluation every sequence keeps the budget of its device: it takes the best level that it can
    afford to its last token, and a ledger charges each token before it is computed. Adapters are
    merged into their base meanwhile, since that is what the costs are of. ``B`` sequences of ``T``
    tokens, ``G`` branches, ``K`` levels below the full network, ``V`` tokens of the vocabulary.

    Args:
        network: a :class:`~fl_lightning.models.language.llama.Llama`, perhaps with adapters; it is
            changed in place.
        device: what a sequence may cost; :meth:`run_on` changes it.
        full_prompt: whether prompts are read with all branches where the budget allows it.
        controller: what predicts the loss of each level, where levels are chosen by it; the device
            says what it chooses for. The first block is then computed for every token.
        gates: of the branches, where the ladder is found by them. Where they read states and a
            ladder is known, its levels are all subsets that have the branches of the ladder's last
            one, and the gates choose one for each sequence.
    """

    def __init__(
        self,
        network: nn.Module,
        device: Device,
        full_prompt: bool,
        controller: RegretController | None = None,
        gates: BranchGates | LayerGates | None = None,
    ) -> None:
        super().__init__()
        self.board = switch_branches(network)
        self.network: Any = network
        self.full_prompt, self.controller = full_prompt, controller
        self.gates = gates
        self.run_on(device, torch.ones(1, self.board.branches, dtype=torch.bool))

    def run_on(self, device: Device, ladder: Tensor, price: float = 0.0) -> None:
        """Take a client's device, the ladder, bool ``[K + 1, G]``, the full network first, and the
        price of joules that the client's controller has found."""
        self.levels, self.price = distinct(ladder), price
        known = len(self.levels) > 1
        self.choosing = self.gates if known and isinstance(self.gates, LayerGates) else None
        if self.choosing is not None:
            self.levels = masks_by_cost(BranchCosts.of(device, "q99"), ladder[-1].bool())
        self.on = device if known else device.undecided
        # the last: of no level
        self._masks = torch.cat((self.levels, torch.zeros_like(self.levels[:1])))
        self.begin()

    def forward(self, inputs: TokenInputs) -> Tensor:
        """Return the logits ``[B, T, V]``: in training of all branches, else within the budget of
        the sequences. Tokens that are refused have the logits 0."""
        if self.training:
            return self.network(inputs)
        return self._read(inputs)[0]

    def levels_in_words(self) -> list[dict[str, Any]]:
        """Return what each level leaves out, by the branches' names, and its share of the joules of
        a step of all branches, ready for JSON; the dearest level comes first."""
        names, shares = list(self.on.table.groups), BranchCosts.of(self.on).share(self.levels)
        return [
            {
                "left_out": [name for name, on in zip(names, mask, strict=True) if not on],
                "share": round(share, 4),
            }
            for mask, share in zip(self.levels.tolist(), shares.tolist(), strict=True)
        ]

    def ledger(self, lengths: Lengths) -> LevelLedger:
        """Return the ledger of sequences of these lengths."""
        return LevelLedger.of(self.on, lengths, self.levels)

    # Levels that are decided

    @property
    def decisive(self) -> nn.Module:
        """The layer whose output ``[B, T, d]`` the levels of its tokens are known by: the first
        block where something decides, else the embedding."""
        return self.network.embed_tokens if self.on.deciding == "none" else self.network.layers[0]

    def scores(self) -> Callable[[Tensor], Tensor]:
        """Return what maps states to the priced regrets of the levels that there are."""
        assert self.controller is not None, "nothing decides"
        return self.controller.priced(BranchCosts.of(self.on, "q99").units(self.levels), self.price)

    def decided_prompts(
        self, ledger: LevelLedger, lengths: Lengths, states: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the levels that prompts and the tokens after them have, int64 ``[B]``: where
        sequences are decided for, the level of least priced regret among those that each can afford
        to its end.

        Args:
            ledger: of the sequences.
            lengths: of the sequences.
            states: after :attr:`decisive`, ``[B, T, d]``.
        """
        if self.choosing is not None:
            return (self._chosen(ledger, lengths, states),) * 2
        prompt, later = ledger.standing(self.full_prompt)
        if self.on.deciding != "sequence":
            return prompt, later
        scores = self.scores()(prompt_states(states, lengths.prompts)).cpu()
        dearer = torch.arange(len(self.levels)) < later.unsqueeze(1)  # costs fall with the level
        chosen = scores.masked_fill(dearer, torch.inf).argmin(-1)
        whole = (prompt == 0) & self.full_prompt
        return torch.where(whole, prompt, chosen), chosen

    @torch.no_grad()
    def _chosen(self, ledger: LevelLedger, lengths: Lengths, embedded: Tensor) -> Tensor:
        """Return the level that the gates choose for each sequence, int64 ``[B]``, in a pass of
        their own over the embedded prompts ``[B, T, d]``; a device finds it while it reads them."""
        assert self.choosing is not None
        x = embedded[:, : int(lengths.prompts.max())]
        places = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        rotary = rotary_tables(places, self.network.head_width, self.network.variant)
        weights = self.choosing.chosen(ledger, lengths.prompts, self.levels)
        with self.board.weighted(weights):
            for layer in self.network.layers:
                x = layer(x, rotary)
        return weights.levels

    def wishes(self, later: Tensor) -> Callable[[Tensor], Tensor]:
        """Return what maps the states ``[B, T, d]`` of tokens after a prompt to the levels they
        wish for, int64 ``[B, T]``.

        Args:
            later: the levels that they have where nothing decides for each of them, int64 ``[B]``.
        """
        if self.on.deciding != "step":
            return lambda states: later.unsqueeze(1).expand(-1, states.shape[1])
        scores = self.scores()
        return lambda states: scores(states).argmin(-1).cpu()

    # Training, and the losses of subsets

    def sandwich(
        self, inputs: TokenInputs, target: Tensor, masks: Tensor | BranchWeights
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the logits of all branches and those of subsets, both ``[B, T, V]`` with
        gradients, and the states after the first block, ``[B, T, d]``, which both passes have in
        common where it is always on.

        Args:
            inputs: of the network.
            target: labels ``[B, T]``.
            masks: the subset of each sequence, bool ``[B, G]``, or of each token, bool ``[B, T,
                G]``; or the weights of each sequence's branches, with a gradient.
        """
        states: list[Tensor] = []
        with acting_after(self.network.layers[0], states.append):
            full = self.network(inputs)
        if isinstance(masks, BranchWeights):
            with self.board.weighted(masks):
                return full, self.network(inputs), states[0]
        with self.board.using(self._plan(masks, target, full.shape[1])):
            return full, self.network(inputs), states[0]

    def _plan(self, masks: Tensor, target: Tensor, tokens: int) -> BranchPlan:
        every = masks[:, :tokens] if masks.dim() == 3 else masks.unsqueeze(1).expand(-1, tokens, -1)
        if not self.full_prompt:
            return BranchPlan(every)
        prompts = Lengths.of(target, tokens).prompts.unsqueeze(1)
        in_prompt = (torch.arange(tokens) < prompts).unsqueeze(2)
        return BranchPlan(every | in_prompt)

    def drawn_levels(self, target: Tensor, noise: np.random.Generator) -> Tensor:
        """Return the level that each sequence is trained at, int64 ``[B]``, one that its budget
        affords; or that of each token, int64 ``[B, T]``, where tokens are decided for.

        Args:
            target: labels ``[B, T]``.
            noise: what is drawn from.
        """
        lengths = Lengths.of(target, target.shape[1])
        ledger, count = self.ledger(lengths), len(self.levels)
        best = ledger.constant().tolist()
        drawn = torch.tensor([int(noise.integers(first, count)) for first in best])
        if self.on.deciding != "step":
            return drawn
        prompts = torch.zeros_like(drawn) if self.full_prompt else drawn
        return mixed_levels(ledger, lengths, prompts, drawn, target.shape[1], noise)

    def levels_to_train(
        self, inputs: TokenInputs, target: Tensor, noise: np.random.Generator
    ) -> Tensor:
        """Return the levels that gates choose for sequences, where they do, int64 ``[B]``; else
        those of :meth:`drawn_levels`."""
        if self.choosing is None:
            return self.drawn_levels(target, noise)
        ids = ids_of(inputs)
        lengths = Lengths.of(target, ids.shape[1])
        return self._chosen(self.ledger(lengths), lengths, self.network.embed_tokens(ids))

    def regret_loss(
        self, states: Tensor, target: Tensor, levels: Tensor, full: Tensor, subset: Tensor
    ) -> Tensor:
        """Return the loss of the controller's predictions for two passes that were made; see
        :meth:`~fl_lightning.energy.regret.RegretController.regression`."""
        assert self.controller is not None, "nothing decides"
        tokens = full.shape[1]
        levels = levels[:, :tokens] if levels.dim() == 2 else levels
        lengths = Lengths.of(target, tokens)
        return self.controller.regression(states, target[:, :tokens], levels, full, subset, lengths)

    @torch.no_grad()
    def spent_by_wishes(self, states: Tensor, lengths: Lengths) -> tuple[Tensor, Tensor]:
        """Return what each sequence would cost at the levels that it wishes for, and its budget,
        int64 ``[B]`` units of 2^-40 J.

        Args:
            states: after the first block, ``[B, T, d]``.
            lengths: of the sequences.
        """
        ledger = self.ledger(lengths)
        prompts, later = self.decided_prompts(ledger, lengths, states)
        each = ledger.costs[self.wishes(later)(states)] * lengths.after_prompts(states.shape[1])
        return ledger.prompts.gather(1, prompts.unsqueeze(1))[:, 0] + each.sum(1), ledger.budget

    @torch.no_grad()
    def losses(self, inputs: TokenInputs, target: Tensor, masks: Tensor) -> Tensor:
        """Return the loss of sequences under each mask in nats a labelled token, float64 ``[M]``,
        none above ``LARGEST_LOSS``.

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

    def mean_losses(self, batches: Iterable[Any], masks: Tensor) -> Tensor:
        """Return the mean loss under each mask over the labelled tokens of batches of inputs and
        targets, float64 ``[M]``; 0 without any."""
        total, tokens = torch.zeros(len(masks), dtype=torch.float64), 0
        for inputs, target, *_ in batches:
            count = int((target != IGNORED).sum())
            total += count * self.losses(inputs, target, masks)
            tokens += count
        return total / max(tokens, 1)

    # Evaluation

    def in_use(self) -> AbstractContextManager[None]:
        return merged_lora(self.network)

    @property
    def decider(self) -> nn.Module | None:
        return self.controller or self.choosing

    @torch.no_grad()
    def _read(self, inputs: TokenInputs) -> tuple[Tensor, Tensor, Lengths]:
        lengths = self.lengths_of(ids_of(inputs))
        ledger = self.ledger(lengths)
        found: list[tuple[Tensor, Tensor]] = []

        def decide(states: Tensor) -> None:
            prompts, later = self.decided_prompts(ledger, lengths, states)
            found.append(levels_of(ledger, lengths, prompts, self.wishes(later)(states)))
            self.board.plan = BranchPlan(self._masks[found[0][0]])

        with merged_lora(self.network), self.board.using(None), acting_after(self.decisive, decide):
            outputs = self.network(inputs)
        levels, granted = found[0]
        choices = options(self._masks[levels])
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
        decoding = LadderDecoding(self, allowed, eos)
        with (
            merged_lora(self.network),
            self.board.using(None),
            decoding.ends_seen(self.network.embed_tokens),
            acting_after(self.decisive, decoding.choose),
        ):
            found = self.network.continued(ids, lengths, max_new_tokens, eos, filler)
        decoding.finish(self._measured)
        return decoding.sequences.without_refused(found, decoding.ledger, filler)

    def gates_of(self, levels: Tensor) -> Tensor:
        """Return which branches tokens at these levels ``[B, T]`` are computed by, bool ``[B, T,
        G]``."""
        return self._masks[levels]


class LadderDecoding:
    """The levels of sequences that are generated: those of the prompts, then of one token at a
    time.

    Args:
        network: what generates.
        lengths: of the prompts, and the tokens that may be read after them.
        eos: the token that ends a sequence.
    """

    def __init__(self, network: LadderNetwork, lengths: Lengths, eos: int | None) -> None:
        self.network, self.sequences = network, DecodedSequences(lengths, eos)
        self.ledger = network.ledger(lengths)
        self.wishes: Callable[[Tensor], Tensor]
        self.steps: list[Tensor] = []
        """Levels of each step, int64 ``[B, T]`` or ``[B, 1]``; -1 for padding and where there is no
        token."""

    @contextmanager
    def ends_seen(self, embedding: nn.Module) -> Iterator[None]:
        """Begin each step within the block of code: see which sequences have ended, and forget the
        plan of the step before until levels are chosen."""

        def begin(module: nn.Module, arguments: Any) -> None:
            self.network.board.plan = None
            if self.steps:
                self.sequences.end_at(arguments[0])

        with embedding.register_forward_pre_hook(begin):
            yield

    def choose(self, states: Tensor) -> None:
        """Choose the levels of tokens of which the states ``[B, T, d]`` are known by now."""
        lengths, ledger = self.sequences.lengths, self.ledger
        if not self.steps:
            wish, later = self.network.decided_prompts(ledger, lengths, states)
            self.wishes = self.network.wishes(later)
            taken = ledger.decide_prompts(wish)
            in_prompt = torch.arange(states.shape[1]) < lengths.prompts.unsqueeze(1)
            levels = torch.where(in_prompt, taken.unsqueeze(1), REFUSED)
        else:
            wish = self.wishes(states)[:, 0]
            levels = ledger.decide(wish, self.sequences.active).unsqueeze(1)
        self.sequences.active &= ~ledger.refused
        self.steps.append(levels)
        self.sequences.grant()
        self.network.board.plan = BranchPlan(self.network.gates_of(levels))

    def finish(self, measured: Measurements) -> None:
        """Tell what the sequences have cost."""
        choices = options(self.network.gates_of(self.sequences.in_places(self.steps, REFUSED)))
        measured.count(self.ledger)
        given, allowed = self.sequences.given, self.sequences.lengths
        measured.generated(self.network.on, choices, given, ~self.ledger.refused, allowed)
