"""The settings of client-level differential privacy: ``trainer.privacy``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from fl_lightning.config.constraints import check_fields, within
from fl_lightning.errors import require


@dataclass(frozen=True, kw_only=True)
class ClientPrivacy:
    """Client-level differential privacy: each client's message is clipped, the sum gets Gaussian
    noise.

    Neighbours are federations of the same size in which one client, with all its data, is another
    one.

    Args:
        noise_multiplier: z; the noise on the sum has the standard deviation z * clip_norm. 0:
            messages are clipped and nothing is private.
        clip_norm: C, largest L2 norm of all that one client adds, over all tensors together; above
            0. With ``target_quantile`` it is C of the first round.
        delta: of the (epsilon, delta) that is accounted, in (0, 1); below 1 / number of clients.
        max_epsilon: the run ends before the round that would exceed it. Null: it is accounted, not
            bounded.
        where: ``central``, the server adds the noise; ``distributed``, each client adds a share of
            it to its integers, before they are added up or masked.
        min_returned: share of a cohort that has to return, in (0, 1], where noise is
            ``distributed``: so many shares are the whole noise, and a round in which fewer return
            changes nothing.
        target_quantile: share of the clients whose norm is below C, in [0, 1]; C follows it from
            round to round. Null: C is fixed.
        clip_learning_rate: how fast C follows, in (0, 10]: C <- C exp(-rate (share below C -
            quantile)).
        count_noise: standard deviation of the noise on the number of clients below C, above z / 2.
            Null: a twentieth of the cohort, or z where that is more.
    """

    noise_multiplier: Annotated[float, within("[0, inf)", "it is 0 or more", "1.0")]
    clip_norm: Annotated[float, within("(0, inf)", "it is above 0", "1.0")]
    delta: Annotated[float, within("(0, 1)", "it is in (0, 1)", "1e-5")] = 1e-5
    max_epsilon: Annotated[float | None, within("(0, inf)", "it is above 0", "8.0")] = None
    where: Literal["central", "distributed"] = "central"
    min_returned: Annotated[float, within("(0, 1]", "it is in (0, 1]", "0.67")] = 0.67
    target_quantile: Annotated[float | None, within("[0, 1]", "it is in [0, 1]", "0.5")] = None
    clip_learning_rate: Annotated[float, within("(0, 10]", "it is in (0, 10]", "0.2")] = 0.2
    count_noise: float | None = None

    settings_alone: ClassVar[bool] = True
    """In a configuration it is its settings, without a class path."""

    settings_shown: ClassVar = ("--trainer.privacy.{name} {value}",) * 2

    def __post_init__(self) -> None:
        check_fields(self)
        z = self.noise_multiplier
        require(
            self.count_noise is None or z / 2 < self.count_noise < math.inf,
            f"--trainer.privacy.count_noise {self.count_noise}",
            "it is above noise_multiplier / 2",
            f"write --trainer.privacy.count_noise {f'{z:g}' if z else 'null'}",
        )
        if self.max_epsilon is not None:
            require(
                z > 0,
                f"--trainer.privacy.noise_multiplier 0 with max_epsilon {self.max_epsilon:g}",
                "without noise no epsilon is finite",
                "write --trainer.privacy.max_epsilon null, or --trainer.privacy.noise_multiplier 1.0",
            )

    @property
    def is_distributed(self) -> bool:
        """Whether clients add the noise."""
        return self.where == "distributed"

    @property
    def is_adaptive(self) -> bool:
        """Whether C follows a quantile of the norms."""
        return self.target_quantile is not None

    def count_deviation(self, cohort: int) -> float:
        """Return sigma_b, the standard deviation of the noise on the number of clients below C."""
        if self.noise_multiplier == 0:
            return 0.0
        return self.count_noise or max(cohort / 20, self.noise_multiplier)

    def least_returned(self, cohort: int) -> int:
        """Return how many clients' shares of noise are the whole noise, where clients add it."""
        return max(1, math.ceil(self.min_returned * cohort - 1e-9))

    def message_multiplier(self, cohort: int) -> float:
        """Return what C is multiplied with for the noise on messages.

        It is z where C is fixed. Where it follows a quantile, the noise on the count is part of z:
        z_m = (z^-2 - (2 sigma_b)^-2)^(-1/2) (Andrew et al., NeurIPS 2021, theorem 1), so that both
        together are as private as one sum with z.
        """
        z = self.noise_multiplier
        if z == 0 or not self.is_adaptive:
            return z
        return (z**-2 - (2 * self.count_deviation(cohort)) ** -2) ** -0.5
