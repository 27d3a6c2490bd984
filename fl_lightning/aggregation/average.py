"""What an average is: the rule by which the vectors of a cohort become one.

``[K, P]`` is K clients, P values; p_k = n_k / sum n, as the clients report n_k.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from fl_lightning.config.recorded import Recorded
from fl_lightning.errors import MisuseError
from fl_lightning.support.hook_forms import form_of


class NoAverageError(Exception):
    """The uploads of a round have no average of the kind that was asked for; the round changes
    nothing."""


class Average(Recorded, ABC):
    """K vectors into one, by them and its arguments alone: it keeps nothing from round to round."""

    settings_shown = ("{cls}({name}={value})", "{name}: {value}")

    is_sum: bool = False
    """Whether it is the weighted mean of what :meth:`bounded` makes of each vector by itself; if not,
    vectors can be neither masked nor added up elsewhere."""
    fewest: int = 1  # uploads that a round needs

    guide: Literal["", "last_update", "root_update"] = ""
    """The update that it goes by beside those of the clients: the last one that it made, or the one
    that the server makes in ``root_steps`` steps on its root set."""
    root_steps: int = 0

    def __init_subclass__(cls, **settings: Any) -> None:
        """A rule of its own is no weighted mean, unless its class says so."""
        super().__init_subclass__(**settings)
        rules, says = (
            [base for base in cls.__mro__ if name in vars(base)] for name in ("__call__", "is_sum")
        )
        if cls.__mro__.index(rules[0]) < cls.__mro__.index(says[0]):
            cls.is_sum = False

    def bounded(self, vector: Tensor, start: Tensor) -> Tensor:
        """Return what enters the mean for one client's vector, ``[P]``."""
        return vector

    def of(
        self,
        vectors: Sequence[Tensor],
        shares: Sequence[float],
        start: Tensor,
        guide: Tensor | None = None,
    ) -> Tensor:
        """Return the average, as :meth:`__call__` does, where there are enough vectors.

        Args:
            vectors, shares, start: as there.
            guide: the update that a guided average goes by, if it has one.

        Raises:
            NoAverageError: they have none, or are fewer than ``fewest``.
            MisuseError: as :meth:`checked` says.
        """
        if len(vectors) < self.fewest:
            raise NoAverageError(
                f"{len(vectors)} uploads are too few for {type(self).__name__}, which needs "
                f"{self.fewest}"
            )
        if guide is not None and isinstance(self, GuidedAverage):
            return self.checked(self.guided(vectors, shares, start, guide), start)
        return self.checked(self(vectors, shares, start), start)

    def checked(self, found: Any, start: Tensor) -> Tensor:
        """Return an average of its own.

        Raises:
            MisuseError: it is no vector of finite numbers of the shape of ``start``.
        """
        is_vector = isinstance(found, Tensor) and found.is_floating_point()
        if is_vector and found.shape == start.shape and bool(found.isfinite().all()):
            return found
        raise MisuseError(
            f"{type(self).__name__}, which gave {form_of(found)}",
            f"an average is float32 {[*start.shape]}, as the vectors are, and finite",
            "return one, or raise NoAverageError",
        )

    @abstractmethod
    def __call__(self, vectors: Sequence[Tensor], shares: Sequence[float], start: Tensor) -> Tensor:
        """Return the average, float32 ``[P]``.

        Args:
            vectors: what each client ended with, float32 ``[P]``, in cohort order.
            shares: p_k, adding up to 1.
            start: what the round started from, float32 ``[P]``.

        Raises:
            NoAverageError: they have none.
        """


class GuidedAverage(Average):
    """One that goes by an update of the server's beside those of the clients, as ``guide`` says."""

    def __call__(self, vectors: Sequence[Tensor], shares: Sequence[float], start: Tensor) -> Tensor:
        return self.guided(vectors, shares, start, torch.zeros_like(start))

    @abstractmethod
    def guided(
        self, vectors: Sequence[Tensor], shares: Sequence[float], start: Tensor, guide: Tensor
    ) -> Tensor:
        """Return the average, as :meth:`__call__` does.

        Args:
            vectors, shares, start: as there.
            guide: the update, float32 ``[P]``; of a first round there is none, which is zeros.
        """
