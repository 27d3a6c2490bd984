"""A method under test, and for each of the project's methods how to run it and what to expect."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from fl_lightning.compatibility import why_not
from fl_lightning.conformance import formulas
from fl_lightning.conformance.declarations import declared
from fl_lightning.conformance.expectations import Expectation, OwnOptimum, SoftLabels, WeightAverage
from fl_lightning.conformance.fedcm import ClientMomentum, mean_step
from fl_lightning.conformance.feddyn import DynamicRegularisation
from fl_lightning.conformance.federations import (
    IMAGES,
    IMAGES_IN_GROUPS,
    TEXT,
    TEXT_OF_ADALORA,
    ToyFederation,
    small_branch_costs,
    small_costs,
)
from fl_lightning.conformance.personal import (
    PersonalPath,
    adapted,
    alone,
    ditto,
    head_beside,
    mixture,
)
from fl_lightning.conformance.references import (
    BroadcastFormula,
    mean_by_relevance,
    mean_of_prototypes,
    mean_of_soft_labels,
    mean_of_weights,
    normalised_mean,
    sum_of_changes,
)
from fl_lightning.conformance.scaffold import ControlVariates
from fl_lightning.conformance.server_steps import (
    Rule,
    ServerPath,
    acg,
    adagrad,
    adam,
    exp,
    momentum,
    next_weights,
    yogi,
)
from fl_lightning.conformance.toy import point_network
from fl_lightning.methods import Method
from fl_lightning.wire import Payload

Formula = Callable[[Method, Payload], int]


@dataclass(frozen=True)
class MethodUnderTest:
    """A method under test, with all that the checks may assume about it.

    Args:
        make: returns a new instance; keywords override its settings.
        noise: largest deviation that rounding of uploads may cause on weights of size 5.
        expects: the point to which the method is known to move on the quadratic.
        neutral: settings under which it equals FedAvg bit for bit; None if there are none.
        on_points: settings that it needs to be built on the quadratic.
        sent: formula of the broadcast that shares no code with the method; None if there is none.
        up: hand formula for the bytes of one upload; None if there is none.
        down: hand formula for the bytes of one broadcast; None if there is none.
        federation: what it runs on.
    """

    make: Callable[..., Method]
    noise: float = 1e-4
    expects: Expectation = field(default_factory=WeightAverage)
    neutral: dict[str, Any] | None = None
    on_points: Mapping[str, Any] = field(default_factory=dict)
    sent: BroadcastFormula | None = None
    up: Formula | None = None
    down: Formula | None = None
    federation: ToyFederation = IMAGES


MEAN = {"sent": BroadcastFormula("weights", mean_of_weights), "down": formulas.weights_down}
FULL = {**MEAN, "up": formulas.weights_up}
CODES = {
    "sent": BroadcastFormula("weights", mean_of_weights),
    "up": formulas.codes_up,
    "noise": 0.1,
}
MPQ = {**CODES, "up": formulas.pruned_codes_up, "down": formulas.grids_down}

MOMENTUM = {
    "expects": ClientMomentum(),
    "sent": BroadcastFormula("M", mean_step),
    "up": formulas.weights_and_steps_up,
    "down": partial(formulas.control_down, name="M"),
}


def optimised(rule: Rule, **known: Any) -> dict[str, Any]:
    """Return what is known of FedAvg with a server optimiser."""
    return {
        **FULL,
        "expects": ServerPath(rule),
        "sent": BroadcastFormula("weights", next_weights(rule)),
        **known,
    }


KNOWN_METHODS: dict[str, dict[str, Any]] = {
    "FedAvg": FULL,
    "FedAvgM": optimised(momentum, neutral={"beta": 0.0}),
    # m = D, and sqrt v + tau = 1: x + D without rounding
    "FedAdam": optimised(adam, neutral={"beta1": 0.0, "beta2": 1.0, "tau": 0.5, "server_lr": 1.0}),
    "FedYogi": optimised(yogi, neutral={"beta1": 0.0, "beta2": 1.0, "tau": 0.5, "server_lr": 1.0}),
    # tau^2 + D^2 is tau^2 in float64
    "FedAdagrad": optimised(adagrad, neutral={"tau": 2.0**40, "server_lr": 2.0**41}),
    "FedExP": optimised(
        exp, settings={"eps": 1.0}, neutral={"eps": math.inf, "mean_of_two": False}
    ),
    "FedACG": optimised(acg, neutral={"lam": 0.0, "beta": 0.0}),
    "FedAdaLoRA": {
        "federation": TEXT_OF_ADALORA,
        "settings": {"final_rank": 0.75, "warmup": 0, "fall": 2},
        "neutral": {"final_rank": 3.0, "orthogonality": 0.0},
        "up": formulas.directions_up,
        "down": formulas.directions_down,
    },
    "FedProx": {**FULL, "neutral": {"mu": 0.0}},
    "SCAFFOLD": {
        "neutral": {"control": False, "weigh_by": "examples"},
        "sent": BroadcastFormula("c", sum_of_changes),
        "up": formulas.control_up,
        "down": formulas.control_down,
    },
    "FedDyn": {
        "expects": DynamicRegularisation(),
        "neutral": {"alpha": 0.0, "weigh_by": "examples"},
        "up": formulas.weights_up,
        "down": formulas.weights_down,
    },
    "FedDC": {
        "expects": DynamicRegularisation(controls=True),
        "neutral": {"alpha": 0.0, "weigh_by": "examples"},
        "sent": BroadcastFormula("G", sum_of_changes),
        "up": formulas.control_up,
        "down": partial(formulas.control_down, name="G"),
    },
    "FedSpeed": {
        "settings": {"rho": 0.001},
        "noise": 0.01,
        "expects": DynamicRegularisation(),
        "neutral": {"lamb": 0.0, "rho": 0.0, "weigh_by": "examples"},
        "up": formulas.weights_up,
        "down": formulas.weights_down,
    },
    "FedNova": {
        "neutral": {"normalize": False},
        "sent": BroadcastFormula("weights", normalised_mean),
        "up": formulas.weights_and_steps_up,
        "down": formulas.weights_down,
    },
    # at rest a client is off by rho where it would stand still
    "FedSAM": {**FULL, "settings": {"rho": 0.001}, "noise": 0.01, "neutral": {"rho": 0.0}},
    "FedCM": {**MOMENTUM, "neutral": {"A": 1.0, "weigh_by": "examples"}},
    "MoFedSAM": {
        **MOMENTUM,
        "settings": {"rho": 0.001},
        "noise": 0.01,
        "neutral": {"A": 1.0, "rho": 0.0, "weigh_by": "examples"},
    },
    # on the quadratic a term in place of the task loss would leave nothing of it
    "FedLC": {**FULL, "on_points": {"tau": 0.0}, "neutral": {"tau": 0.0}},
    "MOON": {**FULL, "neutral": {"mu": 0.0}},
    "FedNTD": {**FULL, "settings": {"beta": 0.01}, "noise": 0.05, "neutral": {"beta": 0.0}},
    "QFedAvg": {
        **MEAN,
        "up": formulas.qsgd_up,
        "settings": {"bits": 8},
        "noise": 0.05,
        "neutral": {"bits": 32},
    },
    "AQFL": {**CODES, "down": formulas.one_width_down, "settings": {"bits": 8}},
    "FedPQ": {**MEAN, "up": formulas.product_up, "noise": 0.05},
    "FedMPQ": {**MPQ, "settings": {"bits": 8, "lambda_b": 0.0}},
    "FedMPQKD": {**MPQ, "settings": {"bits": 8, "lambda_b": 0.0, "alpha": 0.1}},
    "FedKD": {
        "settings": {"temperature": 2.0, "server_epochs": 2},
        "expects": SoftLabels(),
        "neutral": {"average_weights": True, "distill_epochs": 0, "server_epochs": 0},
        "sent": BroadcastFormula("soft_labels", mean_of_soft_labels),
        "up": formulas.soft_labels_up,
        "down": formulas.soft_labels_down,
    },
    "FineTune": {**FULL},
    "FedPer": {**FULL},
    "FedRep": {**FULL},
    "FedBABU": {**FULL},
    "FedBN": {**FULL},
    "LGFedAvg": {**FULL},
    "LocalOnly": {
        "expects": OwnOptimum(),
        "up": formulas.examples_up,
        "down": formulas.nothing_down,
    },
    "Ditto": {**FULL, "expects": PersonalPath(ditto), "neutral": {}},
    "FedRoD": {
        **FULL,
        "on_points": {"gamma": 0.0},
        "expects": head_beside,
        "neutral": {"gamma": 0.0},
    },
    "APFL": {**FULL, "federation": IMAGES_IN_GROUPS, "expects": mixture, "neutral": {}},
    "FedALA": {**FULL, "expects": adapted, "neutral": {"ala_epochs": 0}},
    "FedProto": {
        "expects": alone,
        "sent": BroadcastFormula("prototypes", mean_of_prototypes),
        "up": formulas.prototypes_up,
        "down": formulas.prototypes_down,
    },
    "Oracle": {"expects": OwnOptimum(), "up": formulas.weights_up, "down": formulas.weights_down},
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
        "sent": BroadcastFormula("adapters", mean_by_relevance),
        "up": formulas.adapters_up,
        "down": formulas.adapters_down,
    },
    "FedVEMoE": {
        "settings": {"k_init": 2, "k_max": 3, "birth_gap": 0.0, "birth_z": 0.0},
        "neutral": {"k_max": 0, "k_init": 1},
        "up": formulas.experts_up,
        "down": formulas.experts_down,
    },
    "HEST": {
        "settings": {"costs": small_costs(), "scope": "adapter"},
        "neutral": {"budget": math.inf},
        "up": formulas.trained_up,
        "down": formulas.trained_down,
    },
    "HESTLadder": {
        "settings": {
            "costs": small_branch_costs(),
            "all_on_rounds": 1,
            "subset_rounds": 2,
            "levels": 1,
            "budget": 0.9,
        },
        "neutral": {"budget": math.inf},
        "up": formulas.ladder_up,
        "down": formulas.ladder_down,
    },
}
"""What is known of the project's methods, by class name: their ``settings`` and the arguments of
:class:`MethodUnderTest`. Nothing is known of a method from elsewhere but what the caller says."""


def method_under_test(
    method: type[Method],
    settings: dict[str, Any] | None = None,
    neutral: dict[str, Any] | None = None,
    noise: float | None = None,
) -> MethodUnderTest:
    """Return the method with what is known of it, overridden by what is given.

    Args:
        method: its class.
        settings: arguments of its constructor.
        neutral: settings under which it must equal FedAvg bit for bit.
        noise: largest deviation that rounding of its uploads may cause.
    """
    known = (
        dict(KNOWN_METHODS.get(method.__name__, {}))
        if method.__module__.startswith("fl_lightning.")
        else {}
    )
    if "classification" in method.refuses and not why_not(method, "language"):
        known.setdefault("federation", TEXT)
    if declared(method).control_variates:
        known.setdefault("expects", ControlVariates())
    if declared(method).dynamic_regularisation:
        known.setdefault("expects", DynamicRegularisation())
    subject = MethodUnderTest(
        partial(method, **{**known.pop("settings", {}), **(settings or {})}), **known
    )
    if neutral is not None:
        subject = replace(subject, neutral=neutral)
    return replace(subject, noise=noise) if noise is not None else subject
