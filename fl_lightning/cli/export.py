"""``fl_lightning.export_model``: the command ``export`` from Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from fl_lightning.cli.configs import with_config_of_run
from fl_lightning.cli.parser import FederatedCLI, import_short_names
from fl_lightning.errors import require
from fl_lightning.export import FormatName
from fl_lightning.trainer import FederatedTrainer


def export_model(
    run: str | Path | FederatedTrainer,
    to: str | Path,
    *,
    client: int | None = None,
    checkpoint: str | None = None,
    format: FormatName = "auto",
    overwrite: bool = False,
) -> Path:
    """Write the model of a run into a folder that other programs load, and return the folder.

    Args:
        run: a run directory; or a trainer after its ``fit``, also where the run's configuration has
            objects that no file can name, such as a network that was given as a lambda.
        to: the folder; it is new or empty.
        client: whose model, of a personalised method.
        checkpoint: which of the run's checkpoints: ``last`` (the default), ``best`` (of
            validation), or a name like round_000060.
        format: ``safetensors``, ``peft``, ``transformers``, ``onnx``, or ``auto``, as of
            :meth:`fl_lightning.trainer.FederatedTrainer.export`.
        overwrite: whether the folder may hold files; those of an export before are replaced.

    Raises:
        InputError: there is no such run, checkpoint, client or format, or the folder is not empty.
    """
    if isinstance(run, FederatedTrainer):
        given = "export_model of a trainer without a run"
        require(
            hasattr(run, "journal"), given, "a model is one that was trained", "call its fit first"
        )
        trainer, place, (method, data, seed) = run, run.run_dir, run.fitted
    else:
        import_short_names()
        cli: Any = FederatedCLI("export", with_config_of_run("export", [str(run)]))
        trainer = cli.trainer
        method = cli.model
        data = cli.datamodule
        seed = cli.config["seed_everything"]
        trainer.config, place = yaml.safe_load(cli.config_text), Path(run)
    return trainer.export(
        method,
        data,
        seed=seed,
        ckpt_path=str(place),
        to=str(to),
        client=client,
        checkpoint=checkpoint,
        format=format,
        overwrite=overwrite,
    )
