"""What parts of a run keep from round to round beside their checkpoints, and lose in a resume."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from fl_lightning.config.overriding import overrides
from fl_lightning.federation import Federation
from fl_lightning.hooks import Callback
from fl_lightning.methods.lit_module import unsaved_of, warn_of_unsaved
from fl_lightning.sampling import Sampler
from fl_lightning.support.appearance import appearance

log = logging.getLogger("fl_lightning")

OURS = ("fl_lightning.", "callbacks.")


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
        (type(one).__name__, name): appearance(value)
        for one in own
        for name, value in vars(one).items()
    }
    module, untrained = method.module, method.untrained[0]
    if module is None or untrained is None:
        return seen
    told: list[str] = module.told  # type: ignore[assignment]
    parts = unsaved_of(module, untrained)
    name = type(module).__name__
    return seen | {(name, one): value for one, value in parts.items() if one not in told}


def warn_of_changes(before: Mapping[tuple[str, str], str], fed: Federation) -> None:
    """Say which attributes have changed: a run that is interrupted and continued would end with
    other weights.

    Args:
        before: what :func:`unsaved_state` gave; empty: nothing is looked at.
    """
    now = unsaved_state(fed) if before else {}
    module = type(fed.method.module).__name__
    for owner, name in sorted(key for key in now if now[key] != before.get(key)):
        if owner == module:
            warn_of_unsaved(owner, name, "a round")
        else:
            log.warning(
                "%s.%s has changed in a round and is in no checkpoint: a continued run lacks it; "
                "let it follow from the arguments, or keep it in a state_dict, where it has one",
                owner,
                name,
            )
