"""The ``export`` command: choose a checkpoint, deploy its network, and write it for other
programs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fl_lightning import __version__
from fl_lightning.client import Client
from fl_lightning.config.near_names import require_choice
from fl_lightning.energy.budgets.ladder_network import LadderNetwork
from fl_lightning.errors import InputError, require
from fl_lightning.evaluation import evaluation_mode
from fl_lightning.export.card import card_of, record_of
from fl_lightning.export.folder import SUMMARY, check_folder, new_folder
from fl_lightning.export.formats import FORMATS, FormatName, check_extras, choose, write
from fl_lightning.export.loader import LOADER
from fl_lightning.export.trained_model import TrainedModel
from fl_lightning.federation import Federation
from fl_lightning.probing import ProbedModel
from fl_lightning.probing.command import choose_checkpoint, load_model, parse_request
from fl_lightning.run.directory import read_json, to_json
from fl_lightning.run.snapshot import Checkpoint

log = logging.getLogger("fl_lightning")

CARD = "README.md"


@dataclass(frozen=True)
class Target:
    """What is exported, and where to.

    Args:
        folder: the folder that is written.
        client: whose model, of a personalised method; None: the global model.
        format: one of ``FORMATS``; ``auto``: what suits the network.
        overwrite: whether the folder may hold files; those of an export before are replaced.
    """

    folder: str | Path
    client: int | None = None
    format: FormatName = "auto"
    overwrite: bool = False


def export_checkpoint(
    prepare: Callable[[], Federation],
    ckpt_path: str | None,
    experiment: Path,
    target: Target,
    *,
    checkpoint: str | None,
    settings: Mapping[str, Any],
    allow_changed: bool,
) -> Path:
    """Write the model of a checkpoint into a folder, and return the folder.

    Args:
        prepare: makes the federation; it is called after the checkpoint was read.
        ckpt_path: the run, as given by the user.
        experiment: folder of the experiment, in which ``last`` is searched.
        target: what is exported, and where to.
        checkpoint: name of the checkpoint, ``last`` or ``best``; None: ``last``.
        settings: the configuration, nested.
        allow_changed: whether the configuration may differ from the run's.

    Raises:
        InputError: a request cannot be met; nothing was written.
    """
    require(
        ckpt_path,
        "export without a run",
        "it needs its directory",
        "write export RUN_DIR --to FOLDER",
    )
    require_choice(target.format, FORMATS, "--format")
    path = check_folder(target.folder, target.overwrite)
    check_extras(target.format)
    place, which = parse_request(ckpt_path, checkpoint)
    saved = choose_checkpoint(place, which, experiment)
    fed = prepare()
    probed = load_model(fed, saved, settings, allow_changed)
    network = probed.method.deploy(_client(probed, target.client))
    (module,) = probed.method.untrained
    about = {
        "method": type(probed.method).__name__,
        "dataset": probed.data.dataset,
        "run": saved.path.parent.parent.name,
        "checkpoint": saved.path.name,
        "round": saved.progress["round"],
        "client": target.client,
        "personalised": probed.method.personalised,
        "seed": probed.seed,
        **unfinished(saved, fed.max_rounds),
        **record_of(saved, probed.method.network_spec if module is None else module),
    }
    if isinstance(network, LadderNetwork):
        about |= {"levels": network.levels_in_words(), "budget": network.on.share}
        network = network.network
    moved = probed.method.adapters.base_moved(probed.method)
    try:
        with evaluation_mode(network.cpu()):
            _write_folder(TrainedModel(network, probed.data, about, moved), target.format, path)
    finally:
        network.to(probed.fabric.device)
    return path


def unfinished(saved: Checkpoint, rounds: int) -> dict[str, int]:
    """Return how many rounds the run of a checkpoint was to have, as ``of_rounds``, and say it,
    where it has not ended; else nothing."""
    run = saved.path.parent.parent
    if (
        read_json(run / "metadata.json").get("status") == "finished"
        or saved.progress["round"] >= rounds
    ):
        return {}
    log.warning(
        "the run has not finished: this is its model after %d of %d rounds",
        saved.progress["round"],
        rounds,
    )
    return {"of_rounds": rounds}


def _client(probed: ProbedModel, id: int | None) -> Client | None:
    """Return the client whose model is asked for; None for the global model."""
    name, count = type(probed.method).__name__, probed.data.num_clients
    if not probed.method.personalised:
        require(
            id is None,
            f"--client {id}",
            f"{name} has one model for all clients",
            "leave --client out",
        )
        return None
    if id is None and probed.method.has_global_model:
        return None
    kept = sorted(probed.states) or probed.data.active.tolist()
    some = ", ".join(map(str, kept[:10])) + (" ..." if len(kept) > 10 else "")
    require(
        id is not None,
        f"export of {name} without --client",
        "each client has a model of its own, and there is no global one",
        f"write --client {kept[0]}",
    )
    assert id is not None
    require(
        0 <= id < count,
        f"--client {id}",
        f"there are clients 0 to {count - 1}",
        f"write one of {some}",
    )
    if probed.newcomers:
        raise InputError(
            f"--client {id} of a deployed {name}",
            "what makes its model its own is on the node that holds the client",
            "export a run of which the clients were trained here",
        )
    require(
        id in kept,
        f"--client {id}",
        f"it was not trained up to round {probed.method.round}, so it has no model of its own",
        f"write one of {some}",
    )
    return probed.data.client(id, probed.states.get(id))


def _write_folder(model: TrainedModel, format: FormatName, path: Path) -> None:
    chosen = choose(model, format)
    check_extras(chosen)
    with new_folder(path) as folder:
        needs = write(model, chosen, folder)
        (folder / CARD).write_text(card_of(model, chosen, needs, (folder / LOADER).read_text()))
        files = sorted(
            str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()
        )
        summary = {
            "format": chosen,
            "fl_lightning": __version__,
            **model.about,
            **model.preprocessing(),
            "files": [*files, SUMMARY],
        }
        (folder / SUMMARY).write_text(to_json(summary))
    log.info("%s: %s; loading it needs %s", path, ", ".join([*files, SUMMARY]), needs)
