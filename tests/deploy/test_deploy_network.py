"""A deployment over three network namespaces, as three machines: every packet is 20 ms on its way,
and 1 % of them are lost. It needs root and TUN devices."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from places import SUPPORT
from test_deploy_flower import RUN, finish, metadata_in, program, simulated, wait_for

from fl_lightning.deploy.certificates import make_certificates

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(importlib.util.find_spec("flwr") is None, reason="flwr is not installed"),
]
SERVER = "10.71.0.1"  # on the loopback of the server's namespace, and of no machine


def ip(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=False)


def end(process: subprocess.Popen) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[tuple[list[str], list[subprocess.Popen]]]:
    """Namespaces of the server and of two nodes, with a line from each node to the server, and the
    programs to end, the two lines the first."""
    if os.geteuid() or not shutil.which("ip") or not os.path.exists("/dev/net/tun"):
        pytest.skip("network namespaces need root, ip and /dev/net/tun")
    names = [f"fl-{os.getpid()}-{name}" for name in ("server", "node0", "node1")]
    programs: list[subprocess.Popen] = []
    try:
        for name in names:
            made = ip("netns", "add", name)
            if made.returncode:
                pytest.skip(f"no network namespace can be made: {made.stderr.strip()}")
            assert ip("-n", name, "link", "set", "lo", "up").returncode == 0
        assert ip("-n", names[0], "addr", "add", f"{SERVER}/32", "dev", "lo").returncode == 0
        for number, name in enumerate(names[1:]):
            log, subnet = tmp_path / f"line{number}.log", f"10.71.{number + 1}"
            line = [
                SUPPORT / "lossy_line.py",
                names[0],
                f"{subnet}.1",
                name,
                f"{subnet}.2",
                0.02,
                0.01,
            ]
            programs.append(program(sys.executable, *line, cwd=tmp_path, log=log))
            wait_for(log, "ready", 60)
            assert ip("-n", name, "route", "add", SERVER, "via", f"{subnet}.1").returncode == 0
        yield names, programs
    finally:
        for process in reversed(programs):
            end(process)
        for name in names:
            ip("netns", "del", name)


def test_three_machines_with_delay_and_loss_give_the_weights_of_the_simulation(machines, tmp_path):
    names, programs = machines
    make_certificates(tmp_path / "certs", [SERVER], 0)
    address = f"{SERVER}:8000"

    def start(name: str, log: str, *words: object) -> subprocess.Popen:
        process = program("ip", "netns", "exec", name, *words, cwd=tmp_path, log=tmp_path / log)
        programs.append(process)
        return process

    link = [
        "flower-superlink",
        "--host",
        SERVER,
        "--port",
        8000,
        "--ssl-ca-certfile",
        "certs/ca.crt",
    ]
    link += ["--ssl-certfile", "certs/server.pem", "--ssl-keyfile", "certs/server.key"]
    start(names[0], "superlink.log", *link, "--disable-runtime-dependency-installation")
    ours = [sys.executable, "-m", "fl_lightning"]
    for number, name in enumerate(names[1:]):
        words = [
            "node",
            "--superlink",
            address,
            "--folder",
            f"node{number}",
            "--partition_id",
            number,
        ]
        words += [
            "--num_partitions",
            2,
            "--root_certificates",
            "certs/ca.crt",
            "--name",
            f"n{number}",
        ]
        start(name, f"n{number}.log", *ours, *words)
    for number in range(2):
        wait_for(tmp_path / f"n{number}.log", "as SuperNode")
    words = ["deploy", *RUN, "--trainer.default_root_dir=deployed", f"--deploy.superlink={address}"]
    words += ["--deploy.root_certificates=certs/ca.crt", "--deploy.min_nodes=2"]
    log = tmp_path / "deploy.log"
    assert finish(start(names[0], "deploy.log", *ours, *words), log) == 0, log.read_text()[-5000:]
    found = metadata_in(tmp_path / "deployed")
    assert found["weights_sha256"] == simulated(tmp_path)["weights_sha256"]
    assert sorted(found["deployment"]["nodes"].values()) == [[0, 2], [1, 3]]
    for number in range(2):
        end(programs[number])
        _, carried, _, lost = (tmp_path / f"line{number}.log").read_text().split("\n")[1].split()
        assert int(carried) > 500
        assert int(lost) > 0
