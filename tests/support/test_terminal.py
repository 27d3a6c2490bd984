"""The live display on a terminal that changes: the sequences that rich writes, counted."""

from __future__ import annotations

from io import StringIO

from rich.console import Console
from rich.text import Text

from callbacks import ProgressBar
from fl_lightning.support.terminal import ResizableLive


def display(width: int, *lines: int) -> tuple[Console, StringIO, ResizableLive]:
    """A terminal and a display of lines of so many columns, drawn once."""
    screen = StringIO()
    console = Console(
        file=screen,
        force_terminal=True,
        width=width,
        height=30,
        legacy_windows=False,
        color_system=None,
    )
    live = ResizableLive(
        Text("\n".join("x" * length for length in lines)), console=console, auto_refresh=False
    )
    live.start(refresh=True)
    screen.truncate(0)
    return console, screen, live


def ups(screen: StringIO) -> int:
    """Rows that the cursor is moved up."""
    count = screen.getvalue().count("\x1b[1A")
    screen.truncate(0)
    return count


def test_a_narrower_terminal_leaves_no_row_behind() -> None:
    console, screen, live = display(100, 90, 30)
    live.refresh()
    assert ups(screen) == 1
    console.width = 40  # the first line is three rows now, the second one
    live.refresh()
    assert ups(screen) == 3
    live.refresh()  # drawn for 40 columns: 90 characters in rows of 37, and 30
    assert ups(screen) == 3
    console.width = 100
    live.refresh()
    assert ups(screen) == 3
    live.refresh()
    assert ups(screen) == 1
    live.stop()


def test_there_is_room_for_what_a_terminal_echoes() -> None:
    _, _, live = display(20, 60)
    live.refresh()
    assert max(live.widths) == 17
    live.stop()


def test_the_progress_bar_is_not_wider_than_a_small_terminal(monkeypatch) -> None:
    bar = ProgressBar()
    screen = StringIO()
    console = Console(file=screen, force_terminal=True, width=200, height=30, color_system=None)
    monkeypatch.setattr("callbacks.meters.progress_bar.Console", lambda stderr: console)
    bar._max_rounds = bar._expected = 100
    bar._start()
    assert bar._live is not None
    bar._live.refresh()
    assert 40 < max(bar._live.widths) < 80
    bar._stop()
