"""A base that moves: what rounds have added to the frozen weights, on the server, on clients and on
the wire.

The change of a layer ``[m, n]`` since the start is a pair of factors of some rank q, or the whole
matrix where that takes fewer values, q (m + n) >= m n. Changes of several rounds are joined, so
that server and clients, who join the same ones in the same order, have the same bits.

Frozen weights that are narrower than float32 are the start and the whole change, rounded once. What
a round adds to them is therefore not its change, and is measured as it is.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import parent_process

import torch
from torch import Tensor

from fl_lightning.aggregation.adapters.algebra import Pair, joined
from fl_lightning.aggregation.adapters.base import AdapterAverage
from fl_lightning.aggregation.adapters.cohort import CohortAdapters
from fl_lightning.aggregation.adapters.plain_weights import Averaging
from fl_lightning.errors import require
from fl_lightning.models.adapters.low_rank import FactorNames
from fl_lightning.models.tensors import tensors_of

log = logging.getLogger("fl_lightning")

WHOLE = -1
"""The rank of a layer whose change is written as a matrix."""

TOTAL, LAST = "base", "base_step"
"""Names of entries: the change since the start, and that of the last round alone."""
SERVED, MOVED = "base_served", "base_moved"
"""Entries of the server: the last round of each client that counted, int64 ``[N]``, and the round
that moved the base last, int64 ``[]``."""


@dataclass(frozen=True)
class BaseChange:
    """What is added to the frozen weights of some layers.

    Args:
        shapes: ``(m, n)`` of each layer.
        layers: a pair (A, B) whose product is added, or the matrix, float32.
    """

    shapes: Sequence[tuple[int, int]]
    layers: Sequence[Pair | Tensor]

    @classmethod
    def of(cls, shapes: Sequence[tuple[int, int]], pairs: Sequence[Pair]) -> BaseChange:
        """Return the change by a pair for each layer, rounded to float32."""
        return cls(shapes, [_shortest((a.float(), b.float())) for a, b in pairs])

    @classmethod
    def none(cls, shapes: Sequence[tuple[int, int]]) -> BaseChange:
        """Return the change that adds nothing."""
        return cls(shapes, [(torch.zeros(0, n), torch.zeros(m, 0)) for m, n in shapes])

    def plus(self, later: BaseChange) -> BaseChange:
        """Return this change and a later one together."""
        return BaseChange(
            self.shapes, [_sum(*both) for both in zip(self.layers, later.layers, strict=True)]
        )

    def pairs(self) -> list[Pair]:
        """Return a pair for each layer whose product is added, float64."""
        found = []
        for layer in self.layers:
            a, b = layer if isinstance(layer, tuple) else (torch.eye(layer.shape[1]), layer)
            found.append((a.double(), b.double()))
        return found

    def matrix(self, layer: int) -> Tensor:
        """Return what is added to a layer, float32 ``[m, n]``."""
        return _matrix(self.layers[layer])

    def entries(self, name: str) -> dict[str, Tensor]:
        """Return the change as two entries: the rank of each layer, int16, and all values,
        float32."""
        ranks = [len(layer[0]) if isinstance(layer, tuple) else WHOLE for layer in self.layers]
        flat = [
            part.reshape(-1)
            for layer in self.layers
            for part in (layer if isinstance(layer, tuple) else (layer,))
        ]
        return {
            f"{name}_ranks": torch.tensor(ranks, dtype=torch.int16),
            f"{name}_values": torch.cat(flat),
        }

    @classmethod
    def read(
        cls, shapes: Sequence[tuple[int, int]], entries: Mapping[str, Tensor], name: str
    ) -> BaseChange:
        """Return the change that :meth:`entries` wrote under this name; none where there are no
        entries."""
        if f"{name}_ranks" not in entries:
            return cls.none(shapes)
        values, layers, at = entries[f"{name}_values"].float(), list[Pair | Tensor](), 0
        for rank, (m, n) in zip(entries[f"{name}_ranks"].tolist(), shapes, strict=True):
            sizes = [(m, n)] if rank == WHOLE else [(rank, n), (m, rank)]
            parts = []
            for rows, columns in sizes:
                parts.append(values[at : at + rows * columns].view(rows, columns))
                at += rows * columns
            layers.append(parts[0] if rank == WHOLE else (parts[0], parts[1]))
        return cls(shapes, layers)


def _shortest(layer: Pair | Tensor) -> Pair | Tensor:
    """Return a layer's change in the form that takes fewer values."""
    if isinstance(layer, Tensor):
        return layer
    (q, n), m = layer[0].shape, len(layer[1])
    return layer if q * (m + n) < m * n else _matrix(layer)


