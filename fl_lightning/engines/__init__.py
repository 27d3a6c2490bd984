from fl_lightning.engines.base import ClientResult, ClientTask, Engine
from fl_lightning.engines.choice import EngineName, check_workers, make_engine
from fl_lightning.engines.holders import Holders, spread_states
from fl_lightning.engines.optimizers import check_optimizer, check_optimizer_settings
from fl_lightning.engines.pool import PoolEngine
from fl_lightning.engines.ranks import RankedEngine, exchange_receipts
from fl_lightning.engines.sequential import SequentialEngine
from fl_lightning.engines.stacked.batched import BatchedEngine
