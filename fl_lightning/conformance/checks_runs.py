"""Checks of runs: a method runs, repeats its results, resumes, and survives lost clients and
NaN."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping
from inspect import signature
from types import MethodType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from fl_lightning.client import Client
from fl_lightning.conformance.bench import (
    Bench,
    FinishedRun,
    expect_same_server,
    expect_same_tensors,
    first_batch,
)
from fl_lightning.conformance.verdicts import NotApplicable, Violation, expect, in_words
from fl_lightning.conformance.watch import AttributeRecorder, OnlyClients
from fl_lightning.engines.sequential import upload_of
from fl_lightning.methods import FedAvg, Method
from fl_lightning.methods.optimizing import local_optimizer, round_optimizer
from fl_lightning.wire import Payload

T = TypeVar("T")


def contract(bench: Bench) -> None:
    """A training step returns losses by name; broadcast and upload return payloads, deploy a
    network and server_metrics numbers by name."""
    method = _attempt(f"it cannot be built on {bench.subject.federation.name}", bench.untrained)
    early = "its configure_optimizers fails; a run calls it before any client has received anything"
    _attempt(early, lambda: round_optimizer(method))
    data = bench.data
    client = data.client(0)
    message = _attempt("its broadcast fails", lambda: method.broadcast(client))
    expect(isinstance(message, Payload), f"broadcast gives {form(message)}; return a Payload")
    batch = _attempt("its first batch fails", lambda: first_batch(method, data))
    outputs = _attempt(
        f"its training_step fails on {form(batch)}", lambda: method.training_step(batch, 0)
    )
    expect(
        isinstance(outputs, Mapping) and "loss" in outputs,
        (
            f"training_step gives {form(outputs)}; a dictionary with 'loss' is needed; return {{'loss': "
            "loss, 'loss_task': loss}"
        ),
    )
    for name, value in outputs.items():
        one = isinstance(value, Tensor) and value.numel() == 1
        expect(
            one,
            (
                f"training_step gives {name!r} as {form(value)}; each term is a tensor of one number; "
                "sum or average it"
            ),
        )
    expect(
        outputs["loss"].requires_grad, "the loss of training_step has no gradient; do not detach it"
    )
    _attempt("its upload fails", lambda: upload_of(method, client, 1, local_optimizer(method)))
    network = _attempt("its deploy fails", lambda: method.deploy(client))
    expect(isinstance(network, nn.Module), f"deploy gives {form(network)}; return a network")
    metrics = _attempt("its server_metrics fails", method.server_metrics)
    expect(
        isinstance(metrics, Mapping),
        f"server_metrics gives {form(metrics)}; return a dictionary of numbers by name",
    )


def _attempt(stage: str, action: Callable[[], T]) -> T:
    try:
        return action()
    except Violation:
        raise
    except Exception as error:
        raise Violation(f"{stage}: {in_words(error)}") from error


def form(value: Any) -> str:
    """Describe the type and shape of a value.

    >>> form((torch.zeros(2, 3), {"label": 1}))
    'a tuple of Tensor [2, 3], a dictionary of label: int'
    """
    if isinstance(value, Tensor):
        return f"Tensor {list(value.shape)}"
    if isinstance(value, Mapping):
        return "a dictionary of " + ", ".join(
            f"{name}: {form(entry)}" for name, entry in value.items()
        )
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of " + ", ".join(map(form, value))
    return type(value).__name__


def neutral(bench: Bench) -> None:
    """With its neutral settings the method equals FedAvg with its other settings, bit for bit."""
    settings = bench.subject.neutral
    if settings is None:
        raise NotApplicable("no neutral setting is known")
    method = bench.subject.make(**settings)
    given = getattr(bench.subject.make, "keywords", {})
    shared = given.keys() & signature(FedAvg).parameters.keys() - settings.keys()
    others = {"weigh_by": method.weigh_by, **{name: given[name] for name in shared}}
    pair = method, FedAvg(**others)
    runs = (bench.run(method=each, participation=0.5) for each in pair)
    mine, fedavg = (run.method.layout.read(run.method.deploy(None)) for run in runs)
    difference = float((mine - fedavg).abs().max())
    expect(
        torch.equal(mine, fedavg),
        f"with {settings} its weights differ by {difference:.3g} from FedAvg's",
    )


def determinism(bench: Bench) -> None:
    """The result depends on the seed, not on global random generators."""
    runs = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002 -- that generator is what a method must not draw from
        random.seed(seed)
        runs.append(bench.run(participation=0.5))
    first, second = runs
    expect_same_server(first.method.server, second.method.server, "in a second run")
    _same_kept(first, second, "in a second run")


def resume(bench: Bench) -> None:
    """A run resumed after two rounds ends like an uninterrupted one."""
    attributes = AttributeRecorder()
    whole = bench.run(attributes, max_rounds=4, participation=0.5)
    half = bench.run(max_rounds=2, participation=0.5)
    rest = bench.run(
        max_rounds=4, participation=0.5, ckpt_path=str(half.trainer.run_dir), allow_changed=True
    )
    cause = _lost_attributes(attributes.changed)
    expect_same_server(whole.method.server, rest.method.server, "after the resume", cause)
    _same_kept(whole, rest, "after the resume", cause)


def _lost_attributes(changed: Collection[str]) -> str:
    """Name the attributes of its own that a run has changed, which no checkpoint has; empty if
    there are none."""
    usual = {*vars(FedAvg()), *dir(FedAvg)}
    own = sorted(f"self.{name}" for name in changed if name not in usual)
    if not own:
        return ""
    return (
        f"a run changes {', '.join(own)}, which no checkpoint has: put what a client keeps into "
        "client.state, and what the server remembers into self.server"
    )


def _same_kept(expected: FinishedRun, found: FinishedRun, when: str, cause: str = "") -> None:
    for client, kept in found.log.kept.items():
        what = f"the state of client {client}"
        expect_same_tensors(expected.log.kept[client], kept, what, when, cause)


def finite(bench: Bench) -> None:
    """All regular uploads are accepted, and the server stays finite."""
    for entry in bench.everyone.ledger:
        expect(
            entry.status == "trained",
            f"the upload of client {entry.client} in round {entry.round} was {entry.status}",
        )
    _require_finite(bench.everyone.method)


def empty_round(bench: Bench) -> None:
    """A round without uploads leaves the server unchanged."""
    run = bench.run(OnlyClients(round=1))
    expect_same_server(run.log.servers[0], run.log.servers[1], "after an empty round")


def diverged_client(bench: Bench) -> None:
    """The upload of a client whose loss is NaN is rejected."""
    method = bench.subject.federation.prepare(bench.subject.make())
    _poison(method, client=0)
    run = bench.run(method=method)
    statuses = {entry.status for entry in run.ledger if entry.client == 0}
    expect(
        statuses == {"rejected"},
        f"the ledger has {', '.join(sorted(statuses))} for the client whose loss is NaN",
    )
    _require_finite(run.method)


def _poison(method: Method, client: int) -> None:
    """Make the loss of one client NaN, whatever the method computes."""
    receive, step = method.receive, method.training_step
    poisoned: list[bool] = []

    def received(self: Method, message: Payload, who: Client) -> None:
        poisoned[:] = [who.id == client]
        receive(message, who)

    def stepped(self: Method, batch: Any, batch_idx: int = 0) -> dict[str, Tensor]:
        outputs = step(batch, batch_idx)
        return (
            {**outputs, "loss": outputs["loss"] * float("nan")} if poisoned == [True] else outputs
        )

    method.receive = MethodType(received, method)  # type: ignore[method-assign]
    method.training_step = MethodType(stepped, method)  # type: ignore[method-assign]


def _require_finite(method: Method) -> None:
    for name, value in method.server.items():
        expect(
            not value.is_floating_point() or bool(torch.isfinite(value).all()),
            f"server[{name!r}] is not finite",
        )