def _sum(first: Pair | Tensor, second: Pair | Tensor) -> Pair | Tensor:
    if isinstance(first, tuple) and isinstance(second, tuple):
        return _shortest(joined(first, second))
    if isinstance(second, tuple) and not len(second[0]):
        return first
    return _matrix(first) + _matrix(second)


def _matrix(layer: Pair | Tensor) -> Tensor:
    return layer if isinstance(layer, Tensor) else layer[1] @ layer[0]


class MovingBase:
    """The frozen weights of the adapted layers, and what a run has added to them.

    Args:
        pairs: the adapted layers.
        network: whose frozen weights are those of the start.
        clients: number of the federation's clients.
        resend: whether a client is sent the whole change in every round; else that of the last
            round alone, where it kept what came before.
    """

    def __init__(
        self, pairs: Sequence[FactorNames], network: torch.nn.Module, clients: int, resend: bool
    ) -> None:
        tensors = tensors_of(network)
        self.pairs, self.clients, self.resend = pairs, clients, resend
        self.start = {pair.base: tensors[pair.base].detach().cpu().clone() for pair in pairs}
        self.shapes = [_shape(self.start[pair.base], pair.transposed) for pair in pairs]

    def first_entries(self) -> dict[str, Tensor]:
        """Return the entries of ``method.server`` before the first round."""
        served = torch.zeros(self.clients, dtype=torch.int64)
        none = BaseChange.none(self.shapes)
        moved = torch.zeros((), dtype=torch.int64)
        return {**none.entries(TOTAL), **none.entries(LAST), SERVED: served, MOVED: moved}

    def sent(self, server: Mapping[str, Tensor], client: int) -> dict[str, Tensor]:
        """Return the entries of a client's broadcast: the change that it does not have."""
        served, moved = int(server[SERVED][client]), int(server[MOVED])
        if not moved or (served > moved and not self.resend):
            return {}
        name = LAST if served == moved and not self.resend else TOTAL
        return {entry: server[entry] for entry in (f"{name}_ranks", f"{name}_values")}

    def received(self, message: Mapping[str, Tensor], kept: Mapping[str, Tensor]) -> BaseChange:
        """Return the change since the start, of a broadcast and of what the client has kept."""
        if f"{TOTAL}_ranks" in message or self.resend:
            return BaseChange.read(self.shapes, message, TOTAL)
        return BaseChange.read(self.shapes, kept, TOTAL).plus(
            BaseChange.read(self.shapes, message, LAST)
        )

    def grown(
        self, server: Mapping[str, Tensor], step: BaseChange, round: int, served: Sequence[int]
    ) -> dict[str, Tensor]:
        """Return the server's entries after a round that adds ``step``.

        Args:
            server: the entries before it.
            step: what the round adds.
            round: its number.
            served: clients whose uploads counted in it.
        """
        known = server[SERVED].clone()
        known[list(served)] = round
        if not any(
            part.numel() for part in step.entries(LAST).values() if part.dtype == torch.float32
        ):
            return {SERVED: known}
        total = BaseChange.read(self.shapes, server, TOTAL).plus(step)
        moved = torch.tensor(round, dtype=torch.int64)
        return {**total.entries(TOTAL), **step.entries(LAST), SERVED: known, MOVED: moved}

    @torch.no_grad()
    def write(self, network: torch.nn.Module, total: BaseChange) -> None:
        """Make the frozen weights those of the start and a change."""
        tensors = tensors_of(network)
        for number, pair in enumerate(self.pairs):
            tensors[pair.base].copy_(self._weight(number, total))

    def _weight(self, number: int, total: BaseChange) -> Tensor:
        """Return the frozen weight of a layer before it is rounded, float32."""
        pair, change = self.pairs[number], total.matrix(number)
        return self.start[pair.base].float() + (change.T if pair.transposed else change)

    def narrow(self) -> list[FactorNames]:
        """Return the layers whose frozen weights are narrower than float32."""
        return [pair for pair in self.pairs if self.start[pair.base].itemsize < 4]

    def rounding(self, pair: FactorNames, total: BaseChange) -> Tensor:
        """Return what rounding adds to the frozen weight of a layer, float64 ``[m, n]``."""
        weight = self._weight(self.pairs.index(pair), total)
        added = weight.to(self.start[pair.base].dtype).double() - weight.double()
        return added.T if pair.transposed else added


