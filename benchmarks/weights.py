"""Print the final weights' hash of ten methods, or of other configurations, on every engine: run it
before and after a change that must compute the same.

    python benchmarks/weights.py > before.txt
    ... change the code ...
    python benchmarks/weights.py > after.txt && diff before.txt after.txt

The hashes depend on the machine and on the libraries, so both runs belong on one machine. Ten
minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

CONFIGS = [
    "fedavg",
    "fedprox",
    "fedntd",
    "qfedavg",
    "aqfl",
    "fedpq",
    "fedmpq",
    "kd_default",
    "fedkd",
    "fedmosaic_digits",
]
ENGINES = {
    "sequential": ["--trainer.engine", "sequential", "--trainer.workers", "1"],
    "batched": ["--trainer.engine", "batched", "--trainer.workers", "1"],
    "2 workers": ["--trainer.engine", "sequential", "--trainer.workers", "2"],
    "2 ranks": [
        "--trainer.engine",
        "sequential",
        "--trainer.workers",
        "1",
        "--trainer.devices",
        "2",
        "--trainer.strategy",
        "ddp",
    ],
}


def weights_hash(config: str, engine: str, rounds: int) -> str:
    """Return the SHA-256 of the server's weights after ``rounds`` rounds, or the last line of the
    error."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "fl_lightning",
            "fit",
            "--config",
            config,
            "--trainer.max_rounds",
            str(rounds),
        ]
        command += [
            "--trainer.default_root_dir",
            folder,
            "--trainer.logger",
            "false",
            *ENGINES[engine],
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        found = list(Path(folder).rglob("metadata.json"))
        if done.returncode or not found:
            return f"exit {done.returncode}: {done.stderr.strip().splitlines()[-1][:100]}"
        return str(json.loads(found[0].read_text())["weights_sha256"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--configs", nargs="+", default=CONFIGS)
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=list(ENGINES))
    asked = parser.parse_args()
    for config in asked.configs:
        for engine in asked.engines:
            print(
                f"{config:18} {engine:12} {weights_hash(config, engine, asked.rounds)}", flush=True
            )


if __name__ == "__main__":
    main()
