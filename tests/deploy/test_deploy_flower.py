"""Deployments through Flower on loopback: SuperLink, SuperNodes and ``flwr run`` as processes of
their own."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from own_leaves import SIZES, TRAINER, leaf, leaf_file
from places import ROOT
from test_deploy import wait_until

from fl_lightning.cli.parser import FederatedCLI
from fl_lightning.deploy.certificates import make_certificates
from fl_lightning.deploy.flower.addresses import free_port
from fl_lightning.deploy.flower.launch import environment
from fl_lightning.hooks import Stressor

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(importlib.util.find_spec("flwr") is None, reason="flwr is not installed"),
]
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
    (found,) = folder.glob("*/*/metadata.json")
    return json.loads(found.read_text())


def simulated(folder: Path, words: Sequence[str] = RUN) -> dict:
    process = ours("fit", *words, "--trainer.default_root_dir=simulated", cwd=folder, log="fit.log")
    assert finish(process, folder / "fit.log") == 0, (folder / "fit.log").read_text()
    return metadata_in(folder / "simulated")


SMALL = [
    *(
        f"--trainer.{setting}"
        for setting in ("logger=false", "callbacks=[]", "max_rounds=2", "eval_every=2")
    ),
    *(
        f"--trainer.{setting}"
        for setting in ("participation=1.0", "accelerator=cpu", "engine=sequential")
    ),
    *("--trainer.workers=1", "--trainer.local_epochs=1", "--data.num_clients=4"),
]
IMAGES = [
    "--data.dataset=synthetic",
    "--data.synthetic_examples=240",
    "--data.synthetic_test_examples=40",
]
SHARDS = ["--data.partition=Shards", "--data.partition.classes_per_client=3"]


@pytest.mark.parametrize(
    ("config", "more"),
    [
        ("kd_default", [*IMAGES, *SHARDS]),
        ("fedkd", [*IMAGES, *SHARDS, "--data.public_examples=60", "--model.distill_epochs=2"]),
        ("fedmosaic_digits", SHARDS),
        ("lora_default", ["--trainer.max_local_steps=2", "--data.examples_per_client=100"]),
        ("vemoe_default", ["--trainer.max_local_steps=2", "--data.examples_per_client=100"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_kind_of_method_gives_the_weights_of_its_simulation(config, more, tmp_path):
    words = ["--config", str(ROOT / "configs" / f"{config}.yaml"), *SMALL, *more]
    deploy = ["deploy", *words, "--trainer.default_root_dir=deployed", "--deploy.local_nodes=2"]
    process, log = ours(*deploy, cwd=tmp_path, log="deploy.log"), tmp_path / "deploy.log"
    assert finish(process, log) == 0, log.read_text()
    found = metadata_in(tmp_path / "deployed")
    assert found["status"] == "finished"
    assert found["weights_sha256"] == simulated(tmp_path, words)["weights_sha256"]


def test_a_secure_sum_gives_the_weights_and_bytes_of_the_simulation(tmp_path):
    pytest.importorskip("Crypto")
    words = ["--config", str(ROOT / "configs" / "fedavg.yaml"), *SMALL, *IMAGES, *SHARDS]
    words += ["--trainer.secure_sum={threshold: 0.6}"]
    deploy = ["deploy", *words, "--trainer.default_root_dir=deployed", "--deploy.local_nodes=2"]
    process, log = ours(*deploy, cwd=tmp_path, log="deploy.log"), tmp_path / "deploy.log"
    assert finish(process, log) == 0, log.read_text()
    found = metadata_in(tmp_path / "deployed")
    assert found["weights_sha256"] == simulated(tmp_path, words)["weights_sha256"]
    ledgers = [
        next((tmp_path / name).glob("*/*/ledger.csv")).read_text()
        for name in ("deployed", "simulated")
    ]
    assert ledgers[0] == ledgers[1]
    assert "no secrets" not in log.read_text()
    assert list(
        (tmp_path / "deployed" / "nodes" / "node1" / "unmasked").glob("*/round_000002.json")
    )


def test_a_run_on_two_local_nodes_gives_the_weights_of_the_simulation(tmp_path):
    words = ["deploy", *RUN, "--trainer.default_root_dir=deployed", "--deploy.local_nodes=2"]
    process, log = ours(*words, cwd=tmp_path, log="deploy.log"), tmp_path / "deploy.log"
    assert finish(process, log) == 0, log.read_text()
    found = metadata_in(tmp_path / "deployed")
    assert found["weights_sha256"] == simulated(tmp_path)["weights_sha256"]
    assert found["status"] == "finished"
    assert sorted(found["deployment"]["nodes"].values()) == [[0, 2], [1, 3]]


def start_superlink(tmp_path: Path, address: str) -> subprocess.Popen:
    """A SuperLink with TLS that asks nodes for keys, and that finds its database again."""
    certs = tmp_path / "certs"
    words = ["flower-superlink", "--host", "127.0.0.1", "--port", address.rpartition(":")[2]]
    words += ["--ssl-ca-certfile", certs / "ca.crt", "--ssl-certfile", certs / "server.pem"]
    words += ["--ssl-keyfile", certs / "server.key", "--enable-supernode-auth"]
    words += ["--disable-runtime-dependency-installation", "--database", tmp_path / "state.db"]
    return program(*words, cwd=tmp_path, log=tmp_path / "superlink.log")


@pytest.fixture
def superlink(tmp_path: Path) -> Iterator[tuple[str, list[subprocess.Popen]]]:
    """The address of a SuperLink that knows the keys of its nodes, and the list of programs to end,
    itself the first."""
    make_certificates(tmp_path / "certs", ["127.0.0.1", "localhost"], 3)
    certs, address = tmp_path / "certs", f"127.0.0.1:{free_port()}"
    programs = [start_superlink(tmp_path, address)]
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
        end(programs)


def end(programs: Sequence[subprocess.Popen]) -> None:
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
    words += [
        "--num_partitions",
        of,
        "--name",
        f"n{number}",
        "--private_key",
        f"certs/node{number}",
    ]
    return [*words, "--root_certificates", "certs/ca.crt"]


@pytest.mark.parametrize("connection", ["direct", "supernode"])
def test_keys_and_certificates_are_checked_and_a_killed_node_costs_a_round(
    superlink, connection, tmp_path
):
    """The third node's key is not registered. The second is killed when its orders of round 2 are
    there, and its clients are dropped then and, as it stays away, afterwards."""
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
    words += [
        "--deploy.root_certificates=certs/ca.crt",
        "--deploy.min_nodes=1",
        "--deploy.round_seconds=90",
    ]
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
    assert finish(process, tmp_path / "deploy.log") == 0, (tmp_path / "deploy.log").read_text()[
        -5000:
    ]
    (run,) = (tmp_path / "deployed" / "fedavg").iterdir()
    dropped = [
        line.split(",")[:2]
        for line in (run / "ledger.csv").read_text().splitlines()
        if "dropped" in line
    ]
    assert dropped in (
        [["2", "1"], ["2", "3"], ["3", "1"], ["3", "3"]],
        [["3", "1"], ["3", "3"]],  # its answers of round 2 were on their way already
    )
    assert "n2" not in (tmp_path / "deploy.log").read_text()
    assert (
        nodes[2].poll() is not None
        or CONNECTED[connection] not in (tmp_path / "n2.log").read_text()
    )


def test_a_node_that_answers_with_the_uid_of_another_is_refused_by_its_key(superlink, tmp_path):
    """Both keys are registered, and both nodes have all clients: without its key the second one to
    answer would be the first one that was started again, and would take its place."""
    address, programs = superlink
    for number in range(2):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "uid").write_text("0123456789abcdef" * 2)
        words = [*node_words(address, tmp_path, number, 1), "--partition_id=0"]
        programs.append(ours(*words, cwd=tmp_path, log=f"n{number}.log"))
    for number in range(2):
        wait_for(tmp_path / f"n{number}.log", CONNECTED["direct"])
    words = ["deploy", *RUN, "--trainer.default_root_dir=deployed", f"--deploy.superlink={address}"]
    words += [
        "--deploy.root_certificates=certs/ca.crt",
        "--deploy.min_nodes=2",
        "--deploy.wait_seconds=240",
    ]
    process = ours(*words, cwd=tmp_path, log="deploy.log")
    programs.append(process)
    code, said = finish(process, tmp_path / "deploy.log"), (tmp_path / "deploy.log").read_text()
    assert code == 2, said[-3000:]
    assert re.search(r"error: node n[01]; it says that it is node \d+, under another key", said), (
        said[-3000:]
    )
    assert not (tmp_path / "deployed").exists()


def test_a_superlink_that_is_killed_costs_nothing(superlink, tmp_path):
    """With it goes the server's half of the run, which is continued from its checkpoint; nodes come
    back by themselves. Which rounds were done before makes no difference."""
    address, programs = superlink
    programs += [
        ours(*node_words(address, tmp_path, n, 2), cwd=tmp_path, log=f"n{n}.log") for n in range(2)
    ]
    deploy = [
        "deploy",
        *RUN,
        "--trainer.default_root_dir=deployed",
        f"--deploy.superlink={address}",
    ]
    deploy += ["--deploy.root_certificates=certs/ca.crt", "--deploy.min_nodes=2"]
    for number in range(2):
        wait_for(tmp_path / f"n{number}.log", "as SuperNode")
    first = ours(*deploy, cwd=tmp_path, log="deploy.log")
    programs.append(first)
    while not (checkpoints := list((tmp_path / "deployed").glob("fedavg/*/checkpoints/round_*"))):
        time.sleep(0.02)
        assert first.poll() is None, (tmp_path / "deploy.log").read_text()[-3000:]
    programs[0].kill()
    programs[0].wait()
    run = checkpoints[0].parent.parent
    assert finish(first, tmp_path / "deploy.log") == 1
    assert (
        f"the SuperLink at {address} went away during the run"
        in (tmp_path / "deploy.log").read_text()
    )
    rounds = len((run / "metrics.csv").read_text().splitlines()) - 1
    programs[0] = start_superlink(tmp_path, address)
    for number in range(2):
        wait_for(tmp_path / f"n{number}.log", "Connection successful")
    second = ours(*deploy, f"--ckpt_path={run}", cwd=tmp_path, log="again.log")
    programs.append(second)
    assert finish(second, tmp_path / "again.log") == 0, (tmp_path / "again.log").read_text()[-5000:]
    assert rounds < 3
    assert (
        metadata_in(tmp_path / "deployed")["weights_sha256"]
        == simulated(tmp_path)["weights_sha256"]
    )


def test_a_superlink_that_forgot_its_nodes_lets_them_in_anew(tmp_path):
    """It is killed and started again without a database. Flower would end a node that is not known,
    by a signal to itself."""
    port = free_port()
    words = ["flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", port]
    words += ["--disable-runtime-dependency-installation"]
    programs = [program(*words, cwd=tmp_path, log=tmp_path / "superlink.log")]
    node = ["node", "--superlink", f"127.0.0.1:{port}", "--folder", "node"]
    try:
        programs.append(ours(*node, cwd=tmp_path, log="n.log"))
        wait_for(tmp_path / "n.log", "as SuperNode")
        programs[0].kill()
        programs[0].wait()
        programs[0] = program(*words, cwd=tmp_path, log=tmp_path / "superlink.log")
        wait_for(tmp_path / "n.log", "connection lost; trying again")
        wait_for(tmp_path / "n.log", "as SuperNode", times=2)
        assert programs[1].poll() is None
    finally:
        end(programs)


def server_halves(address: str) -> list[int]:
    """The ids of the processes that Flower runs for the server's half on a SuperLink of this
    test."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            words = path.read_bytes().split(b"\0")
            if words[1:2] and words[1].endswith(b"flwr-serverapp") and address.encode() in words:
                found.append(int(path.parent.name))
    return found


