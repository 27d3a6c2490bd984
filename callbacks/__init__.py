"""Stressors make life harder, meters measure. One file each; in YAML: ``class_path: callbacks.LabelNoise``."""

from callbacks.byzantine_clients import ByzantineClients
from callbacks.calibration import Calibration
from callbacks.label_noise import LabelNoise
from callbacks.partition_figure import PartitionFigure
from callbacks.progress_bar import ProgressBar
from callbacks.relevance_figure import RelevanceFigure
from callbacks.straggler_dropout import StragglerDropout

__all__ = [
    "ByzantineClients",
    "Calibration",
    "LabelNoise",
    "PartitionFigure",
    "ProgressBar",
    "RelevanceFigure",
    "StragglerDropout",
]
