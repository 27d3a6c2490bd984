"""The server's half of a method that needs nothing but sums of uploads; by default FedAvg's mean."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from fl_lightning.methods.averaging import Average, capped
from fl_lightning.methods.sums import Addend, Sums, sums_of
from fl_lightning.support.overriding import overrides
from fl_lightning.wire import Layout, Payload

SHARE_UNITS = 2**30
"""Shares that ``max_share`` bounds are integers in units of 1 / 2^30."""


class SummingServer:
    """Makes the next server state of the sums over the clients that returned.

    What is not overridden is FedAvg: w <- sum_k p_k w_k.
    """

    average: Average
    max_share: float
    server: dict[str, Tensor]
    layout: Layout
    cohort: int = 1
    """Clients that were asked to take part in this round."""
    served: Sequence[int] = ()
    """Ids of the clients that were sent this round's broadcast, and keep what they made of it."""
    most_examples: int = 1
    """The largest n_k of the enrolled clients."""

    @abstractmethod
    def decode(self, upload: Payload) -> Tensor:
        """Return a client's weights after its round, float32 ``[P]``."""

    def aggregate(self, uploads: Mapping[int, Payload]) -> None:
        """Make the next server state from what came back: client id -> payload, never empty.

        A method whose server needs sums alone overrides :meth:`addends` and :meth:`next_state` instead.
        """
        self.next_state(self.add_up(uploads, {id: examples_in(upload) for id, upload in uploads.items()}))

    def add_up(self, uploads: Mapping[int, Payload], examples: Mapping[int, int]) -> Sums:
        """Return the sums over some of the clients that returned.

        Args:
            uploads: client id -> payload, of some clients.
            examples: client id -> n_k, of all clients that returned.
        """
        weights = self.bounded_weights(examples)
        addends = [self.addends(upload, id, weights[id]) for id, upload in uploads.items()]
        return sums_of(addends, self.average, max(self.cohort, len(examples)))

    @property
    def is_sum(self) -> bool:
        """Whether the server needs nothing but sums over the uploads, so that nobody has to see them all."""
        return self.average.is_sum and not overrides(self, SummingServer, "aggregate")

    def addends(self, upload: Payload, client_id: int, weight: int) -> dict[str, Addend]:
        """Return what an upload adds to the server's sums, by name.

        Args:
            upload: of one client.
            client_id: whose it is.
            weight: n_k, within the bound of ``max_share``; an integer of at most ``self.largest_weight``.
        """
        start = self.starts()["weights"]
        return {"weights": Addend(self.decode(upload), weight, self.largest_weight, start)}

    def starts(self) -> Mapping[str, Tensor]:
        """Return the ``start`` of those addends that have one, by name.

        With ``trainer.privacy`` a server adds it to a mean of differences, also where it has seen no upload.
        """
        return {"weights": self.server["weights"].float()}

    def summing_state(self) -> Mapping[str, Tensor]:
        """Return the entries of ``server`` that ``check`` and ``addends`` read.

        In a deployment with a secure sum, clients make their addends themselves; they are sent those entries
        that their broadcast does not hold.
        """
        return self.server

    def next_state(self, sums: Sums) -> None:
        """Make the next server state of the sums over the clients that returned."""
        self.server["weights"] = self.layout.to_wire(sums.mean("weights"))

    @property
    def largest_weight(self) -> int:
        """The largest weight that a client can have: the largest n_k of the enrolled clients, which everybody
        knows before anybody has answered."""
        return self.most_examples if self.max_share == 1 else SHARE_UNITS

    def bounded_weights(self, examples: Mapping[int, int]) -> dict[int, int]:
        """Return the weights of clients that returned, by id: n_k, or where ``max_share`` bounds them, their
        shares in units of 2^-30.

        Args:
            examples: n_k by id.
        """
        if self.max_share == 1:
            return dict(examples)
        shares = self._capped([examples[id] for id in sorted(examples)])
        units = [max(1, round(share * SHARE_UNITS)) for share in shares]
        return dict(zip(sorted(examples), units, strict=True))

    def shares(self, uploads: Iterable[Payload]) -> list[float]:
        """p_k = n_k / sum n_k over the clients that returned, none above ``max_share``."""
        return self._capped([examples_in(upload) for upload in uploads])

    def _capped(self, examples: Sequence[int]) -> list[float]:
        return capped([n / sum(examples) for n in examples], self.max_share)


def examples_in(upload: Payload) -> int:
    """Return n_k of an upload."""
    return int(upload.tensor("examples"))
