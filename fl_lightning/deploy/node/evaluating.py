"""What a node measures with its own clients' examples: sums of metrics, the only thing of it that
leaves."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
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
    logs_for,
    states_for,
    sums_of_validation,
    sums_on_test_set,
    values_of_clients,
)
from fl_lightning.federation import Federation
from fl_lightning.methods.module_steps import STEPS, ModuleLogs

log = logging.getLogger("fl_lightning")


def _sums_of_clients(
    fed: Federation,
    states: States,
    holders: Mapping[int, int],
    clients: Sequence[int],
    logs: ModuleLogs | None = None,
) -> dict[str, Tensor]:
    """Return the sums of validation, and of metrics that the user has named the value of each
    client, of weight 0 where it has none: its examples are all here, and what such a metric keeps
    of them stays."""
    named, subject = states_for(fed.data), (fed.fabric, fed.method, fed.data)
    sums = sums_of_validation(*subject, states, holders, clients=clients, named=named, logs=logs)
    values = {} if named is None else values_of_clients(fed.data.task, named.tensors)
    for one in fed.data.task.named:
        for id in clients:
            value = values.get(one.name, {}).get(id)
            row = [id, 0.0, 0.0] if value is None else [id, value, 1.0]
            sums[f"{id * MAX_PARTS}/{one.name}"] = torch.tensor([row], dtype=torch.float64)
    return sums


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
        subject = fed.fabric, method, data, own, holders
        mine = [id for id in data.validating.tolist() if id in own]
        named, logs = states_for(data), {side: logs_for(method, side, data.seed) for side in STEPS}
        # sums come first: they leave the states
        makers: dict[str, Callable[[], dict[str, Tensor]]] = {
            "test": lambda: sums_on_test_set(*subject, named=named, logs=logs["test"]),
            "validation": lambda: _sums_of_clients(fed, own, holders, mine, logs["val"]),
            NAMED: lambda: (
                {}
                if named is None
                else {key: value.clone() for key, value in named.tensors.items()}
            ),
        }
        for side, part in LOGS.items():
            if (logged_here := logs[side]) is not None:
                makers[part] = partial(sent_of_logged, logged_here.states.tensors, method.network)
        parts = [save(makers[split]()) for split in message.header["splits"]]
    finally:
        method.server = before
    return {"kind": "evaluated", "left_out": left_out}, parts
