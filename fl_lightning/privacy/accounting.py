"""The epsilon of the rounds that a run has done, by Google's ``dp-accounting``."""

from __future__ import annotations

import math
from functools import cached_property
from types import ModuleType
from typing import Any

from fl_lightning.errors import as_bad_input


class RoundAccountant:
    """Accounts rounds of one sum with Gaussian noise over a cohort of fixed size, drawn without
    replacement.

    Neighbours are federations in which one client is replaced by another, so the number of clients
    is public. A replacement moves the sum of clipped messages by up to 2 C, twice its clip: noise
    of z C is z / 2 times that sensitivity, which is what the accountant is given. A client of the
    cohort that drops out, or whose upload is refused, adds a message of zeros; that is within the 2
    C, so rounds with drop-outs are accounted as all others. Where clients add the noise, one that
    does not return adds none, and too few make the round void: who returns then counts as public,
    also where an upload was refused because its data made a client diverge.

    Renyi divergences of the sampled sum are those of Wang, Balle and Kasiviswanathan (AISTATS 2019,
    theorem 27). Where the whole federation takes part, or their bound is worse than that, the sum
    counts as not sampled.

    Args:
        noise_multiplier: z, the standard deviation of the noise on the sum over C.
        clients: n, clients that may be drawn.
        cohort: m, clients that are drawn each round.
        delta: of (epsilon, delta).

    Raises:
        InputError: the package is not installed.
    """

    def __init__(self, noise_multiplier: float, clients: int, cohort: int, delta: float) -> None:
        self.noise_multiplier, self.delta = noise_multiplier, delta
        self.clients, self.cohort = clients, cohort
        self._dp = _dp_accounting()

    def epsilon(self, rounds: int) -> float:
        """Return epsilon at ``delta`` after so many rounds; infinity without noise."""
        if rounds == 0:
            return 0.0
        if self.noise_multiplier == 0:
            return math.inf
        return min(
            float(
                self._dp.rdp.compute_epsilon(
                    accountant.orders, rounds * accountant.rdp, self.delta
                )[0]
            )
            for accountant in self._one_round
        )

    @cached_property
    def _one_round(self) -> list[Any]:
        """Accountants of one round, sampled and not. Divergences add up over rounds; the first
        takes a third of a second, so it is asked once."""
        dp = self._dp
        gaussian = dp.GaussianDpEvent(self.noise_multiplier / 2)
        events = [gaussian]
        if self.cohort < self.clients:
            events.append(dp.SampledWithoutReplacementDpEvent(self.clients, self.cohort, gaussian))
        relation = dp.NeighboringRelation.REPLACE_ONE
        return [
            dp.rdp.RdpAccountant(neighboring_relation=relation).compose(event, 1)
            for event in events
        ]


def _dp_accounting() -> ModuleType:
    rule = "epsilon is computed by dp-accounting, which cannot be imported"
    with as_bad_input(
        "trainer.privacy", rule, 'run: pip install "fl_lightning[privacy]"', ImportError
    ):
        import dp_accounting
        import dp_accounting.rdp
    return dp_accounting
