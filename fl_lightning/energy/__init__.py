"""Energy: what an option costs on a device, controllers that choose options, and budgets that are
kept."""

from fl_lightning.energy.budgets.ledger import REFUSED, BatchedEnergyLedger, EnergyLedger
from fl_lightning.energy.calibration.meters import (
    JouleMeter,
    ModelledMeter,
    NVMLMeter,
    RAPLMeter,
    best_meter,
)
from fl_lightning.energy.controllers import BHSPController, HESTController, TABSController
from fl_lightning.energy.cost_shapes import CostCurve, CostLine, MeasuredCost
from fl_lightning.energy.costs import CostTable, Removal, one_label
from fl_lightning.energy.gating import bounded, expected_energy, gumbel_choices, probabilities
from fl_lightning.energy.options import OPTIONS, SCOPES
from fl_lightning.energy.table_files import from_json, read_table, shipped_table, to_json
