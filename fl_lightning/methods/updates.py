"""What QFedAvg and FedPQ share: clients send a lossy code of their update, x_k - x, instead of
their weights.

    x <- x + sum_k p_k Q(x_k - x)

Coded are the trainable tensors of two and more dimensions. Biases, normalisation and its statistics
travel as they are, in fp32.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from torch import Tensor

from fl_lightning.client import Client
from fl_lightning.data import FederatedData
from fl_lightning.methods.base import Method
from fl_lightning.wire import Codes, Layout, Limit, Payload


class CodedUpdates(Method, ABC):
    """Base of methods that code updates; a subclass says how: ``encode_updates`` and
    ``decode_updates``.

    Among peers the update is from what a client has told them last, as in DCD-PSGD (Tang et al.,
    NeurIPS 2018).
    """

    reads_public = True
    codes_weights = True
    """Whether an upload codes all weights, so that no client may have a part of them, such as an
    adapter of a rank of its own."""

    def build(self, data: FederatedData) -> None:
        super().build(data)
        parameters, travels = dict(self.network.named_parameters()), self.layout.shapes.keys()
        coded = {name for name in travels & parameters.keys() if self.is_coded(parameters[name])}
        self.coded = Layout.of(self.network, include=coded.__contains__)
        self.rest = Layout.of(self.network, include=(travels - coded).__contains__)
        self.register_buffer("received", self.server["weights"], persistent=False)

    def is_coded(self, parameter: Tensor) -> bool:
        return parameter.requires_grad and parameter.ndim > 1

    def broadcast(self, client: Client) -> Payload:
        known = {"public": self.server["public"]} if "public" in self.server else {}
        return Payload({**super().broadcast(client), **known})

    @abstractmethod
    def encode_updates(
        self, updates: Sequence[Tensor], client: Client
    ) -> dict[str, Tensor | Codes]:
        """Entries of the upload for the updates, flat, in the order of ``coded``; finite or not, it
        must not fail."""

    @abstractmethod
    def decode_updates(self, upload: Payload) -> list[Tensor]:
        """Return the updates, flat, in the order of ``coded``.

        Raises:
            PayloadError: an entry that is missing or of the wrong size.
        """

    def receive(self, message: Payload, client: Client) -> None:
        super().receive(message, client)
        self.received = message.tensor("public" if "public" in message else "weights")

    def upload(self, client: Client) -> Payload:
        moved = self.layout.unpack(self.layout.read(self.network) - self.received.float())
        updates = [moved[name].flatten() for name in self.coded.shapes]
        return Payload(
            {
                "examples": self.examples_of(client),
                **self.encode_updates(updates, client),
                "rest": self.layout.to_wire(self.rest.read(self.network)),
            }
        )

    @abstractmethod
    def code_limits(self) -> Mapping[str, Limit]:
        """Return the shape of each entry that ``encode_updates`` makes."""

    def upload_limits(self, client: Client) -> Mapping[str, Limit]:
        return {"examples": (), **self.code_limits(), "rest": (self.rest.size,)}

    def decode(self, upload: Payload) -> Tensor:
        ended = self.layout.unpack(self.server.get("public", self.server["weights"]).float())
        for name, update in zip(self.coded.shapes, self.decode_updates(upload), strict=True):
            ended[name] = ended[name] + update.view(ended[name].shape)
        return self.layout.pack(ended | self.rest.unpack(upload.tensor("rest")))
