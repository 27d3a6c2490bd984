"""Checks of the client's half: it does what its order says, and knows what its message says."""

from __future__ import annotations

from typing import Any

import torch

from fl_lightning.conformance.bench import Bench
from fl_lightning.conformance.verdicts import require
from fl_lightning.engines import Order, SequentialEngine

CLIENT, EPOCHS = 4, 2


def _upload(bench: Bench, *, forget: bool = False, **changes: Any) -> bytes:
    """What the client of a method that never trained sends in round 1.

    Args:
        forget: the server's tensors are others by then.
        changes: of its order.
    """
    method, run = bench.untrained(), bench.everyone
    client = bench.data.client(CLIENT)
    order = {"labels": bench.data.labels(client), "epochs": EPOCHS, "steps": bench.data.num_steps(client, EPOCHS), **changes}
    if forget:
        method.server = {name: torch.ones_like(tensor) for name, tensor in method.server.items()}
    engine = SequentialEngine(run.trainer.fabric, method, bench.data)
    return engine.train_client(Order(client, run.log.broadcasts[1, CLIENT], **order)).upload


def clients_read_messages_only(bench: Bench) -> None:
    """What a client sends follows from its message, not from the server."""
    require(_upload(bench) == bench.everyone.log.uploads[1, CLIENT], "the same message, in another process, gives another upload")
    require(_upload(bench, forget=True) == _upload(bench), "it reads what the server holds and does not send")


def orders_are_obeyed(bench: Bench) -> None:
    """Labels and the number of steps are the order's."""
    labels = bench.data.labels(bench.data.client(CLIENT))
    changed = (labels + 1) % bench.data.num_classes
    require(_upload(bench, labels=changed) != _upload(bench), "other labels change nothing: noise in them would never arrive")
    require(_upload(bench, steps=1) != _upload(bench), "fewer steps change nothing: a client that is slow would do all its work")


@torch.no_grad()
def deployed_from_the_server(bench: Bench) -> None:
    """The evaluated network follows from the server's state, and the client's own."""
    run = bench.everyone
    client = bench.data.client(CLIENT, run.log.kept[CLIENT])
    inputs, _ = next(iter(bench.data.test_batches()))
    other = bench.untrained(run.method.round, run.method.server)
    answers = [method.deploy(client).eval()(inputs).clone() for method in (run.method, other)]
    require(torch.equal(*answers), "one that never trained, with the same server, deploys another network")
