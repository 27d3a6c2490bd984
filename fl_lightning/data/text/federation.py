"""Federations of text: sequences of tokens that clients hold, and the one that is made by rule.

``N`` training examples, ``M`` test examples, ``K`` clients, ``G`` groups, ``B`` batch, ``T``
context.
"""

from __future__ import annotations

import hashlib
import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, cast, get_args

import numpy as np
import torch
from torch import Tensor

from fl_lightning.client import Client
from fl_lightning.config.constraints import at_least, within
from fl_lightning.data.arrays import numbers_by_name, sha256_of
from fl_lightning.data.base import BatchSize, FederatedData, NumClients, PublicExamples, ValFraction
from fl_lightning.data.batches import Draws, Pass
from fl_lightning.data.example_batches import Split
from fl_lightning.data.holdings import Holdings
from fl_lightning.data.partition import Natural, Partition, check_memory
from fl_lightning.data.text import instructions
from fl_lightning.data.text.preferences import RulePair
from fl_lightning.data.text.prompts import PLAIN_PROMPT, PROMPT_END
from fl_lightning.data.text.records import Line, T, split_by_hash, texts_sha256
from fl_lightning.data.text.token_batches import draw_token_pass, token_batch_sizes
from fl_lightning.data.text.tokens import (
    Record,
    Sequences,
    Tokenizer,
    TokenizerSetting,
    chosen_tokenizer,
    encode_records,
)
from fl_lightning.errors import require
from fl_lightning.metrics.named import MetricFactory
from fl_lightning.metrics.text import IGNORED
from fl_lightning.tasks import LanguageModelling
from fl_lightning.tasks.language_modelling import Primary

log = logging.getLogger(__name__)

MAX_LOGITS = {"cpu": 2**24, "cuda": 2**28}
"""Largest number of logits of an evaluation batch by type of device: 64 MB and 1 GB of float32."""


@dataclass(frozen=True)
class TextExamples:
    """The examples of one split and what is known of each.

    Args:
        sequences: tokens and targets.
        group: group of each example, int64 ``[N]``, an index into the names of groups.
        owner: client that wrote each example, int64 ``[N]``, of a test example -1 if that client
            has no training examples; None: the data do not say.
        task: name of each example's task; empty where examples have none.
        held_out: whether each example is for validation, bool ``[N]``; None: validation examples
            are drawn.
    """

    sequences: Sequences
    group: np.ndarray
    owner: np.ndarray | None
    task: Sequence[str] = field(default_factory=list)
    held_out: np.ndarray | None = None


def examples_sha256(*splits: TextExamples) -> str:
    """Return the SHA-256 of the tokens and targets of examples."""
    names = ("input_ids", "target", "length")
    return sha256_of(getattr(split.sequences, name) for split in splits for name in names)


def tasks_of(records: Iterable[Record | RulePair]) -> list[str]:
    """Return the name of each record's task."""
    return [record.task_name for record in records]


