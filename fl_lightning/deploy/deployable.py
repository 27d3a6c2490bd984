"""What a run needs of a deployment that is not there yet."""

from __future__ import annotations

import logging

from fl_lightning.deploy.evaluating import is_measured_on_nodes
from fl_lightning.deploy.private import check_private
from fl_lightning.distributed.collectives import world_size
from fl_lightning.errors import InputError, require
from fl_lightning.hooks import Stressor, reads_probabilities
from fl_lightning.loop import Federation
from fl_lightning.methods.oracle import Oracle
from fl_lightning.methods.secure import check_secure_sum
from fl_lightning.support.overriding import overrides

log = logging.getLogger("fl_lightning")
ON_NODES = {"change_labels": "labels", "change_upload": "uploads before they are masked"}


def check_deployable(fed: Federation) -> None:
    """Refuse what nodes cannot do yet.

    Raises:
        InputError: the run has it.
    """
    if fed.privacy is not None:
        check_private(fed)
    if fed.secure_sum is not None:
        check_secure_sum(fed.secure_sum, fed.method, fed.cohort_size)
    require(world_size() == 1, "several processes of the server", "it is one", "write --trainer.devices 1")
    for callback in fed.callbacks:
        for hook, what in ON_NODES.items() if isinstance(callback, Stressor) else ():
            name = type(callback).__name__
            require(
                not overrides(callback, Stressor, hook)
                or (hook == "change_upload" and fed.secure_sum is None),
                f"callbacks.{name}",
                f"it changes {what}, and only nodes have them",
                f"leave {name} out of a deployment",
            )
    if fed.data.apart:
        _check_own_data(fed)
    if not fed.method.personalised:
        return
    if fed.data.apart:
        log.warning(
            "%s: test/* is that of a newcomer's model, since only nodes have models and only the server has "
            "the test set",
            type(fed.method).__name__,
        )
        return
    if not is_measured_on_nodes(fed):
        log.warning(
            "%s: the server evaluates the model of a newcomer, since under a secure sum what single clients "
            "measure stays on their nodes; val/* and test/* are therefore not those of a simulation",
            type(fed.method).__name__,
        )
        return
    for callback in filter(reads_probabilities, fed.callbacks):
        name = type(callback).__name__
        raise InputError(
            f"callbacks.{name}",
            f"it reads the outputs for test examples, and those of {type(fed.method).__name__} stay on nodes",
            f"leave {name} out of a deployment",
        )


def _check_own_data(fed: Federation) -> None:
    """Refuse what the server cannot know of data that are on nodes alone.

    Raises:
        InputError: the run asks for it.
    """
    require(
        not isinstance(fed.method, Oracle),
        "Oracle on the nodes' own data",
        "it knows the group of each client, and nodes do not say it",
        "take another method",
    )
    require(
        fed.method.weigh_by != "tokens",
        "--model.weigh_by tokens on the nodes' own data",
        "nodes say how many examples they have, and not how many tokens",
        "write --model.weigh_by examples",
    )