def test_a_run_that_is_left_to_itself_ends_well_and_one_whose_half_is_killed_says_how_to_go_on(
    tmp_path, monkeypatch
):
    """SIGTERM ends the command alone; then the server's half of a second run is killed, and the
    third goes on with it. No job leaves its folder behind."""
    jobs, address = tmp_path / "jobs", f"127.0.0.1:{free_port()}"
    jobs.mkdir()
    monkeypatch.setenv("TMPDIR", str(jobs))
    words = [
        "flower-superlink",
        "--insecure",
        "--host",
        "127.0.0.1",
        "--port",
        address.rpartition(":")[2],
    ]
    words += ["--disable-runtime-dependency-installation"]
    programs = [program(*words, cwd=tmp_path, log=tmp_path / "superlink.log")]
    deploy = ["deploy", *RUN, f"--deploy.superlink={address}", "--deploy.min_nodes=2"]
    try:
        wait_until_it_listens(address)
        for n in range(2):
            node = ["node", "--superlink", address, "--folder", f"node{n}", "--partition_id", n]
            programs.append(ours(*node, "--num_partitions=2", cwd=tmp_path, log=f"n{n}.log"))
        for n in range(2):
            wait_for(tmp_path / f"n{n}.log", "as SuperNode")
        first = ours(*deploy, "--trainer.default_root_dir=deployed", cwd=tmp_path, log="first.log")
        programs.append(first)
        wait_for(tmp_path / "first.log", "has 2 clients")
        first.send_signal(signal.SIGTERM)
        assert finish(first, tmp_path / "first.log") == 143
        assert "the run goes on at" in (tmp_path / "first.log").read_text()
        wait_until(lambda: not list(jobs.glob("fl-deploy-*")), 300)
        expected = simulated(tmp_path)["weights_sha256"]
        assert metadata_in(tmp_path / "deployed")["weights_sha256"] == expected
        second = ours(*deploy, "--trainer.default_root_dir=killed", cwd=tmp_path, log="second.log")
        programs.append(second)
        wait_until(lambda: list((tmp_path / "killed").glob("*/*/checkpoints/round_*")), 300)
        (pid,) = server_halves(address)
        os.kill(pid, signal.SIGKILL)
        assert finish(second, tmp_path / "second.log") == 1
        (run,) = (tmp_path / "killed").glob("*/*/")
        assert f"continue with --ckpt_path {run}" in (tmp_path / "second.log").read_text()
        again = [*deploy, "--trainer.default_root_dir=killed", f"--ckpt_path={run}"]
        assert finish(ours(*again, cwd=tmp_path, log="third.log"), tmp_path / "third.log") == 0
        assert metadata_in(tmp_path / "killed")["weights_sha256"] == expected
        assert not list(jobs.glob("fl-deploy-*"))
    finally:
        end(programs)


