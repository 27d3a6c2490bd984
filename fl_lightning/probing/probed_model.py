"""The model that is probed, and its answers to the clean, corrupted or attacked test set."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from fl_lightning.data import FederatedData, ImageData
from fl_lightning.data.test_owners import deal_test_set
from fl_lightning.evaluation import evaluation_mode
from fl_lightning.methods import Method
from fl_lightning.probing.outputs import metrics_of
from fl_lightning.tasks import Classification

BATCH_SIZE = 512  # of images that are changed
Forward = Callable[[Tensor], Tensor]
Change = Callable[[Forward, Tensor, Tensor, int], Tensor]
"""A function that returns changed pixels. Its arguments are a network that maps pixels to logits,
pixels in [0, 1], targets, and the number of the batch."""


@dataclass(frozen=True)
class Finding:
    """The results of one probe.

    Args:
        metrics: numbers that depend on the checkpoint and the seed only.
        timings: measured seconds and bytes, which depend on the machine and its load.
        details: the circumstances of the probe, ready for JSON.
        skipped: a sentence for each part that was left out, with the reason.
    """

    metrics: dict[str, float] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Protection:
    """What stands between the clients' updates and those who would read them.

    Args:
        secure: the server sees sums over the cohort only.
        clip_norm: largest L2 norm of a client's message; None: no bound.
        noise_std: standard deviation of the noise in a released sum; 0: there is none.
        share_std: standard deviation of the share that each client adds before it sends; 0: the
            noise is added to the sum.
    """

    secure: bool = False
    clip_norm: float | None = None
    noise_std: float = 0.0
    share_std: float = 0.0

    def clipped(self, messages: Tensor) -> Tensor:
        """Return the messages ``[K, P]``, none longer than ``clip_norm``."""
        if self.clip_norm is None:
            return messages
        norms = messages.norm(dim=1, keepdim=True)
        return messages * (self.clip_norm / norms.clamp_min(1e-30)).clamp_max(1)


@dataclass(frozen=True)
class ProbedModel:
    """A method in the state of one checkpoint.

    Args:
        fabric: runs the forward passes.
        method: the method.
        data: its data set.
        states: tensors that clients keep, by client id.
        seed: seed of the run.
        uploads: mean bytes of the uploads of this round that were used, or why they are not known.
        cohort: clients of a round.
        protection: of the run, against those who read updates.
        trained_on: ids of the clients whose examples went into the model; None: all that have some.
        newcomers: each client's own model is that of a newcomer, as what clients keep is on the
            nodes of a deployment.
    """

    fabric: Fabric
    method: Method
    data: FederatedData
    states: Mapping[int, dict[str, Tensor]]
    seed: int
    uploads: float | str = "they are not known"
    cohort: int = 1
    protection: Protection = Protection()
    trained_on: frozenset[int] | None = None
    newcomers: bool = False

    @property
    def target(self) -> Tensor:
        """Classes of the test set, int64 ``[n]``, on the CPU."""
        return self.data.test_target.cpu()

    @property
    def images(self) -> ImageData | None:
        """The data set if its examples are images, None otherwise."""
        return self.data if isinstance(self.data, ImageData) else None

    @property
    def why_no_classified_images(self) -> str:
        """Why the examples are no images that the model tells the classes of; empty where they
        are."""
        if self.images is None:
            return f"the examples of {type(self.data).__name__} are no images in [0, 1]"
        task = self.data.task
        return "" if isinstance(task, Classification) else f"the task is {type(task).__name__}"

    def networks(self) -> Iterator[tuple[nn.Module, Tensor]]:
        """Yield each deployed network in evaluation mode with the indices of the test examples it
        answers.

        A personalised method has one network for each client.
        """
        if not self.method.personalised:
            with evaluation_mode(self.method.deploy()) as network:
                yield network, torch.arange(len(self.data.test_target), device=self.data.device)
            return
        owner = deal_test_set(self.data)
        for id in np.unique(owner).tolist():
            with evaluation_mode(
                self.method.deploy(self.data.client(id, self.states.get(id)))
            ) as network:
                yield network, torch.from_numpy(np.flatnonzero(owner == id)).to(self.data.device)

    def answers(self) -> Tensor:
        """Return the logits of the clean test set in its order, float32 ``[n, C]`` on the CPU."""
        # in batches as in ``evaluation``, so that they equal those during training bit for bit
        return self._collect(
            lambda network, index, number: self._logits(network, self.data.inputs("test", index)),
            self.data.evaluation_batch,
        )

    def metrics_of(self, outputs: Tensor) -> dict[str, float]:
        """Return the task's metrics of :meth:`answers`, or of :meth:`answers_to`."""
        return metrics_of(self.data.task, outputs, self.target)

    def answers_to(self, images: Tensor | None = None, change: Change | None = None) -> Tensor:
        """Return the logits of other or changed images, in the form of :meth:`answers`.

        Args:
            images: uint8 ``[n, C, side, side]`` on the data's device; None: the test images.
            change: changes the pixels of each batch; None: no change.
        """
        data = self.images
        assert data is not None
        shown = data.test_images if images is None else images

        def one(network: nn.Module, index: Tensor, number: int) -> Tensor:
            pixels = data.view(shown[index]).float() / 255
            if change is not None:
                pixels = change(
                    self.pixel_function(network), pixels, data.test_target[index], number
                )
            return self._logits(network, data.normalise(pixels))

        return self._collect(one, BATCH_SIZE)

    def pixel_function(self, network: nn.Module) -> Forward:
        """Return the network as a differentiable function of pixels in [0, 1]."""
        data = self.images
        assert data is not None

        def forward(pixels: Tensor) -> Tensor:
            with self.fabric.autocast():
                return network(data.normalise(pixels)).float()

        return forward

    def _collect(self, one: Callable[[nn.Module, Tensor, int], Tensor], size: int) -> Tensor:
        """Return the logits of all batches in the order of the test set, float32 ``[n, C]`` on the
        CPU.

        Args:
            one: logits of a batch, given network, indices and number of the batch.
            size: examples of a batch.
        """
        logits, places, number = [], [], 0
        for network, indices in self.networks():
            for index in indices.split(size):
                logits.append(one(network, index, number).cpu())
                places.append(index.cpu())
                number += 1
        return torch.cat(logits)[torch.cat(places).argsort()]

    @torch.no_grad()
    def _logits(self, network: nn.Module, inputs: Any) -> Tensor:
        with self.fabric.autocast():
            return network(inputs).float()
