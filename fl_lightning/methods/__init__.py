from fl_lightning.methods.base import Method
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedkd import FedKD
from fl_lightning.methods.fedmpq import FedMPQ
from fl_lightning.methods.fedmpqkd import FedMPQKD
from fl_lightning.methods.schedules import CosineSchedule, LinearSchedule

__all__ = ["CosineSchedule", "FedAvg", "FedKD", "FedMPQ", "FedMPQKD", "LinearSchedule", "Method"]
