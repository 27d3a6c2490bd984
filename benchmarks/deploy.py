"""Seconds of a round and bytes of a deployment on this machine, against the simulation.

    python benchmarks/deploy.py --nodes 4 --rounds 5 --network small_cnn [--steps 1]

needs the extra ``deploy``. A SuperLink and the nodes run on this machine, so they share its cores
and the network is its loopback, where a message passes three times: server to SuperLink, SuperLink
to SuperNode, SuperNode to its app. ``loopback`` counts all of that, and whatever else uses it
meanwhile.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path


def loopback_bytes() -> int:
    """Return the bytes that the loopback interface has carried since the machine was started."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[0])
    return 0


def run(command: str, folder: Path, words: list[str]) -> tuple[list[float], int, dict]:
    """Return the seconds of each round but the first, the payload bytes of a round, and the
    metadata."""
    line = [
        sys.executable,
        "-m",
        "fl_lightning",
        command,
        *words,
        "--trainer.default_root_dir",
        str(folder),
    ]
    done = subprocess.run(line, capture_output=True, text=True, timeout=3600)
    if done.returncode:
        sys.exit(
            f"{command} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    (metadata,) = folder.glob("*/*/metadata.json")
    with open(metadata.with_name("metrics.csv")) as file:
        rows = list(csv.DictReader(file))
    seconds = [float(row["time/train"]) for row in rows[1:]]
    payload = statistics.mean(float(row["comm/total_bytes"]) for row in rows)
    return seconds, int(payload), json.loads(metadata.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--network", default="small_cnn")
    parser.add_argument(
        "--steps", default="null", help="of a client in a round; 1: messages have the cores alone"
    )
    asked = parser.parse_args()
    words = ["--config", "configs/fedavg.yaml", "--trainer.callbacks=[]", "--trainer.logger=false"]
    words += [
        "--trainer.participation=1.0",
        "--trainer.accelerator=cpu",
        "--trainer.engine=sequential",
    ]
    words += [
        "--trainer.workers=1",
        f"--trainer.max_rounds={asked.rounds}",
        "--trainer.local_epochs=1",
    ]
    words += [f"--trainer.eval_every={asked.rounds}", f"--data.num_clients={asked.nodes}"]
    words += [f"--model.network={asked.network}", "--data.partition=Shards"]
    words += ["--data.partition.classes_per_client=5", f"--trainer.max_local_steps={asked.steps}"]
    with tempfile.TemporaryDirectory() as folder:
        alone, payload, simulated = run("fit", Path(folder) / "fit", words)
        before = loopback_bytes()
        over, _, deployed = run(
            "deploy", Path(folder) / "deploy", [*words, f"--deploy.local_nodes={asked.nodes}"]
        )
        carried = (loopback_bytes() - before) / asked.rounds
    traffic = deployed["deployment"]["messages"]
    messages = (traffic["sent"] + traffic["received"]) / asked.rounds
    one, other = statistics.median(alone), statistics.median(over)
    print(
        f"{asked.nodes} nodes of one client, {asked.network}, {asked.rounds} rounds (the first is not timed)"
    )
    print(f"same weights        {simulated['weights_sha256'] == deployed['weights_sha256']}")
    print(
        f"training, simulated {one:8.2f} s a round (median; {min(alone):.2f} to {max(alone):.2f})"
    )
    print(
        f"training, deployed  {other:8.2f} s a round (median; {min(over):.2f} to {max(over):.2f})"
    )
    first, *beside = traffic["beside_training"]
    middle = statistics.median(beside)
    print(
        f"beside training     {middle:8.2f} s a round (median; {min(beside):.2f} to {max(beside):.2f}; first {first:.2f})"
    )
    print(f"payloads            {payload:12,d} bytes a round")
    print(f"messages            {messages:12,.0f} bytes a round, with the checks of the nodes")
    print(
        f"loopback            {carried:12,.0f} bytes a round, three passes, with starting and polling"
    )


if __name__ == "__main__":
    main()
