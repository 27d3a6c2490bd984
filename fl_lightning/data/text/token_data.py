"""A federation over token ids of one's own: text that is tokenised already, or sequences of
anything else."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fl_lightning.config.recorded import Recorded
from fl_lightning.data.arrays import (
    ClientCount,
    check_count,
    check_names,
    check_test_fraction,
    number_names,
    numbers_by_name,
)
from fl_lightning.data.items import Key
from fl_lightning.data.map_style import (
    DataModuleCallable,
    DatasetCallable,
    Splits,
    made_splits,
    module_splits,
    name_of,
    prepare_module,
)
from fl_lightning.data.partition import IID, Dirichlet, Natural, Partition
from fl_lightning.data.text.federation import TextData, TextExamples
from fl_lightning.data.text.token_items import TokenItem, read_token_items, token_sequences
from fl_lightning.data.text.tokens import Tokenizer, TokenizerSetting, TooLong, chosen_tokenizer
from fl_lightning.errors import require
from fl_lightning.metrics.text import count_answers


class TokenNumbers(Recorded):
    """Tokens that stand for themselves: their text is their numbers.

    Args:
        vocab_size: number of tokens.
        eos: the token that ends an answer.

    >>> tokens = TokenNumbers(100, eos=2)
    >>> tokens.decode([5, 17, 2]), tokens.encode("5 17")
    ('5 17', [5, 17])
    """

    bos: int | None = None
    pad = 0

    def __init__(self, vocab_size: int, eos: int) -> None:
        self.vocab_size, self.eos = vocab_size, eos

    def encode(self, text: str) -> list[int]:
        return [int(number) for number in text.split()]

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(str(id) for id in ids if id != self.eos)


class TokenData(TextData):
    """Sequences of token ids from a map-style dataset of one's own, from a file, or of Hugging
    Face.

    An item is a row of ids, a tuple ``(ids, labels)``, or a dictionary with ``input_ids`` and
    perhaps ``labels``, ``loss_mask`` or ``attention_mask``. Labels are those of transformers: as
    long as the ids, each the token itself, or -100 where nothing is learnt; the shift by one is
    made here. A ``loss_mask`` says the same with 1 and 0. With neither, every token but the first
    is learnt. Nothing is added to the ids, neither a beginning nor an end; items have different
    lengths and are padded in batches. Equal items are never on both sides of the split into
    training and test.

    Args:
        train: class path and arguments of the training dataset; ``TokenFile`` reads a file. In
            Python also the dataset itself, such as one of Hugging Face.
        test: the test dataset; null: ``test_fraction`` of the training items. Test items that are
            training items too are left out.
        test_fraction: share of the different items that becomes the test set if there is no
            ``test``, in (0, 1).
        vocab_size: number of tokens; null: that of the tokeniser.
        eos: the token that ends an answer, with ``vocab_size`` and ``generate``; null: none.
        client: name (of a tuple the position) of whose an item is, for the partition Natural; null:
            none.
        group: name or position of what partitions deal the items out by; null: none.
        num_clients: number of clients; 0: those that ``client`` names.
        partition: rule that assigns items to clients; null: Natural with ``client``, Dirichlet(0.1)
            with ``group``, else IID.
        context: largest number of tokens that the network sees at once; an item of L tokens takes L
            - 1.
        too_long: what is done with a longer item; refuse: an error; cut: its end is left out.
        tokenizer: what the ids are of; null: bytes, or with ``vocab_size`` numbers without text.
        generate: whether answers, the labelled tokens of an item, are generated for exact match and
            ROUGE-L.
        settings: those of all text, see :class:`~fl_lightning.data.TextData`.
    """

    def __init__(
        self,
        train: DatasetCallable,
        test: DatasetCallable | None = None,
        test_fraction: float = 0.1,
        vocab_size: int | None = None,
        eos: int | None = None,
        client: Key | None = None,
        group: Key | None = None,
        num_clients: ClientCount = 0,
        partition: Partition | None = None,
        context: int = 128,
        too_long: TooLong = "refuse",
        tokenizer: TokenizerSetting = None,
        generate: bool = False,
        **settings: Any,
    ) -> None:
        self.count_clients = check_count(num_clients, client is not None)
        check_test_fraction(test is not None, test_fraction)
        if partition is None:
            partition = IID() if group is None else Dirichlet(0.1)
            partition = partition if client is None else Natural()
        self.dataset = name_of(train)
        super().__init__(
            num_clients=num_clients or 1,
            partition=partition,
            context=context,
            tokenizer=_tokenizer_of(vocab_size, eos, tokenizer, generate),
            generate=generate,
            **settings,
        )
        self.sources, self.test_fraction, self.too_long = (train, test), test_fraction, too_long
        self.client_key, self.group_key = client, group
        self._summary: dict[str, Any] = {}

    @property
    def tokens_sha256(self) -> str:
        return ""  # they are the content

    def read(self) -> tuple[TextExamples, TextExamples]:
        """Make the datasets and read their items.

        Raises:
            InputError: a dataset cannot be made, or an item is no sequence of tokens.
        """
        parts = {
            split: read_token_items(
                dataset, place, split, self.tokenizer.vocab_size, self.client_key, self.group_key
            )
            for split, (dataset, place) in self.datasets().items()
        }
        seen, left_out = {_digest(item) for item in parts["train"]}, {"test": 0}
        # whoever validates is not tested
        for split, of in (("val", "validation"), ("test", "test")):
            if split not in parts:
                continue
            kept = [item for item in parts[split] if _digest(item) not in seen]
            require(
                kept,
                parts[split][0].place,
                "all its items are training items too",
                "give other ones",
            )
            left_out[of] = len(parts[split]) - len(kept)
            parts[split] = kept
            seen |= {_digest(item) for item in kept}
        if self.run_form:
            parts.setdefault("test", [])
        elif "test" not in parts:
            parts |= _split(parts["train"], self.test_fraction)
        held_out = np.repeat([False, True], [len(parts["train"]), len(parts.get("val", ()))])
        parts["train"] += parts.pop("val", [])
        clients = number_names(item.client for item in parts["train"] if item.client is not None)
        if self.count_clients:
            self.num_clients = len(clients)
        every = parts["train"] + parts["test"]
        for name in ("client", "group"):
            check_names((getattr(item, name) for item in every), name, every[0].place)
        groups = number_names(item.group for item in every if item.group is not None)
        self.groups = tuple(map(str, groups)) or (self.dataset,)
        train, test = (self._examples(parts[split], groups, clients) for split in ("train", "test"))
        if held_out.any():
            train = replace(train, held_out=held_out)
        self._summary = {
            "clients": [str(name) for name in clients],
            **{f"{of} items left out": count for of, count in left_out.items()},
        }
        return train, test

    def datasets(self) -> Splits:
        """Return the dataset of each split, ``train`` and perhaps ``val`` and ``test``.

        Raises:
            InputError: one cannot be made.
        """
        return made_splits(*self.sources)

    def _examples(
        self, items: list[TokenItem], groups: dict[Any, int], clients: dict[Any, int]
    ) -> TextExamples:
        sequences = token_sequences(items, self.tokenizer.pad, self.context, self.too_long)
        if self.generate:
            _check_answers(items, sequences.target, self.tokenizer.eos)
        group = np.array([groups.get(item.group, 0) for item in items], np.int64)
        owner = numbers_by_name([item.client for item in items], clients)
        return TextExamples(sequences, group, owner)

    @property
    def text_summary(self) -> dict[str, Any]:
        """The SHA-256 of all items, the clients' names, and how many items of other splits were
        left out because they are training items too."""
        return {"sha256": self._tokens_sha256, **self._summary}


class DataModuleTokens(TokenData):
    """Sequences of token ids from the loaders of a ``LightningDataModule``.

    The items of the datasets behind ``train_dataloader``, ``val_dataloader`` and
    ``test_dataloader`` are read as :class:`TokenData` reads them; the loaders' batches, samplers
    and collate functions are not used. Items of ``val_dataloader`` are the clients' validation
    examples and are dealt out like the others; without it ``val_fraction`` is held out. Without
    ``test_dataloader``, ``test_fraction`` of the training items is the test set. Validation and
    test items that are training items too are left out.

    Args:
        module: class path and arguments of the module; in Python a function that returns it.
        settings: those of :class:`TokenData` but ``train`` and ``test``.
    """

    def __init__(self, module: DataModuleCallable, **settings: Any) -> None:
        super().__init__(train=module, test=None, **settings)  # type: ignore[arg-type]
        self.module = module

    def prepare_data(self) -> None:
        """Call the module's ``prepare_data``.

        Raises:
            InputError: the module refuses its arguments or lacks its files.
        """
        prepare_module(self.module)

    def datasets(self) -> Splits:
        """Return the dataset behind each loader that the module has.

        Raises:
            InputError: the module has no training loader, or a loader has not one dataset.
        """
        return module_splits(self.module, ("train", "val", "test"))


def _tokenizer_of(
    vocab_size: int | None, eos: int | None, tokenizer: TokenizerSetting, generate: bool
) -> Tokenizer:
    """Return the tokeniser of ids, or what stands in its place."""
    if vocab_size is None:
        require(
            eos is None,
            f"eos={eos} without vocab_size",
            "the tokeniser has an end",
            "leave eos out",
        )
        return chosen_tokenizer(tokenizer)
    require(
        tokenizer is None,
        f"vocab_size={vocab_size} and a tokenizer",
        "the tokeniser says how many tokens there are",
        "leave vocab_size out",
    )
    require(
        vocab_size >= 2, f"vocab_size={vocab_size}", "there are 2 tokens or more", "write e.g. 1000"
    )
    require(
        eos is None or 0 <= eos < vocab_size,
        f"eos={eos}",
        f"a token from 0 to {vocab_size - 1}",
        "write the token that ends an answer",
    )
    require(
        not generate or eos is not None,
        "generate=True without eos",
        "a token ends each answer",
        "write eos: ID, or the tokenizer, or generate: false",
    )
    return TokenNumbers(vocab_size, 0 if eos is None else eos)


def _digest(item: TokenItem) -> bytes:
    return hashlib.sha256(item.ids.tobytes() + item.labelled.tobytes()).digest()


def _split(items: list[TokenItem], fraction: float) -> dict[str, list[TokenItem]]:
    """Take the share of the test by a hash of the items, the same ones in every run."""
    digests = [_digest(item) for item in items]
    different = sorted(set(digests))
    require(
        len(different) >= 2,
        f"test_fraction={fraction} of {len(items)} items",
        "there are not two different ones, one to train on and one for the test",
        "give more items, or a test dataset",
    )
    count = min(max(round(fraction * len(different)), 1), len(different) - 1)
    chosen = set(different[:count])
    return {
        "train": [
            item for item, digest in zip(items, digests, strict=True) if digest not in chosen
        ],
        "test": [item for item, digest in zip(items, digests, strict=True) if digest in chosen],
    }


def _check_answers(items: list[TokenItem], target: torch.Tensor, eos: int) -> None:
    """Refuse items that have no answer which could be generated."""
    answers = count_answers(target)
    for number, item in enumerate(items):
        whole = len(item.ids) <= target.shape[1] + 1
        require(
            answers[number] == 1,
            f"generate=True, {item.where}",
            f"its labelled tokens are {int(answers[number])} stretches, and one can be generated",
            "write generate: false",
        )
        require(
            not whole or item.ids[item.labelled][-1] == eos,
            f"generate=True, {item.where}",
            f"its answer does not end with the token {eos}, so that what is generated would not end",
            "append it to the ids and the labels, or write generate: false",
        )
