"""The states of a torchmetrics metric, batch by batch: they travel between ranks as tensors and are
merged in the order of the batches, so that a value does not depend on who evaluated which batch.

torchmetrics merges by rank (``sync``), in the order of ranks; ``merge_state`` is refused by metrics
that declare a full state update. Each state says itself how it is reduced, and that is what is done
here.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torchmetrics import Metric

State = dict[str, Tensor]
"""What a metric has kept of one batch: by the path of the metric (one may be made of several), the
name of the state and, of a list that is not concatenated, the position."""


@contextmanager
def quietly() -> Iterator[None]:
    """Hide the warnings of metrics, such as that a client has examples of one class alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def parts_of(module: nn.Module) -> dict[str, Metric]:
    """Return the metrics that a module has, or a metric is made of, by their paths; a metric itself
    has an empty one."""
    from torchmetrics import Metric

    return {path: part for path, part in module.named_modules() if isinstance(part, Metric)}


def keeps_outputs(metric: Metric) -> bool:
    """Return whether a state of the metric is a list, which grows with the examples."""
    return any(
        isinstance(default, list)
        for part in parts_of(metric).values()
        for default in part._defaults.values()
    )


def clear(metric: Metric) -> None:
    """Forget all batches, and keep the metric from talking to other ranks by itself."""
    for part in parts_of(metric).values():
        part.reset()
        part.distributed_available_fn = _never


def _never() -> bool:
    return False


def state_of(metric: Metric) -> State:
    """Return what a metric has kept, on the CPU.

    Raises:
        TypeError: it keeps something else than tensors.
    """
    from torchmetrics.utilities import dim_zero_cat

    found: State = {}
    for path, part in parts_of(metric).items():
        for name, value in part.metric_state.items():
            key = f"{path}.{name}"
            if isinstance(value, Tensor):
                found[key] = value
            elif not all(isinstance(item, Tensor) for item in value):
                raise TypeError(f"{type(part).__name__}.{name} is no tensor and no list of tensors")
            elif value and part._reductions[name] is dim_zero_cat:
                found[key] = dim_zero_cat(value)
            else:
                found |= {f"{key}.{place}": item for place, item in enumerate(value)}
    return {key: value.detach().cpu() for key, value in found.items()}


def value_of(metric: Metric, states: Sequence[Mapping[str, Tensor]]) -> Any:
    """Return the value of a metric over all batches, and leave it cleared.

    Args:
        states: what :func:`state_of` gave for each batch, in the order of the batches; at least
            one.
    """
    clear(metric)
    for path, part in parts_of(metric).items():
        for name, default in part.metric_state.items():
            key = f"{path}.{name}"
            if isinstance(default, Tensor):
                found = [state[key] for state in states]
                reduce = part._reductions[name]
                merged = torch.stack(found) if len(found) > 1 else found[0]
                setattr(
                    part, name, reduce(merged) if callable(reduce) and len(found) > 1 else merged
                )
            else:
                setattr(part, name, [item for state in states for item in _items(state, key)])
        part._update_count = len(states)
    device = metric.device
    try:
        with quietly(), torch.no_grad():
            return metric.to("cpu").compute()
    finally:
        clear(metric.to(device))


def _items(state: Mapping[str, Tensor], key: str) -> list[Tensor]:
    """Return what a batch adds to a state that is a list."""
    if key in state:
        return [state[key]]
    own = [
        name for name in state if name.startswith(f"{key}.") and name[len(key) + 1 :].isdecimal()
    ]
    return [state[name] for name in sorted(own, key=lambda name: int(name.rpartition(".")[2]))]


class MetricStates:
    """The states of several metrics over batches, as tensors under names that can travel.

    Args:
        tensors: of this rank, by ``<number of the batch>|<whose>|<metric>|<state>``.
    """

    def __init__(self, tensors: Mapping[str, Tensor] | None = None) -> None:
        self.tensors = dict(tensors or {})

    def add(self, number: int, metric: str, state: State, whose: str = "") -> None:
        """Keep the state of a metric after one batch.

        Args:
            number: of the batch, among all of all ranks.
            metric: its name.
            whose: the client or the model that the batch is of, where each has a value of its own.
        """
        self.tensors |= {f"{number}|{whose}|{metric}|{key}": value for key, value in state.items()}

    @staticmethod
    def of_metrics(tensors: Mapping[str, Tensor]) -> dict[tuple[str, str], list[State]]:
        """Return the states of each metric in the order of the batches, by whose they are and by
        its name.

        Args:
            tensors: those of all ranks.
        """
        found: dict[tuple[str, str], dict[int, State]] = {}
        for key, value in tensors.items():
            number, whose, metric, name = key.split("|", 3)
            found.setdefault((whose, metric), {}).setdefault(int(number), {})[name] = value
        return {
            who: [batches[number] for number in sorted(batches)] for who, batches in found.items()
        }


def values_of_all(named: Iterable[Any], tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the metrics that the user has named over all batches; none where there are none.

    Args:
        named: the metrics, of the class :class:`fl_lightning.metrics.named.NamedMetric`.
        tensors: states of all ranks, of a :class:`MetricStates`.
    """
    found = MetricStates.of_metrics(tensors)
    return {one.name: one.value(found["", one.name]) for one in named if found}


def values_of_clients(
    named: Iterable[Any], tensors: Mapping[str, Tensor]
) -> dict[str, dict[int, float]]:
    """Return the metrics that the user has named of each client, by metric and by the client's id.
    One whose examples are too few for a metric has none, such as of R2 with a single one.

    Args:
        named, tensors: as of :func:`values_of_all`.
    """
    by_name = {one.name: one for one in named}
    values: dict[str, dict[int, float]] = {}
    for (id, name), batches in MetricStates.of_metrics(tensors).items():
        value = by_name[name].value_if_defined(batches)
        if value is not None:
            values.setdefault(name, {})[int(id)] = value
    return {name: dict(sorted(of.items())) for name, of in sorted(values.items())}
