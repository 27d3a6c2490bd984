"""Checks on small images: that a method runs, repeats, resumes, and survives trouble."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor

from fl_lightning.client import Client
from fl_lightning.conformance.bench import Bench, Run, first_batch, same_server, same_tensors
from fl_lightning.conformance.toy import on_images
from fl_lightning.conformance.verdicts import NotApplicable, Violation, require
from fl_lightning.conformance.watch import Only
from fl_lightning.engines.optimizers import local_optimizer
from fl_lightning.engines.uploads import upload_of
from fl_lightning.methods import FedAvg, Method
from fl_lightning.wire import Payload

T = TypeVar("T")


def contract(bench: Bench) -> None:
    """It makes a step: losses by name, payloads both ways."""
    method = _attempt("it cannot be built on images", bench.untrained)
    data = bench.data
    client = data.client(0)
    message = _attempt("its broadcast fails", lambda: method.broadcast(client))
    require(isinstance(message, Payload), f"broadcast gives {form(message)}; a Payload travels")
    batch = _attempt("it finds no first batch", lambda: first_batch(method, data))
    outputs = _attempt(f"its training_step fails on {form(batch)}", lambda: method.training_step(batch, 0))
    require(
        isinstance(outputs, Mapping) and "loss" in outputs,
        (
            f"training_step gives {form(outputs)}; a dictionary with 'loss' is needed; return {{'loss': "
            "loss, 'loss_task': loss}"
        ),
    )
    for name, value in outputs.items():
        one = isinstance(value, Tensor) and value.ndim == 0
        require(
            one,
            (
                f"training_step gives {name!r} as {form(value)}; each term is a tensor of one number; "
                "sum or average it"
            ),
        )
    require(outputs["loss"].requires_grad, "the loss of training_step has no gradient; do not detach it")
    upload = _attempt("its upload fails", lambda: upload_of(method, client, 1, local_optimizer(method)))
    require(isinstance(upload, Payload), f"upload gives {form(upload)}; a Payload travels")


def _attempt(stage: str, action: Callable[[], T]) -> T:
    try:
        return action()
    except Exception as error:
        raise Violation(f"{stage}: {type(error).__name__}: {error}") from error


def form(value: Any) -> str:
    """What a value looks like.

    >>> form((torch.zeros(2, 3), {"label": 1}))
    'a tuple of Tensor [2, 3], a dictionary of label: int'
    """
    if isinstance(value, Tensor):
        return f"Tensor {list(value.shape)}"
    if isinstance(value, Mapping):
        return "a dictionary of " + ", ".join(f"{name}: {form(entry)}" for name, entry in value.items())
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of " + ", ".join(map(form, value))
    return type(value).__name__


def neutral(bench: Bench) -> None:
    """At its neutral setting it is FedAvg, bit for bit."""
    settings = bench.subject.neutral
    if settings is None:
        raise NotApplicable("no neutral setting is known")
    methods = (bench.subject.make(**settings), FedAvg())
    mine, fedavg = (
        bench.images(method=method, participation=0.5).method.server["weights"] for method in methods
    )
    difference = float((mine - fedavg).abs().max())
    require(
        torch.equal(mine, fedavg), f"with {settings} its weights differ by {difference:.3g} from FedAvg's"
    )


def determinism(bench: Bench) -> None:
    """One seed, one server, whatever global generators hold."""
    torch.manual_seed(1)
    first = bench.images(participation=0.5)
    torch.manual_seed(2)
    second = bench.images(participation=0.5)
    same_server(first.method.server, second.method.server, "in a second run")
    _same_kept(first, second, "in a second run")


def resume(bench: Bench) -> None:
    """Two rounds, a checkpoint, two more: as four in one go."""
    whole = bench.images(max_rounds=4, participation=0.5)
    half = bench.images(max_rounds=2, participation=0.5)
    rest = bench.images(
        max_rounds=4, participation=0.5, ckpt_path=str(half.trainer.run_dir), allow_changed=True
    )
    same_server(whole.method.server, rest.method.server, "after the resume")
    _same_kept(whole, rest, "after the resume")


def _same_kept(expected: Run, found: Run, when: str) -> None:
    for client, kept in found.log.kept.items():
        same_tensors(expected.log.kept[client], kept, f"what client {client} keeps", when)


def finite(bench: Bench) -> None:
    """Honest uploads count, and the server stays finite."""
    for entry in bench.everyone.ledger:
        require(
            entry.status == "trained",
            f"the upload of client {entry.client} in round {entry.round} was {entry.status}",
        )
    _require_finite(bench.everyone.method)


def empty_round(bench: Bench) -> None:
    """All clients of the first round dropped: the server is as before."""
    run = bench.images(Only(round=1))
    same_server(run.log.servers[0], run.log.servers[1], "after an empty round")


def diverged_client(bench: Bench) -> None:
    """A client whose loss is NaN is rejected, never averaged."""
    method = on_images(bench.subject.make())
    _poison(method, client=0)
    run = bench.images(method=method)
    fates = {entry.status for entry in run.ledger if entry.client == 0}
    require(
        fates == {"rejected"}, f"the ledger says {', '.join(sorted(fates))} of the client whose loss is NaN"
    )
    _require_finite(run.method)


def _poison(method: Method, client: int) -> None:
    """The loss of one client becomes NaN, however the method comes to it."""
    receive, step = method.receive, method.training_step
    poisoned: list[bool] = []

    def received(self: Method, message: Payload, who: Client) -> None:
        poisoned[:] = [who.id == client]
        receive(message, who)

    def stepped(self: Method, batch: Any, batch_idx: int = 0) -> dict[str, Tensor]:
        outputs = step(batch, batch_idx)
        return {**outputs, "loss": outputs["loss"] * float("nan")} if poisoned == [True] else outputs

    method.receive = MethodType(received, method)  # type: ignore[method-assign]
    method.training_step = MethodType(stepped, method)  # type: ignore[method-assign]


def _require_finite(method: Method) -> None:
    for name, value in method.server.items():
        require(
            not value.is_floating_point() or bool(torch.isfinite(value).all()),
            f"server[{name!r}] is not finite",
        )
