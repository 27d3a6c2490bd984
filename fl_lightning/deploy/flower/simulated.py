"""Nodes within Flower's own simulation engine, which runs the same apps in Ray's worker processes.

Any worker may get a message to any node. What clients keep and what a node has checked lies on the
disk, so that makes no difference; the phases of a secure sum are in memory, so with one there is
one worker.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from fl_lightning.deploy.node.told import told
from fl_lightning.deploy.protocol.messages import refusal
from fl_lightning.errors import require

if TYPE_CHECKING:  # it imports torch
    from fl_lightning.deploy.node.node import Node

log = logging.getLogger("fl_lightning")


EPOCH = "0" * 32  # of all workers, any of which may answer for a node


def require_ray() -> None:
    """Refuse to go on without Ray."""
    require(
        find_spec("ray") is not None,
        "--deploy.simulation",
        "Flower's simulation engine needs Ray",
        "pip install 'flwr[simulation]', or write --deploy.local_nodes",
    )


def run_words(nodes: int, *, one_worker: bool) -> list[str]:
    """Return the arguments of ``flwr run`` for a simulation of so many nodes.

    Args:
        one_worker: one worker answers for all nodes; else there is one for each core.
    """
    settings = f"num-supernodes={nodes} client-resources-num-cpus=1"
    return ["--federation-config", f"{settings} init-args-num-cpus=1" if one_worker else settings]


def in_worker() -> bool:
    """Return whether this process is one of Ray's workers. It does not import Ray."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()


def answer(message: bytes, job: Path, partition: int, of: int) -> bytes:
    """Return the answer of a simulated node.

    Args:
        job: folder of the deployment's files, which are on this machine.
        partition, of: number of the node, and of all nodes.
    """
    try:
        node = _node(job, partition, of)
    except Exception as error:
        log.exception("a simulated node could not be made")
        return refusal(told(error))
    return node.answer(message)


@cache
def _node(job: Path, partition: int, of: int) -> Node:
    """Return the node, which this worker makes when it is first asked for it."""
    from fl_lightning.cli.parser import import_short_names
    from fl_lightning.deploy.node.build import builder
    from fl_lightning.deploy.node.node import Node, NodeSettings

    written = json.loads((job / "job.json").read_text())
    os.chdir(written["directory"])
    sys.path.append(written["directory"])
    import_short_names()
    folder = Path(written["nodes"]) / f"node{partition}"
    settings = NodeSettings(
        folder, partition, of, name=f"simulated-{partition}", allow=written.get("allow", ())
    )
    return Node(settings, builder(), epoch=EPOCH)
