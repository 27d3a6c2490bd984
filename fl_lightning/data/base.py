"""The interface of a federated data set: clients, their batches, the global test set.

Nothing here depends on what an example looks like.

``N`` training examples, ``K`` clients, ``B`` batch, ``E`` epochs, ``n`` examples of one client, ``D``
augmentation numbers.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from lightning import LightningDataModule
from torch import Tensor
from torch.utils._pytree import tree_map

from fl_lightning.client import Client
from fl_lightning.data.batches import Draws, Pass, batch_sizes, draw_pass, side_by_side
from fl_lightning.data.holdings import Holdings
from fl_lightning.data.index_file import FromFile
from fl_lightning.data.partition import Natural, Partition, check_memory, make_holdings
from fl_lightning.data.summary import summarise_clients
from fl_lightning.errors import InputError, require
from fl_lightning.rng import stream
from fl_lightning.support.overriding import overrides
from fl_lightning.support.recorded import Recorded
from fl_lightning.tasks import Classification, Task

Split = Literal["train", "test"]


class FederatedData(Recorded, LightningDataModule, ABC):
    """A data set whose training examples are distributed to clients.

    Call ``prepare_data()``, ``setup()`` and ``distribute(seed, device)``, in this order, before batches.

    A batch is a pair of inputs (a tensor; a dictionary of tensors where a network takes several) and target
    ``[B, ...]``. A subclass sets ``num_classes`` and ``example_shape`` in its constructor, ``train_target``
    and ``test_target`` in ``setup``, and overrides :meth:`inputs`, :meth:`draws` and :meth:`move`. Where
    it is not classification it sets ``task`` too, and where partitions go by something else than the target,
    :attr:`train_group` and :attr:`test_group`.

    Args:
        dataset: name of the data set.
        num_clients: number of clients that hold the training examples.
        partition: rule that assigns training examples to clients.
        batch_size: examples of one local step.
        val_fraction: share of each client's examples that is held out for validation, in [0, 1).
        public_examples: examples of the public set, which is unlabelled and the same for every client and
            the server; 0: no public set.
        public_dataset: data set from which the public set is drawn; null: the training examples, and no
            client then holds public examples.

    Raises:
        InputError: an argument is out of range, or the clients do not fit into memory.
    """

    examplewise: bool = False
    """Whether the batches of many clients may be made at once.

    That needs ``inputs`` to make each example independently of the others and from its arguments alone, and
    ``draws`` to augment either all clients or none. A subclass does not inherit this declaration."""

    task: Task = Classification()
    """What is learnt."""

    num_classes: int
    """Outputs of the network: classes, numbers of a regression, or tokens of a vocabulary."""

    example_shape: tuple[int, ...]
    train_target: Tensor
    test_target: Tensor

    def __init__(
        self,
        *,
        dataset: str,
        num_clients: int,
        partition: Partition,
        batch_size: int,
        val_fraction: float,
        public_examples: int = 0,
        public_dataset: str | None = None,
    ) -> None:
        super().__init__()
        require(
            num_clients >= 1,
            f"num_clients={num_clients}",
            "a federation has at least one client",
            "write 1 or more",
        )
        check_memory(f"num_clients={num_clients}", 8 * num_clients)
        require(
            batch_size >= 1, f"batch_size={batch_size}", "a batch has at least one example", "write e.g. 64"
        )
        require(
            0 <= val_fraction < 1,
            f"val_fraction={val_fraction}",
            "a share in [0, 1)",
            "write e.g. 0.05, or 0 for none",
        )
        self.dataset, self.num_clients, self.partition = dataset, num_clients, partition
        require(
            public_examples >= 0,
            f"public_examples={public_examples}",
            "a public set has 0 or more examples",
            "write 0 for none",
        )
        self.batch_size, self.val_fraction = batch_size, val_fraction
        self.public_examples, self.public_dataset = public_examples, public_dataset
        self.public = np.empty(0, np.int64)
        self._public_moved: tuple[np.ndarray, Tensor] | None = None
        self.seed = 0
        self.device = torch.device("cpu")
        self._holdings = Holdings.of_sizes(np.empty(0, np.int64), np.empty(0, np.int64))

    @property
    def train_group(self) -> Tensor:
        """What each training example is grouped by, int64 ``[N]``: its class, or a writer, a hospital, a
        domain. Partitions go by it. Where the target is not a class and nothing else is given, all examples
        are of one group."""
        return group_by_target(self.train_target)

    @property
    def test_group(self) -> Tensor:
        """The groups of the test examples, int64 ``[n]``."""
        return group_by_target(self.test_target)

    @property
    def test_kinds(self) -> Sequence[str]:
        """What kind of example each test example is, such as the name of its instruction task: ``test``
        reports each kind by itself. Empty where there are no kinds."""
        return ()

    @property
    def train_owner(self) -> np.ndarray | None:
        """The client that each training example belongs to by itself, int64 ``[N]``, for the partition
        :class:`~fl_lightning.data.Natural`; None where the data say nothing of clients."""
        return None

    @property
    def train_held_out(self) -> np.ndarray | None:
        """Whether each training example is for validation, bool ``[N]``; None: ``val_fraction`` of each
        client's are drawn."""
        return None

    @property
    def num_groups(self) -> int:
        """Number G of groups; they are 0 .. G - 1."""
        by_class = type(self).train_group is FederatedData.train_group
        if by_class and isinstance(self.task, Classification):
            return self.num_classes
        groups = [int(group.max()) + 1 for group in (self.train_group, self.test_group) if len(group)]
        return max(groups, default=1)

    @property
    def group_names(self) -> Sequence[str]:
        """Names of the groups 0 .. G - 1, or their numbers where they have no names; empty where examples are
        grouped by their class or not at all."""
        by_class = type(self).train_group is FederatedData.train_group
        return () if by_class else tuple(map(str, range(self.num_groups)))

    def example_inputs(self) -> Any:
        """Return inputs of two examples that networks are tried out with; by default zeros, float32
        ``[2, *example_shape]``."""
        return torch.zeros(2, *self.example_shape)

    @abstractmethod
    def inputs(self, split: Split, index: Tensor, draws: Tensor | None = None) -> Any:
        """Return the network's inputs for some examples.

        Args:
            split: part of the data set.
            index: positions of the examples in it, int64 ``[B]``.
            draws: numbers that decide the augmentation, int64 ``[B, D]``; None: no augmentation.
        """

    def draws(self, rng: np.random.Generator, epochs: int, n: int) -> np.ndarray | None:
        """Draw the augmentation of each example in each epoch, int64 ``[E, n, D]``; None: no augmentation."""
        return None

    @property
    def augments(self) -> bool:
        """Whether training examples are augmented."""
        return self.draws(stream(self.seed, "augment"), 1, 1) is not None

    def move(self, device: torch.device) -> None:
        """Move the examples to the device."""
        self.device = device
        self._public_moved = None
        self.train_target, self.test_target = self.train_target.to(device), self.test_target.to(device)

    def distribute(self, seed: int, device: torch.device) -> None:
        """Assign the training examples to clients; call it after ``setup``.

        The public set is taken out first. Everything is moved to the device.

        Raises:
            InputError: the public set is too large, or the partition refuses the data.
        """
        self.seed = seed
        group = self._dealt_by()
        self.public = self._draw_public(seed)
        own = (
            None
            if self.public_dataset or not len(self.public)
            else np.delete(np.arange(len(group)), self.public)
        )
        require(
            own is None or not isinstance(self.partition, FromFile),
            f"public_examples={self.public_examples} with the partition FromFile",
            "the file deals out all training examples, and no client may hold public ones",
            "write public_examples: 0, or a public_dataset",
        )
        for cached in ("sizes", "active", "partition_hash", "_all_validation"):  # values of another seed
            self.__dict__.pop(cached, None)
        holdings = make_holdings(self.partition, group if own is None else group[own], self.num_clients, seed)
        holdings, marked = holdings.of_examples(own), self.train_held_out
        if not holdings.divided:
            holdings = (
                holdings.hold_out(self.val_fraction, seed)
                if marked is None
                else holdings.hold_out_marked(marked)
            )
        self._holdings = holdings
        assert own is None or not np.isin(self._holdings.index, self.public).any(), (
            "a client holds public examples"
        )
        self.move(torch.device(device))

    def _dealt_by(self) -> np.ndarray:
        """Return what the partition goes by: the groups of the training examples, or whose they are."""
        if not isinstance(self.partition, Natural):
            return self.train_group.cpu().numpy()
        owner = self.train_owner
        if owner is None:
            raise InputError(
                f"the natural partition of {self.dataset}",
                "the data do not say whose an example is",
                "write another partition, such as Dirichlet",
            )
        return owner

    def _draw_public(self, seed: int) -> np.ndarray:
        """Return the sorted indices of the public set in the data set from which it is drawn, int64.

        Raises:
            InputError: the data set has too few examples.
        """
        pool, size = self.public_pool(), self.public_examples
        if self.public_dataset:
            size = size or pool
            require(
                size <= pool,
                f"public_examples={size}",
                f"{self.public_dataset} has {pool}",
                f"write 1 to {pool}, or 0 for all",
            )
        else:
            require(
                size < pool,
                f"public_examples={size}",
                f"{pool} training examples leave none to clients",
                f"write fewer than {pool}",
            )
        return np.sort(stream(seed, "public").choice(pool, size, replace=False, shuffle=False)).astype(
            np.int64
        )

    def public_pool(self) -> int:
        """Return the number of examples from which the public set is drawn."""
        return len(self.train_target)

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
            self._public_moved = self.public, self._to_device(self.public)
        return self._public_moved[1]

    def public_batches(
        self, rng: np.random.Generator | None = None, batch_size: int = 512
    ) -> Iterator[tuple[Any, Tensor]]:
        """Yield the public set once, as inputs and their positions in it, int64 ``[B]``; labels are hidden.

        Args:
            rng: draws the order, and batches then have the size of a local step; None: in order.
            batch_size: examples of a batch if there is no ``rng``.
        """
        n = len(self.public)
        position, sizes = np.arange(n), [min(batch_size, n - start) for start in range(0, n, batch_size)]
        if rng is not None:
            sizes = batch_sizes(n, self.batch_size)
            position = np.resize(rng.permutation(n), sum(sizes))  # one example is taken twice
        for index in self._to_device(position).split(sizes):
            yield self.public_inputs(index), index

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

    def labels(self, client: Client) -> Tensor:
        """Return the targets of the client's training examples in the order of ``client.train``, ``[n, ...]``
        on the device; of classification int64 ``[n]``."""
        return self.train_target[self._to_device(client.train)]

    def labels_of(self, clients: Sequence[Client]) -> tuple[Tensor, ...]:
        """Return :meth:`labels` of each client, gathered in one operation."""
        if not clients or overrides(self, FederatedData, "labels"):
            return tuple(map(self.labels, clients))
        index = self._to_device(np.concatenate([client.train for client in clients]))
        return self.train_target[index].split([len(client.train) for client in clients])

    def num_steps(self, client: Client, epochs: int) -> int:
        """Return the number of local steps in so many epochs."""
        return epochs * len(batch_sizes(len(client.train), self.batch_size))

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
            labels: labels in place of the client's own, int64 ``[n]`` in the order of ``client.train``.
            steps: largest number of batches; None: all.
        """
        one = self._pass(client, epochs, steps, round, self.draws)
        if not one.sizes:
            return
        target = (self.labels(client) if labels is None else labels)[self._to_device(one.position)].split(
            one.sizes
        )
        index = self._to_device(client.train[one.position]).split(one.sizes)
        draws: Sequence[Tensor | None] = [None] * len(one.sizes)
        if one.draws is not None:
            draws = self._to_device(one.draws).split(one.sizes)
        for index_B, target_B, draws_B in zip(index, target, draws, strict=True):
            yield self.inputs("train", index_B, draws_B), target_B

    def stacked_batches(
        self,
        clients: Sequence[Client],
        *,
        round: int,
        epochs: Sequence[int],
        labels: Sequence[Tensor],
        steps: Sequence[int],
    ) -> Iterator[list[tuple[list[int], tuple[Any, Tensor]]]]:
        """Yield the batches of many clients step by step, if :meth:`can_stack` allows it.

        The batches are those of :meth:`train_batches`, gathered in one operation for each step.

        Args:
            clients: the clients.
            round: number of the round.
            epochs: number of epochs of each client.
            labels: labels of each client, int64 ``[n]``.
            steps: largest number of batches of each client.

        Yields:
            For each step, groups of clients whose batches have the same size. A group holds the positions of
            its clients in ``clients``, and inputs and targets ``[K, B, ...]`` in the same order.
        """
        draws_of = self.draws if self.augments else None
        passes = [self._pass(*one, round, draws_of) for one in zip(clients, epochs, steps, strict=True)]
        index = self._to_device(
            np.concatenate([c.train[one.position] for c, one in zip(clients, passes, strict=True)])
        )
        first = np.cumsum([0, *map(len, labels)])
        position = np.concatenate([begin + one.position for begin, one in zip(first, passes, strict=False)])
        target = torch.cat(list(labels))[self._to_device(position)]
        drawn = [one.draws for one in passes if one.draws is not None]
        draws = self._to_device(np.concatenate(drawn)) if drawn else None
        for groups in side_by_side(passes):
            step = []
            for where, place in groups:
                place_KB = self._to_device(place)
                flat = place_KB.reshape(-1)
                inputs = self.inputs("train", index[flat], None if draws is None else draws[flat])
                step.append(
                    (
                        where,
                        (
                            tree_map(lambda leaf, shape=place.shape: leaf.unflatten(0, shape), inputs),
                            target[place_KB],
                        ),
                    )
                )
            yield step

    def can_stack(self, clients: Sequence[Client], labels: Sequence[Tensor]) -> bool:
        """Return whether :meth:`stacked_batches` yields the same batches as :meth:`train_batches`."""
        examplewise = vars(type(self)).get("examplewise", False)
        own = not overrides(self, FederatedData, "train_batches")
        whole = all(len(given) == len(client.train) for given, client in zip(labels, clients, strict=True))
        return (
            examplewise and own and whole and len({(given.dtype, given.shape[1:]) for given in labels}) == 1
        )

    def _pass(self, client: Client, epochs: int, steps: int | None, round: int, draws: Draws | None) -> Pass:
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
        """Batch size of evaluation: 512 on a CPU, to stay in its cache; 4096 on a GPU, to keep it busy."""
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
            Inputs, targets int64 ``[B]``, and ids of the clients that own the examples, int64 ``[B]``.
        """
        index_all, owner_all = self._all_validation if clients is None else self._validation_of(clients)
        size = batch_size or self.evaluation_batch
        for index, owner in zip(index_all.split(size), owner_all.split(size), strict=True):
            if len(index):
                yield self.inputs("train", index), self.train_target[index], owner

    @cached_property
    def _all_validation(self) -> tuple[Tensor, Tensor]:
        """Validation examples of all clients and their owners, on the device."""
        index, owner = self._holdings.validation()
        return self._to_device(index), self._to_device(owner)

    def _validation_of(self, clients: Iterable[Client]) -> tuple[Tensor, Tensor]:
        held = [(client.id, client.val) for client in clients]
        index = np.concatenate([val for _, val in held]) if held else np.empty(0, np.int64)
        owner = np.repeat(np.array([id for id, _ in held], np.int64), [len(val) for _, val in held])
        return self._to_device(index), self._to_device(owner)

    def _to_device(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array)
        if self.device.type == "cuda":
            # a copy from pageable memory would wait until the device has finished all queued work
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor.to(self.device)

    def group_counts(self) -> np.ndarray:
        """Return the number of examples (training and validation) by client and group, ``[K, G]``."""
        return np.concatenate(
            list(self._holdings.class_counts(self.train_group.cpu().numpy(), self.num_groups))
        )

    @cached_property
    def partition_hash(self) -> str:
        """SHA-256 over the training and validation indices of every client and over their numbers."""
        return self._holdings.sha256()

    def partition_summary(self) -> dict[str, Any]:
        """Return the content of ``partition.json``.

        It holds less about each client if there are many, see :mod:`fl_lightning.data.summary`.
        """
        summary = {
            "seed": self.seed,
            "dataset": self.dataset,
            "num_clients": self.num_clients,
            "method": repr(self.partition),
            "sha256": self.partition_hash,
            **summarise_clients(self._holdings, self.train_group.cpu().numpy(), self.num_groups),
        }
        if len(self.public):
            digest = hashlib.sha256(self.public.astype("<i8").tobytes()).hexdigest()
            summary["public"] = {
                "dataset": self.public_dataset or self.dataset,
                "size": len(self.public),
                "sha256": digest,
            }
        return summary


def group_by_target(target: Tensor) -> Tensor:
    """Return the classes where the targets are some, int64 ``[N]``, and else one group for all."""
    if target.ndim == 1 and not target.is_floating_point():
        return target
    return torch.zeros(len(target), dtype=torch.int64, device=target.device)
