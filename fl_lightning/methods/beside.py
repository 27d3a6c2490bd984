"""What methods have in common whose clients keep something of their own beside the global model.
What stays of the network itself is in :mod:`fl_lightning.methods.personal`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fl_lightning.client import Client
from fl_lightning.compatibility import no_personal
from fl_lightning.data import FederatedData
from fl_lightning.errors import require
from fl_lightning.methods.base import Method
from fl_lightning.models.recipe import copied
from fl_lightning.wire import Layout, Payload


class PersonalMethod(Method, ABC):
    """Base of methods whose clients keep a personal part; ``first`` has what it is before their
    first round.

    What a client keeps counts where its upload counted. A part that has diverged is not kept.
    """

    kind = "personal models"
    personalised = True
    has_global_model = True
    keeps_state = True
    refuses = no_personal("what its clients keep is its own")
    trains_apart: bool = False
    """Whether the same steps move parameters of the global model and others, which must not touch
    it."""

    def build(self, data: FederatedData) -> None:
        super().build(data)
        self.first = {}
        name, clip = type(self).__name__, self.gradient_clip_val
        require(
            clip is None or self.gradient_clip_algorithm == "value" or not self.trains_apart,
            f"--trainer.gradient_clip_val {clip} with --model {name}",
            "one norm of both models' gradients would make the global one depend on the personal ones",
            "leave it out, or write --trainer.gradient_clip_algorithm value",
        )

    def kept(self, client: Client | None, name: str) -> Tensor:
        """Return a tensor that the client keeps; before its first round that counted, and of none,
        what ``first`` has."""
        return ({} if client is None else client.state).get(name, self.first[name])

    def own_model(self, client: Client) -> Tensor:
        """Return the weights v ``[P]`` that the client keeps, of its own rank where clients have
        adapters of different ranks."""
        return self.adapters.cut(self.kept(client, "v"), client)

    def keep(self, client: Client, **vectors: Tensor) -> None:
        """Keep vectors by name, if all of them are finite: a client that has diverged stays as it
        was."""
        if all(bool(torch.isfinite(vector).all()) for vector in vectors.values()):
            client.state.update(vectors)

    @abstractmethod
    def deploy(self, client: Client | None = None) -> nn.Module:
        """Return the client's model; without a client the global one, which this is."""
        return super().deploy()


class BesideMethod(PersonalMethod):
    """Base of methods whose clients train a second network v beside the global one, in the same
    steps."""

    trains_apart = True

    def build(self, data: FederatedData) -> None:
        super().build(data)
        self.beside = copied(self.network)
        self.trained = Layout.of(self.network, include={*self.trained_names}.__contains__)
        self.first["v"] = self.server["weights"].float()

    def receive(self, message: Payload, client: Client) -> None:
        super().receive(message, client)
        self.layout.write(self.beside, self.own_model(client))

    def own_parameters(self, network: nn.Module) -> list[nn.Parameter]:
        """Return what the local optimiser moves of one of the two networks."""
        parameters = dict(network.named_parameters())
        return [parameters[name] for name in self.trained_names]


@contextmanager
def same_numbers() -> Iterator[None]:
    """Let what is drawn within the block, such as masks of dropout, be drawn again after it."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices):
        yield
