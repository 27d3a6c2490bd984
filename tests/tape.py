"""A CUDA graph on a CPU: the operations of one run, and these operations again on the same memory.

Like a capture it sees nothing but operations on tensors: Python runs once, a value that is read on the host
is refused, results land where they landed in the recorded run.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


class Tape(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = operation(*args, **kwargs)
        if operation.namespace == "profiler":
            return out
        if any(isinstance(leaf, (bool, int, float)) for leaf in tree_leaves(out)):
            raise RuntimeError(f"{operation} waits for the device")
        given = {
            leaf.untyped_storage().data_ptr()
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, Tensor)
        }
        results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        views = (
            bool(results) and all(r.untyped_storage().data_ptr() in given for r in results) and bool(given)
        )
        if operation._schema.is_mutable or not views:
            # detached: what is kept must not hold on to the autograd graph
            held = tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, (args, kwargs))
            self.operations.append(
                (operation, *held, [] if operation._schema.is_mutable else [r.detach() for r in results])
            )
        return out

    @torch.no_grad()
    def play(self):
        for operation, args, kwargs, results in self.operations:
            again = [leaf for leaf in tree_leaves(operation(*args, **kwargs)) if isinstance(leaf, Tensor)]
            for result, value in zip(results, again, strict=False):
                result.copy_(value)


class Tapes:
    """The recorder; ``played`` counts."""

    def __init__(self):
        self.recorded = self.played = 0

    def refuses(self, optimizer):
        return ""

    def forget(self):
        pass

    def record(self, work, pool=None):
        work()
        tape = Tape()
        with tape:
            work()
        self.recorded += 1

        def play():
            self.played += 1
            tape.play()

        return play, "pool"
