"""Print the population of phones of ``configs/devices/phones.csv``, a row for each of 1000 clients.

    python benchmarks/phones.py > configs/devices/phones.csv

The population is made by a rule and measured nowhere. A phone is of one of three classes, drawn
with the shares in DEVICES, and has one of three lines, drawn with the shares in LINES whatever its
class. Its seconds per example, and its bytes per second, are log-normal about the median of its
class and line; what it sends goes through the same line as what it receives, so one draw serves
both. A row depends on the client's id alone, so that a longer table begins with the same rows.
"""

from __future__ import annotations

import argparse
import math
import sys

from fl_lightning.rng import stream

DEVICES = {"high": (0.25, 0.002), "middle": (0.5, 0.005), "low": (0.25, 0.015)}
"""By class of phone: its share, and the median of its seconds per example of a training step."""
LINES = {"wifi": (0.6, 5e6, 1.5e6), "4g": (0.3, 1.5e6, 5e5), "slow": (0.1, 2.5e5, 6e4)}
"""By line: its share, and the medians of its bytes per second down and up."""
SPEED_SPREAD, LINE_SPREAD = 0.3, 0.5
"""Standard deviations of the logarithms within a class and within a line."""


def row(client: int) -> str:
    """Return the row of a client: id, seconds per example, bytes per second down and up, class,
    line."""
    draws = stream(0, "phones", client=client)
    which, through = draws.random(2)
    speed, width = draws.standard_normal(2)
    kind = chosen({name: one[0] for name, one in DEVICES.items()}, which)
    line = chosen({name: one[0] for name, one in LINES.items()}, through)
    median, (_, down, up) = DEVICES[kind][1], LINES[line]
    scale = math.exp(LINE_SPREAD * width)
    values = (median * math.exp(SPEED_SPREAD * speed), down * scale, up * scale)
    return f"{client},{values[0]:.3g},{values[1]:.3g},{values[2]:.3g},{kind},{line}"


def chosen(shares: dict[str, float], draw: float) -> str:
    """Return the name whose share of [0, 1) a number lies in."""
    below = 0.0
    for name, share in shares.items():
        below += share
        if draw < below:
            return name
    return name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=1000)
    lines = [
        "client,seconds_per_example,down,up,device,line",
        *map(row, range(parser.parse_args().clients)),
    ]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
