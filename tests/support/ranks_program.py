"""The ten methods on digits, with dropout: what several test files fit, and the program that each
rank of test_ranks.py runs."""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from pathlib import Path

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import LightningModule
from ten import TEN, make
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import ExponentialLR
from torchmetrics import MetricCollection
from torchmetrics.classification import (
    MulticlassAUROC,
    MulticlassCalibrationError,
    MulticlassF1Score,
    MulticlassPrecision,
)
from toy import run, sgd

from callbacks import ByzantineClients, SecureDropout
from fl_lightning import rng
from fl_lightning.aggregation import intake
from fl_lightning.clock import Clock, Diurnal, FedBuff, LogNormalDevices, OverSelection
from fl_lightning.data import IID, FederatedImages
from fl_lightning.engines.stacked import batched
from fl_lightning.hooks import Meter, Stressor
from fl_lightning.methods import Bulyan, CenteredClipping, FedAvg, FLTrust, Method, WeightedMean
from fl_lightning.models import SmallCNN
from fl_lightning.privacy import ClientPrivacy
from fl_lightning.privacy.secure import PHASES, SecureSum
from fl_lightning.sampling import Oort, PowerOfChoice
from fl_lightning.topology import Exponential, Gossip, Hierarchy, Moshpit, Ring


class Dropped(nn.Module):
    """A small network with dropout, whose masks have to be the client's own."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.body, self.dropout = SmallCNN(classes, width=4), nn.Dropout(0.2)

    def forward(self, images):
        return self.body(self.dropout(images))


OVER = {
    "moshpit": ("FedMPQKD", Moshpit(side=2, dims=3)),
    "push": ("FedMPQ", Gossip(Exponential())),
    "ring": ("QFedAvg", Gossip(Ring())),
    "edges": ("FedMPQKD", Hierarchy(groups=2, every=2)),
}
"""Methods without a server, or with several."""
MANY = (
    *TEN,
    "counts",
    "clipped",
    "late",
    "FedAdam",
    "FedExP",
    "FedACG",
    "choice",
    "oort",
    "buffered",
    "stacked",
    *OVER,
)


class Counts(FedAvg):
    """Its server's half writes to itself while it receives uploads, and the next state depends on
    it."""

    count = 0

    def addends(self, upload, client_id, weight):
        self.count = self.count * 2 + client_id
        return super().addends(upload, client_id, weight)

    def next_state(self, sums):
        super().next_state(sums)
        self.server["weights"] = self.server["weights"] + self.count / 1024


def method_of(name: str) -> Method:
    if name == "stacked":
        return make("SCAFFOLD", optimizer=sgd(0.05))
    if name == "counts":
        return Counts(optimizer=sgd(0.05), network=Dropped)
    if name == "clipped":
        return make("FedAvg", optimizer=sgd(0.05), scheduler=partial(ExponentialLR, gamma=0.5))
    if name in OVER:
        return make(OVER[name][0], optimizer=sgd(0.05), network=Dropped, weigh_by="clients")
    if name == "buffered":
        return make("FedProx", optimizer=sgd(0.05), network=Dropped)
    if name in ("late", "choice"):
        return make("SCAFFOLD", optimizer=sgd(0.05), network=Dropped)
    if name == "oort":
        return make("FedMPQ", optimizer=sgd(0.05), network=Dropped)
    return make(name, optimizer=sgd(0.05), **({} if name == "FedMosaic" else {"network": Dropped}))


def data_of(name: str, num_clients: int = 6) -> FederatedImages:
    return FederatedImages(
        dataset="digits", num_clients=num_clients, partition=IID(), batch_size=32, val_fraction=0.1,
        public_examples=100 if name == "FedKD" else 0,
    )  # fmt: skip


def fit(name: str, root: Path, method: Method | None = None, **settings):
    clip = {"gradient_clip_val": 0.1} if name == "clipped" else {}
    late = (
        {"clock": Clock(devices=LogNormalDevices()), "rounds": OverSelection(1.6)}
        if name == "late"
        else {}
    )
    clock = Clock(
        devices=LogNormalDevices(), availability=Diurnal(online=15.0, offline=5.0, day=20.0)
    )
    late |= (
        {"sampler": PowerOfChoice(5), "clock": clock, "max_rounds": 3} if name == "choice" else {}
    )
    late |= (
        {"sampler": Oort(explore=0.5), "clock": clock, "max_rounds": 3} if name == "oort" else {}
    )
    late |= {"clock": clock} if name in ("push", "ring") else {}
    late |= {"engine": "batched", "participation": 1.0} if name == "stacked" else {}
    late |= {"rounds": FedBuff(4, 2), "clock": clock, "max_rounds": 4} if name == "buffered" else {}
    settings = {
        "max_rounds": 2,
        **clip,
        **late,
        **({"topology": OVER[name][1], "max_rounds": 3} if name in OVER else {}),
        "participation": 0.5,
        "local_epochs": 1,
        "max_local_steps": 3,
        "experiment": name,
        "run_name": "run",
        **settings,
    }
    return run(method or method_of(name), data_of(name), root, **settings)


def fit_private(root: Path, **settings) -> None:
    """Private runs: with central and with distributed noise, with one client a round, which is on
    one rank, and of a class whose hooks write to it."""
    for name in ("central", "distributed", "lonely", "writes"):
        kind = Counts if name == "writes" else FedAvg
        where = "distributed" if name == "distributed" else "central"
        fit(
            name, root, kind(optimizer=sgd(0.05), network=Dropped, weigh_by="clients"),
            privacy=ClientPrivacy(noise_multiplier=1.0, clip_norm=0.5, where=where, target_quantile=0.5),
            participation=0.1 if name == "lonely" else 0.5, max_rounds=1 if name == "writes" else 2, **settings,
        )  # fmt: skip


class Dies(Meter):
    """Kills its process at the start of a round.

    Args:
        rank: of the process.
        round: of the run.
    """

    def __init__(self, rank: int, round: int) -> None:
        self.rank, self.round = rank, round

    def on_round_start(self, round, context):
        (context.run_dir / f"rank{rank_zero_only.rank}.pid").write_text(str(os.getpid()))
        if rank_zero_only.rank == self.rank and round == self.round:
            os.kill(os.getpid(), signal.SIGKILL)


class DamagesMasked(Stressor):
    """Flips a byte of what client 2 sends in round 2."""

    def change_bytes(self, upload, *, client, round, context):
        damaged = client.id == 2 and round == 2
        return upload[:-1] + bytes([upload[-1] ^ 1]) if damaged else upload


class LoggingLit(LightningModule):
    """A module that logs numbers, a metric and a collection of metrics in its evaluation steps."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10))
        self.f1 = MulticlassF1Score(10)
        self.many = MetricCollection([MulticlassPrecision(10), MulticlassAUROC(10)])

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        outputs = self(x)
        self.f1.update(outputs.detach(), y)  # left in its state, which must not reach an evaluation
        return F.cross_entropy(outputs, y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.f1(self(x), y)
        self.log_dict({"val_loss": F.cross_entropy(self(x), y), "val/f1": self.f1})

    def test_step(self, batch, batch_idx):
        x, y = batch
        outputs = self(x)
        self.f1(outputs, y)
        self.many.update(outputs.softmax(1), y)
        self.log("f1", self.f1)
        self.log_dict(self.many)
        self.log("test/noise", torch.rand(()) * 0 + len(y), batch_size=1)
        self.log("batches", batch_idx, reduce_fx="max")
        self.log("examples", float(len(y)), reduce_fx=torch.sum)
        self.log("accuracy", -1.0)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def seeded_lit(cls: type[LoggingLit] = LoggingLit) -> LoggingLit:
    with rng.torch_stream(0, "weights"):
        return cls()


def fit_named(root: Path, **settings) -> None:
    """Runs with named metrics: of one model, of personal ones, and of a module that logs by
    itself."""
    metrics = [MulticlassF1Score, MulticlassAUROC, MulticlassCalibrationError]
    for name in ("FedAvg", "LocalOnly", "module"):
        data = data_of(name)
        data.metrics, data.primary = metrics, "f1_score"
        method = FedAvg(module=seeded_lit()) if name == "module" else method_of(name)
        own = {
            "max_rounds": 2,
            "local_epochs": 1,
            "experiment": name,
            "run_name": "run",
            **settings,
        }
        run(method, data, root, **own)


def fit_robust(root: Path, **settings) -> None:
    """Runs whose averages keep something or train, among attackers that know all uploads."""
    averages = {
        "v": CenteredClipping(0.2),
        "root": FLTrust(2),
        "bulyan": Bulyan(0),
        "mean": WeightedMean(),
    }
    for name, average in averages.items():
        data, method = (
            data_of("FedKD"),
            make("FedAvg", optimizer=sgd(0.05), network=Dropped, average=average),
        )
        own = {
            "max_rounds": 2,
            "local_epochs": 1,
            "experiment": name,
            "run_name": "run",
            **settings,
        }
        run(method, data, root, callbacks=[ByzantineClients(0.4, "min_max")], **own)


SECURE = {
    "participation": 1.0,
    "max_rounds": 3,
    "secure_sum": SecureSum(threshold=0.6),
    "callbacks": [*(SecureDropout(0.1, phase) for phase in PHASES), DamagesMasked()],
}
"""Three rounds of six clients that drop out at every phase."""

if __name__ == "__main__":
    folder, what = Path(sys.argv[1]), sys.argv[2]
    intake.WAITING_UPLOADS, intake.WAITING_BYTES = 1, 0  # one by one, as large ones are
    batched.MAX_STACK = 2
    if what == "all":
        for method in MANY:
            workers = {"workers": 2} if method == "FedPQ" else {}
            fit(method, folder, devices=2, strategy="ddp", rank_timeout=120, **workers)
    elif what.startswith("secure"):  # and on how many ranks
        fit("FedMPQ", folder, devices=int(what.removeprefix("secure")), strategy="ddp", **SECURE)
    elif what == "named":
        fit_named(folder, devices=2, strategy="ddp", rank_timeout=120)
    elif what == "robust":
        fit_robust(folder, devices=2, strategy="ddp", rank_timeout=120)
    elif what == "private":
        fit_private(folder, devices=2, strategy="ddp", rank_timeout=120)
    elif what == "resumed":
        fit(
            "buffered", folder, devices=2, strategy="ddp", ckpt_path=sys.argv[3], allow_changed=True
        )
    elif what == "torchrun":
        fit("FedMPQKD", folder)
    else:
        fit("FedAvg", folder, devices=2, strategy="ddp", callbacks=[Dies(rank=int(what), round=2)])
