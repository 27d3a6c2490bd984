"""The options of a switched layer, their scopes and precisions: the words of this room."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

OPTIONS = ("off", "int8", "high")
"""In the order of quality, the lowest first, which is the last axis of all tensors of this room."""
OFF, INT8, HIGH = range(3)
Scope: TypeAlias = Literal["adapter", "model"]
"""Whether *off* leaves out the adapter alone or the whole linear layer."""
BRANCH = "branch"
"""The scope of a table of costs of residual branches, of which *off* is the identity and costs
nothing."""
SCOPES: tuple[str, ...] = (*get_args(Scope), BRANCH)
"""The scopes that a table of costs can have."""
HighPrecision: TypeAlias = Literal["float32", "bfloat16"]
"""The precisions that the option ``high`` can be computed in; float32 stands for the network's
own."""
PRECISIONS: tuple[str, ...] = get_args(HighPrecision)
Deciding: TypeAlias = Literal["none", "sequence", "step"]
"""What a controller of levels gives a level of its own: nothing, a sequence, or each token after a
prompt."""
