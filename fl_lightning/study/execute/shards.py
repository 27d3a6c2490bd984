"""Which cells of a study one of several machines runs: ``sweep --shard 3/8``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256

from fl_lightning.errors import require
from fl_lightning.study.plan.study import Cell


@dataclass(frozen=True)
class Shard:
    """One of several equal parts of a study.

    Args:
        number: which part, counted from 1.
        count: the number of parts; 1: the whole study.
    """

    number: int = 1
    count: int = 1

    @classmethod
    def read(cls, text: str) -> Shard:
        """Read a shard as the flag has it.

        Raises:
            InputError: it is not two whole numbers of which the first is in 1 to the second.

        >>> str(Shard.read("3/8"))
        '3/8'
        """
        found = re.fullmatch(r"0*([1-9][0-9]{0,5})/0*([1-9][0-9]{0,5})", text.strip())
        rule = "it is which shard, counted from 1, and of how many"
        require(
            found and int(found[1]) <= int(found[2]), f"--shard {text}", rule, "write --shard 1/8"
        )
        assert found is not None
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @property
    def is_whole(self) -> bool:
        return self.count == 1

    def names(self, cells: Iterable[Cell]) -> set[str]:
        """Return the names of the cells that fall to this shard.

        The cells of one seed are dealt in the order of the hashes of their names, and the next seed
        begins where this one ends. So the shards of consecutive seeds differ by one cell at most,
        methods are mixed, and a cell keeps its shard whatever the order of the file, whatever is
        finished, and whatever seeds are added.
        """
        of_seed: dict[int, list[Cell]] = {}
        for cell in cells:
            of_seed.setdefault(cell.seed, []).append(cell)
        return {
            cell.name
            for seed, several in of_seed.items()
            for place, cell in enumerate(sorted(several, key=_hash))
            if (seed * len(several) + place) % self.count == self.number - 1
        }


WHOLE = Shard()
"""The only shard of a sweep on one machine."""


def _hash(cell: Cell) -> str:
    return sha256(cell.name.encode()).hexdigest()
