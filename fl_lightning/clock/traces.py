"""Availability from a file: when phones were measured to be idle, charged and on WiFi.

The file is FLASH's and FLHetBench's ``cached_timers.json`` (Yang et al., WWW 2021; Zhang et al.,
CVPR 2024), an object of ``guid: {"trace_start": s, "trace_end": s, "ready_time": [[start, end],
...]}`` in seconds, or the same as a Parquet table. ``python -m fl_lightning traces convert`` makes
either of FedScale's pickle.

``T`` traces, ``M`` times online of all of them, ``K`` clients.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fl_lightning.clock.availability import Availability, Spans
from fl_lightning.errors import InputError, as_bad_input, require
from fl_lightning.rng import stream

MAX_BYTES = 2**29
"""Bytes of a file of traces; FLASH's largest has less than a tenth."""
MAX_SECONDS = sys.float_info.max
COLUMNS = ("guid", "start", "end", "trace_start", "trace_end")


@dataclass(frozen=True)
class Trace:
    """One measured device.

    Args:
        guid: its name.
        begin: virtual seconds at which it begins; it is repeated before and after.
        length: seconds after which it begins anew, above 0.
        spans: times online since its beginning, sorted and apart from each other, float64 ``[n,
            2]``.
    """

    guid: str
    begin: float
    length: float
    spans: np.ndarray


class AvailabilityTrace(Availability):
    """Clients are online when measured phones were.

    A client's trace is repeated without end, and virtual second 0 is the file's second 0: traces
    that begin at different hours keep a common time of the day, as in FLASH. Times online that
    touch are one, also where one ends with the trace and the first begins with it. FLASH rounds
    times down to whole seconds and counts the last of them as online; here times are real numbers
    and half-open.

    Args:
        path: a JSON or Parquet file of traces.
        assign: which trace a client has: ``order``: client k the trace k modulo T, in the order of
            the file, as FedScale does it; ``random``: one drawn for the whole run, each as likely,
            as FLASH does it.

    Raises:
        InputError: the file cannot be read or is no file of traces, or nobody in it is ever online.
    """

    def __init__(self, path: str, assign: Literal["order", "random"] = "order") -> None:
        self.path, self.assign = path, assign
        data = read_bytes(Path(path))
        self._sha256 = sha256(data).hexdigest()
        traces = read_traces(data, path)
        require(
            any(len(trace.spans) for trace in traces),
            path,
            "nobody in it is ever online",
            "take traces with times in ready_time",
        )
        self.begin = np.array([trace.begin for trace in traces])
        self.length = np.array([trace.length for trace in traces])
        counts = np.array([len(trace.spans) for trace in traces])
        self.first = np.cumsum(counts) - counts
        self.last = np.cumsum(counts)
        self.starts, self.ends = np.concatenate([trace.spans for trace in traces]).T.copy()
        self._drawn: tuple[int | None, np.ndarray] = None, np.empty(0, np.int64)

    @property
    def content_sha256(self) -> str:
        return self._sha256

    def check(self, seed: int, clients: np.ndarray) -> None:
        which = self._trace_of(seed, clients)
        require(
            bool((self.last[which] > self.first[which]).any()),
            f"{self.path} for {len(clients)} clients",
            "the traces that they have are never online",
            "take more clients, or another file",
        )

    def spans(self, seed: int, clients: np.ndarray, at: float) -> Spans:
        which = self._trace_of(seed, clients)
        first, last, length = self.first[which], self.last[which], self.length[which]
        begin, never = self.begin[which], first == last
        # The n-th lap begins at begin + n length, rounded, whenever it is asked for: so that an
        # instant at which a time online begins or ends is the same number for who looks before and
        # for who looks then.
        lap = np.floor((at - begin) / length)
        lap = lap + (begin + (lap + 1) * length <= at) - (begin + lap * length > at)
        found = _after(self.ends, first, last, begin + lap * length, begin + (lap + 1) * length, at)
        wraps = found == last
        found, lap = np.where(wraps, first, found), lap + wraps
        since, until = begin + lap * length, begin + (lap + 1) * length
        inside, final = np.minimum(found, len(self.ends) - 1), np.maximum(last - 1, 0)
        start, end = since + self.starts[inside], np.minimum(since + self.ends[inside], until)
        head = np.minimum(first, len(self.ends) - 1)
        joins = (found == last - 1) & (self.ends[final] == length) & (self.starts[head] == 0)
        end = np.where(joins, until + self.ends[head], end)
        end = np.where(joins & (last - first == 1), np.inf, end)
        return np.where(never, np.inf, start), np.where(never, np.inf, end)

    def _trace_of(self, seed: int, clients: np.ndarray) -> np.ndarray:
        if self.assign == "order":
            return clients % len(self.length)
        size, (known, drawn) = int(clients.max(initial=-1)) + 1, self._drawn
        if known != seed or size > len(drawn):  # the draws of fewer clients are the first of these
            numbers = stream(seed, "clock/trace").random(size)
            drawn = (numbers * len(self.length)).astype(np.int64)
            self._drawn = seed, drawn
        return drawn[clients]


def _after(
    ends: np.ndarray,
    first: np.ndarray,
    last: np.ndarray,
    since: np.ndarray,
    until: np.ndarray,
    at: float,
) -> np.ndarray:
    """Return the first place in ``first .. last`` whose end is after a time, ``last`` if there is
    none; by bisection, all clients at once.

    Args:
        ends: of all times online ``[M]``, rising within each trace.
        first, last: the places of each client's trace ``[K]``.
        since, until: virtual seconds at which its lap begins and ends ``[K]``.
        at: virtual seconds.
    """
    low, high = first.copy(), last.copy()
    while (open_ := low < high).any():
        middle = (low + high) // 2
        end = np.minimum(since + ends[np.minimum(middle, len(ends) - 1)], until)
        past = open_ & (end <= at)
        low, high = np.where(past, middle + 1, low), np.where(open_ & ~past, middle, high)
    return low


