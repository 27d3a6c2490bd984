from fl_lightning.probing.probes import PROBES, chosen, probe
from fl_lightning.probing.subject import Finding, Subject

__all__ = ["PROBES", "Finding", "Subject", "chosen", "probe"]
