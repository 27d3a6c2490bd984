"""One step of a language model: the last logits of some tokens after those in a cache of keys and
values."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.errors import InputError
from fl_lightning.models.language.hf import TransformersLM
from fl_lightning.models.language.llama import KeyValueCache, Llama


class Steps(ABC):
    """How a network of one kind reads tokens step by step, one sequence at a time.

    Args:
        vocabulary: V, number of tokens.
        longest: tokens that a sequence may have; None: any number.
    """

    def __init__(self, vocabulary: int, longest: int | None = None) -> None:
        self.vocabulary, self.longest = vocabulary, longest

    @abstractmethod
    def read(self, ids: Tensor) -> Any:
        """Return the cache of tokens, int64 ``[1, T]``, one or more."""

    @abstractmethod
    def last_logits(self, ids: Tensor, cache: Any) -> Tensor:
        """Return the logits ``[1, V]`` after the last of some tokens.

        Args:
            ids: the tokens of the step, int64 ``[1, n]``.
            cache: of the tokens before; it is not changed. None: there are none.
        """


class LlamaSteps(Steps):
    """Steps of the project's own network."""

    def __init__(self, network: Llama) -> None:
        super().__init__(network.embed_tokens.num_embeddings)
        self.network = network

    def read(self, ids: Tensor) -> KeyValueCache:
        cache = KeyValueCache()
        self.network.features(ids, torch.arange(ids.shape[1]).unsqueeze(0), cache)
        return cache

    def last_logits(self, ids: Tensor, cache: KeyValueCache | None) -> Tensor:
        own = KeyValueCache()
        if cache is not None:  # a step replaces tensors of its own lists
            own = KeyValueCache(list(cache.keys), list(cache.values))
        before = own.keys[0].shape[2] if own.keys else 0
        positions = torch.arange(before, before + ids.shape[1]).unsqueeze(0)
        return self.network.logits(self.network.features(ids, positions, own)[:, -1])


class TransformersSteps(Steps):
    """Steps of a network of transformers, by its own forward method: what its ``generate`` does
    around the steps is not part of them."""

    def __init__(self, network: TransformersLM) -> None:
        super().__init__(network.base.config.vocab_size, network.positions)
        self.model = network.base
        parameters = signature(self.model.forward).parameters
        self.cache = "cache" if "cache" in parameters else "past_key_values"  # its name before 5.24
        keeps = "logits_to_keep" in parameters
        self.options: dict[str, Any] = {
            "use_cache": True,
            **({"logits_to_keep": 1} if keeps else {}),
        }

    def read(self, ids: Tensor) -> Any:
        cache = getattr(self.model(input_ids=ids, **self.options), self.cache, None)
        if not hasattr(cache, "layers"):
            raise InputError(
                f"network {type(self.model).__name__}, which returns no cache of layers",
                "a step continues keys and values of the tokens before",
                "take a model that keeps them, such as a Llama",
            )
        return cache

    def last_logits(self, ids: Tensor, cache: Any) -> Tensor:
        own = None
        if cache is not None:  # layers of a cache replace their tensors
            own = copy.copy(cache)
            own.layers = [copy.copy(layer) for layer in cache.layers]
        return self.model(input_ids=ids, **{self.cache: own}, **self.options).logits[:, -1]


def steps_of(network: nn.Module) -> Steps:
    """Return how a network reads tokens step by step.

    Raises:
        InputError: it is of another kind.
    """
    if isinstance(network, Llama):
        return LlamaSteps(network)
    if isinstance(network, TransformersLM):
        return TransformersSteps(network)
    raise InputError(
        f"costs of a {type(network).__name__}",
        "steps of llama_tiny and of networks hf:NAME can be measured",
        "write --network llama_tiny, or hf:NAME_OR_FOLDER",
    )
