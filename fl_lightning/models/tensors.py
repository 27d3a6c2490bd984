"""The modules and tensors of a module: what torch's own iterators give, without their price.

A client's round reads and writes them several times; for a small network the general iterators then take
longer than training it.
"""

from __future__ import annotations

from torch import Tensor, nn


def modules_of(module: nn.Module) -> list[nn.Module]:
    """As ``module.modules()``."""
    return list(_named(module).values())


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """As ``named_parameters()`` and then ``named_buffers()``: one that two modules share appears once, under
    its first name."""
    named = _named(module)
    return _registered(named, "_parameters") | _registered(named, "_buffers")


def _registered(named: dict[str, nn.Module], kind: str) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for prefix, owner in named.items():
        for name, tensor in vars(owner)[kind].items():
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                found[prefix + name] = tensor
    return found


def _named(module: nn.Module) -> dict[str, nn.Module]:
    """Each module once, by the start of the names of its tensors."""
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
