"""Evaluation of what a method deploys: the global test set, and each client's validation examples.

Of a personalised method every client's own model is evaluated. The global test set is then dealt to
the clients (:func:`fl_lightning.data.test_owners.deal_test_set`): one pass over the test set
whatever their number, and ``test/accuracy`` is the accuracy where the examples would turn up.

Metrics are sums over batches (:class:`fl_lightning.tasks.Task`), added in the order of the batches
whichever rank made them. Metrics that the user has named are states of each batch, merged in the
same order. Outputs are collected only for those who ask for probabilities.

A machine that has some of the clients alone makes their part of these sums
(:func:`tally_test_set`, :func:`tally_validation`); :func:`on_test_set` and :func:`validate` take
sums that were made elsewhere.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from operator import itemgetter
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fl_lightning import rng
from fl_lightning.data import FederatedData
from fl_lightning.data.test_owners import deal_test_set
from fl_lightning.distributed import collectives
from fl_lightning.engines.base import NO_TENSORS, ClientSums
from fl_lightning.methods import Method
from fl_lightning.methods.module_steps import ModuleLogs, Split
from fl_lightning.metrics import client_spread
from fl_lightning.metrics.states import MetricStates, values_of_all, values_of_clients
from fl_lightning.models import MeasuredNetwork
from fl_lightning.tasks import Sums, Task

T = TypeVar("T")
States = Mapping[int, dict[str, Tensor]]
NO_STATES: States = MappingProxyType({})
NO_HOLDERS: Mapping[int, int] = MappingProxyType({})
NOTHING_ELSEWHERE = ClientSums()
MAX_PARTS = 2**32
"""Batches of one client are numbered below it, so that all batches of all clients have an order:
batch p of client k is number ``k * MAX_PARTS + p``."""


def share(items: Iterable[T]) -> Iterator[tuple[int, T]]:
    """Yield this rank's share of the items, each with its number among all."""
    return islice(enumerate(items), collectives.rank(), None, collectives.world_size())


def share_clients(ids: Iterable[int], holders: Mapping[int, int]) -> Iterator[int]:
    """Yield the clients whose own model this rank evaluates: those whose state it holds, and a
    share of those that keep nothing."""
    ranks = collectives.world_size()
    for number, id in enumerate(ids):
        if holders.get(id, number % ranks) == collectives.rank():
            yield id


def gather_columns(pieces: Iterable[tuple[int, tuple[Tensor, ...]]]) -> tuple[Tensor, ...]:
    """Return the pieces of all ranks: column by column, concatenated in the order of their numbers,
    on the CPU. ``()`` when there are none."""
    mine = {
        f"{number}/{column}": tensor
        for number, columns in pieces
        for column, tensor in enumerate(columns)
    }
    columns: dict[int, list[Tensor]] = {}
    for name, tensor in sorted(
        collectives.gather_parts(mine).items(), key=lambda item: int(item[0].split("/")[0])
    ):
        columns.setdefault(int(name.split("/")[1]), []).append(tensor)
    return tuple(torch.cat(columns[column]).cpu() for column in sorted(columns))


@contextmanager
def evaluation_mode(network: nn.Module) -> Iterator[nn.Module]:
    """Put the network into evaluation mode within the block."""
    was_training = network.training
    network.eval()
    try:
        yield network
    finally:
        network.train(was_training)


