"""Probes of a checkpoint for the ``test`` command: accuracy, robustness, calibration and cost."""

from fl_lightning.probing.probed_model import Finding, ProbedModel
from fl_lightning.probing.probes import PROBES, probe, select_probes
