"""The constructors' arguments of a run made from Python, in the form of the command line's
``config.yaml``.

An argument that its annotation does not allow is refused here (``constraints.py``).

``FedProx(mu=0.1, optimizer=lambda p: SGD(p, lr=0.1))`` becomes a class path and its arguments. A
function that cannot be imported by a name, such as that lambda, becomes a hash of its code and of
the values that it uses. Two runs thus differ in their settings if their constructors got
different arguments. A value that cannot be described becomes a text that begins with
``NOT_RECORDED``.
"""

from __future__ import annotations

import dis
import inspect
import re
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copyreg import dispatch_table
from dataclasses import fields, is_dataclass
from functools import cache, partial, wraps
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType, NoneType, SimpleNamespace
from typing import Any, ClassVar, SupportsIndex, TypeVar
from weakref import finalize

import numpy as np
import torch
from torch import Tensor, nn

from fl_lightning.config.constraints import check_arguments, members_of, own_constraints, own_hints
from fl_lightning.config.near_names import FOREIGN_NAMES, argument_for, listed, nearest
from fl_lightning.errors import InputError
from fl_lightning.support.tensor_bytes import raw_bytes

T = TypeVar("T")
NOT_RECORDED = "not recorded: "
# A longer list is replaced by its hash, or the configuration would be too large to be read back.
MAX_ITEMS = 1000
OF_MODULES = {*vars(nn.Module())}
LOADS_A_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")


