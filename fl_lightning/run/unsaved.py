"""What parts of a run keep from round to round beside their checkpoints, and lose in a resume."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.config.overriding import overrides
from fl_lightning.federation import Federation
from fl_lightning.sampling import Sampler
from fl_lightning.support.tensor_bytes import raw_bytes

log = logging.getLogger("fl_lightning")


def unsaved_state(fed: Federation) -> dict[tuple[str, str], str]:
    """Return what is seen of each attribute that no checkpoint has, by the class of its owner and
    its name: of a user's own sampler, unless it says what it keeps, of a user's average, and of a
    user's parts of a clock."""
    owners: list[object] = [fed.method.average]
    if not overrides(fed.sampler, Sampler, "state_dict"):
        owners.append(fed.sampler)
    if fed.timing is not None:
        owners += [fed.timing.clock.devices, fed.timing.clock.reached]
    own = [one for one in owners if not type(one).__module__.startswith("fl_lightning.")]
    return {
        (type(one).__name__, name): _seen(value) for one in own for name, value in vars(one).items()
    }


def warn_of_changes(before: Mapping[tuple[str, str], str], fed: Federation) -> None:
    """Say which attributes have changed: a run that is interrupted and continued would end with
    other weights.

    Args:
        before: what :func:`unsaved_state` gave; empty: nothing is looked at.
    """
    now = unsaved_state(fed) if before else {}
    for owner, name in sorted(key for key in now if now[key] != before.get(key)):
        log.warning(
            "%s.%s has changed in a round and is in no checkpoint: a continued run lacks it; %s",
            owner,
            name,
            "let it follow from the arguments, or keep it in a sampler's state_dict",
        )


def _seen(value: Any) -> str:
    """Return a text of a value, another one where the value has changed: of tensors, arrays and
    generators by what is in them, of all else as they show themselves."""
    if isinstance(value, Mapping):
        return repr({repr(key): _seen(each) for key, each in value.items()})
    if isinstance(value, list | tuple):
        return repr([_seen(each) for each in value])
    if isinstance(value, torch.Generator):
        value = value.get_state()
    if isinstance(value, random.Random):
        value = value.getstate()
    if isinstance(value, np.ndarray) and value.dtype != object:
        return sha256(value.tobytes()).hexdigest()
    if isinstance(value, Tensor):
        return sha256(raw_bytes(value.detach().cpu().contiguous()).numpy().tobytes()).hexdigest()
    return repr(getattr(getattr(value, "bit_generator", None), "state", value))
