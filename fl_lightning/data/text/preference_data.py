"""Federations of preferences: of one's own in JSON lines, and made by rule.

``N`` pairs of answers, ``T`` positions that the network sees.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor, nn

from fl_lightning.config.constraints import path_to, within
from fl_lightning.data.base import NumClients
from fl_lightning.data.text import preferences
from fl_lightning.data.text.federation import TextData, TextExamples, tasks_of
from fl_lightning.data.text.instructions import for_validation
from fl_lightning.data.text.pairs import AnswerPair, encode_pairs
from fl_lightning.data.text.records import (
    Line,
    check_text,
    json_records,
    line_of,
    read_text,
    texts_sha256,
    unit_hash,
)
from fl_lightning.data.text.tokens import TooLong
from fl_lightning.errors import require
from fl_lightning.tasks.preference import (
    PairTarget,
    Preference,
    PreferencePrimary,
    answer_log_probability,
)


class PreferenceData(TextData):
    """Pairs of answers, of which the first is preferred, for the task
    :class:`~fl_lightning.tasks.Preference`.

    The reference is the network that the run begins with: adapters add nothing then, so it is the
    frozen base. Its log-probabilities of all answers are computed once, when the network has been
    built.

    Args:
        beta: how much a nat counts in the loss, above 0.
        primary: the metric that selects: preference_accuracy, reward_margin or loss.
        settings: those of all text, see :class:`TextData`, but ``generate``; ``batch_tokens`` is at
            least twice the ``context``, since a pair is two sequences.
    """

    asked = ("{inputs}",)

    def __init__(
        self,
        beta: Annotated[float, within("(0, inf)", "a nat counts for more than 0", 0.1)] = 0.1,
        primary: PreferencePrimary = "preference_accuracy",
        **settings: Any,
    ) -> None:
        require(
            not settings.pop("generate", False),
            "generate=True with preferences",
            "answers are compared, and none is generated",
            "leave generate out",
        )
        super().__init__(**settings)
        require(
            self.batch_tokens is None or self.batch_tokens >= 2 * self.context,
            f"batch_tokens={self.batch_tokens}",
            f"a batch holds at least one pair, two sequences of context={self.context}",
            f"write {2 * self.context} or more, or null",
        )
        self.primary, self.task = primary, Preference(beta, primary)

    @abstractmethod
    def read(self) -> tuple[TextExamples, TextExamples]: ...

    @property
    def evaluation_batch(self) -> int:
        return max(1, super().evaluation_batch // 2)

    def example_inputs(self) -> dict[str, Tensor]:
        """Return two examples, four sequences of the token 0."""
        ids = torch.zeros(4, self.context, dtype=torch.int64)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids, dtype=torch.bool)}

    def with_labels(self, inputs: dict[str, Tensor], target: Tensor) -> dict[str, Tensor]:
        return inputs  # a wrong label exchanges the answers and changes none

    @torch.no_grad()
    def see_network(self, network: nn.Module) -> None:
        """Compute the reference's log-probabilities of all answers."""
        was_training = network.training
        network.to(self.device).eval()
        for split, some in self._sequences.items():
            found = [torch.zeros(2, 0, device=self.device)]
            for index in torch.arange(len(some), device=self.device).split(self.evaluation_batch):
                inputs, target = some.batch(index)
                outputs = network(inputs).float().chunk(2)
                labels = PairTarget.of(target).labels
                pairs = zip(outputs, labels, strict=True)
                found.append(torch.stack([answer_log_probability(*pair) for pair in pairs]))
            asked = PairTarget.of(some.target)
            target = PairTarget.joined(asked.labels, torch.cat(found, 1), asked.sign > 0)
            self._sequences[split] = replace(some, target=target)
        network.train(was_training)
        self.train_target, self.test_target = (
            self._sequences[split].target for split in ("train", "test")
        )


