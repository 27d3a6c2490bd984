"""Start of several processes, and their common end.

Either rank 0 starts the others as Fabric's script launcher does (the same command again for each
rank), or torchrun or SLURM starts all of them. Rank 0 notices and names within a second a rank that
it started and that dies. A rank whose parent dies exits.
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
from lightning.fabric.accelerators import MPSAccelerator
from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.fabric.utilities.distributed import _init_dist_connection, _set_num_threads_if_needed

from fl_lightning.distributed import collectives
from fl_lightning.errors import InputError, RankLost

log = logging.getLogger("fl_lightning")

PARENT_VARIABLE = "_FL_RANK_ZERO_PID"  # environment variable of ranks that rank 0 started
POLL_SECONDS = 0.2  # between two looks at other processes
CHECKPOINT_GRACE_SECONDS = 45.0  # for rank 0 to write its checkpoint after another rank died


class RankStrategy(DDPStrategy):
    """The processes of DDP without its reduction of gradients, which would mix those of different
    clients.

    Only bytes on the CPU are sent, through gloo.
    """

    def __init__(self, timeout: int) -> None:
        super().__init__(process_group_backend="gloo", timeout=timedelta(seconds=timeout))

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self._launcher = RankLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def _setup_distributed(self) -> None:
        self._set_world_ranks()
        assert self.cluster_environment is not None
        # INFO announces every process
        logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
        _init_dist_connection(self.cluster_environment, "gloo", timeout=self._timeout)


class RankLauncher(_SubprocessScriptLauncher):
    """Fabric's script launcher with rank 0 in control.

    The other ranks ignore Ctrl-C and SIGTERM and end when rank 0 ends.
    """

    watch: ProcessWatch | None = None
    """The watch of this process, shared by all launchers: several calls of ``fit`` use the same
    ranks."""

    def launch(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        self.cluster_environment.validate_settings(
            num_devices=self.num_processes, num_nodes=self.num_nodes
        )
        if not self.cluster_environment.creates_processes_externally:
            os.environ[PARENT_VARIABLE] = str(os.getpid())
            # children inherit this across exec
            with _ignore_signals(signal.SIGINT, signal.SIGTERM):
                self._call_children_scripts()
            # what else this process starts, such as torchrun, has ranks with other parents
            del os.environ[PARENT_VARIABLE]
            RankLauncher.watch = ProcessWatch(
                self.procs, self.cluster_environment.node_rank() * self.num_processes
            )
        elif RankLauncher.watch is None:
            exit_with_parent(int(os.environ.get(PARENT_VARIABLE, os.getppid())))
        _set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)


class ProcessWatch:
    """A watch over the processes that rank 0 started.

    When one dies, the watch logs its rank, ends the others, and raises ``RankLost`` in the main
    thread.

    Args:
        processes: the processes of ranks ``first + 1`` and following.
        first: rank of this process.
    """

    def __init__(self, processes: list[subprocess.Popen], first: int) -> None:
        self.processes, self.first = processes, first
        self.error: RankLost | None = None
        self.stopped = threading.Event()
        with suppress(ValueError):  # not in the main thread: the broken connection reports the loss
            signal.signal(signal.SIGCHLD, self._raise)
        threading.Thread(target=self._look, daemon=True, name="ranks").start()

    def stop(self) -> None:
        """End the processes and the watch."""
        self.stopped.set()
        self.error = None
        for process in self.processes:
            process.kill()

    def _look(self) -> None:
        while not self.stopped.wait(POLL_SECONDS):
            for rank, process in enumerate(self.processes, self.first + 1):
                if process.poll():
                    self._fail(
                        f"rank {rank} (process {process.pid}) {_end_of_process(process.returncode)}"
                    )
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
        # also interrupts a sleep
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGCHLD)
        # the main thread is stuck outside Python
        if not self.stopped.wait(CHECKPOINT_GRACE_SECONDS):
            os._exit(1)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        error, self.error = self.error, None
        if error is not None:
            raise error


def _end_of_process(code: int) -> str:
    """Describe the end of a process by its exit code."""
    with suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"exited with code {code}"


def exit_with_parent(parent: int) -> None:
    """Start a thread that ends this process once its parent is gone, since no rank would answer
    then."""

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_SECONDS)
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
    """Return Fabric, with :class:`RankStrategy` if there may be several processes.

    Args:
        accelerator: as in Fabric, where ``auto`` is never MPS, which has no float64.
        devices: as in Fabric.
        strategy: ``auto`` or ``ddp``.
        num_nodes: number of machines.
        timeout: time that a rank may take to answer, in seconds.
        precision: as in Fabric.
        callbacks: as in Fabric.

    Raises:
        InputError: Fabric refuses the settings, the strategy cannot share clients, or the number of
            processes is not that of the processes that were started.
    """
    if strategy not in ("auto", "ddp"):
        raise InputError(
            f"--trainer.strategy {strategy}",
            "processes share clients, not a model",
            "write --trainer.strategy ddp",
        )
    on_mps = accelerator in ("auto", "gpu") and MPSAccelerator.is_available()
    if accelerator == "mps" or (accelerator == "gpu" and on_mps):
        raise InputError(
            f"--trainer.accelerator {accelerator}",
            "losses are added up in float64, which MPS does not have",
            "write --trainer.accelerator cpu",
        )
    accelerator = "cpu" if on_mps else accelerator
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
        if isinstance(fabric.strategy, DDPStrategy):
            return make(strategy=RankStrategy(timeout))
        return fabric
    except Exception as error:
        raise InputError(
            f"--trainer.accelerator {accelerator} devices {devices} strategy {strategy} precision "
            f"{precision}",
            f"Fabric refuses them ({error})",
            "write --trainer.accelerator auto --trainer.devices 1",
        ) from error


def launched_from_outside(fabric: Fabric) -> bool:
    """Return whether rank 0, torchrun or SLURM started this process as one of several."""
    launcher = fabric.strategy.launcher
    return (
        isinstance(launcher, RankLauncher)
        and launcher.cluster_environment.creates_processes_externally
    )


def join(fabric: Fabric) -> None:
    """Join processes that were started from outside; ranks other than 0 log nothing from here
    on."""
    fabric.launch()
    atexit.register(_leave)
    if not fabric.is_global_zero:
        log.setLevel(logging.CRITICAL)


def _leave() -> None:
    """Close the process group at exit.

    Otherwise gloo's threads may outlive the interpreter, and the finished process ends with
    SIGABRT.
    """
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def start_others(fabric: Fabric, start: str) -> None:
    """Start the other processes and send them ``start``, the place from which the run starts.

    They wait for it before they prepare anything.
    """
    fabric.launch()
    collectives.from_rank_zero(start)
    collectives.barrier()


def one_first(fabric: Fabric, function: Callable[[], None]) -> None:
    """Run ``function`` in one process of each machine, then in the others.

    The function may write files that the other processes then read.
    """
    if fabric.local_rank:
        collectives.barrier()
    function()
    if not fabric.local_rank:
        collectives.barrier()


def stop_others() -> None:
    """End the processes that this process started."""
    if RankLauncher.watch is not None:
        RankLauncher.watch.stop()


def processes(devices: int | str, num_nodes: int) -> tuple[int | str, int]:
    """Return the number of devices and of machines.

    They are those of torchrun or srun if these started several processes and ``devices`` is 1.

    Raises:
        InputError: torchrun or srun started another number of processes than ``devices``; each
            process would run its own copy of the same run.
    """
    started = _started_processes()
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


def _started_processes() -> tuple[int, int] | None:
    """Return processes on this machine and machines if torchrun or srun started several, else
    None."""
    read = os.environ.get
    if "TORCHELASTIC_RUN_ID" in os.environ:
        local, total = int(read("LOCAL_WORLD_SIZE", 1)), int(read("WORLD_SIZE", 1))
    else:
        total, nodes = int(read("SLURM_STEP_NUM_TASKS", 1)), int(read("SLURM_STEP_NUM_NODES", 1))
        local = total // max(nodes, 1)
    return (local, total // local) if total > 1 else None


@contextmanager
def _ignore_signals(*signals: signal.Signals) -> Iterator[None]:
    """Ignore the signals within the block; outside the main thread do nothing."""
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
