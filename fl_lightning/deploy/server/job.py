"""A deployment as a folder: what the command hands to the ServerApp, and what comes back.

``job.json`` has the folder to work in, that of nodes on this machine, the arguments of ``fit``, the
rules of rounds and the command line; ``run.yaml`` the whole configuration; ``begun`` is there once
the server's half runs, and has the run directory from the first round on; ``outcome.json`` is
written at the end. The folder stays on the server's machine: Flower is given its path alone. The
command removes it when it ends; a command that has left a run to itself leaves that to the server's
half.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.cli.parser import FederatedCLI, import_short_names
from fl_lightning.deploy.protocol.mail import Transport
from fl_lightning.deploy.server.halves import COMMAND, SERVER, here, is_gone
from fl_lightning.deploy.server.roster import RoundRules
from fl_lightning.deploy.server.server import deploy_over
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
    allow: Sequence[str] = (),
) -> None:
    """Write the files of a deployment that begins in the working directory of this process.

    Args:
        nodes: folder of the nodes that run on this machine, where some do.
        allow: further packages of which these nodes take classes.
    """
    job = {
        "directory": os.getcwd(),
        "nodes": str(nodes),
        "ckpt_path": ckpt_path,
        "rules": asdict(rules),
        "own_data": own_data,
        "allow": list(allow),
        "command_line": list(command_line),
    }
    disk.replace(folder / "run.yaml", config.encode())
    disk.replace(folder / "job.json", json.dumps(job).encode())


class RunRefused(RuntimeError):
    """The run ended as it should have, with one line that says why: nobody needs its traceback."""


def run_job(folder: Path, transport: Transport) -> None:
    """Run a deployment, and write what came of it.

    Raises:
        RunRefused: it was refused or stopped, so that Flower knows it too.
        Exception: whatever else ended it.
    """
    with here(folder, SERVER):
        (folder / "begun").touch()
        job = json.loads((folder / "job.json").read_text())
        os.chdir(job["directory"])
        sys.path.append(job["directory"])
        outcome: dict[str, Any] = {"code": 1, "error": ["the server was stopped", "", ""]}
        try:
            outcome = {"code": 0, "run_dir": str(_fit(folder, job, transport))}
        except (InputError, RunStopped) as error:
            code = 2 if isinstance(error, InputError) else 1
            outcome = {"code": code, "error": [error.given, error.rule, error.instead]}
            raise RunRefused(str(error)) from None
        except (KeyboardInterrupt, SystemExit):
            silent = "a SuperLink that had not heard of it for a minute"
            given = f"the server was stopped, by somebody or by {silent}"
            outcome = {"code": 1, "error": [given, "", how_to_go_on(folder)]}
            raise
        except Exception as error:
            where = f"its traceback is in {error.run_log}" if hasattr(error, "run_log") else ""
            outcome = {"code": 1, "error": [f"{type(error).__name__}: {error}", "", where]}
            raise
        finally:
            # with local nodes the command ends everything, and the folder
            with suppress(FileNotFoundError):
                disk.replace(folder / "outcome.json", json.dumps(outcome).encode())
            if is_gone(folder, COMMAND):  # it has left the run to itself
                shutil.rmtree(folder, ignore_errors=True)


def how_to_go_on(folder: Path) -> str:
    """Return in words how the run of a job is continued, with its run directory where it is
    known."""
    try:
        run = (folder / "begun").read_text().strip()
    except OSError:
        run = ""
    return f"continue with --ckpt_path {run}" if run else "no round was begun: start it anew"


def outcome_of(folder: Path) -> Mapping[str, Any]:
    """Return what came of a deployment; a code of 1 where nothing is known."""
    try:
        return json.loads((folder / "outcome.json").read_text())
    except (OSError, ValueError):
        given = (
            "the server's half of the run ended without a word, as a process does that is killed"
        )
        return {"code": 1, "error": [given, "", how_to_go_on(folder)]}


def _fit(folder: Path, job: Mapping[str, Any], transport: Transport) -> Path:
    import_short_names()
    arguments = ["--config", str(folder / "run.yaml")]
    if job["ckpt_path"]:
        arguments += ["--ckpt_path", job["ckpt_path"]]
    cli: Any = FederatedCLI("fit", arguments)
    rules = RoundRules(**job["rules"])

    def begin(run_dir: Path) -> None:
        with suppress(OSError):
            disk.replace(folder / "begun", str(run_dir.absolute()).encode())

    config = yaml.safe_load(cli.config_text)
    deploy_over(cli.trainer, config, transport, rules, own_data=job["own_data"], on_begin=begin)
    cli.start(job["command_line"])
    return cli.trainer.run_dir
