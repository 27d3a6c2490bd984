"""The command ``python -m fl_lightning traces convert``: FedScale's dictionaries as a file that a
run reads.

A run reads no pickles. They are unpickled here, once, as untrusted input: this unpickler knows no
classes and no functions, so that nothing but containers, numbers and texts can come of a file.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from io import BytesIO
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rich.console import Console

from fl_lightning.clock.traces import (
    COLUMNS,
    Trace,
    as_json,
    is_time,
    read_bytes,
    read_traces,
    trace_of,
)
from fl_lightning.errors import as_bad_input, require
from fl_lightning.support import disk

WRITE = "write: traces convert client_behave_trace traces.json"


class _NumbersOnly(pickle.Unpickler):
    """An unpickler that refuses all globals."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def traces(words: Sequence[str] = (), overwrite: bool = False) -> None:
    """Convert a file of devices' availability to one that a run reads.

    Args:
        words: ``convert``, the file, which is FedScale's pickle or of any form that a run reads,
            and the file to write, whose ending is .json or .parquet.
        overwrite: whether the file to write may exist.

    Raises:
        InputError: a file cannot be read or written.
    """
    is_right = len(words) == 3 and words[0] == "convert"
    require(is_right, " ".join(["traces", *words]), "it converts a file to another", WRITE)
    source, target = words[1], Path(words[2])
    is_known = target.suffix in (".json", ".parquet")
    require(is_known, str(target), "traces are written as .json or .parquet", WRITE)
    require(
        overwrite or not target.exists(),
        str(target),
        "it exists",
        "name another, or add --overwrite",
    )
    data = read_bytes(Path(source))
    read = read_traces if source.endswith((".json", ".parquet", ".pq")) else read_fedscale
    found = read(data, source)
    with as_bad_input(str(target), "it cannot be written", "name another"):
        disk.replace(target, as_bytes(found, target.suffix))
    never = sum(not len(trace.spans) for trace in found)
    Console().print(f"{target}: {len(found)} traces, {never} of them never online")


def read_fedscale(data: bytes, name: str) -> list[Trace]:
    """Return the traces of FedScale's pickled dictionary (Lai et al., ICML 2022), in its order.

    Its clients have ``active`` and ``inactive``, the seconds at which they came online and went
    offline, and ``finish_time``, at which the trace begins anew. One that goes offline first was
    online from 0 on, and one that comes online last is so until the end.

    Args:
        data: what the file has.
        name: of the file.

    Raises:
        InputError: it is no such file, or has anything but containers, numbers and texts.
    """
    instead = "take client_behave_trace of FedScale"
    # a damaged pickle can raise nearly any error
    with as_bad_input(name, "it is no pickle of numbers", instead, Exception):
        found = _NumbersOnly(BytesIO(data)).load()
    is_right = isinstance(found, dict) and all(isinstance(one, dict) for one in found.values())
    require(is_right and bool(found), name, "it has a dictionary for each client", instead)
    return [_of_fedscale(str(id), entry, f"{name}, {str(id)[:80]}") for id, entry in found.items()]


def _of_fedscale(guid: str, entry: Mapping[str, Any], given: str) -> Trace:
    comes, goes, end = (entry.get(key) for key in ("active", "inactive", "finish_time"))
    is_right = all(isinstance(times, (list, tuple)) for times in (comes, goes)) and end is not None
    rule, instead = "it has lists active and inactive, and finish_time", "take another file"
    require(is_right, given, rule, instead)
    assert comes is not None
    assert goes is not None
    require(all(map(is_time, (*comes, *goes, end))), given, "times are numbers of seconds", instead)
    if goes and (not comes or goes[0] < comes[0]):
        comes = [0, *comes]
    rule = "a client comes online and goes offline in turn"
    require(0 <= len(comes) - len(goes) <= 1, f"{given}, active and inactive", rule, instead)
    pairs = [list(pair) for pair in zip_longest(comes, goes, fillvalue=end)]
    return trace_of(guid, {"ready_time": pairs, "trace_start": 0, "trace_end": end}, given)


def as_bytes(traces: list[Trace], suffix: str) -> bytes:
    """Return the file of traces, JSON or Parquet, by its ending."""
    if suffix == ".json":
        return json.dumps(as_json(traces), separators=(",", ":")).encode()
    import pandas as pd

    rows = [
        (guid, *pair, entry["trace_start"], entry["trace_end"])
        for guid, entry in as_json(traces).items()
        for pair in entry["ready_time"] or [(None, None)]
    ]
    file = BytesIO()
    pd.DataFrame(rows, columns=list(COLUMNS)).to_parquet(file, index=False)
    return file.getvalue()
