"""A live display that stays whole when the terminal changes its width or the user presses
Ctrl-C, and how durations are shown."""

from __future__ import annotations

from datetime import timedelta

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderableType, RenderResult
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType, Segment

# left free for the "^C" that a terminal writes, which would otherwise begin a new row
ECHO_COLUMNS = 3


class ResizableLive(Live):
    """A ``rich.live.Live`` that also removes the extra rows which a narrower terminal makes.

    A terminal that becomes narrower breaks each line of the display into several rows. Rich would
    move up by as many rows as there were lines, and leave the other rows on the screen.
    """

    max_width = 500  # columns
    widths: tuple[int, ...] = ()
    """The width of each line on the screen, in columns."""

    def get_renderable(self) -> RenderableType:
        return _MeasuringRenderable(super().get_renderable(), self)

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        broken = sum(max(width - 1, 0) // self.console.width for width in self.widths)
        processed = super().process_renderables(renderables)
        if broken and self.console.is_interactive:
            processed.insert(
                0, Control(*((ControlType.ERASE_IN_LINE, 2), (ControlType.CURSOR_UP, 1)) * broken)
            )
        return processed


class _MeasuringRenderable:
    """A renderable that tells the display how wide its lines are."""

    def __init__(self, renderable: RenderableType, live: ResizableLive) -> None:
        self.renderable, self.live = renderable, live

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        narrower = options.update_width(
            max(min(options.max_width, self.live.max_width) - ECHO_COLUMNS, 1)
        )
        lines = [
            _without_blanks(line)
            for line in console.render_lines(self.renderable, narrower, pad=False)
        ]
        self.live.widths = tuple(Segment.get_line_length(line) for line in lines)
        for line in lines:
            yield from line
            yield Segment.line()


def _without_blanks(line: list[Segment]) -> list[Segment]:
    """Return a line without the spaces at its end, which some terminals break onto another row."""
    while line and not line[-1].text.strip():
        line = line[:-1]
    return [*line[:-1], Segment(line[-1].text.rstrip(), line[-1].style)] if line else []


def clock(seconds: float) -> str:
    """Return a duration as hours, minutes and seconds.

    >>> clock(3725.4)
    '1:02:05'
    """
    return str(timedelta(seconds=round(seconds)))
