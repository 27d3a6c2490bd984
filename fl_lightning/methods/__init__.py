from fl_lightning.methods.aqfl import AQFL
from fl_lightning.methods.averaging import Average, CoordinateMedian, NormClipping, TrimmedMean, WeightedMean
from fl_lightning.methods.base import Method
from fl_lightning.methods.centralised import Centralised
from fl_lightning.methods.fedadalora import FedAdaLoRA
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedkd import FedKD
from fl_lightning.methods.fedmosaic import FedMosaic
from fl_lightning.methods.fedmpq import FedMPQ
from fl_lightning.methods.fedmpqkd import FedMPQKD
from fl_lightning.methods.fedntd import FedNTD
from fl_lightning.methods.fedpq import FedPQ
from fl_lightning.methods.fedprox import FedProx
from fl_lightning.methods.fedvemoe import FedVEMoE
from fl_lightning.methods.hest import HEST
from fl_lightning.methods.local_only import LocalOnly
from fl_lightning.methods.oracle import Oracle
from fl_lightning.methods.qfedavg import QFedAvg
from fl_lightning.methods.schedules import CosineSchedule, LinearSchedule
from fl_lightning.methods.terms import (
    DistillationTerm,
    LabelSmoothing,
    NotTrueTerm,
    ProximalTerm,
    ScaledLoss,
    Term,
)

__all__ = [
    "AQFL",
    "HEST",
    "Average",
    "Centralised",
    "CoordinateMedian",
    "CosineSchedule",
    "DistillationTerm",
    "FedAdaLoRA",
    "FedAvg",
    "FedKD",
    "FedMPQ",
    "FedMPQKD",
    "FedMosaic",
    "FedNTD",
    "FedPQ",
    "FedProx",
    "FedVEMoE",
    "LabelSmoothing",
    "LinearSchedule",
    "LocalOnly",
    "Method",
    "NormClipping",
    "NotTrueTerm",
    "Oracle",
    "ProximalTerm",
    "QFedAvg",
    "ScaledLoss",
    "Term",
    "TrimmedMean",
    "WeightedMean",
]
