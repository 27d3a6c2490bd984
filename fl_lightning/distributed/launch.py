"""How several processes start, and how they end together.

Rank 0 starts the others as Fabric's script launcher does (the same command again, once per rank), or torchrun
or SLURM starts all. A rank that dies is noticed by rank 0 within a second and named; ranks whose parent dies
leave by themselves.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from types import FrameType
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.fabric.utilities.distributed import _init_dist_connection, _set_num_threads_if_needed

from fl_lightning.distributed import collectives
from fl_lightning.errors import InputError, RankLost

log = logging.getLogger("fl_lightning")

PARENT = "_FL_RANK_ZERO_PID"  # in the environment of ranks that rank 0 started
POLL, GRACE = 0.2, 45.0  # seconds: between looks; for rank 0 to write its checkpoint after another rank died


class Ranks(DDPStrategy):
    """DDP's processes without its reduction of gradients, which would mix those of different clients. Only
    CPU bytes travel: gloo."""

    def __init__(self, timeout: int) -> None:
        super().__init__(process_group_backend="gloo", timeout=timedelta(seconds=timeout))

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self._launcher = Launcher(self.cluster_environment, self.num_processes, self.num_nodes)

    def _setup_distributed(self) -> None:
        self._set_world_ranks()
        assert self.cluster_environment is not None
        logging.getLogger("lightning.fabric").setLevel(logging.WARNING)  # announces every process
        _init_dist_connection(self.cluster_environment, "gloo", timeout=self._timeout)


class Launcher(_SubprocessScriptLauncher):
    """Fabric's, with rank 0 in charge: the others take no Ctrl-C or SIGTERM of their own, and go where rank 0
    goes."""

    watch: Watch | None = None  # of this process: a script may fit more than once, with the same ranks

    def launch(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            os.environ[PARENT] = str(os.getpid())
            with _ignored(signal.SIGINT, signal.SIGTERM):  # across exec too
                self._call_children_scripts()
            Launcher.watch = Watch(self.procs, self.cluster_environment.node_rank() * self.num_processes)
        elif Launcher.watch is None:
            leave_with(int(os.environ.get(PARENT, os.getppid())))
        _set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)


class Watch:
    """Looks after the processes that rank 0 started. When one dies: names it, ends the others, and raises
    ``RankLost`` in the main thread.

    Args:
        processes: ranks ``first + 1`` and following.
    """

    def __init__(self, processes: list[subprocess.Popen], first: int) -> None:
        self.processes, self.first = processes, first
        self.error: RankLost | None = None
        self.stopped = threading.Event()
        with suppress(ValueError):  # not in the main thread: the broken connection has to tell
            signal.signal(signal.SIGCHLD, self._raise)
        threading.Thread(target=self._look, daemon=True, name="ranks").start()

    def stop(self) -> None:
        """The run is over for all of them."""
        self.stopped.set()
        self.error = None
        for process in self.processes:
            process.kill()

    def _look(self) -> None:
        while not self.stopped.wait(POLL):
            for rank, process in enumerate(self.processes, self.first + 1):
                if process.poll():
                    self._fail(f"rank {rank} (process {process.pid}) {_how(process.returncode)}")
                    return

    def _fail(self, what: str) -> None:
        self.error = RankLost(
            f"{what}",
            "a run needs all its processes",
            "mend the cause, then continue with --ckpt_path RUN_DIR",
        )
        log.error("%s: the run stops", what)
        for process in self.processes:
            process.kill()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGCHLD)  # interrupts its sleep too
        if not self.stopped.wait(GRACE):  # the main thread is stuck outside Python
            os._exit(1)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        error, self.error = self.error, None
        if error is not None:
            raise error


def _how(code: int) -> str:
    with suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"exited with code {code}"


def leave_with(parent: int) -> None:
    """End this process when its parent is gone: nobody would ever answer it."""

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(POLL)
        os._exit(1)

    threading.Thread(target=look, daemon=True, name="parent").start()


def make_fabric(
    accelerator: str,
    devices: int | str,
    strategy: str,
    num_nodes: int,
    *,
    timeout: int,
    precision: Any,
    callbacks: list[Any],
) -> Fabric:
    """Fabric, whose processes are :class:`Ranks` where there may be several; ``timeout`` in seconds is
    theirs.

    Raises:
        ValueError: what Fabric refuses, a strategy that cannot share clients, or other processes than were
            started.
    """
    if strategy not in ("auto", "ddp"):
        raise InputError(
            f"--trainer.strategy {strategy}",
            "processes share clients, not a model",
            "write --trainer.strategy ddp",
        )
    devices, num_nodes = processes(devices, num_nodes)
    make = partial(
        Fabric,
        accelerator=accelerator,
        devices=devices,
        num_nodes=num_nodes,
        precision=precision,
        callbacks=callbacks,
    )
    try:
        fabric = make(strategy=strategy)
        return make(strategy=Ranks(timeout)) if isinstance(fabric.strategy, DDPStrategy) else fabric
    except Exception as error:
        raise InputError(
            f"--trainer.accelerator {accelerator} devices {devices} strategy {strategy} precision "
            f"{precision}",
            f"Fabric refuses them ({error})",
            "write --trainer.accelerator auto --trainer.devices 1",
        ) from error


def launched_from_outside(fabric: Fabric) -> bool:
    """Whether this process is one of several that something else started: rank 0, torchrun, SLURM."""
    launcher = fabric.strategy.launcher
    return isinstance(launcher, Launcher) and launcher.cluster_environment.creates_processes_externally


def join(fabric: Fabric) -> None:
    """Join the processes that something else started. Ranks other than 0 keep quiet from here on."""
    fabric.launch()
    atexit.register(_leave)
    if not fabric.is_global_zero:
        log.setLevel(logging.CRITICAL)


def _leave() -> None:
    """Or gloo's threads may outlive the interpreter, and the process ends with SIGABRT after all its work is
    done."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def start_others(fabric: Fabric, start: str) -> None:
    """Start the other processes and tell them where the run starts from: they wait for that before their own
    preparations."""
    fabric.launch()
    collectives.from_rank_zero(start)
    collectives.barrier()


