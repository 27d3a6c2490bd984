"""Texts with a label each, of Hugging Face ``datasets``: the data of text classification.

``N`` examples, ``B`` batch, ``T`` tokens of the longest text of a batch.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Annotated, Any

import torch
from torch import Tensor

from fl_lightning.config.constraints import within
from fl_lightning.config.packaged import HF_PREFIX
from fl_lightning.data.example_batches import Split
from fl_lightning.data.hugging_face import HuggingFaceData
from fl_lightning.data.partition import check_memory
from fl_lightning.data.text.tokens import pretrained_tokenizer, text_mask, tokenizer_sha256
from fl_lightning.errors import InputError, require

log = logging.getLogger(__name__)

IDS, LENGTH = "input_ids", "length"
HEADS = 12
"""Heads of attention of BERT's base, by which memory is estimated."""
MAX_SCORES = {"cpu": 2**27, "cuda": 2**29}
"""Largest number of scores of attention in a layer, of an evaluation batch by type of device: 0.5
and 2 GB of float32."""


class LabelledText(HuggingFaceData):
    """The rows of a Hugging Face data set with a text and a label, for networks that classify text.

    Inputs are ``{"input_ids": int64 [B, T], "attention_mask": bool [B, T]}``, padded on the right
    and trimmed to the longest text of the batch; the mask is true where a token is no padding.
    Special tokens are those that the tokeniser adds. The network is ``hf:NAME``, or one that takes
    such a dictionary.

    Args:
        path: a folder that ``save_to_disk`` wrote, a file (``.parquet``, ``.csv``, ``.json``), or a
            name on the Hub, which is downloaded.
        tokenizer: name or folder of a tokeniser of transformers, with ``hf:`` before it or without:
            that of the network.
        text: column of the text.
        max_length: largest number of tokens; longer texts are cut at their end.
        settings: those of :class:`~fl_lightning.data.HuggingFaceData`, but for ``input``; labels,
            the ``target``, are whole numbers or texts.

    Raises:
        InputError: an argument is out of range, or a library is not installed.
    """

    examplewise = True

    def __init__(
        self,
        path: str,
        tokenizer: str,
        text: str = "text",
        max_length: Annotated[
            int, within("[2, inf)", "a text has 2 tokens or more", "write e.g. 128")
        ] = 128,
        **settings: Any,
    ) -> None:
        super().__init__(path, input=[IDS, LENGTH], **settings)
        self.tokenizer = tokenizer.removeprefix(HF_PREFIX)
        self.text, self.max_length = text, max_length

    def prepare_data(self) -> None:
        """Download data set and tokeniser where they are names on the Hub, and check the columns.

        Raises:
            InputError: one cannot be loaded, or a column is missing.
        """
        super().prepare_data()
        pretrained_tokenizer(self.tokenizer)

    def input_columns(self) -> Sequence[object]:
        return [self.text]

    def items_of(self, rows: Any, place: str) -> Any:
        """Return the tokens of each row, with what else the row says of it.

        Raises:
            InputError: a text is none, or has no token.
        """
        texts = list(rows[self.text])
        for number, text in enumerate(texts):
            if not isinstance(text, str):
                raise InputError(
                    f"{place}, item {number}, column {self.text}",
                    f"it has texts, and this is {'missing' if text is None else f'a {type(text).__name__}'}",
                    "leave the row out" if text is None else "write --data.text THE_COLUMN_OF_TEXT",
                )
        check_memory(
            f"{len(texts)} texts of max_length={self.max_length}", 8 * len(texts) * self.max_length
        )
        tokenizer = pretrained_tokenizer(self.tokenizer)
        found = tokenizer(texts, truncation=True, max_length=self.max_length, verbose=False)[IDS]
        full = sum(len(ids) == self.max_length for ids in found)
        if full:
            note = "%s: %d of %d texts fill max_length=%d tokens; what is longer was cut"
            log.warning(note, place, full, len(texts), self.max_length)
        wrong = next((number for number, ids in enumerate(found) if not ids), None)
        require(wrong is None, f"{place}, item {wrong}", "its text has no token", "leave it out")
        padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
        known = {key: list(rows[key]) for key in self._named() if key in rows.column_names}
        return [
            {
                IDS: torch.tensor(ids + [padding] * (self.max_length - len(ids))),
                LENGTH: len(ids),
                **{key: values[number] for key, values in known.items()},
            }
            for number, ids in enumerate(found)
        ]

    @property
    def tokenizer_sha256(self) -> str:
        return tokenizer_sha256(pretrained_tokenizer(self.tokenizer))

    @property
    def evaluation_batch(self) -> int:
        """Batch size of evaluation, and fewer if the scores of attention would take too much
        memory."""
        scores = MAX_SCORES.get(self.device.type, MAX_SCORES["cpu"])
        return max(1, min(super().evaluation_batch, scores // (HEADS * self.max_length**2)))

    def inputs(self, split: Split, index: Tensor, draws: Tensor | None = None) -> Any:
        """Return the tokens at ``index`` and their mask, trimmed to the longest text."""
        found = super().inputs(split, index, draws)
        mask = text_mask(found[LENGTH])
        return {IDS: found[IDS][:, : mask.shape[1]], "attention_mask": mask}

    def example_inputs(self) -> dict[str, Tensor]:
        """Return two texts of ``max_length`` tokens."""
        ids = torch.zeros(2, self.max_length, dtype=torch.int64)
        return {IDS: ids, "attention_mask": torch.ones_like(ids, dtype=torch.bool)}

    def _named(self) -> list[str]:
        """Return the columns of target, group and client."""
        keys = self.keys
        return [str(key) for key in (keys.target, keys.group, keys.client) if key is not None]
