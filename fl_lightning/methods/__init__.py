from fl_lightning.aggregation.average import Average, NoAverageError
from fl_lightning.aggregation.averages import (
    CoordinateMedian,
    NormClipping,
    TrimmedMean,
    WeightedMean,
)
from fl_lightning.aggregation.robust import (
    Bulyan,
    CenteredClipping,
    FLTrust,
    GeometricMedian,
    Krum,
    MultiKrum,
)
from fl_lightning.aggregation.server_optimizers import (
    Extrapolation,
    Lookahead,
    ServerAdagrad,
    ServerAdam,
    ServerOptimizer,
    ServerSGD,
    ServerYogi,
)
from fl_lightning.methods.apfl import APFL
from fl_lightning.methods.aqfl import AQFL
from fl_lightning.methods.base import Method
from fl_lightning.methods.centralised import Centralised
from fl_lightning.methods.ditto import Ditto
from fl_lightning.methods.fedacg import FedACG
from fl_lightning.methods.fedadagrad import FedAdagrad
from fl_lightning.methods.fedadalora import FedAdaLoRA
from fl_lightning.methods.fedadam import FedAdam
from fl_lightning.methods.fedala import FedALA
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedavgm import FedAvgM
from fl_lightning.methods.fedbabu import FedBABU
from fl_lightning.methods.fedbn import FedBN
from fl_lightning.methods.fedcm import FedCM
from fl_lightning.methods.feddc import FedDC
from fl_lightning.methods.feddyn import FedDyn
from fl_lightning.methods.fedexp import FedExP
from fl_lightning.methods.fedkd import FedKD
from fl_lightning.methods.fedlc import FedLC
from fl_lightning.methods.fedmosaic import FedMosaic
from fl_lightning.methods.fedmpq import FedMPQ
from fl_lightning.methods.fedmpqkd import FedMPQKD
from fl_lightning.methods.fednova import FedNova
from fl_lightning.methods.fedntd import FedNTD
from fl_lightning.methods.fedper import FedPer
from fl_lightning.methods.fedpq import FedPQ
from fl_lightning.methods.fedproto import FedProto
from fl_lightning.methods.fedprox import FedProx
from fl_lightning.methods.fedrep import FedRep
from fl_lightning.methods.fedrod import FedRoD
from fl_lightning.methods.fedsam import FedSAM
from fl_lightning.methods.fedspeed import FedSpeed
from fl_lightning.methods.fedvemoe import FedVEMoE
from fl_lightning.methods.fedyogi import FedYogi
from fl_lightning.methods.finetune import FineTune
from fl_lightning.methods.hest import HEST
from fl_lightning.methods.hestladder import HESTLadder
from fl_lightning.methods.lgfedavg import LGFedAvg
from fl_lightning.methods.local_only import LocalOnly
from fl_lightning.methods.mofedsam import MoFedSAM
from fl_lightning.methods.moon import MOON
from fl_lightning.methods.oracle import Oracle
from fl_lightning.methods.personal import FineTuning
from fl_lightning.methods.qfedavg import QFedAvg
from fl_lightning.methods.scaffold import SCAFFOLD
from fl_lightning.methods.schedules import CosineSchedule, LinearSchedule
from fl_lightning.methods.terms import (
    BalancedSoftmax,
    CalibratedLogits,
    ContrastiveTerm,
    DistillationTerm,
    DynamicTerm,
    LabelSmoothing,
    NotTrueTerm,
    ProximalTerm,
    ScaledLoss,
    Term,
)

__all__ = [
    "APFL",
    "AQFL",
    "HEST",
    "MOON",
    "SCAFFOLD",
    "Average",
    "BalancedSoftmax",
    "Bulyan",
    "CalibratedLogits",
    "CenteredClipping",
    "Centralised",
    "ContrastiveTerm",
    "CoordinateMedian",
    "CosineSchedule",
    "DistillationTerm",
    "Ditto",
    "DynamicTerm",
    "Extrapolation",
    "FLTrust",
    "FedACG",
    "FedALA",
    "FedAdaLoRA",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedBABU",
    "FedBN",
    "FedCM",
    "FedDC",
    "FedDyn",
    "FedExP",
    "FedKD",
    "FedLC",
    "FedMPQ",
    "FedMPQKD",
    "FedMosaic",
    "FedNTD",
    "FedNova",
    "FedPQ",
    "FedPer",
    "FedProto",
    "FedProx",
    "FedRep",
    "FedRoD",
    "FedSAM",
    "FedSpeed",
    "FedVEMoE",
    "FedYogi",
    "FineTune",
    "FineTuning",
    "GeometricMedian",
    "HESTLadder",
    "Krum",
    "LGFedAvg",
    "LabelSmoothing",
    "LinearSchedule",
    "LocalOnly",
    "Lookahead",
    "Method",
    "MoFedSAM",
    "MultiKrum",
    "NoAverageError",
    "NormClipping",
    "NotTrueTerm",
    "Oracle",
    "ProximalTerm",
    "QFedAvg",
    "ScaledLoss",
    "ServerAdagrad",
    "ServerAdam",
    "ServerOptimizer",
    "ServerSGD",
    "ServerYogi",
    "Term",
    "TrimmedMean",
    "WeightedMean",
]