def test_a_node_that_is_killed_and_started_again_has_what_its_clients_kept(superlink, tmp_path):
    """Clients of FedKD keep a network of their own. The second node is killed after round 1 and
    started again on its folder; how many rounds it misses depends on when, and the ledger says
    it."""
    address, programs = superlink
    config = str(ROOT / "configs" / "fedkd.yaml")
    more = ["--data.public_examples=60", "--model.distill_epochs=2", "--trainer.max_rounds=4"]
    words = ["--config", config, *SMALL, *IMAGES, *SHARDS, *more]

    def start(number: int) -> subprocess.Popen:
        node = ours(*node_words(address, tmp_path, number, 2), cwd=tmp_path, log=f"n{number}.log")
        programs.append(node)
        return node

    nodes = [start(number) for number in range(2)]
    for number in range(2):
        wait_for(tmp_path / f"n{number}.log", "as SuperNode")
    deploy = [
        "deploy",
        *words,
        "--trainer.default_root_dir=deployed",
        f"--deploy.superlink={address}",
    ]
    deploy += [
        "--deploy.root_certificates=certs/ca.crt",
        "--deploy.min_nodes=2",
        "--deploy.wait_seconds=600",
    ]
    process = ours(*deploy, "--deploy.round_seconds=120", cwd=tmp_path, log="deploy.log")
    programs.append(process)
    while not any(
        "\n1," in path.read_text() for path in (tmp_path / "deployed").glob("*/*/metrics.csv")
    ):
        time.sleep(0.02)
        assert process.poll() is None, (tmp_path / "deploy.log").read_text()[-3000:]
    nodes[1].kill()
    nodes[1].wait()
    start(1)
    assert finish(process, tmp_path / "deploy.log") == 0, (tmp_path / "deploy.log").read_text()[
        -5000:
    ]
    (run,) = (tmp_path / "deployed").glob("*/*/")
    with (run / "ledger.csv").open() as file:
        rows = [
            (int(row["round"]), int(row["client"]), row["status"]) for row in csv.DictReader(file)
        ]
    missed = {(round, client) for round, client, status in rows if status == "dropped"}
    assert {client for _, client in missed} <= {1, 3}
    assert all((4, client, "trained") in rows for client in range(4))  # it came back
    reference = FederatedCLI(
        "fit", [*words, f"--trainer.default_root_dir={tmp_path / 'simulated'}"]
    )
    reference.trainer.callbacks.append(Missed(missed))
    reference.start()
    found = json.loads((run / "metadata.json").read_text())
    assert found["weights_sha256"] == metadata_in(tmp_path / "simulated")["weights_sha256"]


