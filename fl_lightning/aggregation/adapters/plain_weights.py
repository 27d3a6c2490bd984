"""What travels of a method's weights, and what the server makes of the clients' mean: here all of
them, averaged as they are. Rules for low-rank adapters override it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from torch import Tensor, nn

from fl_lightning.aggregation.adapters.cohort import CohortAdapters, SummedProducts, Uploaded
from fl_lightning.aggregation.average import Average
from fl_lightning.aggregation.server_optimizers import ServerOptimizer
from fl_lightning.client import Client
from fl_lightning.config.recorded import Recorded
from fl_lightning.errors import require
from fl_lightning.models.adapters.low_rank import FactorNames
from fl_lightning.wire import Layout, Payload


class Averaging(Protocol):
    """What a rule reads of its method."""

    network: nn.Module
    layout: Layout
    server: dict[str, Tensor]
    trained_values: int
    max_share: float
    server_optimizer: ServerOptimizer | None
    served: Sequence[int]
    seed: int
    round: int

    def decode(self, upload: Payload) -> Tensor: ...

    def shares(self, uploads: Iterable[Payload]) -> list[float]: ...


class PlainWeights(Recorded):
    """FedAvg's rule: every trained value travels, and the server takes the mean of each."""

    name: str = ""
    """What ``--model.adapter_average`` calls it; empty: no rule was asked for."""
    is_linear: bool = True
    """Whether the server needs nothing of uploads but sums of what travels, so that they may be
    masked, noisy or added up elsewhere."""
    sums_products: bool = False
    """Whether it needs nothing of single uploads but mean(BA), which is a sum: under masks clients
    add up their products too, m n values of a layer."""
    takes_ranks: bool = False
    """Whether clients may have adapters of different ranks."""
    moves_base: bool = False
    """Whether it writes the frozen weights of the adapted layers."""
    mover: str = ""
    """Who writes them, and how, as checkpoints have it; empty: nobody."""
    replaces_adapters: bool = False
    """Whether each round starts from new adapters, so that the server has none to step with."""
    personal: str | None = None
    """Names of tensors that stay on their client."""
    growing: frozenset[str] = frozenset()
    """Its entries of ``method.server`` whose length changes from round to round."""
    not_summed: frozenset[str] = frozenset()
    """Its entries of ``method.server`` that no addend is made of, such as who took part when."""
    pairs: Sequence[FactorNames] = ()
    """The layers whose factors it averages."""

    @property
    def sends_parts(self) -> bool:
        """Whether a client starts from, or sends, something else than all of the server's
        weights."""
        return False

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
        ranks = list(getattr(method.network, "client_ranks", ()))
        require(
            self.takes_ranks or len({*ranks}) < 2,
            f"--model.network.rank {ranks} with --model.adapter_average {self.name or 'none'}",
            "it averages factors of one rank",
            "write --model.adapter_average product, stack or padded, or one rank",
        )
        return {}

    # Messages

    def cut(self, weights: Tensor, client: Client) -> Tensor:
        """Return weights ``[P]`` with 0 for those that a client of a rank of its own lacks."""
        return weights

    def broadcast(self, method: Averaging, client: Client) -> Payload:
        """Return what a client is sent at the start of the round."""
        return Payload({"weights": method.server["weights"]})

    def receive(self, method: Averaging, message: Payload, client: Client) -> None:
        """Make the network what this client starts from."""
        method.layout.write(method.network, message.tensor("weights"))

    def sent(self, method: Averaging, client: Client) -> Tensor:
        """Return what the client sends of its weights."""
        return method.layout.to_wire(method.layout.read(method.network))

    def sent_values(self, method: Averaging, client: Client) -> int:
        """Return how many values :meth:`sent` has."""
        return method.layout.size

    def decode(self, method: Averaging, sent: Tensor) -> Tensor:
        """Return a client's weights as one vector of ``layout``, float32 ``[P]``, of what it sent.

        Raises:
            PayloadError: there are more or fewer values than any client sends.
        """
        return sent.float()

    def round_values(self, network: nn.Module, layout: Layout, cohort: int) -> tuple[float, float]:
        """Return how many values a client is sent and sends in a round, before anything is bound:
        of a rule whose rounds differ in a later round, on average.

        Args:
            network: prepared; its tensors need no values.
            layout: what travels of it.
            cohort: clients of a round, K.
        """
        return layout.size, layout.size

    # The server

    def moving(self, method: Averaging) -> Tensor | None:
        """Return which values of ``layout`` clients train this round, bool ``[P]``; None: all."""
        return None

    @property
    def reads_single(self) -> bool:
        """Whether it asks for single uploads, where they can be had."""
        return False

    def whole(self, method: Averaging, mean: Tensor) -> Tensor:
        """Return a vector of ``layout`` whose moving values are the mean of the clients'."""
        return mean

    def singles(self, method: Averaging, uploads: Mapping[int, Payload]) -> Uploaded | None:
        """Return what single clients ended with, where the rule reads that."""
        return None

    def over(self, average: Average) -> Average:
        """Return the average that the server takes, given the method's."""
        return average

    def made(self, mean: Tensor, found: CohortAdapters) -> Tensor:
        """Return what becomes of the clients' mean, float32 ``[P]``, given the mean of their
        products."""
        return mean

    def product_values(self, method: Averaging, upload: Payload) -> Tensor:
        """Return what a client adds to the sum of products under masks, float32 ``[sum of m n]``;
        asked where ``sums_products``."""
        raise NotImplementedError

    def product_shapes(self, method: Averaging) -> list[tuple[int, int]]:
        """Return m and n of each layer whose product clients add up."""
        return []

    def summed(self, method: Averaging, mean: Tensor) -> SummedProducts:
        """Return what the mean of :meth:`product_values` tells of the clients' adapters; asked where
        ``sums_products``."""
        raise NotImplementedError

    def next_entries(self, method: Averaging, before: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return entries of ``method.server`` that are to be other than the mean and the server
        optimiser have made them in this round.

        Args:
            method: with the next state.
            before: the entries before the round.
        """
        return {}

    def beside(self, method: Averaging, found: CohortAdapters, made: Tensor) -> dict[str, Tensor]:
        """Return entries of ``method.server`` that follow from the clients' adapters, and measure
        what was lost.

        Args:
            method: with the next weights.
            found: what the clients ended with.
            made: what the rule made of it, float32 ``[P]``, before any server optimiser.
        """
        return {}

    def write_base(self, method: Averaging) -> None:
        """Make the frozen weights of the network those that the server deploys."""

    def base_moved(self, method: Averaging) -> bool:
        """Return whether the server's frozen weights are no longer those of the start."""
        return False

    def metrics(self, method: Averaging) -> dict[str, float]:
        """Return what was measured in this round."""
        return {}


AS_THEY_ARE = PlainWeights()
"""No rule: weights are averaged as they are."""
