"""What a node measures with its own clients' examples: sums of metrics, the only thing of it that
leaves."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from fl_lightning.deploy.node.states import StateFolder
from fl_lightning.deploy.protocol.batch_states import LOGS, NAMED, sent_of_logged
from fl_lightning.deploy.protocol.messages import Message
from fl_lightning.errors import InputError, LostStateError
from fl_lightning.evaluation import (
    MAX_PARTS,
    States,
    Tally,
    tally_test_set,
    tally_validation,
)
from fl_lightning.federation import Federation
from fl_lightning.methods import Method
from fl_lightning.metrics.states import values_of_clients

log = logging.getLogger("fl_lightning")


def _tally_clients(
    fed: Federation, states: States, holders: Mapping[int, int], clients: Sequence[int]
) -> Tally:
    """Return what validation gives, and of metrics that the user has named the value of each
    client, of weight 0 where it has none: its examples are all here, and what such a metric keeps
    of them stays."""
    tally = tally_validation(fed.fabric, fed.method, fed.data, states, holders, clients)
    named = {} if tally.named is None else tally.named.tensors
    values = values_of_clients(fed.data.task.named, named)
    for one in fed.data.task.named:
        for id in clients:
            value = values.get(one.name, {}).get(id)
            row = [id, 0.0, 0.0] if value is None else [id, value, 1.0]
            tally.sums[f"{id * MAX_PARTS}/{one.name}"] = torch.tensor([row], dtype=torch.float64)
    return tally


def evaluate_here(
    fed: Federation, message: Message, states: StateFolder, here: Collection[int]
) -> tuple[dict[str, Any], list[bytes]]:
    """Evaluate the clients of this node, and return the entries and parts of the answer.

    Args:
        here: ids of the node's clients.

    Raises:
        InputError: the server's state is of another method.
    """
    method, data = fed.method, fed.data
    run, own, left_out = str(message.header["run"]), {}, []
    for id, since in sorted(
        (int(id), int(since)) for id, since in message.header["clients"].items()
    ):
        why = f"what it kept after round {since} is not here"
        try:
            state = {} if not method.personalised else states.load(run, id, since)
        except LostStateError as error:
            state, why = None, str(error)
        state = state if id in here else None
        if state is None:
            left_out.append(id)
            log.error("client %d cannot be evaluated: %s", id, why)
        else:
            own[id] = state
    server = load(message.parts[0])
    # rounds may have given it entries that nobody has at the start
    if missing := sorted(method.server.keys() - server.keys()):
        raise InputError(
            "the server's state",
            f"it has no {', '.join(missing)}",
            "use one version on both sides",
        )
    before, method.round = method.server, int(message.header["round"])
    holders = {id: 0 if id in own else -1 for id in range(data.num_clients)}
    try:
        method.server = server
        mine = [id for id in data.validating.tolist() if id in own]
        splits, found = message.header["splits"], dict[str, dict[str, Tensor]]()
        if "test" in splits:
            tally = tally_test_set(fed.fabric, method, data, own, holders)
            found |= {"test": tally.sums, **_logged(tally, method)}
            if tally.named is not None:
                found[NAMED] = {key: value.clone() for key, value in tally.named.tensors.items()}
        if "validation" in splits:
            tally = _tally_clients(fed, own, holders, mine)
            found |= {"validation": tally.sums, **_logged(tally, method)}
        parts = [save(found[split]) for split in splits]
    finally:
        method.server = before
    return {"kind": "evaluated", "left_out": left_out}, parts


def _logged(tally: Tally, method: Method) -> dict[str, dict[str, Tensor]]:
    """Return the part of the answer with what the step of a LightningModule has logged."""
    if (logs := tally.logs) is None:
        return {}
    return {LOGS[logs.split]: sent_of_logged(logs.states.tensors, method.network)}
