"""What parts of a run keep from round to round beside their checkpoints, and lose in a resume."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from fl_lightning.config.overriding import overrides
from fl_lightning.federation import Federation
from fl_lightning.hooks import Callback
from fl_lightning.sampling import Sampler
from fl_lightning.support.tensor_bytes import raw_bytes

log = logging.getLogger("fl_lightning")

OURS = ("fl_lightning.", "callbacks.")
LIBRARY = {*vars(LightningModule()), "gave_loss", "frozen_norms", "log", "log_dict", "train"}
"""Attributes of a LightningModule that are Lightning's, torch's or set by the project."""


def unsaved_state(fed: Federation) -> dict[tuple[str, str], str]:
    """Return what is seen of each attribute that no checkpoint has, by the class of its owner and
    its name: of a user's own sampler and callbacks, unless they say what they keep, of a user's
    average, server optimiser and parts of a clock, and of the parts of a user's LightningModule,
    with what of it is trained."""
    method = fed.method
    owners: list[object] = [method.average, method.server_optimizer]
    if not overrides(fed.sampler, Sampler, "state_dict"):
        owners.append(fed.sampler)
    owners += [one for one in fed.callbacks if not overrides(one, Callback, "state_dict")]
    if fed.timing is not None:
        owners += [fed.timing.clock.devices, fed.timing.clock.reached]
    own = [one for one in owners if one is not None and not type(one).__module__.startswith(OURS)]
    seen = {
        (type(one).__name__, name): _seen(value) for one in own for name, value in vars(one).items()
    }
    module, untrained = method.module, method.untrained[0]
    if module is None or untrained is None:
        return seen
    as_given = dict(untrained.named_modules())
    for path, part in module.named_modules():
        if any(cls.__module__.startswith("torchmetrics.") for cls in type(part).__mro__):
            continue  # cleared after each client
        # what a step or an evaluation leaves behind, such as features, is made anew in the next
        first = vars(as_given[path]) if path in as_given else {}
        names = {name for name in vars(part) if first.get(name) is not None} - LIBRARY
        prefix = f"{path}." if path else ""
        seen |= {
            (type(module).__name__, f"{prefix}{name}"): _seen(vars(part)[name]) for name in names
        }
    return seen | {
        (type(module).__name__, f"{name}.requires_grad"): str(parameter.requires_grad)
        for name, parameter in module.named_parameters()
    }


def warn_of_changes(before: Mapping[tuple[str, str], str], fed: Federation) -> None:
    """Say which attributes have changed: a run that is interrupted and continued would end with
    other weights.

    Args:
        before: what :func:`unsaved_state` gave; empty: nothing is looked at.
    """
    now = unsaved_state(fed) if before else {}
    module = type(fed.method.module).__name__
    for owner, name in sorted(key for key in now if now[key] != before.get(key)):
        log.warning(
            "%s.%s has changed in a round and is in no checkpoint: a continued run lacks it%s; %s",
            owner,
            name,
            ", and each client has it from the one before" * (owner == module),
            "make it a buffer by register_buffer, or let it follow from the arguments"
            if owner == module
            else "let it follow from the arguments, or keep it in a state_dict, where it has one",
        )


def _seen(value: Any) -> str:
    """Return a text of a value, another one where the value has changed: of tensors, arrays and
    generators by what is in them, of all else as they show themselves. Of what cannot be looked
    into, such as a tensor without data, it is empty."""
    try:
        return _text(value)
    except (RuntimeError, NotImplementedError, RecursionError):
        return ""


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return repr({repr(key): _text(each) for key, each in value.items()})
    if isinstance(value, list | tuple):
        return repr([_text(each) for each in value])
    if isinstance(value, torch.Generator):
        value = value.get_state()
    if isinstance(value, random.Random):
        value = value.getstate()
    if isinstance(value, np.ndarray) and value.dtype != object:
        return sha256(value.tobytes()).hexdigest()
    if isinstance(value, Tensor):
        return sha256(raw_bytes(value.detach().cpu().contiguous()).numpy().tobytes()).hexdigest()
    return repr(getattr(getattr(value, "bit_generator", None), "state", value))
