"""What nodes send of metrics that are named, and of what a LightningModule logs: their states after
each batch.

A state that is a sum says little more of a batch than its accuracy does. A state that keeps outputs
stays where it is: such a metric is refused by name, or left out of what a module logs.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor

from fl_lightning.deploy.protocol.answers import METRIC_NAME, reading
from fl_lightning.deploy.protocol.messages import MAX_NAME, MessageError, printable
from fl_lightning.evaluation import MAX_PARTS
from fl_lightning.federation import Federation
from fl_lightning.methods.module_steps import REDUCTIONS, Split, has_step
from fl_lightning.metrics.named import NOT_FINITE
from fl_lightning.metrics.states import clear, keeps_outputs, parts_of, state_of

NAMED = "named"
LOGS: Mapping[Split, str] = {"test": "test_logs", "val": "val_logs"}
"""Parts of a message beside the sums: states of named metrics, and what each step of a module
logs."""
NUMBER = re.compile(r"\d{1,18}", re.ASCII)
MAX_LOGS = 256  # names that the steps of a module log
Form = tuple[torch.dtype, torch.Size]


def parts_asked(fed: Federation, splits: Collection[str]) -> list[str]:
    """Return which parts nodes are asked for beside the sums of these splits."""
    asked = [NAMED] if fed.data.task.named and "test" in splits else []
    steps: Mapping[Split, str] = {"test": "test", "val": "validation"}
    if fed.method.module is not None:
        asked += [LOGS[s] for s in steps if steps[s] in splits and has_step(fed.method.network, s)]
    return asked


def forms_of_logged(network: Any) -> dict[str, dict[str, Form]]:
    """Return type and shape of each state of the metrics in a module that keep no outputs, by their
    paths."""
    found: dict[str, dict[str, Form]] = {}
    for path, part in parts_of(network).items():
        if not keeps_outputs(part):
            clear(part)
            found[path] = forms_of(state_of(part))
    return found


def forms_of(state: Mapping[str, Tensor]) -> dict[str, Form]:
    """Return type and shape of each tensor of a state."""
    return {key: (value.dtype, value.shape) for key, value in state.items()}


def sent_of_logged(tensors: Mapping[str, Tensor], network: Any) -> dict[str, Tensor]:
    """Return what a node sends of the states that the step of a module has left."""
    forms = forms_of_logged(network)
    return {key: value.clone() for key, value in tensors.items() if _is_logged(key, value, forms)}


def read_states(
    fed: Federation, part: bytes, kind: str, clients: Collection[int]
) -> dict[str, Tensor]:
    """Return the states in one part of a node's answer.

    Args:
        kind: of the part, one of ``NAMED`` and ``LOGS``.
        clients: those that the node was asked for.

    Raises:
        MessageError: they have another form, or are of other clients.
    """
    with reading():
        found = load(part)
    forms = {} if kind == NAMED else forms_of_logged(fed.method.network)
    named = {one.name: one.state_forms for one in fed.data.task.named}
    names = set()
    for key, value in found.items():
        number, whose, name, state = [*key.split("|", 3), "", "", ""][:4]
        own = NUMBER.fullmatch(number) is not None and int(number) // MAX_PARTS in clients
        if kind == NAMED:
            form = (value.dtype, value.shape)
            fits = whose == "" and name in named
            fits = fits and (
                named[name].get(state) == form or forms_of(NOT_FINITE).get(state) == form
            )
        else:
            fits = name.partition("/")[0] == kind.removesuffix("_logs") and len(name) <= MAX_NAME
            fits = (
                fits and METRIC_NAME.fullmatch(name) is not None and _is_logged(key, value, forms)
            )
        names.add(name)
        if not (own and fits) or len(names) > MAX_LOGS:
            shape = list(value.shape)
            raise MessageError(f"its answer has {printable(key)} {shape}, which was not asked for")
    return found


def _is_logged(key: str, value: Tensor, forms: Mapping[str, Mapping[str, Form]]) -> bool:
    """Return whether a tensor is of a number that was logged, or of a metric whose state can
    travel."""
    _, source, _, state = key.split("|", 3)
    if source in forms:
        return forms[source].get(state) == (value.dtype, value.shape)
    number = source[:1] == "=" and source[1:] in REDUCTIONS and state in ("value", "weight")
    return number and value.dtype == torch.float64 and value.ndim == 0
