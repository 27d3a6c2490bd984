"""Stressors make life harder, meters measure. One file each; in YAML: ``class_path:
callbacks.LabelNoise``."""

import sys

from callbacks.figures.accuracy_bytes_figure import AccuracyBytesFigure
from callbacks.figures.bit_width_figure import BitWidthFigure
from callbacks.figures.client_accuracy_figure import ClientAccuracyFigure
from callbacks.figures.confusion_matrix import ConfusionMatrix
from callbacks.figures.expert_figure import ExpertFigure
from callbacks.figures.feature_map import FeatureMap
from callbacks.figures.ladder_figure import LadderFigure
from callbacks.figures.loss_landscape import LossLandscape
from callbacks.figures.option_figure import OptionFigure
from callbacks.figures.partition_figure import PartitionFigure
from callbacks.figures.relevance_figure import RelevanceFigure
from callbacks.figures.timeline_figure import TimelineFigure
from callbacks.meters.bit_budgets import BitBudgets
from callbacks.meters.calibration import Calibration
from callbacks.meters.early_stopping import EarlyStopping
from callbacks.meters.factor_error import FactorError
from callbacks.meters.gradient_norms import GradientNorms
from callbacks.meters.profile import Profile
from callbacks.meters.progress_bar import ProgressBar
from callbacks.meters.slow_clients import SlowClients
from callbacks.meters.training_cost import TrainingCost
from callbacks.stressors.byzantine_clients import ByzantineClients
from callbacks.stressors.label_noise import LabelNoise
from callbacks.stressors.new_tasks import NewTasks
from callbacks.stressors.secure_dropout import SecureDropout
from callbacks.stressors.straggler_dropout import StragglerDropout

# where modules lay in version 0.1.0, by which configurations and imports of all versions name them
for _path in [path for path in sys.modules if path.startswith(f"{__name__}.")]:
    _module = _path.rpartition(".")[2]
    if _path.count(".") == 2:
        sys.modules[f"{__name__}.{_module}"] = globals()[_module] = sys.modules[_path]

__all__ = [
    "AccuracyBytesFigure",
    "BitBudgets",
    "BitWidthFigure",
    "ByzantineClients",
    "Calibration",
    "ClientAccuracyFigure",
    "ConfusionMatrix",
    "EarlyStopping",
    "ExpertFigure",
    "FactorError",
    "FeatureMap",
    "GradientNorms",
    "LabelNoise",
    "LadderFigure",
    "LossLandscape",
    "NewTasks",
    "OptionFigure",
    "PartitionFigure",
    "Profile",
    "ProgressBar",
    "RelevanceFigure",
    "SecureDropout",
    "SlowClients",
    "StragglerDropout",
    "TimelineFigure",
    "TrainingCost",
]
