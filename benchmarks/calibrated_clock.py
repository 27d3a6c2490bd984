"""Print how well virtual time that is calibrated from round 1 of a deployment predicts its other
rounds.

    python benchmarks/calibrated_clock.py --rounds 8 --rates 1 2 4

needs root, ``ip`` and ``tc`` with ``sch_tbf``, and the extra ``deploy``. Each node is a network
namespace of its own with a line to the server's whose rate in both directions is limited by the
kernel, in Mbit/s; each has one client. A deployment runs with ``Deadline`` without end, which
measures and leaves nobody out, and leaves ``devices.csv``, from round 1 alone. A simulation with
these devices then says how long each round takes; and how long those of a deployment of another
method take, whose uploads have another size and whose round 1 is not used.
"""

from __future__ import annotations

import argparse
import csv
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import mean

from fl_lightning.deploy.certificates import make_certificates

SERVER = "10.72.0.1"  # on the loopback of the server's namespace, and of no machine
ROOT = Path(__file__).parents[1]
BURST, QUEUE = "16kb", "400ms"
"""Bytes that pass at once, and how long a packet may wait until it is dropped."""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def shape(namespace: str, device: str, rate: float) -> None:
    limit = ["tbf", "rate", f"{rate}mbit", "burst", BURST, "latency", QUEUE]
    words = ["ip", "netns", "exec", namespace, "tc", "qdisc", "add", "dev", device, "root", *limit]
    subprocess.run(words, check=True)


