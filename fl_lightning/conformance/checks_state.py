"""Checks of state that outlives a round, on a client, on the server, or in the module that clients
share."""

from __future__ import annotations

import torch
from torch import Tensor

from fl_lightning.client import Client
from fl_lightning.conformance.bench import Bench, FinishedRun, expect_same_tensors
from fl_lightning.conformance.declarations import declared
from fl_lightning.conformance.verdicts import NotApplicable, expect
from fl_lightning.conformance.watch import (
    OnlyClients,
    StateChanger,
    copy_tensors,
    with_changed_state,
)
from fl_lightning.engines import ClientTask
from fl_lightning.engines.attributes import has_same_start, is_plain
from fl_lightning.engines.base import start_client
from fl_lightning.models.tensors import tensors_of

CLIENT, OTHER = 4, 1


def no_stale_state(bench: Bench) -> None:
    """A client's result does not depend on which clients trained before it."""
    alone = bench.run(OnlyClients(CLIENT), max_rounds=1)
    first = alone.log.uploads[1, CLIENT], alone.log.kept[CLIENT]
    _expect_same(first, bench.run(max_rounds=1), 1, "when others trained before it")
    # in the second round some have kept something that a newcomer does not have
    others = {*range(bench.data.num_clients)} - {CLIENT}
    after = bench.run(OnlyClients(*others, round=1))
    newcomer = bench.alone(after, 2, CLIENT)
    when = "where it is new, when others trained before it that had kept something"
    _expect_same((newcomer.upload, newcomer.state), after, 2, when)


def _expect_same(
    alone: tuple[bytes, dict[str, Tensor]], after: FinishedRun, round: int, when: str
) -> None:
    sends = alone[0] == after.log.uploads[round, CLIENT]
    expect(sends, f"the upload of client {CLIENT} changes {when}")
    found, what = after.log.states[round, CLIENT], f"the state of client {CLIENT}"
    expect_same_tensors(alone[1], found, what, when)


def kept_state_is_used(bench: Bench) -> None:
    """Each tensor that a client keeps changes an upload of one of its next two rounds or its
    model, or is declared as measured."""
    run = bench.everyone
    kept = [name for name, tensor in run.log.kept[CLIENT].items() if tensor.is_floating_point()]
    if not kept:
        raise NotApplicable("clients keep nothing")
    for name in kept:
        found = bench.run(StateChanger(CLIENT, name, round=2), max_rounds=3).log.uploads
        used = any(found[round, CLIENT] != run.log.uploads[round, CLIENT] for round in (2, 3))
        used = used or _deployed_from(run, name)
        if name in declared(run.method).measured:
            expect(not used, f"{name!r} is declared as measured, but the method reads it")
        else:
            expect(used, f"client {CLIENT} keeps {name!r}, but other values of it change nothing")


def same_start_as_declared(bench: Bench) -> None:
    """Where ``same_start`` is declared, ``receive`` makes the same of a message whoever gets it."""
    if not has_same_start(bench.subject.make()):
        raise NotApplicable("it does not declare same_start")
    for round in (1, 2):
        (tensors, plain), (other_tensors, other_plain) = (
            _started(bench, round, bench.everyone.task(round, id, bench.data))
            for id in (CLIENT, OTHER)
        )
        what = "what a client starts from"
        expect_same_tensors(tensors, other_tensors, what, "when another one receives it")
        expect(
            plain == other_plain,
            f"receive sets {plain} for one client and {other_plain} for another",
        )


def _started(
    bench: Bench, round: int, task: ClientTask
) -> tuple[dict[str, Tensor], dict[str, object]]:
    """Return the tensors and the plain values of a new method that a client has started."""
    method = bench.untrained(round, bench.everyone.log.servers[round - 1])
    start_client(method, task)
    plain = {name: value for name, value in vars(method).items() if is_plain(value)}
    return copy_tensors(tensors_of(method)), plain


def _deployed_from(run: FinishedRun, name: str) -> bool:
    """Return whether the personalised model of the client depends on this kept tensor."""
    client = run.trainer.data.client(CLIENT, run.log.kept[CLIENT])
    return run.method.personalised and not torch.equal(
        _answers(run, client), _answers(run, with_changed_state(client, name))
    )


@torch.no_grad()
def _answers(run: FinishedRun, client: Client) -> Tensor:
    inputs, _ = next(iter(run.trainer.data.test_batches()))
    return run.method.deploy(client).eval()(inputs).clone()


def nothing_in_place(bench: Bench) -> None:
    """Kept tensors are replaced, not written to: checkpoints share them."""
    bench.everyone  # noqa: B018
    written = bench.in_place_detector.written
    expect(
        not written,
        f"written to in place: {', '.join(written[:3])}; assign a new tensor, such as a clone",
    )
