"""What the data of one run have in common, wherever they lie."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fl_lightning.errors import InputError, require


@dataclass(frozen=True)
class Form:
    """What the data of one run have in common.

    Args:
        classes: names of the classes 0, 1, ...; empty where there are none, or where numbers name
            them.
        moments: mean and standard deviation of each channel by which images are normalised, 2 x C;
            empty where inputs are taken as they are.
        columns: of a table, by the name of each column that is learnt from or learnt: the mean and
            standard deviation of numbers, the categories in order, or the encoding of text as
            :mod:`fl_lightning.data.table_values` fits it. Where missing values are filled in,
            ``column`` is one of these and ``fill`` what takes the place of a missing value.
    """

    classes: Sequence[Any] = ()
    moments: Sequence[Sequence[float]] = ()
    columns: Mapping[str, Any] = field(default_factory=dict)

    def numbers(self, names: Iterable[Any], place: str) -> dict[Any, int]:
        """Return the number of each class of the run.

        Args:
            names: classes that data of a node have.

        Raises:
            InputError: the run lacks one of them, or its data name none.
        """
        require(
            self.classes,
            place,
            "the run's data name no classes, and these have some",
            "start the run with data that name them, such as --data ImageFolder",
        )
        numbers = {name: number for number, name in enumerate(self.classes)}
        for name in names:
            if name not in numbers:
                some = ", ".join(map(str, self.classes[:10])) + (
                    " ..." if len(self.classes) > 10 else ""
                )
                raise InputError(
                    place,
                    f"its class {name} is none of the run's: {some}",
                    "leave it out, or rename it",
                )
        return numbers
