"""Clients evaluate models on their nodes: one message a node, and back come sums of metrics. They
do so where their models are their own, and where nobody else has their validation examples.

The server's state travels as its checkpoint has it, since a model that is deployed may be made of
more than a broadcast holds. Outputs, targets and what clients keep stay where they are.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from fl_lightning.compatibility import Run
from fl_lightning.deploy.protocol.answers import METRIC_NAME, left_out_of, reading, reason_of
from fl_lightning.deploy.protocol.batch_states import LOGS, parts_asked, read_states
from fl_lightning.deploy.protocol.messages import MAX_NAME, Message, MessageError, printable
from fl_lightning.deploy.server.roster import Roster
from fl_lightning.engines.base import ClientSums
from fl_lightning.evaluation import MAX_PARTS, on_test_set, validate
from fl_lightning.federation import Federation
from fl_lightning.tasks import Task

log = logging.getLogger("fl_lightning")
KEY = re.compile(r"(\d{1,18})/.+")
SPLITS = {"test": (2,), "validation": (-1, 3)}
"""Form of the sums of each split; -1: any number."""


def is_measured_on_nodes(fed: Federation) -> bool:
    """Return whether models are evaluated where the clients are."""
    return Run.of(fed, deployed=True).is_measured_on_nodes


def ask_nodes(
    roster: Roster, about: Mapping[str, Any], since: Mapping[int, int], seconds: float
) -> ClientSums:
    """Have all nodes evaluate their clients; one that does not answer is left out, and the log says
    so.

    Args:
        about: entries of the message: run, configuration and round.
        since: the round whose kept state a client's model is made of; 0 where it is not there.
        seconds: that answers are waited for.
    """
    fed = roster.fed
    splits = ["validation"] if fed.data.apart else [*SPLITS]  # the test set is with the server then
    splits += parts_asked(fed, splits)
    asked: dict[str, dict[str, int]] = {}
    for id, node in sorted(roster.node_of.items()):
        asked.setdefault(node, {})[str(id)] = since.get(id, 0)
    state = save(
        {name: tensor.detach().cpu().contiguous() for name, tensor in fed.method.server.items()}
    )
    about = {"kind": "evaluate", **about, "splits": splits}
    orders = {
        node: Message({**about, "clients": clients}, (state,)).to_bytes()
        for node, clients in asked.items()
    }
    answered: dict[str, tuple[set[int], dict[str, dict[str, Tensor]]]] = {}
    for node, answer in roster.exchange(orders, seconds):
        reason = reason_of(answer.header)
        if answer.kind == "evaluated":
            mine = {int(id) for id in asked[node]}
            try:
                mine -= left_out_of(answer)
                with reading():
                    parts = zip(splits, answer.parts, strict=True)
                    sums = {
                        split: read_sums(part, split, mine)
                        if split in SPLITS
                        else read_states(fed, part, split, mine)
                        for split, part in parts
                    }
                    try_sums(fed, sums)
            except MessageError as error:
                reason = str(error)
            else:
                answered[node] = mine, sums
                continue
        log.warning("node %s did not evaluate its clients: %s", roster.name(node), reason)
    silent = {id for clients in asked.values() for id in map(int, clients)}
    found: dict[str, dict[str, Tensor]] = {split: {} for split in {*SPLITS, *splits}}
    for node in alike(answered, roster):
        mine, sums = answered[node]
        for split, some in sums.items():
            found[split] |= some
        silent -= mine
    silent |= {int(id) for id in fed.data.active} - roster.node_of.keys()
    if silent:
        log.warning(
            "round %s: clients %s are left out of %s: they did not answer",
            about["round"],
            ", ".join(map(str, sorted(silent)[:10])) + (" ..." if len(silent) > 10 else ""),
            "val/*" if fed.data.apart else "val/* and test/*",
        )
    if fed.data.apart:
        return ClientSums(validation=found["validation"], val_logs=found.get(LOGS["val"], {}))
    if not found["test"]:
        log.warning(
            "round %s: no node answered: the model of a newcomer is evaluated", about["round"]
        )
        return ClientSums()
    return ClientSums(**found)


def try_sums(fed: Federation, sums: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Make metrics of what one node has sent, by itself.

    Raises:
        Exception: whatever comes of sums that are not those of the run's metrics.
    """
    subject, elsewhere = (fed.fabric, fed.method, fed.data), ClientSums(**sums)
    require_possible(fed.data.task, sums)
    if elsewhere.test:
        on_test_set(*subject, answers=False, elsewhere=elsewhere)
    elif elsewhere.named or elsewhere.test_logs:
        raise MessageError("it has states of metrics without the sums of their batches")
    validate(*subject, elsewhere=elsewhere)


def require_possible(task: Task, sums: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Refuse sums that no examples have.

    Raises:
        MessageError: a weight is below 0 or not finite, or a share of it is not within 0 and 1.
    """
    for split in SPLITS:
        for key, value in sums.get(split, {}).items():
            total, weight = value[..., -2], value[..., -1]
            right = (weight >= 0) & weight.isfinite()
            if key.partition("/")[2] in task.shares:
                right &= (total >= 0) & (total <= weight * (1 + 1e-9))
            if not bool(right.all()):
                raise MessageError(f"its sums of {printable(key)} are those of no examples")


def alike(
    answered: Mapping[str, tuple[set[int], Mapping[str, Mapping[str, Tensor]]]], roster: Roster
) -> list[str]:
    """Return the nodes whose sums are of the metrics that most clients have, of equally many those
    of the client with the smallest id; the log names the others.

    Args:
        answered: clients and sums of each node.
    """
    names = {
        node: {
            split: frozenset(key.partition("/")[2] for key in some) for split, some in sums.items()
        }
        for node, (_, sums) in answered.items()
    }
    good = sorted(answered, key=lambda node: min(answered[node][0], default=-1))
    for split in SPLITS:
        counts: Counter[frozenset[str]] = Counter()
        for node in good:
            if names[node].get(split):
                counts[names[node][split]] += len(answered[node][0])
        most = counts.most_common(1)[0][0] if counts else frozenset()
        for node in [
            node for node in good if names[node].get(split) not in (None, frozenset(), most)
        ]:
            good.remove(node)
            log.warning(
                "node %s did not evaluate its clients: its metrics are others", roster.name(node)
            )
    return good


def read_sums(part: bytes, split: str, clients: Collection[int]) -> dict[str, Tensor]:
    """Return the sums in a node's answer.

    Args:
        split: one of ``SPLITS``.
        clients: those that the node was asked for.

    Raises:
        MessageError: they have another form, or are of other clients.
    """
    with reading():
        sums = load(part)
    for key, value in sums.items():
        named = KEY.fullmatch(key)
        form = SPLITS[split]
        fits = (
            value.dtype == torch.float64 and value.ndim == len(form) and value.shape[-1] == form[-1]
        )
        own = named is not None and int(named[1]) // MAX_PARTS in clients
        own = own and len(key) <= MAX_NAME and METRIC_NAME.fullmatch(key) is not None
        rows = fits and (split == "test" or set(value[:, 0].tolist()) <= set(clients))
        if not (fits and own and rows):
            shape = list(value.shape)
            raise MessageError(f"its answer has {printable(key)} {shape}, which was not asked for")
    return sums
