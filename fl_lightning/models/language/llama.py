"""A Llama network with few calls per block: RMSNorm, rotary positions, SwiGLU, by default a head
tied to the embedding.

Sources: Touvron et al. 2023, arXiv 2302.13971 (Llama); Su et al. 2021, arXiv 2104.09864 (rotary
positions); Shazeer 2020, arXiv 2002.05202 (SwiGLU); Ainslie et al. 2023, arXiv 2305.13245 (keys and
values that several heads share). The query, key and value projections are one matrix, and so are
the gate and up projections. The logits are those of transformers' ``LlamaForCausalLM`` with the
weights that :func:`transformers_weights` makes.

``B`` sequences, ``T`` positions, ``S`` positions of the cache, ``V`` tokens of the vocabulary,
``H`` heads, ``D`` features of a head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_lightning.errors import require
from fl_lightning.models.language.generating import Generating

TokenInputs: TypeAlias = Tensor | Mapping[str, Tensor]
"""Token ids int64 ``[B, T]``, or a dictionary with ``input_ids`` and perhaps ``attention_mask``."""

NORM_EPSILON = 1e-6
ROTARY_BASE = 10_000.0
EMBEDDING_STD = 0.05


@dataclass(frozen=True)
class Variant:
    """In what a network of the Llama family differs from the project's own ones.

    Args:
        key_heads: heads of keys and values, a divisor of H; None: H.
        head_width: D, an even number; None: the width over H.
        epsilon: that the norms add to a mean square.
        tied: whether the head has the weights of the embedding.
        longest: tokens of the sequences that it was trained on, which nothing depends on here;
            None: unknown.
        positions: transformers' settings of the rotary tables, of which ``frequencies`` were made.
        frequencies: radians by which a position turns each pair of features of a head, float32 ``[D
            / 2]``; None: ``ROTARY_BASE`` to the power of -2 i / D.
        rotary_scale: what the rotary tables are multiplied by, as some forms of longer contexts
            have it.
        special_tokens: ids of the tokens that begin, end and fill up a text, by transformers'
            names; None: there is none, or it is unknown.
    """

    key_heads: int | None = None
    head_width: int | None = None
    epsilon: float = NORM_EPSILON
    tied: bool = True
    longest: int | None = None
    positions: Mapping[str, Any] = field(
        default_factory=lambda: {"rope_type": "default", "rope_theta": ROTARY_BASE}
    )
    frequencies: Tensor | None = None
    rotary_scale: float = 1.0
    special_tokens: Mapping[str, int | list[int] | None] = field(
        default_factory=lambda: dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    )


USUAL = Variant()


class Llama(Generating):
    """A causal language model with new weights from torch's current generator.

    It has no buffers: the rotary tables are computed in each pass.

    Args:
        vocab_size: V, number of tokens.
        width: features of a token between the blocks, a multiple of ``2 * heads``.
        depth: number of blocks.
        heads: H, attention heads.
        hidden: features inside the feed-forward layer; by default 8/3 of the width, rounded down to
            a multiple of 8.
        variant: in what it differs from others.

    Raises:
        InputError: a size is less than 1, or the width is no multiple of ``2 * heads``.

    >>> network = Llama(vocab_size=259, width=96, depth=4, heads=4)
    >>> sum(weight.numel() for weight in network.parameters())
    468096
    """

    reads_tokens = True
    """Declares to ``build_network`` that examples are token ids and outputs are ``[B, T, V]``."""
    source: str = ""
    """Name or folder from which transformers loads the base; empty: there is none."""
    block_costs: str = ""
    """Name of the shipped table of costs of branches that is of such blocks; empty: there is
    none."""
    cache_kind: type[KeyValueCache]
    """What keys and values are kept in while answers are written; a :class:`KeyValueCache`."""

    def __init__(
        self,
        vocab_size: int,
        width: int = 96,
        depth: int = 4,
        heads: int = 4,
        hidden: int | None = None,
        variant: Variant = USUAL,
    ) -> None:
        super().__init__()
        hidden = int(8 * width / 3) // 8 * 8 if hidden is None else hidden
        require(
            min(vocab_size, width, depth, heads, hidden) >= 1
            and (variant.head_width is not None or width % (2 * heads) == 0),
            f"vocab_size={vocab_size}, width={width}, depth={depth}, heads={heads}, hidden={hidden}",
            "all are 1 or more, and the width is a multiple of 2 * heads",
            "write e.g. width 96, depth 4, heads 4",
        )
        self.heads, self.hidden, self.cache_kind = heads, hidden, KeyValueCache
        self.variant, self.head_width = variant, variant.head_width or width // heads
        self.embed_tokens = nn.Embedding(vocab_size, width)
        self.layers = nn.ModuleList(Block(width, heads, hidden, variant) for _ in range(depth))
        self.norm = nn.RMSNorm(width, variant.epsilon)
        self.lm_head = None if variant.tied else nn.Linear(width, vocab_size, bias=False)
        self._draw_weights()

    @torch.no_grad()
    def _draw_weights(self) -> None:
        """Draw normal weights whose products keep their size; those that end a residual branch are
        smaller by the root of the number of branches."""
        nn.init.normal_(self.embed_tokens.weight, std=EMBEDDING_STD)
        branches = 2 * len(self.layers)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                ends_branch = name.endswith(("o_proj", "down_proj"))
                nn.init.normal_(
                    module.weight,
                    std=(module.in_features * (branches if ends_branch else 1)) ** -0.5,
                )

    def forward(self, inputs: TokenInputs) -> Tensor:
        """Return the logits ``[B, T, V]`` of the next token at each position.

        Args:
            inputs: ids ``[B, T]``, or a dictionary with ``input_ids``. Padding stands on the right,
                where causal attention keeps it from the text: an ``attention_mask`` is not read.
        """
        ids = inputs if isinstance(inputs, Tensor) else inputs["input_ids"]
        positions = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
        return self.logits(self.features(ids, positions))

    def features(
        self, ids: Tensor, positions: Tensor, cache: KeyValueCache | None = None
    ) -> Tensor:
        """Return the normalised features ``[B, T, width]`` that the head reads.

        Args:
            ids: int64 ``[B, T]``.
            positions: places of these tokens in their sequences, int64 ``[1 or B, T]``.
            cache: keys and values of earlier positions; those of these tokens are added.
        """
        x = self.embed_tokens(ids)
        rotary = rotary_tables(positions, self.head_width, self.variant)
        for index, layer in enumerate(self.layers):
            x = layer(x, rotary, None if cache is None else cache.of_layer(index, positions))
        return self.norm(x)

    def rows_in_transformers(self, layer: str, rows: int) -> dict[str, int]:
        """Return a layer's names in transformers, each with its number of rows; see
        :func:`transformers_rows`."""
        return transformers_rows(layer, rows, self.heads * self.head_width)

    def logits(self, features: Tensor) -> Tensor:
        """Return logits ``[..., V]`` of features ``[..., width]``, by the weights of the embedding
        where they are tied."""
        if self.lm_head is None:
            return F.linear(features, self.embed_tokens.weight)
        return self.lm_head(features)

    def continued(
        self, ids: Tensor, lengths: Tensor, max_new_tokens: int, eos: int | None, filler: int
    ) -> Tensor:
        cache = self.cache_kind()
        positions = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0).expand(len(ids), -1)
        features = self.features(ids, positions, cache)
        last = features[torch.arange(len(ids), device=ids.device), lengths - 1]
        ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        found: list[Tensor] = []
        while True:
            token = self.logits(last).argmax(-1)
            if eos is not None:
                token = token.masked_fill(ended, filler)
                ended |= token == eos
            found.append(token)
            if len(found) == max_new_tokens or bool(ended.all()):
                return torch.stack(found, dim=1)
            places = (lengths + len(found) - 1).unsqueeze(1)
            last = self.features(token.unsqueeze(1), places, cache)[:, 0]


class Block(nn.Module):
    """Attention and a feed-forward layer, each on normalised features and added to them."""

    def __init__(self, width: int, heads: int, hidden: int, variant: Variant = USUAL) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(width, variant.epsilon)
        self.self_attn = Attention(width, heads, variant)
        self.post_attention_layernorm = nn.RMSNorm(width, variant.epsilon)
        self.mlp = FeedForward(width, hidden)

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], cache: LayerCache | None = None
    ) -> Tensor:
        """Map features ``[B, T, width]`` to features of this shape."""
        x = x + self.self_attn(self.input_layernorm(x), rotary, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Attention(nn.Module):
    """Causal attention over H heads with rotary positions; ``qkv_proj`` is W_q, W_k and W_v in one.

    Where there are fewer heads of keys and values, each serves several heads of queries that stand
    together.
    """

    def __init__(self, width: int, heads: int, variant: Variant = USUAL) -> None:
        super().__init__()
        self.heads, self.key_heads = heads, variant.key_heads or heads
        self.head_width = variant.head_width or width // heads
        rows = (heads + 2 * self.key_heads) * self.head_width
        self.qkv_proj = nn.Linear(width, rows, bias=False)
        self.o_proj = nn.Linear(heads * self.head_width, width, bias=False)

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        cache: LayerCache | None = None,
        written: Tensor | None = None,
    ) -> Tensor:
        """Map features ``[B, T, width]`` to features of this shape.

        Args:
            x: the features.
            rotary: tables of :func:`rotary_tables`.
            cache: keys and values of earlier tokens.
            written: which tokens other tokens may see, bool ``[B, T]``; None: all. A cache that is
                given with it takes it too.
        """
        size, length, _ = x.shape
        query, key, value = self._projected(x, rotary)
        keys, values = key, value
        if cache is not None:
            found = (
                cache.append(key, value) if written is None else cache.append(key, value, written)
            )
            keys, values, visible = found
        else:
            visible = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
            if written is not None:
                itself = torch.eye(length, dtype=torch.bool, device=x.device)
                visible = visible & (written[:, None, None, :] | itself)
        if self.key_heads < self.heads:
            shared = self.heads // self.key_heads
            keys, values = (one.repeat_interleave(shared, dim=1) for one in (keys, values))
        seen = attention(query, keys, values, visible)
        return self.o_proj(seen.transpose(1, 2).reshape(size, length, -1))

    def _projected(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries ``[B, H, T, D]``, and keys and values of the heads that they have."""
        size, length, _ = x.shape
        together = self.qkv_proj(x)
        if self.key_heads == self.heads:
            split = together.view(size, length, 3, self.heads, self.head_width)
            by_head = split.permute(2, 0, 3, 1, 4)  # [3, B, H, T, D]
            query, key = rotated(by_head[:2], *rotary)
            return query, key, by_head[2]
        every = together.view(size, length, -1, self.head_width).transpose(1, 2)
        query, key, value = every.split((self.heads, self.key_heads, self.key_heads), dim=1)
        return rotated(query, *rotary), rotated(key, *rotary), value


