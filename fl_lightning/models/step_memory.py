"""How much memory a local step takes, from the shapes of its tensors alone: nothing is computed.

A network whose weights are on torch's device ``meta`` has shapes and no values. Its forward and
backward passes call the operations that a real step calls, and what each of them allocates and when
it is freed is counted: that holds for any architecture, and for activations that are computed again
in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import finalize

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

FOUR_BIT_BYTES = 0.5 + 4 / 64
"""Bytes of a weight in bitsandbytes' NF4: half a byte, and a float32 scale for each block of 64."""
TRIED_ON = 64
"""Side of the matrix that an optimiser is tried on."""


class StepMemory(NamedTuple):
    """Bytes of a client's process while it trains, beside the program's own.

    Args:
        base: frozen weights and buffers.
        trained: trained weights, such as adapters.
        gradients: of the trained weights.
        optimizer: what the optimiser remembers of them.
        activations: what else is there when most is: values that wait for the backward pass, and
            those that it computes with.
    """

    base: int
    trained: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        return sum(self)


def step_memory(network: nn.Module, inputs: Any, optimizer: Callable[[Any], Any]) -> StepMemory:
    """Return what a step of a network takes.

    Args:
        network: on the device ``meta``, in training mode.
        inputs: of one batch, on the same device.
        optimizer: returns the optimiser of a list of parameters.
    """
    trained = [p for p in network.parameters() if p.requires_grad]
    gradients = sum(map(_bytes, trained))
    count = _Shapes()
    with count, _fused_attention():
        outputs = network(inputs)
        _loss(outputs).backward()
    return StepMemory(
        base=_frozen_bytes(network),
        trained=gradients,
        gradients=gradients,
        optimizer=round(_state_share(optimizer) * gradients),
        activations=max(0, count.peak - gradients),
    )


@contextmanager
def shapes_alone() -> Iterator[None]:
    """Return a context in which networks are made, and tried out, without values."""
    with torch.device("meta"), _Shapes(), _fused_attention():
        yield


def batch_of(example_inputs: Any, rows: int) -> Any:
    """Return inputs ``[rows, ...]`` on the device ``meta`` of inputs of two examples.

    Args:
        example_inputs: inputs of two examples; a tensor, or tensors by name.
        rows: number of examples of the batch.
    """

    def longer(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        shape = (len(value) * rows // 2, *value.shape[1:])
        return torch.zeros(shape, dtype=value.dtype, device="meta")

    return tree_map(longer, example_inputs)


def _loss(outputs: Tensor) -> Tensor:
    """Return a loss that takes the memory of a task's: cross-entropy over the last axis in the
    outputs' precision; of logits ``[B, T, V]`` at every position."""
    rows = outputs.flatten(0, -2) if outputs.ndim > 1 else outputs[:, None]
    target = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
    return F.cross_entropy(rows, target, reduction="none").mean()


def _frozen_bytes(network: nn.Module) -> int:
    """Return the bytes of frozen weights and of buffers, each once. Where a network says that its
    base is ``in_4bit``, that is of its linear layers without the output layer, as bitsandbytes has
    it."""
    narrow: set[int] = set()
    if getattr(network, "in_4bit", False):
        base: Any = network.base  # type: ignore[union-attr]
        head = base.get_output_embeddings()
        layers = [
            one
            for one in base.modules()
            if isinstance(one, nn.Linear) or type(one).__name__ == "Conv1D"
        ]
        narrow = {
            id(one.weight) for one in layers if one is not head and not one.weight.requires_grad
        }
    found = {id(p): p for p in [*network.parameters(), *network.buffers()] if not p.requires_grad}
    return sum(
        round(FOUR_BIT_BYTES * tensor.numel()) if key in narrow else _bytes(tensor)
        for key, tensor in found.items()
    )


def _state_share(optimizer: Callable[[Any], Any]) -> float:
    """Return how many values an optimiser remembers of each that it steps on, by a step of a small
    matrix."""
    weight = nn.Parameter(torch.zeros(TRIED_ON, TRIED_ON, device="cpu"))
    tried = optimizer([weight])
    weight.grad = torch.ones_like(weight)
    tried.step()
    values = [
        value for value in tree_leaves(dict(tried.state[weight])) if isinstance(value, Tensor)
    ]
    return sum(value.numel() for value in values if value.ndim) / weight.numel()


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class TensorMemory(TorchDispatchMode):
    """Follows the storages that operations make, within its blocks: ``now`` and at its ``peak``, in
    bytes.

    A storage counts from the operation that made it until nothing refers to it. What an operation
    takes for itself while it runs is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._counted: dict[int, int] = {}  # bytes by storage; 0 for what was there before

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        for tensor in _tensors((args, kwargs)):
            self._see(tensor, own=False)
        made = func(*args, **(kwargs or {}))
        for tensor in _tensors(made):
            self._see(tensor, own=True)
        return made

    def _see(self, tensor: Tensor, own: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._counted:
            return
        self._counted[key] = storage.nbytes() if own else 0
        self.now += self._counted[key]
        self.peak = max(self.peak, self.now)
        finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.now -= self._counted.pop(key, 0)


class _Shapes(TensorMemory):
    """Lets tensors without values be computed with.

    An operation that asks for a value gets the one that needs no further work: true, or 0. Models
    of transformers ask whether no sequences are packed.
    """

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return True if args[0].dtype is torch.bool else 0
        return super().__torch_dispatch__(func, types, args, kwargs)


@contextmanager
def _fused_attention() -> Iterator[None]:
    """Return a context in which attention keeps no scores, as its kernels on CPUs and GPUs do; of
    tensors without values torch would take the one that keeps them."""
    plain = F.scaled_dot_product_attention

    def fused(
        query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **settings: Any
    ) -> Tensor:
        if not query.is_meta:
            return plain(query, key, value, *arguments, **settings)
        groups = query.shape[-3] // key.shape[-3]
        if groups > 1:
            key, value = (one.repeat_interleave(groups, -3) for one in (key, value))
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return kernel(query, key, value, is_causal=bool(settings.get("is_causal")))[0]

    # no mode of torch: the backward pass, which computes layers again, would not be in it
    F.scaled_dot_product_attention = fused
    try:
        yield
    finally:
        F.scaled_dot_product_attention = plain
