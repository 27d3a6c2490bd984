"""How a bug is told from bad input: by whose code was at work."""

from __future__ import annotations

import sysconfig
import traceback
from dis import opname
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
_OURS = (_PACKAGE, _PACKAGE.parent / "callbacks")
_LIBRARIES = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def is_bug_of_user(error: BaseException) -> bool:
    """Whether ``error`` came out of code that is neither this project's nor an installed library's, without
    being raised by it.

    What such code raises with ``raise`` is its own word on what it was given. Frames above the project's
    first one do not count: a script that calls the trainer is not what failed.
    """
    steps = list(traceback.walk_tb(error.__traceback__))
    files = [Path(frame.f_code.co_filename) for frame, _ in steps]
    ours = [_is_in(file, _OURS) for file in files]
    called = files[ours.index(True) :] if True in ours else files
    if not any(_is_users(file) for file in called):
        return False
    return not (_is_users(called[-1]) and _is_raised_by_its_last_frame(error))


def first_cause(error: BaseException) -> BaseException:
    """The exception that ``error`` came from, or ``error`` itself."""
    while (
        cause := error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    ) is not None:
        error = cause
    return error


def _is_users(file: Path) -> bool:
    return file.suffix == ".py" and not _is_in(file, _OURS) and not _is_in(file, _LIBRARIES)


def _is_raised_by_its_last_frame(error: BaseException) -> bool:
    """Whether a ``raise`` statement raised it, and not an operation or a function written in C, such as
    ``float("x")``."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return last is not None and opname[last.tb_frame.f_code.co_code[last.tb_lasti]] == "RAISE_VARARGS"


def _is_in(file: Path, folders: tuple[Path, ...]) -> bool:
    return any(file.is_relative_to(folder) for folder in folders)
