"""Where joules come from: a counter of the device, or CPU seconds at a stated power.

Every meter has a label, which stands in every table and beside every figure that it made. Figures
with different labels are never mixed.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from fl_lightning.errors import InputError, as_bad_input, require

DEFAULT_WATTS = 15.0
"""A laptop's processor under load; state your own with --watts."""
POWERCAP = Path("/sys/class/powercap")
COUNTED_DOMAINS = ("package", "dram")
"""RAPL domains that are added up: memory is not part of its package, and cores are."""


class JouleMeter(ABC):
    """A counter of joules.

    A subclass states ``label``, and in ``window_seconds`` the shortest time over which its
    differences mean something: work that takes less is repeated.
    """

    label: str
    window_seconds: float = 0.0

    @abstractmethod
    def read(self) -> float:
        """Return joules since some moment in the past; a later reading is never less."""

    def joules_of(self, function: Callable[[], object]) -> float:
        """Return joules between the start of a call and its end."""
        before = self.read()
        function()
        return self.read() - before


class ModelledMeter(JouleMeter):
    """CPU seconds of this process at a stated power. It is a model, and the label says so.

    Other processes do not count, but they share caches and cores, so figures of a busy machine are
    larger.

    Args:
        watts: power of one busy core, above 0.
        clock: seconds of the process; another one for tests.

    Raises:
        InputError: the power is not above 0.
    """

    def __init__(
        self, watts: float = DEFAULT_WATTS, clock: Callable[[], float] = time.process_time
    ) -> None:
        require(
            0 < watts < 1e6,
            f"--watts {watts}",
            "the power of a processor is above 0",
            "write --watts 15",
        )
        self.watts, self.clock = watts, clock
        shown = f"{watts:.6f}".rstrip("0").rstrip(".")
        self.label = f"modelled: CPU seconds x {shown} W"

    def read(self) -> float:
        return self.clock() * self.watts


class RAPLMeter(JouleMeter):
    """Intel's and AMD's counters of whole packages and their memory, in ``/sys/class/powercap``.

    They count everything that runs on the machine, idle power included. They wrap around every few
    minutes to hours; a meter that is read at least once in that time counts on.

    Args:
        folder: where the domains are.

    Raises:
        InputError: there is no domain that can be read; the kernel lets only root read them by
            default.
    """

    label = "RAPL"
    window_seconds = 0.1  # the counters move about every millisecond

    def __init__(self, folder: Path = POWERCAP) -> None:
        self.domains = list(_rapl_domains(folder))
        require(
            self.domains,
            f"no RAPL counter that can be read in {folder}",
            "energy_uj of a package has to be readable, by default for root alone",
            "use the modelled meter, with --watts",
        )
        self._last = [_microjoules(domain / "energy_uj") for domain in self.domains]
        self._ranges = [_microjoules(domain / "max_energy_range_uj") for domain in self.domains]
        self._total = 0

    def read(self) -> float:
        for index, domain in enumerate(self.domains):
            now = _microjoules(domain / "energy_uj")
            passed = now - self._last[index]
            if passed < 0:  # the counter goes from its range back to 0
                passed += self._ranges[index]
            self._total += passed
            self._last[index] = now
        return self._total * 1e-6


def _rapl_domains(folder: Path) -> Iterable[Path]:
    for domain in sorted(folder.glob("*:*")) if folder.is_dir() else []:
        if "mmio" in domain.name:  # the same counter of the package, by another register
            continue
        try:
            counted = (domain / "name").read_text().strip().startswith(COUNTED_DOMAINS)
            _microjoules(domain / "energy_uj")
            _microjoules(domain / "max_energy_range_uj")
        except (OSError, ValueError):
            continue
        if counted:
            yield domain


def _microjoules(path: Path) -> int:
    return int(path.read_text())


class NVMLMeter(JouleMeter):
    """The counter of one NVIDIA card, by pynvml or by zeus. It counts everything that runs on the
    card.

    It has been tested with a stand-in for the driver, not on a card.

    Args:
        index: number of the card.

    Raises:
        InputError: neither package is installed, or the card has no counter.
    """

    label = "NVML"
    window_seconds = 0.2  # the counter moves about every 20 to 100 ms

    def __init__(self, index: int = 0) -> None:
        given = f"the energy counter of card {index}"
        instead = "run: pip install nvidia-ml-py; cards before Volta have no counter"
        # both packages have errors of their own
        with as_bad_input(given, "it cannot be read", instead, Exception):
            self._millijoules = _nvml_counter(index)
            self._millijoules()

    def read(self) -> float:
        return self._millijoules() * 1e-3


def _nvml_counter(index: int) -> Callable[[], float]:
    try:
        import pynvml
    except ImportError:
        from zeus.device.gpu import get_gpus

        gpus = get_gpus()
        return lambda: gpus.get_total_energy_consumption(index)
    pynvml.nvmlInit()
    handle: Any = pynvml.nvmlDeviceGetHandleByIndex(index)
    return lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)


def best_meter(
    device: torch.device | str = "cpu", watts: float = DEFAULT_WATTS, powercap: Path = POWERCAP
) -> JouleMeter:
    """Return the best meter for work on a device.

    For a card it is NVML. For the CPU it is RAPL where it can be read, and else the model.

    Args:
        device: where the work is done.
        watts: power of the model.
        powercap: folder of RAPL's counters.

    Raises:
        InputError: the device is a card without a counter that can be read.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return NVMLMeter(device.index or 0)
    try:
        return RAPLMeter(powercap)
    except InputError:
        return ModelledMeter(watts)
