"""What a notebook shows of a run: a display that redraws itself, tables, and figures inline."""

from __future__ import annotations

import time
from base64 import b64encode
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

import yaml
from rich.console import RenderableType
from rich.jupyter import JupyterMixin


class KernelDisplay(JupyterMixin):
    """A live display in the output of a notebook's cell.

    It is redrawn by the messages of Jupyter itself. ``rich.live.Live`` would need ipywidgets, whose
    outputs are lost where a notebook is saved or converted.

    Args:
        renderable: what is shown, drawn anew each time.
        refresh_per_second: how often it is redrawn at most.
    """

    def __init__(self, renderable: RenderableType, refresh_per_second: float) -> None:
        self.renderable, self.interval = renderable, 1 / refresh_per_second
        self._handle: Any = None
        self._drawn = 0.0  # on the clock of time.monotonic

    def __rich__(self) -> RenderableType:
        return self.renderable

    def start(self) -> None:
        """Show it in the output of the cell that runs."""
        from IPython.display import display  # a kernel has it

        self._handle = display(self, display_id=True)
        self._drawn = time.monotonic()

    def refresh(self, *, at_once: bool = False) -> None:
        """Draw it again, if the last time is long enough ago.

        Args:
            at_once: however long ago that is.
        """
        if self._handle is not None and (
            at_once or time.monotonic() >= self._drawn + self.interval
        ):
            self._handle.update(self)
            self._drawn = time.monotonic()

    def stop(self) -> None:
        """Draw it for the last time."""
        self.refresh(at_once=True)
        self._handle = None


class Results(dict[str, float]):
    """Metrics by name, which a notebook shows as a table."""

    def _repr_html_(self) -> str:
        return table((name, f"{value:.6g}") for name, value in self.items())


yaml.SafeDumper.add_representer(Results, yaml.representer.SafeRepresenter.represent_dict)


class Picture:
    """A figure of a run, which a notebook shows inline.

    Args:
        path: a PNG file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def __repr__(self) -> str:
        return f"Picture({str(self.path)!r})"

    def _repr_png_(self) -> bytes:
        return self.path.read_bytes()


class Pictures(Mapping[str, Picture]):
    """The figures of a run by name, which a notebook shows inline below each other.

    Args:
        folder: of the PNG files; None: there are none.
    """

    def __init__(self, folder: Path | None) -> None:
        found = [] if folder is None else sorted(folder.glob("*.png"))
        self._found = {path.stem: Picture(path) for path in found}

    def __getitem__(self, name: str) -> Picture:
        return self._found[name]

    def __iter__(self) -> Any:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def __repr__(self) -> str:
        return f"Pictures({', '.join(self) or 'none'})"

    def _repr_html_(self) -> str:
        return "".join(
            f'<figure><img alt="{escape(name)}" style="max-width:100%" '
            f'src="data:image/png;base64,{b64encode(picture._repr_png_()).decode()}"/>'
            f"<figcaption>{escape(name)}</figcaption></figure>"
            for name, picture in self.items()
        )


def table(rows: Iterable[tuple[str, str]], title: str = "") -> str:
    """Return an HTML table of names and values, below a title."""
    cells = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows
    )
    return f"<table>{f'<caption>{escape(title)}</caption>' if title else ''}{cells}</table>"