class Tally:
    """What is measured of a split, batch by batch.

    Args:
        method: whose LightningModule logs; None: nothing is logged.
        split: ``test`` or ``val``.
        sums, named, logs: what was measured on other machines.

    Attributes:
        sums: sum and weight of each metric by ``<number of the batch>/<metric>``, float64 on the
            CPU: ``[2]`` of the test set, and of validation a row for each client, ``[k, 3]``, with
            its id before them.
        named: the states of the metrics that the user has named; None where there are none.
        logs: what the step of a LightningModule logs; None where the method has no module.
    """

    def __init__(
        self,
        method: Method | None,
        data: FederatedData,
        split: Split,
        sums: Mapping[str, Tensor] = NO_TENSORS,
        named: Mapping[str, Tensor] = NO_TENSORS,
        logs: Mapping[str, Tensor] = NO_TENSORS,
    ) -> None:
        self.task, self.sums = data.task, dict(sums)
        self.named = MetricStates(named) if data.task.named else None
        self.logs = None
        if method is not None and method.module is not None:
            self.logs = ModuleLogs(split, data.seed, method.round, logs)

    def add_named(self, number: int, outputs: Any, target: Tensor, whose: str = "") -> None:
        """Add the states of the metrics that the user has named after one batch."""
        if self.named is not None:
            forms = self.task.metric_inputs(outputs, target)
            for one in self.task.named:
                self.named.add(number, one.name, one.state(forms), whose)

    def add_logs(
        self, fabric: Fabric, number: int, network: nn.Module, inputs: Any, target: Tensor
    ) -> None:
        """Have a LightningModule's own step log for one batch."""
        if self.logs is not None:
            with fabric.autocast():
                self.logs.add(number, network, (inputs, target), len(target), number % MAX_PARTS)

    def with_logs(self, found: dict[str, float], method: Method) -> dict[str, float]:
        """Return metrics of the split, and beside them what a LightningModule's own step has logged
        on all ranks."""
        if self.logs is None:
            return found
        return self.logs.beside(found, collectives.gather_parts(self.logs.states.tensors), method)


def on_test_set(
    fabric: Fabric,
    method: Method,
    data: FederatedData,
    states: States = NO_STATES,
    holders: Mapping[int, int] = NO_HOLDERS,
    *,
    answers: bool = True,
    elsewhere: ClientSums = NOTHING_ELSEWHERE,
) -> tuple[dict[str, float], tuple[Tensor, Tensor] | None]:
    """Evaluate the global model, or each client's own, on the global test set.

    Args:
        states: what clients keep, by id.
        holders: the rank that has a client's state, by id, where not every rank has all.
        answers: whether all outputs are collected; the metrics are sums over batches in any case.
        elsewhere: what all clients measured on other machines; then there are no answers.

    Returns:
        Metrics ``test/<metric>``; with ``answers`` the probabilities ``[n, C]`` and the targets
        ``[n]``, in the order of the test set, else None.
    """
    task = data.task
    columns: list[tuple[int, tuple[Tensor, ...]]] | None = None
    if elsewhere.test is None:
        columns = [] if answers else None
        tally = tally_test_set(fabric, method, data, states, holders, columns)
    else:
        tally = Tally(method, data, "test", elsewhere.test, elsewhere.named, elsewhere.test_logs)
    every = collectives.gather_parts(tally.sums)
    means = task.finish(averages(_totals(every), method.counted_metrics))
    # what a network measures of its own passes has a family of its own
    metrics = {name if "/" in name else f"test/{name}": float(of) for name, of in means.items()}
    named = {} if tally.named is None else collectives.gather_parts(tally.named.tensors)
    if is_test_set_dealt(method, data):
        metrics |= _personal(task, every, named) | _global(fabric, method, data)
    if named:
        metrics |= {f"test/{name}": of for name, of in values_of_all(task.named, named).items()}
    metrics = tally.with_logs(metrics, method)
    if columns is None:
        return metrics, None
    outputs, target = gather_columns(columns)
    if is_test_set_dealt(method, data):
        order = np.argsort(deal_test_set(data), kind="stable")
        back = torch.from_numpy(np.argsort(order))
        outputs, target = outputs[back], target[back]
    return metrics, (outputs.softmax(1), target)


