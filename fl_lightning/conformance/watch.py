"""Callbacks by which the checks observe a run or change its cohorts."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fl_lightning.client import Assignment, Client
from fl_lightning.engines.attributes import attributes_of
from fl_lightning.hooks import Context, Meter, RoundRecord, Stressor
from fl_lightning.support.appearance import appearance
from fl_lightning.wire import Payload


def client_without_data(id: int) -> Client:
    """Return a client without examples: a server knows nothing of a client but its id."""
    return Client(id=id, train=np.empty(0, np.int64), val=np.empty(0, np.int64))


class RunRecorder(Stressor, Meter):
    """Records what happens in a run.

    It holds the cohorts, the losses, broadcasts and uploads as bytes by (round, client), the
    server's tensors at the start of each round, and the tensors that a client kept after each.
    """

    def __init__(self) -> None:
        self.cohorts: list[list[int]] = []
        self.broadcasts: dict[tuple[int, int], bytes] = {}
        self.uploads: dict[tuple[int, int], bytes] = {}
        self.servers: list[dict[str, Tensor]] = []
        self.states: dict[tuple[int, int], dict[str, Tensor]] = {}
        self.losses: list[float] = []

    def on_round_start(self, round: int, context: Context) -> None:
        self.servers.append(copy_tensors(context.method.server))

    def on_cohort(self, cohort: list[Assignment], round: int, context: Context) -> None:
        self.cohorts.append([assignment.client.id for assignment in cohort if assignment.trains])
        for client in (assignment.client for assignment in cohort if assignment.trains):
            self.broadcasts[round, client.id] = context.method.broadcast(client).to_bytes()

    def on_client_end(self, client: Client, round: int, context: Context) -> None:
        self.states[round, client.id] = copy_tensors(client.state)

    def change_upload(
        self, upload: Payload, *, client: Client, round: int, context: Context
    ) -> Payload:
        self.uploads[round, client.id] = upload.to_bytes()
        return upload

    def on_round_end(self, record: RoundRecord, context: Context) -> None:
        self.losses.append(record.metrics.get("train/loss", 0.0))

    @property
    def kept(self) -> dict[int, dict[str, Tensor]]:
        """The tensors that each client kept last, by client id."""
        return self.kept_before(len(self.servers) + 1)

    def kept_before(self, round: int) -> dict[int, dict[str, Tensor]]:
        """Return the tensors that each client had kept when a round began, by client id."""
        return {client: state for (r, client), state in self.states.items() if r < round}

    def uploads_of(self, round: int) -> dict[int, Payload]:
        """Return the decoded uploads of one round by client id."""
        return {
            client: Payload.from_bytes(data)
            for (r, client), data in self.uploads.items()
            if r == round
        }


class OnlyClients(Stressor):
    """Drops all clients but these before training, in one ``round``, or in every round if it is
    None."""

    def __init__(self, *clients: int, round: int | None = None) -> None:
        self.clients, self.round = clients, round

    def change_cohort(
        self, cohort: list[Assignment], *, round: int, context: Context
    ) -> list[Assignment]:
        if self.round not in (None, round):
            return cohort
        return [
            a if a.client.id in self.clients else replace(a, trains=False, returns=False)
            for a in cohort
        ]


class SlowClients(Stressor):
    """Lets these clients do only the share ``work`` of their local steps."""

    def __init__(self, clients: Collection[int], work: float) -> None:
        self.clients, self.work = clients, work

    def change_cohort(
        self, cohort: list[Assignment], *, round: int, context: Context
    ) -> list[Assignment]:
        return [replace(a, work=self.work) if a.client.id in self.clients else a for a in cohort]


class AnswerRecorder(Meter):
    """Records the answer of the deployed model on the quadratic after each round, float32
    ``[6]``."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    @torch.no_grad()
    def on_round_end(self, record: RoundRecord, context: Context) -> None:
        self.seen.append(context.method.deploy(None).eval()(torch.ones(1, 1))[0].clone())


class AttributeRecorder(Meter):
    """Finds the attributes beside tensors, of the method and its modules, that a run changes; their
    names are in ``changed``."""

    def __init__(self) -> None:
        self.first: dict[str, str] = {}
        self.changed: set[str] = set()

    def on_round_start(self, round: int, context: Context) -> None:
        self.first = self.first or self._seen(context)

    def on_round_end(self, record: RoundRecord, context: Context) -> None:
        now = self._seen(context).items()
        self.changed |= {name for name, value in now if value != self.first.get(name)}

    def _seen(self, context: Context) -> dict[str, str]:
        found = attributes_of(context.method)
        return {name: appearance(value) for name, value in found.items()}


class StateChanger(Stressor):
    """Changes one tensor that a client kept, before each round from ``round`` on."""

    def __init__(self, client: int, name: str, round: int) -> None:
        self.client, self.name, self.round = client, name, round

    def change_cohort(
        self, cohort: list[Assignment], *, round: int, context: Context
    ) -> list[Assignment]:
        return [
            replace(a, client=with_changed_state(a.client, self.name))
            if self._is_target(a, round)
            else a
            for a in cohort
        ]

    def _is_target(self, assignment: Assignment, round: int) -> bool:
        return (
            round >= self.round
            and assignment.client.id == self.client
            and self.name in assignment.client.state
        )


def with_changed_state(client: Client, name: str) -> Client:
    """Return the client with other values in one tensor of its state, of other length and
    direction."""
    value = client.state[name]
    factors = torch.linspace(0.25, 0.75, value.numel()).view(value.shape).to(value)
    changed = torch.where(value == 0, 0.01 * factors, value * factors)
    return replace(client, state={**client.state, name: changed})


class InPlaceDetector(Meter):
    """Finds kept tensors that are written to in place.

    It holds every tensor that the server or a client kept, with a copy, and lists the names of
    those whose content changes in ``written``.
    """

    def __init__(self) -> None:
        self.held: list[tuple[str, Tensor, Tensor]] = []
        self.written: list[str] = []

    def on_round_start(self, round: int, context: Context) -> None:
        self._hold("server", context.method.server)

    def on_client_end(self, client: Client, round: int, context: Context) -> None:
        self._compare(round)
        self._hold(f"client {client.id}'s state", client.state)

    def on_round_end(self, record: RoundRecord, context: Context) -> None:
        self._compare(record.round)

    def _hold(self, owner: str, tensors: dict[str, Tensor]) -> None:
        self.held += [
            (f"{owner}[{name!r}]", tensor, tensor.clone()) for name, tensor in tensors.items()
        ]

    def _compare(self, round: int) -> None:
        changed = [name for name, tensor, copy in self.held if not equal_with_nan(tensor, copy)]
        self.written += [f"{name} in round {round}" for name in changed]
        self.held = [held for held in self.held if held[0] not in changed]


def copy_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return clones of the tensors by name."""
    return {name: tensor.clone() for name, tensor in tensors.items()}


def equal_with_nan(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same shape and values, where NaN equals NaN."""
    if a.is_floating_point():
        return a.shape == b.shape and bool(torch.allclose(a, b, rtol=0, atol=0, equal_nan=True))
    return torch.equal(a, b)
