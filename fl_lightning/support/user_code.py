"""The user's code: whether a bug in it raised an error, or bad input did, and whether it has
changed."""

from __future__ import annotations

import ast
import linecache
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import sha256
from importlib.util import find_spec, resolve_name
from inspect import getsource, isclass, isfunction
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

from fl_lightning.errors import InputError, MisuseError

_PACKAGE = Path(__file__).parents[1]
_OURS = (_PACKAGE, _PACKAGE.parent / "callbacks")
_LIBRARIES = tuple(
    Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")
)

INSTALLED = {"site-packages", "dist-packages"}


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
    place = _users_line(traceback.extract_tb(error.__traceback__)[-1])
    return place and f"{place}: "


def users_step(error: BaseException) -> str:
    """Return the last line of the user's code that an error went through; empty if it went through
    none."""
    steps = map(_users_line, reversed(traceback.extract_tb(error.__traceback__)))
    return next(filter(None, steps), "")


def _users_line(step: traceback.FrameSummary) -> str:
    """Return file, line and function of a step; empty where the code is not the user's."""
    file = Path(step.filename)
    return f"{file.name}, line {step.lineno}, {step.name}" if _is_users(file) else ""


def code_of(*objects: object) -> dict[str, str]:
    """Return the SHA-256 of the user's code that these objects and their attributes are made of, by
    name.

    It is of the files of their classes and functions and of all modules of the user that those
    import, by their names; and of what a script or a notebook defines itself, by ``__main__`` and
    its name.
    """
    kinds = [kind for one in objects for kind in _kinds(one)]
    main = [kind for kind in kinds if kind.__module__ == "__main__"]
    own = {f"__main__.{kind.__qualname__}": _source(kind) for kind in main}
    left = {kind.__module__ for kind in kinds}
    found: dict[str, str] = {}
    while left:
        name = left.pop()
        file = Path(getattr(sys.modules.get(name), "__file__", None) or "")
        if name not in found and _is_users(file) and file.is_file():
            text = file.read_bytes()
            found[name] = sha256(text).hexdigest()
            left |= _imports(sys.modules[name], text)
    found.pop("__main__", None)
    own = {name: sha256(text.encode()).hexdigest() for name, text in own.items() if text}
    return dict(sorted((found | own).items()))


def _kinds(one: object) -> Iterator[Any]:
    """Yield the classes and functions that an object and its attributes are of or are."""
    for value in (one, *_values(getattr(one, "__dict__", {}))):
        while isinstance(value, partial):
            value = next((each for each in value.args if isclass(each)), value.func)
        yield from (value.__mro__ if isclass(value) else type(value).__mro__)
        if isfunction(value):
            yield value


def _values(held: Any) -> Iterator[Any]:
    """Yield the values of a mapping, the first hundred of its lists and mappings one by one."""
    for value in held.values():
        if isinstance(value, dict):
            yield from islice(value.values(), 100)
        elif isinstance(value, list | tuple):
            yield from value[:100]
        else:
            yield value


def _source(kind: Any) -> str:
    """Return the text of a function, or of a class's functions; empty where nobody knows it."""
    texts = []
    for part in [kind] if isfunction(kind) else filter(isfunction, vars(kind).values()):
        with suppress(OSError, TypeError):
            texts.append(getsource(part))
    return "".join(texts)


def _imports(module: ModuleType, text: bytes) -> set[str]:
    """Return the names of modules that the text of a module imports."""
    names: set[str] = set()
    with suppress(SyntaxError, ValueError, ImportError):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                origin = "." * node.level + (node.module or "")
                origin = resolve_name(origin, module.__package__) if node.level else origin
                names.update({origin, *(f"{origin}.{alias.name}" for alias in node.names)})
    return names


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
    installed = _is_in(file, _LIBRARIES) or not INSTALLED.isdisjoint(file.parts)
    return file.suffix == ".py" and not _is_in(file, _OURS) and not installed


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