class _Arguments(dict[str, Any]):
    """Recorded arguments: copies of an object share them, and a pickle holds their description."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Arguments:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _Arguments, ({name: describe(value) for name, value in self.items()},)


_ARGUMENTS: dict[int, _Arguments] = {}
"""The recorded arguments of each object that lives, by its id: some objects have no hash. They are
not attributes, since those are compared and copied."""


_IN_WORK: set[int] = set()  # functions whose hash is being computed, and objects that they use


class Recorded:
    """The base of classes whose constructor's arguments are checked and recorded, also those of
    subclasses.

    A refusal shows an argument as ``settings_shown`` has it: how it was given, and how to write
    another.
    """

    settings_shown: ClassVar[tuple[str, str]] = ("{name}={value}", "{value}")

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        if "__init__" in vars(cls):
            cls.__init__ = _recording(cls, cls.__init__)  # type: ignore[method-assign]

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        """Return how the object is copied or pickled: with the record of its arguments."""
        made = super().__reduce_ex__(protocol)
        arguments = _ARGUMENTS.get(id(self))
        if arguments is None or isinstance(made, str):
            return made
        return _made_again, (arguments, *made[:2]), *made[2:]


def _made_again(arguments: _Arguments, function: Callable[..., T], given: tuple[Any, ...]) -> T:
    """Return a copy of an object, before its state is set, with the record of the original."""
    copied = function(*given)
    _record(copied, arguments)
    return copied


def _record(made: object, arguments: _Arguments) -> None:
    _ARGUMENTS[id(made)] = arguments
    finalize(made, _ARGUMENTS.pop, id(made), None).atexit = False


def record_copy(made: object, given: object, copy: object) -> None:
    """Record a copy of what a constructor was given in place of it, which may change afterwards."""
    arguments = _ARGUMENTS.get(id(made), _Arguments())
    arguments |= {name: copy for name, value in arguments.items() if value is given}


def _recording(cls: type, constructor: Callable[..., None]) -> Callable[..., None]:
    """Return the constructor with the addition that it checks and records its arguments, and takes
    one value for a list."""
    signature = inspect.signature(constructor)
    takes_any = any(one.kind is one.VAR_KEYWORD for one in signature.parameters.values())
    lists = [name for name, one in signature.parameters.items() if _is_list(one.annotation)]
    # not before the module is read to its end, which defines what annotations name
    constraints, parts = cache(lambda: own_constraints(cls)), cache(lambda: parts_of(cls))

    @wraps(constructor)
    def record(self: Any, *arguments: Any, **named: Any) -> None:
        if unknown := [] if takes_any else [*named.keys() - signature.parameters.keys()]:
            known = dict.fromkeys(one.name for one in _parameters(type(self)))
            near = argument_for(unknown[0], [*known])
            raise TypeError(f"{type(self).__name__} has no argument {unknown[0]!r}; write {near}")
        # a TypeError if they do not fit
        given = signature.bind(self, *arguments, **named)
        bound = given.arguments
        for name in lists:
            if bound.get(name) is not None and not isinstance(bound[name], Iterable):
                bound[name] = [bound[name]]
        require_made(parts(), bound)
        # the subclass's constructor is called first, and its arguments count
        if id(self) not in _ARGUMENTS:
            own = list(bound.items())[1:]
            _record(self, _Arguments((name, _as_given(value)) for name, value in own))
        check_arguments(type(self), constraints(), bound)
        constructor(*given.args, **given.kwargs)

    return record


def _as_given(value: Any) -> Any:
    """Return containers as copies and arrays as hashes, since both may be changed afterwards."""
    if isinstance(value, dict):
        return {name: _as_given(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_given(item) for item in value]
    if isinstance(value, set):
        return frozenset(value)
    return describe(value) if isinstance(value, (np.ndarray, Tensor)) else value


def with_settings(thing: object) -> str:
    """Return the name of an object's class with the object's attributes, as in
    ``Dirichlet(beta=0.1)``; it is the ``__repr__`` of what has no other ones than settings."""
    given = ", ".join(f"{name}={value!r}" for name, value in vars(thing).items())
    return f"{type(thing).__name__}({given})"


def require_made(parts: Mapping[str, tuple[type, ...]], given: Mapping[str, Any]) -> None:
    """Refuse a class where one of its objects is meant, of which a network's is one for each run,
    and whatever is no such object where a part of the run is meant.

    Args:
        parts: the classes of the arguments that are parts, as :func:`parts_of` has them.
        given: the arguments, by name.
    """
    for name, value in given.items():
        for one in value if isinstance(value, list | tuple) else (value,):
            if _is_part(one) and not issubclass(one, nn.Module):
                rule = "it is a class, and an object of it is asked for"
                raise InputError(
                    f"{name}={one.__name__}", rule, f"write {name}={one.__name__}(...)"
                )
        allowed = parts.get(name, (object,))
        takes_functions = any("__call__" in vars(base) for one in allowed for base in one.__mro__)
        if isinstance(value, allowed) or (takes_functions and callable(value)):
            continue
        foreign = FOREIGN_NAMES.get(name, "").rpartition(".")[2]
        if foreign and isinstance(value, int | float) and not isinstance(value, bool):
            raise InputError(f"{name}={value}", "it is no number", f"write {foreign}={value}")
        wanted = next(one for one in allowed if one is not NoneType)
        near = nearest(str(value), known := _made_of(wanted))
        raise InputError(
            f"{name}={value!r:.60}",
            f"it is {type(value).__name__}, and an object of {wanted.__name__} is needed",
            f"write {name}={near}(...)"
            if near
            else f"write {name} as an object of {listed(known)}",
        )


def parts_of(cls: type) -> dict[str, tuple[type, ...]]:
    """Return the classes of those arguments of a constructor that are parts of a run, such as a
    sampler, by name; ``NoneType`` is among those of an optional one."""
    hints = {name: members_of(hint) for name, hint in own_hints(cls)}
    return {
        name: members
        for name, members in hints.items()
        if (parts := {*members} - {NoneType}) and all(map(_is_part, parts))
    }


def _is_part(cls: Any) -> bool:
    ours = is_dataclass(cls) and getattr(cls, "__module__", "").startswith("fl_lightning.")
    return isinstance(cls, type) and (ours or issubclass(cls, Recorded))


def _made_of(cls: Any) -> list[str]:
    """Return the names of the classes that a part may be of: this one and those derived from it."""
    own = [] if inspect.isabstract(cls) or cls.__name__.startswith("_") else [cls.__name__]
    return own + [name for derived in cls.__subclasses__() for name in _made_of(derived)]


def _is_list(annotation: Any) -> bool:
    return str(annotation).startswith("list[")


def settings_of_run(
    trainer: Recorded, method: Recorded, data: Recorded, seed: int
) -> dict[str, Any]:
    """Return the whole configuration of a run, nested as in ``config.yaml``."""
    return {
        "seed_everything": seed,
        "trainer": arguments_of(trainer),
        "model": describe(method),
        "data": describe(data),
    }


def arguments_of(made: Recorded) -> dict[str, Any]:
    """Return the arguments of an object's constructor as plain YAML, with the defaults of the
    others.

    Those of a dataclass are its fields. Of an object whose constructor was not seen, such as one
    that its class copies itself, they are ``NOT_RECORDED``.
    """
    known = _fields_of(made) if _has_made_constructor(type(made)) else _ARGUMENTS.get(id(made))
    given = dict(known or {})
    described: dict[str, Any] = {}
    for parameter in _parameters(type(made)):
        if parameter.kind is parameter.VAR_KEYWORD:
            given |= given.pop(parameter.name, {})
        elif parameter.kind is parameter.VAR_POSITIONAL:
            described[parameter.name] = describe(given.pop(parameter.name, ()))
        elif parameter.name not in described:
            unknown = f"{NOT_RECORDED}an argument of {import_path(type(made))}"
            default = unknown if known is None else parameter.default
            value = given.pop(parameter.name, default)
            described[parameter.name] = None if value is parameter.empty else describe(value)
    return described | {name: describe(value) for name, value in given.items()}


def _has_made_constructor(cls: type) -> bool:
    """Return whether ``dataclass`` made the constructor, after the class had been defined: it
    records nothing."""
    return is_dataclass(cls) and not hasattr(cls.__init__, "__wrapped__")


def _fields_of(made: Any) -> dict[str, Any]:
    return {one.name: getattr(made, one.name) for one in fields(made) if one.init}


def _parameters(cls: type) -> Iterator[inspect.Parameter]:
    """Yield the parameters of a constructor, and of its base's if it takes ``**settings``, but not
    those that the class fixes (``owns``), which nobody can set."""
    fixed: frozenset[str] = getattr(cls, "owns", frozenset())
    for base in cls.__mro__:
        if "__init__" not in vars(base) or base is object:
            continue
        _, *own = inspect.signature(base.__init__).parameters.values()  # type: ignore[misc]
        yield from (parameter for parameter in own if parameter.name not in fixed)
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in own):
            return


def describe(value: Any) -> Any:
    """Return a value as plain YAML: numbers, texts, lists and mappings.

    An object becomes its class path and arguments; arrays and code become hashes.
    """
    if isinstance(value, np.generic):  # before the next: np.float64 is a float, and no plain one
        return value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): describe(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted((describe(item) for item in value), key=repr)
    if isinstance(value, (list, tuple)):
        items = [describe(item) for item in value]
        if len(items) > MAX_ITEMS:
            hashed = sha256(repr(items).encode()).hexdigest()
            return _unknown(items) or {"sha256": hashed, "length": len(items)}
        return items
    if isinstance(value, (np.ndarray, Tensor)):
        return _described_array(value)
    if isinstance(value, (torch.device, torch.dtype)):
        return str(value)
    if isinstance(value, partial):
        return {
            "class_path": describe(value.func),
            "init_args": describe({**dict(enumerate(value.args)), **value.keywords}),
        }
    if isinstance(value, (type, FunctionType, BuiltinFunctionType)):
        return _described_callable(value)
    if isinstance(value, Recorded):
        kind = _described_callable(type(value))
        made_in_function = {} if isinstance(kind, str) else {"code_sha256": kind["code_sha256"]}
        return {
            "class_path": import_path(type(value)),
            **made_in_function,
            "init_args": arguments_of(value),
        }
    if is_dataclass(value):
        attributes = {field.name: describe(getattr(value, field.name)) for field in fields(value)}
        if getattr(value, "settings_alone", False):
            return attributes
        return {"class_path": import_path(type(value)), "init_args": attributes}
    # a LightningModule that calls save_hyperparameters has this attribute
    if hyperparameters := getattr(value, "hparams", None):
        return {
            "class_path": import_path(type(value)),
            "init_args": _ignored(value, hyperparameters) | describe(hyperparameters),
        }
    if hasattr(value, "hparams") and not inspect.signature(type(value)).parameters:
        return {"class_path": import_path(type(value)), "init_args": {}}
    from torchmetrics import Metric

    if isinstance(value, Metric):  # it keeps what it was given under the names of the arguments
        given = {
            name: vars(value)[name]
            for name in inspect.signature(type(value)).parameters
            if name in vars(value)
        }
        return {"class_path": import_path(type(value)), "init_args": describe(given)}
    if _IN_WORK and id(value) not in _IN_WORK:
        with suppress(Exception), _in_work(value):
            return _described_use(value)
    return f"{NOT_RECORDED}{import_path(type(value))}"


def _described_use(value: Any) -> Any:
    """Return what tells an object that a function uses from others of its class: what a namespace
    or a network holds, the name of a constant, or the constructor's arguments that a pickle has.

    Raises:
        Exception: nothing does, whatever the object raises when it is asked.
    """
    if isinstance(value, (Namespace, SimpleNamespace)):
        return describe(vars(value))
    if isinstance(value, nn.Module):
        trained = [weights.requires_grad for weights in value.parameters()]
        return [trained, *([name, *_held(one)] for name, one in value.named_modules())]
    made = dispatch_table.get(type(value), lambda one: one.__reduce_ex__(2))(value)
    path = f"{getattr(value, '__module__', type(value).__module__)}.{made}"
    if isinstance(made, str) and imported(path) is value:
        return path
    constructor, arguments = made  # a state would come third, which may change
    return [import_path(constructor), describe(arguments)]


def _held(module: nn.Module) -> list[Any]:
    """Return the class of a module, its own tensors, and its attributes as far as they can be
    described."""
    tensors = [module.training, module._parameters, module._buffers]
    others = {name: describe(one) for name, one in vars(module).items() if name not in OF_MODULES}
    known = {name: one for name, one in others.items() if not _unknown(one)}
    return describe([type(module), tensors, known])


def _unknown(described: Any) -> str:
    """Return the first text that stands for what cannot be described; empty where there is none."""
    found = re.search(rf"['\"]({NOT_RECORDED}[^'\"]*)", repr(described))
    return found[1] if found else ""


@contextmanager
def _in_work(value: object) -> Iterator[None]:
    _IN_WORK.add(id(value))
    try:
        yield
    finally:
        _IN_WORK.remove(id(value))


def not_recorded(settings: Mapping[str, Any]) -> list[str]:
    """Return the dotted keys of the settings whose values could not be described."""
    return [
        key
        for key, value in settings.items()
        if isinstance(value, str) and value.startswith(NOT_RECORDED)
    ]


FORMER_MODULES = {
    "callbacks.stressors.": "callbacks.",
    "callbacks.meters.": "callbacks.",
    "callbacks.figures.": "callbacks.",
    "fl_lightning.aggregation.averages.": "fl_lightning.methods.averaging.",
    "fl_lightning.aggregation.private.": "fl_lightning.methods.client_privacy.",
}
"""Where classes that have moved stand in configurations, hashes and checkpoints, so that runs of
earlier versions can be continued and compared."""


def import_path(named: Any) -> str:
    """Return the class path of a class or a function in configurations, hashes and checkpoints.

    The path of a class of a configuration can be imported.
    """
    return former_path(f"{named.__module__}.{named.__qualname__}")


def former_path(path: str) -> str:
    """Return the path by which configurations of all versions name what has this one.

    >>> former_path("fl_lightning.aggregation.averages.TrimmedMean")
    'fl_lightning.methods.averaging.TrimmedMean'
    """
    for module, former in FORMER_MODULES.items():
        if path.startswith(module):
            return f"{former}{path.removeprefix(module)}"
    return path


def _ignored(module: Any, hyperparameters: Mapping[str, Any]) -> dict[str, str]:
    """Return a text for each argument that ``save_hyperparameters(ignore=...)`` left out."""
    names = [
        p.name for p in _parameters(type(module)) if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]
    return {
        name: f"{NOT_RECORDED}an argument that save_hyperparameters ignores"
        for name in names
        if name not in hyperparameters
    }


def _described_callable(value: Any) -> Any:
    """Return the path of a class or function, with a hash of its code if the path is not enough."""
    path = import_path(value)
    importable = "<" not in path and imported(path) is value
    if isinstance(value, FunctionType):
        if importable and not _globals_of(value):
            return path
        return {"function": path, "code_sha256": _hash_of_function(value)}
    if importable or isinstance(value, BuiltinFunctionType):
        return path
    return {"class": path, "code_sha256": _hash_of_class(value)}  # it was made in a function


def imported(path: str) -> Any:
    """Return what a path of a module and a name stands for; None where there is no such thing."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name, None)
    except (ImportError, ValueError):
        return None


