"""Checks of what stays: on a client between its rounds, on the server between all, and in the one module that
serves every client."""

from __future__ import annotations

import torch
from torch import Tensor

from fl_lightning.client import Client
from fl_lightning.conformance.bench import Bench, Run, same_tensors
from fl_lightning.conformance.verdicts import NotApplicable, require
from fl_lightning.conformance.watch import Halves, Only, halved

CLIENT = 4


def no_stale_state(bench: Bench) -> None:
    """Who trained before a client does not matter to it."""
    alone = bench.images(Only(CLIENT), max_rounds=1)
    after = bench.images(max_rounds=1)
    sends = alone.log.uploads[1, CLIENT] == after.log.uploads[1, CLIENT]
    require(sends, f"client {CLIENT} sends something else when others trained before it")
    same_tensors(
        alone.log.kept[CLIENT],
        after.log.kept[CLIENT],
        f"what client {CLIENT} keeps",
        "when others trained before it",
    )


def kept_state_is_used(bench: Bench) -> None:
    """What a client keeps has a part in its next round or model."""
    run = bench.everyone
    kept = [name for name, tensor in run.log.kept[CLIENT].items() if tensor.is_floating_point()]
    if not kept:
        raise NotApplicable("clients keep nothing")
    for name in kept:
        used = (
            bench.images(Halves(CLIENT, name, round=2)).log.uploads[2, CLIENT] != run.log.uploads[2, CLIENT]
        )
        require(
            used or _deployed_from(run, name), f"client {CLIENT} keeps {name!r}, and half of it does as well"
        )


def _deployed_from(run: Run, name: str) -> bool:
    """Whether the client's own model depends on this tensor that only the client has."""
    client = run.trainer.data.client(CLIENT, run.log.kept[CLIENT])
    return run.method.personalised and not torch.equal(
        _answers(run, client), _answers(run, halved(client, name))
    )


@torch.no_grad()
def _answers(run: Run, client: Client) -> Tensor:
    inputs, _ = next(iter(run.trainer.data.test_batches()))
    return run.method.deploy(client).eval()(inputs).clone()


def nothing_in_place(bench: Bench) -> None:
    """Kept tensors are replaced: checkpoints hold the old ones."""
    bench.everyone  # noqa: B018
    written = bench.intact.written
    require(not written, f"{', '.join(written[:3])}: written into; assign a new tensor, such as a clone")
