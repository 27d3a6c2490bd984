"""The user's code: whether a bug in it raised an error, or bad input did, and whether it has
changed."""

from __future__ import annotations

import linecache
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

from fl_lightning.errors import InputError, MisuseError

_PACKAGE = Path(__file__).parents[1]
_OURS = (_PACKAGE, _PACKAGE.parent / "callbacks")
_LIBRARIES = tuple(
    Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")
)


def is_bug_of_user(error: BaseException) -> bool:
    """Return whether ``error`` is a bug in code of the user, which is neither the project's nor a
    library's.

    An exception that the user's code raises with a ``raise`` statement is no bug: it is that code's
    answer to wrong arguments. Frames above the project's first frame do not count, since a script
    that calls the trainer is not what failed.
    """
    steps = list(traceback.walk_tb(error.__traceback__))
    files = [Path(frame.f_code.co_filename) for frame, _ in steps]
    ours = [_is_in(file, _OURS) for file in files]
    called = files[ours.index(True) :] if True in ours else files
    if not any(_is_users(file) for file in called):
        return False
    return not (_is_users(called[-1]) and _is_raised_by_its_last_frame(error))


@contextmanager
def errors_as_refusals() -> Iterator[None]:
    """Return a context in which a ``ValueError`` or ``OSError`` is a refusal of input, unless the
    user's code has a bug.

    Raises:
        InputError: it is a refusal; its text is that of the error.
    """
    try:
        yield
    except (InputError, MisuseError):
        raise
    except (ValueError, OSError) as error:
        if isinstance(error, ValueError) and is_bug_of_user(error):
            raise
        raise InputError.from_text(f"{_users_place(error)}{error}") from error


def _users_place(error: BaseException) -> str:
    """Return which line of the user's code raised the error, before a colon; empty if none did."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    file = Path(last.filename)
    return f"{file.name}, line {last.lineno}, {last.name}: " if _is_users(file) else ""


def code_of(*objects: object) -> dict[str, str]:
    """Return the SHA-256 of the user's files that have the classes of these objects, by the names
    of their modules; a script's and a notebook's own classes are in none."""
    modules = {cls.__module__ for one in objects for cls in type(one).__mro__} - {"__main__"}
    files = {name: getattr(sys.modules.get(name), "__file__", None) for name in sorted(modules)}
    return {
        name: sha256(Path(file).read_bytes()).hexdigest()
        for name, file in files.items()
        if file and _is_users(Path(file)) and Path(file).is_file()
    }


def changed_code(code: Mapping[str, str]) -> list[str]:
    """Return the modules whose files are others now than :func:`code_of` found; none that cannot be
    found is among them."""
    changed = []
    for name, sha in code.items():
        with suppress(ImportError, ValueError, OSError):
            spec = find_spec(name)
            if spec and spec.origin and sha256(Path(spec.origin).read_bytes()).hexdigest() != sha:
                changed.append(name)
    return changed


def first_cause(error: BaseException) -> BaseException:
    """Return the exception at the beginning of the chain of causes of ``error``."""
    while (
        cause := error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    ) is not None:
        error = cause
    return error


def _is_users(file: Path) -> bool:
    """Return whether a file belongs to the user and not to the project or an installed library."""
    return file.suffix == ".py" and not _is_in(file, _OURS) and not _is_in(file, _LIBRARIES)


def _is_raised_by_its_last_frame(error: BaseException) -> bool:
    """Return whether a ``raise`` statement raised the error, and not a call such as
    ``float("x")``."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None:
        return False
    line = linecache.getline(last.tb_frame.f_code.co_filename, last.tb_lineno)
    return re.search(r"(^|[:;])\s*raise\b", line) is not None


def _is_in(file: Path, folders: tuple[Path, ...]) -> bool:
    return any(file.is_relative_to(folder) for folder in folders)
