"""A language model whose linear layers are switched token by token, within an energy budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_lightning.energy.budgets.decoding import DecodedSequences
from fl_lightning.energy.budgets.device import Device
from fl_lightning.energy.budgets.keeping import BudgetKeeper, ids_of
from fl_lightning.energy.budgets.measuring import Measurements
from fl_lightning.energy.budgets.passes import (
    LayerwisePlan,
    Lengths,
    SampledPlan,
    budgeted_ledger,
    choose_prompts,
    choose_tokens,
    token_costs,
)
from fl_lightning.energy.controllers import TABSController, TokenController
from fl_lightning.energy.options import HIGH, OFF
from fl_lightning.energy.switched import Plan, SwitchedLinear, TokenPlan, narrow_kept
from fl_lightning.errors import InputError
from fl_lightning.models.language.llama import TokenInputs

Controller = TokenController | TABSController | None


class BudgetedNetwork(BudgetKeeper):
    """A switched language model, its controller, and the device that it runs on.

    In training the options are drawn (:meth:`sample`). In evaluation every sequence keeps the
    budget of its device: the ledger chooses before anything is computed. Under TABS, whose layers
    choose from their own hidden states, nothing holds the budget. ``B`` sequences of ``T`` tokens,
    ``G`` groups, ``V`` tokens of the vocabulary.

    Args:
        network: causal language model of switched layers.
        switches: these layers, in the order of the groups.
        controller: what the logits of the options come from; None: all layers are at *high*, and
            what that costs is measured.
        device: what a sequence may cost; :meth:`run_on` changes it.
    """

    def __init__(
        self,
        network: nn.Module,
        switches: list[SwitchedLinear],
        controller: Controller,
        device: Device,
    ) -> None:
        super().__init__()
        self.network: Any = network
        self.controller: Controller = controller
        self.board = switches[0].board
        self._embedding = [embedding_of(network)]  # in a list: it is a module of the network
        self.run_on(device, 0.0)

    def run_on(self, device: Device, price: float) -> None:
        """Take a client's device, and the price that it has found: lambda, relative to its
        budget."""
        self.on, self.price = device, price
        self.begin()

    def forward(self, inputs: TokenInputs) -> Tensor:
        """Return the logits ``[B, T, V]``: in training with all layers at ``high``, else within the
        budget of the sequences. Tokens that are refused have the logits 0."""
        if self.training:
            with self.board.using(None):
                return self.network(inputs)
        return self._read(inputs)[0]

    def sample(
        self, inputs: TokenInputs, target: Tensor, noise: np.random.Generator, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Return the logits ``[B, T, V]`` under options that are drawn, and E / E_max, the mean
        over the sequences, both with gradients.

        Args:
            inputs: of the network.
            target: labels ``[B, T]``.
            noise: what the options are drawn from.
            temperature: tau of the Gumbel softmax.
        """
        assert self.controller is not None, "nothing is drawn where all layers are at high"
        ids = ids_of(inputs)
        layerwise = isinstance(self.controller, TABSController)
        theta: Any = self.controller if layerwise else self._logits(ids)
        lengths, device = Lengths.of(target, ids.shape[1]), self.on
        budgets = lengths.each(device.budget, "mean")
        each = zip(lengths.prompts.tolist(), lengths.new.tolist(), strict=True)
        rest = torch.tensor([device.rest(*one) if device.whole else 0.0 for one in each])
        drawn = SampledPlan(theta, device, lengths, ids.shape[1], noise, temperature)
        with self.board.using(drawn):
            outputs = self.network(inputs)
        energy = drawn.energy()
        return outputs, ((energy + rest.to(energy)) / budgets.to(energy)).mean()

    def _logits(self, ids: Tensor) -> Tensor:
        with torch.no_grad():
            embedded = self._embedding[0](ids)
        return self.logits_of(embedded)

    def logits_of(self, embedded: Tensor) -> Tensor:
        """Return the logits ``[B, T, G, 3]`` of tokens that are embedded as ``[B, T, d]``."""
        assert isinstance(self.controller, TokenController), (
            "layers that choose for themselves have none"
        )
        return self.controller.logits_of(embedded)

    # Evaluation

    @property
    def decider(self) -> Controller:
        return self.controller

    @torch.no_grad()
    def _read(self, inputs: TokenInputs) -> tuple[Tensor, Tensor, Lengths]:
        ids = ids_of(inputs)
        lengths = self.lengths_of(ids)
        chosen, granted = self._choose(ids, lengths)
        with self.board.using(chosen):
            outputs = self.network(inputs)
        choices = taken(chosen)
        self._measured.read(self.on, choices, lengths, granted)
        return outputs * granted.to(outputs).reshape(-1, 1, 1), choices, lengths

    def _choose(self, ids: Tensor, lengths: Lengths) -> tuple[Plan | LayerwisePlan, Tensor]:
        """Return what chooses the options of sequences ``[B, T]``, and which of them are not
        refused."""
        price, granted = self.prices(lengths), torch.ones(len(ids), dtype=torch.bool)
        if self.controller is None:
            return Plan(choices=torch.full((*ids.shape, self.on.groups), HIGH)), granted
        if isinstance(self.controller, TABSController):
            costs = token_costs(self.on, lengths, ids.shape[1])
            return LayerwisePlan(self.controller, costs, price), granted
        theta = self._logits(ids).cpu()
        ledger = budgeted_ledger(self.on, lengths)
        choices = choose_prompts(ledger, self.on, theta, lengths, price)
        rows = torch.arange(len(ids))
        for step in range(int(lengths.new.max()) if len(ids) else 0):
            active, place = lengths.new > step, (lengths.prompts + step).clamp(max=ids.shape[1] - 1)
            found, given = choose_tokens(ledger, theta[rows, place], price, active)
            choices[rows[given], place[given]] = found[given]
        self._measured.count(ledger)
        return Plan(choices=choices), ~ledger.refused

    def prices(self, lengths: Lengths) -> Tensor:
        """Return lambda of each sequence in logits per joule, ``[B]``.

        What costs a share of the budget has this share of lambda: ledgers compare 0.99 quantiles,
        so the budget is theirs. Layers that choose for themselves compare means.
        """
        kind = "mean" if isinstance(self.controller, TABSController) else "q99"
        return lengths.each(lambda prompt, new: self.price / self.on.budget(prompt, new, kind))

    def continued(
        self, ids: Tensor, lengths: Tensor, max_new_tokens: int, eos: int | None, filler: int
    ) -> Tensor:
        """Return what ``generate`` returns, within the budget of each sequence: of its prompt and
        ``max_new_tokens - 1`` tokens after it. A sequence that is refused ends."""
        options = {"max_new_tokens": max_new_tokens, "eos": eos, "pad": filler}
        if not getattr(self.network, "pads_prompts_left", False):
            return self._decode(ids, lengths.cpu(), options)
        measured, rows, each = self._measured, [], []
        for row, n in zip(ids, lengths.cpu(), strict=True):
            self._measured = Measurements()
            rows.append(self._decode(row[:n].unsqueeze(0), n.reshape(1), options)[0])
            each.append(self._measured)
        self._measured = measured
        measured.add_rows(each)
        longest = max(map(len, rows))
        return torch.stack([F.pad(row, (0, longest - len(row)), value=filler) for row in rows])

    def _decode(self, ids: Tensor, prompts: Tensor, options: dict[str, Any]) -> Tensor:
        lengths = Lengths(prompts, torch.full_like(prompts, options["max_new_tokens"] - 1))
        decoding = Decoding(self, lengths, options["eos"])
        mask = torch.arange(ids.shape[1]) < prompts.unsqueeze(1)
        choosing = self._embedding[0].register_forward_hook(decoding.choose)
        with choosing, self.board.using(decoding), narrow_kept(self.network):
            found = self.network.generate(ids, mask.to(ids.device), **options)
        decoding.finish(self._measured)
        return decoding.sequences.without_refused(found, decoding.ledger, options["pad"])


