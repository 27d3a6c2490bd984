"""Public workloads: fl_lightning, a plain loop, the hand-made limit and other simulators in turn, A
B A B.

    python benchmarks/workloads.py [W1 W2 W3 B1 B2 W4 L1] [--repeats 3]
        [--engines auto sequential batched] [--peers flower=PYTHON pfl2=PYTHON] [--out FILE]

Each measurement is a process of its own and gives the mean seconds of a round after the first; the
figure is the median of the repeats, the ratio that of the medians. Ours runs with MLflow, the byte
ledger and checkpoints on; the plain loop and the limit have none of them. L1 has no peers. Nobody
evaluates in between. ``others`` is the most cores that other work kept busy right before a run:
where it is not 0.0, a program of more threads than free cores may wait many times as long as it
computes. The last lines are the table as Markdown. ``peers/README.md`` says how a peer's
environment is made and what was chosen for it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from processes import cores_in_use, run
from workload import WORKLOADS

HERE = Path(__file__).resolve().parent
ENGINES = ("auto", "sequential", "batched")
PEERS = {
    "flower": ("peers/flower.py",),
    "flower-default": ("peers/flower.py", "--cpus_per_client", "2"),
    "pfl": ("peers/pfl_research.py",),
    "blazefl": ("peers/blazefl_threads.py",),
    "pfl2": ("-m", "torch.distributed.run", "--nproc_per_node", "2", "peers/pfl_research.py"),
}
TIMEOUT = 1800  # seconds of one run
Result = dict[str, Any]


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    who = contenders(options)
    document: Result = {
        "machine": machine(),
        "repeats": options.repeats,
        "channels_last": options.channels_last,
        "rows": [],
    }
    heads = f"{'ratio':>8}{'to limit':>10}{'start s':>10}{'peak MiB':>10}{'others':>10}"
    print(f"{'':10}{'who':24}{'ms a round':>12}{heads}")
    for name in options.workloads:
        taking_part = {
            label: command
            for label, command in who.items()
            if label not in PEERS or not WORKLOADS[name].tokens
        }
        rows = summarise(name, measure_all(name, taking_part, options))
        for row in rows:
            print(line(row), flush=True)
        if chosen := choice(rows):
            print(chosen, flush=True)
        document["rows"] += rows
        if options.out:
            options.out.write_text(json.dumps(document, indent=1) + "\n")
    print(markdown(document["rows"]))
    if absent := [peer for peer in PEERS if peer not in options.peers]:
        print(f"not measured: {', '.join(absent)}; benchmarks/peers/README.md says how")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workloads", nargs="*", help="W1 W2 W3 B1 B2 W4 L1; none: all")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--rounds", type=int, default=0, help="rounds that are timed; 0: the workload's own number"
    )
    parser.add_argument(
        "--engines",
        nargs="*",
        default=["auto"],
        choices=ENGINES,
        help="ours; none: ours is left out",
    )
    parser.add_argument("--workers", default="auto", help="processes of ours")
    parser.add_argument(
        "--peers",
        nargs="+",
        default=[],
        metavar="NAME=PYTHON",
        help=f"{', '.join(PEERS)}, each with an interpreter",
    )
    parser.add_argument(
        "--channels_last",
        action="store_true",
        help="deep networks channels last for plain and peers too",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="everything measured, as JSON")
    options = parser.parse_args(arguments)
    options.workloads = options.workloads or list(WORKLOADS)
    if unknown := [name for name in options.workloads if name not in WORKLOADS]:
        parser.error(f"workload {unknown[0]!r}; one of {', '.join(WORKLOADS)}; write e.g. W1")
    if options.repeats < 1 or options.rounds < 0:
        parser.error(
            f"--repeats {options.repeats} --rounds {options.rounds}; at least 1 and 0; write "
            "--repeats 3 and leave --rounds out"
        )
    given = [peer.partition("=") for peer in options.peers]
    for name, equals, python in given:
        if name not in PEERS or not equals or not python:
            parser.error(
                f"--peers {name}{equals}{python}; NAME=PYTHON with a name of {', '.join(PEERS)}; "
                "write pfl=pfl/bin/python"
            )
    options.peers = {name: python for name, _, python in given}
    return options


def contenders(options: argparse.Namespace) -> dict[str, tuple[str, ...]]:
    """Interpreter, program and flags of everyone who is measured, without the workload."""
    layout = ("--channels_last",) if options.channels_last else ()
    ours = (sys.executable, "workload_ours.py", "--workers", options.workers)
    found: dict[str, tuple[str, ...]] = {
        "plain": (sys.executable, "workload_plain.py", *layout),
        "limit": (sys.executable, "workload_limit.py"),
    }
    found |= {engine: (*ours, "--engine", engine) for engine in options.engines}
    return found | {peer: (python, *PEERS[peer], *layout) for peer, python in options.peers.items()}


def measure_all(
    name: str, who: dict[str, tuple[str, ...]], options: argparse.Namespace
) -> dict[str, list[Result]]:
    """Every contender in turn; one that failed is not tried again."""
    runs: dict[str, list[Result]] = {label: [] for label in who}
    for _ in range(options.repeats):
        for label, found in runs.items():
            if not any("error" in run for run in found):
                found.append(measure(name, who[label], options.rounds))
    return runs


def measure(name: str, command: tuple[str, ...], rounds: int) -> Result:
    """One run of one contender in a folder of its own; whatever goes wrong is ``error``."""
    python, *rest = command
    found = shutil.which(python)
    if found is None:
        return {"error": f"there is no interpreter at {python}"}
    rest = [str(HERE / part) if part.endswith(".py") else part for part in rest]
    others, launched = cores_in_use(), time.time()
    with tempfile.TemporaryDirectory() as folder:
        done = run(
            [os.path.abspath(found), *rest, name, "--rounds", str(rounds or WORKLOADS[name].rounds)],
            folder=Path(folder), environment=os.environ | {"PYTHONPATH": search_path(python)}, timeout=TIMEOUT,
        )  # fmt: skip
    if done.code != 0:
        said = [text for text in done.stderr.splitlines() if text.strip()] or ["it said nothing"]
        why = f"not done after {TIMEOUT} s" if done.code is None else said[-1].strip()
        return {"error": why, "exit_code": done.code, "stderr": said[-40:]}
    result: Result = json.loads(
        [text for text in done.stdout.splitlines() if text.startswith("{")][-1]
    )
    if result["steps_a_round"] != WORKLOADS[name].steps:
        return result | {
            "error": f"{result['steps_a_round']} local steps a round instead of {WORKLOADS[name].steps}"
        }
    start = result.pop("first_round_ended") - launched - result["seconds"]
    return result | {"start_seconds": start, "peak_mib": done.peak_mib, "others": others}


def search_path(python: str) -> str:
    """``PYTHONPATH`` of a contender: a peer's environment has no fl_lightning, and needs its
    networks."""
    ours = (
        [os.environ["PYTHONPATH"]]
        if python == sys.executable and "PYTHONPATH" in os.environ
        else []
    )
    return os.pathsep.join([str(HERE), str(HERE.parent), *ours])


def summarise(name: str, runs: dict[str, list[Result]]) -> list[Result]:
    """One row for each contender: medians, the largest peak and disturbance, and all that the runs
    said."""
    rows = []
    for label, found in runs.items():
        row: Result = {"workload": name, "who": label, "runs": found}
        failed = [run["error"] for run in found if "error" in run]
        if failed:
            row["error"] = failed[0]
        elif found:
            row |= {key: median(run[key] for run in found) for key in ("seconds", "start_seconds")}
            row |= {
                key: max((run[key] for run in found if run[key] is not None), default=None)
                for key in ("peak_mib", "others")
            }
            row["engine"] = (
                "/".join(sorted({run["engine"] for run in found if "engine" in run})) or None
            )
        rows.append(row)
    seconds = {row["who"]: row.get("seconds") for row in rows}
    for row in rows:
        for key, base in (("ratio", seconds.get("plain")), ("to_limit", seconds.get("limit"))):
            row[key] = row["seconds"] / base if base and "seconds" in row else None
    return rows


def line(row: Result) -> str:
    label = f"auto ({row['engine']})" if row["who"] == "auto" and row.get("engine") else row["who"]
    head = f"{row['workload']:10}{label:24}"
    if "error" in row:
        return f"{head}failed: {row['error'][:160]}"
    forms = {
        "ratio": ".2f",
        "to_limit": ".2f",
        "start_seconds": ".1f",
        "peak_mib": ".0f",
        "others": ".1f",
    }
    ratio, *rest = (number(row[key], form) for key, form in forms.items())
    return f"{head}{1e3 * row['seconds']:12.1f}{ratio:>8}" + "".join(f"{cell:>10}" for cell in rest)


def markdown(rows: list[Result]) -> str:
    """A table with a row a workload: ratios to the plain loop, ours to the limit and to the fastest
    peer, and peaks of memory."""
    shown = list(dict.fromkeys(row["who"] for row in rows if row["who"] != "plain"))
    heads = ["workload", "plain, s", *shown, "auto to the limit", "auto to the fastest peer", "peak MiB: auto", "limit", "least peer"]  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", "|---" + "|---:" * (len(heads) - 1) + "|"]
    for name in dict.fromkeys(row["workload"] for row in rows):
        by = {row["who"]: row for row in rows if row["workload"] == name}
        ours, peers = by.get("auto", {}), [row for who, row in by.items() if who in PEERS]
        fastest, least = (
            min((row[key] for row in peers if row.get(key)), default=None)
            for key in ("seconds", "peak_mib")
        )
        seconds = ours.get("seconds")
        cells = [
            number(by.get("plain", {}).get("seconds"), ".3g"),
            *(number(by.get(who, {}).get("ratio"), ".2f") for who in shown),
            number(ours.get("to_limit"), ".2f"),
            number(seconds / fastest if seconds and fastest else None, ".2f"),
            *(
                number(peak, ".0f")
                for peak in (ours.get("peak_mib"), by.get("limit", {}).get("peak_mib"), least)
            ),
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def number(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


def choice(rows: list[Result]) -> str:
    """Whether ``auto`` chose well, where both engines were measured beside it."""
    by = {row["who"]: row for row in rows if row["who"] in ENGINES and "seconds" in row}
    if len(by) < len(ENGINES):
        return ""
    chosen = by["auto"]["engine"]
    faster = min(("sequential", "batched"), key=lambda engine: by[engine]["seconds"])
    if chosen == faster:
        return f"{'':10}auto chose {chosen}, the faster engine"
    times = " or ".join(
        f"{engine} {1e3 * by[engine]['seconds']:.1f} ms" for engine in ("sequential", "batched")
    )
    return f"{'':10}auto chose {chosen} of {times}"


def machine() -> Result:
    """What the figures belong to."""
    return {
        "system": platform.system(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
    }


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (text.partition(":")[2].strip() for text in lines if text.startswith("model name")),
        platform.machine(),
    )


if __name__ == "__main__":
    main()