def read_bytes(path: Path) -> bytes:
    """Return what a file of traces has.

    Raises:
        InputError: it cannot be read, or is too large.
    """
    with as_bad_input(str(path), "it cannot be read", "correct the path"), path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    rule = f"a file of traces has at most {MAX_BYTES // 2**20} MiB"
    require(len(data) <= MAX_BYTES, str(path), rule, "take some of its traces")
    return data


def read_traces(data: bytes, name: str) -> list[Trace]:
    """Return the traces of a file, in its order; those that FLASH marks as unreadable are left out.

    Args:
        data: what it has.
        name: of the file, whose ending says what it is.

    Raises:
        InputError: it is no file of traces.
    """
    found = _parquet(data, name) if name.endswith((".parquet", ".pq")) else _json(data, name)
    require(
        bool(found),
        name,
        "it has no traces",
        "write an object of guid: {ready_time: [[start, end]]}",
    )
    return [trace_of(guid, entry, f"{name}, {guid[:80]}") for guid, entry in found.items()]


def _json(data: bytes, name: str) -> dict[str, Any]:
    instead = 'write {"guid": {"trace_start": 0, "trace_end": 86400, "ready_time": [[start, end]]}}'
    with as_bad_input(name, "it is no JSON", instead, ValueError, RecursionError):
        found = json.loads(data)
    require(isinstance(found, dict), name, "traces are an object by guid", instead)
    for guid, entry in found.items():
        require(isinstance(entry, dict), f"{name}, {guid[:80]}", "a trace is an object", instead)
    return {guid: entry for guid, entry in found.items() if entry.get("isSuccess") is not False}


def _parquet(data: bytes, name: str) -> dict[str, Any]:
    import pandas as pd

    instead = f"write the columns {', '.join(COLUMNS)}, a row for each time online"
    # a damaged file can raise nearly any error
    with as_bad_input(name, "it cannot be read as Parquet", instead, Exception):
        table = pd.read_parquet(BytesIO(data))
    missing = [column for column in COLUMNS if column not in table.columns]
    require(not missing, name, f"it has no column {', '.join(missing)}", instead)
    for column in COLUMNS[1:]:
        table[column] = pd.to_numeric(table[column], errors="coerce")
    found = {}
    for guid, rows in table.groupby("guid", sort=False):
        one = rows.iloc[0]
        times = rows[["start", "end"]]
        # a row without times is of a device that is never online
        times = times[times.notna().any(axis=1)]
        found[str(guid)] = {
            "trace_start": float(one["trace_start"]),
            "trace_end": float(one["trace_end"]),
            "ready_time": times.to_numpy(float).tolist(),
        }
    return found


def trace_of(guid: str, entry: Mapping[str, Any], given: str) -> Trace:
    """Return one trace of a file.

    Args:
        guid: its name.
        entry: ``ready_time``, and perhaps ``trace_start`` (default 0) and ``trace_end`` (default:
            the last time online ends the trace).
        given: what a refusal calls it.

    Raises:
        InputError: a time is no number, or outside the trace.
    """
    times = entry.get("ready_time")
    is_right = isinstance(times, list) and all(map(_is_pair, times))
    require(is_right, f"{given}, ready_time", "it is a list of [start, end] in seconds", "mend it")
    spans = np.array(times, np.float64).reshape(-1, 2)
    begin: Any = entry.get("trace_start")
    end: Any = entry.get("trace_end")
    begin = 0.0 if begin is None else begin
    if end is None and is_time(begin):
        end = float(spans[:, 1].max()) if len(spans) else begin + 1
    require(
        is_time(begin) and is_time(end) and 0 < end - begin < math.inf,
        f"{given}, trace_start {str(begin)[:40]} and trace_end {str(end)[:40]}",
        "a trace begins before it ends, at seconds that are finite",
        "mend them",
    )
    wrong = (spans[:, 0] > spans[:, 1]) | (spans[:, 0] < begin) | (spans[:, 1] > end)
    if wrong.any():
        low, high = spans[wrong][0]
        rule = f"a time online begins before it ends, and within {begin:g} and {end:g}"
        raise InputError(f"{given}, ready_time [{low:g}, {high:g}]", rule, "mend it")
    return Trace(guid, float(begin), float(end - begin), merged(spans - begin))


def merged(spans: np.ndarray) -> np.ndarray:
    """Return times online in order, those that touch or overlap as one, ``[n, 2]``; those without a
    length are left out."""
    found: list[list[float]] = []
    for start, end in spans[np.lexsort((spans[:, 1], spans[:, 0]))].tolist():
        if found and start <= found[-1][1]:
            found[-1][1] = max(found[-1][1], end)
        else:
            found.append([start, end])
    return np.array([one for one in found if one[0] < one[1]]).reshape(-1, 2)


def _is_pair(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(is_time, value))


def is_time(value: object) -> bool:
    """Return whether a value from a file is a number that a float64 can hold."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return -MAX_SECONDS <= value <= MAX_SECONDS


def as_json(traces: Iterable[Trace]) -> dict[str, Any]:
    """Return traces in the form of FLASH's file."""
    return {
        trace.guid: {
            "trace_start": trace.begin,
            "trace_end": trace.begin + trace.length,
            "ready_time": (trace.begin + trace.spans).tolist(),
        }
        for trace in traces
    }
