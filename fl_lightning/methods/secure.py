"""Which methods can have their sums made secure, and the one vector of integers that a client masks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fl_lightning import methods
from fl_lightning.errors import InputError, MisuseError
from fl_lightning.methods.averaging import Average
from fl_lightning.methods.base import Method
from fl_lightning.methods.summing import SummingServer
from fl_lightning.methods.sums import Addend, Sums, integers_of
from fl_lightning.privacy import ExactSum
from fl_lightning.privacy.secure.settings import SecureSum, require_extra
from fl_lightning.support.overriding import overrides


@dataclass(frozen=True)
class SumForm:
    """What everybody knows of the vectors that are added: the sums in order, with size and unit of each.

    Args:
        parts: name, number of values and largest weight of each sum, in order of name.
    """

    parts: tuple[tuple[str, int, int], ...] = ()

    @classmethod
    def of(cls, addends: Mapping[str, Addend]) -> SumForm:
        """Return the form of one client's addends, which is that of all clients."""
        return cls(tuple((name, len(addend.values), addend.most) for name, addend in sorted(addends.items())))

    @classmethod
    def from_json(cls, parts: Iterable[Sequence[Any]]) -> SumForm:
        """Return the form that somebody else named.

        Raises:
            TypeError, ValueError: it is none.
        """
        found = tuple((str(name), int(size), int(most)) for name, size, most in parts)
        if any(size < 0 or most < 1 for _, size, most in found):
            raise ValueError(f"no vector has the form {found}")
        return cls(found)

    @property
    def length(self) -> int:
        """Integers of a vector: those of all sums, and one weight for each sum."""
        return sum(size for _, size, _ in self.parts) + len(self.parts)

    def vector(self, addends: Mapping[str, Addend], average: Average, cohort: int) -> Tensor:
        """Return what one client adds to all sums and to their total weights, int64 ``[length]``.

        Raises:
            MisuseError: the addends have another form.
        """
        if SumForm.of(addends) != self:
            raise MisuseError(
                f"addends {SumForm.of(addends).parts} where others have {self.parts}",
                "masked vectors are added value by value, so all clients send one form",
                "give the same names, sizes and largest weights, or set secure_refused",
            )
        integers = integers_of(addends, average, cohort)
        weights = torch.tensor([addends[name].weight for name, *_ in self.parts])
        return torch.cat([*(integers[name] for name, *_ in self.parts), weights])

    def sums(self, total: Tensor, average: Average, cohort: int) -> Sums:
        """Return the server's sums of the clients' vectors added up, int64 ``[length]``."""
        sums = Sums(average, cohort)
        pieces = total.split([*(size for _, size, _ in self.parts), len(self.parts)])
        for (name, size, most), integers, weight in zip(
            self.parts, pieces, pieces[-1].tolist(), strict=False
        ):
            exact = ExactSum(size, cohort)
            exact.integers = integers
            sums.add_merged(name, exact, weight, most)
        return sums


def check_secure_sum(settings: SecureSum, method: Method, cohort: int) -> None:
    """Refuse a secure sum where the server needs more than a sum.

    Args:
        settings: of the secure sum.
        method: after ``build``.
        cohort: clients that are sampled in a round.

    Raises:
        InputError: it needs single uploads or single n_k, a round has too few clients, or packages are
            missing.
    """
    require_extra()
    settings.check_cohort(cohort)
    name, average = type(method).__name__, type(method.average).__name__
    if reason := refusal(method):
        others = ", ".join(secure_methods())
        raise InputError(
            f"--trainer.secure_sum with --model {name}", reason, f"leave it out, or take one of {others}"
        )
    if not method.average.is_sum:
        raise InputError(
            f"--trainer.secure_sum with --model.average {average}",
            "it orders the clients' single vectors, and the server gets their sum alone",
            "write --model.average WeightedMean, or NormClipping, which clients do by themselves",
        )
    if overrides(method.average, Average, "bounded") and getattr(method, "download", "full") != "full":
        raise InputError(
            f"--trainer.secure_sum with --model.average {average} and --model.download {method.download}",
            "clients bound their own update, and do not know the exact weights that it starts from",
            "write --model.download full, or --model.average WeightedMean",
        )
    if method.max_share < 1:
        raise InputError(
            f"--trainer.secure_sum with --model.max_share {method.max_share}",
            "a client's share depends on everybody's n_k, and nobody knows another client's",
            "write --model.max_share 1, or leave secure_sum out",
        )


def refusal(method: Method | type[Method]) -> str:
    """Return why the sums of a method cannot be secure; empty where they can."""
    if method.secure_refused:
        return method.secure_refused
    kind = method if isinstance(method, type) else type(method)
    single = [
        hook
        for hook in ("aggregate", "add_up", "bounded_weights")
        if getattr(kind, hook) is not getattr(SummingServer, hook)
        or (not isinstance(method, type) and overrides(method, SummingServer, hook))
    ]
    return f"its {single[0]} reads single uploads, and the server gets their sum alone" if single else ""


def secure_methods() -> list[str]:
    """Return the names of the package's methods whose sums can be secure."""
    found = {name: getattr(methods, name) for name in methods.__all__}
    return [
        name
        for name, kind in found.items()
        if isinstance(kind, type) and issubclass(kind, Method) and kind is not Method and not refusal(kind)
    ]
