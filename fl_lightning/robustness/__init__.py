from fl_lightning.robustness.probes import PROBES, chosen, probe
from fl_lightning.robustness.subject import Finding, Subject

__all__ = ["PROBES", "Finding", "Subject", "chosen", "probe"]
