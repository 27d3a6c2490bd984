"""Refusals of runs, studies and tables that are not there, before torch is imported.

Each is the one that the command itself would raise, once its flags are right.
"""

from __future__ import annotations

from collections.abc import Mapping
from os.path import expanduser
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.config.packaged import cost_table, table_text
from fl_lightning.run.paths import run_and_checkpoints
from fl_lightning.study.plan.kinds import check_kind, folder_of, is_study_file


def check_uses(command: str, values: Mapping[str, Any]) -> None:
    """Refuse what the flags name, if it is not there or of the wrong kind.

    Args:
        command: the command.
        values: what was given, by dotted setting.
    """
    if command in ("fit", "test", "export"):
        _check_run(command, values)
    elif command in ("sweep", "tune") and "shard" not in values:
        path = Path(values["config"])
        kind = "study file" if command == "sweep" else "search file"
        check_kind(path, yaml.safe_load(path.read_text()), kind)
    elif command == "energy" and {*values} == {"network"}:
        cost_table(values["network"])
    elif command == "energy" and {*values} == {"table"}:
        table_text(values["table"])
    elif command == "compare" and {*values} <= {"study", "out", "root"}:
        study, out = values["study"], Path(values["out"])
        if not (is_study_file(study) or out.exists()):
            folder_of(study, Path(expanduser(values.get("root", "runs"))))


def _check_run(command: str, values: Mapping[str, Any]) -> None:
    given = values.get("ckpt_path")
    others = {"trainer.fast_dev_run", "probes", "checkpoint", "format", "overwrite"} & {*values}
    if not given or given == "last" or others or (command == "export" and "to" not in values):
        return
    if command == "fit" or Path(given).parent.name != "checkpoints":
        run_and_checkpoints(given)
