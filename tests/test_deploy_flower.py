"""Deployments through Flower on loopback: SuperLink, SuperNodes and ``flwr run`` as processes of their own."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fl_lightning.deploy.certificates import make_certificates
from fl_lightning.deploy.launch import environment, free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(importlib.util.find_spec("flwr") is None, reason="flwr is not installed"),
]
ROOT = Path(__file__).parent.parent
RUN = [
    "--config",
    str(ROOT / "configs" / "fedavg.yaml"),
    "--trainer.logger=false",
    "--trainer.max_rounds=3",
    "--trainer.callbacks=[]",
    "--trainer.participation=1.0",
    "--trainer.local_epochs=1",
    "--trainer.eval_every=3",
    "--trainer.accelerator=cpu",
    "--trainer.engine=sequential",
    "--trainer.workers=1",
    "--data.num_clients=4",
    "--data.partition=Shards",
    "--data.partition.classes_per_client=5",
]
CONNECTED = {"direct": "as SuperNode", "supernode": "SuperNode ID"}
PYTHONPATH = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])


def program(*words: object, cwd: Path, log: Path) -> subprocess.Popen:
    env = {**environment(cwd / "flower"), "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"}
    with open(log, "ab") as file:
        return subprocess.Popen(
            list(map(str, words)), cwd=cwd, env=env, stdout=file, stderr=subprocess.STDOUT
        )


def ours(*words: object, cwd: Path, log: str) -> subprocess.Popen:
    return program(sys.executable, "-m", "fl_lightning", *words, cwd=cwd, log=cwd / log)


def finish(process: subprocess.Popen, log: Path, seconds: float = 600.0) -> int:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        pytest.fail(f"not done within {seconds} s:\n{log.read_text()[-3000:]}")


def metadata_in(folder: Path) -> dict:
    (found,) = folder.glob("fedavg/*/metadata.json")
    return json.loads(found.read_text())


def simulated(folder: Path, *more: str) -> dict:
    process = ours("fit", *RUN, *more, "--trainer.default_root_dir=simulated", cwd=folder, log="fit.log")
    assert finish(process, folder / "fit.log") == 0, (folder / "fit.log").read_text()
    return metadata_in(folder / "simulated")


def test_a_run_on_two_local_nodes_gives_the_weights_of_the_simulation(tmp_path):
    words = ["deploy", *RUN, "--trainer.default_root_dir=deployed", "--deploy.local_nodes=2"]
    process, log = ours(*words, cwd=tmp_path, log="deploy.log"), tmp_path / "deploy.log"
    assert finish(process, log) == 0, log.read_text()
    found = metadata_in(tmp_path / "deployed")
    assert found["weights_sha256"] == simulated(tmp_path)["weights_sha256"]
    assert found["status"] == "finished"
    assert sorted(found["deployment"]["nodes"].values()) == [[0, 2], [1, 3]]


@pytest.fixture
def superlink(tmp_path: Path) -> Iterator[tuple[str, list[subprocess.Popen]]]:
    """A SuperLink with TLS that knows the keys of its nodes, and the list of programs to end."""
    make_certificates(tmp_path / "certs", ["127.0.0.1", "localhost"], 3)
    certs, address = tmp_path / "certs", f"127.0.0.1:{free_port()}"
    words = ["flower-superlink", "--host", "127.0.0.1", "--port", address.rpartition(":")[2]]
    words += ["--ssl-ca-certfile", certs / "ca.crt", "--ssl-certfile", certs / "server.pem"]
    words += ["--ssl-keyfile", certs / "server.key", "--enable-supernode-auth"]
    words += ["--disable-runtime-dependency-installation", "--database", tmp_path / "state.db"]
    programs = [program(*words, cwd=tmp_path, log=tmp_path / "superlink.log")]
    home = tmp_path / "flower"
    (home / "config.toml").write_text(
        f'[superlink.test]\naddress = "{address}"\nroot-certificates = "{certs / "ca.crt"}"\n'
    )
    try:
        for number in range(2):
            for _ in range(60):  # until the SuperLink listens
                words = ["flwr", "supernode", "register", certs / f"node{number}.pub", "test"]
                if program(*words, cwd=tmp_path, log=tmp_path / "register.log").wait(120) == 0:
                    break
                time.sleep(1)
            else:
                pytest.fail((tmp_path / "register.log").read_text()[-3000:])
        yield address, programs
    finally:
        for process in reversed(programs):
            process.terminate()
        for process in programs:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def node_words(address: str, tmp_path: Path, number: int, of: int) -> list[object]:
    words = ["node", "--superlink", address, "--folder", f"node{number}", "--partition_id", number]
    words += ["--num_partitions", of, "--name", f"n{number}", "--private_key", f"certs/node{number}"]
    return [*words, "--root_certificates", "certs/ca.crt"]


@pytest.mark.parametrize("connection", ["direct", "supernode"])
def test_keys_and_certificates_are_checked_and_a_killed_node_costs_a_round(superlink, connection, tmp_path):
    """The third node's key is not registered. The second is killed when its orders of round 2 are there, and
    its clients are dropped then and, as it stays away, afterwards."""
    address, programs = superlink
    nodes = [
        ours(
            *node_words(address, tmp_path, n, 2 if n < 2 else 3),
            f"--connection={connection}",
            cwd=tmp_path,
            log=f"n{n}.log",
        )
        for n in range(3)
    ]
    programs += nodes
    words = ["deploy", *RUN, "--trainer.default_root_dir=deployed", f"--deploy.superlink={address}"]
    words += ["--deploy.root_certificates=certs/ca.crt", "--deploy.min_nodes=1", "--deploy.round_seconds=90"]
    for number in range(2):
        wait_for(tmp_path / f"n{number}.log", CONNECTED[connection])
    process = ours(*words, cwd=tmp_path, log="deploy.log")
    programs.append(process)

    def kill() -> None:
        (run,) = (tmp_path / "deployed" / "fedavg").iterdir()
        wait_for(run / "metrics.csv", "\n1,")
        nodes[1].send_signal(signal.SIGKILL)

    wait_for(tmp_path / "deploy.log", "n1")  # it was checked
    while not list((tmp_path / "deployed").glob("fedavg/*/metrics.csv")):
        time.sleep(0.05)
        assert process.poll() is None, (tmp_path / "deploy.log").read_text()[-3000:]
    threading.Thread(target=kill, daemon=True).start()
    assert finish(process, tmp_path / "deploy.log") == 0, (tmp_path / "deploy.log").read_text()[-5000:]
    (run,) = (tmp_path / "deployed" / "fedavg").iterdir()
    dropped = [
        line.split(",")[:2] for line in (run / "ledger.csv").read_text().splitlines() if "dropped" in line
    ]
    assert dropped in (
        [["2", "1"], ["2", "3"], ["3", "1"], ["3", "3"]],
        [["3", "1"], ["3", "3"]],  # its answers of round 2 were on their way already
    )
    assert "n2" not in (tmp_path / "deploy.log").read_text()
    assert nodes[2].poll() is not None or CONNECTED[connection] not in (tmp_path / "n2.log").read_text()


def wait_for(path: Path, text: str, seconds: float = 300.0) -> None:
    ends = time.monotonic() + seconds
    while not (path.exists() and text in path.read_text()):
        assert time.monotonic() < ends, f"{text!r} never came:\n{path.read_text() if path.exists() else ''}"
        time.sleep(0.05)
