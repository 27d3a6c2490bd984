"""How a bug is told from bad input: by whose code was at work."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

_PACKAGE = Path(__file__).parent
_OURS = (_PACKAGE, _PACKAGE.parent / "callbacks")
_LIBRARIES = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def is_from_user_code(error: BaseException) -> bool:
    """Whether code that is neither this project's nor an installed library's was at work when ``error`` was raised.

    Frames above the project's first one do not count: a script that calls the trainer is not what failed.
    """
    files = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    ours = [_is_in(file, _OURS) for file in files]
    called = files[ours.index(True) :] if True in ours else files
    return any(file.suffix == ".py" and not _is_in(file, _OURS) and not _is_in(file, _LIBRARIES) for file in called)


def _is_in(file: Path, folders: tuple[Path, ...]) -> bool:
    return any(file.is_relative_to(folder) for folder in folders)