class TextData(FederatedData):
    """Sequences of tokens, distributed to clients.

    Inputs are ``{"input_ids": int64 [B, T'], "attention_mask": bool [B, T']}``, padded on the right
    and trimmed to the longest example of the batch. Targets are int64 ``[B, T]``, aligned with the
    outputs and -100 where no loss is taken, as everywhere beyond T'. ``train_target`` and
    ``test_target`` are int64 ``[N, T]`` and ``[M, T]``.

    Partitions other than :class:`~fl_lightning.data.Natural` deal the examples out by their group:
    ``train_group`` int64 ``[N]`` and ``test_group`` int64 ``[M]``, with names in ``groups``. A
    subclass sets :attr:`dataset` before it calls this constructor, and implements :meth:`read`.

    Args:
        num_clients: number of clients.
        partition: rule that assigns examples to clients; null: each client holds its own. IID()
            deals the same examples out evenly.
        batch_size: examples of one local step; with ``batch_tokens`` the largest number of them.
        batch_tokens: largest number of tokens of a local step, padding included, at least
            ``context``; null: ``batch_size`` alone bounds it.
        val_fraction: share of each client's examples that is held out for validation, in [0, 1).
        public_examples: training examples of the public set; 0: no public set.
        context: largest number of tokens that the network sees at once.
        tokenizer: makes tokens of text: ``hf:NAME_OR_FOLDER``, that of a model of transformers, or
            the class path of another one; null: bytes.
        generate: whether answers are generated for exact match and ROUGE-L, up to the longest true
            one.
        primary: the metric that selects: perplexity, token_accuracy, exact_match or rouge_l, or one
            of ``metrics``.
        metrics: metrics of torchmetrics by class path that are evaluated beside the task's, as
            ``test/*`` and ``val/*``; null: none.
    """

    dataset: str
    """Name of the data set."""
    groups: tuple[str, ...] = ()
    count_clients: bool = False
    """Whether there are as many clients as the text names."""
    tests_left_out: int = 0
    """How many entries for the test were left out, as their prompts are trained on."""
    test_fraction: float = 0.0
    """Share that becomes the test set where none is given."""
    prompt_end: str = PROMPT_END
    """What separates what is asked from its answer."""
    asked: tuple[str, ...] = ()
    """What the network reads before it answers, in parts of which tokens are made one by one, with
    ``{inputs}`` and perhaps ``{definition}`` in their places; empty: there is no one form of
    questions."""

    def __init__(
        self,
        *,
        num_clients: NumClients = 8,
        partition: Partition | None = None,
        batch_size: BatchSize = 16,
        batch_tokens: int | None = None,
        val_fraction: ValFraction = 0.1,
        public_examples: PublicExamples = 0,
        context: Annotated[
            int, within("[2, inf)", "a network sees at least 2 tokens", "write e.g. 72")
        ] = 128,
        tokenizer: TokenizerSetting = None,
        generate: bool = False,
        primary: Primary | str = "perplexity",
        metrics: list[MetricFactory] | None = None,
    ) -> None:
        super().__init__(
            dataset=self.dataset,
            num_clients=num_clients,
            partition=Natural() if partition is None else partition,
            batch_size=batch_size,
            val_fraction=val_fraction,
            public_examples=public_examples,
            metrics=metrics,
            primary=primary,
        )
        check_memory(f"context={context} for a batch of {batch_size}", 24 * context * batch_size)
        require(
            batch_tokens is None or batch_tokens >= context,
            f"batch_tokens={batch_tokens}",
            f"a batch holds at least one example of context={context}",
            f"write {context} or more, or null",
        )
        self.context, self.batch_tokens = context, batch_tokens
        self.tokenizer: Tokenizer = chosen_tokenizer(tokenizer)
        self.num_classes, self.example_shape = self.tokenizer.vocab_size, (context,)
        self.generate, self.primary = generate, primary
        self._tokens_sha256 = ""
        # where metrics are named, one of them may select
        is_named = bool(metrics) and primary not in get_args(Primary)
        self._own_primary = cast("Primary", "perplexity" if is_named else primary)
        decoder = self.tokenizer if generate else None
        self.task = LanguageModelling(decoder, context if generate else 0, self._own_primary)

    @abstractmethod
    def read(self) -> tuple[TextExamples, TextExamples]:
        """Return training and test examples, and set ``groups``.

        Raises:
            InputError: the text cannot be read.
        """

    def split(
        self, entries: Sequence[T], tests: Sequence[T] | None, place: Callable[[T], float]
    ) -> tuple[list[T], list[T], np.ndarray]:
        """Split what was read as :func:`~fl_lightning.data.text.records.split_by_hash` does, by
        ``test_fraction`` and ``val_fraction``; of a node's own text nothing is for the test."""
        tested = 0.0 if self.run_form else self.test_fraction
        train, test, held_out = split_by_hash(entries, tests, place, tested, self.val_fraction)
        self.tests_left_out = len(tests or test) - len(test)
        return train, test, held_out

    def split_lines(
        self, lines: Sequence[Line], tests: Sequence[Line] | None, place: Callable[[Any], float]
    ) -> tuple[list[Line], list[Line], np.ndarray]:
        """Split lines by a hash of their contents, see :meth:`split`, and name the groups, and the
        clients of the training lines."""
        train, test, held_out = self.split(lines, tests, lambda line: place(line.content))
        self.groups = tuple(sorted({line.group for line in [*train, *test]}))
        self.name_clients(sorted({line.client for line in train}))
        return train, test, held_out

    def name_clients(self, names: list[str]) -> None:
        """Take the clients that the text names, in the order of their numbers."""
        self.client_names = names
        if self.count_clients:
            self.num_clients = max(len(names), 1)

    def of_lines(self, lines: Sequence[Line], sequences: Sequences) -> TextExamples:
        """Return the examples that lines have become, with the numbers of groups and clients."""
        groups, clients = (
            {name: number for number, name in enumerate(names)}
            for names in (self.groups, self.client_names)
        )
        return TextExamples(
            sequences,
            np.array([groups[line.group] for line in lines], np.int64),
            numbers_by_name([line.client for line in lines], clients),
        )

    @property
    def text_summary(self) -> dict[str, Any]:
        """What identifies the text, as the entry ``text`` of ``partition.json``."""
        return {}

    def setup(self, stage: str | None = None) -> None:
        """Read the text and make tokens of it.

        Raises:
            InputError: the text cannot be read.
        """
        train, test = self.read()
        for split, some in (("training", train.sequences), ("test", test.sequences)):
            if some.cut:
                log.warning(
                    "%d of %d %s examples are longer than context=%d and were cut",
                    some.cut,
                    len(some),
                    split,
                    self.context,
                )
        self._owner, self._test_owner = train.owner, test.owner
        self._held_out = train.held_out
        self._length = train.sequences.length.numpy() * self.task.outputs_per_example
        self._sequences = {"train": train.sequences, "test": test.sequences}
        self.test_task = list(test.task)
        self._groups = {
            "train": torch.from_numpy(train.group),
            "test": torch.from_numpy(test.group),
        }
        self.train_target, self.test_target = train.sequences.target, test.sequences.target
        self._tokens_sha256 = examples_sha256(train, test)  # a method's targets come later
        if self.generate:
            targets = self.test_target, self.train_target  # clients validate on some of the latter
            longest = max(
                int((target != IGNORED).sum(1).max()) for target in targets if len(target)
            )
            self.task = LanguageModelling(self.tokenizer, longest, self._own_primary)
        self.move(self.device)

    @property
    def num_groups(self) -> int:
        return len(self.groups)

    @property
    def group_names(self) -> Sequence[str]:
        return self.groups

    @property
    def train_held_out(self) -> np.ndarray | None:
        return self._held_out

    @property
    def test_kinds(self) -> Sequence[str]:
        """The task of each test example, with its group where several groups have a task of this
        name."""
        groups: dict[str, set[int]] = {}
        for name, group in zip(self.test_task, self.test_group.tolist(), strict=False):
            groups.setdefault(name, set()).add(group)
        return [
            name if len(groups[name]) == 1 else f"{name} ({self.groups[group]})"
            for name, group in zip(self.test_task, self.test_group.tolist(), strict=False)
        ]

    def example_inputs(self) -> dict[str, Tensor]:
        """Return two examples of the token 0."""
        ids = torch.zeros(2, self.context, dtype=torch.int64)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids, dtype=torch.bool)}

    def move(self, device: torch.device) -> None:
        self.device = device
        self._public_moved = None
        self._sequences = {split: some.to(device) for split, some in self._sequences.items()}
        self.train_target, self.test_target = (
            self._sequences[split].target for split in ("train", "test")
        )
        self._groups = {split: group.to(device) for split, group in self._groups.items()}

    def inputs(self, split: Split, index: Tensor, draws: Tensor | None = None) -> dict[str, Tensor]:
        """Return the token ids at ``index`` and their mask, trimmed to the longest example."""
        return self._sequences[split].batch(index)[0]

    def with_labels(self, inputs: dict[str, Tensor], target: Tensor) -> dict[str, Tensor]:
        """Return the inputs with each labelled token in its place, so that a wrong answer is read
        as it is to be learnt: position t + 1 holds ``target[:, t]``. With the true targets nothing
        changes."""
        if target.ndim != 2:  # numbers in place of targets
            return inputs
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        told = target[:, : ids.shape[1] - 1]
        learnt = (told != IGNORED) & mask[:, 1:]
        follows = torch.where(learnt, told, ids[:, 1:])
        return {**inputs, "input_ids": torch.cat((ids[:, :1], follows), dim=1)}

    def distribute_apart(self, holdings: Holdings, seed: int, device: torch.device) -> None:
        require(
            self.batch_tokens is None,
            f"batch_tokens={self.batch_tokens} where nodes have data of their own",
            "a server that does not know how long examples are cannot count batches",
            "write batch_tokens: null",
        )
        super().distribute_apart(holdings, seed, device)

    def epoch_sizes(self, client: Client) -> list[int]:
        if self.batch_tokens is None:
            return super().epoch_sizes(client)
        return token_batch_sizes(self._length[client.train], self.batch_size, self.batch_tokens)

    def pass_of(
        self, client: Client, epochs: int, steps: int | None, round: int, draws: Draws | None
    ) -> Pass:
        if self.batch_tokens is None:
            return super().pass_of(client, epochs, steps, round, draws)
        return draw_token_pass(
            self._length[client.train],
            self.batch_size,
            self.batch_tokens,
            seed=self.seed,
            round=round,
            client=client.id,
            epochs=epochs,
            steps=steps,
        )

    @property
    def evaluation_batch(self) -> int:
        """Batch size of evaluation: at most 512, and fewer if the logits would take too much
        memory."""
        logits = MAX_LOGITS.get(self.device.type, MAX_LOGITS["cpu"])
        return max(1, min(512, logits // (self.context * self.tokenizer.vocab_size)))

    @property
    def content_sha256(self) -> str:
        """SHA-256 of the text."""
        return self.text_summary.get("sha256", "")

    @property
    def tokens_sha256(self) -> str:
        return self._tokens_sha256

    @property
    def tokenizer_sha256(self) -> str:
        return getattr(self.tokenizer, "sha256", "")

    def partition_summary(self) -> dict[str, Any]:
        """Return the content of ``partition.json``, with the names of the groups and what
        identifies the text."""
        cut = {split: some.cut for split, some in self._sequences.items()}
        text = self.text_summary | {"examples cut": cut}
        return super().partition_summary() | {"groups": list(self.groups), "text": text}


class InstructionData(TextData):
    """Instructions made by rule: four clusters of three tasks, and the house task that they answer
    differently (:mod:`fl_lightning.data.text.instructions`).

    Client k belongs to cluster k mod 4, and its records are the same whatever the number of
    clients. The cluster is the group of an example. Validation and test records never equal
    training records.

    Args:
        num_clients: number of clients; 8 are two for each cluster.
        examples_per_client: records that each client makes, for training and validation.
        house: share of house records, in [0, 1]: how much the clusters contradict each other.
        tests_per_task: test records of each task, and of the house task in each cluster.
        context: largest number of tokens that the network sees; the longest record in bytes takes
            65.
        generate: whether answers are generated for exact match and ROUGE-L.
        text_seed: seed of the records; the seed of the run never changes them.
        settings: those of all text, see :class:`TextData`; ``val_fraction`` is the share of a
            task's inputs.
    """

    dataset = "instructions"
    asked = PLAIN_PROMPT.asked

    def __init__(
        self,
        num_clients: NumClients = 8,
        examples_per_client: Annotated[int, at_least(1)] = 400,
        house: Annotated[float, within("[0, 1]", "a share in [0, 1]", "write e.g. 0.25")] = 0.25,
        tests_per_task: Annotated[int, at_least(1)] = 24,
        context: int = 72,
        generate: bool = True,
        text_seed: int = 0,
        **settings: Any,
    ) -> None:
        check_memory(
            f"{num_clients} clients with {examples_per_client} examples of {context} tokens",
            16 * num_clients * examples_per_client * context,
        )
        super().__init__(num_clients=num_clients, context=context, generate=generate, **settings)
        self.examples_per_client, self.tests_per_task = examples_per_client, tests_per_task
        self.house, self.text_seed = house, text_seed
        self.groups = instructions.CLUSTERS[:num_clients]

    def read(self) -> tuple[TextExamples, TextExamples]:
        """Make the records.

        Raises:
            InputError: a record is longer than the context, or a task has too few test inputs.
        """
        seed, count = self.text_seed, self.examples_per_client
        owner = np.repeat(np.arange(self.num_clients, dtype=np.int64), count)
        self.train_records = [
            record
            for client in range(self.num_clients)
            for record in instructions.training_records(seed, client, count, self.house)
        ]
        places = [instructions.place_of(seed, record) for record in self.train_records]
        held_out = instructions.for_validation(places, self.val_fraction)
        tests = [
            (group, record)
            for group, cluster in enumerate(self.groups)
            for task in self._tasks(cluster)
            for record in instructions.test_records(seed, task, self.tests_per_task)
        ]
        self.test_records = [record for _, record in tests]
        test_group = np.array([group for group, _ in tests], np.int64)
        group = owner % len(instructions.CLUSTERS)
        train, test = (
            encode_records(some, self.tokenizer, self.context, can_cut=False)
            for some in (self.train_records, self.test_records)
        )
        return (
            TextExamples(train, group, owner, tasks_of(self.train_records), held_out),
            TextExamples(test, test_group, None, tasks_of(self.test_records)),
        )

    def _tasks(self, cluster: str) -> list[instructions.InstructionTask]:
        """Return the tasks of which the clients of a cluster have records."""
        own = [*instructions.tasks()[cluster]] if self.house < 1 else []
        return own + ([instructions.house_tasks()[cluster]] if self.house > 0 else [])

    @property
    def text_summary(self) -> dict[str, Any]:
        """The seed of the text, the dial, and the SHA-256 of the word list and of all records."""
        return {
            "seed": self.text_seed,
            "house": self.house,
            "words_sha256": hashlib.sha256("\n".join(instructions.words()).encode()).hexdigest(),
            "sha256": texts_sha256(
                text for record in [*self.train_records, *self.test_records] for text in record
            ),
        }