class FeedForward(nn.Module):
    """SwiGLU: ``W_down (silu(W_gate x) * W_up x)``; ``gate_up_proj`` is W_gate and W_up in one."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(width, 2 * hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


def attention(query: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """Return ``softmax(query keys^T / sqrt(D)) values`` over what is visible, ``[B, H, T, D]``.

    torch's fused kernel has no batching rule for ``vmap``, and makes a step of 16 x 64 bytes only 7
    % faster (52 against 56 ms on one thread).

    Args:
        query: ``[B, H, T, D]``.
        keys: ``[B, H, S, D]``.
        values: ``[B, H, S, D]``.
        visible: what each token may see, bool ``[T, S]`` or ``[B, 1, T, S]``.
    """
    scores = (query * query.shape[-1] ** -0.5) @ keys.transpose(-1, -2)
    return scores.masked_fill(~visible, -math.inf).softmax(dim=-1).to(values.dtype) @ values


def rotary_tables(
    positions: Tensor, head_width: int, variant: Variant = USUAL
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, float32 ``[1 or B, 1, T, D]``, of positions int64 ``[1 or B,
    T]``."""
    if variant.frequencies is None:
        halves = (
            torch.arange(0, head_width, 2, device=positions.device, dtype=torch.float32)
            / head_width
        )
        angles = positions.unsqueeze(-1).float() * ROTARY_BASE**-halves
    else:
        angles = positions.unsqueeze(-1).float() * variant.frequencies.to(positions.device)
    both = torch.cat((angles, angles), dim=-1).unsqueeze(1)
    if variant.rotary_scale == 1.0:
        return both.cos(), both.sin()
    return both.cos() * variant.rotary_scale, both.sin() * variant.rotary_scale


