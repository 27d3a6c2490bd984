"""Feature skew by the corruptions of CIFAR-C: clients whose cameras have different faults."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from fl_lightning.config.near_names import require_choice
from fl_lightning.data.feature_skew import FeatureSkew
from fl_lightning.probing.corruptions.recipes import EXTRA, STANDARD, corrupt_images


class CorruptedClients(FeatureSkew):
    """Client i sees its images with one corruption of CIFAR-C at severity 3, the corruptions in
    turn.

    Args:
        corruptions: their names; ``none`` leaves images as they are. null: none, then the 15
            standard ones.
    """

    def __init__(self, corruptions: list[str] | None = None) -> None:
        self.corruptions = corruptions or ["none", *STANDARD]
        for name in self.corruptions:
            require_choice(name, ("none", *STANDARD, *EXTRA), "--data.feature_skew.corruptions")

    def change(
        self, images: Tensor, client: int, num_clients: int, rng: np.random.Generator
    ) -> Tensor:
        name = self.corruptions[client % len(self.corruptions)]
        return images if name == "none" else corrupt_images(name, images, int(rng.integers(2**63)))