def _hash_of_function(function: FunctionType) -> str:
    """Return the SHA-256 of a function, or a text that begins with ``NOT_RECORDED``.

    It covers the code, the default values, the values that it closes over, and those of the global
    names that it uses. There is none if one of them cannot be described.
    """
    if id(function) in _IN_WORK:  # it refers to itself
        return function.__qualname__
    digest = sha256()
    _add_code(digest, function.__code__)
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    closure = {name: _content(cell) for name, cell in cells if name != "__class__"}
    defaults = [function.__defaults__, function.__kwdefaults__]
    with _in_work(function):
        known = describe([*defaults, list(closure.values()), _globals_of(function)])
    used = dict(zip(closure, known[2], strict=True)) | known[3] | {"its defaults": known[:2]}
    if unknown := [name for name, one in used.items() if _unknown(one)]:
        return f"{NOT_RECORDED}{import_path(function)}, which uses {', '.join(unknown)}"
    digest.update(repr(known).encode())
    return digest.hexdigest()


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a function that is being defined
        return None


def _globals_of(function: FunctionType) -> dict[str, Any]:
    """Return the global values that a function uses, by name.

    Modules, classes and functions are left out, since their names identify them.
    """
    found = {
        name: function.__globals__[name]
        for name in sorted(_names(function.__code__))
        if name in function.__globals__
    }
    return {
        name: value
        for name, value in found.items()
        if not isinstance(value, (ModuleType, type, FunctionType, BuiltinFunctionType))
    }


