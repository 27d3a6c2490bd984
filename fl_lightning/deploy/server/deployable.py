"""What a run needs of a deployment, and what is said of one that evaluates otherwise than a
simulation."""

from __future__ import annotations

import logging
from typing import Any

from fl_lightning.compatibility import Run, check_run
from fl_lightning.config.overriding import overrides
from fl_lightning.distributed.collectives import world_size
from fl_lightning.errors import require
from fl_lightning.federation import Federation
from fl_lightning.hooks import Meter
from fl_lightning.metrics.states import keeps_outputs, parts_of

log = logging.getLogger("fl_lightning")


def check_deployable(fed: Federation) -> None:
    """Refuse what nodes cannot do, and warn where metrics are not those of a simulation."""
    run = Run.of(fed, deployed=True)
    check_run(run)
    require(
        world_size() == 1,
        "several processes of the server",
        "it is one",
        "write --trainer.devices 1",
    )
    if run.masks is not None:
        run.masks.check_usable(fed.cohort_size)
    if fed.method.module is not None and run.is_measured_on_nodes:
        _name_left_out(fed.method.network)
    if fed.method.keeps_state or run.own_data:
        _check_readers(fed)
    if run.own_data and not run.is_measured_on_nodes:
        log.warning(
            "val/* is left out: under a secure sum or client-level privacy what single clients "
            "measure stays on their nodes"
        )
    if not fed.method.personalised:
        return
    if run.own_data:
        log.warning(
            "%s: test/* is that of a newcomer's model, since only nodes have models and only the server has "
            "the test set",
            run.name,
        )
    elif not run.is_measured_on_nodes:
        log.warning(
            "%s: the server evaluates the model of a newcomer, since under a secure sum or "
            "client-level privacy what single clients measure stays on their nodes; val/* and "
            "test/* are therefore not those of a simulation",
            run.name,
        )


def _check_readers(fed: Federation) -> None:
    """Refuse meters that would measure a newcomer in the place of a client, and name what others
    cannot show."""
    keeps = fed.method.keeps_state
    what = "what clients keep, and that stays" if keeps else "clients' examples, and these stay"
    for callback in fed.callbacks:
        name, read = type(callback).__name__, getattr(callback, "reads_states", "")
        require(
            not (read and overrides(callback, Meter, "on_client_start")),
            f"callbacks.{name} with {type(fed.method).__name__} in a deployment",
            f"{read} is measured from {what} on nodes",
            f"leave {name} out",
        )
        if read and keeps:
            log.warning("%s: %s is left out: what clients keep stays on nodes", name, read)


def _name_left_out(module: Any) -> None:
    """Warn of metrics of a module that nodes do not send."""
    for path, part in parts_of(module).items():
        if keeps_outputs(part):
            log.warning(
                "%s.%s keeps outputs, which stay on nodes: what is logged of it there is left out",
                type(module).__name__,
                path,
            )
