"""Many clients at once: their parameters and buffers as stacks ``[K, ...]``, one ``vmap`` of the
training step over all of them.

Pays where a step is mostly the cost of starting operations: small networks, many clients. The
clients of a stack may have different numbers and sizes of batches: each step takes those rows whose
batches have one shape, and the others in turn.
"""

from __future__ import annotations

import logging
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from fl_lightning import rng
from fl_lightning.client import Client
from fl_lightning.config.overriding import overrides
from fl_lightning.data import FederatedData
from fl_lightning.engines.attributes import (
    REGISTERED,
    attributes_of,
    has_same_start,
    held_by,
    put_back,
)
from fl_lightning.engines.base import (
    ClientResult,
    ClientTask,
    Engine,
    Units,
    local_batches,
    one_thread,
    start_client,
)
from fl_lightning.engines.sequential import SequentialEngine, upload_of
from fl_lightning.engines.stacked.batches import can_stack, stacked_batches
from fl_lightning.engines.stacked.stack import (
    CannotStackError,
    NeverStacksError,
    Stack,
    StackLosses,
)
from fl_lightning.engines.stacked.start_state import StartState
from fl_lightning.engines.stacked.uploads import default_uploads
from fl_lightning.methods import Method
from fl_lightning.models.tensors import constant_buffers, tensors_of
from fl_lightning.support.hook_values import check_outputs

log = logging.getLogger("fl_lightning")

MAX_STACK = 64
"""Clients of one stack. Fixed, and stacks are cut before they are dealt to processes, so that their
number changes nothing."""
MAX_STACK_BYTES = 2**31
"""What parameters, gradients and optimiser state of one stack may take."""


@dataclass
class Row:
    """One client, ready to train.

    Args:
        task: what it is to do.
        client: who does it, with a state of its own: the task's stays what it was, for whoever
            begins once more.
        start: the module that it starts from.
        batches: its batches; None for those of the data module as it is.
    """

    task: ClientTask
    client: Client
    start: StartState
    batches: list[Any] | None


