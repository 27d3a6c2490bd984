"""Greedy decoding: how prompts are read and what a sequence is filled with, the same for all
networks.

``B`` prompts of at most ``T`` tokens.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn

from fl_lightning.errors import MisuseError


class Generating(nn.Module):
    """A causal language model that adds to each prompt the tokens of the largest logits."""

    @torch.no_grad()
    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        max_new_tokens: int = 32,
        eos: int | None = None,
        pad: int | None = None,
    ) -> Tensor:
        """Return the tokens that greedy decoding adds to each prompt, int64 ``[B, at most
        max_new_tokens]``.

        Each prompt gets the tokens that it would get alone. Decoding ends when every sequence has
        ended.

        Args:
            input_ids: prompts int64 ``[B, T]``, padded on either side.
            attention_mask: what of them is text, ``[B, T]``; None: all of it.
            max_new_tokens: bound on the number of new tokens.
            eos: the token that ends a sequence; it is part of the result. None: sequences end at
                the bound.
            pad: what follows the end of a sequence; by default ``eos``.

        Raises:
            MisuseError: a prompt has no token, or the bound is less than 1.
        """
        ids, lengths = left_aligned(input_ids, attention_mask)
        if max_new_tokens < 1 or ids.shape[1] < 1 or int(lengths.min()) < 1:
            raise MisuseError(
                f"generate of prompts of {lengths.tolist()} tokens, max_new_tokens={max_new_tokens}",
                "a prompt has one token or more, and so has what is generated",
                "begin each prompt with a token such as BOS",
            )
        filler = next((token for token in (pad, eos) if token is not None), 0)
        return self.continued(ids, lengths, max_new_tokens, eos, filler)

    @abstractmethod
    def continued(
        self, ids: Tensor, lengths: Tensor, max_new_tokens: int, eos: int | None, filler: int
    ) -> Tensor:
        """Return what :meth:`generate` returns.

        Args:
            ids: prompts int64 ``[B, T]``, padded on the right.
            lengths: their tokens, int64 ``[B]``, 1 or more.
            max_new_tokens: bound on the number of new tokens.
            eos: the token that ends a sequence, if any.
            filler: what follows the end of a sequence.
        """


def left_aligned(ids: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return prompts with their padding on the right, ``[B, T]``, and their lengths, int64 ``[B]``.

    Args:
        ids: int64 ``[B, T]``.
        mask: what of them is text, ``[B, T]``; None: all of it.
    """
    if mask is None:
        return ids, torch.full((len(ids),), ids.shape[1], device=ids.device)
    text = mask.bool()
    order = text.long().argsort(dim=1, descending=True, stable=True)
    lengths = text.sum(1)
    return ids.gather(1, order)[:, : int(lengths.max()) if len(ids) else 0], lengths
