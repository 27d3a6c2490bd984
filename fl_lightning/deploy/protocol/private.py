"""Client-level privacy in a deployment: what a node takes from its server.

A node clips with its own settings and draws its noise from its own operating system. Of a round it
is told C, which may follow a quantile, and the size of the cohort: both change how much noise a
client adds, so a node checks them. How many clients there are it believes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from fl_lightning import rng
from fl_lightning.aggregation.private import SUMS_FILE, PrivateAggregation
from fl_lightning.errors import InputError
from fl_lightning.privacy import NoisySums


def terms_of(privacy: PrivateAggregation) -> dict[str, Any]:
    """Return what server and node must agree on, as JSON: all settings, and what is accounted."""
    accountant = privacy.accountant
    return {**asdict(privacy.settings), "clients": accountant.clients, "cohort": accountant.cohort}


def uncounted(privacy: PrivateAggregation | None, given: int) -> str:
    """Return why a node that has taken part in so many noisy sums of the run cannot go on with it:
    the server knows of fewer, as after its run directory was put back from a copy. Empty where it
    can.

    A node is not believed, or one could end the run by a large number: it is refused, and whoever
    runs the server says which of the two is right.
    """
    if privacy is None or privacy.randomness is rng.stream or given <= privacy.releases:
        return ""
    return (
        f"it has taken part in {given} noisy sums of this run, and {SUMS_FILE} of the run directory counts "
        f"{privacy.releases}, so epsilon would be too low; put the newer run directory back, or add the line "
        f"{given},0 to that file and continue"
    )


def take_up(privacy: PrivateAggregation, header: Mapping[str, Any], sums: NoisySums) -> None:
    """Take C of a round from the message that orders it, and write down that the node takes part in
    its sum.

    Args:
        privacy: the node's own.
        header: with the numbers of the round, of its noisy sum and of its cohort, and C.
        sums: those of the run that this node has taken part in. A server that repeats a round, or
            has lost its own count, draws other noise: each order counts as one more sum, whatever
            its number.

    Raises:
        InputError: the sum is beyond the budget, the cohort is larger than the one that is
            accounted, so that a client's share of the noise would be too small, or C is none that
            an honest server has.
    """
    settings, round = privacy.settings, int(header["round"])
    number = max(round, int(header.get("noisy_sum", 0)), sums.count + 1)
    epsilon, most = privacy.accountant.epsilon(number), settings.max_epsilon
    if most is not None and epsilon > most:
        raise InputError(
            f"round {round} of a private run",
            f"with it, noisy sum {number} here, epsilon is {epsilon:.4g}, above max_epsilon {most:g}",
            "end the run before it",
        )
    cohort, clip_norm = int(header["cohort"]), float(header["clip_norm"])
    if not 1 <= cohort <= privacy.cohort:
        raise InputError(
            f"a cohort of {cohort} clients",
            f"rounds of {privacy.cohort} are accounted",
            "ask no more",
        )
    fixed = not settings.is_adaptive and clip_norm != settings.clip_norm
    if fixed or not 0 < clip_norm <= privacy.largest_clip:
        raise InputError(
            f"a clip_norm of {clip_norm:g}",
            f"this node's is {settings.clip_norm:g}",
            "clip with that",
        )
    sums.add(number, round)
    privacy.clip_norm = clip_norm
