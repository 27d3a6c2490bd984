"""Processes that are killed, stopped or signalled at a bad moment: nobody is left behind or waited
for for ever, no signal is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from places import ROOT, SUPPORT
from ranks_program import fit

from fl_lightning.engines.pool import PoolEngine
from fl_lightning.errors import RankLost
from fl_lightning.hooks import Stressor
from fl_lightning.run.interrupts import Interrupts

ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(SUPPORT), str(ROOT), os.environ.get("PYTHONPATH", "")]),
}


def start(program: str, *arguments: object) -> subprocess.Popen:
    words = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.Popen(
        words, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def wait_until(condition, seconds: float = 60.0) -> bool:
    ends = time.monotonic() + seconds
    while not condition() and time.monotonic() < ends:
        time.sleep(0.05)
    return bool(condition())


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


BUSY = """
import os, sys
from pathlib import Path
from ranks_program import Dropped, fit
from toy import sgd
from fl_lightning.methods import FedAvg

folder = Path(sys.argv[1])

class Busy(FedAvg):
    def upload(self, client):
        (folder / f"{os.getpid()}.pid").touch()
        while True:
            pass

fit("FedAvg", folder, Busy(network=Dropped, optimizer=sgd(0.05)), engine="sequential", workers=2)
"""


@pytest.mark.slow
@pytest.mark.essential
def test_workers_end_with_a_parent_that_was_killed(tmp_path):
    """In the middle of work that never looks at its pipe."""
    process = start(BUSY, tmp_path)
    try:
        assert wait_until(lambda: len(list(tmp_path.glob("*.pid"))) == 2)
        workers = [int(path.stem) for path in tmp_path.glob("*.pid")]
        process.kill()
        process.wait()
        assert wait_until(lambda: not any(map(is_running, workers)))
    finally:
        process.kill()
        for path in tmp_path.glob("*.pid"):
            if is_running(int(path.stem)):
                os.kill(int(path.stem), signal.SIGKILL)
        process.stdout.close()


class Stops(Stressor):
    """Stops one worker before round 2."""

    def change_cohort(self, cohort, *, round, context):
        if round == 2:
            os.kill(engine_of[0].workers[0].process.pid, signal.SIGSTOP)
        return cohort


engine_of: list[PoolEngine] = []


def test_a_stopped_worker_is_named_after_the_time_out(tmp_path, monkeypatch):
    begin = PoolEngine.start
    monkeypatch.setattr(
        PoolEngine, "start", lambda engine: (engine_of.insert(0, engine), begin(engine))
    )
    with pytest.raises(RankLost, match=r"worker process \d+ is stopped .* no answer for 5 seconds"):
        fit("FedAvg", tmp_path, engine="sequential", workers=2, rank_timeout=5, callbacks=[Stops()])
    assert (
        json.loads((tmp_path / "FedAvg" / "run" / "metadata.json").read_text())["status"]
        == "failed"
    )


FORKED = """
import os, signal, sys
from pathlib import Path
from ranks_program import fit

parent, sent = os.getpid(), []

def send():
    if os.getpid() == parent and not sent:
        sent.append(1)
        os.kill(parent, int(sys.argv[2]))

os.register_at_fork(after_in_parent=send)
fit("FedAvg", Path(sys.argv[1]), engine="sequential", workers=2)
"""


@pytest.mark.slow
@pytest.mark.essential
def test_a_signal_while_a_worker_is_forked_ends_the_run(tmp_path):
    """Python prints what a handler raises there, and drops it."""
    process = start(FORKED, tmp_path, int(signal.SIGTERM))
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 143, output
    assert not list(tmp_path.glob("*/*/metrics.csv"))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_a_signal_that_python_drops_is_raised_again(number, error, monkeypatch):
    class Disposed:
        def __del__(self):
            os.kill(os.getpid(), number)
            for _ in range(100):  # the handler runs between two instructions
                pass

    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
    with pytest.raises(error), Interrupts() as interrupts:  # noqa: PT012
        Disposed()
        interrupts.check()
        pytest.fail("the signal was lost")


def test_the_first_signal_counts_and_later_ones_are_dropped():
    with pytest.raises(SystemExit), Interrupts() as interrupts, interrupts.held():  # noqa: PT012
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
    with Interrupts() as interrupts:
        interrupts.ignore()
        os.kill(os.getpid(), signal.SIGINT)


NESTED = """
import multiprocessing, sys
from pathlib import Path
from toy import Points, on_points, run
from fl_lightning.engines import choice
from fl_lightning.errors import InputError
from fl_lightning.methods import FedAvg

choice.torch.get_num_threads = lambda: 2

def fit(workers):
    try:
        run(on_points(FedAvg()), Points(), Path(sys.argv[1]) / str(workers), max_rounds=1, workers=workers)
    except InputError as error:
        return str(error)

if __name__ == "__main__":
    with multiprocessing.get_context("fork").Pool(1) as pool:
        print(pool.map(fit, ["auto", 2]))
"""


def test_a_process_of_a_pool_trains_its_clients_itself(tmp_path):
    """It may not have processes of its own."""
    program = start(NESTED, tmp_path)
    said = program.communicate(timeout=120)[0].splitlines()[-1]
    assert said.startswith("[None, '--trainer.workers 2 in a process of multiprocessing.Pool; "), (
        said
    )
