"""A deployment as a folder: what the command hands to the ServerApp, and what comes back.

``job.json`` has the folder to work in, that of nodes on this machine, the arguments of ``fit``, the rules of
rounds and the command line; ``run.yaml`` the whole configuration; ``begun`` is there once the server's half
runs; ``outcome.json`` is written at the end. The folder stays on the server's machine: Flower is given its
path alone.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.cli.parser import FederatedCLI, import_short_names
from fl_lightning.deploy.mail import Transport
from fl_lightning.deploy.roster import RoundRules
from fl_lightning.deploy.server import deploy_over
from fl_lightning.errors import InputError, RunStopped
from fl_lightning.support import disk


def write_job(
    folder: Path,
    config: str,
    rules: RoundRules,
    ckpt_path: str | None,
    command_line: Sequence[str],
    *,
    nodes: Path,
    own_data: bool = False,
) -> None:
    """Write the files of a deployment that begins in the working directory of this process.

    Args:
        nodes: folder of the nodes that run on this machine, where some do.
    """
    job = {
        "directory": os.getcwd(),
        "nodes": str(nodes),
        "ckpt_path": ckpt_path,
        "rules": asdict(rules),
        "own_data": own_data,
        "command_line": list(command_line),
    }
    disk.replace(folder / "run.yaml", config.encode())
    disk.replace(folder / "job.json", json.dumps(job).encode())


def run_job(folder: Path, transport: Transport) -> None:
    """Run a deployment, and write what came of it.

    Raises:
        RuntimeError: it failed, so that Flower knows it too.
    """
    (folder / "begun").touch()
    job = json.loads((folder / "job.json").read_text())
    os.chdir(job["directory"])
    sys.path.append(job["directory"])
    outcome: dict[str, Any] = {"code": 1, "error": "the server was stopped"}
    try:
        outcome = {"code": 0, "run_dir": str(_fit(folder, job, transport))}
    except InputError as error:
        outcome = {"code": 2, "error": [error.given, error.rule, error.instead]}
        raise RuntimeError(str(error)) from error
    except RunStopped as error:
        outcome = {"code": 1, "error": [error.given, error.rule, error.instead]}
        raise RuntimeError(str(error)) from error
    except (KeyboardInterrupt, SystemExit):
        given = "the server was stopped, by somebody or by a SuperLink that had not heard of it for a minute"
        outcome = {"code": 1, "error": [given, "", "continue with --ckpt_path"]}
        raise
    except Exception as error:
        where = f"its traceback is in {error.run_log}" if hasattr(error, "run_log") else ""
        outcome = {"code": 1, "error": [f"{type(error).__name__}: {error}", "", where]}
        raise
    finally:
        disk.replace(folder / "outcome.json", json.dumps(outcome).encode())


def outcome_of(folder: Path) -> Mapping[str, Any]:
    """Return what came of a deployment; a code of 1 where nothing is known."""
    try:
        return json.loads((folder / "outcome.json").read_text())
    except (OSError, ValueError):
        return {"code": 1, "error": ["the server's process ended without a word", "", "look into its log"]}


def _fit(folder: Path, job: Mapping[str, Any], transport: Transport) -> Path:
    import_short_names()
    arguments = ["--config", str(folder / "run.yaml")]
    if job["ckpt_path"]:
        arguments += ["--ckpt_path", job["ckpt_path"]]
    cli: Any = FederatedCLI("fit", arguments)
    rules = RoundRules(**job["rules"])
    deploy_over(cli.trainer, yaml.safe_load(cli.config_text), transport, rules, own_data=job["own_data"])
    cli.start(job["command_line"])
    return cli.trainer.run_dir