class BatchedEngine(Engine):
    """Trains clients as stacks, and one by one where the method does not allow that."""

    name = "batched"

    def __init__(self, fabric: Fabric, method: Method, data: FederatedData) -> None:
        self.fabric, self.method, self.data = fabric, method, data
        self.one_by_one = SequentialEngine(fabric, method, data)
        self.reason, self.never = "", False
        self.names: list[str] = []  # attributes of the method and its modules that receive sets
        # before any training: methods that freeze parameters in turn have others frozen after it
        self.frozen = set(self.constants)

    @property
    def constants(self) -> dict[str, Tensor]:
        """The tensors of which a stack has one copy for all its clients, by name.

        They are those of the network that no step changes. A hook after each step may change any.
        """
        if overrides(self.method, Method, "on_train_batch_end"):
            return {}
        names = {id(tensor): name for name, tensor in tensors_of(self.method).items()}
        return {names[id(tensor)]: tensor for tensor in constants_of(self.method.network).values()}

    def units(self, tasks: Sequence[ClientTask]) -> Units:
        """Stacks of clients with about as many examples."""
        weights = sum(
            p.numel() * p.element_size()
            for name, p in self.method.named_parameters()
            if name not in self.frozen
        )
        if not tasks:
            return []
        most = max(1, min(MAX_STACK, MAX_STACK_BYTES // max(1, 4 * weights)))
        count = -(-len(tasks) // most)
        by_size = sorted(range(len(tasks)), key=lambda at: (len(tasks[at].client.train), at))
        edges = [round(part * len(tasks) / count) for part in range(count + 1)]
        return [sorted(by_size[a:b]) for a, b in pairwise(edges)]

    def train(
        self, tasks: Sequence[ClientTask], units: Units | None = None
    ) -> Iterator[ClientResult]:
        results: dict[int, ClientResult] = {}
        for unit in self.units(tasks) if units is None else units:
            results |= zip(unit, self.train_unit([tasks[at] for at in unit]), strict=True)
        yield from (results[at] for at in range(len(tasks)))

    def train_unit(self, tasks: Sequence[ClientTask]) -> list[ClientResult]:
        """Train clients as one stack for each kind among them, or one by one where that cannot be,
        which is logged once.

        Each stack is tried, whatever became of others, where the configuration allows any: who is
        trained as one depends on neither the process nor where a run was continued. Nothing of a
        stack that was given up is left in the module.
        """
        if self.never:
            return list(self.one_by_one.train(tasks))
        before = held_by(self.method)
        try:
            with one_thread(self.fabric.device):
                return self._train_stacks(tasks)
        except CannotStackError as reason:
            if not self.reason:
                log.warning("clients are trained one by one, not batched: %s", reason)
            self.reason, self.never = str(reason), isinstance(reason, NeverStacksError)
            put_back(before)
        return list(self.one_by_one.train(tasks))

    def _train_stacks(self, tasks: Sequence[ClientTask]) -> list[ClientResult]:
        precision = self.fabric.strategy.precision
        if isinstance(precision, MixedPrecision) and precision.scaler is not None:
            raise NeverStacksError("each client has a loss scale of its own in 16-mixed")
        if self.method.module is not None:
            raise NeverStacksError("nobody knows what a LightningModule keeps between steps")
        self.method.round = tasks[0].round
        before = attributes_of(self.method)
        rows = self._ready(tasks)
        states = {id(row.start): row.start for row in rows}.values()
        changed = {
            name
            for state in states
            for name, value in state.attributes.items()
            if before.get(name) is not value
        }
        self.names = sorted(changed)
        key_of = {
            id(state): state.stack_key(self.names, type(self.method).__name__) for state in states
        }
        kinds: dict[Any, list[Row]] = defaultdict(list)
        for row in rows:
            kinds[key_of[id(row.start)]].append(row)
        # all of them before the first upload, which may change client.state
        trained = [self._train_stack(kind) for kind in kinds.values()]
        results = {result.client.id: result for finish in trained for result in finish()}
        return [results[task.client.id] for task in tasks]

    def _ready(self, tasks: Sequence[ClientTask]) -> list[Row]:
        method, shared = self.method, None
        # others may go on from what was received
        plain = not overrides(method, Method, "local_batches")
        gathered = plain and can_stack(
            self.data, [task.client for task in tasks], [task.labels for task in tasks]
        )
        if plain and has_same_start(method) and len({id(task.message) for task in tasks}) == 1:
            start_client(method, tasks[0])
            shared = StartState.of(method)
        clients = [replace(task.client, state=dict(task.client.state)) for task in tasks]
        if shared is not None and gathered:
            pairs = zip(tasks, clients, strict=True)
            return [Row(task, client, shared, None) for task, client in pairs]
        rows: list[Row] = []
        known: dict[str, Tensor] = {}
        for task, client in zip(tasks, clients, strict=True):
            batches, own = None, replace(task, client=client)
            if shared is None:
                start_client(method, own)
            if not gathered:
                with (
                    rng.torch_stream(method.seed, "dropout", task.round, client.id),
                    self.fabric.autocast(),
                ):
                    batches = list(local_batches(method, self.data, own))
            start = shared or StartState.of(method, known)
            if not rows:
                known = {name: start.tensors[name] for name in self.constants}
            rows.append(Row(task, client, start, batches))
        return rows

    def _train_stack(self, rows: Sequence[Row]) -> Callable[[], list[ClientResult]]:
        """Train clients of one kind and return a function that makes their results."""
        if len(rows) == 1:
            return lambda: [self.one_by_one.train_client(rows[0].task)]
        rows[0].start.restore(self.method, self.names)
        self.tied = _has_tied_weights(self.method)
        stack = Stack(self.method, [row.start.tensors for row in rows], self.constants)
        losses, steps = StackLosses(len(rows)), [0] * len(rows)
        for number, groups in enumerate(self._batches(rows)):
            for where, batch in groups:
                outputs = self._step(stack, where, batch, number)
                losses.add(outputs, tree_leaves(batch)[0].shape[1], where)
                for at in where:
                    steps[at] += 1
            stack.end_step()
        return lambda: self._results(rows, stack, losses, steps)

    def _batches(self, rows: Sequence[Row]) -> Iterator[list[tuple[list[int], Any]]]:
        """Yield each step's groups: rows whose batches have one form, and those batches as a
        stack."""
        if rows[0].batches is not None:
            yield from _stacked([row.batches or [] for row in rows])
            return
        tasks = [row.task for row in rows]
        steps = stacked_batches(
            self.data,
            [task.client for task in tasks],
            round=tasks[0].round,
            epochs=[task.epochs for task in tasks],
            labels=[task.labels for task in tasks],
            steps=[task.steps for task in tasks],
        )
        while True:
            with self.fabric.autocast():  # for the batches alone: a step enters it by itself
                groups = next(steps, None)
            if groups is None:
                return
            yield groups

    def _step(self, stack: Stack, where: Sequence[int], batch: Any, step: int) -> dict[str, Tensor]:
        """Make one local step of the clients at ``where`` and return each loss term
        ``[len(where)]``.

        Args:
            batch: their batches as a stack.
        """
        leaves, others = stack.part(where)
        before = self._attributes(step)
        drawn = None if step else _outer_draws()
        try:
            with self.fabric.autocast():
                outputs, tensors = vmap(self._call, (0, 0, None, None, 0, None))(
                    leaves, others, stack.shared, "training_step", batch, step
                )
            check_outputs(self.method, outputs, len(where))
            outputs["loss"].sum().backward()
            stack.step(where, leaves)
            tensors = {name: leaves.get(name, tensor).detach() for name, tensor in tensors.items()}
            outputs = {name: value.detach() for name, value in outputs.items()}
            if overrides(self.method, Method, "on_train_batch_end"):
                with torch.no_grad():
                    end = vmap(self._call, (0, None, None, None, 0, 0, None))
                    _, tensors = end(tensors, {}, {}, "on_train_batch_end", outputs, batch, step)
            outputs = {name: value.reshape(len(where)) for name, value in outputs.items()}
        except (RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError) as error:
            raise CannotStackError(
                f"{type(self.method).__name__} under vmap: {str(error).splitlines()[0]}"
            ) from error
        if drawn is not None and drawn != _outer_draws():
            raise CannotStackError(
                f"{type(self.method).__name__} draws from random or NumPy in a step; it would be "
                "one draw for all of a stack"
            )
        for name, value in self._attributes(step).items():
            if before.get(name) is not value:
                raise CannotStackError(
                    f"{type(self.method).__name__} sets {name!r} in a step; it would be one value "
                    "for all of a stack"
                )
        stack.put(where, tensors)
        return outputs

    def _attributes(self, step: int) -> dict[str, Any]:
        """Return the attributes that a step may not set: those of submodules in the first one
        alone, since they take a millisecond of a ResNet-18."""
        if step == 0:
            return attributes_of(self.method)
        own = vars(self.method).items()
        return {name: value for name, value in own if name not in REGISTERED}

    def _call(
        self,
        trained: Mapping[str, Tensor],
        others: Mapping[str, Tensor],
        shared: Mapping[str, Tensor],
        hook: str,
        *arguments: Any,
    ) -> tuple[Any, dict[str, Tensor]]:
        """Call a hook of the method with these tensors in place of its own; return what it returns
        and the tensors after it, but for the shared ones.
        """
        tensors = {
            f"method.{name}": tensor for name, tensor in {**trained, **others, **shared}.items()
        }
        versions = {name: tensor._version for name, tensor in shared.items()}
        returned = functional_call(
            _Caller(self.method), tensors, (hook, *arguments), tie_weights=self.tied
        )
        after = {name.removeprefix("method."): tensor for name, tensor in tensors.items()}
        for name, tensor in shared.items():
            if after.pop(name) is not tensor or tensor._version != versions[name]:
                raise CannotStackError(
                    f"{type(self.method).__name__} sets {name!r} in a step, a frozen parameter or a buffer "
                    "outside of the state_dict"
                )
        return returned or {}, after

    @torch.no_grad()
    def _results(
        self, rows: Sequence[Row], stack: Stack, losses: StackLosses, steps: Sequence[int]
    ) -> list[ClientResult]:
        clients = [row.client for row in rows]
        rows[0].start.restore(self.method, self.names)
        uploads = default_uploads(self.method, clients, stack.tensors, stack.shared)
        if uploads is None:
            uploads = [
                self._upload(row, tensors, count, stack.optimizer)
                for row, tensors, count in zip(rows, stack.rows(), steps, strict=True)
            ]
        return [
            ClientResult(client, upload, client.state, loss, count, verified=upload)
            for client, upload, loss, count in zip(
                clients, uploads, losses.means(), steps, strict=True
            )
        ]

    def _upload(
        self, row: Row, tensors: Mapping[str, Tensor], steps: int, optimizer: Optimizer
    ) -> bytes:
        row.start.restore(self.method, self.names)
        for name, tensor in tensors_of(self.method).items():
            tensor.copy_(tensors[name])
        return upload_of(self.method, row.client, steps, optimizer).to_bytes()


class _Caller(nn.Module):
    """A module whose ``forward``, which is what ``functional_call`` calls, calls any hook of the
    method."""

    def __init__(self, method: Method) -> None:
        super().__init__()
        self.method = method

    def forward(self, hook: str, *arguments: Any) -> Any:
        return getattr(self.method, hook)(*arguments)


def _has_tied_weights(method: Method) -> bool:
    """Return whether two modules share a parameter. One module under two names is no such case, and
    ``functional_call`` mistakes it for one.
    """
    modules = list(method.modules())
    parameters = [id(p) for module in modules for p in module._parameters.values() if p is not None]
    tied = len(set(parameters)) < len(parameters)
    if tied and len(modules) < len(list(method.named_modules(remove_duplicate=False))):
        raise NeverStacksError(
            f"{type(method).__name__} has tied weights and a module under two names"
        )
    return tied


def _outer_draws() -> tuple[Any, ...]:
    """Return the states of the generators that vmap knows nothing of."""
    state: Any = np.random.get_state()  # noqa: NPY002
    return random.getstate(), state[1].tobytes(), *state[2:]


def _stacked(rows: Sequence[Sequence[Any]]) -> Iterator[list[tuple[list[int], Any]]]:
    """Yield each step's groups of rows that have batches of one form, and those batches as a
    stack."""
    for step in range(max(map(len, rows))):
        groups: dict[Any, list[int]] = defaultdict(list)
        for at, batches in enumerate(rows):
            if step < len(batches):
                leaves, form = tree_flatten(batches[step])
                groups[str(form), tuple((leaf.shape, leaf.dtype) for leaf in leaves)].append(at)
        yield [
            (
                where,
                tree_map(lambda *leaves: torch.stack(leaves), *(rows[at][step] for at in where)),
            )
            for where in groups.values()
        ]


def constants_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that no local step changes, by name: frozen parameters and constant
    buffers."""
    buffers = constant_buffers(module)
    return {
        name: tensor
        for name, tensor in tensors_of(module).items()
        if name in buffers or (isinstance(tensor, nn.Parameter) and not tensor.requires_grad)
    }