def tally_test_set(
    fabric: Fabric,
    method: Method,
    data: FederatedData,
    states: States = NO_STATES,
    holders: Mapping[int, int] = NO_HOLDERS,
    columns: list[tuple[int, tuple[Tensor, ...]]] | None = None,
) -> Tally:
    """Return what this rank's batches of the test set give.

    Args:
        holders: as of :func:`on_test_set`; a client of another machine has the rank -1.
        columns: takes outputs and targets of each batch with its number; None: they are not kept.
    """
    method.unsent.restore()
    if is_test_set_dealt(method, data):
        batches = _dealt_batches(method, data, deal_test_set(data), states, holders)
    else:
        network = method.deploy()
        batches = ((number, network, batch) for number, batch in share(data.test_batches()))
    tally = Tally(method, data, "test")
    for number, network, (inputs, target) in batches:
        with rng.torch_stream(method.seed, "test batch", method.round, number):
            outputs, found = evaluate_batch(fabric, data.task, network, inputs, target)
        tally.sums |= _of_batch(number, found)
        if columns is not None:
            columns.append((number, (outputs, target)))
        tally.add_named(number, outputs, target)
        tally.add_logs(fabric, number, network, inputs, target)
    return tally


def is_test_set_dealt(method: Method, data: FederatedData) -> bool:
    """Return whether the test set is dealt to the clients, for their own models. Where they are on
    other machines with their data, nobody has both, and the model of a newcomer is evaluated."""
    return method.personalised and not data.apart


@torch.no_grad()
def evaluate_batch(
    fabric: Fabric, task: Task, network: nn.Module, inputs: Any, target: Tensor
) -> tuple[Any, Sums]:
    """Return the outputs of a batch, and sum and weight of each metric by example, ``[B]``; those
    that the network measures of its own passes are among them."""
    with evaluation_mode(network), fabric.autocast():
        if not isinstance(network, MeasuredNetwork):
            return task.evaluate(network, inputs, target)
        network.expect(target)
        outputs, found = task.evaluate(network, inputs, target)
        one = torch.ones(len(target), dtype=torch.float64)
        return outputs, found | {
            name: (values.double().cpu(), one) for name, values in network.measured().items()
        }


def _of_batch(number: int, found: Sums) -> dict[str, Tensor]:
    """Return sum and weight of each metric over a batch, by ``<number>/<metric>``, float64 ``[2]``
    on the CPU."""
    return {
        f"{number}/{name}": torch.stack([total.sum(), weight.sum()]).cpu()
        for name, (total, weight) in found.items()
    }


