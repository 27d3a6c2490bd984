"""Virtual time: how long a round would take on given devices and lines, and who returns in time.

Everything here is a function of the run's streams and of bytes and examples that the ledger and the
tasks have, and never of this machine's clock: two runs of a configuration have the same virtual
seconds, whatever executes them.
"""

from fl_lightning.clock.asynchronous import FedAsync, FedBuff
from fl_lightning.clock.availability import Always, Availability, Diurnal
from fl_lightning.clock.clock import Clock, Lines
from fl_lightning.clock.devices import (
    Devices,
    DeviceTable,
    DrawnDevices,
    LogNormalDevices,
    SameDevice,
)
from fl_lightning.clock.rounds import Deadline, OverSelection, Rounds, Synchronous
from fl_lightning.clock.staleness import Constant, Hinge, Polynomial, Staleness
from fl_lightning.clock.timing import Timing
from fl_lightning.clock.traces import AvailabilityTrace
