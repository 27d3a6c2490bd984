"""Examples that lie in memory as tensors, and what is known of them beside inputs and target.

``N`` training examples, ``M`` test examples, ``K`` clients, ``G`` groups, ``C`` classes, ``B``
batch.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from fl_lightning.config.constraints import within
from fl_lightning.config.near_names import require_choice
from fl_lightning.data.base import BatchSize, FederatedData, PublicExamples, ValFraction
from fl_lightning.data.example_batches import Split
from fl_lightning.data.form import Form
from fl_lightning.data.partition import Dirichlet, Natural, Partition, share_of_each
from fl_lightning.data.summary import MAX_LISTED_CLIENTS
from fl_lightning.errors import require
from fl_lightning.metrics.named import MetricFactory
from fl_lightning.rng import stream
from fl_lightning.tasks import Classification, Regression

ClientCount = Annotated[
    int, within("[0, inf)", "a federation has at least one client", "write 0 for those of the data")
]
"""A number of clients; 0: as many as the data have of their own."""
TaskName = Literal["classification", "regression", "language_modelling"]
SPLIT_SEED = 0  # not the run's seed: all runs have the same test set


@dataclass(frozen=True)
class Examples:
    """The examples of one split and what is known of each.

    Args:
        inputs: what the network sees, ``[N, ...]``: a tensor or a dictionary of tensors.
        target: classes int64 ``[N]``, or numbers float32 ``[N]`` or ``[N, D]``.
        group: the group of each example, int64 ``[N]``; None: its class.
        owner: the client that each example belongs to, int64 ``[N]``, of a test example -1 if that
            client has no training examples; None: the data say nothing of clients.
    """

    inputs: Any
    target: Tensor
    group: np.ndarray | None = None
    owner: np.ndarray | None = None


@dataclass(frozen=True)
class Names:
    """The names behind the numbers of a data set.

    Args:
        classes: of each class; empty where it is not classification.
        groups: of each group; empty where examples are grouped by their class.
        clients: of each client of the data's own; empty where the data say nothing of clients.
    """

    classes: Sequence[Any] = ()
    groups: Sequence[Any] = ()
    clients: Sequence[Any] = ()

    def summary(self, sha256: str) -> dict[str, Any]:
        """Return the entry of ``partition.json`` about the examples, with their hash; of more than
        1000 clients it has only the number."""
        found: dict[str, Any] = {
            key: [str(name) for name in names]
            for key, names in (
                ("classes", self.classes),
                ("groups", self.groups),
                ("clients", self.clients),
            )
            if len(names)
        }
        if len(self.clients) > MAX_LISTED_CLIENTS:
            found["clients"] = f"{len(self.clients)} clients"
        return {"examples": {"sha256": sha256, **found}}


class ArrayData(FederatedData):
    """Examples that :meth:`read` returns as tensors, distributed to clients.

    A subclass sets :attr:`dataset`, and where they differ :attr:`natural` and :attr:`has_test`,
    before it calls this constructor.

    Args:
        test_fraction: share of the examples (of classification, of each class) that becomes the
            test set if no other one is named, in (0, 1); the same examples in every run.
        task: classification: the target's values, whole numbers or texts, in sorted order are the
            classes; regression: the target is one number or several; language_modelling: see
            :class:`~fl_lightning.data.TokenData`, which takes the same datasets.
        num_clients: number of clients; 0: as many as the training examples have of their own.
        partition: rule that assigns training examples to clients; null: Natural where the data say
            whose an example is, else Dirichlet with beta 0.1.
        batch_size: examples of one local step.
        val_fraction: share of each client's examples that is held out for validation, in [0, 1).
        public_examples: training examples of the public set; 0: no public set.
        metrics: metrics of torchmetrics by class path that are evaluated beside the task's, as
            ``test/*`` and ``val/*``; null: none.
        primary: the metric that selects, of the task's or of ``metrics``; null: the task's primary
            one.
    """

    dataset: str
    """Name of the data set."""
    natural = False
    """Whether the data say whose each example is."""
    has_test = False
    """Whether the data have test examples of their own."""

    names = Names()
    _scale: Tensor | None = None

    def __init__(
        self,
        *,
        test_fraction: float = 0.2,
        task: TaskName = "classification",
        num_clients: ClientCount = 0,
        partition: Partition | None = None,
        batch_size: BatchSize = 32,
        val_fraction: ValFraction = 0.1,
        public_examples: PublicExamples = 0,
        metrics: list[MetricFactory] | None = None,
        primary: str | None = None,
    ) -> None:
        self.count_clients = check_count(num_clients, self.natural)
        super().__init__(
            dataset=self.dataset,
            num_clients=num_clients or 1,
            partition=default_partition(self.natural) if partition is None else partition,
            batch_size=batch_size,
            val_fraction=val_fraction,
            public_examples=public_examples,
            metrics=metrics,
            primary=primary,
        )
        check_test_fraction(self.has_test, test_fraction)
        require(
            task != "language_modelling",
            f"task=language_modelling with {type(self).__name__}",
            "sequences of tokens have a data module of their own, with padding and masks",
            "write TokenData in its place, or DataModuleTokens for a LightningDataModule",
        )
        require_choice(task, ("classification", "regression"), "task")
        self.task = Classification() if task == "classification" else Regression()
        self.test_fraction = test_fraction

    @abstractmethod
    def read(self) -> tuple[Examples, Examples, Names]:
        """Return training and test examples, and the names of their classes, groups and clients.

        Raises:
            InputError: the data cannot be read.
        """

    def setup(self, stage: str | None = None) -> None:
        """Read the examples.

        Raises:
            InputError: they cannot be read, or there are none.
        """
        train, test, self.names = self.read()
        for split, some in (("training", train), ("test", test)):
            require(
                len(some.target) or (split == "test" and self.run_form),
                f"the data {self.dataset}",
                f"there are no {split} examples",
                "give some",
            )
        self._inputs: dict[Split, Any] = {"train": train.inputs, "test": test.inputs}
        self.train_target, self.test_target = train.target, test.target
        self._groups = {}
        if train.group is not None and test.group is not None:
            self._groups = {
                "train": torch.from_numpy(train.group),
                "test": torch.from_numpy(test.group),
            }
        self._owner, self._test_owner = train.owner, test.owner
        self.example_shape = tuple(tree_leaves(train.inputs)[0].shape[1:])
        numbers = train.target.shape[1] if train.target.ndim == 2 else 1
        self.num_classes = len(self.names.classes) or numbers
        if self.count_clients:
            self.num_clients = len(self.names.clients)
        if _are_images(train.inputs):
            known = self.run_form.moments if self.run_form else ()
            moments = known or channel_moments(train.inputs.numpy())
            self._scale = torch.tensor(moments)[:, :, None, None]
        self._digest = sha256_of(
            [*tree_leaves(train.inputs), *tree_leaves(test.inputs), train.target, test.target]
        )
        self.move(self.device)

    def form(self) -> Form:
        moments = [] if self._scale is None else self._scale[:, :, 0, 0].tolist()
        return Form(list(self.names.classes), moments)

    @property
    def num_groups(self) -> int:
        return len(self.names.groups) if self._groups else super().num_groups

    @property
    def group_names(self) -> Sequence[str]:
        return tuple(map(str, self.names.groups)) if self._groups else ()

    def example_inputs(self) -> Any:
        """Return the first training example twice, on the CPU."""
        return tree_map(
            Tensor.cpu, self.inputs("train", torch.zeros(2, dtype=torch.int64, device=self.device))
        )

    def move(self, device: torch.device) -> None:
        super().move(device)
        self._inputs = {
            split: tree_map(lambda leaf: leaf.to(device), some)
            for split, some in self._inputs.items()
        }
        self._scale = None if self._scale is None else self._scale.to(device)
        self._groups = {split: group.to(device) for split, group in self._groups.items()}

    def inputs(self, split: Split, index: Tensor, draws: Tensor | None = None) -> Any:
        """Return the inputs at ``index``, ``[B, *example_shape]`` or a dictionary of such tensors.

        Images of bytes are normalised with the mean and standard deviation of the training
        images."""
        found = tree_map(lambda leaf: leaf[index], self._inputs[split])
        if self._scale is None:
            return found
        mean, std = self._scale
        return (found.float() / 255 - mean) / std

    @property
    def content_sha256(self) -> str:
        return self._digest

    def partition_summary(self) -> dict[str, Any]:
        """Return the content of ``partition.json``, with the names of classes, groups and clients
        and the SHA-256 of all examples."""
        return super().partition_summary() | self.names.summary(self._digest)


def name_from(path: str) -> str:
    """Return the name of a data set from that of its training file or folder.

    >>> name_from("/tables/tumours.csv.gz"), name_from("/birds/train")
    ('tumours', 'birds')
    """
    full = Path(path).resolve()
    name = full.name.partition(".")[0]
    return (full.parent.name if name == "train" else name) or "data"


def check_count(num_clients: int, natural: bool) -> bool:
    """Return whether the clients are those of the data, which is what ``num_clients=0`` says.

    Args:
        num_clients: number of clients as it was given.
        natural: whether the data say whose each example is.

    Raises:
        InputError: it is 0 where the data say nothing of clients.
    """
    require(
        num_clients or natural,
        "num_clients=0",
        "it stands for the clients of the data, and nothing says whose an example is",
        "write num_clients: 10, or name what says it",
    )
    return num_clients == 0


def default_partition(natural: bool) -> Partition:
    """Return the partition that is taken if none is given."""
    return Natural() if natural else Dirichlet(0.1)


def check_test_fraction(has_test: bool, test_fraction: float) -> None:
    """Refuse a share of the training examples that is none, where there is no test set."""
    require(
        has_test or 0 < test_fraction < 1,
        f"test_fraction={test_fraction}",
        "a share in (0, 1)",
        "write e.g. 0.2, or name a test set",
    )


def in_test(labels: np.ndarray, fraction: float, form: Form | None = None) -> np.ndarray:
    """Mark the examples of the test set, bool ``[N]``; the same ones in every run.

    Args:
        labels: class of each example ``[N]``, of each of which the share is taken; one value where
            there are no classes.
        fraction: share of the test set, rounded.
        form: of a node's own data the run's form; none of them are then for the test.

    Raises:
        InputError: one of the two parts would be empty.
    """
    if form is not None:
        return np.zeros(len(labels), bool)
    chosen = share_of_each(labels, fraction, stream(SPLIT_SEED, "data/test"))
    require(
        0 < chosen.sum() < len(chosen),
        f"test_fraction={fraction} of {len(labels)} examples",
        f"{int(chosen.sum())} of them are for the test",
        "give more examples, another share, or a test set",
    )
    return chosen


def number_names(values: Iterable[Hashable]) -> dict[Any, int]:
    """Return the number of each name, in the order in which they are sorted.

    >>> number_names(["b", "a", "b"])
    {'a': 0, 'b': 1}
    """
    found = cast("set[Any]", set(values))
    try:
        names = sorted(found)
    except TypeError:  # numbers and texts side by side
        names = sorted(found, key=str)
    return {name: number for number, name in enumerate(names)}


def check_names(names: Iterable[Hashable], name: str, place: str) -> None:
    """Refuse two values that are written alike, such as ``1`` and ``"1"``.

    Args:
        names: of classes, clients or groups; None where an example has none.
        name: ``class``, ``client`` or ``group``.
        place: what has them, for messages.
    """
    seen: dict[str, Hashable] = {}
    for value in dict.fromkeys(names):
        if value is None:
            continue
        other = seen.setdefault(str(value), value)
        both = " and ".join(sorted((repr(other), repr(value))))
        require(
            other == value,
            f"{place}, {name} {both}",
            f"they are two values, and a {name} is known by its text",
            f"write one {name} in one way, or two with different texts",
        )


def numbers_by_name(
    names: Iterable[Hashable] | None, numbers: Mapping[Any, int]
) -> np.ndarray | None:
    """Return the number of each example's name, int64 ``[N]``, -1 for one that is not among
    ``numbers``; None where examples have no names, or there are no numbers.

    >>> numbers_by_name(["b", "c"], {"a": 0, "b": 1}).tolist()
    [1, -1]
    """
    if names is None or not numbers:
        return None
    return np.array([numbers.get(name, -1) for name in names], np.int64)


def class_numbers(names: Iterable[Hashable], form: Form | None, place: str) -> dict[Any, int]:
    """Return the number of each class.

    Args:
        names: classes of the training examples.
        form: of a node's own data the run's form, which then says the numbers.
        place: what has them, for messages.

    Raises:
        InputError: all training examples are of one class, or the run lacks one of theirs.
    """
    classes = number_names(names)
    if form is not None:
        return form.numbers(classes, place)
    require(
        len(classes) >= 2,
        place,
        f"all training examples are of the class {next(iter(classes), 'none')}",
        "give examples of two classes or more",
    )
    return classes


def channel_moments(images: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and the standard deviation of each channel of images, with pixels in [0, 1].

    Args:
        images: uint8 ``[N, C, H, W]``.
    """
    level = np.arange(256) / 255
    channels = range(images.shape[1])
    counts = np.stack(
        [np.bincount(images[:, channel].ravel(), minlength=256) for channel in channels]
    )
    share = counts / counts.sum(axis=1, keepdims=True)
    mean = share @ level
    # the lower bound avoids a division by zero where a channel is constant
    std = np.sqrt(share @ level**2 - mean**2 + 1e-12).clip(min=1 / 255)
    return tuple(mean.tolist()), tuple(std.tolist())


def _are_images(inputs: Any) -> bool:
    return isinstance(inputs, Tensor) and inputs.dtype == torch.uint8 and inputs.ndim == 4


def sha256_of(tensors: Iterable[Tensor]) -> str:
    """Return the SHA-256 over the types, shapes and bytes of tensors."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}\0".encode())
        digest.update(np.ascontiguousarray(tensor.cpu().numpy()).data)
    return digest.hexdigest()
