"""The base class of the meters that draw one figure at the end of a run and, if asked, between
rounds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import deepcopy
from typing import TYPE_CHECKING, Any, ClassVar

from callbacks.figures.drawing import Every, draw, log
from fl_lightning.config.recorded import arguments_of
from fl_lightning.errors import require
from fl_lightning.hooks import Context, Meter, RoundRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class FigureMeter(Meter, ABC):
    """Draws ``figures/<name>`` at the end of a run, and between rounds if asked
    (``<name>_round_0010``).

    A subclass sets ``name`` and ``figure``. One that does not suit every run overrides
    ``applies_to`` and says why in ``rule`` and ``instead``; where it does not apply, it logs a
    warning and draws nothing.

    Args:
        every: rounds between figures; 0: only at the end.
    """

    name: ClassVar[str]
    """The figure's file name, without a suffix."""

    rule: ClassVar[str] = ""
    """What a run must have for the figure to apply, as the warning says it."""

    instead: ClassVar[str] = ""
    """What to write instead, as the warning says it."""

    empty: ClassVar[dict[str, Any]] = {}
    """The value of ``seen`` before the first round."""

    def __init__(self, every: Every = 0) -> None:
        self.every = every
        self.applies = True
        self.seen: dict[str, Any] = deepcopy(self.empty)
        """What the figure shows of past rounds, as JSON. Checkpoints keep it."""

    @abstractmethod
    def figure(self, context: Context) -> Figure:
        """Draw what is known after the last round that was done.

        Raises:
            ValueError: there is nothing to draw; the log says so and the run goes on.
        """

    def applies_to(self, context: Context) -> bool:
        """Return whether the run has what the figure shows."""
        return True

    def on_check(self, context: Context) -> None:
        own = [each for each in context.callbacks if isinstance(each, FigureMeter)]
        alike = {each._drawing: type(each).__name__ for each in own if each.name == self.name}
        rule = f"both draw figures/{self.name}"
        instead = "leave one out, or give it another name"
        require(len(alike) <= 1, " and ".join(sorted(alike.values())), rule, instead)
        self.seen = deepcopy(self.empty)
        self.applies = self.applies_to(context)
        if not self.applies:
            names = type(self).__name__, type(context.method).__name__
            log.warning("%s with %s; %s; %s", *names, self.rule, self.instead)

    @property
    def _drawing(self) -> str:
        """The class and its arguments, without how often it draws."""
        return repr((type(self), arguments_of(self) | {"every": 0}))

    def on_round_end(self, record: RoundRecord, context: Context) -> None:
        if self.applies and self.every and record.round % self.every == 0:
            draw(context, self.name, lambda: self.figure(context), record.round)

    def on_fit_end(self, summary: dict[str, float], context: Context) -> None:
        if self.applies:
            draw(context, self.name, lambda: self.figure(context))

    def state_dict(self) -> dict[str, Any]:
        return deepcopy(self.seen)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = deepcopy(self.empty) | state  # a release of before kept less
