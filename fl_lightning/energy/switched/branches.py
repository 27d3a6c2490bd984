"""Residual branches that are switched: attention or the feed-forward layer of a block is computed
or left out.

A *branch* is the attention, or the feed-forward layer, of one block, with its norm. A branch that
is off is the identity and is not called: x stays x. Branch 2 l is the attention of block l, and 2 l
+ 1 its feed-forward layer. Nothing is cut within a branch: an attention without its output
projection does nothing, and neither does one without its queries, so a linear layer is no unit of
decision.

A token whose attention is off writes no key and no value in that block, and later tokens do not see
it there: it is masked, never a key of zeros, which would have a score of 0 and take weight. D-LLM
(Jiang et al., NeurIPS 2024) leaves such tokens out too; FlexiDepth (Luo et al. 2025, arXiv
2503.23798) keeps their keys.

``B`` sequences, ``T`` tokens, ``G`` branches, ``S`` positions of the cache, ``H`` heads, ``D`` of a
head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_lightning.errors import MisuseError, require
from fl_lightning.models.language.llama import Block, KeyValueCache, LayerCache

PARTS = ("self_attn", "mlp")
"""The branches of a block, in the order in which they are computed."""


class BranchPlan:
    """Which tokens each branch is computed for.

    Args:
        gates: bool ``[B, T, G]``, True where it is computed.
    """

    def __init__(self, gates: Tensor) -> None:
        self.gates = gates
        tokens = gates.flatten(0, 1)
        self.everywhere: list[bool] = tokens.all(0).tolist()
        self.somewhere: list[bool] = tokens.any(0).tolist()
        same = (gates == gates[:, :1]).flatten(0, 1).all(0)
        self.by_sequence: list[bool] = same.tolist()
        """Whether all tokens of a sequence agree on a branch."""

    @classmethod
    def of_sequences(cls, masks: Tensor, tokens: int) -> BranchPlan:
        """Return the plan of sequences that have one mask each, bool ``[B, G]``, for all their
        tokens."""
        return cls(masks.unsqueeze(1).expand(-1, tokens, -1))


class BranchWeights:
    """What each branch's output is multiplied by, with a gradient; all branches are computed.

    A weight of 0 gives what a branch that is off gives, since all tokens of a sequence have the
    same.

    Args:
        weights: float ``[B, G]``.
    """

    def __init__(self, weights: Tensor) -> None:
        self.weights = weights

    def enter(self, block: int, x: Tensor) -> None:
        """Take note of the features ``[B, T, width]`` that enter a block, which weights may depend
        on."""

    def times(self, branch: int, output: Tensor) -> Tensor:
        """Return the output of a branch ``[B, T, width]`` times its weights."""
        return self.weights[:, branch].reshape(-1, 1, 1).to(output) * output


class BranchBoard:
    """The plan that all switched blocks of a network read; without one all branches are
    computed."""

    def __init__(self, branches: int) -> None:
        self.branches = branches
        self.plan: BranchPlan | None = None
        self.weights: BranchWeights | None = None

    @contextmanager
    def weighted(self, weights: BranchWeights | Tensor) -> Iterator[None]:
        """Multiply the branches' outputs by weights, of a tensor ``[B, G]``, within the block;
        there is no plan then."""
        self.weights = BranchWeights(weights) if isinstance(weights, Tensor) else weights
        try:
            with self.using(None):
                yield
        finally:
            self.weights = None

    @contextmanager
    def using(self, plan: BranchPlan | None) -> Iterator[None]:
        """Set a plan within the block; afterwards it is the one from before.

        Raises:
            MisuseError: it is for another number of branches.
        """
        if plan is not None and plan.gates.shape[-1] != self.branches:
            raise MisuseError(
                f"a plan for {plan.gates.shape[-1]} branches on a network of {self.branches}",
                "a plan says for each branch which tokens it is computed for",
                f"give gates [B, T, {self.branches}]",
            )
        before, self.plan = self.plan, plan
        try:
            yield
        finally:
            self.plan = before


class SwitchedBlock(nn.Module):
    """A block of :class:`~fl_lightning.models.language.llama.Llama` whose branches are switched.

    Its modules are the block's own, by the same names, and without a plan it computes what the
    block does.

    Args:
        block: the block.
        index: l, its place in the network.
        board: where the plan is.
    """

    def __init__(self, block: Block, index: int, board: BranchBoard) -> None:
        super().__init__()
        self.input_layernorm = block.input_layernorm
        self.self_attn = block.self_attn
        self.post_attention_layernorm = block.post_attention_layernorm
        self.mlp = block.mlp
        self.index, self.board = index, board

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], cache: LayerCache | None = None
    ) -> Tensor:
        """Map features ``[B, T, width]`` to features of this shape.

        Raises:
            MisuseError: the plan is for other tokens.
        """
        plan, weights = self.board.plan, self.board.weights
        if weights is not None:
            weights.enter(self.index, x)
            x = x + weights.times(
                2 * self.index, self.self_attn(self.input_layernorm(x), rotary, cache)
            )
            return x + weights.times(2 * self.index + 1, self.mlp(self.post_attention_layernorm(x)))
        if plan is not None and plan.gates.shape[:2] != x.shape[:2]:
            raise MisuseError(
                f"block {self.index} on tokens of shape {tuple(x.shape[:2])}",
                f"the plan is for tokens of shape {tuple(plan.gates.shape[:2])}",
                "set a plan before each step, or None",
            )
        return self._feed_forward(self._attend(x, rotary, cache, plan), plan)

    def _attend(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        cache: LayerCache | None,
        plan: BranchPlan | None,
    ) -> Tensor:
        branch = 2 * self.index
        if plan is None or plan.everywhere[branch]:
            return x + self.self_attn(self.input_layernorm(x), rotary, cache)
        gate = plan.gates[:, :, branch].to(x.device)
        if not plan.somewhere[branch]:
            if isinstance(cache, SkippingLayerCache):
                cache.skip(gate.shape[1])
            return x
        if cache is None and plan.by_sequence[branch]:
            return _on_rows(
                x, gate[:, 0], lambda rows: self.self_attn(self.input_layernorm(rows), rotary)
            )
        found = self.self_attn(self.input_layernorm(x), rotary, cache, gate)
        return torch.where(gate.unsqueeze(-1), x + found, x)

    def _feed_forward(self, x: Tensor, plan: BranchPlan | None) -> Tensor:
        branch = 2 * self.index + 1
        if plan is None or plan.everywhere[branch]:
            return x + self.mlp(self.post_attention_layernorm(x))
        if not plan.somewhere[branch]:
            return x
        gate = plan.gates[:, :, branch].to(x.device)
        flat = _on_rows(
            x.flatten(0, 1),
            gate.flatten(),
            lambda rows: self.mlp(self.post_attention_layernorm(rows)),
        )
        return flat.view_as(x)


def _on_rows(x: Tensor, gate: Tensor, branch: Callable[[Tensor], Tensor]) -> Tensor:
    """Return ``x [N, ...]`` with a branch's output added in the rows where the gate, bool ``[N]``,
    is True."""
    rows = gate.nonzero()[:, 0]
    return x.index_add(0, rows, branch(x[rows]).to(x.dtype))


def blocks_of(network: nn.Module) -> nn.ModuleList:
    """Return the blocks of a network whose branches can be switched.

    Raises:
        InputError: it has no such blocks.
    """
    blocks = getattr(network, "layers", None)
    known = isinstance(blocks, nn.ModuleList) and all(isinstance(block, Block) for block in blocks)
    require(
        known and blocks,
        f"network {type(network).__name__}",
        "branches are switched in blocks of the project's own Llama",
        "write network: llama_tiny, or LlamaPretrained with the name of a Llama, or --model HEST, which "
        "switches the layers of any language model",
    )
    assert isinstance(blocks, nn.ModuleList)
    return blocks


def switch_branches(network: nn.Module) -> BranchBoard:
    """Put a :class:`SwitchedBlock` in the place of every block of a network, and return the board
    that they read. Names of parameters stay as they are.

    Args:
        network: a :class:`~fl_lightning.models.language.llama.Llama`, perhaps with adapters; it is
            changed in place.

    Raises:
        InputError: it has no such blocks.
    """
    blocks = blocks_of(network)
    board = BranchBoard(len(PARTS) * len(blocks))
    for index, block in enumerate(blocks):
        assert isinstance(block, Block)
        blocks[index] = SwitchedBlock(block, index, board)
    network.cache_kind = SkippingCache  # type: ignore[assignment]
    return board


def branch_names(blocks: int) -> list[str]:
    """Return the names of the branches of a network, in their order.

    >>> branch_names(1)
    ['layers.0.self_attn', 'layers.0.mlp']
    """
    return [f"layers.{index}.{part}" for index in range(blocks) for part in PARTS]


@dataclass
class SkippingCache(KeyValueCache):
    """Keys and values of layers that some tokens have skipped; these tokens are not seen there."""

    layers: dict[int, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)
    """What each layer has kept, by its index: keys and values, ``[B, H, S, D]`` each, and which of
    the S positions hold some, bool ``[B, S]``."""

    def of_layer(self, index: int, positions: Tensor) -> SkippingLayerCache:
        return SkippingLayerCache(self, index, positions)


@dataclass
class SkippingLayerCache(LayerCache):
    """The cache of one layer, where tokens at ``positions`` int64 ``[B, T]`` are added or
    skipped."""

    cache: SkippingCache

    def append(
        self, key: Tensor, value: Tensor, written: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Add keys and values ``[B, H, T, D]`` at the positions, of tokens that have ``written [B,
        T]``.

        Returns:
            all keys and values ``[B, H, S, D]``, and which of them each token may see, bool ``[B,
            1, T, S]``. A token sees itself in any case.
        """
        positions = self.positions.expand(len(key), -1)
        longest = int(positions.max()) + 1
        if self.index in self.cache.layers:
            keys, values, held = self.cache.layers[self.index]
        else:
            keys, values = key[:, :, :0], value[:, :, :0]
            held = torch.zeros(len(key), 0, dtype=torch.bool, device=key.device)
        more = max(longest - keys.shape[2], 0)
        place = positions[:, None, :, None].expand_as(key)
        keys = F.pad(keys, (0, 0, 0, more)).scatter(2, place, key)
        values = F.pad(values, (0, 0, 0, more)).scatter(2, place, value)
        new = torch.ones_like(positions, dtype=torch.bool) if written is None else written
        held = F.pad(held, (0, more)).scatter(1, positions, new)
        self.cache.layers[self.index] = keys, values, held
        here = torch.arange(keys.shape[2], device=key.device)
        at = positions[:, None, :, None]
        return keys, values, ((here <= at) & held[:, None, None, :]) | (here == at)

    def skip(self, tokens: int) -> None:
        """Take note that none of some tokens is seen in this layer."""
        if self.index not in self.cache.layers:
            return
        keys, values, held = self.cache.layers[self.index]
        positions = self.positions.expand(len(keys), tokens)
        known = torch.where(positions < held.shape[1], positions, 0)
        stale = held.gather(1, known) & (positions >= held.shape[1])
        self.cache.layers[self.index] = keys, values, held.scatter(1, known, stale)
