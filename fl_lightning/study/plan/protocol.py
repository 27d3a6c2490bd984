"""The protocol of a run: every setting that is not the method's own, and its hash.

Runs of two methods can be paired by seed when their protocols are equal: the same data and
partition, cohorts, stressors, rounds, local epochs and network. What only the method decides (its
class, its rates, its terms) is no part of it, nor is the seed, nor what changes no result (devices,
folders, figures).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fl_lightning.config.settings import is_under, result_settings

CALLBACKS = "trainer.callbacks"
NETWORK = "model.init_args.network"
"""A setting of a method that belongs to the protocol: methods are ranked on one network."""
MODULE = "model.init_args.module"
"""The LightningModule that has the network, where there is one."""
WATCHERS = frozenset(
    {
        *(
            "AccuracyBytesFigure",
            "BitWidthFigure",
            "ClientAccuracyFigure",
            "ConfusionMatrix",
            "ExpertFigure",
        ),
        *("FeatureMap", "LadderFigure", "LossLandscape", "OptionFigure", "PartitionFigure"),
        *(
            "Calibration",
            "FactorError",
            "GradientNorms",
            "Profile",
            "ProgressBar",
            "RelevanceFigure",
            "SlowClients",
        ),
        *("TimelineFigure", "TrainingCost", "BitBudgets"),
    }
)
"""The project's callbacks that measure and draw and change no result, by the names of their
classes. They are listed, so that no class is imported because a file of somebody else names it."""


def protocol_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the protocol in the settings of a run.

    Callbacks that only watch are left out, and the others numbered anew.

    Args:
        settings: the whole configuration with dotted keys, as ``config_of`` gives it.

    >>> watched = {"trainer.callbacks.0.class_path": "callbacks.ProgressBar", "trainer.max_rounds": 3}
    >>> protocol_of({**watched, "model.init_args.mu": 0.1, "seed_everything": 4})
    {'trainer.max_rounds': 3}
    """
    found: dict[str, Any] = {}
    callbacks: dict[int, dict[str, Any]] = {}
    for key, value in result_settings(settings).items():
        number, _, rest = key.removeprefix(f"{CALLBACKS}.").partition(".")
        if key.startswith(f"{CALLBACKS}.") and number.isdigit():
            callbacks.setdefault(int(number), {})[rest] = value
        elif (
            not is_under(key, ["model", "seed_everything", CALLBACKS])
            or is_under(key, [NETWORK])
            or (is_under(key, [MODULE]) and value is not None)
        ):
            found[key] = value
    kept = [one for _, one in sorted(callbacks.items()) if not _only_watches(one)]
    for place, one in enumerate(kept):
        found |= {f"{CALLBACKS}.{place}.{rest}".rstrip("."): value for rest, value in one.items()}
    return found


def _only_watches(callback: Mapping[str, Any]) -> bool:
    path = str(callback.get("class_path", ""))
    return path.startswith("callbacks.") and path.rpartition(".")[2] in WATCHERS


def different_settings(published: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Return ``key: published, here`` for each setting in which two protocols differ.

    >>> different_settings({"data.batch_size": 32, "a": 1}, {"data.batch_size": 64, "a": 1})
    ['data.batch_size: 32 published, 64 here']
    """

    def shown(protocol: Mapping[str, Any], key: str) -> str:
        return json.dumps(protocol[key]) if key in protocol else "not set"

    return [
        f"{key}: {shown(published, key)} published, {shown(here, key)} here"
        for key in {**published, **here}
        if shown(published, key) != shown(here, key)
    ]