def _totals(sums: Mapping[str, Tensor]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Add up what all ranks found, in the order of the batches and not of the ranks.

    Args:
        sums: by ``<number of the batch>/<metric>``, sum and weight, float64 ``[2]``.
    """
    found = by_metric({key: pair[None] for key, pair in sums.items()})
    totals = {name: torch.from_numpy(rows).sum(0).numpy() for name, rows in sorted(found.items())}
    return {name: (total[0], total[1]) for name, total in totals.items()}


def _personal(
    task: Task, sums: Mapping[str, Tensor], named: Mapping[str, Tensor]
) -> dict[str, float]:
    """Return the mean over clients of the task's metrics of each client's own model, on the test
    examples that are dealt to it: every client with a value counts once, however many they are."""
    owners = {key: int(key.partition("/")[0]) // MAX_PARTS for key in sums}
    rows = {key: torch.cat([sums[key].new_tensor([id]), sums[key]]) for key, id in owners.items()}
    found = _of_clients(task, by_metric({key: row[None] for key, row in rows.items()}))
    parts = [(key.split("||", 1), state) for key, state in named.items()]
    whose = {f"{at}|{int(at) // MAX_PARTS}|{rest}": state for (at, rest), state in parts}
    found |= values_of_clients(task.named, whose)
    wanted = [name for name in task.per_client if found.get(name)]
    return {f"personal/{name}": float(np.mean([*found[name].values()])) for name in wanted}


def _global(fabric: Fabric, method: Method, data: FederatedData) -> dict[str, float]:
    """Return the task's metrics of a personalised method's one model for all, on the whole test
    set."""
    if not method.has_global_model:
        return {}
    found = of_network(fabric, method.deploy(), data, shared=True)
    return {f"global/{name}": found[name] for name in data.task.per_client if name in found}


def of_network(
    fabric: Fabric, network: nn.Module, data: FederatedData, *, shared: bool = False
) -> dict[str, float]:
    """Return the task's metrics of one network on the whole test set, evaluated on this rank alone,
    or shared by all."""
    tally = Tally(None, data, "test")
    for number, (inputs, target) in (share if shared else enumerate)(data.test_batches()):
        with rng.torch_stream(data.seed, "test batch", 0, number):
            outputs, found = evaluate_batch(fabric, data.task, network, inputs, target)
        tally.sums |= _of_batch(number, found)
        tally.add_named(number, outputs, target)
    sums, named = tally.sums, {} if tally.named is None else tally.named.tensors
    if shared:
        sums, named = collectives.gather_parts(sums), collectives.gather_parts(named)
    means = data.task.finish(averages(_totals(sums)))
    return {**{n: float(of) for n, of in means.items()}, **values_of_all(data.task.named, named)}


def averages(sums: Mapping[str, Any], counted: Collection[str] = ()) -> dict[str, np.ndarray]:
    """Return the sum over the weight of each metric, and the sum alone of those that are counted.

    Args:
        sums: sum and weight, arrays or tensors on the CPU of one shape, by metric.
        counted: metrics that are added up, such as how many sequences were refused.
    """
    return {
        name: np.asarray(total if name in counted else total / weight)
        for name, (total, weight) in sums.items()
    }


def _dealt_batches(
    method: Method,
    data: FederatedData,
    owner: np.ndarray,
    states: States,
    holders: Mapping[int, int],
) -> Iterator[tuple[int, nn.Module, tuple[Any, Tensor]]]:
    """Yield the test examples of each client of this rank's share with the model of that client."""
    for id in share_clients(np.unique(owner).tolist(), holders):
        network = method.deploy(data.client(id, states.get(id)))
        mine = torch.from_numpy(np.flatnonzero(owner == id)).to(data.device)
        for part, index in enumerate(mine.split(data.evaluation_batch)):
            batch = data.inputs("test", index), data.test_target[index]
            yield id * MAX_PARTS + part, network, batch


def validate(
    fabric: Fabric,
    method: Method,
    data: FederatedData,
    states: States = NO_STATES,
    holders: Mapping[int, int] = NO_HOLDERS,
    elsewhere: ClientSums = NOTHING_ELSEWHERE,
) -> tuple[dict[str, dict[int, float]], dict[str, float]]:
    """Evaluate each client's own validation examples, where it has any.

    Args:
        elsewhere: what all clients measured on other machines.

    Returns:
        ``task.per_client`` metrics, the loss and what a network measures of its own passes, means
        over a client's examples, by metric and then by the client's id; and ``val/*``: their mean
        and spread over clients, and what the ``validation_step`` of a LightningModule logs.
    """
    task = data.task
    if elsewhere.validation is None:
        tally = tally_validation(fabric, method, data, states, holders)
    else:
        tally = Tally(method, data, "val", elsewhere.validation, logs=elsewhere.val_logs)
    values: dict[str, dict[int, float]] = {}
    if found := by_metric(collectives.gather_parts(tally.sums)):
        each: dict[str, dict[int, float]] = {one.name: {} for one in task.named}
        each |= _of_clients(task, found)
        measured = [name for name in each if "/" in name]
        wanted = dict.fromkeys((*task.per_client, *({"loss"} & each.keys()), *measured))
        if tally.named is not None:
            each |= values_of_clients(task.named, collectives.gather_parts(tally.named.tensors))
        values = {name: each[name] for name in wanted}
    return values, tally.with_logs(_spread_over_clients(data, values), method)


def _of_clients(task: Task, sums: Mapping[str, np.ndarray]) -> dict[str, dict[int, float]]:
    """Return the mean over examples of each client, by metric and by the client's id, where its
    examples have a weight in the metric; ``sums`` are those of :func:`by_metric`."""
    means, weighed = {}, {}
    ids = np.unique(np.concatenate([rows[:, 0] for rows in sums.values()]).astype(np.int64))
    for name, rows in sums.items():
        at, count = np.searchsorted(ids, rows[:, 0]), len(ids)
        total, weight = (np.bincount(at, part, minlength=count) for part in rows[:, 1:].T)
        weighed[name] = weight > 0
        means[name] = total / np.where(weighed[name], weight, np.nan)
    of_task = [of for name, of in weighed.items() if "/" not in name]
    values: dict[str, dict[int, float]] = {}
    for name, of in task.finish(means).items():
        # a function of other metrics has a value where they have
        has_one = weighed.get(name, np.logical_and.reduce(of_task))
        values[name] = dict(zip(ids[has_one].tolist(), of[has_one].tolist(), strict=True))
    return values


def tally_validation(
    fabric: Fabric,
    method: Method,
    data: FederatedData,
    states: States = NO_STATES,
    holders: Mapping[int, int] = NO_HOLDERS,
    clients: Iterable[int] | None = None,
) -> Tally:
    """Return what this rank's batches of validation examples give.

    Args:
        clients: evaluate the examples of these clients, each by itself; None: those of all.
    """
    method.unsent.restore()
    tally = Tally(method, data, "val")
    batches = validation_batches(method, data, states, holders, clients)
    for number, network, (inputs, target, owners) in batches:
        with rng.torch_stream(method.seed, "validation batch", method.round, number):
            outputs, found = evaluate_batch(fabric, data.task, network, inputs, target)
        ids, index = torch.unique(owners, return_inverse=True)
        for name, (total, weight) in found.items():
            pairs = torch.stack([total, weight], 1)
            rows = pairs.new_zeros(len(ids), 2).index_add_(0, index.to(pairs.device), pairs)
            tally.sums[f"{number}/{name}"] = torch.cat([ids.to(rows)[:, None], rows], 1)
        for id in ids.tolist() if tally.named is not None else ():
            mine = (owners == id).to(target.device)
            rows_of = mine.repeat(data.task.outputs_per_example)
            own = tree_map(lambda part, rows_of=rows_of: part[rows_of], outputs)
            tally.add_named(number, own, target[mine], str(id))
        tally.add_logs(fabric, number, network, inputs, target)
    return tally


def by_metric(sums: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """Return the rows of each metric, float64 ``[n, 3]`` or ``[n, 2]``, in the order of the batches'
    numbers, of ``sums`` as a :class:`Tally` has them, with or without the id."""
    found: dict[str, list[tuple[int, Tensor]]] = {}
    for key, rows in sums.items():
        number, _, name = key.partition("/")
        found.setdefault(name, []).append((int(number), rows))
    return {
        name: torch.cat([rows.cpu() for _, rows in sorted(some, key=itemgetter(0))]).numpy()
        for name, some in found.items()
    }


def _spread_over_clients(
    data: FederatedData, validated: Mapping[str, dict[int, float]]
) -> dict[str, float]:
    """Return mean and spread over clients of the ``task.per_client`` metrics that :func:`validate`
    found, as ``val/*``."""
    task = data.task
    metrics: dict[str, float] = {}
    for name in task.per_client if validated else ():
        of_clients = validated[name]
        spread = client_spread(
            list(of_clients.values()),
            data.val_sizes[list(of_clients)],
            metric=name,
            higher_is_better=name not in task.lower_is_better,
            is_hits=name in task.hits,
        )
        # the number of clients is that of the first metric
        metrics = {**metrics, **spread, **metrics}
    return metrics


def validation_batches(
    method: Method,
    data: FederatedData,
    states: States,
    holders: Mapping[int, int],
    clients: Iterable[int] | None = None,
) -> Iterator[tuple[int, nn.Module, tuple[Any, Tensor, Tensor]]]:
    """Yield this rank's share of the validation batches, each with the model that is asked."""
    if method.personalised or clients is not None:
        ids = data.validating.tolist() if clients is None else clients
        for id in share_clients(ids, holders):
            client = data.client(id, states.get(id))
            network = method.deploy(client if method.personalised else None)
            for part, batch in enumerate(data.val_batches([client])):
                yield id * MAX_PARTS + part, network, batch
    else:
        network = method.deploy()
        for number, batch in share(data.val_batches()):
            yield number, network, batch
