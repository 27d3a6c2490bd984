"""The conformance kit: what every method must do, run on any method.

python -m fl_lightning check --model FedMPQ
python -m fl_lightning check --model my_methods.MyMethod --settings '{beta: 0.5}' --neutral '{beta: 0}'
"""

from fl_lightning.conformance.command import check, find_method
from fl_lightning.conformance.kit import CHECKS, Outcome, run_checks
from fl_lightning.conformance.subject import KNOWN, Subject, subject_of

__all__ = ["CHECKS", "KNOWN", "Outcome", "Subject", "check", "find_method", "run_checks", "subject_of"]
