"""The run that is probed, and what it answers to the test set as it is, corrupted or attacked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from fl_lightning.data import FederatedData, FederatedImages
from fl_lightning.evaluation import deal_test_set, evaluation_mode
from fl_lightning.methods import Method

BATCH = 512  # as in ``evaluation``: the clean test set is answered bit for bit as during training
Forward = Callable[[Tensor], Tensor]
Change = Callable[[Forward, Tensor, Tensor, int], Tensor]
"""A network from pixels to logits, pixels in [0, 1], targets, and the number of the batch: the pixels to show
instead."""


@dataclass(frozen=True)
class Finding:
    """What one probe found.

    Args:
        metrics: numbers that follow from the checkpoint and the seed.
        timings: seconds and bytes that belong to this machine and moment.
        details: what a reader needs to trust them, as JSON.
        skipped: what was left out and why, a sentence each.
    """

    metrics: dict[str, float] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Subject:
    """A method in the state of one checkpoint.

    Args:
        states: what clients keep, by id.
        uploads: mean bytes of an upload of this round that counted; None when none did.
    """

    fabric: Fabric
    method: Method
    data: FederatedData
    states: Mapping[int, dict[str, Tensor]]
    seed: int
    uploads: float | None = None

    @property
    def target(self) -> Tensor:
        """Classes of the test set, int64 ``[n]``, on the CPU."""
        return self.data.test_target.cpu()

    @property
    def images(self) -> FederatedImages | None:
        """The data, if their examples are pixels that can be changed."""
        return self.data if isinstance(self.data, FederatedImages) else None

    def networks(self) -> Iterator[tuple[nn.Module, Tensor]]:
        """Each network that answers test examples, in evaluation mode, and which ones; a personalised method
        has one a client."""
        if not self.method.personalised:
            with evaluation_mode(self.method.deploy()) as network:
                yield network, torch.arange(len(self.data.test_target), device=self.data.device)
            return
        owner = deal_test_set(self.data)
        for id in np.unique(owner).tolist():
            with evaluation_mode(self.method.deploy(self.data.client(id, self.states.get(id)))) as network:
                yield network, torch.from_numpy(np.flatnonzero(owner == id)).to(self.data.device)

    def answers(self) -> Tensor:
        """Logits of the test set as it is, float32 ``[n, C]`` on the CPU, in its order."""
        return self._collect(
            lambda network, index, number: self._logits(network, self.data.inputs("test", index))
        )

    def answers_to(self, images: Tensor | None = None, change: Change | None = None) -> Tensor:
        """As :meth:`answers`, of other images and of what ``change`` makes of them.

        Args:
            images: uint8 ``[n, 3, side, side]`` on the data's device; None: the test images.
            change: what is shown instead; None: they are.
        """
        data = self.images
        assert data is not None
        shown = data.test_images if images is None else images

        def one(network: nn.Module, index: Tensor, number: int) -> Tensor:
            pixels = data.view(shown[index]).float() / 255
            if change is not None:
                pixels = change(self.from_pixels(network), pixels, data.test_target[index], number)
            return self._logits(network, data.normalise(pixels))

        return self._collect(one)

    def from_pixels(self, network: nn.Module) -> Forward:
        """The network as a function of pixels in [0, 1], for gradients."""
        data = self.images
        assert data is not None

        def forward(pixels: Tensor) -> Tensor:
            with self.fabric.autocast():
                return network(data.normalise(pixels)).float()

        return forward

    def _collect(self, one: Callable[[nn.Module, Tensor, int], Tensor]) -> Tensor:
        logits, places, number = [], [], 0
        for network, indices in self.networks():
            for index in indices.split(BATCH):
                logits.append(one(network, index, number).cpu())
                places.append(index.cpu())
                number += 1
        return torch.cat(logits)[torch.cat(places).argsort()]

    @torch.no_grad()
    def _logits(self, network: nn.Module, inputs: Any) -> Tensor:
        with self.fabric.autocast():
            return network(inputs).float()
