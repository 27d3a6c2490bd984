"""Checks of the client's side: it follows its task and uses nothing but its message and its own
examples."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fl_lightning.conformance.bench import Bench, Value, prepare_data
from fl_lightning.conformance.federations import other_labels
from fl_lightning.conformance.verdicts import NotApplicable, expect, not_finite
from fl_lightning.data import FederatedData
from fl_lightning.engines import ClientResult, ClientTask, SequentialEngine
from fl_lightning.engines.attributes import is_stackable
from fl_lightning.engines.stacked.batched import BatchedEngine
from fl_lightning.wire import Codes, Payload

CLIENT, EPOCHS = 4, 2
STACK_NOISE = 1e-3  # of the largest entry of a tensor, and of the codes of an entry


def _result(
    bench: Bench, *, data: FederatedData | None = None, forget: bool = False, **changes: Any
) -> ClientResult:
    """Return the result of one client in round 1, from a method that has not trained before.

    Args:
        bench: holds the broadcast that the client receives.
        data: data set in place of the bench's.
        forget: whether to overwrite the server's tensors before the client trains.
        changes: fields of the client's task that differ from the regular ones.
    """
    method, run, data = bench.untrained(), bench.everyone, data or bench.data
    if forget:
        method.server = {name: torch.ones_like(tensor) for name, tensor in method.server.items()}
    engine = SequentialEngine(run.trainer.fabric, method, data)
    return engine.train_client(_task(bench, data, CLIENT, **changes))


def _task(bench: Bench, data: FederatedData, id: int, **changes: Any) -> ClientTask:
    """Return what a client does in round 1, with some fields changed."""
    client = data.client(id)
    task = {
        "labels": data.labels(client),
        "epochs": EPOCHS,
        "steps": data.num_steps(client, EPOCHS),
        **changes,
    }
    return ClientTask(client, 1, bench.everyone.log.broadcasts[1, id], **task)


def _upload(bench: Bench, **changes: Any) -> bytes:
    return _result(bench, **changes).upload


def _sent_and_kept(bench: Bench, **changes: Any) -> tuple[bytes, dict[str, bytes]]:
    result = _result(bench, **changes)
    return result.upload, {name: tensor.numpy().tobytes() for name, tensor in result.state.items()}


def clients_read_messages_only(bench: Bench) -> None:
    """An upload depends on the message to the client, not on the server."""
    expect(
        _upload(bench) == bench.everyone.log.uploads[1, CLIENT],
        "a new instance sends another upload after the same message",
    )
    expect(
        _upload(bench, forget=True) == _upload(bench),
        "the upload depends on server tensors that clients do not receive",
    )


def stacked_as_alone(bench: Bench) -> str:
    """Clients trained as one stack send and keep what each does alone, up to rounding."""
    method, fabric, data = bench.untrained(), bench.everyone.trainer.fabric, bench.data
    if not is_stackable(method):
        raise NotApplicable("it does not declare that clients can be trained as one stack")
    stack = BatchedEngine(fabric, bench.untrained(), data)
    alone = SequentialEngine(fabric, method, data)
    expected, found = (
        list(engine.train([_task(bench, data, id) for id in range(data.num_clients)]))
        for engine in (alone, stack)
    )
    if stack.reason:
        return f"one by one here: {stack.reason}"
    for mine, other in zip(expected, found, strict=True):
        sent = [dict(Payload.from_bytes(result.upload)) for result in (mine, other)]
        for (a, b), verb in ((sent, "sends"), ((mine.state, other.state), "keeps")):
            wrong = [name for name in a if name not in b or not _alike(a[name], b[name])]
            what = ", ".join(wrong) or "set of entries"
            expect(
                not wrong and a.keys() == b.keys(),
                f"in a stack client {mine.client.id} {verb} another {what}; take away stackable, or let its "
                "steps read and set tensors of the module alone",
            )
    return ""


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
