"""What a rule for averages of low-rank adapters is; by default weights travel and are averaged as
they are.

A method has one rule, chosen where it is made. The rule says which values of ``layout`` a client is
sent and sends, what the server makes of the clients' mean, and what it remembers beside the
weights. A rule is one class in one file; the mathematics are in
:mod:`fl_lightning.aggregation.adapters.algebra`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

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
from fl_lightning.aggregation.adapters.vectors import spread, values_of_rank
from fl_lightning.aggregation.averages import Average, RefinedMean
from fl_lightning.client import Client
from fl_lightning.config.recorded import Recorded
from fl_lightning.errors import InputError, require
from fl_lightning.models.adapters.low_rank import FactorNames, factor_pairs, low_rank_layers
from fl_lightning.models.tensors import tensors_of
from fl_lightning.wire import Layout, Payload, PayloadError


class Averaging(Protocol):
    """What a rule reads of its method."""

    network: nn.Module
    layout: Layout
    server: dict[str, Tensor]
    trained_values: int
    served: Sequence[int]
    seed: int
    round: int

    def decode(self, upload: Payload) -> Tensor: ...

    def shares(self, uploads: Iterable[Payload]) -> list[float]: ...


class AdapterAverage(Recorded):
    """A rule from the adapters of a cohort to the next round's. This one is FedAvg's: every trained
    value travels, and the server takes the mean of each."""

    settings_shown = ("--model.adapter_average.{name} {value}", "--model.adapter_average.{name} {value}")

    name: str = ""
    """What ``--model.adapter_average`` calls it; empty: no rule was asked for."""
    is_linear: bool = True
    """Whether the server needs nothing of uploads but sums of what travels, so that they may be
    masked, noisy or added up elsewhere."""
    sums_products: bool = False
    """Whether it needs nothing of single uploads but mean(BA), which is a sum: under masks clients add up
    their products too, m n values of a layer."""
    refines: bool = False
    """Whether it makes something else of the clients' mean, by :meth:`refined`."""
    own_messages: bool = False
    """Whether messages hold something else than all values of ``layout``."""
    takes_ranks: bool = False
    """Whether clients may have adapters of different ranks."""
    needs_both: bool = False
    """Whether it makes, or trains, A as well as B, so that neither may be frozen."""
    moves_base: bool = False
    """Whether it writes the frozen weights of the adapted layers."""
    replaces_adapters: bool = False
    """Whether each round starts from new adapters, so that the server has none to step with."""
    personal: str | None = None
    """Names of tensors that stay on their client."""
    growing: frozenset[str] = frozenset()
    """Its entries of ``method.server`` whose length changes from round to round."""
    not_summed: frozenset[str] = frozenset()
    """Its entries of ``method.server`` that no addend is made of, such as who took part when."""
    ranks: Sequence[int] = ()
    """Client i has rank number i modulo their number; empty: all have the network's."""
    error: tuple[int, float] = (0, 0.0)
    """The last round that was measured, and its factor error."""

    @property
    def sends_parts(self) -> bool:
        """Whether a client starts from, or sends, something else than all of the server's weights."""
        return self.own_messages or bool(self.ranks)

    # The network

    def prepare(self, network: nn.Module) -> None:
        """Change a network that was just built, before it is divided into what travels and what
        stays."""

    def bind(self, method: Averaging, clients: int) -> dict[str, Tensor]:
        """Learn what is averaged, and return the entries of ``method.server`` beside the weights.

        Args:
            method: built, with the server's first weights.
            clients: number of the federation's clients.

        Raises:
            InputError: the network has no adapters of two factors, or others than the rule takes.
        """
        self.pairs = self._pairs(method)
        own = list(getattr(method.network, "client_ranks", ()))
        self.ranks = own if len({*own}) > 1 else []
        require(
            self.takes_ranks or not self.ranks,
            f"--model.network.rank {own} with --model.adapter_average {self.name or 'none'}",
            "it averages factors of one rank",
            "write --model.adapter_average product, stack or padded, or one rank",
        )
        require(
            not self.frozen or not (self.needs_both or self.ranks),
            f"--model.adapter_average {self.name} with {next(iter(self.frozen), '')} frozen",
            "both factors are made anew, and what is frozen stays",
            "write --model.network.adapter lora, or --model.adapter_average frozen_a",
        )
        self.parts = {rank: values_of_rank(method.layout, self.pairs, rank) for rank in {*self.ranks}}
        return {}

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
        lone = [name for name in self.frozen if tensors[name].requires_grad and self.personal is None]
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

    def broadcast(self, method: Averaging, client: Client) -> Payload:
        """Return what a client is sent at the start of the round."""
        weights, part = method.server["weights"], self.part(client)
        return Payload({"weights": weights if part is None else weights[part]})

    def receive(self, method: Averaging, message: Payload, client: Client) -> None:
        """Make the network what this client starts from."""
        method.layout.write(method.network, spread(message.tensor("weights"), self.part(client)))

    def sent(self, method: Averaging, client: Client) -> Tensor:
        """Return what the client sends of its weights."""
        weights, part = method.layout.to_wire(method.layout.read(method.network)), self.part(client)
        return weights if part is None else weights[part]

    def sent_values(self, method: Averaging, client: Client) -> int:
        """Return how many values :meth:`sent` has."""
        part = self.part(client)
        return method.layout.size if part is None else int(part.sum())

    def decode(self, method: Averaging, sent: Tensor) -> Tensor:
        """Return a client's weights as one vector of ``layout``, float32 ``[P]``, of what it sent.

        Raises:
            PayloadError: there are more or fewer values than any client sends.
        """
        if not self.ranks:
            return sent.float()
        fits = [part for part in self.parts.values() if int(part.sum()) == sent.numel()]
        if not fits:
            given = f"weights of {sent.numel()} values"
            raise PayloadError(given, "no rank of this run has so many", "use one network")
        return spread(sent.float(), fits[0])

    def round_values(self, network: nn.Module, layout: Layout, cohort: int) -> tuple[float, float]:
        """Return how many values a client is sent and sends in a round, before anything is bound: of a rule
        whose rounds differ in a later round, on average.

        Args:
            network: prepared; its tensors need no values.
            layout: what travels of it.
            cohort: clients of a round, K.
        """
        ranks = list(getattr(network, "client_ranks", ()))
        if not ranks:
            return layout.size, layout.size
        mean, largest = sum(ranks) / len(ranks), max(ranks)
        factors = sum(r * (m + n) for r, m, n in self.sides(network))
        size = layout.size - factors + factors * mean / largest
        return size, size

    @staticmethod
    def sides(network: nn.Module) -> list[tuple[int, int, int]]:
        """Return r, m and n of each adapted layer: A is ``[r, n]``, and B is ``[m, r]``."""
        return [
            (*layer.a.shape[:1], len(layer.b), layer.a.shape[1])
            for layer in low_rank_layers(network).values()
        ]

    # The server

    def moving(self, method: Averaging) -> Tensor | None:
        """Return which values of ``layout`` the clients of this round train, bool ``[P]``; None:
        all."""
        return None

    @property
    def reads_single(self) -> bool:
        """Whether it asks for single uploads, where they can be had."""
        return bool(self.name)

    def whole(self, method: Averaging, mean: Tensor) -> Tensor:
        """Return a vector of ``layout`` whose moving values are the mean of the clients'."""
        half = self.moving(method)
        if half is None:
            return mean
        vector = method.server["weights"].to(mean, copy=True)
        vector[half] = mean
        return vector

    def singles(self, method: Averaging, uploads: Mapping[int, Payload]) -> Uploaded | None:
        """Return what single clients ended with, where the rule reads that."""
        if not self.reads_single:
            return None
        ended = [uploads[id] for id in sorted(uploads)]
        return Uploaded([method.decode(upload) for upload in ended], method.shares(ended))

    def over(self, average: Average) -> Average:
        """Return the average that the server takes, given the method's."""
        return _ByRule(self) if self.refines else average

    def refined(self, mean: Tensor, vectors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
        """Return what becomes of the clients' mean, float32 ``[P]``.

        Args:
            mean: float32 ``[P]``.
            vectors: of the clients, float32 ``[P]``.
            shares: p.
        """
        return self.made(mean, Uploaded(vectors, shares))

    def made(self, mean: Tensor, found: CohortAdapters) -> Tensor:
        """Return what becomes of the clients' mean, float32 ``[P]``, given the mean of their products."""
        return mean

    def product_values(self, method: Averaging, upload: Payload) -> Tensor:
        """Return what a client adds to the sum of products under masks, float32 ``[sum of m n]``."""
        return products_in(self.pairs_in(method.layout, method.decode(upload)))

    def summed(self, method: Averaging, mean: Tensor) -> SummedProducts:
        """Return what the mean of :meth:`product_values` tells of the clients' adapters."""
        pairs = self.pairs_in(method.layout, method.layout.read(method.network))
        matrices = matrices_in(mean, [(len(b), a.shape[1]) for a, b in pairs])
        return SummedProducts(matrices, [len(a) for a, _ in pairs], len(method.served))

    def next_entries(self, method: Averaging, before: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return entries of ``method.server`` that are to be other than the mean and the server
        optimiser have made them in this round.

        Args:
            method: with the next state.
            before: the entries before the round.
        """
        return {}

    def beside(self, method: Averaging, found: CohortAdapters, made: Tensor) -> dict[str, Tensor]:
        """Return entries of ``method.server`` that follow from the clients' adapters, and measure what was
        lost.

        Args:
            method: with the next weights.
            found: what the clients ended with.
            made: what the rule made of it, float32 ``[P]``, before any server optimiser.
        """
        self.measure(method, found, self.pairs_in(method.layout, made))
        return {}

    def write_base(self, method: Averaging) -> None:
        """Make the frozen weights of the network those that the server deploys."""

    def base_moved(self, method: Averaging) -> bool:
        """Return whether the server's frozen weights are no longer those of the start."""
        return False

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
        products = found.products(self, method.layout)
        for true, pair, names in zip(products, made, self.pairs, strict=True):
            whole += (names.scaling * algebra.norm(true)) ** 2
            lost += (names.scaling * algebra.norm(algebra.joined(true, algebra.minus(pair)))) ** 2
        if whole > 0:
            self.error = method.round, (lost / whole) ** 0.5

    def metrics(self, method: Averaging) -> dict[str, float]:
        """Return what was measured in this round."""
        round, error = self.error
        return {"average/factor_error": error} if round == method.round and round > 0 else {}


class _ByRule(RefinedMean):
    """What a rule makes of the mean."""

    def __init__(self, rule: AdapterAverage) -> None:
        self.rule = rule

    def refined(self, mean: Tensor, vectors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
        return self.rule.refined(mean, vectors, shares)


AS_THEY_ARE = AdapterAverage()
"""No rule: weights are averaged as they are."""
