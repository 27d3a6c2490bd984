"""The noisy sums that a run has begun, on the disk: what takes the run back takes none of them
back."""

from __future__ import annotations

from pathlib import Path

from fl_lightning.support import disk

HEADER = "sum,round"


class NoisySums:
    """A file with one line for each noisy sum, written before its noise is drawn.

    A line has the number of the sum, counted from 1, and the round that it is of. A round that is
    repeated with other noise is another look at its clients, so it has another line.

    Args:
        path: the file; it is made with the first line.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def count(self) -> int:
        """The sums that were begun: the largest number, or the number of lines where that is
        larger, so that neither a lost line nor a damaged one makes it smaller."""
        if not self.path.exists():
            return 0
        lines = self.path.read_text(encoding="ascii", errors="replace").splitlines()
        lines = [line for line in lines if line != HEADER]
        cells = (line.partition(",")[0] for line in lines)
        return max(
            [len(lines), *(int(cell) for cell in cells if cell.isdecimal() and len(cell) < 10)]
        )

    def add(self, number: int, round: int) -> None:
        """Write the line of a sum, and wait until it is on the disk.

        Raises:
            OSError: it cannot be written.
        """
        if not self.path.exists():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            disk.sync_folder(self.path.parent.parent)
            disk.append_line(self.path, HEADER)
        disk.append_line(self.path, f"{number},{round}")