def one_first(fabric: Fabric, function: Callable[[], None]) -> None:
    """Run ``function`` in one process of each machine, then in the others: it may write what the others then
    read."""
    if fabric.local_rank:
        collectives.barrier()
    function()
    if not fabric.local_rank:
        collectives.barrier()


def stop_others() -> None:
    """End the processes that this one started."""
    if Launcher.watch is not None:
        Launcher.watch.stop()


def processes(devices: int | str, num_nodes: int) -> tuple[int | str, int]:
    """``devices`` and ``num_nodes``, taken from torchrun or srun where they started several processes and
    ``devices`` is 1.

    Raises:
        ValueError: they started another number of processes than was asked for: as many silent copies of one
            run would follow.
    """
    started = _started()
    if started is None:
        return devices, num_nodes
    local, nodes = started
    if devices in (1, "1"):
        return local, nodes
    if str(devices) not in (str(local), "auto", "-1"):
        raise InputError(
            f"--trainer.devices {devices} where {local} processes were started on this machine",
            "each is one device",
            f"write --trainer.devices {local}, or start {devices}",
        )
    return devices, nodes


def _started() -> tuple[int, int] | None:
    """Processes on this machine, and machines, when torchrun or srun started several."""
    read = os.environ.get
    if "TORCHELASTIC_RUN_ID" in os.environ:
        local, total = int(read("LOCAL_WORLD_SIZE", 1)), int(read("WORLD_SIZE", 1))
    else:
        total, nodes = int(read("SLURM_STEP_NUM_TASKS", 1)), int(read("SLURM_STEP_NUM_NODES", 1))
        local = total // max(nodes, 1)
    return (local, total // local) if total > 1 else None


@contextmanager
def _ignored(*signals: signal.Signals) -> Iterator[None]:
    try:
        before = {number: signal.signal(number, signal.SIG_IGN) for number in signals}
    except ValueError:  # not in the main thread
        yield
        return
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