def taken(plan: Plan | LayerwisePlan) -> Tensor:
    """Return the options that a pass has taken, int64 ``[B, T, G]``."""
    assert plan.choices is not None
    return plan.choices


def embedding_of(network: nn.Module) -> Any:
    """Return the layer that embeds tokens.

    Raises:
        InputError: the network has none that is known.
    """
    base: Any = getattr(network, "base", network)
    if hasattr(base, "get_input_embeddings"):
        return base.get_input_embeddings()
    if not isinstance(getattr(base, "embed_tokens", None), nn.Module):
        raise InputError(
            f"network {type(network).__name__}",
            "a controller reads the embedding of each token, the layer embed_tokens",
            "write network: llama_tiny, or hf:NAME",
        )
    return base.embed_tokens


class Decoding(TokenPlan):
    """The choices of sequences that are generated: those of the prompts, then of one token at a
    time.

    Args:
        network: what generates.
        lengths: of the prompts, and the tokens that may be read after them.
        eos: the token that ends a sequence.
    """

    def __init__(self, network: BudgetedNetwork, lengths: Lengths, eos: int | None) -> None:
        self.network, self.sequences = network, DecodedSequences(lengths, eos)
        self.price = network.prices(lengths)
        self.ledger = budgeted_ledger(network.on, lengths)
        self.steps: list[Plan | LayerwisePlan] = []

    @property
    def shape(self) -> tuple[int, ...]:
        return self.steps[-1].shape if self.steps else (0, 0, self.network.on.groups)

    def choices_at(self, group: int, x: Tensor) -> tuple[Tensor, Sequence[int]]:
        return self.steps[-1].choices_at(group, x)

    def choose(self, embedding: nn.Module, arguments: Any, embedded: Tensor) -> None:
        """Choose the options of tokens that are just embedded, ``[B, T, d]``: a forward hook."""
        if self.steps:
            self.sequences.end_at(arguments[0])
        plan = self._plan(embedded)
        self.steps.append(plan)
        self.sequences.grant()

    def _plan(self, embedded: Tensor) -> Plan | LayerwisePlan:
        controller, device, first = self.network.controller, self.network.on, not self.steps
        if controller is None:
            return Plan(choices=torch.full((*embedded.shape[:2], device.groups), HIGH))
        if isinstance(controller, TABSController):
            return LayerwisePlan(controller, self._costs(embedded.shape[1], first), self.price)
        theta = self.network.logits_of(embedded).cpu()
        if first:
            choices = choose_prompts(self.ledger, device, theta, self.sequences.lengths, self.price)
            self.sequences.active &= ~self.ledger.refused
            return Plan(choices=choices)
        active = self.sequences.active
        found, self.sequences.active = choose_tokens(self.ledger, theta[:, 0], self.price, active)
        return Plan(choices=found.unsqueeze(1))

    def _costs(self, tokens: int, first: bool) -> Tensor:
        """Return joules of each token of a step by option, ``[B, T, G, 3]``."""
        if first:
            prompts = self.sequences.lengths.prompts
            return token_costs(self.network.on, Lengths(prompts, torch.zeros_like(prompts)), tokens)
        one = self.network.on.token_costs(1)
        return torch.where(self.sequences.active.reshape(-1, 1, 1, 1), one, torch.zeros_like(one))

    def finish(self, measured: Measurements) -> None:
        """Tell what the sequences have cost."""
        choices = self.sequences.in_places(list(map(taken, self.steps)), OFF)
        measured.count(self.ledger)
        given, allowed = self.sequences.given, self.sequences.lengths
        measured.generated(self.network.on, choices, given, ~self.ledger.refused, allowed)
