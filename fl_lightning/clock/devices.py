"""Devices: how long a client computes, and the lines that it has."""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np

from fl_lightning.config.constraints import within
from fl_lightning.config.packaged import configs_folder
from fl_lightning.config.recorded import Recorded
from fl_lightning.errors import InputError, as_bad_input, require
from fl_lightning.rng import Streams, stream

if TYPE_CHECKING:
    import pandas as pd

LONGEST = 1e9
"""Seconds, 30 years, so that no sum of times is infinite."""
SLOWEST = 1e-6
"""Bytes a second."""
SECONDS = within("[0, 1e9]", "an example takes 0 to 1e9 seconds", 0.005)
MEAN = within("(0, 1e9]", "a mean time is above 0 and at most 1e9 seconds", 0.005)
SPREAD = within("[0, 1e9]", "a spread is 0 to 1e9 seconds", 0.6)
SIGMA = within("[0, 10]", "a deviation of a logarithm is 0 to 10", 0.6)


@dataclass(frozen=True)
class Line:
    """A client's line.

    Args:
        down, up: bytes per second; infinity: nothing takes time.
        latency: seconds of a round trip, for each exchange of a round: one, and one more where
            ``PowerOfChoice`` asks first; None: those of ``trainer.clock.network``.
    """

    down: float = math.inf
    up: float = math.inf
    latency: float | None = None


class Devices(Recorded, ABC):
    """The devices of all clients: a pure function of the seed, the round and the client."""

    settings_shown = ("--trainer.clock.devices.{name} {value}",) * 2
    lasting: bool = True
    """Whether a client has the same device in all rounds."""
    by_examples: bool = True
    """Whether fewer examples take less time."""

    @abstractmethod
    def seconds(self, seed: int, round: int, client: int, examples: int) -> float:
        """Return how long a client computes in a round, in seconds, 0 or more.

        Args:
            seed: seed of the run.
            round: number of the round, from 1.
            client: its id.
            examples: examples that it passes through its local steps, each epoch counted.
        """

    def line(self, client: int) -> Line | None:
        """Return the line that is known of a client; None: that of ``trainer.clock.network``."""
        return None

    @property
    def content_sha256(self) -> str:
        """SHA-256 of what is read from a file; empty where there is none."""
        return ""


class SameDevice(Devices):
    """Every client has the same device.

    Args:
        seconds_per_example: of one training step's share of an example, 0 or more.
    """

    def __init__(self, seconds_per_example: Annotated[float, SECONDS] = 0.005) -> None:
        self.seconds_per_example = seconds_per_example

    def seconds(self, seed: int, round: int, client: int, examples: int) -> float:
        return self.seconds_per_example * examples


class LogNormalDevices(Devices):
    """Every client has a device of its own for the whole run, its time of an example log-normal:
    few are many times slower than most.

    0.005 and 0.6 are what FedScale (Lai et al., ICML 2022) takes where a client has no measured
    device.

    Args:
        mean: expected seconds of an example over all devices, above 0.
        sigma: standard deviation of the logarithm, 0 to 10; 0: all are the same.
    """

    def __init__(
        self, mean: Annotated[float, MEAN] = 0.005, sigma: Annotated[float, SIGMA] = 0.6
    ) -> None:
        self.mean, self.sigma, self._streams = mean, sigma, Streams()

    def seconds(self, seed: int, round: int, client: int, examples: int) -> float:
        normal = self._streams.stream(seed, "clock/device", client=client).standard_normal()
        return self.mean * math.exp(self.sigma * normal - self.sigma**2 / 2) * examples


class DrawnDevices(Devices):
    """Every client's time is drawn anew in every round, as FLSim does it.

    Args:
        law: ``exponential``; ``uniform`` between 0 and twice the mean; ``normal``, of mean and
            ``spread``; ``half_normal``, the absolute value of a normal variable of mean 0, scaled
            to the mean.
        mean: expected seconds, above 0, before the floor.
        spread: standard deviation of ``normal``, in seconds, 0 or more.
        floor: least seconds, 0 or more.
        per: ``client``: the whole round of a client takes so long; ``example``: each of its
            examples does.
    """

    lasting = False

    def __init__(
        self,
        law: Literal["exponential", "uniform", "normal", "half_normal"] = "exponential",
        mean: Annotated[float, MEAN] = 1.0,
        spread: Annotated[float, SPREAD] = 0.0,
        floor: Annotated[
            float, within("[0, 1e9]", "the least time is 0 to 1e9 seconds", 0.0)
        ] = 0.0,
        per: Literal["client", "example"] = "client",
    ) -> None:
        self.law, self.mean, self.spread, self.floor, self.per = law, mean, spread, floor, per
        self.by_examples = per == "example"

    def seconds(self, seed: int, round: int, client: int, examples: int) -> float:
        draws = stream(seed, "clock/duration", round, client)
        if self.law == "exponential":
            value = self.mean * draws.standard_exponential()
        elif self.law == "uniform":
            value = 2 * self.mean * draws.random()
        elif self.law == "normal":
            value = self.mean + self.spread * draws.standard_normal()
        else:
            value = self.mean * math.sqrt(math.pi / 2) * abs(draws.standard_normal())
        return max(value, self.floor, 0.0) * (examples if self.per == "example" else 1)


