"""Personal models: tensors of the network that stay on their client, and a copy that is fine-tuned
before it is evaluated.

What stays does not travel: it is no part of ``layout``, so that the server, its optimiser,
averages, secure sums and noise know nothing of it. A client keeps it in ``client.state``, where it
counts if the client's upload does; a client that was never counted has the initial values. Its
model is made of what travels as the server has it now, and of its own part as its last counted
round left it, so the part of a client that has not been sampled for long is old.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Annotated, Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from fl_lightning.client import Client
from fl_lightning.config.constraints import within
from fl_lightning.config.recorded import Recorded
from fl_lightning.errors import require
from fl_lightning.models.features import linear_layers
from fl_lightning.models.tensors import tensors_of
from fl_lightning.wire import Layout

OWN = "personal"
"""The entry of ``client.state`` with what stays on the client, float32 ``[size of own]``."""
NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm)
"""Layers of normalisation, beside those whose class is called so, such as ``LlamaRMSNorm``."""
Part = Literal["full", "head"]
TuningRate = Annotated[float | None, within("(0, inf)", "a rate is above 0 and finite", 0.01)]


class FineTuning(Recorded):
    """Local steps on a copy of a client's model before *its* model is evaluated. The copy is not
    kept.

    They are steps of the method's local optimiser, begun anew, by the task loss on the client's
    training examples with the labels that it trains on. With 0 steps the model that the server has
    is evaluated client by client.

    Args:
        steps: 0 or more.
        lr: learning rate, above 0, the same in all rounds; null: that of the round.
        part: ``full``, or ``head``, the last linear layer alone.
        epochs: passes over the client's examples in place of ``steps``, at least 1.
    """

    settings_shown = ("{cls}({name}={value})", "{name}: {value}")

    def __init__(
        self,
        steps: Annotated[int, within("[0, inf)", "0 steps or more are made", 5)] = 5,
        lr: TuningRate = None,
        part: Part = "full",
        epochs: Annotated[int | None, within("[1, inf)", "1 pass or more is made", 1)] = None,
    ) -> None:
        self.steps, self.lr, self.part, self.epochs = steps, lr, part, epochs


class WithPersonal:
    """The part of a method that keeps tensors on clients and fine-tunes copies.

    Where both are neutral it does nothing.
    """

    network: nn.Module
    layout: Layout
    owns: frozenset[str]
    personal: str | None = None
    finetune: FineTuning | None = None
    own_part_learns: bool = True
    """Whether clients train what stays with them; else it has its initial values for ever."""
    held_still: tuple[nn.Parameter, ...] = ()
    """Parameters that the last ``split_network`` has kept from learning."""
    finetuner: Callable[[Client], None] | None = None
    """Makes the local steps of ``finetune`` on the network that ``deploy`` has put together; set
    where there are data to make them on."""

    def split_network(self) -> None:
        """Divide the network that was just built into what travels, ``layout``, and what stays,
        ``own``."""
        for parameter in self.held_still:  # a LightningModule is the same network in the next run
            parameter.requires_grad_(True)
        stays = frozenset() if self.personal is None else part_of(self.network, self.personal)
        self.own = Layout.of(self.network, include=stays.__contains__)
        self.layout = Layout.of(self.network, include=lambda name: name not in stays)
        named = "--model FedAvg " if "personal" in self.owns else ""
        require(
            self.personal is None or self.layout.size > 0,
            f"--model.personal {self.personal} with a network of which it is all",
            "something has to travel",
            "take a network of more than that, or --model LocalOnly",
        )
        require(
            self.personal in (None, "norm") or self.own.size > 0,
            f"--model.personal {self.personal} with a network of which nothing there is trained",
            "what stays on a client is what it trains",
            f"write {named}--model.personal with a pattern of trained tensors, such as '*lora_B.*'",
        )
        self.own_start = self.own.read(self.network)
        own = [p for name, p in self.network.named_parameters() if name in self.own.shapes]
        self.held_still = () if self.own_part_learns else tuple(own)
        for parameter in self.held_still:
            parameter.requires_grad_(False)

    def take_own(self, client: Client | None) -> None:
        """Set what stays on a client to what it has kept; None: to the initial values."""
        if self.own.size:
            kept = {} if client is None else client.state
            self.own.write(self.network, kept.get(OWN, self.own_start))

    def keep_own(self, client: Client) -> None:
        """Keep on the client what stays there, after its local steps. A client that has diverged
        keeps what it had."""
        if self.own.size and self.own_part_learns:
            values = self.own.read(self.network)
            if bool(torch.isfinite(values).all()):
                client.state[OWN] = values


def part_of(network: nn.Module, part: str) -> frozenset[str]:
    """Return the names of the tensors of a part of a network.

    Args:
        network: whose.
        part: ``norm``: layers of normalisation, by their type and not by their name, with their
            statistics; ``head``: the last linear layer, with its adapter; ``body``: all but it; or
            a pattern of names, such as ``blocks.*``.

    Raises:
        InputError: the network has no linear layer, or nothing has such a name.
    """
    names = [*tensors_of(network)]
    if part == "norm":
        norms = tuple(f"{name}." for name, module in network.named_modules() if is_norm(module))
        return frozenset(name for name in names if name.startswith(norms))
    if part in ("head", "body"):
        linear = [*linear_layers(network)]
        require(
            bool(linear),
            f"a personal {part} of {type(network).__name__}, which has no linear layer",
            "the head is the last one",
            "take a network that ends with one, such as small_cnn, or write a pattern of names",
        )
        head = {name for name in names if name.startswith(f"{linear[-1]}." if linear[-1] else "")}
        return frozenset(head if part == "head" else {*names} - head)
    found = frozenset(name for name in names if fnmatchcase(name, part))
    require(
        bool(found),
        f"--model.personal {part}",
        f"no tensor of {type(network).__name__} has such a name",
        f"write norm, head, body, or a pattern such as {names[0].partition('.')[0]}.*",
    )
    return found


def is_norm(module: nn.Module) -> bool:
    """Return whether a layer normalises."""
    named = not [*module.children()] and type(module).__name__.endswith("Norm")
    return isinstance(module, NORMS) or named


@contextmanager
def training_only(network: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Have the parameters of these names take gradients within the block, and no other."""
    parameters = dict(network.named_parameters())
    before = {name: parameter.requires_grad for name, parameter in parameters.items()}
    try:
        for name, parameter in parameters.items():
            parameter.requires_grad_(name in names)
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.requires_grad_(before[name])


def tuned_names(network: nn.Module, part: Part, trained: Collection[str]) -> set[str]:
    """Return the names of the parameters that fine-tuning steps on."""
    return {*trained} if part == "full" else {*trained} & part_of(network, "head")
