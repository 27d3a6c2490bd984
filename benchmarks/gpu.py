"""One card: a plain loop, recorded steps, and fl_lightning in turn and in stacks, in 32 bits and in
bfloat16.

    python benchmarks/gpu.py [W2 W3 L1] [--repeats 2] [--at_once 1 2 4] [--out FILE]

Each measurement is a process of its own, one after another, and gives the mean seconds of a round
after the first; the figure is the median of the repeats. ``recorded`` (``workload_graph.py``) is
the hand-made limit: it logs, checks and saves nothing. ``N at once`` are N runs of fl_lightning on
the card at the same time, as ``sweep --jobs N`` starts them: the mean seconds of their rounds, over
N. Rounds of kd_default are of its command. It needs a card, and says so where there is none.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import torch
from workload import WORKLOADS
from workloads import HERE, line, measure_all, search_path, summarise

CARD = ("--device", "cuda")
BF16 = ("--precision", "bf16-mixed")
OURS = ("workload_ours.py", *CARD)
CONTENDERS = {
    "plain": ("workload_plain.py", *CARD),
    "plain bf16": ("workload_plain.py", *CARD, *BF16),
    "compiled": ("workload_plain.py", *CARD, "--compile"),
    "recorded": ("workload_graph.py",),
    "recorded bf16": ("workload_graph.py", *BF16),
    "sequential": (*OURS, "--engine", "sequential"),
    "sequential bf16": (*OURS, "--engine", "sequential", *BF16),
    "batched": (*OURS, "--engine", "batched"),
    "batched bf16": (*OURS, "--engine", "batched", *BF16),
    "auto": OURS,
}
KD = [("cpu", "32-true"), ("cuda", "32-true"), ("cuda", "bf16-mixed")]
KD_ROUNDS = 8


def main() -> None:
    options = parse()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing is measured")
        return
    document: dict[str, Any] = {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "rows": [],
    }
    print(document["card"], document["torch"])
    heads = f"{'ms a round':>12}{'ratio':>8}{'-':>10}{'start s':>10}{'host MiB':>10}{'others':>10}"
    print(f"{'':10}{'who':24}{heads}")
    for name in options.workloads:
        plain = None
        for row in rows_of(name, options):
            plain = plain or row.get("seconds")
            row["ratio"] = row["seconds"] / plain if plain and "seconds" in row else None
            print(line(row), flush=True)
            document["rows"].append(row)
            save(document, options.out)
    for accelerator, precision in KD * options.kd_default:
        found = kd_default(accelerator, precision)
        print(f"kd_default {accelerator} {precision}: {found}", flush=True)
        document[f"kd_default {accelerator} {precision}"] = found
        save(document, options.out)


def rows_of(name: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure one contender after another, the first of which the ratios are to; each row is there
    as soon as it is measured, since a lent card may go before the last one."""
    for who in options.who:
        yield from summarise(
            name, measure_all(name, {who: (sys.executable, *CONTENDERS[who])}, options)
        )
    for jobs in options.at_once:
        yield at_once(name, jobs, options)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workloads", nargs="*", help="W1 W2 W3 B1 B2 W4 L1; none: W2 W3 L1")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument(
        "--rounds", type=int, default=0, help="that are timed; 0: the workload's own number"
    )
    parser.add_argument(
        "--at_once", type=int, nargs="*", default=[2, 4], help="runs that share the card"
    )
    parser.add_argument("--who", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument(
        "--kd_default", type=int, default=1, help="how often rounds of kd_default are timed"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="everything measured, as JSON")
    options = parser.parse_args()
    options.workloads = options.workloads or ["W2", "W3", "L1"]
    if unknown := [name for name in options.workloads if name not in WORKLOADS]:
        parser.error(f"workload {unknown[0]!r}; one of {', '.join(WORKLOADS)}; write e.g. W2")
    return options


def at_once(name: str, jobs: int, options: argparse.Namespace) -> dict[str, Any]:
    """Several runs that share the card: seconds of a round over their number."""
    command = {"run": (sys.executable, *CONTENDERS["sequential"])}
    single = argparse.Namespace(**vars(options) | {"repeats": 1})
    with ThreadPoolExecutor(jobs) as pool:
        found = [
            each["run"][0]
            for each in pool.map(lambda _: measure_all(name, command, single), range(jobs))
        ]
    row: dict[str, Any] = {"workload": name, "who": f"{jobs} at once", "runs": found}
    row |= dict.fromkeys(("to_limit", "peak_mib", "others"))
    failed = [run["error"] for run in found if "error" in run]
    if failed:
        return row | {"error": failed[0]}
    return row | {
        "seconds": median(run["seconds"] for run in found) / jobs,
        "start_seconds": median(run["start_seconds"] for run in found),
    }


def kd_default(accelerator: str, precision: str) -> dict[str, float] | str:
    """Median seconds of a round of configs/kd_default.yaml, and what of it was training."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "fl_lightning", "fit", "--config", str(HERE.parent / "configs/kd_default.yaml"),
             "--trainer.max_rounds", str(KD_ROUNDS), "--trainer.accelerator", accelerator, "--trainer.precision", precision,
             "--trainer.logger", "false", "--trainer.run_name", "timed", "--trainer.default_root_dir", folder],
            env=os.environ | {"PYTHONPATH": search_path(sys.executable)}, cwd=folder, capture_output=True, text=True, timeout=600,
        )  # fmt: skip
        if done.returncode:
            return (done.stderr.strip() or "it said nothing").splitlines()[-1]
        rows = list(csv.DictReader((Path(folder) / "kd_default/timed/metrics.csv").open()))[1:]
        return {
            name: median(float(row[name]) for row in rows) for name in ("time/round", "time/train")
        }


def save(document: dict[str, Any], out: Path | None) -> None:
    if out:
        out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
