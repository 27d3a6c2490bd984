"""Whether a run is continued where its clients' states are: on this machine, or on a deployment's
nodes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fl_lightning.errors import require
from fl_lightning.run.directory import read_json
from fl_lightning.run.resume import Start


def check_place(start: Start, *, deployed: bool, private: bool, own_data: bool) -> None:
    """Refuse to go on here with clients that have their states elsewhere: they would begin anew in
    silence.

    A run of clients that keep nothing may go on here or there, and ends with the weights of one
    that was never interrupted.

    Args:
        start: the run that is continued, if one is.
        deployed: whether clients are on nodes from here on.
        private: whether sums are private: the noise of a simulation follows from the seed.
        own_data: whether the data are the nodes' own from here on.

    Raises:
        InputError: the run cannot be continued here.
    """
    if start.run is None:
        return
    given = f"{'deploy' if deployed else 'fit'} --ckpt_path {start.run}"
    before = read_json(start.run / "metadata.json")
    found = before.get("deployment")
    was_deployed = isinstance(found, dict)
    deployment = found if isinstance(found, dict) else {}
    require(
        own_data or "examples" not in deployment,
        given,
        "its clients are those of the nodes' own data",
        "continue it with deploy and --deploy.own_data true",
    )
    if deployed and deployment.get("clients_keep") is not False:
        original = copied_from(start.run, deployment)
        require(
            original is None,
            given,
            f"it is a copy of {original}, and nodes keep one state of each client for both",
            f"continue {original}, or move it away and continue the copy in its place",
        )
    if start.checkpoint is None:  # no round is done, and it begins anew
        return
    has_states = bool(start.checkpoint.tensors["clients"])
    if not deployed:
        keeps_nothing = deployment.get("clients_keep") is False
        require(
            not was_deployed or has_states or keeps_nothing,
            given,
            "it was deployed, and what its clients keep is on their nodes",
            "continue it with deploy, with the same nodes",
        )
        require(
            not (was_deployed and private),
            given,
            "it was deployed, with noise that nobody can repeat; that of a simulation follows from the seed",
            "continue it with deploy",
        )
        return
    require(
        not has_states,
        given,
        "it was simulated, and what its clients keep is in its checkpoints and on no node",
        "continue it with fit, or deploy a new run",
    )
    require(
        was_deployed or not private,
        given,
        "it was simulated, with noise that follows from the seed, and would be reported as private",
        "deploy a new run",
    )
    require(
        before.get("engine") != "batched",
        given,
        "it was simulated with the batched engine, which rounds sums differently from nodes",
        "continue it with fit, or deploy a new run",
    )


def copied_from(run: Path, deployment: Mapping[str, Any]) -> Path | None:
    """Return the directory that a deployed run was copied from, if that is still there.

    Args:
        run: the directory of the copy.
        deployment: the entry of its ``metadata.json``; earlier releases noted no directory.
    """
    noted = deployment.get("directory")
    if not isinstance(noted, str) or Path(noted).resolve() == run.resolve():
        return None
    there = read_json(Path(noted) / "metadata.json").get("deployment")
    same = isinstance(there, dict) and there.get("run") == deployment.get("run")
    return Path(noted) if same else None
