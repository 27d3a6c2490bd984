"""Where cells run: threads and GPUs of the processes that work at a time."""

from __future__ import annotations

import os
from collections.abc import Mapping

from fl_lightning.errors import InputError


def cores() -> int:
    """Cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1


def threads_per_job(jobs: int, before: int = 0, environment: Mapping[str, str] = os.environ) -> int:
    """``OMP_NUM_THREADS`` where it is set, else what a cell had in earlier sessions, else its share of the cores.

    Args:
        jobs: cells that run at a time.
        before: threads that this cell had when it was started first; 0: it was not.

    >>> threads_per_job(2, 0, {"OMP_NUM_THREADS": "3"}), threads_per_job(2, 5, {})
    (3, 5)
    """
    given = environment.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdigit() and int(given) else before or max(1, cores() // jobs)


def places(jobs: int, devices: str, environment: Mapping[str, str] = os.environ) -> list[dict[str, str]]:
    """Environment of each of ``jobs`` places: GPUs are dealt out in turn.

    Args:
        jobs: cells that run at a time.
        devices: ``auto`` for all GPUs that are visible, ``none``, or their numbers.

    Raises:
        InputError: there is no such GPU.

    >>> places(3, "none", {}), places(3, "0,2", {"CUDA_VISIBLE_DEVICES": "4,5,7"})
    ([{}, {}, {}], [{'CUDA_VISIBLE_DEVICES': '4'}, {'CUDA_VISIBLE_DEVICES': '7'}, {'CUDA_VISIBLE_DEVICES': '4'}])
    """
    if devices == "none":
        return [{} for _ in range(jobs)]
    visible = _visible(environment)
    if devices == "auto":
        chosen = visible
    else:
        numbers = [number.strip() for number in devices.split(",")]
        if not all(number.isdigit() and int(number) < len(visible) for number in numbers):
            there = f"0 to {len(visible) - 1}" if visible else "none here"
            raise InputError(f"--devices {devices}; it is auto, none, or numbers of GPUs ({there}); write --devices auto")
        chosen = [visible[int(number)] for number in numbers]
    return [{"CUDA_VISIBLE_DEVICES": chosen[slot % len(chosen)]} if chosen else {} for slot in range(jobs)]


def _visible(environment: Mapping[str, str]) -> list[str]:
    """GPUs, by the names that ``CUDA_VISIBLE_DEVICES`` has for them."""
    if "CUDA_VISIBLE_DEVICES" in environment:
        return [name.strip() for name in environment["CUDA_VISIBLE_DEVICES"].split(",") if name.strip()]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]
