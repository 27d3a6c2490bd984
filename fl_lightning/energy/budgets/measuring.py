"""What the passes of an evaluation have cost, sequence by sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fl_lightning.energy.budgets.device import Device
from fl_lightning.energy.budgets.ledger import BatchedEnergyLedger

if TYPE_CHECKING:
    from fl_lightning.energy.budgets.levels import LevelLedger
    from fl_lightning.energy.budgets.passes import Lengths

COUNTED = frozenset({"energy/clamped", "energy/refused", "energy/over_budget"})
"""Metrics that are added up over the sequences of an evaluation; the others are means."""


class Measurements:
    """Adds up what a batch of B sequences has cost.

    - ``energy/joules``: expected joules of a sequence of the test set, read with its true answer:
      of the switched layers, or with ``budget_of: network`` of the whole network;
    - ``energy/joules_high``: the same with all groups at ``high``;
    - ``energy/joules_model``: expected joules of the whole network in either case, without the
      ledger, which is in no table; with the controller of levels, as in ``energy/joules``, and
      without other controllers, which are in no table either;
    - ``energy/spent``: the 0.99 quantiles of the same joules as ``energy/joules``, which are what a
      ledger charges; and ``energy/granted``: E_max of the sequence, which they are compared with;
    - ``energy/joules_generated``: expected joules of reading the prompt and writing an answer,
      counted as ``energy/joules``; where answers are generated;
    - ``energy/clamped``: tokens with a group that the budget downgraded, ``energy/refused``:
      sequences that could not be afforded, ``energy/over_budget``: sequences that cost more than
      their budget by the 0.99 quantile, counted from the options that were taken; of both kinds of
      passes together.

    The network adds ``energy/controller_parameters``, the numbers that its controller has, biases
    included.

    A sequence that is refused is not computed: it costs 0 J and has spent nothing.
    """

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}

    def metrics(self) -> dict[str, Tensor]:
        """Return each metric of each sequence, float64 ``[B]``."""
        return dict(self.sums)

    def _add(self, name: str, values: Tensor) -> None:
        values = values.double()
        self.sums[name] = self.sums[name] + values if name in self.sums else values

    def add_rows(self, rows: Sequence[Measurements]) -> None:
        """Add what B passes over one sequence each have measured."""
        for name in rows[0].sums:
            self._add(name, torch.cat([row.sums[name] for row in rows]))

    def count(self, ledger: BatchedEnergyLedger | LevelLedger) -> None:
        """Count what a ledger has downgraded and refused."""
        self._add("energy/clamped", ledger.clamped)
        self._add("energy/refused", ledger.refused)

    def read(self, device: Device, choices: Tensor, lengths: Lengths, granted: Tensor) -> None:
        """Add what the sequences of a pass over true answers have cost.

        Args:
            device: what they ran on.
            choices: the options of each token, int64 ``[B, T, G]``.
            lengths: of the sequences.
            granted: bool ``[B]``, those that were not refused.
        """
        joules = self._joules(device, choices, lengths, granted)
        rest = torch.where(granted, lengths.each(device.rest), 0.0)
        self._add("energy/joules", joules)
        self._add("energy/joules_high", lengths.each(device.all_high, "mean"))
        self._add("energy/joules_model", joules + (0.0 if device.whole else rest))
        self._add("energy/clamped", torch.zeros(len(choices)))  # also where there is no ledger
        self._add("energy/refused", torch.zeros(len(choices)))
        spent, budgets = self._over(device, choices, lengths, granted, lengths)
        self._add("energy/spent", spent)
        self._add("energy/granted", budgets)

    def generated(
        self, device: Device, choices: Tensor, lengths: Lengths, granted: Tensor, allowed: Lengths
    ) -> None:
        """Add what generated sequences have cost.

        Args:
            allowed: the lengths that their budgets are for; the other arguments are those of
                :meth:`read`.
        """
        self._add("energy/joules_generated", self._joules(device, choices, lengths, granted))
        self._over(device, choices, lengths, granted, allowed)

    def _joules(
        self, device: Device, choices: Tensor, lengths: Lengths, granted: Tensor, kind: str = "mean"
    ) -> Tensor:
        rows = zip(choices, lengths.prompts.tolist(), lengths.ends.tolist(), strict=True)
        found = [device.spent(row[:end], prompt, kind) for row, prompt, end in rows]
        return torch.where(granted, torch.tensor(found, dtype=torch.float64), 0.0)

    def _over(
        self, device: Device, choices: Tensor, lengths: Lengths, granted: Tensor, allowed: Lengths
    ) -> tuple[Tensor, Tensor]:
        """Count the sequences above their budgets; return what each has spent, and its budget,
        ``[B]``."""
        spent = self._joules(device, choices, lengths, granted, "q99")
        budgets = allowed.each(device.budget, "q99")
        self._add("energy/over_budget", spent > budgets)
        return spent, budgets