class Missed(Stressor):
    """Drops clients before they train, in given rounds."""

    def __init__(self, missed: Collection[tuple[int, int]]) -> None:
        self.missed = missed

    def change_cohort(self, cohort, *, round, context):
        return [replace(each, trains=(round, each.client.id) not in self.missed) for each in cohort]


def test_an_expired_certificate_ends_node_and_run_with_one_line(tmp_path):
    make_certificates(tmp_path / "certs", ["127.0.0.1"], 1, days=-1)
    address = f"127.0.0.1:{free_port()}"
    programs = [start_superlink(tmp_path, address)]
    try:
        wait_until_it_listens(address)
        node = ours(*node_words(address, tmp_path, 0, 1), cwd=tmp_path, log="n0.log")
        words = ["deploy", *RUN, f"--deploy.superlink={address}"]
        run = ours(
            *words, "--deploy.root_certificates=certs/ca.crt", cwd=tmp_path, log="deploy.log"
        )
        programs += [node, run]
        for process, log in ((node, "n0.log"), (run, "deploy.log")):
            assert finish(process, tmp_path / log, 300.0) == 2
            said = (tmp_path / log).read_text()
            assert f"the certificate of the SuperLink at {address}; certificate has expired" in said
            assert "Traceback" not in said
    finally:
        end(programs)


