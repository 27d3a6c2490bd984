"""What methods against client drift have in common: clients count once each and keep vectors over
the trained parameters, of which the server keeps a mean over all clients of the federation.

The mean is divided by N, the clients that have examples, and not by those that were asked or that
returned: a client that did not take part keeps its vector, and it stays in the mean.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD

from fl_lightning.aggregation.client_weights import Weighing
from fl_lightning.aggregation.sums import Addend, Sums
from fl_lightning.client import Client
from fl_lightning.data import FederatedData
from fl_lightning.errors import require
from fl_lightning.methods.base import Method
from fl_lightning.methods.optimizing import round_optimizer
from fl_lightning.methods.products import inner_product
from fl_lightning.wire import Layout, Limit, Payload


class CorrectedMethod(Method, ABC):
    """Base of methods whose clients and server keep vectors ``[P]`` over the trained parameters.

    Args:
        weigh_by: ``clients``, each of which counts once; another value where nothing is corrected.
    """

    refuses = {"privacy": "clipping and noise part the server's mean from what its clients keep"}
    plain_sgd_why: str = ""
    """Why local steps have to be those of SGD without momentum, weight decay and clipping; empty:
    they need not be."""

    def __init__(self, weigh_by: Weighing = "clients", **settings: Any) -> None:
        super().__init__(weigh_by=weigh_by, **settings)
        require(
            weigh_by == "clients" or not self.corrects,
            f"--model.weigh_by {weigh_by} with --model {type(self).__name__}",
            "its correction is a mean over clients, each of which counts once",
            "leave weigh_by out",
        )

    @property
    @abstractmethod
    def corrects(self) -> bool:
        """Whether anything is corrected at these settings; else the method is the mean of its
        clients."""

    @property
    def scales_with_federation(self) -> bool:
        return self.corrects

    def build(self, data: FederatedData) -> None:
        super().build(data)
        travels = {*self.trained_names} & self.layout.shapes.keys()
        self.trained = Layout.of(self.network, include=travels.__contains__)
        self.clients = len(data.active)
        if self.corrects and self.plain_sgd_why:
            require_plain_sgd(self, self.plain_sgd_why)

    def configure_optimizers(self) -> Any:
        if self.plain_sgd_why and self.optimizer_spec is None and self.module is None:
            return SGD(self.trainable(), 0.05)
        return super().configure_optimizers()

    def check(self, upload: Payload, client: Client) -> None:
        super().check(upload, client)
        for name in self.upload_limits(client):
            upload.tensor(name)

    @property
    def keeps_state(self) -> bool:
        return self.corrects or super().keeps_state

    def make_room(self, *names: str) -> None:
        """Register buffers ``[P]`` for what ``receive`` sets."""
        for name in names:
            self.register_buffer(name, torch.zeros(self.trained.size), persistent=False)

    def kept(self, client: Client, name: str) -> Tensor:
        """Return a vector that the client keeps; zeros before its first round that counted."""
        return client.state.get(name, torch.zeros(self.trained.size))

    def along(self, vector: Tensor) -> Tensor:
        """Return <vector, y>, a term that adds ``vector`` ``[P]`` to the gradient by y."""
        weights = [weight for _, weight in self.own_parameters()]
        return inner_product(weights, [*self.trained.unpack(vector).values()])

    def own_parameters(self) -> list[tuple[str, Tensor]]:
        """Return what the local optimiser steps on, in the order of the vectors."""
        weights = self.trained_weights()
        return [(name, weights[name]) for name in self.trained.shapes]


class ChangingMethod(CorrectedMethod):
    """Base of methods whose clients send what their vector changes by, so that the server's is the
    mean of all clients' vectors."""

    mean_name: str
    """The server's vector, in ``server`` and in broadcasts."""

    def build(self, data: FederatedData) -> None:
        super().build(data)
        if self.corrects:
            self.server[self.mean_name] = torch.zeros(self.trained.size)

    def broadcast(self, client: Client) -> Payload:
        message, name = super().broadcast(client), self.mean_name
        return Payload({**message, name: self.server[name]}) if self.corrects else message

    @abstractmethod
    def change(self, client: Client) -> Tensor:
        """Return what the client's vector changes by ``[P]``, which the client keeps too."""

    def upload(self, client: Client) -> Payload:
        message = super().upload(client)
        return Payload({**message, "change": self.change(client)}) if self.corrects else message

    def upload_limits(self, client: Client) -> Mapping[str, Limit]:
        own = {"change": (self.trained.size,)} if self.corrects else {}
        return {**super().upload_limits(client), **own}

    def addends(self, upload: Payload, client_id: int, weight: int) -> dict[str, Addend]:
        found, start = super().addends(upload, client_id, weight), self._starts.get("change")
        own = {"change": Addend(upload.tensor("change"), start=start)} if self.corrects else {}
        return {**found, **own}

    def starts(self) -> Mapping[str, Tensor]:
        return {**super().starts(), **self._starts}

    @property
    def _starts(self) -> dict[str, Tensor]:
        """Zeros, which changes are counted from, where ``average`` is no sum: a robust one guards
        them too."""
        guarded = self.corrects and not self.average.is_sum
        return {"change": torch.zeros(self.trained.size)} if guarded else {}

    def next_state(self, sums: Sums) -> None:
        super().next_state(sums)
        if not self.corrects:
            return
        if self._starts:
            change = len(self.served) / self.clients * sums.mean("change")
        else:
            change = (sums.total("change") / self.clients).float()
        self.server[self.mean_name] = self.server[self.mean_name] + change


def require_plain_sgd(
    method: Method, why: str, *, momentum: bool = False, decay: bool = False, clipping: bool = False
) -> None:
    """Refuse local steps that are not minus a rate times a gradient.

    Args:
        method: built, so that its optimiser can be made.
        why: they have to be.
        momentum, decay, clipping: whether momentum, weight decay and clipped gradients are allowed.

    Raises:
        InputError: another optimiser than SGD, Nesterov's form, several rates, or clipped
            gradients.
    """
    name, optimizer = type(method).__name__, round_optimizer(method)
    kind = type(optimizer).__name__
    require(
        type(optimizer) is SGD,
        f"--model.optimizer {kind} with --model {name}",
        why,
        "write --model.optimizer SGD",
    )
    wanted = {"dampening": True, "nesterov": True, "maximize": True}
    wanted |= {"momentum": not momentum, "weight_decay": not decay}
    for group in optimizer.param_groups:
        for setting, refused in wanted.items():
            given = f"--model.optimizer.{setting} {group[setting]} with --model {name}"
            zero = str(type(group[setting])()).lower()
            instead = f"write --model.optimizer.{setting} {zero}"
            if setting == "momentum" and "max_momentum" in group:  # as cyclic schedules set it
                given = f"a schedule with a momentum of {group[setting]:g} and --model {name}"
                instead = "give the scheduler cycle_momentum false"
            require(not (refused and group[setting]), given, why, instead)
    rates = sorted({float(group["lr"]) for group in optimizer.param_groups})
    require(
        len(rates) == 1,
        f"an optimiser with learning rates {rates}",
        why,
        "give all parameters one lr",
    )
    clip = method.gradient_clip_val
    given = f"--trainer.gradient_clip_val {clip} with --model {name}"
    require(clip is None or clipping, given, why, "leave gradient_clip_val out")