def rotated(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate each pair (feature i, feature i + D/2) of ``x [..., B, H, T, D]`` by its position's
    angles."""
    first, second = x.chunk(2, dim=-1)
    return x * cosines.to(x.dtype) + torch.cat((-second, first), dim=-1) * sines.to(x.dtype)


@dataclass
class KeyValueCache:
    """Keys and values of all layers, each ``[B, H, S, D]``; a sequence's position is its place on
    axis S."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def of_layer(self, index: int, positions: Tensor) -> LayerCache:
        """Return the cache of one layer, for tokens at ``positions`` int64 ``[B, T]``."""
        return LayerCache(self, index, positions)


@dataclass
class LayerCache:
    """The cache of layer ``index``, where tokens at ``positions`` int64 ``[B, T]`` are to be
    added."""

    cache: KeyValueCache
    index: int
    positions: Tensor

    def append(
        self, key: Tensor, value: Tensor, written: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Add keys and values ``[B, H, T, D]`` at the positions; of all tokens, whatever
        ``written`` says.

        Returns:
            all keys and values ``[B, H, S, D]``, and which of them each token may see, ``[B, 1, T,
            S]``. Padding behind a prompt is not seen, because each new token overwrites what stood
            at its position.
        """
        keys, values = self.cache.keys, self.cache.values
        if self.index == len(keys):
            keys.append(key)
            values.append(value)
        else:
            place = self.positions[:, None, :, None].expand_as(key)
            for all_layers, new in ((keys, key), (values, value)):
                longer = F.pad(all_layers[self.index], (0, 0, 0, new.shape[2]))
                all_layers[self.index] = longer.scatter(2, place, new)
        here = torch.arange(keys[self.index].shape[2], device=key.device)
        return keys[self.index], values[self.index], here <= self.positions[:, None, :, None]


FUSED_LAYERS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Which layers of transformers' ``LlamaForCausalLM`` a layer of :class:`Llama` is, one below the
other."""


def transformers_rows(name: str, rows: int, attended: int) -> dict[str, int]:
    """Return what has this name in :class:`Llama` by its names in transformers'
    ``LlamaForCausalLM``, each with its number of rows, from the first.

    Args:
        name: of a weight or a layer.
        rows: of the weight.
        attended: features of all heads of queries, H D.

    >>> transformers_rows("layers.0.mlp.gate_up_proj", 512, 96)
    {'model.layers.0.mlp.gate_proj': 256, 'model.layers.0.mlp.up_proj': 256}
    >>> list(transformers_rows("layers.0.self_attn.qkv_proj", 160, 96).values())
    [96, 32, 32]
    """
    if name.startswith("lm_head"):
        return {name: rows}
    fused = next((part for part in FUSED_LAYERS if part in name), None)
    if fused is None:
        return {f"model.{name}": rows}
    names = [f"model.{name.replace(fused, part)}" for part in FUSED_LAYERS[fused]]
    first = attended if fused == "qkv_proj" else rows // 2
    each = (rows - first) // (len(names) - 1)
    return dict(zip(names, [first, *[each] * (len(names) - 1)], strict=True))


def transformers_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of :class:`Llama` under the names and shapes of transformers'
    ``LlamaForCausalLM``.

    Args:
        weights: the ``state_dict()`` of a network without adapters.
    """
    attended = weights["layers.0.self_attn.o_proj.weight"].shape[1]
    found: dict[str, Tensor] = {}
    for name, weight in weights.items():
        parts = transformers_rows(name, len(weight), attended)
        for (part, _), piece in zip(parts.items(), weight.split([*parts.values()]), strict=True):
            found[part] = piece if len(parts) == 1 else piece.clone()
    return {"lm_head.weight": weights["embed_tokens.weight"], **found}


def transformers_settings(network: Llama) -> dict[str, Any]:
    """Return the arguments of transformers' ``LlamaConfig`` for a network of this shape."""
    variant = network.variant
    return {
        "vocab_size": network.embed_tokens.num_embeddings,
        "hidden_size": network.embed_tokens.embedding_dim,
        "intermediate_size": network.hidden,
        "num_hidden_layers": len(network.layers),
        "num_attention_heads": network.heads,
        "num_key_value_heads": variant.key_heads or network.heads,
        "head_dim": network.head_width,
        "rms_norm_eps": variant.epsilon,
        "tie_word_embeddings": variant.tied,
        "attention_bias": False,
        "mlp_bias": False,
        "rope_parameters": {**variant.positions},
        **variant.special_tokens,
        **({} if variant.longest is None else {"max_position_embeddings": variant.longest}),
    }
