"""Stressors make life harder, meters measure. One file each; in YAML: ``class_path: callbacks.LabelNoise``."""

from callbacks.accuracy_bytes_figure import AccuracyBytesFigure
from callbacks.bit_width_figure import BitWidthFigure
from callbacks.byzantine_clients import ByzantineClients
from callbacks.calibration import Calibration
from callbacks.client_accuracy_figure import ClientAccuracyFigure
from callbacks.confusion_matrix import ConfusionMatrix
from callbacks.early_stopping import EarlyStopping
from callbacks.feature_map import FeatureMap
from callbacks.gradient_norms import GradientNorms
from callbacks.label_noise import LabelNoise
from callbacks.loss_landscape import LossLandscape
from callbacks.partition_figure import PartitionFigure
from callbacks.progress_bar import ProgressBar
from callbacks.relevance_figure import RelevanceFigure
from callbacks.straggler_dropout import StragglerDropout

__all__ = [
    "AccuracyBytesFigure",
    "BitWidthFigure",
    "ByzantineClients",
    "Calibration",
    "ClientAccuracyFigure",
    "ConfusionMatrix",
    "EarlyStopping",
    "FeatureMap",
    "GradientNorms",
    "LabelNoise",
    "LossLandscape",
    "PartitionFigure",
    "ProgressBar",
    "RelevanceFigure",
    "StragglerDropout",
]
