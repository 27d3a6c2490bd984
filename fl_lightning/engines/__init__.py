from fl_lightning.engines.base import ClientResult, Engine, Order
from fl_lightning.engines.ranks import RankedEngine
from fl_lightning.engines.sequential import SequentialEngine, check_optimizer

__all__ = ["ClientResult", "Engine", "Order", "RankedEngine", "SequentialEngine", "check_optimizer"]