MEANT = {name: name for name in ("client", "seconds_per_example", "down", "up", "latency")}
MEANT |= dict.fromkeys(("download", "downlink"), "down") | dict.fromkeys(("upload", "uplink"), "up")
"""The column of a table of devices that a name in small letters means."""


class DeviceTable(Devices):
    """Every client's measured device, from a file.

    Args:
        path: a CSV or Parquet file of one row for each client, with the columns ``client`` (its
            id), ``seconds_per_example``, and both or neither of ``down`` and ``up``, in bytes per
            second; with them perhaps ``latency``, in seconds. Other columns are not read.
            ``configs/devices/phones.csv`` comes with the project.

    Raises:
        InputError: the file cannot be read, a column is missing or has such a name in other
            letters, a client has two rows, a time is below 0, or a rate not above 0. A client with
            examples and no row is refused before the run begins.
    """

    def __init__(self, path: str) -> None:
        import pandas as pd  # takes a third of a second, and few runs have a table

        self.path = path
        data = _bytes_of(Path(path))
        self._sha256 = sha256(data).hexdigest()
        frame = _read(Path(path), data).reset_index(drop=True)
        for name in map(str, frame.columns):
            meant = MEANT.get(name.strip().lower().replace(" ", "_"), name)
            require(
                name == meant,
                f"{path}, column {name}",
                "it is not read",
                f"call it {meant}, or leave it out",
            )
        columns = ["client", "seconds_per_example"]
        lines = {"down", "up", "latency"} & set(frame.columns)
        columns += ["down", "up"] if lines else []
        columns += ["latency"] if "latency" in lines else []
        missing = [name for name in columns if name not in frame.columns]
        instead = "write client,seconds_per_example,down,up above the rows"
        require(not missing, path, f"it has no column {', '.join(missing)}", instead)
        for name in columns:
            frame[name] = pd.to_numeric(frame[name], errors="coerce")
        wrong = frame[~(np.isfinite(frame[columns]) & (frame[columns] >= 0)).all(axis=1)]
        require(
            wrong.empty,
            f"{path}, row {', '.join(str(row + 2) for row in wrong.index[:5])}",
            f"{', '.join(columns)} are finite numbers of 0 or more",
            "mend these rows",
        )
        odd = frame["client"][frame["client"] % 1 != 0]
        require(
            odd.empty,
            f"{path}, client {odd.iloc[0] if len(odd) else ''}",
            "an id is a whole number",
            "mend it",
        )
        times = frame[[name for name in ("seconds_per_example", "latency") if name in columns]]
        require(
            not (times > LONGEST).any(axis=None),
            f"{path}, {' and '.join(times)}",
            "a time is at most 1e9 seconds",
            "mend the rows",
        )
        zero = bool(lines) and bool((frame[["down", "up"]] < SLOWEST).any(axis=None))
        require(
            not zero,
            f"{path}, down and up",
            "a line carries a millionth of a byte a second or more",
            "mend the rows",
        )
        twice = frame["client"][frame["client"].duplicated()]
        require(
            twice.empty,
            f"{path}, client {twice.iloc[0] if len(twice) else ''}",
            "it has two rows",
            "keep one",
        )
        self.rows = {
            int(row["client"]): (
                float(row["seconds_per_example"]),
                Line(*(float(row[name]) for name in columns[2:])) if lines else None,
            )
            for row in frame.to_dict("records")
        }

    def seconds(self, seed: int, round: int, client: int, examples: int) -> float:
        return self._row(client)[0] * examples

    def line(self, client: int) -> Line | None:
        return self._row(client)[1]

    @property
    def content_sha256(self) -> str:
        return self._sha256

    def check(self, clients: list[int]) -> None:
        """Refuse a federation with clients that have no row."""
        for client in clients:
            self._row(client)

    def _row(self, client: int) -> tuple[float, Line | None]:
        if client not in self.rows:
            raise InputError(
                f"{self.path}, client {client}", "it has no row", "add one for every client"
            )
        return self.rows[client]


def _bytes_of(path: Path) -> bytes:
    packaged = (
        configs_folder() / path.relative_to("configs") if path.parts[:1] == ("configs",) else path
    )
    with as_bad_input(str(path), "it cannot be read", "write a CSV or Parquet file"):
        return (path if path.exists() else packaged).read_bytes()


def _read(path: Path, data: bytes) -> pd.DataFrame:
    import pandas as pd

    file, instead = BytesIO(data), "write a CSV or Parquet file"
    errors = OSError, ValueError, ImportError, pd.errors.ParserWarning
    with as_bad_input(str(path), "it cannot be read", instead, *errors), warnings.catch_warnings():
        if path.suffix == ".parquet":
            return pd.read_parquet(file)
        # of rows that are longer than the names above them
        warnings.simplefilter("error", pd.errors.ParserWarning)
        return pd.read_csv(file, skipinitialspace=True, index_col=False)
