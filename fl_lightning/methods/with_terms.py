"""What a method has for the terms of its local loss: what they read of the message, of the client
and of the networks, made ready before its steps and kept after them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from fl_lightning.aggregation.adapters import PlainWeights
from fl_lightning.client import Client
from fl_lightning.data import FederatedData
from fl_lightning.errors import MisuseError
from fl_lightning.methods.terms import LocalStep, Term
from fl_lightning.models.features import FeatureTap
from fl_lightning.models.measured import without_budget
from fl_lightning.models.recipe import copied
from fl_lightning.models.tensors import tensors_of
from fl_lightning.tasks import Task
from fl_lightning.wire import Layout

PREVIOUS = "previous_weights"
"""What a client keeps as its model of its last round, where a term reads it."""

SHIFT = "shift"
"""What a client keeps as the sum of its own updates, where a term reads it."""

FROZEN = ("received_network", "previous_network")
"""Copies of the network, each there where a term reads it."""


class WithTerms(LightningModule):
    """The part of a method that its terms read; what none of them reads is neither made nor
    kept."""

    network: nn.Module
    layout: Layout
    own: Layout
    task: Task
    terms: list[Term]
    adapters: PlainWeights
    trained_names: Sequence[str]
    has_received: bool
    """Whether terms know what the client received."""
    feature_taps: dict[str, FeatureTap]
    class_counts: Tensor
    """How many labels of each class the client trains on, ``[C]``; there where a term reads
    them."""

    def active_terms(self) -> list[Term]:
        """Return the terms that add something to the loss."""
        return [term for term in self.terms if not term.neutral]

    def _build_terms(self, data: FederatedData) -> None:
        """Make room for what the terms read of what clients receive and keep."""
        self.trained_names = [n for n, p in self.network.named_parameters() if p.requires_grad]
        if self.terms_read("received_weights"):
            travels = {*self.trained_names} & self.layout.shapes.keys()
            self.anchored = Layout.of(self.network, include=travels.__contains__)
            self.register_buffer("received_weights", torch.zeros(self.anchored.size))
        if self.terms_read("shift"):
            self.register_buffer("shift", torch.zeros(self.anchored.size), persistent=False)
        if self.terms_read("class_counts"):
            self.register_buffer("class_counts", torch.zeros(data.num_classes), persistent=False)
        if self.terms_read("received_logits", "received_features"):
            self.received_network = copied(self.network).requires_grad_(False)
        if self.terms_read("previous_features"):
            self.previous_network = copied(self.network).requires_grad_(False)
        self.feature_taps = {}
        if self.terms_read("features", "received_features", "previous_features"):
            names = [name for name in ("network", *FROZEN) if name in self._modules]
            self.feature_taps = {name: FeatureTap(self.get_submodule(name)) for name in names}

    def terms_read(self, *what: str) -> bool:
        """Return whether a term that adds something reads one of these: ``terms_read("features")``
        asks for ``reads_features``."""
        return any(getattr(term, f"reads_{each}") for term in self.active_terms() for each in what)

    @torch.no_grad()
    def remember_received(self) -> None:
        """Tell the terms that the model is now what the client received."""
        if self.terms_read("received_weights"):
            trained = self.trained_weights()
            parts = [trained[name].reshape(-1) for name in self.anchored.shapes]
            self.received_weights = torch.cat(parts)
        for frozen in self._frozen_networks():
            held, own = tensors_of(frozen), tensors_of(self.network)
            moved = [pair.base for pair in self.adapters.pairs] if self.adapters.moves_base else []
            for name in (*self.layout.shapes, *self.own.shapes, *moved):
                held[name].copy_(own[name])
        self.has_received = bool(self.active_terms())

    def _frozen_networks(self) -> list[nn.Module]:
        return [self.get_submodule(name) for name in FROZEN if name in self._modules]

    @torch.no_grad()
    def start_terms(self, client: Client, labels: Tensor) -> None:
        """Tell the terms, after ``receive``, whose round begins and which labels it trains on."""
        if self.terms_read("class_counts"):
            C, shares = len(self.class_counts), labels.is_floating_point()
            counts = labels.sum(0) if shares else torch.bincount(labels[labels >= 0], minlength=C)
            self.class_counts = counts.to(self.class_counts)
        if self.terms_read("shift"):
            self.shift = client.state.get(SHIFT, torch.zeros(self.anchored.size)).to(self.device)
        if self.terms_read("previous_features") and PREVIOUS in client.state:
            self.layout.write(self.previous_network, client.state[PREVIOUS])

    def end_terms(self, client: Client) -> None:
        """Keep on the client, after its local steps, what terms read in its next round."""
        if self.terms_read("previous_features"):
            trained = {**tensors_of(self.network), **self.trained_weights()}
            client.state[PREVIOUS] = self.layout.pack(trained)
        if self.terms_read("shift"):
            moved = self.anchored.pack(self.trained_weights()) - self.received_weights.cpu()
            client.state[SHIFT] = self.shift.cpu() + moved

    def train(self, mode: bool = True) -> WithTerms:
        super().train(mode)
        for frozen in self._frozen_networks():
            frozen.eval()
        return self

    def trained_weights(self) -> dict[str, Tensor]:
        """Return the network's weights that the local optimiser moves, by parameter name, before
        any rounding.

        Override where the optimiser steps on other tensors: the values are those before rounding,
        the gradient leads to what the optimiser steps on.
        """
        parameters = dict(self.network.named_parameters())
        return {name: parameters[name] for name in self.trained_names}

    def with_terms(
        self, outputs: dict[str, Tensor], batch: Any, logits: Tensor | None
    ) -> dict[str, Tensor]:
        """Return the losses of a step with those of ``terms``.

        Args:
            outputs: of the method itself: ``loss``, ``loss_task``, ...
            batch: inputs and target.
            logits: ``[B, C]`` of the model that is trained.

        Raises:
            MisuseError: a term needs what the client received, and ``receive`` did not remember it.
        """
        terms = self.active_terms()
        if not terms:
            return outputs
        if not self.has_received:
            raise MisuseError(
                f"{type(self).__name__}.receive with --model.terms",
                "terms may read what the client received",
                "call super().receive or end it with self.remember_received()",
            )
        inputs, target = batch
        step = LocalStep(
            inputs,
            target,
            outputs["loss_task"],
            logits,
            trained=self.trained_weights,
            received=lambda: self.anchored.unpack(self.received_weights),
            frozen=lambda name, inputs: (
                without_budget(self.get_submodule(name))(inputs),
                self._take_features(name),
            ),
            class_rows=self.task.class_rows,
            features=self._take_features("network"),
            class_counts=self.class_counts if self.terms_read("class_counts") else None,
            shift=lambda: self.anchored.unpack(self.shift),
            of_module=self.module is not None,
        )
        added = {f"loss_{term.name}": term(step) for term in terms}
        return {**outputs, "loss": sum(added.values(), outputs["loss"]), **added}

    def _take_features(self, name: str) -> Tensor | None:
        return self.feature_taps[name].take() if name in self.feature_taps else None
