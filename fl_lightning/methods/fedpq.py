"""FedPQ: updates by product quantisation (Jegou et al., TPAMI 2011; for gradients Dai et al.,
2019).

    x <- x + sum_k p_k Q(x_k - x)

Q replaces every d values by the nearest of the client's K centroids. A client sends the indices,
log2 K bits for d weights, and the codebooks, K d fp32 a tensor. d = 2 and K = 256 are 4 bits a
weight and 2 kB a tensor. Q is biased towards the mean of its cluster. The download is in fp32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.client import Client
from fl_lightning.config.constraints import within
from fl_lightning.methods.updates import CodedUpdates
from fl_lightning.quantization import product
from fl_lightning.wire import Codes, Limit, Payload, PayloadError


class FedPQ(CodedUpdates):
    """FedAvg with updates as indices into small codebooks. A tensor of fewer than 8 sub-vectors
    travels in fp32.

    Args:
        dim: d, values in a sub-vector, 1 or more.
        centroids: K at most, 2 to 65 536; a tensor uses no more than a quarter of its sub-vectors.
        iterations: of k-means, 1 or more.
    """

    kind = "quantised"
    stackable = True
    same_start = True

    def __init__(
        self,
        dim: Annotated[int, within("[1, inf)", "a sub-vector has 1 value or more", 2)] = 2,
        centroids: Annotated[int, within("[2, 65536]", "a codebook has 2 to 65536", 256)] = 256,
        iterations: Annotated[int, within("[1, inf)", "k-means takes 1 or more", 20)] = 20,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        self.dim, self.centroids, self.iterations = dim, centroids, iterations

    def is_coded(self, parameter: Tensor) -> bool:
        return super().is_coded(parameter) and self._num_centroids(parameter.numel()) >= 2

    def _num_centroids(self, size: int) -> int:
        return product.num_centroids(-(-size // self.dim), self.centroids)

    def encode_updates(
        self, updates: Sequence[Tensor], client: Client
    ) -> dict[str, Tensor | Codes]:
        """Return for each tensor indices ``i0`` and a codebook ``c0`` float32 ``[K, d]``."""
        noise = self.stream("kmeans", client)
        entries: dict[str, Tensor | Codes] = {}
        for tensor, update in enumerate(updates):
            points = product.split(update.numpy(), self.dim)
            if np.isfinite(points).all():
                index, codebook = product.kmeans(
                    points, self._num_centroids(update.numel()), self.iterations, noise
                )
            else:  # for the server to see and refuse
                index = np.zeros(len(points), np.int64)
                codebook = np.full((1, self.dim), np.nan, np.float32)
            entries[f"i{tensor}"] = Codes(
                torch.from_numpy(index).to(torch.int32),
                product.index_bits(len(codebook)),
                are_indices=True,
            )
            entries[f"c{tensor}"] = torch.from_numpy(codebook)
        return entries

    def code_limits(self) -> Mapping[str, Limit]:
        shapes: dict[str, Limit] = {}
        for tensor, size in enumerate(self.coded.sizes):
            shapes[f"i{tensor}"] = (-(-size // self.dim),)
            shapes[f"c{tensor}"] = range(1, self._num_centroids(size) + 1), self.dim
        return shapes

    def decode_updates(self, upload: Payload) -> list[Tensor]:
        updates = []
        for tensor, (name, size) in enumerate(
            zip(self.coded.shapes, self.coded.sizes, strict=True)
        ):
            index = upload.codes(f"i{tensor}").values.flatten().long()
            codebook = upload.tensor(f"c{tensor}")
            if int(index.max()) >= len(codebook):
                rule = f"its codebook has {len(codebook)} entries"
                raise PayloadError(f"index {int(index.max())} for {name}", rule, "encode it again")
            updates.append(codebook[index].flatten()[:size])
        return updates

    def server_metrics(self) -> dict[str, float]:
        """Index bits per coded weight, the codebooks not counted."""
        bits = [
            product.index_bits(self._num_centroids(size)) * -(-size // self.dim)
            for size in self.coded.sizes
        ]
        average = sum(bits) / self.coded.size if self.coded.size else 32.0
        return {**super().server_metrics(), "bits/average": average}