@contextmanager
def machines(rates: Sequence[float]) -> Iterator[list[str]]:
    """Make the namespaces of a server and of nodes, with a shaped line from each node to the
    server."""
    names = [f"fl-{os.getpid()}-{name}" for name in ("server", *map(str, range(len(rates))))]
    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", names[0], "addr", "add", f"{SERVER}/32", "dev", "lo")
        for number, (name, rate) in enumerate(zip(names[1:], rates, strict=True)):
            ends, subnet = (f"up{number}", f"down{number}"), f"10.72.{number + 1}"
            ip(
                "link",
                "add",
                ends[0],
                "netns",
                name,
                "type",
                "veth",
                "peer",
                "name",
                ends[1],
                "netns",
                names[0],
            )
            for place, end, host in ((name, ends[0], 2), (names[0], ends[1], 1)):
                ip("-n", place, "addr", "add", f"{subnet}.{host}/24", "dev", end)
                ip("-n", place, "link", "set", end, "up")
                shape(place, end, rate)
            ip("-n", name, "route", "add", SERVER, "via", f"{subnet}.1")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def start(namespace: str, folder: Path, log: str, *words: object) -> subprocess.Popen:
    home = {
        "FLWR_HOME": str(folder / "flower"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
    }
    command = list(map(str, ("ip", "netns", "exec", namespace, *words)))
    with open(folder / log, "ab") as file:
        return subprocess.Popen(
            command, cwd=folder, env=os.environ | home, stdout=file, stderr=file
        )


def wait_for(log: Path, text: str, seconds: float = 120.0) -> None:
    ends = time.monotonic() + seconds
    while not (log.exists() and text in log.read_text()):
        if time.monotonic() > ends:
            sys.exit(
                f"{log}: no {text!r} within {seconds:g} s:\n{log.read_text()[-2000:] if log.exists() else ''}"
            )
        time.sleep(0.2)


def words_of(config: str, clients: int, rounds: int, folder: str, *more: str) -> list[str]:
    settings = {
        "trainer.logger": "false",
        "trainer.callbacks": "[]",
        "trainer.max_rounds": rounds,
        "trainer.eval_every": rounds,
        "trainer.participation": 1.0,
        "trainer.local_epochs": 1,
        "trainer.accelerator": "cpu",
        "trainer.engine": "sequential",
        "trainer.workers": 1,
        "trainer.default_root_dir": folder,
        "trainer.rounds": "{class_path: Deadline, init_args: {seconds: .inf}}",
        "data.num_clients": clients,
        "data.partition": "IID",
    }
    return [
        "--config",
        str(ROOT / "configs" / f"{config}.yaml"),
        *(f"--{k}={v}" for k, v in settings.items()),
        *more,
    ]


def seconds_in(folder: Path) -> list[float]:
    """Return the seconds of each round."""
    (path,) = folder.glob("*/*/metrics.csv")
    with path.open() as file:
        return [float(row["clock/round_seconds"]) for row in csv.DictReader(file)]


def deployed(names: list[str], folder: Path, config: str, rounds: int) -> list[float]:
    address, ours, programs = f"{SERVER}:8000", [sys.executable, "-m", "fl_lightning"], []
    try:
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
        link.append("--disable-runtime-dependency-installation")
        programs.append(start(names[0], folder, "superlink.log", *link))
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
            words += ["--num_partitions", len(names) - 1, "--root_certificates", "certs/ca.crt"]
            programs.append(start(name, folder, f"n{number}.log", *ours, *words))
        for number in range(len(names) - 1):
            wait_for(folder / f"n{number}.log", "as SuperNode")
        words = words_of(
            config, len(names) - 1, rounds, "deployed", f"--deploy.superlink={address}"
        )
        words += ["--deploy.root_certificates=certs/ca.crt", f"--deploy.min_nodes={len(names) - 1}"]
        server = start(names[0], folder, "deploy.log", *ours, "deploy", *words)
        programs.append(server)
        if server.wait(1200):
            sys.exit((folder / "deploy.log").read_text()[-3000:])
        return seconds_in(folder / "deployed")
    finally:
        for program in reversed(programs):
            program.terminate()
            try:
                program.wait(20)
            except subprocess.TimeoutExpired:
                program.kill()
                program.wait()


def simulated(folder: Path, config: str, clients: int, rounds: int, devices: Path) -> list[float]:
    table = f"--trainer.clock.devices={{class_path: DeviceTable, init_args: {{path: {devices}}}}}"
    words = words_of(config, clients, rounds, str(folder / "simulated"), table)
    subprocess.run(
        [sys.executable, "-m", "fl_lightning", "fit", *words], check=True, capture_output=True
    )
    return seconds_in(folder / "simulated")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[1.0, 2.0, 4.0], help="Mbit/s of each node"
    )
    parser.add_argument(
        "--methods", nargs="+", default=["fedavg", "qfedavg"], help="the first one calibrates"
    )
    asked = parser.parse_args()
    if os.geteuid() or not (shutil.which("ip") and shutil.which("tc")):
        print("network namespaces with shaped lines need root, ip and tc: nothing was measured")
        return
    devices = Path()
    with machines(asked.rates) as names, tempfile.TemporaryDirectory() as work:
        for config in asked.methods:
            folder = Path(work) / config
            folder.mkdir()
            make_certificates(folder / "certs", [SERVER], 0)
            measured = deployed(names, folder, config, asked.rounds)
            if config == asked.methods[0]:
                (devices,) = (folder / "deployed").glob("*/*/devices.csv")
                print(devices.read_text(), end="")
            predicted = simulated(folder, config, len(asked.rates), asked.rounds, devices)
            first = 1 if config == asked.methods[0] else 0
            errors = [
                one / other - 1
                for one, other in zip(predicted[first:], measured[first:], strict=True)
            ]
            total = sum(predicted[first:]) / sum(measured[first:]) - 1
            print(f"{config}: measured  {' '.join(f'{one:.2f}' for one in measured)} s")
            print(f"{config}: predicted {' '.join(f'{one:.2f}' for one in predicted)} s")
            print(
                f"{config}: {len(errors)} rounds, all {100 * total:+.1f} %, a round {100 * mean(map(abs, errors)):.1f} % "
                f"on average, {100 * max(map(abs, errors)):.1f} % at most",
                flush=True,
            )


if __name__ == "__main__":
    main()
