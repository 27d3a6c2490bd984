"""Stressors make life harder, meters measure. One file each; in YAML: ``class_path: callbacks.LabelNoise``."""

from callbacks.calibration import Calibration
from callbacks.label_noise import LabelNoise
from callbacks.partition_figure import PartitionFigure
from callbacks.progress_bar import ProgressBar
from callbacks.straggler_dropout import StragglerDropout

__all__ = ["Calibration", "LabelNoise", "PartitionFigure", "ProgressBar", "StragglerDropout"]
