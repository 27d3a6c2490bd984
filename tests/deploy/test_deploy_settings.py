"""What the commands ``deploy`` and ``node`` refuse at once, in one line, without Flower; and what
they take."""

from __future__ import annotations

import ast
import os
import re
import signal
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from test_deploy import ALL, ROOT, command_line

from fl_lightning.__main__ import main
from fl_lightning.deploy import command
from fl_lightning.deploy.command import Deployment
from fl_lightning.deploy.flower import fleet, launch
from fl_lightning.deploy.flower.addresses import not_found, require_tls
from fl_lightning.deploy.flower.launch import APP
from fl_lightning.errors import InputError


@pytest.fixture
def quiet(monkeypatch, tmp_path) -> Path:
    """Flower counts as installed, and whatever would be started fails the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command.launch, "require_flower", lambda: None)
    for name in ("flwr_run", "start_superlink", "start_node", "start_supernode"):
        monkeypatch.setattr(command.launch, name, lambda *a: pytest.fail("it was started"))
    return tmp_path


@pytest.fixture
def no_names(monkeypatch) -> None:
    """No name is known, on a machine with a network or without one."""

    def find(host, *rest, **more):
        raise socket.gaierror(socket.EAI_NONAME, f"{host} is not known")

    monkeypatch.setattr(socket, "getaddrinfo", find)


def test_a_program_of_flower_that_is_not_there_is_named(tmp_path):
    with (
        launch.Started() as started,
        pytest.raises(InputError, match="flower-nothing; it comes with flwr"),
    ):
        started.start(["flower-nothing"], tmp_path)


def said(capsys) -> str:
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--superlink=h:99999", "--root_certificates=own.yaml"], "address h:99999; it has a host and a port, 1 to 65535"),
        (["--superlink=127.0.0.1:0"], "address 127.0.0.1:0; it has a host and a port"),
        (["--superlink=127.0.0.1:²"], "address 127.0.0.1:²; it has a host and a port"),
        (["--overlays=nowhere.yaml"], "--overlays nowhere.yaml; there is no such file"),
        (["--overlays=own.yaml,nowhere.yaml"], "--overlays nowhere.yaml; there is no such file"),
        (["--allow=my package"], "--allow my package; it is the name of a package, as Python imports it"),
        (["--allow=a,,b"], "--allow ; it is the name of a package"),
        (["--private_key=nowhere"], "nowhere, the file of --private_key; there is no such file"),
        (["--private_key=."], "., the file of --private_key; it is a folder, and a file is needed"),
        (["--folder=/proc/x"], "--folder /proc/x; it cannot be made or written"),
        (["--folder=own.yaml"], "--folder own.yaml; it cannot be made or written"),
        (["--keep_days=-1"], "--keep_days -1; it is a number of days"),
        (["--partition_id=4", "--num_partitions=4"], "--partition_id 4 of --num_partitions 4; partitions are counted from 0"),
    ],
)  # fmt: skip
def test_a_node_refuses_its_settings_in_one_line(words, says, quiet, capsys):
    (quiet / "own.yaml").write_text("trainer: {accelerator: cpu}\n")
    assert main(["node", *words]) == 2
    assert says in (line := said(capsys))
    assert "Traceback" not in line


@pytest.mark.parametrize(
    ("more", "allowed"), [([], []), (["--model.network=my_networks.Mine"], ["my_networks"])]
)
def test_nodes_that_are_started_here_may_import_what_the_run_names(
    more, allowed, tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_networks.py").write_text(
        "from torch import nn\n\n\nclass Mine(nn.Sequential):\n    def __init__(self, num_classes):\n"
        "        super().__init__(nn.Flatten(), nn.LazyLinear(num_classes))\n"
    )
    monkeypatch.setattr(command.launch, "start_superlink", lambda *a: "127.0.0.1:1")
    started = []
    monkeypatch.setattr(command.launch, "start_node", lambda *a: started.append(a))
    cli = command_line("fedavg", tmp_path, *ALL[:5], *more)
    allow = command._own_packages(cli)
    command._reach(cli, Deployment(local_nodes=2), None, tmp_path / "nodes", allow)
    assert [words[-1] for words in started] == [allowed] * 2


@pytest.mark.parametrize(
    ("words", "overlays", "allow"),
    [
        (["--overlays=own.yaml", "--allow=mine"], ["own.yaml"], ("mine",)),
        (
            ["--overlays", "own.yaml,other.yaml", "--allow=a.b, c"],
            ["own.yaml", "other.yaml"],
            ("a.b", "c"),
        ),
        (
            ["--overlays=[own.yaml, other.yaml]", "--allow=[mine]"],
            ["own.yaml", "other.yaml"],
            ("mine",),
        ),
        (["--overlays=[a,b.yaml]"], None, ()),
        ([], [], ()),
    ],
)
def test_one_overlay_and_several_are_taken(words, overlays, allow, quiet, monkeypatch, capsys):
    for name in ("own", "other"):
        (quiet / f"{name}.yaml").write_text("trainer: {accelerator: cpu}\n")
    found = []
    monkeypatch.setattr(command, "builder", lambda files, own: found.append(list(map(str, files))))
    monkeypatch.setattr(
        command, "Node", lambda settings, *rest: found.append(settings.allow) or _Stop()
    )
    code = main(["node", "--superlink=none", *words])
    if overlays is None:
        assert code == 2
        assert "--overlays a; there is no such file" in said(capsys)
    else:
        assert found == [overlays, allow]


class _Stop:
    @property
    def answer(self):
        raise InputError("far enough", "", "")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--deploy.local_nodes=2", "--deploy.min_nodes=3"], "--deploy.min_nodes 3; 2 nodes are started here"),
        (["--deploy.local_nodes=2", "--deploy.root_certificates=x"], "root_certificates with --deploy.local_nodes or"),
        (["--deploy.superlink=127.0.0.1:99999"], "address 127.0.0.1:99999; it has a host and a port, 1 to 65535"),
        (["--deploy.superlink=no-such-host.invalid:80", "--deploy.root_certificates=ca"], "its host is not found (no-such"),
    ],
)  # fmt: skip
def test_deploy_refuses_its_settings_in_one_line(words, says, quiet, no_names, capsys):
    (quiet / "ca").touch()
    assert main(["deploy", *command_line("fedavg", quiet, *ALL[:5]).typed, *words]) == 2
    assert says in said(capsys)


@pytest.mark.parametrize(
    ("host", "warned"), [("192.0.2.7", True), ("127.0.0.1", False), ("[::1]", False)]
)
def test_a_superlink_that_others_can_reach_deserves_a_line(
    host, warned, quiet, capsys, caplog, monkeypatch
):
    (quiet / "ca").touch()
    monkeypatch.setattr(command, "check_deployable", lambda fed: _Stop().answer)
    words = [f"--deploy.superlink={host}:8000", "--deploy.root_certificates=ca"]
    assert main(["deploy", *command_line("fedavg", quiet, *ALL[:5]).typed, *words]) == 2
    assert "far enough" in said(capsys)
    lines = [line for line in caplog.messages if "can run code on its machine" in line]
    assert len(lines) == warned
    assert all(f"--deploy.superlink {host}:8000 is no loopback address" in line for line in lines)


def test_simulated_nodes_are_not_waited_for_beyond_their_number():
    with pytest.raises(InputError, match="5 nodes are started here"):
        Deployment(simulation=5, min_nodes=6).rules()
    assert Deployment(simulation=5, min_nodes=2).rules().min_nodes == 2
    assert Deployment(min_nodes=9).rules().min_nodes == 9


def test_a_port_is_one_of_those_that_there_are():
    require_tls("127.0.0.1:65535", None, "-")
    with pytest.raises(InputError, match="1 to 65535"):
        require_tls("127.0.0.1:65536", None, "-")


def test_a_host_is_found_or_not():
    assert not_found("127.0.0.1:1") == ""
    assert not_found("[::1]:1") == ""
    assert not_found("no..host:1")


def test_a_host_that_is_not_found_is_said_once_and_looked_for_again(
    monkeypatch, no_names, caplog, tmp_path
):
    looks = [0]

    def goes_on() -> bool:
        looks[0] += 1
        return looks[0] < 4

    monkeypatch.setattr(
        fleet, "_connector", lambda *arguments: lambda: pytest.fail("nobody is there")
    )
    monkeypatch.setattr(fleet, "environment", lambda home: {})
    monkeypatch.setattr(fleet, "RECONNECT_SECONDS", 0.0)
    fleet.serve("no-such-host.invalid:1", bytes.upper, tmp_path, name="n", goes_on=goes_on)
    lines = [line for line in caplog.messages if "not found" in line]
    assert len(lines) == 1
    assert lines[0].endswith("the node goes on looking for it")


def test_a_key_that_cannot_be_read_is_no_wrong_key(tmp_path):
    pytest.importorskip("cryptography")
    with pytest.raises(InputError, match=r"it cannot be read \(Is a directory\)"):
        fleet._keys(tmp_path)
    (tmp_path / "key").write_text("nonsense")
    with pytest.raises(InputError, match="it is a private key of an elliptic curve"):
        fleet._keys(tmp_path / "key")


@pytest.mark.slow
@pytest.mark.essential
def test_sigterm_ends_a_node(tmp_path):
    """Its own program was started by nobody else, so that its exit code says how it ended."""
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    words = [
        sys.executable,
        "-m",
        "fl_lightning",
        "node",
        "--superlink=none",
        f"--folder={tmp_path / 'n'}",
    ]
    process = subprocess.Popen(
        words, env={**os.environ, "PYTHONPATH": path}, stderr=subprocess.PIPE, text=True
    )
    try:
        while "listens at" not in (line := process.stderr.readline()):
            assert line, "it ended"
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 143


def test_flower_finds_its_apps_under_the_names_that_jobs_have():
    """Nodes of other versions look for these names, and Flower searches the text of the file for
    them."""
    named = re.findall(r'app = "(.+):(.+)"', APP)
    assert named == [("fl_lightning.deploy.flower", f"{half}_app") for half in ("server", "client")]
    for module, app in named:
        tree = ast.parse(Path(find_spec(module).origin).read_text())
        assigned = [
            target
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign)
            for target in node.targets
        ]
        assert app in {target.id for target in assigned if isinstance(target, ast.Name)}
