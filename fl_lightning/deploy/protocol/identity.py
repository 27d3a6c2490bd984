"""What server and node must agree on before the first round: they build it apart, and the server
compares."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from fl_lightning import __version__
from fl_lightning.data import FederatedData
from fl_lightning.data.hashes import hashes_of
from fl_lightning.deploy.protocol.messages import printable
from fl_lightning.deploy.protocol.private import terms_of
from fl_lightning.federation import Federation
from fl_lightning.models.constants import is_pairs, other_constants, what_never_travels

NAMES = {
    "version": "version of fl_lightning",
    "method": "method",
    "task": "task",
    "num_classes": "number of classes",
    "example_shape": "shape of an example",
    "frozen": "SHA-256 of the frozen weights",
    "secure_sum": "secure sum",
    "privacy": "client-level privacy",
    "seed": "seed",
    "content": "SHA-256 of the data",
    "partition": "SHA-256 of who holds which example",
    "tokens": "SHA-256 of the tokens of the text",
    "test_owners": "SHA-256 of the clients or groups of test examples",
    "public": "SHA-256 of the public set",
    "costs": "SHA-256 of the tables of joules",
}
MAX_LISTED = 3  # tensors or clients that one line names
MAX_SHOWN = 1000  # characters of what a node has


def describe(fed: Federation, clients: Iterable[int]) -> dict[str, Any]:
    """Return what the results of these clients rest on, as JSON: the package's version, method,
    task, layout of the network, form of the examples, the settings of a secure sum and of
    client-level privacy, the seed, the hashes of the data (none of data that nodes alone have) and
    of tables of joules, and how many training examples each client has. Files of devices, traces
    and graphs are left out: the server alone reads them."""
    method, data = fed.method, fed.data
    hashes = {} if data.apart else hashes_of(data)
    if tables := method.measured_by.get("sha256", ""):
        hashes["costs"] = tables
    cls = type(method)
    tensors = {name: tensor for name, tensor in method.server.items() if name not in method.growing}
    shapes = {f"server.{name}": list(tensor.shape) for name, tensor in tensors.items()}
    shapes |= {name: list(shape) for name, shape in method.layout.shapes.items()}
    return {
        "version": __version__,
        "method": f"{cls.__module__}.{cls.__qualname__}",
        "task": type(data.task).__name__,
        "num_classes": int(data.num_classes),
        "example_shape": list(data.example_shape),
        **what_never_travels(method.network, method.layout.shapes, method.first),
        "secure_sum": None if fed.aggregation.masks is None else asdict(fed.aggregation.masks),
        "privacy": None if fed.aggregation.privacy is None else terms_of(fed.aggregation.privacy),
        "seed": fed.seed,
        "content": "",
        "partition": "",
        **hashes,
        "layout": shapes,
        "examples": {str(id): int(data.sizes[id]) for id in clients},
    }


def facts(data: FederatedData) -> dict[str, Any]:
    """Return what data of one run must agree on, as JSON."""
    return {
        "version": __version__,
        "task": type(data.task).__name__,
        "num_classes": int(data.num_classes),
        "example_shape": list(data.example_shape),
        "batch_size": data.batch_size,
        "val_fraction": data.val_fraction,
        "form": json.loads(json.dumps(asdict(data.form()))),
        **({"tokenizer": data.tokenizer_sha256} if data.tokenizer_sha256 else {}),
    }


def mismatches(server: Mapping[str, Any], node: Mapping[str, Any]) -> list[str]:
    """Return in words what the two do not agree on; empty where a node fits the run."""
    found = [
        f"{label}: {printable(node.get(name), MAX_SHOWN)} there, {server.get(name)} here"
        for name, label in NAMES.items()
        if node.get(name) != server.get(name)
    ]
    constants = node.get("constants")
    if is_pairs(constants):
        other = other_constants(server["constants"], constants)
        found += [f"the network has other {printable(name)}" for name in other[:MAX_LISTED]]
    else:
        found.append("no numbers of what the network has beside weights")
    for name, label in (("layout", "shape of {}"), ("examples", "training examples of client {}")):
        here, there = server[name], node.get(name) or {}
        # the server of a continued run may have got entries that nobody has at the start
        both = {*here, *there} - {key for key in {*here} ^ {*there} if key.startswith("server.")}
        wrong = sorted(key for key in both if here.get(key) != there.get(key))
        found += [
            f"{label.format(printable(key))}: {printable(there.get(key, 'none'))} there, "
            f"{here.get(key, 'none')} here"
            for key in wrong[:MAX_LISTED]
        ]
        found += [f"and {len(wrong) - MAX_LISTED} more"] if len(wrong) > MAX_LISTED else []
    return found
