"""Sums for client-level differential privacy: of clipped messages, with Gaussian noise, divided by
a number that is public.

What one client adds to all sums of a round together is its message. A vector that has a ``start``
enters as its difference from it, every other one as it is. The message is clipped as a whole
(:func:`fl_lightning.privacy.clip_together`) and weighs 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fl_lightning.aggregation.average import Average
from fl_lightning.aggregation.averages import WEIGHTED_MEAN
from fl_lightning.aggregation.exact_sum import fraction_bits
from fl_lightning.aggregation.sums import Addend, Sums
from fl_lightning.distributed.collectives import gather_bytes, gather_parts, rank, world_size
from fl_lightning.errors import MisuseError
from fl_lightning.privacy import clip_together

COUNT = "privacy/below_clip_norm"
"""The sum of b_k - 1/2 over the clients, b_k = 1 where a message is no longer than C; it is there
where C follows a quantile."""


class PrivateSums(Sums):
    """Sums of clipped messages, as the server's half of a method reads them.

    Means are start + (sum + noise) / cohort: the divisor is the size of the cohort that was asked,
    not the number of clients that returned, which can depend on a client's data where uploads are
    refused or clients give up. Clients that did not return thus count as ones that learned nothing.

    Args:
        totals: noisy sums of clipped messages over all processes, by name, float64 ``[P]``.
        starts: what means are counted from, by name, ``[P]``; of the others zero.
        cohort: clients that were asked.
        deviation: of the noise on each value of the totals.
    """

    def __init__(
        self,
        totals: Mapping[str, Tensor],
        starts: Mapping[str, Tensor],
        cohort: int,
        deviation: float = 0.0,
    ) -> None:
        super().__init__(WEIGHTED_MEAN, cohort)
        self.deviation = deviation
        self._totals, self._starts = totals, starts

    def __iter__(self) -> Iterator[str]:
        yield from (name for name in self._totals if name != COUNT)

    def total(self, name: str) -> Tensor:
        """Return the noisy sum over the clients; float64 ``[P]``."""
        return self._totals[name]

    def mean(self, name: str) -> Tensor:
        """Return the noisy mean; float32 ``[P]``."""
        mean = self._totals[name] / self.cohort
        return (self._starts[name] + mean if name in self._starts else mean).to(torch.float32)

    @property
    def share_below(self) -> float:
        """The noisy share of clients whose message is no longer than C; those that did not return
        count half."""
        return float(self._totals[COUNT]) / self.cohort + 0.5


def clip_addends(
    addends: Mapping[str, Addend], average: Average, clip_norm: float, cohort: int
) -> tuple[dict[str, Addend], float]:
    """Return what a client adds once its message is clipped, and the norm that the message had.

    The values are multiples of 2^-F, F that of a sum over ``cohort`` clients, and have no
    ``start``.

    Raises:
        MisuseError: an addend has another weight than 1.
    """
    names, messages = sorted(addends), []
    for name in names:
        addend = addends[name]
        if addend.weight != addend.most:
            raise MisuseError(
                f"addend {name!r} of weight {addend.weight} / {addend.most} with trainer.privacy",
                "all clients weigh 1, or one could move the sum by more than its clip",
                "give all weight 1, or give the reason in refuses['privacy']",
            )
        if addend.start is None:
            messages.append(addend.values)
        else:
            bounded = average.bounded(addend.values, addend.start)
            messages.append(bounded.to(torch.float64) - addend.start)
    clipped, norm = clip_together(messages, clip_norm, fraction_bits(cohort))
    return {name: Addend(vector) for name, vector in zip(names, clipped, strict=True)}, norm


def common_starts(addends: Sequence[Mapping[str, Addend]]) -> dict[str, Tensor]:
    """Return what the sums start from, by name, on all ranks, also on one without an upload.

    Raises:
        MisuseError: clients start from different vectors, so that the mean of their differences has
            no start.
    """
    starts: dict[str, Tensor] = {}
    for of_client in addends:
        note_starts(starts, of_client)
    return starts_of_ranks(starts)


def note_starts(starts: dict[str, Tensor], addends: Mapping[str, Addend]) -> None:
    """Take what one client's addends start from into ``starts``, by name.

    Raises:
        MisuseError: another client starts from something else.
    """
    for name, addend in addends.items():
        if addend.start is None:
            continue
        known = starts.setdefault(name, addend.start)
        if known is not addend.start and not torch.equal(known, addend.start):
            raise MisuseError(
                f"addends {name!r} with different starts",
                "a private mean is one start plus the mean of the clients' differences from it",
                "give all the same start, or give the reason in refuses['privacy']",
            )


def starts_of_ranks(starts: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return what the sums of all ranks start from, also on one without an upload."""
    if world_size() == 1:
        return starts
    names = [of_rank.decode().split("\n") for of_rank in gather_bytes("\n".join(starts).encode())]
    mine = {
        name: start
        for name, start in starts.items()
        if rank() == [name in of for of in names].index(True)
    }
    return gather_parts(mine)