def _names(code: CodeType) -> set[str]:
    nested = [_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    own = {one.argval for one in dis.get_instructions(code) if one.opname in LOADS_A_GLOBAL}
    return own.union(*nested)


def _hash_of_class(cls: type) -> str:
    """Return the SHA-256 of the functions and the plain attributes that a class defines, or a text
    that begins with ``NOT_RECORDED``."""
    digest = sha256()
    for name, value in sorted(vars(cls).items()):
        function = inspect.unwrap(
            getattr(value, "__func__", getattr(value, "fget", value)) or value
        )
        if isinstance(function, FunctionType):
            known = _hash_of_function(function)
            if known.startswith(NOT_RECORDED):
                return known
            digest.update(f"{name}={known}".encode())
        elif not name.startswith("__") and isinstance(
            value, (bool, int, float, str, tuple, frozenset)
        ):
            digest.update(f"{name}={describe(value)!r}".encode())
    return digest.hexdigest()


def _add_code(digest: Any, code: CodeType) -> None:
    digest.update(code.co_code)
    digest.update(repr(code.co_names).encode())
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            _add_code(digest, constant)
        else:  # the order of a frozenset differs between processes, so it is described first
            digest.update(
                repr(describe(constant) if isinstance(constant, frozenset) else constant).encode()
            )


def _described_array(array: np.ndarray | Tensor) -> dict[str, Any]:
    values = (
        raw_bytes(array.detach().cpu().contiguous()).numpy()
        if isinstance(array, Tensor)
        else np.ascontiguousarray(array)
    )
    return {
        "sha256": sha256(values.tobytes()).hexdigest(),
        "shape": list(array.shape),
        "dtype": str(array.dtype),
    }
