"""The levels of sequences that a network of branches generates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fl_lightning.energy.budgets.decoding import DecodedSequences
from fl_lightning.energy.budgets.device import Device
from fl_lightning.energy.budgets.ledger import REFUSED
from fl_lightning.energy.budgets.levels import LevelLedger
from fl_lightning.energy.budgets.measuring import Measurements
from fl_lightning.energy.budgets.passes import Lengths
from fl_lightning.energy.options import HIGH, OFF
from fl_lightning.energy.switched.branches import BranchBoard, BranchPlan


def options(gates: Tensor) -> Tensor:
    """Return branches that are computed or not as options, int64 of the same shape."""
    return torch.where(gates, HIGH, OFF)


class Decides(Protocol):
    """A network of branches that knows the levels of a device."""

    board: BranchBoard
    on: Device

    def ledger(self, lengths: Lengths) -> LevelLedger:
        """Return the ledger of sequences of these lengths."""

    def decided_prompts(
        self, ledger: LevelLedger, lengths: Lengths, states: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the levels that prompts and the tokens after them have, int64 ``[B]``."""

    def wishes(self, later: Tensor) -> Callable[[Tensor], Tensor]:
        """Return what maps states ``[B, T, d]`` to the levels that tokens wish for, int64 ``[B,
        T]``."""

    def gates_of(self, levels: Tensor) -> Tensor:
        """Return which branches tokens at these levels ``[B, T]`` are computed by, bool ``[B, T,
        G]``."""


class Decoding:
    """The levels of sequences that are generated: those of the prompts, then of one token at a
    time.

    Args:
        network: what generates.
        lengths: of the prompts, and the tokens that may be read after them.
        eos: the token that ends a sequence.
    """

    def __init__(self, network: Decides, lengths: Lengths, eos: int | None) -> None:
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

        handle = embedding.register_forward_pre_hook(begin)
        try:
            yield
        finally:
            handle.remove()

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
