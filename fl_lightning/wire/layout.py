"""Named tensors as one vector. Both sides know the layout, so names and shapes need not be sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from fl_lightning.models.tensors import constant_buffers, tensors_of
from fl_lightning.wire.payload import PayloadError


class Layout:
    """The order, shapes and offsets of named tensors in a vector of ``size`` values.

    Vectors are computed with in float32. Where all tensors are bfloat16, so is the vector that
    travels (``dtype``).

    >>> layout = Layout({"a": torch.zeros(2, 2), "b": torch.zeros(3)})
    >>> vector = layout.pack({"a": torch.ones(2, 2), "b": torch.zeros(3)})
    >>> vector.tolist(), layout.unpack(vector)["a"].shape
    ([1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0], torch.Size([2, 2]))
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.shapes = {name: tensor.shape for name, tensor in tensors.items()}
        self.sizes = [shape.numel() for shape in self.shapes.values()]
        self.size = sum(self.sizes)
        narrow = bool(tensors) and all(
            tensor.dtype == torch.bfloat16 for tensor in tensors.values()
        )
        self.dtype = torch.bfloat16 if narrow else torch.float32

    @classmethod
    def of(cls, module: nn.Module, include: Callable[[str], bool] = lambda name: True) -> Layout:
        """Return the layout of a module: its trainable parameters, then its float buffers.

        Float buffers are the statistics of BatchNorm, without its counter. A buffer that is not
        part of the module's ``state_dict`` is a constant, such as a table of rotary positions, and
        never travels.

        Args:
            module: the module.
            include: returns whether the tensor of this name belongs to the layout.
        """
        trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
        constants = constant_buffers(module)
        statistics = {
            name: b
            for name, b in module.named_buffers()
            if b.is_floating_point() and name not in constants
        }
        return cls(
            {name: tensor for name, tensor in (trainable | statistics).items() if include(name)}
        )

    def read(self, module: nn.Module) -> Tensor:
        """Return a copy of the module's values, float32 ``[size]`` on the CPU."""
        return self.pack(tensors_of(module))

    def write(self, module: nn.Module, vector: Tensor) -> None:
        """Set the module's values in place, on its device, from ``vector`` ``[size]``.

        Raises:
            PayloadError: the vector has another shape.
        """
        tensors = tensors_of(module)
        own = [tensors[name] for name in self.shapes]
        values = self.unpack(vector.to(own[0].device) if own else vector)
        with torch.no_grad():
            for tensor, value in zip(own, values.values(), strict=True):
                tensor.copy_(value)

    def pack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return a copy of the named tensors as one contiguous vector, float32 ``[size]`` on the
        CPU."""
        own = [tensors[name].detach() for name in self.shapes]
        if all(tensor.is_contiguous() for tensor in own) or not all(
            tensor.is_cpu for tensor in own
        ):
            flat = [tensor.reshape(-1) for tensor in own]
            return torch.cat(flat).to("cpu", torch.float32) if flat else torch.empty(0)
        vector = torch.empty(self.size, dtype=torch.float32, device="cpu")
        # what is channels last is copied once, and not put in order before
        for place, tensor in zip(self.unpack(vector).values(), own, strict=True):
            place.copy_(tensor.view(place.shape))
        return vector

    def to_wire(self, vector: Tensor) -> Tensor:
        """Return a vector ``[size]`` as it travels, in ``dtype``: what :meth:`read` gave is exact
        in it, and an average is rounded once."""
        return vector.to(self.dtype)

    def pack_rows(self, tensors: Mapping[str, Tensor], count: int) -> Tensor:
        """Return the result of :meth:`pack` for ``count`` modules at once, float32 ``[count,
        size]``.

        Args:
            tensors: stacked tensors ``[count, *shape]`` by name.
            count: number of modules.
        """
        flat = [tensors[name].detach().reshape(count, -1) for name in self.shapes]
        return torch.cat(flat, dim=1).to("cpu", torch.float32) if flat else torch.empty(count, 0)

    def check(self, vector: Tensor) -> None:
        """Check the shape of a vector.

        Raises:
            PayloadError: the shape is not ``[size]``.
        """
        if vector.shape != (self.size,):
            raise PayloadError(
                f"values of shape {tuple(vector.shape)}",
                f"this model has [{self.size}]",
                "use one network on both sides",
            )

    def unpack(self, vector: Tensor) -> dict[str, Tensor]:
        """Return views into ``vector`` (``[size]``) by name.

        Raises:
            PayloadError: the vector has another shape.
        """
        self.check(vector)
        pieces = torch.split_with_sizes(vector, self.sizes)
        return {
            name: piece.view(shape)
            for piece, (name, shape) in zip(pieces, self.shapes.items(), strict=True)
        }
