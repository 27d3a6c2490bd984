"""Language modelling: the next token where it is labelled, and answers that are generated.

``B`` sequences of ``T`` tokens over a vocabulary of ``V``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_lightning.config.near_names import require_choice
from fl_lightning.errors import InputError, require
from fl_lightning.metrics.text import (
    IGNORED,
    exact_match,
    perplexity,
    prompts_and_answers,
    rouge_l,
    token_sums,
    until_end,
)
from fl_lightning.tasks.base import ClassRows, Sums, Task

Primary = Literal["perplexity", "token_accuracy", "exact_match", "rouge_l"]
OF_TOKENS = ("perplexity", "token_accuracy")
OF_ANSWERS = ("exact_match", "rouge_l")


class Decoder(Protocol):
    """What generation needs of a tokeniser."""

    eos: int
    pad: int

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids."""


class LanguageModelling(Task):
    """Outputs are logits ``[B, T, V]``, targets int64 ``[B, T]``: the token that follows each
    position, or -100 where none is asked for. Inputs are ids int64 ``[B, T]``, or a dictionary with
    ``input_ids`` and ``attention_mask``; they may be shorter than the target where only -100
    follows.

    The loss of a local step is the mean over the labelled tokens of its batch. Metrics over all
    labelled tokens: ``loss``, the cross-entropy in nats a token; ``perplexity``, its exponential;
    ``token_accuracy`` of the likeliest token given the true ones before it.

    Where answers are generated, each prompt (what stands before the first labelled token) is
    continued greedily by ``network.generate`` until its end or the bound. ``exact_match`` is the
    share of answers that equal the labelled text character by character; ``rouge_l`` is the mean
    F-measure of their longest common subsequence of words. Of an answer whose labels were cut and
    have no end, as many tokens count as it has.

    Args:
        decoder: makes text of tokens; None: nothing is generated.
        max_new_tokens: bound on the tokens of an answer, its end included; 0: nothing is generated.
        primary: the metric that selects.

    Raises:
        InputError: the primary metric is not measured.
    """

    lower_is_better = frozenset({"loss", "perplexity"})
    shares = frozenset({"token_accuracy", *OF_ANSWERS})
    hits = frozenset({"exact_match"})
    has_classes = True
    of_tokens = True
    num_tokens: int | None = None
    """Number of the data's tokens, for metrics by class path; None: it is not known."""

    def __init__(
        self,
        decoder: Decoder | None = None,
        max_new_tokens: int = 0,
        primary: Primary = "perplexity",
    ) -> None:
        require_choice(primary, (*OF_TOKENS, *OF_ANSWERS), "primary")
        self.decoder, self.max_new_tokens, self.primary = decoder, max_new_tokens, primary
        self.per_client = (*OF_TOKENS, *OF_ANSWERS) if self.generates else OF_TOKENS
        require(
            primary in self.per_client,
            f"primary={primary} where no answers are generated",
            f"it is one of {', '.join(OF_TOKENS)}",
            "write primary: perplexity, or let answers be generated",
        )

    @property
    def generates(self) -> bool:
        """Whether answers are generated."""
        return self.decoder is not None and self.max_new_tokens > 0

    def class_rows(self, outputs: Tensor, target: Tensor) -> ClassRows:
        target = target[:, : outputs.shape[1]]
        labelled = target != IGNORED
        # in half precision the nats of a batch, or the number of its tokens, may not be a number
        return ClassRows(
            outputs.flatten(0, 1).float(), target.flatten(), labelled.flatten().float()
        )

    def loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        rows = self.class_rows(outputs, target)
        return rows.mean(
            F.cross_entropy(rows.logits, rows.target, reduction="none", ignore_index=IGNORED)
        )

    def weight(self, target: Tensor) -> Tensor:
        return (target != IGNORED).sum(1).double()

    def examplewise(self, outputs: Tensor, target: Tensor) -> Sums:
        nats, right, tokens = token_sums(outputs, target[:, : outputs.shape[1]])
        return {"loss": (nats, tokens), "token_accuracy": (right, tokens)}

    def evaluate(self, network: nn.Module, inputs: Any, target: Tensor) -> tuple[Any, Sums]:
        outputs, sums = super().evaluate(network, inputs, target)
        if self.generates:
            ids = inputs["input_ids"] if isinstance(inputs, Mapping) else inputs
            sums |= self._of_answers(network, ids, target)
        return outputs, sums

    def _of_answers(self, network: Any, ids: Tensor, target: Tensor) -> Sums:
        decoder = self.decoder
        assert decoder is not None, "generates"
        if not hasattr(network, "generate"):
            raise InputError(
                f"network {type(network).__name__}, which cannot generate",
                "answers are generated for exact match and ROUGE-L",
                "give it generate(input_ids, attention_mask, max_new_tokens, eos, pad), or write "
                "--data.generate false",
            )
        prompts, mask, answers = prompts_and_answers(ids, target[:, : ids.shape[1]], decoder.pad)
        generated = network.generate(
            prompts, mask, max_new_tokens=self.max_new_tokens, eos=decoder.eos, pad=decoder.pad
        )
        found = [  # how an answer that was cut goes on, nobody knows
            row if decoder.eos in answer else row[: len(answer)]
            for row, answer in zip(generated.tolist(), answers, strict=True)
        ]
        said, right = (
            [decoder.decode(until_end(row, decoder.eos)) for row in rows]
            for rows in (found, answers)
        )
        one = torch.ones(len(target), dtype=torch.float64, device=target.device)
        return {
            "exact_match": (torch.from_numpy(exact_match(said, right)).to(one), one),
            "rouge_l": (torch.from_numpy(rouge_l(said, right)).to(one), one),
        }

    def finish(self, means: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {**means, "perplexity": perplexity(means["loss"], np.ones_like(means["loss"]))}

    metric_form = "probabilities [n, V] and tokens [n], nor logits [B, T, V] and tokens [B, T]"

    def metric_inputs(self, outputs: Tensor, target: Tensor) -> Sequence[tuple[Tensor, Tensor]]:
        """Probabilities float32 ``[M, V]`` and tokens ``[M]`` of the labelled positions, the logits
        ``[B, T, V]`` with the target ``[B, T]``, for perplexities, and the probabilities of the
        data's tokens alone, where the network has more."""
        target = target[:, : outputs.shape[1]]
        labelled = target != IGNORED
        rows = outputs[labelled].softmax(1).cpu(), target[labelled].cpu()
        forms = [rows, (outputs.cpu(), target.cpu())]
        if self.num_tokens and self.num_tokens < outputs.shape[2]:
            forms.append((rows[0][:, : self.num_tokens], rows[1]))
        return forms

    def measuring(self, metrics: Sequence[Any], primary: str | None, num_outputs: int) -> Task:
        task = super().measuring(metrics, primary, num_outputs)
        assert isinstance(task, LanguageModelling), "it is a copy"
        task.num_tokens = num_outputs
        return task

    def metric_arguments(self, num_outputs: int) -> dict[str, Any]:
        return {"num_classes": num_outputs, "task": "multiclass", "ignore_index": IGNORED}

    def constant_guess(self, target: Tensor) -> float | None:
        """For the perplexity, the answer is how often each token is a label of the test set."""
        counts = np.unique(target[target != IGNORED].cpu().numpy(), return_counts=True)[1]
        shares = counts / counts.sum()
        if not len(shares) or self.primary not in OF_TOKENS:
            return None
        return float(
            np.exp(-(shares * np.log(shares)).sum())
            if self.primary == "perplexity"
            else shares.max()
        )

    def accepts(self, outputs: Any, num_outputs: int, examples: int) -> bool:
        """A vocabulary may be larger than the data's: it is often rounded up."""
        is_sequence = isinstance(outputs, Tensor) and outputs.ndim == 3 and len(outputs) == examples
        return is_sequence and outputs.shape[2] >= num_outputs

    def outputs_form(self, examples: str, num_outputs: int) -> str:
        return f"logits [{examples}, T, {num_outputs}]"

    def corrupt(
        self, target: Tensor, where: np.ndarray, rng: np.random.Generator, num_outputs: int
    ) -> Tensor:
        """Each labelled token of the sequences at ``where`` becomes another one of those that the
        client has as labels, drawn evenly; the last one of several in a row, which ends an answer,
        stays."""
        wrong, index = target.clone(), torch.from_numpy(where).to(target.device)
        labels = target[target != IGNORED].unique()
        if len(labels) < 2:
            return wrong
        chosen = target[index]
        offset = torch.from_numpy(rng.integers(1, len(labels), size=tuple(chosen.shape))).to(chosen)
        another = labels[(torch.searchsorted(labels, chosen) + offset) % len(labels)]
        labelled = chosen != IGNORED
        begins, goes_on = ~F.pad(labelled[:, :-1], (1, 0)), F.pad(labelled[:, 1:], (0, 1))
        wrong[index] = torch.where(labelled & (goes_on | begins), another, chosen)
        return wrong
