"""Two clients whose inputs have different sizes: FedMosaic's toy (Seo et al. 2025, arXiv
2506.11024)."""

from __future__ import annotations

from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from fl_lightning.config.constraints import within
from fl_lightning.data.base import FederatedData
from fl_lightning.data.partition import Shards
from fl_lightning.rng import stream

CENTRES = ((1.0, 0.0, 0.5, -0.25, 0.0, 0.0), (0.0, 1.0, -0.25, 0.5, 0.25, -0.25))
"""The mean input of each class."""


class TwoClients(FederatedData):
    """Two Gaussian clouds in R^6, one for each client; the seed of the run says who holds which.

    Every example has six inputs. A client whose network reads the first four of them has inputs of
    size 4.

    Args:
        examples: training examples of each client, at least 2; the test set has as many of each
            class.
        noise: standard deviation of each input around its class's mean, 0 or more.
        batch_size: examples of a local step.
        val_fraction: share of each client's examples kept for its validation, in [0, 1).
    """

    settings_shown = ("{cls}({name}={value})", "{name}: {value}")

    num_classes = 2
    example_shape = (6,)

    def __init__(
        self,
        examples: Annotated[int, within("[2, inf)", "each client has 2 or more", 64)] = 64,
        noise: Annotated[float, within("[0, inf)", "a standard deviation is 0 or more", 0.3)] = 0.3,
        batch_size: int = 8,
        val_fraction: float = 0.5,
    ) -> None:
        super().__init__(
            dataset="two_clients",
            num_clients=2,
            partition=Shards(classes_per_client=1),
            batch_size=batch_size,
            val_fraction=val_fraction,
        )
        self.examples, self.noise = examples, noise

    def setup(self, stage: str | None = None) -> None:
        """Draw the clouds; they are the same for every seed of a run."""
        draws, labels = stream(0, "two_clients"), np.repeat([0, 1], self.examples)
        clouds = {
            split: np.array(CENTRES)[labels] + draws.normal(0.0, self.noise, (len(labels), 6))
            for split in ("train", "test")
        }
        self.clouds = {
            split: torch.as_tensor(cloud, dtype=torch.float32) for split, cloud in clouds.items()
        }
        self.train_target, self.test_target = torch.as_tensor(labels), torch.as_tensor(labels)

    def move(self, device: torch.device) -> None:
        super().move(device)
        self.clouds = {split: cloud.to(device) for split, cloud in self.clouds.items()}

    def inputs(self, split: str, index: Tensor, draws: Tensor | None = None) -> Tensor:
        """float32 ``[B, 6]``."""
        return self.clouds[split][index]
