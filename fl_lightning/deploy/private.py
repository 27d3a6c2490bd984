"""Client-level privacy in a deployment: what is refused, and what a node takes from its server.

A node clips with its own settings and draws its noise from its own operating system. Of a round it is told C,
which may follow a quantile, and the size of the cohort: both change how much noise a client adds, so a node
checks them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from fl_lightning.errors import InputError, require
from fl_lightning.loop import Federation
from fl_lightning.methods.client_privacy import PrivateAggregation
from fl_lightning.methods.summing import SummingServer
from fl_lightning.support.overriding import overrides


def check_private(fed: Federation) -> None:
    """Refuse what a private deployment cannot do.

    Args:
        fed: with ``privacy``.

    Raises:
        InputError: the run has it.
    """
    assert fed.privacy is not None
    require(
        fed.secure_sum is not None or not fed.privacy.settings.is_distributed,
        "trainer.privacy.where distributed without trainer.secure_sum",
        "the server would get single messages with a share of the noise, which is too little by itself",
        "write --trainer.secure_sum.threshold 0.67, or --trainer.privacy.where central",
    )
    method, name = fed.method, type(fed.method).__name__
    require(
        fed.secure_sum is None
        or not overrides(method, SummingServer, "addends")
        or overrides(method, SummingServer, "starts"),
        f"trainer.privacy and trainer.secure_sum with --model {name}",
        f"a server that sees no upload has to know what the addends of {name} start from",
        f"override starts of {name}, as addends is",
    )


def terms_of(privacy: PrivateAggregation) -> dict[str, Any]:
    """Return what server and node must agree on, as JSON: all settings, and what is accounted."""
    accountant = privacy.accountant
    return {**asdict(privacy.settings), "clients": accountant.clients, "cohort": accountant.cohort}


def take_up(privacy: PrivateAggregation, header: Mapping[str, Any]) -> None:
    """Take C of a round from the message that orders it.

    Args:
        privacy: the node's own.
        header: with the numbers of the round and of its cohort, and C.

    Raises:
        InputError: the round is beyond the budget, the cohort is larger than the one that is accounted, so
            that a client's share of the noise would be too small, or C is none that an honest server has.
    """
    settings, round = privacy.settings, int(header["round"])
    epsilon, most = privacy.accountant.epsilon(round), settings.max_epsilon
    if most is not None and epsilon > most:
        raise InputError(
            f"round {round} of a private run",
            f"with it epsilon is {epsilon:.4g}, above max_epsilon {most:g}",
            "end the run before it",
        )
    cohort, clip_norm = int(header["cohort"]), float(header["clip_norm"])
    if not 1 <= cohort <= privacy.cohort:
        raise InputError(
            f"a cohort of {cohort} clients", f"rounds of {privacy.cohort} are accounted", "ask no more"
        )
    fixed = not settings.is_adaptive and clip_norm != settings.clip_norm
    if fixed or not 0 < clip_norm <= privacy.largest_clip:
        raise InputError(
            f"a clip_norm of {clip_norm:g}", f"this node's is {settings.clip_norm:g}", "clip with that"
        )
    privacy.clip_norm = clip_norm
