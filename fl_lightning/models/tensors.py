"""The modules and tensors of a module, as torch's own iterators give them, but faster.

A client's round reads and writes them several times. For a small network torch's general iterators
then take longer than the training.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from hashlib import sha256

import torch
from torch import Tensor, nn

from fl_lightning.metrics.states import clear, parts_of
from fl_lightning.support.tensor_bytes import raw_bytes

SMALL = 1024
"""Values of a buffer that is not worth asking whether it was written to: ``.data`` does not say
so."""


def modules_of(module: nn.Module) -> list[nn.Module]:
    """Return the modules that ``module.modules()`` yields, in the same order."""
    return list(_modules_by_prefix(module).values())


def under_autocast(x: Tensor) -> bool:
    """Return whether autocast is on for what is computed with a tensor; it never is for shapes
    alone."""
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters by name, then the buffers by name.

    They are those of ``named_parameters()`` and ``named_buffers()``: a tensor that two modules
    share appears once, under its first name.
    """
    named = _modules_by_prefix(module)
    return _registered(named, "_parameters") | _registered(named, "_buffers")


def constant_buffers(module: nn.Module) -> set[str]:
    """Return the names of the buffers that are no part of the module's ``state_dict``: constants,
    such as a table of rotary positions."""
    return {
        prefix + name
        for prefix, owner in _modules_by_prefix(module).items()
        for name in owner._non_persistent_buffers_set
    }


def moving_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return copies, by name, of the buffers that a forward pass may move."""
    still = constant_buffers(module)
    return {name: b.clone() for name, b in module.named_buffers() if name not in still}


def apart_from(module: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors without gradients, copies of those that share memory with a module's."""
    own = tensors_of(module).values() if tensors else ()
    live = {tensor.untyped_storage().data_ptr() for tensor in own}
    detached = {name: tensor.detach() for name, tensor in tensors.items()}
    return {
        name: tensor.clone() if tensor.untyped_storage().data_ptr() in live else tensor
        for name, tensor in detached.items()
    }


class UnsentBuffers:
    """The buffers of a module's parts that no message has, as they are now: integers, such as
    BatchNorm's counter, and those that are not in the ``state_dict``. Each client starts with
    them, and with metrics that have counted nothing."""

    def __init__(self, module: nn.Module) -> None:
        self.start: list[tuple[nn.Module, str, Tensor | None]] = []
        for owner in modules_of(module)[1:]:
            for name, buffer in owner._buffers.items():
                outside = name in owner._non_persistent_buffers_set
                if buffer is None or outside or not buffer.is_floating_point():
                    self.start.append((owner, name, None if buffer is None else buffer.clone()))
        self.metrics = [*parts_of(module).values()]
        self._seen = [
            (one._buffers[name], _version(one._buffers[name])) for one, name, _ in self.start
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Set those again that have been written to, or replaced, since; small ones in any case."""
        for metric in self.metrics:
            clear(metric)
        for at, (owner, name, start) in enumerate(self.start):
            buffer, (seen, version) = owner._buffers.get(name), self._seen[at]
            if start is None or buffer is None or seen is not buffer or buffer.is_inference():
                # somebody may hold on to the one that is there now
                owner._buffers[name] = buffer = None if start is None else start.clone()
            elif version != buffer._version or buffer.numel() <= SMALL:
                buffer.copy_(start)
            self._seen[at] = buffer, _version(buffer)


def _version(tensor: Tensor | None) -> int:
    return -1 if tensor is None or tensor.is_inference() else tensor._version


def sha256_of_parameters(module: nn.Module, without: Collection[str]) -> str:
    """Return the SHA-256 of the names and bytes of a module's parameters but some; empty if none is
    left."""
    digest, some = sha256(), False
    for name, parameter in module.named_parameters():
        if name not in without:
            digest.update(name.encode())
            digest.update(raw_bytes(parameter.detach().cpu().contiguous()).numpy().data)
            some = True
    return digest.hexdigest() if some else ""


def _registered(named: dict[str, nn.Module], kind: str) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for prefix, owner in named.items():
        for name, tensor in vars(owner)[kind].items():
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                found[prefix + name] = tensor
    return found


def _modules_by_prefix(module: nn.Module) -> dict[str, nn.Module]:
    """Return each module once, by the prefix of the names of its tensors."""
    found: dict[str, nn.Module] = {}
    seen: set[int] = set()

    def visit(module: nn.Module, prefix: str) -> None:
        seen.add(id(module))
        found[prefix] = module
        for name, child in vars(module)["_modules"].items():
            if child is not None and id(child) not in seen:
                visit(child, f"{prefix}{name}.")

    visit(module, "")
    return found
