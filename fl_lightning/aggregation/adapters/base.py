"""What a rule for averages of low-rank adapters is; by default factors travel and are averaged as
they are.

A method has one rule, chosen where it is made. The rule says which values of ``layout`` a client is
sent and sends, what the server makes of the clients' mean, and what it remembers beside the
weights. A rule is one class in one file; the mathematics are in
:mod:`fl_lightning.aggregation.adapters.algebra`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from fl_lightning.aggregation.adapters import algebra
from fl_lightning.aggregation.adapters.algebra import Pair
from fl_lightning.aggregation.adapters.cohort import (
    CohortAdapters,
    SummedProducts,
    Uploaded,
    matrices_in,
    products_in,
)
from fl_lightning.aggregation.adapters.plain_weights import Averaging, PlainWeights
from fl_lightning.aggregation.adapters.vectors import spread, values_of_rank
from fl_lightning.aggregation.average import Average
from fl_lightning.aggregation.averages import RefinedMean
from fl_lightning.client import Client
from fl_lightning.errors import InputError, require
from fl_lightning.models.adapters.low_rank import FactorNames, factor_pairs, factor_sides
from fl_lightning.models.tensors import tensors_of
from fl_lightning.wire import Layout, Payload, PayloadError


class AdapterAverage(PlainWeights):
    """A rule from the adapters of a cohort to the next round's. What is not overridden is FedAvg's,
    with what that loses measured."""

    settings_shown = (
        "--model.adapter_average.{name} {value}",
        "--model.adapter_average.{name} {value}",
    )

    refines: bool = False
    """Whether it makes something else of the clients' mean, by :meth:`refined`."""
    own_messages: bool = False
    """Whether messages hold something else than all values of ``layout``."""
    needs_both: bool = False
    """Whether it makes, or trains, A as well as B, so that neither may be frozen."""
    new_factors: bool = False
    """Whether the factors of a round have other directions than those of the one before."""
    ranks: Sequence[int] = ()
    """Client i has rank number i modulo their number; empty: all have the network's."""
    error: tuple[int, float] = (0, 0.0)
    """The last round that was measured, and its factor error."""

    @property
    def sends_parts(self) -> bool:
        return self.own_messages or bool(self.ranks)

    # The network

    def bind(self, method: Averaging, clients: int) -> dict[str, Tensor]:
        entries = super().bind(method, clients)
        self.layout = method.layout
        self.pairs = self._pairs(method)
        require(
            not (self.moves_base and getattr(method.network, "in_4bit", False)),
            f"--model.adapter_average {self.name} with load_in_4bit",
            "it adds what adapters have learnt to the weights of their base, and 4 bits would round it away",
            "write --model.adapter_average product, or load_in_4bit: false",
        )
        own = list(getattr(method.network, "client_ranks", ()))
        self.ranks = own if len({*own}) > 1 else []
        require(
            not self.ranks or len(self.pairs) == len(factor_pairs(method.network)),
            f"--model.network.rank {own} with adapters that stay on their clients",
            "what stays there has one rank",
            "write one rank, or a personal part without adapters",
        )
        require(
            not self.frozen or not (self.needs_both or self.ranks),
            f"--model.adapter_average {self.name} with {next(iter(self.frozen), '')} frozen",
            "both factors are made anew, and what is frozen stays",
            "write --model.network.adapter lora, or --model.adapter_average frozen_a",
        )
        require(
            not (self.ranks and getattr(method, "codes_weights", False)),
            f"--model.network.rank {[*self.ranks]} with --model {type(method).__name__}",
            "it codes all weights, and a client of a rank of its own has a part of them",
            "write one rank, or --model FedAvg",
        )
        self.parts = {
            rank: values_of_rank(method.layout, self.pairs, rank) for rank in {*self.ranks}
        }
        return entries

    def _pairs(self, method: Averaging) -> list[FactorNames]:
        """Return the layers whose factors travel, both or the one that is not frozen."""
        self.frozen: dict[str, Tensor] = {}
        if not self.name:
            return []
        travels = method.layout.shapes
        found = [pair for pair in factor_pairs(method.network) if {pair.a, pair.b} & travels.keys()]
        require(
            found,
            f"--model.adapter_average {self.name} with a {type(method.network).__name__} without LoRA",
            "it averages the factors A and B of adapters",
            "write --model.network llama_tiny, or hf:NAME, with a rank of 1 or more",
        )
        tensors = tensors_of(method.network)
        self.frozen = {
            name: tensors[name].detach().cpu().double()
            for pair in found
            for name in (pair.a, pair.b)
            if name not in travels
        }
        lone = [
            name for name in self.frozen if tensors[name].requires_grad and self.personal is None
        ]
        if lone:
            raise InputError(
                f"--model.personal with --model.adapter_average {self.name}: {lone[0]} stays on its client",
                "it averages both factors of a layer",
                "write --model.adapter_average share_a, or leave personal out",
            )
        return found

    # Messages

    def part(self, client: Client) -> Tensor | None:
        """Return which values of ``layout`` a client has, bool ``[P]``; None: all."""
        return self.parts[self.ranks[client.id % len(self.ranks)]] if self.ranks else None

    def cut(self, weights: Tensor, client: Client) -> Tensor:
        part = self.part(client)
        return weights if part is None else weights * part

    def broadcast(self, method: Averaging, client: Client) -> Payload:
        weights, part = method.server["weights"], self.part(client)
        return Payload({"weights": weights if part is None else weights[part]})

    def receive(self, method: Averaging, message: Payload, client: Client) -> None:
        method.layout.write(method.network, spread(message.tensor("weights"), self.part(client)))

    def sent(self, method: Averaging, client: Client) -> Tensor:
        weights, part = super().sent(method, client), self.part(client)
        return weights if part is None else weights[part]

    def sent_values(self, method: Averaging, client: Client) -> int:
        part = self.part(client)
        return method.layout.size if part is None else int(part.sum())

    def decode(self, method: Averaging, sent: Tensor) -> Tensor:
        if not self.ranks:
            return sent.float()
        fits = [part for part in self.parts.values() if int(part.sum()) == sent.numel()]
        if not fits:
            given = f"weights of {sent.numel()} values"
            raise PayloadError(given, "no rank of this run has so many", "use one network")
        return spread(sent.float(), fits[0])

    def round_values(self, network: nn.Module, layout: Layout, cohort: int) -> tuple[float, float]:
        ranks = list(getattr(network, "client_ranks", ()))
        if not ranks:
            return layout.size, layout.size
        mean, largest = sum(ranks) / len(ranks), max(ranks)
        factors = sum(r * (m + n) for r, m, n in factor_sides(network))
        size = layout.size - factors + factors * mean / largest
        return size, size

    # The server

    @property
    def reads_single(self) -> bool:
        return bool(self.name)

    def whole(self, method: Averaging, mean: Tensor) -> Tensor:
        half = self.moving(method)
        if half is None:
            return mean
        vector = method.server["weights"].to(mean, copy=True)
        vector[half] = mean
        return vector

    def singles(self, method: Averaging, uploads: Mapping[int, Payload]) -> Uploaded | None:
        if not self.reads_single:
            return None
        ended = [uploads[id] for id in sorted(uploads)]
        vectors = [method.decode(upload) for upload in ended]
        return self.uploaded(vectors, method.shares(ended))

    def uploaded(self, vectors: Sequence[Tensor], shares: Sequence[float]) -> Uploaded:
        """Return the adapters in the vectors of single clients, with the clients' shares."""
        return Uploaded([self.pairs_in(self.layout, vector) for vector in vectors], shares)

    def over(self, average: Average) -> Average:
        return _ByRule(self) if self.refines else average

    def refined(self, mean: Tensor, vectors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
        """Return what becomes of the clients' mean, float32 ``[P]``.

        Args:
            mean: float32 ``[P]``.
            vectors: of the clients, float32 ``[P]``.
            shares: p.
        """
        return self.made(mean, self.uploaded(vectors, shares))

    def product_values(self, method: Averaging, upload: Payload) -> Tensor:
        return products_in(self.pairs_in(method.layout, method.decode(upload)))

    def product_shapes(self, method: Averaging) -> list[tuple[int, int]]:
        pairs = self.pairs_in(method.layout, method.layout.read(method.network))
        return [(len(b), a.shape[1]) for a, b in pairs] if self.sums_products else []

    def summed(self, method: Averaging, mean: Tensor) -> SummedProducts:
        pairs = self.pairs_in(method.layout, method.layout.read(method.network))
        matrices = matrices_in(mean, self.product_shapes(method))
        return SummedProducts(matrices, [len(a) for a, _ in pairs], len(method.served))

    def beside(self, method: Averaging, found: CohortAdapters, made: Tensor) -> dict[str, Tensor]:
        self.measure(method, found, self.pairs_in(method.layout, made))
        return {}

    # What it measures

    def pairs_in(self, layout: Layout, vector: Tensor) -> list[Pair]:
        """Return A and B of each layer, float64."""
        named = {**layout.unpack(vector.double()), **self.frozen}
        return [(named[pair.a], named[pair.b]) for pair in self.pairs]

    def measure(self, method: Averaging, found: CohortAdapters, made: Sequence[Pair]) -> None:
        """Remember ||mean(BA) - made|| / ||mean(BA)||, over all layers.

        Args:
            method: the method.
            found: what the clients ended with.
            made: a pair for each layer, whose product is deployed in place of mean(BA).
        """
        lost = whole = 0.0
        products = found.products()
        for true, pair, names in zip(products, made, self.pairs, strict=True):
            whole += (names.scaling * algebra.norm(true)) ** 2
            lost += self.apart(names, algebra.joined(true, algebra.minus(pair))) ** 2
        if whole > 0:
            self.error = method.round, (lost / whole) ** 0.5

    def apart(self, names: FactorNames, left: Pair) -> float:
        """Return how far a layer that is deployed is from what it was to be.

        Args:
            names: the layer.
            left: a pair whose product, scaled as adapters are, is what it lacks.
        """
        return names.scaling * algebra.norm(left)

    def metrics(self, method: Averaging) -> dict[str, float]:
        round, error = self.error
        return {"average/factor_error": error} if round == method.round and round > 0 else {}


class _ByRule(RefinedMean):
    """What a rule makes of the mean."""

    def __init__(self, rule: AdapterAverage) -> None:
        self.rule = rule

    def refined(self, mean: Tensor, vectors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
        return self.rule.refined(mean, vectors, shares)
