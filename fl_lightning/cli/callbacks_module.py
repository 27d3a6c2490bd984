"""The module ``callbacks`` that names in YAML refer to: the project's, joined with one of the
user's.

The project's package lies beside this one and is called ``callbacks``. The user's project may have
a folder or a file of the same name. Both are then imported as one module. Where both define a name,
the user's definition is taken, and the log says so.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec, spec_from_file_location
from inspect import isclass, isfunction
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

log = logging.getLogger("fl_lightning")
NAME = "callbacks"
OURS = Path(__file__).resolve().parents[2] / NAME


def import_callbacks() -> ModuleType:
    """Import ``callbacks``, joined with the user's module or package of that name on ``sys.path``.

    If the user's module cannot be imported, a warning says so and the project's own names remain
    available.
    """
    loaded = sys.modules.get(NAME)
    if loaded is not None and OURS in _folders(loaded.__spec__):
        return loaded
    theirs = find_theirs() if loaded is None else loaded.__spec__
    held = {
        name: sys.modules.pop(name)
        for name in list(sys.modules)
        if name == NAME or name.startswith(f"{NAME}.")
    }
    spec = spec_from_file_location(
        NAME, OURS / "__init__.py", submodule_search_locations=[str(OURS)]
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules[NAME] = ours = module_from_spec(spec)
    spec.loader.exec_module(ours)
    return ours if theirs is None else _join(ours, theirs, held)


def find_theirs() -> ModuleSpec | None:
    """Return the user's module or package: the first of that name on the path that is not this
    project's.

    The working directory is searched first.
    """
    for entry in dict.fromkeys([os.getcwd(), *sys.path]):
        spec = PathFinder.find_spec(NAME, [entry or os.getcwd()])
        # a second copy of this project, such as a clone in which the installed program is started
        copy = Path(entry, *__name__.split(".")).with_suffix(".py")
        if spec is not None and OURS not in _folders(spec) and not copy.is_file():
            return spec
    return None


def _names_of_old(module: ModuleType) -> set[str]:
    """Return the names that submodules had in an earlier version and by which they can still be
    imported."""
    parts = {
        name.rpartition(".")[2]: part
        for name, part in sys.modules.items()
        if name.rpartition(".")[0] == module.__name__
    }
    return {name for name, part in parts.items() if part.__name__ != f"{module.__name__}.{name}"}


def _folders(spec: ModuleSpec | None) -> list[Path]:
    """Return the folders in which a package looks for its submodules."""
    return [Path(folder).resolve() for folder in (spec and spec.submodule_search_locations) or ()]


class _JoinedModule(ModuleType):
    """A module with the names of two modules.

    A name that neither had when they were joined is looked up in the user's module, which may have
    a ``__getattr__`` of its own.
    """

    _theirs: ModuleType | None = None
    _problem = ""

    def __getattr__(self, name: str) -> Any:
        if self._theirs is not None and not name.startswith("__"):
            return getattr(self._theirs, name)
        raise AttributeError(f"module '{self.__name__}' has no attribute '{name}'{self._problem}")


def _join(
    ours: ModuleType, theirs: ModuleSpec, held: Mapping[str, ModuleType], name: str = NAME
) -> ModuleType:
    """Put one module in place of both in ``sys.modules``, and likewise for submodules that both
    have.

    Code inside ``ours`` still sees the project's own definitions.

    Args:
        ours: the project's module.
        theirs: the user's module; its code is executed here unless ``held`` has it.
        held: the user's modules that have been imported already, by name.
        name: the name under which both are imported.
    """
    joined = _JoinedModule(name, ours.__doc__)
    vars(joined).update(vars(ours))
    sys.modules[name] = joined  # before the user's code runs, since it may import this name
    parent, _, leaf = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], leaf, joined)
    folders = list(theirs.submodule_search_locations or ())
    if folders and hasattr(ours, "__path__"):
        own = {module.name for module in iter_modules(ours.__path__)} | _names_of_old(ours)
        specs = {
            f"{name}.{part}": PathFinder.find_spec(f"{name}.{part}", folders)
            for part in sorted(own)
        }
        both = {
            called: (import_module(called), spec)
            for called, spec in specs.items()
            if spec is not None
        }
        joined.__path__ = [*ours.__path__, *folders]
        sys.modules.update(
            {part: module for part, module in held.items() if part not in sys.modules}
        )
        for called, (part, spec) in both.items():
            _join(part, spec, held, called)
    if theirs.loader is None or theirs.origin is None:  # a folder without an __init__.py
        return joined
    try:
        module = held.get(name) or module_from_spec(theirs)
        if name not in held:
            theirs.loader.exec_module(module)
    except Exception as error:
        joined._problem = f" ({theirs.origin} cannot be imported: {type(error).__name__}: {error})"
        log.warning("the project's own %s alone are known%s", name, joined._problem)
        return joined
    joined._theirs = module
    for key, value in vars(module).items():
        own_value = vars(ours).get(key, value)
        if key.startswith("__") or (
            isinstance(value, ModuleType) and value.__name__.startswith(NAME)
        ):
            continue
        if (
            own_value is not value
            and (isclass(own_value) or isfunction(own_value))
            and own_value.__module__.startswith(NAME)
        ):
            log.warning("%s.%s is yours, of %s, and not the project's", name, key, theirs.origin)
        setattr(joined, key, value)
    return joined
