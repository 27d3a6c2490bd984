"""A method under test, and what is known of it: of the project's own, how to run them and what to expect."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from fl_lightning.conformance import formulas
from fl_lightning.conformance.expectations import Averages, Expectation, OwnOptimum, SoftLabels
from fl_lightning.conformance.references import Sent, mean_by_relevance, mean_of_soft_labels, mean_of_weights
from fl_lightning.conformance.scaffold import ControlVariates
from fl_lightning.conformance.toy import point_network
from fl_lightning.methods import Method
from fl_lightning.wire import Payload

Formula = Callable[[Method, Payload], int]


@dataclass(frozen=True)
class Subject:
    """A method under test, and what is known of it.

    Args:
        make: a new instance; keywords override its settings.
        noise: largest deviation that rounding of uploads may cause on weights of size 5.
        expects: where it is known to go on the quadratic.
        neutral: settings under which it equals FedAvg bit for bit; null: not known.
        on_points: settings that it needs to be built on the quadratic.
        sent: what clients are sent, by a formula that shares no code with it; null: not known.
        up, down: bytes of one upload and of one broadcast by a hand formula; null: not known.
    """

    make: Callable[..., Method]
    noise: float = 1e-4
    expects: Expectation = field(default_factory=Averages)
    neutral: dict[str, Any] | None = None
    on_points: Mapping[str, Any] = field(default_factory=dict)
    sent: Sent | None = None
    up: Formula | None = None
    down: Formula | None = None


MEAN = {"sent": Sent("weights", mean_of_weights), "down": formulas.weights_down}
FULL = {**MEAN, "up": formulas.weights_up}
PLANES = {"sent": Sent("weights", mean_of_weights), "up": formulas.planes_up, "noise": 0.1}
# One of a weight's two planes is zero and clamped there, so a step on planes is between half of SGD's and all
# of it.
MPQ = {**PLANES, "down": formulas.planes_down, "expects": Averages(least_step=0.5)}

KNOWN: dict[str, dict[str, Any]] = {
    "FedAvg": FULL,
    "FedProx": {**FULL, "neutral": {"mu": 0.0}},
    "FedNTD": {**FULL, "settings": {"beta": 0.01}, "noise": 0.05, "neutral": {"beta": 0.0}},
    "QFedAvg": {
        **MEAN,
        "up": formulas.qsgd_up,
        "settings": {"bits": 8},
        "noise": 0.05,
        "neutral": {"bits": 32},
    },
    "AQFL": {**PLANES, "down": formulas.one_width_down, "settings": {"bits": 8}},
    "FedPQ": {**MEAN, "up": formulas.product_up, "noise": 0.05},
    "FedMPQ": {**MPQ, "settings": {"bits": 8, "lambda_b": 0.0}},
    "FedMPQKD": {**MPQ, "settings": {"bits": 8, "lambda_b": 0.0, "alpha": 0.1}},
    "FedKD": {
        "settings": {"temperature": 2.0, "server_epochs": 2},
        "expects": SoftLabels(),
        "neutral": {"average_weights": True, "distill_epochs": 0, "server_epochs": 0},
        "sent": Sent("soft_labels", mean_of_soft_labels),
        "up": formulas.soft_labels_up,
        "down": formulas.soft_labels_down,
    },
    "FedMosaic": {
        "expects": OwnOptimum(),
        "on_points": {
            "network": point_network,
            "reference": point_network,
            "rank": 1,
            "num_blocks": 1,
            "sigma": 0.0,
        },
        "noise": 1e-3,
        "sent": Sent("adapters", mean_by_relevance),
        "up": formulas.adapters_up,
        "down": formulas.adapters_down,
    },
}
"""By class name: ``settings``, and :class:`Subject`'s arguments. Of a method of your own nothing is known but
what it is told."""


def subject_of(
    method: type[Method],
    settings: dict[str, Any] | None = None,
    neutral: dict[str, Any] | None = None,
    noise: float | None = None,
) -> Subject:
    """The method with what is known of it, or with what is given."""
    known = dict(KNOWN.get(method.__name__, {})) if method.__module__.startswith("fl_lightning.") else {}
    if method.control_variates:
        known.setdefault("expects", ControlVariates())
    subject = Subject(partial(method, **{**known.pop("settings", {}), **(settings or {})}), **known)
    if neutral is not None:
        subject = replace(subject, neutral=neutral)
    return replace(subject, noise=noise) if noise is not None else subject
