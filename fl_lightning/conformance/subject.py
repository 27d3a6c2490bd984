"""A method under test, and what is known of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fl_lightning.conformance.expectations import Averages, Expectation
from fl_lightning.conformance.references import Sent
from fl_lightning.methods import Method
from fl_lightning.wire import Payload

Formula = Callable[[Method, Payload], int]


@dataclass(frozen=True)
class Subject:
    """A method under test, and what is known of it.

    Args:
        make: a new instance; keywords override its settings.
        noise: largest deviation that rounding of uploads may cause on weights of size 5.
        expects: where it is known to go on the quadratic.
        neutral: settings under which it equals FedAvg bit for bit; null: not known.
        on_points: settings that it needs to be built on the quadratic.
        sent: what clients are sent, by a formula that shares no code with it; null: not known.
        up, down: bytes of one upload and of one broadcast by a hand formula; null: not known.
    """

    make: Callable[..., Method]
    noise: float = 1e-4
    expects: Expectation = field(default_factory=Averages)
    neutral: dict[str, Any] | None = None
    on_points: Mapping[str, Any] = field(default_factory=dict)
    sent: Sent | None = None
    up: Formula | None = None
    down: Formula | None = None