class MovesBase(AdapterAverage):
    """Base of rules that add what the adapters have learnt to the frozen weights."""

    moves_base = True
    is_linear = False
    sums_products = True
    own_messages = True
    resend: bool
    totals: tuple[BaseChange, BaseChange] | None = None
    """The change of narrow frozen weights before and after the round that is measured."""

    def bind(self, method: Averaging, clients: int) -> dict[str, Tensor]:
        super().bind(method, clients)
        modules = method.network.modules()
        owners = Counter(id(weight) for one in modules for weight in one.parameters(recurse=False))
        tensors = tensors_of(method.network)
        for pair in self.pairs:
            layer = pair.a.partition(".lora_")[0].rpartition(".")[2]
            require(
                owners[id(tensors[pair.base])] < 2,
                f"--model.adapter_average {self.name} with an adapter on {layer}",
                "it adds what adapters have learnt to a layer's weight, which another layer shares",
                f"leave {layer} out of targets, or write --model.adapter_average product",
            )
        self.base = MovingBase(self.pairs, method.network, clients, self.resend)
        self.mover = f"{self.name}, resend: {str(self.resend).lower()}"
        entries = self.base.first_entries()
        self.not_summed = frozenset(entries)
        self.growing = frozenset({f"{TOTAL}_values", f"{LAST}_values"})
        if self.base.narrow() and parent_process() is None:
            log.warning(
                "--model.adapter_average %s adds what adapters have learnt to frozen weights of "
                "%s, which round it: average/factor_error says how much is lost, and a base of "
                "dtype: float32 loses nothing",
                self.name,
                str(self.base.start[self.base.narrow()[0].base].dtype).removeprefix("torch."),
            )
        return entries

    def take_base(
        self, method: Averaging, sent: Mapping[str, Tensor], state: dict[str, Tensor]
    ) -> None:
        """Make the frozen weights what a client starts from, by its broadcast and its ``state``,
        which keeps the change that it knows."""
        total = self.base.received(sent, state)
        self.base.write(method.network, total)
        if not self.resend:
            state |= total.entries(TOTAL)

    def moved(self, method: Averaging, step: BaseChange) -> list[Pair]:
        """Return a pair for each layer whose product, scaled as adapters are, is a step, and
        remember what is rounded to what before and after it."""
        before = BaseChange.read(self.base.shapes, method.server, TOTAL)
        self.totals = (before, before.plus(step)) if self.base.narrow() else None
        return [
            (a, b / pair.scaling) for pair, (a, b) in zip(self.pairs, step.pairs(), strict=True)
        ]

    def measure(self, method: Averaging, found: CohortAdapters, made: Sequence[Pair]) -> None:
        super().measure(method, found, made)
        self.totals = None  # as large as the network

    def apart(self, names: FactorNames, left: Pair) -> float:
        if self.totals is None:
            return super().apart(names, left)
        before, after = (self.base.rounding(names, total) for total in self.totals)
        return float((names.scaling * (left[1] @ left[0]) - (after - before)).norm())

    def write_base(self, method: Averaging) -> None:
        total = BaseChange.read(self.base.shapes, method.server, TOTAL)
        self.base.write(method.network, total)

    def base_moved(self, method: Averaging) -> bool:
        return bool(method.server[MOVED])


def _shape(weight: Tensor, transposed: bool) -> tuple[int, int]:
    rows, columns = weight.shape
    return (columns, rows) if transposed else (rows, columns)
