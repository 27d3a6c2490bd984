"""Switched layers: each token takes one of three options at each adapted linear layer of a
network."""

from fl_lightning.energy.switched.attach import add_switches, narrow_kept, switches
from fl_lightning.energy.switched.integers import (
    Int8Rows,
    integer_linear,
    integer_product,
    quantised_rows,
)
from fl_lightning.energy.switched.merged import MergedLinear, merge_adapters
from fl_lightning.energy.switched.plan import Plan, Switchboard, TokenPlan
from fl_lightning.energy.switched.switched import SwitchedLinear
