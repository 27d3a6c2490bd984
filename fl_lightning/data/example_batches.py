"""The clients of a federated data set, and its batches: those of clients, of the test set, and of
the public set.

``n`` examples of one client, ``K`` clients, ``B`` batch, ``E`` epochs, ``D`` augmentation numbers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from math import ceil
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fl_lightning.client import Client
from fl_lightning.config.overriding import overrides
from fl_lightning.data.batches import Draws, Pass, batch_sizes, draw_pass
from fl_lightning.data.holdings import Holdings
from fl_lightning.rng import stream

Split = Literal["train", "test"]


class ExampleBatches(ABC):
    """The half of :class:`~fl_lightning.data.FederatedData` that a round needs: the clients to whom
    examples have been dealt out, and batches of these."""

    examplewise: bool = False
    """Whether the batches of many clients may be made at once.

    That needs ``inputs`` to make each example independently of the others and from its arguments
    alone, and ``draws`` to augment either all clients or none. A subclass does not inherit this
    declaration."""

    batch_size: int
    seed: int
    device: torch.device
    public: np.ndarray
    train_target: Tensor
    test_target: Tensor
    _holdings: Holdings
    _public_moved: tuple[np.ndarray, Tensor] | None

    def client(self, id: int, state: dict[str, Tensor] | None = None) -> Client:
        """Return a client with its training and validation indices.

        Args:
            id: 0 .. num_clients - 1.
            state: tensors that the caller keeps for this client; None: an empty state.
        """
        assert 0 <= id < len(self._holdings), (
            f"client {id} of {len(self._holdings)}: distribute() comes first"
        )
        train, val = self._holdings.client(id)
        return Client(id=id, train=train, val=val, state={} if state is None else state)

    @cached_property
    def sizes(self) -> np.ndarray:
        """Number n_k of training examples of every client, int64 ``[K]``."""
        return self._holdings.sizes - self._holdings.held_out

    @cached_property
    def active(self) -> np.ndarray:
        """Sorted ids of the clients that have training examples, int64."""
        return np.flatnonzero(self.sizes)

    @property
    def validating(self) -> np.ndarray:
        """Sorted ids of the clients that have validation examples, int64."""
        return np.flatnonzero(self._holdings.held_out)

    @property
    def val_sizes(self) -> np.ndarray:
        """Number of validation examples of every client, int64 ``[K]``."""
        return self._holdings.held_out

    @abstractmethod
    def inputs(self, split: Split, index: Tensor, draws: Tensor | None = None) -> Any:
        """Return the network's inputs for some examples.

        Args:
            split: part of the data set.
            index: positions of the examples in it, int64 ``[B]``.
            draws: numbers that decide the augmentation, int64 ``[B, D]``; None: no augmentation.
        """

    def with_labels(self, inputs: Any, target: Tensor) -> Any:
        """Return a batch's inputs as they are with these targets ``[B, ...]``, which a stressor may
        have changed; they differ where inputs hold what is learnt, as those of text do."""
        return inputs

    def draws(self, rng: np.random.Generator, epochs: int, n: int) -> np.ndarray | None:
        """Draw the augmentation of each example in each epoch, int64 ``[E, n, D]``; None: no
        augmentation."""
        return None

    @property
    def augments(self) -> bool:
        """Whether training examples are augmented."""
        return self.draws(stream(self.seed, "augment"), 1, 1) is not None

    def public_inputs(self, position: Tensor) -> Any:
        """Return the network's inputs for public examples, not augmented.

        Args:
            position: positions in the public set, int64 ``[B]`` in [0, len(public)).
        """
        return self.inputs("train", self.public_index[position])

    @property
    def public_index(self) -> Tensor:
        """The indices ``public`` on the device."""
        if self._public_moved is None or self._public_moved[0] is not self.public:
            self._public_moved = self.public, self.to_device(self.public)
        return self._public_moved[1]

    def public_batches(
        self, rng: np.random.Generator | None = None, batch_size: int = 512
    ) -> Iterator[tuple[Any, Tensor]]:
        """Yield the public set once, as inputs and their positions in it, int64 ``[B]``; labels are
        hidden.

        Args:
            rng: draws the order, and batches then have the size of a local step; None: in order.
            batch_size: examples of a batch if there is no ``rng``.
        """
        n = len(self.public)
        if rng is None:
            position = np.arange(n)
            sizes = [min(batch_size, n - start) for start in range(0, n, batch_size)]
        else:
            sizes = batch_sizes(n, self.batch_size)
            position = np.resize(rng.permutation(n), sum(sizes))  # one example is taken twice
        for index in self.to_device(position).split(sizes):
            yield self.public_inputs(index), index

    def labels(self, client: Client) -> Tensor:
        """Return the targets of the client's training examples in the order of ``client.train``,
        ``[n, ...]`` on the device; of classification int64 ``[n]``."""
        return self.train_target[self.to_device(client.train)]

    def labels_of(self, clients: Sequence[Client]) -> tuple[Tensor, ...]:
        """Return :meth:`labels` of each client, gathered in one operation."""
        if not clients or overrides(self, ExampleBatches, "labels"):
            return tuple(map(self.labels, clients))
        index = self.to_device(np.concatenate([client.train for client in clients]))
        return self.train_target[index].split([len(client.train) for client in clients])

    def num_steps(self, client: Client, epochs: int) -> int:
        """Return the number of local steps in so many epochs."""
        return epochs * len(self.epoch_sizes(client))

    def epochs_for(self, client: Client, steps: int) -> int:
        """Return the fewest epochs that have so many local steps."""
        return ceil(steps / max(1, self.num_steps(client, 1)))  # who trains on nothing makes none

    def epoch_sizes(self, client: Client) -> list[int]:
        """Return the sizes of the client's batches in one epoch."""
        return batch_sizes(len(client.train), self.batch_size)

    def train_batches(
        self,
        client: Client,
        *,
        round: int,
        epochs: int,
        labels: Tensor | None = None,
        steps: int | None = None,
    ) -> Iterator[tuple[Any, Tensor]]:
        """Yield the client's training batches of one round, with a new order in every epoch.

        Args:
            client: the client.
            round: number of the round.
            epochs: number of epochs.
            labels: labels in place of the client's own, int64 ``[n]`` in the order of
                ``client.train``.
            steps: largest number of batches; None: all.
        """
        one = self.pass_of(client, epochs, steps, round, self.draws)
        if not one.sizes:
            return
        target = (self.labels(client) if labels is None else labels)[
            self.to_device(one.position)
        ].split(one.sizes)
        index = self.to_device(client.train[one.position]).split(one.sizes)
        draws: Sequence[Tensor | None] = [None] * len(one.sizes)
        if one.draws is not None:
            draws = self.to_device(one.draws).split(one.sizes)
        for index_B, target_B, draws_B in zip(index, target, draws, strict=True):
            inputs = self.inputs("train", index_B, draws_B)
            yield (inputs if labels is None else self.with_labels(inputs, target_B)), target_B

    def pass_of(
        self, client: Client, epochs: int, steps: int | None, round: int, draws: Draws | None
    ) -> Pass:
        """Draw the order of the client's examples in one round, and the sizes of its batches."""
        return draw_pass(
            len(client.train),
            self.batch_size,
            seed=self.seed,
            round=round,
            client=client.id,
            epochs=epochs,
            steps=steps,
            draws=draws,
        )

    @property
    def evaluation_batch(self) -> int:
        """Batch size of evaluation: 512 on a CPU, to stay in its cache; 4096 on a GPU, to keep it
        busy."""
        return 512 if self.device.type == "cpu" else 4096

    def test_batches(self, batch_size: int | None = None) -> Iterator[tuple[Any, Tensor]]:
        """Yield the global test set in order, as inputs and targets int64 ``[B]``."""
        for index in torch.arange(len(self.test_target), device=self.device).split(
            batch_size or self.evaluation_batch
        ):
            yield self.inputs("test", index), self.test_target[index]

    def val_batches(
        self, clients: Iterable[Client] | None = None, batch_size: int | None = None
    ) -> Iterator[tuple[Any, Tensor, Tensor]]:
        """Yield validation examples as inputs, targets and owners; a batch may span clients.

        Args:
            clients: whose examples; None: those of all clients.
            batch_size: examples of a batch; None: ``evaluation_batch``.

        Yields:
            Inputs, targets int64 ``[B]``, and ids of the clients that own the examples, int64
            ``[B]``.
        """
        index_all, owner_all = (
            self._all_validation if clients is None else self._validation_of(clients)
        )
        size = batch_size or self.evaluation_batch
        for index, owner in zip(index_all.split(size), owner_all.split(size), strict=True):
            if len(index):
                yield self.inputs("train", index), self.train_target[index], owner

    @cached_property
    def _all_validation(self) -> tuple[Tensor, Tensor]:
        """Validation examples of all clients and their owners, on the device."""
        index, owner = self._holdings.validation()
        return self.to_device(index), self.to_device(owner)

    def _validation_of(self, clients: Iterable[Client]) -> tuple[Tensor, Tensor]:
        held = [(client.id, client.val) for client in clients]
        index = np.concatenate([val for _, val in held]) if held else np.empty(0, np.int64)
        owner = np.repeat(np.array([id for id, _ in held], np.int64), [len(val) for _, val in held])
        return self.to_device(index), self.to_device(owner)

    def to_device(self, array: np.ndarray) -> Tensor:
        """Return an array of indices on the device of the examples."""
        tensor = torch.from_numpy(array)
        if self.device.type == "cuda":
            # a copy from pageable memory would wait until the device has finished all queued work
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor.to(self.device)
