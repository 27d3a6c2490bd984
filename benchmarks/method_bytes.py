"""Bytes of a client-round for the table of methods: what the payloads of each method's
configuration weigh against FedAvg's.

    python benchmarks/method_bytes.py
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Collection
from pathlib import Path
from tempfile import TemporaryDirectory

from fl_lightning.__main__ import main as fl_lightning

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "docs"))

from generated import rows  # noqa: E402

ON_ADAPTERS = "lora_default"
"""FedAvg's configuration on adapters, which methods of language models are compared with."""
OF_LANGUAGE = {"FedVEMoE", "HEST", "HESTLadder", "FedAdaLoRA"}
ROUNDS = 2
FEW = {
    "max_rounds": str(ROUNDS),
    "eval_every": str(ROUNDS),
    "max_local_steps": "2",
    "participation": "0.05",
    "callbacks": "[]",
    "logger": "false",
}


def method_bytes(config: str, folder: Path) -> tuple[float, float]:
    """Mean upload and download of a client in the second round with this configuration, from the
    run's ledger."""
    path = ROOT / "configs" / f"{config}.yaml"
    settings = {**FEW, "default_root_dir": str(folder), "experiment": config}
    flags = [word for name, value in settings.items() for word in (f"--trainer.{name}", value)]
    if fl_lightning(["fit", "--config", str(path), *flags]) != 0:
        raise RuntimeError(f"{path} did not run")
    (ledger,) = (folder / config).glob("*/ledger.csv")
    with ledger.open() as file:
        last = [row for row in csv.DictReader(file) if row["round"] == str(ROUNDS)]
    up, down = (sum(int(row[way]) for row in last) / len(last) for way in ("upload", "download"))
    return up, down


def relative_bytes(only: Collection[str] = ()) -> dict[str, tuple[float, float]]:
    """Up and down of every method, or of some, relative to FedAvg's, rounded as the pages of
    methods have them."""
    every = (row for of_kind in rows().values() for row in of_kind)
    configs = {
        row["method"]: row["config"]
        for row in every
        if not only or row["method"] in {*only, "FedAvg"}
    }
    with TemporaryDirectory() as folder:
        measured = {name: method_bytes(config, Path(folder)) for name, config in configs.items()}
        of_language = OF_LANGUAGE & configs.keys()
        on_adapters = method_bytes(ON_ADAPTERS, Path(folder)) if of_language else (0.0, 0.0)
    relative = {}
    for name, (own_up, own_down) in measured.items():
        up, down = on_adapters if name in OF_LANGUAGE else measured["FedAvg"]
        relative[name] = round(own_up / up, 2), round(own_down / down, 2)
    return relative


if __name__ == "__main__":
    for name, (up, down) in relative_bytes().items():
        sys.stdout.write(f"{name} bytes: [{up:.2f}, {down:.2f}]\n")
