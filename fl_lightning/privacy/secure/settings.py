"""The settings of a secure sum, and the graph of who shares secrets with whom."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated, ClassVar, Literal

from fl_lightning.config.constraints import check_fields, within
from fl_lightning.errors import require

PHASES = ("keys", "shares", "masked", "unmask")
"""The phases of a round, in order."""

THRESHOLD = within(
    "(0.5, 1]",
    "it lies in (0.5, 1]: half of the clients could give the server shares of one secret of a client "
    "and the other half those of the other",
    0.67,
)


@dataclass(frozen=True)
class SecureSum:
    """A sum of which the server learns nothing but the total.

    Args:
        threshold: share of the cohort that must stay until the end of a round, in (0.5, 1]; with
            fewer the round is void. The same share of a client's neighbours reconstructs its masks.
        neighbours: with how many clients each one shares secrets and masks: ``all``, or an even
            number of 2 or more, with which the cost of a client does not grow with the cohort.
    """

    threshold: Annotated[float, THRESHOLD] = 0.67
    neighbours: int | Literal["all"] = "all"

    settings_alone: ClassVar[bool] = True
    """In a configuration it is its settings, without a class path."""

    settings_shown: ClassVar = ("--trainer.secure_sum.{name} {value}",) * 2

    def __post_init__(self) -> None:
        check_fields(self)
        k = self.neighbours
        require(
            k == "all"
            or (isinstance(k, int) and not isinstance(k, bool) and k >= 2 and k % 2 == 0),
            f"--trainer.secure_sum.neighbours {k}",
            "it is all, or an even number of 2 or more: half of them on either side of a ring of clients",
            "write --trainer.secure_sum.neighbours all",
        )

    def least_clients(self, cohort: int) -> int:
        """Return how many clients of a cohort must stay until the end of a round, at least 2.

        >>> SecureSum(threshold=0.67).least_clients(100)
        67
        """
        return max(2, math.ceil(self.threshold * cohort - 1e-9))

    def least_shares(self, cohort: int) -> int:
        """Return how many shares reconstruct a secret: t of Shamir's scheme."""
        return self.least_clients(1 + self.degree(cohort))

    def degree(self, cohort: int) -> int:
        """Return how many neighbours a client of a cohort has, at most."""
        return cohort - 1 if self.neighbours == "all" else min(self.neighbours, cohort - 1)

    def client_bytes(self, integers: int, cohort: int) -> tuple[int, int]:
        """Return the bytes that a client sends in a round, and those that it gets beside the
        broadcast, where nobody drops out.

        Args:
            integers: L, all values of all sums and a weight for each sum.
            cohort: clients of the round.

        >>> SecureSum().client_bytes(1000, cohort=11)
        (8922, 1402)
        """
        k = self.degree(cohort)
        return 8 * integers + 64 * k + 282, 124 * k + 162

    def graph(self, ring: Sequence[int]) -> dict[int, list[int]]:
        """Return the neighbours of each client, in order of id.

        Args:
            ring: ids of the clients in a random order; each is joined with as many on its left as
                on its right.

        >>> SecureSum(neighbours=2).graph([4, 1, 2, 7])
        {4: [1, 7], 1: [2, 4], 2: [1, 7], 7: [2, 4]}
        """
        count = len(ring)
        if self.neighbours == "all" or self.neighbours >= count - 1:
            return {id: sorted({*ring} - {id}) for id in ring}
        steps = range(1, self.neighbours // 2 + 1)
        return {
            id: sorted({ring[(at + sign * step) % count] for step in steps for sign in (1, -1)})
            for at, id in enumerate(ring)
        }

    def check_usable(self, cohort: int) -> None:
        """Refuse a secure sum that cannot be made: of one client, or without the cryptography."""
        require_extra()
        self.check_cohort(cohort)

    def check_cohort(self, cohort: int) -> None:
        """Refuse a cohort of one client."""
        require(
            cohort >= 2,
            f"--trainer.secure_sum with {cohort} client in a round",
            "the sum over one client is what it sent",
            "sample more with --trainer.participation, or leave secure_sum out",
        )


def require_extra() -> None:
    """Refuse a secure sum where the cryptography is not installed."""
    packages = {"cryptography": "cryptography", "pycryptodome": "Crypto"}
    missing = [name for name, module in packages.items() if find_spec(module) is None]
    require(
        not missing,
        f"--trainer.secure_sum without {' and '.join(missing)}",
        "keys, shares and masks are those of kept libraries",
        'run pip install "fl_lightning[privacy]"',
    )
