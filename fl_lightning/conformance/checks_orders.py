"""Checks of the client's side: it follows its task and uses nothing but its message and its own
examples."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fl_lightning.conformance.bench import Bench, Value, prepare_data
from fl_lightning.conformance.federations import other_labels
from fl_lightning.conformance.verdicts import NotApplicable, expect, not_finite
from fl_lightning.engines import ClientResult, SequentialEngine
from fl_lightning.engines.attributes import is_stackable
from fl_lightning.engines.stacked.batched import BatchedEngine
from fl_lightning.wire import Codes, Payload

CLIENT = 4
ROUNDS = (1, 2)  # nobody keeps anything before the second
STACK_NOISE = 1e-3  # of the largest entry of a tensor, and of the codes of an entry


def _sent_and_kept(bench: Bench, **changes: Any) -> tuple[bytes, dict[str, bytes]]:
    result = bench.alone(bench.everyone, 1, CLIENT, **changes)
    return result.upload, {name: tensor.numpy().tobytes() for name, tensor in result.state.items()}


def clients_read_messages_only(bench: Bench) -> None:
    """An upload depends on the message to the client and on what it keeps, not on the server."""
    run = bench.everyone
    for round in ROUNDS:
        upload = bench.alone(run, round, CLIENT).upload
        expect(
            upload == run.log.uploads[round, CLIENT],
            f"in round {round} a new instance sends another upload after the same message",
            cause="an attribute that is not in client.state, or what another client has left",
        )
        expect(
            upload == bench.alone(run, round, CLIENT, forget=True).upload,
            f"the upload of round {round} depends on server tensors that clients do not receive",
        )


def stacked_as_alone(bench: Bench) -> str:
    """Clients trained as one stack send and keep what each does alone, up to rounding."""
    run, data = bench.everyone, bench.data
    if not is_stackable(bench.untrained()):
        raise NotApplicable("it does not declare that clients can be trained as one stack")
    for round in ROUNDS:
        fabric, server = run.trainer.fabric, run.log.servers[round - 1]
        alone = SequentialEngine(fabric, bench.untrained(round, server), data)
        stack = BatchedEngine(fabric, bench.untrained(round, server), data)
        expected, found = (
            list(engine.train([run.task(round, id, data) for id in range(data.num_clients)]))
            for engine in (alone, stack)
        )
        if stack.reason:
            return f"one by one here: {stack.reason}"
        for mine, other in zip(expected, found, strict=True):
            _expect_alike(mine, other)
    return ""


def _expect_alike(mine: ClientResult, other: ClientResult) -> None:
    sent = [dict(Payload.from_bytes(result.upload)) for result in (mine, other)]
    for (a, b), verb in ((sent, "sends"), ((mine.state, other.state), "keeps")):
        wrong = [name for name in a if name not in b or not _alike(a[name], b[name])]
        what = ", ".join(wrong) or "set of entries"
        expect(
            not wrong and a.keys() == b.keys(),
            f"in a stack client {mine.client.id} {verb} another {what}; take away stackable, or let its "
            "steps read and set tensors of the module alone",
        )


def _alike(value: Value, other: Value) -> bool:
    """Whether two entries are equal but for how sums are rounded."""
    if isinstance(value, Codes) or isinstance(other, Codes):
        if not (isinstance(value, Codes) and isinstance(other, Codes)):
            return False
        if value.bits != other.bits or value.values.shape != other.values.shape:
            return False
        differ = value.values != other.values
        return not differ.numel() or float(differ.double().mean()) <= STACK_NOISE
    if value.shape != other.shape or value.dtype != other.dtype:
        return False
    return torch.allclose(
        value.double(),
        other.double(),
        rtol=0.0,
        atol=STACK_NOISE * float(value.abs().max()) if value.numel() else 0.0,
        equal_nan=True,
    )


def orders_are_obeyed(bench: Bench) -> None:
    """A client trains with the labels and the number of steps of its task."""
    labels = bench.data.labels(bench.data.client(CLIENT))
    changed = other_labels(labels, bench.data.num_classes)
    expect(
        _sent_and_kept(bench, labels=changed) != _sent_and_kept(bench),
        "what the client sends and keeps ignores the labels of the task, so label noise would have no effect",
    )
    expect(
        _sent_and_kept(bench, steps=1) != _sent_and_kept(bench),
        "what the client sends and keeps ignores the number of steps of the task, so stragglers would make "
        "all steps",
    )


def only_its_own_examples(bench: Bench) -> None:
    """What a client sends and keeps depends on its own training examples and on no others."""
    federation = bench.subject.federation
    data: Any = prepare_data(federation.data())
    own = np.union1d(data.client(CLIENT).train, data.public)
    others = torch.from_numpy(np.setdiff1d(np.arange(len(data.train_target)), own))
    federation.overwrite(data, others)
    expect(
        _sent_and_kept(bench, data=data) == _sent_and_kept(bench),
        f"what client {CLIENT} sends or keeps changes with examples that are not its own to train on",
    )


def deployed_from_the_server(bench: Bench) -> None:
    """The evaluated network depends only on the state of server and client."""
    run = bench.everyone
    client = bench.data.client(CLIENT, run.log.kept[CLIENT])
    inputs, _ = next(iter(bench.data.test_batches()))
    other = bench.untrained(run.method.round, run.method.server)
    with torch.no_grad():
        network = run.method.deploy(client).eval()
        answers = [network(inputs).clone(), other.deploy(client).eval()(inputs).clone()]
    if not all(answer.isfinite().all() for answer in answers):
        where = not_finite(server=run.method.server, network=network.state_dict())
        expect(
            False,
            f"the deployed network answers with NaN or infinity: {where or 'all its tensors are finite'}",
            "finite answers",
            "statistics of BatchNorm or weights that the server moved beyond what clients sent",
        )
    expect(
        torch.equal(*answers), "a new instance with the same server state deploys another network"
    )
