"""Sequences that are generated side by side within a budget: who still has tokens, and what each
was given.

``B`` sequences of ``T`` tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fl_lightning.energy.budgets.ledger import Account
from fl_lightning.energy.budgets.passes import Lengths


class DecodedSequences:
    """The sequences of one call of ``generate``.

    Args:
        lengths: of the prompts, and the tokens that may be read after them.
        eos: the token that ends a sequence.

    Attributes:
        active: the sequences that have a token in this step, bool ``[B]``.
        granted_tokens: tokens that each sequence has been given before it ended or was refused
            more, int64 ``[B]``; a prompt counts as one.
    """

    def __init__(self, lengths: Lengths, eos: int | None) -> None:
        self.lengths, self.eos = lengths, eos
        self.active = torch.ones(len(lengths.prompts), dtype=torch.bool)
        self.granted_tokens = torch.zeros(len(lengths.prompts), dtype=torch.int64)

    def end_at(self, ids: Tensor) -> None:
        """End the sequences whose last token ``ids [B, T]`` is the end of a sequence."""
        if self.eos is not None:
            self.active &= (ids[:, -1] != self.eos).cpu()

    def grant(self) -> None:
        """Count one token more for the sequences that are active."""
        self.granted_tokens += self.active.long()

    @property
    def given(self) -> Lengths:
        """The lengths of the sequences as they were written."""
        return Lengths(self.lengths.prompts, (self.granted_tokens - 1).clamp_min(0))

    def in_places(self, steps: Sequence[Tensor], filler: int) -> Tensor:
        """Return what each token had, ``[B, longest, ...]``.

        Args:
            steps: of the prompts ``[B, T, ...]``, then of one token at a time ``[B, 1, ...]``.
            filler: of the places without a token.
        """
        prompts, *later = steps
        longest = int(self.lengths.prompts.max()) + len(later)
        found = torch.full((len(prompts), longest, *prompts.shape[2:]), filler)
        found[:, : prompts.shape[1]] = prompts
        rows = torch.arange(len(prompts))
        for step, one in enumerate(later):
            found[rows, self.lengths.prompts + step] = one[:, 0]
        return found

    def without_refused(self, found: Tensor, account: Account, filler: int) -> Tensor:
        """Return tokens ``[B, N]`` that were generated, and the end of a sequence in the places
        that a sequence was refused.

        Args:
            account: what the sequences may spend.
            filler: what stands there where no token ends a sequence.
        """
        late = torch.arange(found.shape[1]) >= self.granted_tokens.unsqueeze(1)
        refused = (account.refused.unsqueeze(1) & late).to(found.device)
        return found.masked_fill(refused, filler if self.eos is None else self.eos)
