"""Checks of the client's half: it does what its order says, and knows what its message says."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fl_lightning.conformance.bench import Bench, prepared
from fl_lightning.conformance.toy import images
from fl_lightning.conformance.verdicts import require
from fl_lightning.data import FederatedData
from fl_lightning.engines import ClientTask, SequentialEngine
from fl_lightning.engines.base import one_thread

CLIENT, EPOCHS = 4, 2


def _upload(
    bench: Bench, *, data: FederatedData | None = None, forget: bool = False, **changes: Any
) -> bytes:
    """What the client of a method that never trained sends in round 1.

    Args:
        data: in place of the bench's.
        forget: the server's tensors are others by then.
        changes: of its task.
    """
    method, run, data = bench.untrained(), bench.everyone, data or bench.data
    client = data.client(CLIENT)
    task = {
        "labels": data.labels(client),
        "epochs": EPOCHS,
        "steps": data.num_steps(client, EPOCHS),
        **changes,
    }
    if forget:
        method.server = {name: torch.ones_like(tensor) for name, tensor in method.server.items()}
    engine = SequentialEngine(run.trainer.fabric, method, data)
    with one_thread(method.device):  # as in a run: sums over other numbers of threads are rounded differently
        return engine.train_client(ClientTask(client, 1, run.log.broadcasts[1, CLIENT], **task)).upload


def clients_read_messages_only(bench: Bench) -> None:
    """What a client sends follows from its message, not from the server."""
    require(
        _upload(bench) == bench.everyone.log.uploads[1, CLIENT],
        "the same message, in another process, gives another upload",
    )
    require(_upload(bench, forget=True) == _upload(bench), "it reads what the server holds and does not send")


def orders_are_obeyed(bench: Bench) -> None:
    """Labels and the number of steps are those of the task."""
    labels = bench.data.labels(bench.data.client(CLIENT))
    changed = (labels + 1) % bench.data.num_classes
    require(
        _upload(bench, labels=changed) != _upload(bench),
        "other labels change nothing: noise in them would never arrive",
    )
    require(
        _upload(bench, steps=1) != _upload(bench),
        "fewer steps change nothing: a client that is slow would do all its work",
    )


def only_its_own_examples(bench: Bench) -> None:
    """Examples of others, and those held out for validation, do not matter to a client."""
    data: Any = prepared(images())
    own = np.union1d(data.client(CLIENT).train, data.public)
    others = torch.from_numpy(np.setdiff1d(np.arange(len(data.train_target)), own))
    data.train_images[others] = 255 - data.train_images[others]
    data.train_target[others] = (data.train_target[others] + 1) % data.num_classes
    require(
        _upload(bench, data=data) == _upload(bench),
        f"client {CLIENT} sends something else when only other examples changed",
    )


@torch.no_grad()
def deployed_from_the_server(bench: Bench) -> None:
    """The evaluated network follows from the server's state, and the client's own."""
    run = bench.everyone
    client = bench.data.client(CLIENT, run.log.kept[CLIENT])
    inputs, _ = next(iter(bench.data.test_batches()))
    other = bench.untrained(run.method.round, run.method.server)
    answers = [method.deploy(client).eval()(inputs).clone() for method in (run.method, other)]
    require(torch.equal(*answers), "one that never trained, with the same server, deploys another network")
