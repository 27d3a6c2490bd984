"""``fit --dry_run``: how much memory a client takes and what travels, before weights or data are
loaded."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fl_lightning.asking import loss_message
from fl_lightning.clock.rounds import Rounds
from fl_lightning.compatibility.methods import own_messages_of
from fl_lightning.data import FederatedData
from fl_lightning.errors import InputError, require
from fl_lightning.federation import cohort_of
from fl_lightning.methods import Method
from fl_lightning.methods.personal import part_of
from fl_lightning.models import build_network
from fl_lightning.models.adapters.low_rank import factor_sides
from fl_lightning.models.step_memory import StepMemory, batch_of, shapes_alone, step_memory
from fl_lightning.privacy.secure.settings import SecureSum
from fl_lightning.sampling import Sampler
from fl_lightning.topology import Star, Topology
from fl_lightning.wire import Layout, Payload

MESSAGE_VECTORS = 4
"""Vectors of all weights that travel beside the network's own: the server's, its message, what a
client sends, and that in bytes."""


@dataclass(frozen=True)
class Forecast:
    """What a run will take.

    Args:
        memory: of a local step of one client whose activations all wait for the backward pass.
        again: the same with activations that are computed again there; None: the network has no
            such setting.
        computes_again: whether the run has that setting.
        messages: bytes of the vectors that travel, in a client's process.
        down: bytes that a client is sent in a round.
        up: bytes that it sends.
        cohort: clients of a round; 0: it is known once the data are read.
        rounds: rounds of the run.
        topology: who talks to whom. How many messages a peer sends is not forecast.
        asking: bytes that it takes in a round to ask clients for their losses.
    """

    memory: StepMemory
    again: StepMemory | None
    computes_again: bool
    messages: int
    down: int
    up: int
    cohort: int
    rounds: int
    topology: Topology
    asking: int

    @property
    def traffic(self) -> int:
        """Bytes of a round."""
        return (self.down + self.up) * self.cohort + self.asking

    def metrics(self) -> dict[str, float]:
        """Return the forecast by name, in bytes."""
        found = {
            f"memory/{name}_bytes": float(size) for name, size in self.memory._asdict().items()
        }
        found["memory/messages_bytes"] = float(self.messages)
        if self.again is not None:
            found["memory/checkpointed_activations_bytes"] = float(self.again.activations)
        taken = self.again if self.again is not None and self.computes_again else self.memory
        found["memory/total_bytes"] = float(taken.total + self.messages)
        if self.topology.has_peers:
            return found
        found |= {
            "comm/client_download_bytes": float(self.down),
            "comm/client_upload_bytes": float(self.up),
        }
        if self.cohort:
            found["comm/total_bytes"] = float(self.traffic)
        return found


def forecast(
    method: Method,
    data: FederatedData,
    *,
    participation: float,
    rounds: int,
    secure_sum: SecureSum | None = None,
    kind: Rounds | None = None,
    topology: Topology | None = None,
    sampler: Sampler | None = None,
) -> Forecast:
    """Return what a run will take, from the configuration of its network alone.

    Args:
        method: the method; it is not built.
        data: the data; they are not read.
        participation: share of the clients that a round asks for.
        rounds: rounds of the run.
        secure_sum: with which uploads are masked, where nobody drops out; None: they are not.
        kind: what a round is; None: everybody that is asked returns.
        topology: who talks to whom; None: clients and a server.
        sampler: who is asked; None: whoever is drawn.

    Raises:
        InputError: what the network sees is known only once the data are read, or the network
            cannot be made without values.
    """
    require(
        method.module is None,
        f"--dry_run with the module {type(method.module).__name__}",
        "a network is made without values from --model.network alone",
        "leave dry_run out, or write --trainer.fast_dev_run true",
    )
    network = _network(method, data)
    method.adapters.prepare(network)
    stays = frozenset() if method.personal is None else part_of(network, method.personal)
    batch = batch_of(data.example_inputs(), _rows(data))
    optimizer = _optimizer(method)
    base: Any = getattr(network.train(), "base", None)
    computes_again = getattr(base, "is_gradient_checkpointing", False)
    if hasattr(base, "gradient_checkpointing_disable"):
        base.gradient_checkpointing_disable()
    memory, again = step_memory(network, batch, optimizer), None
    if hasattr(base, "gradient_checkpointing_enable"):
        base.gradient_checkpointing_enable({"use_reentrant": False})
        again = step_memory(network, batch, optimizer)
    layout = Layout.of(network, include=lambda name: name not in stays)
    known = 0 if getattr(data, "count_clients", False) else data.num_clients
    cohort = cohort_of(participation, known) if known else 0
    if cohort and kind is not None:
        cohort = min(kind.exchanges(cohort), known)
    down, up = method.adapters.round_values(network, layout, cohort or 1)
    width = layout.dtype.itemsize
    down_bytes = round(down * width) + _envelope("weights")
    up_bytes = round(up * width) + _envelope("weights", "examples") + 4
    if secure_sum is not None:
        # vectors that are masked have one form, so that clients of low rank fill theirs up
        sums = [layout.size if getattr(network, "client_ranks", ()) else round(up)]
        if method.adapters.sums_products:
            sums.append(sum(m * n for _, m, n in factor_sides(network)))
        up_bytes, more = secure_sum.client_bytes(sum(sums) + len(sums), cohort or 2)
        down_bytes += more
    answers = cohort if sampler is not None and sampler.reads_losses else 0
    asking = 0
    if cohort and sampler is not None and sampler.candidates:
        answers = min(sampler.candidates, known)
        asking = max(answers - cohort, 0) * down_bytes
    return Forecast(
        memory,
        again,
        computes_again,
        MESSAGE_VECTORS * 4 * layout.size,
        down_bytes,
        up_bytes,
        cohort,
        rounds,
        topology or Star(),
        asking + answers * loss_message(0.0).nbytes,
    )


def show(found: Forecast, method: Method, data: FederatedData, precision: str) -> None:
    """Write a forecast to the terminal."""
    sys.stdout.write("\n".join(_lines(found, method, data, precision)) + "\n")


def _lines(found: Forecast, method: Method, data: FederatedData, precision: str) -> Iterator[str]:
    name = type(method).__name__
    yield f"{name} in batches of {_rows(data)} examples {list(data.example_shape)}: one client's process"
    columns = [found.memory] if found.again is None else [found.memory, found.again]
    rows = {
        "frozen weights": [one.base for one in columns],
        "trained weights": [one.trained for one in columns],
        "gradients": [one.gradients for one in columns],
        "optimiser": [one.optimizer for one in columns],
        "activations": [one.activations for one in columns],
        "messages": [found.messages for _ in columns],
        "together": [one.total + found.messages for one in columns],
    }
    for title, sizes in rows.items():
        yield f"  {title:<16}" + "".join(f"{size_of(size):>12}" for size in sizes)
    if found.again is not None:
        has = "has" if found.computes_again else "does not have"
        yield f"The second column is with gradient_checkpointing: true, which this run {has}."
    yield "These are tensors. Python and torch come on top, about 0.5 GB, and what an allocator wastes."
    if precision != "32-true":
        yield f"With precision {precision} activations take less than that."
    if own := own_messages_of(method) or _layouts_of(method):
        yield f"{name} has a {own[0]} of its own; what travels is said as if it were weights."
    yield from _traffic(found)
    yield "Clients that are stacked (--trainer.engine batched) have activations each. Nothing was loaded."


def _layouts_of(method: Method) -> list[str]:
    """Return the hooks by which a method of a user's own may choose what travels: nobody knows it
    before they run."""
    of = {
        hook: next(kind for kind in type(method).__mro__ if hook in vars(kind))
        for hook in ("build", "split_network")
    }
    return [hook for hook, kind in of.items() if not kind.__module__.startswith("fl_lightning.")]


def _traffic(found: Forecast) -> Iterator[str]:
    topology = type(found.topology).__name__
    if found.topology.has_peers:
        yield f"A message of a peer has {size_of(found.up)}; {topology} says how many it sends."
        return
    yield f"A client is sent {size_of(found.down)} in a round and sends {size_of(found.up)}."
    if not found.cohort:
        yield "How many clients there are is known once the data are read."
        return
    total = f"{size_of(found.traffic * found.rounds)} in {found.rounds} rounds"
    yield f"{found.cohort} clients a round: {size_of(found.traffic)}, and {total}."
    if found.asking:
        yield f"Of a round {size_of(found.asking)} are for asking clients for their losses."
    if found.topology.has_nodes:
        yield f"What the nodes of {topology} send each other is not in it."


def size_of(count: float) -> str:
    """Return a number of bytes in a unit that suits it.

    >>> size_of(54_525_952), size_of(0)
    ('54.5 MB', '0 B')
    """
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count:.0f} B"


def _network(method: Method, data: FederatedData) -> nn.Module:
    shape = getattr(data, "example_shape", None)
    outputs = getattr(data, "num_classes", 0)
    require(
        shape is not None and outputs,
        f"--dry_run with --data {type(data).__name__}",
        "how large its examples are, and how many classes it has, is known once it is read",
        "leave dry_run out, or write --trainer.fast_dev_run true",
    )
    method.take_task(data.task)
    try:
        with shapes_alone():
            return build_network(
                method.network_spec,
                outputs,
                shape,  # type: ignore[arg-type]
                logits=method.logits,
                task=data.task,
                inputs=batch_of(data.example_inputs(), 2),
            )
    except Exception as error:
        # a device that was not asked for
        if isinstance(error, InputError) and "meta" not in str(error):
            raise
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"--dry_run with --model.network {method.network_spec}",
            f"it cannot be made without values ({type(error).__name__}: {reason})",
            "leave dry_run out, or write --trainer.fast_dev_run true",
        ) from error


def _rows(data: Any) -> int:
    """Return the examples of the largest batch."""
    tokens = getattr(data, "batch_tokens", None)
    if tokens is None:
        return int(data.batch_size)
    return int(min(data.batch_size, tokens // (data.context * data.task.outputs_per_example)))


def _optimizer(method: Method) -> Any:
    """Return what makes a client's optimiser of a list of parameters."""

    def made(weights: list[nn.Parameter]) -> Any:
        holder = nn.Module()
        holder.weights = nn.ParameterList(weights)
        own, method.network = getattr(method, "network", None), holder
        try:
            return method.configure_optimizers()
        finally:
            if own is None:
                del method.network
            else:
                method.network = own

    return made


def _envelope(*names: str) -> int:
    """Return the bytes of a message beside its values."""
    return len(Payload({name: torch.zeros(1) for name in names}).to_bytes()) - 4 * len(names)
