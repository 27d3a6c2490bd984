"""Q-FedAvg (FedPAQ, Reisizadeh et al., AISTATS 2020): updates quantised with QSGD (Alistarh et al.,
NeurIPS 2017).

    x <- x + sum_k p_k Q(x_k - x)

Q draws the level above or below so that its mean is the update: see
:mod:`fl_lightning.quantization.qsgd`. The download is in fp32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
from torch import Tensor

from fl_lightning.client import Client
from fl_lightning.config.constraints import Constraint, within
from fl_lightning.methods.base import Method
from fl_lightning.methods.updates import CodedUpdates
from fl_lightning.quantization import qsgd
from fl_lightning.wire import Codes, Limit, Payload, PayloadError

BITS = Constraint(
    "a value takes 2 to 16 bits, sign included, or 32", "4", interval="[2, 16]", names=(32,)
)


class QFedAvg(CodedUpdates):
    """FedAvg with unbiased ``bits``-bit updates. ``bits`` 32 is FedAvg, bit for bit.

    Args:
        bits: b of a coded value, its sign included: 2 to 16, or 32 for full precision.
        bucket: values that share one norm, 1 to 512; null: all of a tensor. Fewer make less noise
            and cost 32 / bucket bits a value.
    """

    kind = "quantised"
    stackable = True
    same_start = True

    def __init__(
        self,
        bits: Annotated[int, BITS] = 4,
        bucket: Annotated[
            int | None,
            within("[1, 512]", "1 to 512 values share a norm, or null: a whole tensor", 512),
        ] = None,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        self.bits, self.bucket = bits, bucket
        self.reads_public = self.codes_weights = bits != 32  # else whole weights travel

    def upload(self, client: Client) -> Payload:
        return Method.upload(self, client) if self.bits == 32 else super().upload(client)

    def decode(self, upload: Payload) -> Tensor:
        return Method.decode(self, upload) if self.bits == 32 else super().decode(upload)

    def encode_updates(
        self, updates: Sequence[Tensor], client: Client
    ) -> dict[str, Tensor | Codes]:
        """Return one stream of codes and one vector of norms for all tensors."""
        noise = self.stream("qsgd", client)
        coded = [qsgd.encode(update, self.bits, noise, self.bucket) for update in updates]
        if not coded:
            return {}
        codes, norms = zip(*coded, strict=True)
        return {"codes": Codes(torch.cat(codes), self.bits), "norms": torch.cat(norms)}

    def code_limits(self) -> Mapping[str, Limit]:
        if self.coded.sizes:
            return {"codes": (self.coded.size,), "norms": (sum(self._buckets()),)}
        return {}

    def upload_limits(self, client: Client) -> Mapping[str, Limit]:
        return (
            Method.upload_limits(self, client) if self.bits == 32 else super().upload_limits(client)
        )

    def _buckets(self) -> list[int]:
        """Norms of each coded tensor."""
        return [qsgd.num_buckets(size, self.bucket) for size in self.coded.sizes]

    def decode_updates(self, upload: Payload) -> list[Tensor]:
        if not self.coded.sizes:
            return []
        codes, norms, sizes = upload.codes("codes"), upload.tensor("norms"), self.coded.sizes
        if codes.bits != self.bits or bool((norms < 0).any()):
            raise PayloadError(
                f"codes of {codes.bits} bits and norms from {float(norms.min()):g}",
                f"{self.bits} bits and norms of 0 or more",
                "use one --model.bits on both sides",
            )
        pieces = zip(codes.values.flatten().split(sizes), norms.split(self._buckets()), strict=True)
        return [qsgd.decode(piece, norm, self.bits, self.bucket) for piece, norm in pieces]

    def server_metrics(self) -> dict[str, float]:
        found = super().server_metrics()  # of full precision
        return {**found, "bits/average": float(self.bits)} if self.coded.sizes else found
