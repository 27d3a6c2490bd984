"""Runs to be killed: a process that has imported everything, and forks one child per run. Talks
JSON lines over its pipes.

    {"folder": F, "mlflow": false, "after": SECONDS, "event": N, "interrupt": SIGNAL,
     "settings": {...}, "peers": false}

The child runs the federation below in folder F with ``auto_resume``. It is killed after so many
seconds, or kills itself before the N-th time it touches the file system under F, or sends itself a
signal in round 4 and again whenever it writes a file from then on. The answer: its exit status as
``os.waitstatus_to_exitcode`` has it, and its seconds.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from pathlib import Path

import torch
from toy import sgd

from callbacks import Calibration, LabelNoise, StragglerDropout
from fl_lightning.clock import Clock, Diurnal, FedBuff, Lines, LogNormalDevices
from fl_lightning.data import Dirichlet, FederatedImages
from fl_lightning.hooks import Stressor
from fl_lightning.methods import FedAvg, FedMPQ, Method
from fl_lightning.models import SmallCNN
from fl_lightning.support import disk
from fl_lightning.topology import Exponential, Gossip
from fl_lightning.tracking.mlflow_store import prepare
from fl_lightning.trainer import FederatedTrainer

count, interrupt, write_synced = 0, 0, disk.write_synced
TOUCHES = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate"}


class Remembering(FedAvg):
    """With everything that a resume can lose: a server momentum, and clients that start half-way to
    where they last stopped."""

    def receive(self, message, client):
        weights = message.tensor("weights")
        weights = (weights + client.state["last"]) / 2 if "last" in client.state else weights
        self.layout.write(self.network, weights)

    def upload(self, client):
        client.state["last"] = self.layout.read(self.network)
        return super().upload(client)

    def aggregate(self, uploads):
        before = self.server["weights"]
        super().aggregate(uploads)
        step = (
            self.server["weights"]
            - before
            + 0.5 * self.server.get("momentum", torch.zeros_like(before))
        )
        self.server = {"weights": before + step, "momentum": step}


class Fading(Stressor):
    """Loses the upload of every third client it has ever seen: a count that must survive."""

    def __init__(self):
        self.seen = 0

    def change_cohort(self, cohort, *, round, context):
        if round == 4 and interrupt:
            disk.write_synced = lambda path, data: (
                os.kill(os.getpid(), interrupt),
                write_synced(path, data),
            )
            os.kill(os.getpid(), interrupt)
        return cohort

    def change_upload(self, upload, *, client, round, context):
        self.seen += 1
        return None if self.seen % 3 == 0 else upload

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


def fit(
    settings: dict, ckpt_path: str | None = None, root: str = "runs", peers: bool = False
) -> FederatedTrainer:
    """Six rounds of 4 of 12 clients on digits, evaluated every second round; about a second. As
    ``peers`` they are clients of FedMPQ without a server, who push sums on a directed graph. With
    ``flights`` they are versions, which two uploads of four clients that come and go make."""
    data = FederatedImages(
        dataset="digits",
        num_clients=12,
        partition=Dirichlet(beta=1.0, min_size=2),
        batch_size=64,
        val_fraction=0.2,
    )
    flights = settings.pop("flights", False)
    method: Method = (FedAvg if flights else Remembering)(
        network=lambda classes: SmallCNN(classes, width=4), optimizer=sgd(0.05)
    )
    if peers:
        method = FedMPQ(
            network=lambda classes: SmallCNN(classes, width=4),
            optimizer=sgd(0.05),
            weigh_by="clients",
        )
        settings = {"topology": Gossip(Exponential()), "participation": 0.7, **settings}
    callbacks = [
        StragglerDropout(0.2),
        LabelNoise(round=3, clients=0.5, among="federation" if flights else "cohort"),
        Calibration(),
        Fading(),
    ]
    basic = {
        "max_rounds": 6,
        "participation": 0.3,
        "local_epochs": 1,
        "eval_every": 2,
        "checkpoint_every": 1,
        "accelerator": "cpu",
    }
    if flights:
        online = Diurnal(online=1.0, offline=0.5, day=2.0)
        clock = Clock(devices=LogNormalDevices(), network=Lines(up=1e5), availability=online)
        basic |= {"clock": clock, "rounds": FedBuff(4, 2)}
    trainer = FederatedTrainer(
        callbacks=callbacks,
        default_root_dir=root,
        **{**basic, "auto_resume": ckpt_path is None, **settings},
    )
    trainer.fit(method, data, seed=3, ckpt_path=ckpt_path)
    return trainer


def die_at(event: int, folder: str) -> None:
    """SIGKILL before the ``event``-th touch of the file system."""

    def hook(name, arguments):
        global count
        if (
            name in TOUCHES
            and str(arguments[0]).startswith(("runs", folder))
            and not (name == "open" and arguments[1] == "r")
        ):
            count += 1
            if count == event:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def child(request: dict) -> int:
    global interrupt
    interrupt = request.get("interrupt", 0)
    os.chdir(request["folder"])
    os.dup2(os.open("log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), 2)
    logging.basicConfig(level=logging.INFO)
    if request.get("event") is not None:
        die_at(request["event"], request["folder"])
    try:
        settings = {"logger": request.get("mlflow", False), **request.get("settings", {})}
        fit(settings, request.get("ckpt_path"), peers=request.get("peers", False))
    except KeyboardInterrupt:
        return 130
    except SystemExit as stop:
        return stop.code
    except BaseException:
        logging.exception("failed")
        return 1
    Path("touches.txt").write_text(str(count))
    return 0


def serve() -> None:
    torch.set_num_threads(1)
    # before mlflow is imported: threads that it would start could hold a lock that a fork never
    # gets
    prepare()
    from lightning.pytorch.loggers import MLFlowLogger  # noqa: F401

    print("ready", flush=True)  # noqa: T201
    for line in sys.stdin:
        request, started = json.loads(line), time.monotonic()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = child(request)
            finally:
                os._exit(code)
        if request.get("after") is not None:
            time.sleep(request["after"])
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        took = time.monotonic() - started
        print(json.dumps([os.waitstatus_to_exitcode(status), took]), flush=True)  # noqa: T201


if __name__ == "__main__":
    serve()
