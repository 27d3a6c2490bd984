"""What a node removes of runs of long ago: their configurations, and what its clients kept in them.

Time is counted up to the node's last use and not up to now: a node that was switched off for a
month has lost nothing, and the run that was used last always stays. What was unmasked of secure
sums, and the noisy sums of private runs, stay too: a second sum is refused or counted by them.
"""

from __future__ import annotations

import logging
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from fl_lightning.deploy.node.states import RUN_ID

log = logging.getLogger("fl_lightning")
CONFIG = re.compile(r"[0-9a-f]{64}(\.own)?\.yaml")
DAY_SECONDS = 86_400.0


def clean(folder: Path, keep_days: float) -> list[Path]:
    """Remove what has not been used in the last days of a node, and return it. No link is followed.

    Args:
        folder: the node's, which no other process uses.
        keep_days: days before the last use that are kept; 0: everything is.
    """
    found = {path: _last_use(path) for path in _runs(folder)}
    if not keep_days or not found:
        return []
    oldest = min(max(found.values()), time.time()) - keep_days * DAY_SECONDS
    removed = []
    for path in sorted(path for path, used in found.items() if used < oldest):
        with suppress(OSError):  # it stays until the next start
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            removed.append(path)
    if removed:
        states = sum(path.parent.name == "states" for path in removed)
        log.info(
            "removed the states of %d runs and %d configurations that were not used for %g days: %s",
            states,
            len(removed) - states,
            keep_days,
            ", ".join(f"{path.parent.name}/{path.name[:12]}" for path in removed),
        )
    return removed


def _runs(folder: Path) -> Iterator[Path]:
    """Yield the folders of states and the files of configurations, by the names that a node gives
    them."""
    for name in ("states", "configs"):
        if (folder / name).is_symlink() or not (folder / name).is_dir():
            continue
        for path in (folder / name).iterdir():
            state = name == "states" and path.is_dir() and RUN_ID.fullmatch(path.name)
            config = name == "configs" and path.is_file() and CONFIG.fullmatch(path.name)
            if not path.is_symlink() and (state or config):
                yield path


def _last_use(path: Path) -> float:
    """Return the time of the last change of a file, or of anything in a folder, in seconds since
    1970."""
    times = [path.lstat().st_mtime]
    for inner in path.rglob("*") if path.is_dir() else ():
        with suppress(OSError):
            times.append(inner.lstat().st_mtime)
    return max(times)
