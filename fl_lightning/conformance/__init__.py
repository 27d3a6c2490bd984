r"""The conformance kit: what every method must do, run on any method.

For example:

    python -m fl_lightning check --model FedMPQ
    python -m fl_lightning check --model my_methods.MyMethod \
        --settings '{beta: 0.5}' --neutral '{beta: 0}'
"""

from fl_lightning.conformance.command import check, find_method
from fl_lightning.conformance.kit import CHECKS, CheckResult, run_checks
from fl_lightning.conformance.known_methods import KNOWN_METHODS, MethodUnderTest, method_under_test