class PreferencePairs(PreferenceData):
    """Preferences made by rule: clusters that prefer opposite answers
    (:mod:`fl_lightning.data.text.preferences`).

    Client k belongs to cluster k mod 2, which is the group of an example. Test pairs that the
    clusters disagree on are the same in both, with the answers exchanged: one model for all is
    right about half of them at most.

    Args:
        num_clients: number of clients.
        examples_per_client: pairs that each client makes, for training and validation.
        conflict: share of pairs about which the clusters disagree, in [0, 1].
        tests_per_cluster: test pairs of each cluster.
        context: largest number of tokens that the network sees.
        text_seed: seed of the pairs; the seed of the run never changes them.
        settings: those of :class:`PreferenceData`.
    """

    dataset = "preferences"

    def __init__(
        self,
        num_clients: NumClients = 8,
        examples_per_client: Annotated[
            int, within("[1, inf)", "a client has 1 pair or more", 200)
        ] = 200,
        conflict: Annotated[float, within("[0, 1]", "a share lies in [0, 1]", 0.5)] = 0.5,
        tests_per_cluster: Annotated[int, within("[1, inf)", "1 pair or more", 64)] = 64,
        context: int = 56,
        text_seed: int = 0,
        **settings: Any,
    ) -> None:
        super().__init__(num_clients=num_clients, context=context, **settings)
        self.examples_per_client, self.conflict = examples_per_client, conflict
        self.tests_per_cluster, self.text_seed = tests_per_cluster, text_seed
        self.groups = preferences.CLUSTERS[:num_clients]

    def read(self) -> tuple[TextExamples, TextExamples]:
        count, clusters = self.examples_per_client, len(preferences.CLUSTERS)
        owner = np.repeat(np.arange(self.num_clients, dtype=np.int64), count)
        train = [
            preferences.training_pair(self.text_seed, client, index, self.conflict)
            for client in range(self.num_clients)
            for index in range(count)
        ]
        places = [preferences.place_of(self.text_seed, pair.prompt) for pair in train]
        held_out = for_validation(places, self.val_fraction)
        tests = [
            (group, pair)
            for group in range(len(self.groups))
            for pair in preferences.test_pairs(
                self.text_seed, group, self.tests_per_cluster, self.conflict
            )
        ]
        self.pairs = train, [pair for _, pair in tests]
        group = np.array([group for group, _ in tests], np.int64)
        first, second = (
            encode_pairs([AnswerPair(*pair[1:]) for pair in some], self.tokenizer, self.context)
            for some in self.pairs
        )
        return (
            TextExamples(first, owner % clusters, owner, tasks_of(train), held_out),
            TextExamples(second, group, None, tasks_of(self.pairs[1])),
        )

    @property
    def text_summary(self) -> dict[str, Any]:
        texts = (text for part in self.pairs for pair in part for text in pair)
        return {"seed": self.text_seed, "conflict": self.conflict, "sha256": texts_sha256(texts)}


PAIRS = path_to("file", "no such file", "write a .jsonl or .json file")


class PreferenceFiles(PreferenceData):
    """Preferences of one's own: JSON lines with the texts ``prompt``, ``chosen`` and ``rejected``,
    or a ``.json`` file that is a list of such objects, or an object with the list of each client
    under its name, which is then the value of the key ``client``.

    Equal prompts are never held apart: a hash of the prompt says whether a pair is for training,
    validation or test, and pairs of ``test`` whose prompt is one of ``train`` are left out.

    Args:
        train: the ``.jsonl`` or ``.json`` file.
        test: a file of the same kind; null: ``test_fraction`` of the prompts of ``train``.
        test_fraction: share of the prompts that becomes the test set if there is no ``test``, in
            (0, 1).
        client: key of a line that says whose it is; it is its group too. Null: all lines are of
            one, and a partition such as IID() deals them out.
        num_clients: number of clients; 0: as many as the lines name.
        too_long: what is done with a pair longer than the context; refuse: an error; cut: the
            beginning of its prompt is left out, and the end of an answer where that is not enough.
        settings: those of :class:`PreferenceData`.
    """

    dataset = "preference_files"

    def __init__(
        self,
        train: Annotated[str, PAIRS],
        test: Annotated[str | None, PAIRS] = None,
        test_fraction: Annotated[float, within("(0, 1)", "a share in (0, 1)", 0.1)] = 0.1,
        client: str | None = None,
        num_clients: Annotated[int, within("[0, inf)", "0 clients or more are asked for", 0)] = 0,
        too_long: TooLong = "refuse",
        **settings: Any,
    ) -> None:
        super().__init__(num_clients=num_clients or 1, **settings)
        self.count_clients = num_clients == 0
        self.paths = Path(train), Path(test) if test else None
        self.test_fraction, self.client_key, self.too_long = test_fraction, client, too_long
        self._sha256 = ""

    def read(self) -> tuple[TextExamples, TextExamples]:
        train, test = self.paths
        lines, held, held_out = self.split_lines(
            self._lines(train),
            self._lines(test) if test else None,
            lambda pair: unit_hash(0, f"place/{pair.prompt}"),
        )
        for path, some in ((train, lines), (test or train, held)):
            is_needed = some is lines or not self.run_form
            say = "give more pairs, or another test_fraction"
            require(some or not is_needed, f"{path}", "no pair is left", say)
        self._sha256 = texts_sha256(text for line in [*lines, *held] for text in line.content)
        return replace(self._examples(lines), held_out=held_out), self._examples(held)

    def _lines(self, path: Path) -> list[Line]:
        """Return the pairs of a file."""
        found, seen = [], dict[str, Any]()
        for entry, place in json_records(path, read_text(path)):
            for name in AnswerPair._fields:
                require(name in entry, place, f"the key {name} is missing", f'add "{name}": "..."')
                check_text(entry[name], name, place)
            pair = AnswerPair(*(entry[name] for name in AnswerPair._fields))
            require(
                pair.chosen and pair.rejected and pair.chosen != pair.rejected,
                place,
                "chosen and rejected are two different answers, and none is empty",
                "remove the line",
            )
            found.append(line_of(pair, entry, place, self.client_key, seen))
        return found

    def _examples(self, lines: Sequence[Line]) -> TextExamples:
        pairs, places = [line.content for line in lines], [line.place for line in lines]
        sequences = encode_pairs(pairs, self.tokenizer, self.context, self.too_long, places)
        return self.of_lines(lines, sequences)

    @property
    def text_summary(self) -> dict[str, Any]:
        left_out = {"test pairs left out": self.tests_left_out} if self.tests_left_out else {}
        return {
            "files": [path.name for path in self.paths if path],
            "sha256": self._sha256,
            **left_out,
        }
