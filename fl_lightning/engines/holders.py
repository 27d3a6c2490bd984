"""Where the states of clients are when several processes train them.

A state stays on the rank that trained the client last. Rank 0 has a copy of all of them, since it
writes the checkpoints: a run that fails leaves one of its last complete round, when the other ranks
may be dead already. States go from one rank to one other, and not to all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from torch import Tensor

from fl_lightning.distributed.collectives import rank, send_parts, world_size
from fl_lightning.engines.base import ClientTask

State = dict[str, Tensor]
Holders = dict[int, int]
"""The rank that trained a client last, by the client's id, of all clients that keep something.
Every rank has the same; with one process it is empty."""


def spread_states(states: dict[int, State], holders: Holders, shared: Collection[int] = ()) -> None:
    """Deal the states of a checkpoint, which every rank has read, to the ranks.

    Ranks other than 0 drop what they do not hold.

    Args:
        states: what clients keep, by id.
        holders: filled in.
        shared: ids of clients whose state every rank keeps.
    """
    if world_size() == 1:
        return
    for position, id in enumerate(sorted({*states} - {*shared})):
        holders[id] = position % world_size()
        if rank() not in (0, holders[id]):
            del states[id]


def preferred_rank(tasks: Sequence[ClientTask], holders: Holders) -> int | None:
    """Return the rank that holds most states of clients that are trained together; None if none
    does."""
    found = Counter(holders[task.client.id] for task in tasks if task.client.id in holders)
    return min(found, key=lambda rank: (-found[rank], rank)) if found else None


def fetch_states(
    tasks: Sequence[ClientTask], trainers: Mapping[int, int], holders: Holders
) -> None:
    """Send each state of the cohort that is not on the rank that trains the client next to that
    rank.

    Args:
        tasks: the round's tasks; the clients of this rank get their states.
        trainers: the rank that trains the client, by position of its task.
        holders: which rank holds which client's state.

    Raises:
        RankLost: a rank died or did not answer within ``trainer.rank_timeout``.
    """
    moves = {
        position: trainer
        for position, trainer in trainers.items()
        if trainer not in (0, holders.get(tasks[position].client.id, trainer))
    }
    if not moves:
        return
    sent: State = {}
    to: dict[str, int] = {}
    for position, trainer in moves.items():
        client = tasks[position].client
        if holders[client.id] == rank():
            parts = {f"{position}/{name}": tensor for name, tensor in client.state.items()}
            sent |= parts
            to |= dict.fromkeys(parts, trainer)
    for key, tensor in send_parts(sent, to).items():
        where, name = key.split("/", 1)
        tasks[int(where)].client.state[name] = tensor


def collect_states(own: Mapping[int, State], trainers: Sequence[int | None]) -> dict[int, State]:
    """Return this rank's states, and on rank 0 those of all ranks, by position of the task.

    Args:
        own: what the clients of this rank keep, by position.
        trainers: for each position the rank that has a state; None where the client keeps nothing.

    Raises:
        RankLost: a rank died or did not answer within ``trainer.rank_timeout``.
    """
    states = dict(own)
    if any(trainers):
        sent = {
            f"{position}/{name}": tensor
            for position, state in own.items()
            for name, tensor in state.items()
            if rank() != 0
        }
        for key, tensor in send_parts(sent, dict.fromkeys(sent, 0)).items():
            where, name = key.split("/", 1)
            states.setdefault(int(where), {})[name] = tensor
    return states
