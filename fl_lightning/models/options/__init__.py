"""Switched layers: each token takes one of three options at each adapted linear layer of a network."""

from fl_lightning.models.options.attach import add_switches, narrow_kept, switches
from fl_lightning.models.options.integers import Int8Rows, integer_linear, integer_product, quantised_rows
from fl_lightning.models.options.merged import MergedLinear, merge_adapters
from fl_lightning.models.options.plan import OPTIONS, Plan, Switchboard, TokenPlan
from fl_lightning.models.options.switched import HighPrecision, Scope, SwitchedLinear

__all__ = [
    "OPTIONS",
    "HighPrecision",
    "Int8Rows",
    "MergedLinear",
    "Plan",
    "Scope",
    "Switchboard",
    "SwitchedLinear",
    "TokenPlan",
    "add_switches",
    "integer_linear",
    "integer_product",
    "merge_adapters",
    "narrow_kept",
    "quantised_rows",
    "switches",
]