def test_four_nodes_with_data_of_their_own_give_the_weights_of_one_data_module_with_all(tmp_path):
    whole = leaf_file(tmp_path / "whole.json", SIZES)
    test = leaf_file(tmp_path / "test.json", {"t": 30})
    for name, train in (("server", test), ("simulation", whole)):
        settings = {
            "trainer": {**TRAINER, "default_root_dir": name},
            "model": {"class_path": "FedAvg", "init_args": {"network": "mlp"}},
            "data": leaf(train, test),
        }
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(settings))
    address = f"127.0.0.1:{free_port()}"
    words = [
        "flower-superlink",
        "--insecure",
        "--host",
        "127.0.0.1",
        "--port",
        address.rpartition(":")[2],
    ]
    words += ["--disable-runtime-dependency-installation"]
    programs = [program(*words, cwd=tmp_path, log=tmp_path / "superlink.log")]
    try:
        wait_until_it_listens(address)
        for number, user in enumerate(SIZES):
            leaf_file(tmp_path / f"own{number}.json", {user: SIZES[user]})
            node = [
                "node",
                "--superlink",
                address,
                "--folder",
                f"node{number}",
                "--name",
                f"n{number}",
            ]
            node += ["--data", f"own{number}.json", "--partition_id", number, "--num_partitions", 4]
            programs.append(ours(*node, cwd=tmp_path, log=f"n{number}.log"))
        for number in range(4):
            wait_for(tmp_path / f"n{number}.log", "as SuperNode")
        words = ["deploy", "--config", "server.yaml", f"--deploy.superlink={address}"]
        words += ["--deploy.own_data=true", "--deploy.min_nodes=4"]
        run = ours(*words, cwd=tmp_path, log="deploy.log")
        programs.append(run)
        assert finish(run, tmp_path / "deploy.log") == 0, (tmp_path / "deploy.log").read_text()[
            -5000:
        ]
    finally:
        end(programs)
    fit = ours("fit", "--config", "simulation.yaml", cwd=tmp_path, log="fit.log")
    assert finish(fit, tmp_path / "fit.log") == 0, (tmp_path / "fit.log").read_text()
    found, reference = metadata_in(tmp_path / "server"), metadata_in(tmp_path / "simulation")
    assert found["weights_sha256"] == reference["weights_sha256"]
    assert sorted(found["deployment"]["nodes"].values()) == [[0], [1], [2], [3]]


def wait_for(path: Path, text: str, seconds: float = 300.0, times: int = 1) -> None:
    ends = time.monotonic() + seconds
    while not (path.exists() and path.read_text().count(text) >= times):
        assert time.monotonic() < ends, (
            f"{text!r} never came:\n{path.read_text() if path.exists() else ''}"
        )
        time.sleep(0.05)


def wait_until_it_listens(address: str, seconds: float = 300.0) -> None:
    ends = time.monotonic() + seconds
    while True:
        with socket.socket() as door:
            if door.connect_ex(("127.0.0.1", int(address.rpartition(":")[2]))) == 0:
                return
        assert time.monotonic() < ends, "it does not listen"
        time.sleep(0.1)
