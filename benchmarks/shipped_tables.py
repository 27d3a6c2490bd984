"""Calibrate the four tables of costs that come with the package, in turn and with one rest, and
write them.

    OMP_NUM_THREADS=1 python benchmarks/shipped_tables.py [--seconds 600]
        [--out fl_lightning/energy]

The machine has to be idle. The time is that of all tables together; a pass over all pieces of work,
of which there are three at least, takes about 5 s on one idle thread of an AMD EPYC. It ends with 1
where a mean is more than 25 % off measurements that it was not fitted to; the files are written all
the same.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from fl_lightning.energy.calibration import calibrate as calibration
from fl_lightning.energy.calibration.calibrate import Subject, calibrate_together
from fl_lightning.energy.calibration.fitting import MAX_RELATIVE_ERROR
from fl_lightning.energy.calibration.meters import DEFAULT_WATTS, ModelledMeter, best_meter
from fl_lightning.energy.calibration.networks import adapted_network
from fl_lightning.energy.command import METERS, print_errors, print_table, write_table

TABLES = {
    "llama_tiny": ("spectral", 96, "model"),
    "llama_tiny_adapter": ("spectral", 96, "adapter"),
    "llama_tiny_lora": ("lora", 8, "model"),
    "llama_tiny_merged": ("merged", 8, "model"),
}
"""Kind of the adapters, their rank, and what *off* leaves out, by name of the table."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600.0, help="of all tables together")
    parser.add_argument("--context", type=int, default=calibration.DEFAULT_CONTEXT)
    parser.add_argument(
        "--meter", choices=METERS, default="modelled", help="shipped joules are modelled"
    )
    parser.add_argument("--watts", type=float, default=DEFAULT_WATTS)
    parser.add_argument(
        "--out", type=Path, default=Path(calibration.__file__).parent, help="folder"
    )
    options = parser.parse_args()
    subjects = {
        name: Subject(adapted_network("llama_tiny", adapter, rank), scope)  # type: ignore[arg-type]
        for name, (adapter, rank, scope) in TABLES.items()
    }
    meter = (
        best_meter("cpu", options.watts)
        if options.meter == "best"
        else ModelledMeter(options.watts)
    )
    found = calibrate_together(subjects, meter, options.seconds, options.context)
    console = Console()
    for name, one in found.items():
        console.rule(name)
        print_table(one.table, console)
        print_errors(one, console)
        write_table(one.table, options.out / f"{name}.json", console)
    worst = {name: one.largest_error() for name, one in found.items()}
    console.print(
        "largest errors: " + ", ".join(f"{name} {error:.1%}" for name, error in worst.items())
    )
    return int(max(worst.values()) > MAX_RELATIVE_ERROR)


if __name__ == "__main__":
    sys.exit(main())
