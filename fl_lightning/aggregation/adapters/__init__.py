"""What becomes of a cohort's low-rank adapters: one rule a file, chosen once by
``--model.adapter_average``.

mean(B) mean(A) is not mean(BA), the mean of what the clients' adapters add. Each rule answers what
the server makes of the factors, what the next round starts from, and what travels for it.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

from fl_lightning.aggregation.adapters.alternate import Alternate
from fl_lightning.aggregation.adapters.base import AdapterAverage
from fl_lightning.aggregation.adapters.factors import Factors
from fl_lightning.aggregation.adapters.frozen_a import FrozenA
from fl_lightning.aggregation.adapters.padded import Padded
from fl_lightning.aggregation.adapters.plain_weights import AS_THEY_ARE, PlainWeights
from fl_lightning.aggregation.adapters.product import Product
from fl_lightning.aggregation.adapters.residual import Residual
from fl_lightning.aggregation.adapters.share_a import ShareA
from fl_lightning.aggregation.adapters.solve import Solve
from fl_lightning.aggregation.adapters.stack import Stack
from fl_lightning.config.near_names import require_choice

AdapterAverageName: TypeAlias = Literal[
    "factors", "frozen_a", "residual", "stack", "product", "padded", "share_a", "alternate", "solve"
]
_CLASSES = (Factors, FrozenA, Residual, Stack, Product, Padded, ShareA, Alternate, Solve)
RULES: dict[str, type[AdapterAverage]] = {rule.name: rule for rule in _CLASSES}
assert tuple(RULES) == get_args(AdapterAverageName)


def chosen_rule(setting: AdapterAverage | str | None) -> PlainWeights:
    """Return the rule that a setting means: a rule, the name of one with its defaults, or null for
    none.

    Raises:
        InputError: it is none of these.
    """
    if setting is None:
        return AS_THEY_ARE
    if not isinstance(setting, PlainWeights):
        require_choice(setting, tuple(RULES), "adapter_average")
        return RULES[setting]()
    return setting
