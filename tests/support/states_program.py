"""Methods whose clients keep something, and the program of the ranks of test_kept_states.py."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import ranks_program
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from ranks_program import Dropped
from torch import distributed
from toy import run, sgd

from fl_lightning.hooks import Meter
from fl_lightning.methods import FedAvg, LocalOnly, Method

KEEPING = ("LocalOnly", "Anchored", "FedMosaic", "FedPer")
ROUNDS = 5


class Anchored(FedAvg):
    """FedAvg whose clients start half-way between the broadcast and their own last weights, with
    which they are evaluated: a server of sums, and states that matter."""

    personalised = True

    def receive(self, message, client):
        super().receive(message, client)
        own = client.state.get("weights", message.tensor("weights"))
        self.layout.write(self.network, (message.tensor("weights") + own) / 2)

    def upload(self, client):
        client.state["weights"] = self.layout.read(self.network)
        return super().upload(client)

    def deploy(self, client=None):
        network = super().deploy()
        if client is not None:
            self.layout.write(network, client.state.get("weights", self.server["weights"]))
        return network


class Received(Meter):
    """Writes what this process received in each round: bytes for it alone, which are states of
    clients, and bytes for all; and which states it has at the end of the round."""

    def on_setup(self, context):
        self.rounds: list[dict[str, Any]] = []
        self.alone = self.all = 0
        self.unwatched = distributed.irecv, distributed.broadcast
        distributed.irecv, distributed.broadcast = self.irecv, self.broadcast

    def irecv(self, tensor, source, **settings):
        self.alone += tensor.nbytes
        return self.unwatched[0](tensor, source, **settings)

    def broadcast(self, tensor, source, **settings):
        self.all += tensor.nbytes if source != rank_zero_only.rank else 0
        return self.unwatched[1](tensor, source, **settings)

    def on_client_end(self, client, round, context):
        self.seen.append([client.id, bool(client.state)])

    def on_round_start(self, round, context):
        self.seen: list[list[int]] = []
        self.alone = self.all = 0

    def on_round_end(self, record, context):
        holders, states = sorted(context.holders.items()), sorted(context.states)
        self.rounds.append(
            {
                "alone": self.alone,
                "all": self.all,
                "holders": holders,
                "states": states,
                "seen": self.seen,
            }
        )

    def on_fit_end(self, summary, context):
        distributed.irecv, distributed.broadcast = self.unwatched
        path = context.run_dir.parent / f"rank{rank_zero_only.rank}.json"
        path.write_text(json.dumps(self.rounds))


class Dies(Meter):
    """Kills the process of rank 1 in a round, when all clients have been trained."""

    def __init__(self, round: int) -> None:
        self.round = round

    def on_round_end(self, record, context):
        if rank_zero_only.rank == 1 and record.round == self.round:
            os.kill(os.getpid(), signal.SIGKILL)


def method_of(name: str) -> Method:
    own = {"LocalOnly": LocalOnly, "Anchored": Anchored}
    return (
        own[name](network=Dropped, optimizer=sgd(0.05))
        if name in own
        else ranks_program.method_of(name)
    )


def fit(name: str, root: Path, rounds: int = ROUNDS, **settings: Any):
    """Twelve clients, of which half are sampled, by a seed that moves some of them to another rank
    than 0."""
    fixed = {
        "allow_changed": True,
        "participation": 0.5,
        "local_epochs": 1,
        "experiment": name,
        "run_name": "run",
    }
    data = ranks_program.data_of("", num_clients=12)
    return run(method_of(name), data, root, seed=3, max_rounds=rounds, **fixed, **settings)


def fit_all(folder: Path, rank: int, ranks: int, port: int) -> None:
    """Fit as rank ``rank`` of so many that were started from outside: whole runs, and the next to
    last rounds of those in ``turns``."""
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "test",
    }
    os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks))
    os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)) | {"GROUP_RANK": "0"}
    torch.set_num_threads(1)
    for name in KEEPING:
        fit(name, folder / str(ranks), devices=ranks, strategy="ddp", callbacks=[Received()])
        run = folder / "turns" / name / "run"
        fit(name, folder / "turns", ROUNDS - 1, devices=ranks, strategy="ddp", ckpt_path=str(run))


if __name__ == "__main__":
    import states_program  # so that settings name this file and not __main__

    states_program.fit(
        "LocalOnly",
        Path(sys.argv[1]),
        devices=2,
        strategy="ddp",
        checkpoint_every=0,
        callbacks=[states_program.Dies(4)],
    )
