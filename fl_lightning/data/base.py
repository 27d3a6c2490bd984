"""The interface of a federated data set: its clients, who holds which example, the public set.

Nothing here depends on what an example looks like.

``N`` training examples, ``K`` clients, ``B`` batch, ``E`` epochs, ``n`` examples of one client,
``D`` augmentation numbers.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any

import numpy as np
import torch
from lightning import LightningDataModule
from torch import Tensor, nn

from fl_lightning.config.constraints import within
from fl_lightning.config.recorded import Recorded
from fl_lightning.data.example_batches import ExampleBatches, Split
from fl_lightning.data.form import Form
from fl_lightning.data.holdings import Holdings
from fl_lightning.data.index_file import FromFile
from fl_lightning.data.partition import Natural, Partition, check_memory, make_holdings
from fl_lightning.data.summary import summarise_clients
from fl_lightning.errors import InputError, require
from fl_lightning.metrics.named import MetricFactory
from fl_lightning.rng import stream
from fl_lightning.tasks import Classification, Task

NumClients = Annotated[
    int, within("[1, inf)", "a federation has at least one client", "write 1 or more")
]
BatchSize = Annotated[int, within("[1, inf)", "a batch has at least one example", "write e.g. 64")]
ValFraction = Annotated[
    float, within("[0, 1)", "a share in [0, 1)", "write e.g. 0.05, or 0 for none")
]
PublicExamples = Annotated[
    int, within("[0, inf)", "a public set has 0 or more examples", "write 0 for none")
]

log = logging.getLogger("fl_lightning")


class FederatedData(ExampleBatches, Recorded, LightningDataModule):
    """A data set whose training examples are distributed to clients.

    Call ``prepare_data()``, ``setup()`` and ``distribute(seed, device)``, in this order, before
    batches.

    A batch is a pair of inputs (a tensor; a dictionary of tensors where a network takes several)
    and target ``[B, ...]``. A subclass sets ``num_classes`` and ``example_shape`` in its
    constructor, ``train_target`` and ``test_target`` in ``setup``, and overrides :meth:`inputs`,
    :meth:`draws` and :meth:`move`. Where it is not classification it sets ``task`` too, and where
    partitions go by something else than the target, :attr:`train_group` and :attr:`test_group`.

    Args:
        dataset: name of the data set.
        num_clients: number of clients that hold the training examples.
        partition: rule that assigns training examples to clients.
        batch_size: examples of one local step.
        val_fraction: share of each client's examples that is held out for validation, in [0, 1).
        public_examples: examples of the public set, which is unlabelled and the same for every
            client and the server; 0: no public set.
        public_dataset: data set from which the public set is drawn; null: the training examples,
            and no client then holds public examples.
        metrics: metrics of torchmetrics by class path that are evaluated beside the task's, as
            ``test/*`` and ``val/*``; null: none.
        primary: the metric that selects, of the task's or of ``metrics``; null: the task's primary
            one.

    Raises:
        InputError: an argument is out of range, or the clients do not fit into memory.
    """

    task: Task = Classification()
    """What is learnt."""

    num_classes: int
    """Outputs of the network: classes, numbers of a regression, or tokens of a vocabulary."""

    example_shape: tuple[int, ...]

    run_form: Form | None = None
    """Names of classes and constants of preprocessing that these data take over from another run's
    data, instead of finding them in their own training examples; a node of a deployment sets it
    before ``setup``. All examples are then for training, and there is no test set. None: they are
    found in the examples."""

    own_setting = "train"
    """The setting that names a node's own examples, where a deployment trains on the nodes'
    data."""

    test_holdings: Holdings | None = None
    """The examples that each client is tested on, where clients have test sets of their own, which
    together are the test set; None: the data have one test set."""

    _owner: np.ndarray | None = None
    _test_owner: np.ndarray | None = None

    apart: bool = False
    """Whether clients are on other machines, with their examples."""
    continued: bool = False
    """Whether they are those of a run that exists, whose settings are not questioned any more."""

    def __init__(
        self,
        *,
        dataset: str,
        num_clients: NumClients,
        partition: Partition,
        batch_size: BatchSize,
        val_fraction: ValFraction,
        public_examples: PublicExamples = 0,
        public_dataset: str | None = None,
        metrics: list[MetricFactory] | None = None,
        primary: str | None = None,
    ) -> None:
        super().__init__()
        check_memory(f"num_clients={num_clients}", 8 * num_clients)
        self.dataset, self.num_clients, self.partition = dataset, num_clients, partition
        self.batch_size, self.val_fraction = batch_size, val_fraction
        self.public_examples, self.public_dataset = public_examples, public_dataset
        self.metrics, self.primary = metrics or [], primary
        self._groups: dict[Split, Tensor] = {}
        self.public = np.empty(0, np.int64)
        self._public_moved = None
        self.seed = 0
        self.device = torch.device("cpu")
        self._holdings = Holdings.of_sizes(np.empty(0, np.int64), np.empty(0, np.int64))

    @property
    def content_sha256(self) -> str:
        """SHA-256 of all examples, by which a run that is continued, and one that is paired with
        published runs, knows its data again; empty where the data do not say."""
        return ""

    @property
    def public_sha256(self) -> str:
        """SHA-256 of the public set where it is of another data set, by which a run that is
        continued knows it again; empty where it is not, or the data do not say."""
        return ""

    @property
    def tokens_sha256(self) -> str:
        """SHA-256 of the token ids that all text has become, which tokenisers and templates decide
        beside the text; empty where there is no text, or :attr:`content_sha256` is of its
        tokens."""
        return ""

    @property
    def tokenizer_sha256(self) -> str:
        """SHA-256 of what the tokeniser makes of any text, by which a server knows that nodes with
        text of their own have the same one; empty where there is none, or it does not say."""
        return ""

    def form(self) -> Form:
        """Return what data of nodes must take over to be data of this run."""
        return Form()

    @property
    def train_group(self) -> Tensor:
        """What each training example is grouped by, int64 ``[N]``: its class, or a writer, a
        hospital, a domain. Partitions go by it. Where the target is not a class and nothing else is
        given, all examples are of one group."""
        return self._groups["train"] if self._groups else group_by_target(self.train_target)

    @property
    def test_group(self) -> Tensor:
        """The groups of the test examples, int64 ``[n]``, numbered as those of the training
        examples. Test examples go to clients that hold their group; a class with a
        :attr:`train_group` of its own has this too, or they are dealt out evenly."""
        return self._groups["test"] if self._groups else group_by_target(self.test_target)

    @property
    def test_kinds(self) -> Sequence[str]:
        """What kind of example each test example is, such as the name of its instruction task:
        ``test`` reports each kind by itself. Empty where there are no kinds."""
        return ()

    @property
    def train_owner(self) -> np.ndarray | None:
        """The client that each training example belongs to by itself, int64 ``[N]``, for the
        partition :class:`~fl_lightning.data.Natural`; None where the data say nothing of
        clients."""
        return self._owner

    @property
    def test_owner(self) -> np.ndarray | None:
        """The client that each test example belongs to by itself, int64 ``[n]``, -1 where that
        client does not train; None where the data say nothing of clients."""
        return self._test_owner

    @property
    def train_held_out(self) -> np.ndarray | None:
        """Whether each training example is for validation, bool ``[N]``; None: ``val_fraction`` of
        each client's are drawn."""
        return None

    @property
    def num_groups(self) -> int:
        """Number G of groups; they are 0 .. G - 1."""
        by_class = type(self).train_group is FederatedData.train_group and not self._groups
        if by_class and isinstance(self.task, Classification):
            return self.num_classes
        groups = [
            int(group.max()) + 1 for group in (self.train_group, self.test_group) if len(group)
        ]
        return max(groups, default=1)

    @property
    def group_names(self) -> Sequence[str]:
        """Names of the groups 0 .. G - 1, or their numbers where they have no names; empty where
        examples are grouped by their class or not at all."""
        by_class = type(self).train_group is FederatedData.train_group and not self._groups
        return () if by_class else tuple(map(str, range(self.num_groups)))

    def example_inputs(self) -> Any:
        """Return inputs of two examples that networks are tried out with; by default zeros, float32
        ``[2, *example_shape]``."""
        return torch.zeros(2, *self.example_shape)

    def move(self, device: torch.device) -> None:
        """Move the examples to the device; classes in bytes become int64, as all that reads and
        changes labels has them."""
        given = f"data {type(self).__name__}, which has no test_target"
        require(hasattr(self, "test_target"), given, "setup sets test_target", "set it there")
        self.device = device
        self._public_moved = None
        for name in ("train_target", "test_target"):
            target = getattr(self, name).to(device)
            is_byte = target.dtype == torch.uint8 and target.ndim == 1
            setattr(self, name, target.long() if is_byte else target)

    def see_network(self, network: nn.Module) -> None:
        """Learn which network a run begins with, once it has been built; most data do not ask."""

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
        holdings = self.deal(group if own is None else group[own], seed).of_examples(own)
        self._take(holdings if holdings.divided else self.hold_out(holdings, seed))
        require(
            len(self.active) > 0,
            f"--data.partition {type(self.partition).__name__}",
            "no client has a training example",
            "leave some examples out of the validation sets",
        )
        if 2 * len(self.active) < self.num_clients:
            idle = self.num_clients - len(self.active)
            log.warning(
                "%d of %d clients have no training example and never train", idle, self.num_clients
            )
        if self.val_fraction and not len(self.validating):
            log.warning(
                "no client has a validation example (data.val_fraction %g), so no val/* and no best round",
                self.val_fraction,
            )
        assert own is None or not np.isin(self._holdings.index, self.public).any(), (
            "a client holds public examples"
        )
        self.move(torch.device(device))

    def deal(self, group: np.ndarray, seed: int) -> Holdings:
        """Return the training and validation examples of each client.

        Args:
            group: what the partition goes by, int64 ``[N]``.
            seed: seed of the run.

        Raises:
            InputError: the partition refuses the data.
        """
        return make_holdings(self.partition, group, self.num_clients, seed)

    def hold_out(self, holdings: Holdings, seed: int) -> Holdings:
        """Return the holdings with the clients' validation examples held out."""
        marked = self.train_held_out
        if marked is not None:
            return holdings.hold_out_marked(marked)
        return holdings.hold_out(self.val_fraction, seed)

    def distribute_apart(self, holdings: Holdings, seed: int, device: torch.device) -> None:
        """Take holdings in which clients of other machines have examples that are not here; call it
        in the place of :meth:`distribute`.

        Raises:
            InputError: the data have a public set, which would not be the same everywhere.
        """
        require(
            not self.public_examples and self.public_dataset is None,
            f"public_examples={self.public_examples} where nodes have data of their own",
            "a public set is the same for all",
            "write public_examples: 0",
        )
        self.seed, self.apart, self.num_clients = seed, True, len(holdings)
        self._take(holdings)
        self.move(torch.device(device))

    def _take(self, holdings: Holdings) -> None:
        # values of another seed
        for cached in ("sizes", "active", "partition_hash", "_all_validation"):
            self.__dict__.pop(cached, None)
        self._holdings = holdings
        if self.metrics or self.primary not in (None, self.task.primary):
            if not self.task.named:  # else they are of another seed
                self._own_task = self.task
            self.task = self._own_task.measuring(self.metrics, self.primary, self.num_classes)

    def _dealt_by(self) -> np.ndarray:
        """Return what the partition goes by: the groups of the training examples, or whose they
        are."""
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
        """Return the sorted indices of the public set in the data set from which it is drawn,
        int64.
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
        return np.sort(
            stream(seed, "public").choice(pool, size, replace=False, shuffle=False)
        ).astype(np.int64)

    def public_pool(self) -> int:
        """Return the number of examples from which the public set is drawn."""
        return len(self.train_target)

    def group_counts(self) -> np.ndarray:
        """Return the number of examples (training and validation) by client and group, ``[K, G]``;
        zeros where clients are on other machines, which do not say."""
        if self.apart:
            return np.zeros((self.num_clients, self.num_groups), np.int64)
        return np.concatenate(
            list(self._holdings.class_counts(self.train_group.cpu().numpy(), self.num_groups))
        )

    @cached_property
    def partition_hash(self) -> str:
        """SHA-256 over the training and validation indices of every client and over their numbers;
        where clients have test sets of their own, over the indices of these too."""
        found = self._holdings.sha256()
        if self.test_holdings is None:
            return found
        return hashlib.sha256(f"{found} {self.test_holdings.sha256()}".encode()).hexdigest()

    def partition_summary(self) -> dict[str, Any]:
        """Return the content of ``partition.json``.

        It holds less about each client if there are many, see :mod:`fl_lightning.data.summary`.
        """
        about = {"seed": self.seed, "dataset": self.dataset, "num_clients": self.num_clients}
        if self.apart:
            sizes = {
                "sizes": (self.sizes + self.val_sizes).tolist(),
                "val_sizes": self.val_sizes.tolist(),
            }
            return {**about, "method": "on nodes", "sha256": self.partition_hash, **sizes}
        summary = {
            **about,
            "method": repr(self.partition),
            "sha256": self.partition_hash,
            **summarise_clients(self._holdings, self.train_group.cpu().numpy(), self.num_groups),
        }
        if self.test_holdings is not None:
            summary["test"] = {"sizes": self.test_holdings.sizes.tolist()}
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
