"""Flower's programs as child processes, which end with this one: SuperLink, SuperNode, ``flwr
run``."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType
from typing import Any

from fl_lightning.deploy.flower.addresses import (
    answers,
    check_handshake,
    free_port,
    require_no_tls,
    require_tls,
)
from fl_lightning.deploy.node.folders import locked, own_folder
from fl_lightning.deploy.node.node import NodeSettings
from fl_lightning.deploy.server.halves import SERVER, is_gone
from fl_lightning.deploy.server.job import how_to_go_on
from fl_lightning.engines.worker import end_with
from fl_lightning.errors import InputError, RunStopped, as_bad_input

START_SECONDS = 120.0  # that a SuperLink may take until it listens
LOOK_SECONDS = 1.0  # between looks whether the server's half is still there
LAST_LOG_SECONDS = 3.0  # that a log may go on after the server's half was killed
END_SECONDS = 10.0  # that a program has to end after SIGTERM
APP = """\
[project]
name = "fl-lightning-deployment"
version = "1.0.0"
description = "A run of fl_lightning on nodes that have it installed"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "fl-lightning"

[tool.flwr.app.components]
serverapp = "fl_lightning.deploy.flower:server_app"
clientapp = "fl_lightning.deploy.flower:client_app"

[tool.flwr.app.config]
job = "{job}"
"""
"""The app that Flower is given: names of what is installed, and the path of the job; no code."""


class Started:
    """The programs that were started, in a context that ends them."""

    def __init__(self) -> None:
        self.programs: list[subprocess.Popen] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Started:
        # SIGTERM as an exception, so that programs are ended as after Ctrl-C
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._before = {signal.SIGTERM: signal.signal(signal.SIGTERM, _leave)}
        return self

    def start(
        self, words: Sequence[str], home: Path, output: Path | None = None
    ) -> subprocess.Popen:
        """Start a program, with Flower's own files under ``home`` and without its telemetry.

        Args:
            output: the file that what it prints is appended to; None: it prints where this process
                does.

        Raises:
            InputError: there is no such program.
        """
        parent, env = os.getpid(), environment(home)
        rule = "it comes with flwr and is not on the PATH"
        instead = "activate the environment that has flwr"
        missing = as_bad_input(words[0], rule, instead, FileNotFoundError)
        with open(output or os.devnull, "ab") as file, missing:
            program = subprocess.Popen(
                list(words),
                env=env,
                stdout=file if output else None,
                stderr=subprocess.STDOUT if output else None,
                preexec_fn=lambda: end_with(parent),
                start_new_session=True,
            )
        self.programs.append(program)
        return program

    def all_run(self) -> bool:
        """Return whether none of them has ended."""
        return all(program.poll() is None for program in self.programs)

    def __exit__(self, *error: object) -> None:
        for program in reversed(self.programs):
            program.terminate()
        ends = time.monotonic() + END_SECONDS
        for program in reversed(self.programs):
            try:
                program.wait(max(0.0, ends - time.monotonic()))
            except subprocess.TimeoutExpired:
                program.kill()
                program.wait()
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def environment(home: Path) -> dict[str, str]:
    """Return the environment of Flower's programs: they find each other and this package, and tell
    nobody."""
    home.mkdir(parents=True, exist_ok=True)
    return {
        **os.environ,
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        # for Ray, in Flower's simulation engine: its address is 127.0.0.1, and it does not report
        # its use
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
    }


def require_flower() -> None:
    """Refuse to go on without Flower."""
    install = "pip install 'fl_lightning[deploy]'"
    with as_bad_input(
        "deployment", "it needs Flower, the package flwr", install, PackageNotFoundError
    ):
        version("flwr")


def start_superlink(started: Started, folder: Path, *more: str) -> str:
    """Start a SuperLink on a free port of 127.0.0.1, wait until it listens, and return its address.

    Args:
        folder: where its own files and its log are.
        more: arguments of ``flower-superlink``.

    Raises:
        RunStopped: it did not start.
    """
    port = free_port()
    folder.mkdir(parents=True, exist_ok=True)
    output = folder / "superlink.log"
    words = ["flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(port)]
    words += ["--disable-runtime-dependency-installation", *more]
    program = started.start(words, folder / "flower", output)
    ends = time.monotonic() + START_SECONDS
    while time.monotonic() < ends and program.poll() is None:
        with socket.socket() as door:
            if door.connect_ex(("127.0.0.1", port)) == 0:
                return f"127.0.0.1:{port}"
        time.sleep(0.2)
    raise RunStopped("the SuperLink did not start", "a deployment needs one", f"read {output}")


def start_node(
    started: Started, address: str, folder: Path, number: int, of: int, allow: Sequence[str] = ()
) -> subprocess.Popen:
    """Start a node on this machine.

    Args:
        allow: packages whose classes a run may name.

    Raises:
        InputError: another node has the folder.
    """
    words = [
        sys.executable,
        "-m",
        "fl_lightning",
        "node",
        "--superlink",
        address,
        "--folder",
        str(folder),
    ]
    words += ["--partition_id", str(number), "--num_partitions", str(of)]
    words += ["--allow", ",".join(allow)] if allow else []
    own_folder(folder)
    with locked(folder):  # else the node would end, and say why in its own log alone
        pass
    return started.start(words, folder / "flower", folder / "node.log")


def start_supernode(
    started: Started,
    address: str,
    socket_path: Path,
    settings: NodeSettings,
    root_certificates: str | None,
    private_key: str | None,
) -> subprocess.Popen:
    """Start the SuperNode that brings a SuperLink's messages to the node's socket."""
    words = ["flower-supernode", "--superlink", address, "--port", str(free_port())]
    words += (
        ["--insecure"] if root_certificates is None else ["--root-certificates", root_certificates]
    )
    words += [] if private_key is None else ["--auth-supernode-private-key", private_key]
    words += ["--node-config", f'socket="{socket_path}" partition-id={settings.partition_id}']
    return started.start(words, settings.folder / "flower")


def flwr_run(folder: Path, address: str, root_certificates: str | None, *more: str) -> None:
    """Start the run of a job on a SuperLink and show its log until it ends.

    Args:
        more: arguments of ``flwr run``.

    Raises:
        InputError: the SuperLink does not take it.
        RunStopped: the SuperLink went away before the run had an outcome.
    """
    require_tls(address, root_certificates, "--deploy.root_certificates")
    check_handshake(address, root_certificates, "--deploy.root_certificates")
    home, app = folder / "flower", folder / "app"
    app.mkdir()
    (app / "pyproject.toml").write_text(APP.format(job=folder))
    home.mkdir()
    security = (
        "insecure = true"
        if root_certificates is None
        else f'root-certificates = "{Path(root_certificates).absolute()}"'
    )
    (home / "config.toml").write_text(
        f'[superlink.deployment]\naddress = "{address}"\n{security}\n'
    )
    words = ["flwr", "run", str(app), "deployment", "--stream", *more]
    code = _show(words, folder, home)
    if (folder / "outcome.json").exists():
        return
    begun = (folder / "begun").exists()
    if begun and not answers(address):
        raise RunStopped(
            f"the SuperLink at {address} went away during the run",
            "the server's half of a run ends with its SuperLink",
            f"start it again, then {how_to_go_on(folder)}",
        )
    if code and not begun:
        require_no_tls(address, root_certificates, "--deploy.root_certificates")
        raise InputError(
            f"--deploy.superlink {address}",
            "it did not take the run; its answer is above",
            "start flower-superlink there, or name another",
        )


def goes_on(folder: Path) -> bool:
    """Return whether the server's half of a job, whose log has ended, is still at work ten seconds
    later."""
    ends = time.monotonic() + END_SECONDS
    while (folder / "begun").exists() and not (folder / "outcome.json").exists():
        if is_gone(folder, SERVER):
            return False
        if time.monotonic() >= ends:
            return True
        time.sleep(0.2)
    return False


def _show(words: Sequence[str], folder: Path, home: Path) -> int:
    """Run ``flwr run``, which shows the log of the server's half, and return its exit code.

    Flower notices after a minute that this half was killed; here its lock says so at once.
    """
    program = subprocess.Popen(words, env=environment(home))
    try:
        while program.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                program.wait(LOOK_SECONDS)
            if is_gone(folder, SERVER) and not (folder / "outcome.json").exists():
                with suppress(subprocess.TimeoutExpired):
                    program.wait(LAST_LOG_SECONDS)
                break
        return program.poll() or 0
    finally:
        if program.poll() is None:
            program.terminate()
            try:
                program.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                program.kill()
                program.wait()


def log_to_stderr() -> None:
    """Show the log of this package."""
    package = logging.getLogger("fl_lightning")
    package.setLevel(logging.INFO)
    if not package.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
        package.addHandler(handler)
