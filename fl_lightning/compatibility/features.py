"""Features that a run may have, and why a method cannot have one."""

from __future__ import annotations

import inspect
import warnings
from typing import Any, Literal, get_args

from fl_lightning.aggregation.server import SummingServer
from fl_lightning.config.near_names import nearest_or_list
from fl_lightning.config.overriding import overrides
from fl_lightning.errors import MisuseError
from fl_lightning.tasks import Classification, LanguageModelling, Task

TaskFeature = Literal["classification", "language", "other_classes", "no_classes"]
"""What is learnt: a class of each example, a language, other things with logits of classes, or
without."""
TASKS: tuple[TaskFeature, ...] = get_args(TaskFeature)
Feature = (
    TaskFeature
    | Literal[
        "module",
        "received_terms",
        "secure_sum",
        "privacy",
        "attack",
        "own_data",
        "server_optimizer",
    ]
    | Literal["personal", "finetune", "topology", "adapter_average", "asynchronous"]
)
"""What a run may have and a method may refuse."""
FEATURES: tuple[str, ...] = tuple(name for some in get_args(Feature) for name in get_args(some))
OWNS_ONE = "it is the name of a server optimiser, and has no other"
SQUARES_UNKNOWN = (
    "a message is clipped as a whole, and the square of a length is then none any more"
)
SINGLE_UPLOADS: dict[Feature, tuple[tuple[str, ...], str]] = {
    "secure_sum": (
        ("aggregate", "add_up", "bounded_weights"),
        "its {} reads single uploads, and the server gets their sum alone",
    ),
    "privacy": (("aggregate",), "its {} needs single uploads, and no sum of them"),
    "adapter_average": (
        ("aggregate", "addends"),
        "its own {} makes something else of uploads than a mean of adapters",
    ),
}
"""Features that a method cannot have which overrides one of these hooks of
:class:`SummingServer`."""


def why_not(method: Any, feature: Feature) -> str:
    """Return why a method, or a class of methods, cannot have a feature; empty where it can."""
    if feature in method.refuses:
        return method.refuses[feature]
    if feature == "server_optimizer":
        return OWNS_ONE if feature in method.owns else _why_no_mean(method)
    if feature == "topology":
        return _why_no_nodes(method)
    hooks, rule = SINGLE_UPLOADS.get(feature, ((), ""))
    if feature in ("personal", "finetune"):
        if feature in method.owns:
            return "it sets it by itself"
        hooks, rule = ("aggregate",), "its own {} makes something else of uploads than weights"
    return next((rule.format(hook) for hook in hooks if overrides_hook(method, hook)), "")


def _why_no_mean(method: Any) -> str:
    own = ("aggregate",) if method.calls_server_optimizer else ("aggregate", "next_state")
    names = [hook for hook in own if overrides_hook(method, hook)]
    return f"its own {names[0]} makes the next weights, and not the clients' mean" if names else ""


def _why_no_nodes(method: Any) -> str:
    if overrides_hook(method, "aggregate"):
        return "its own aggregate needs all uploads of a round in one place"
    if overrides_hook(method, "next_state") and not method.sums_over_any:
        return "its own next_state keeps what one server knows of all clients"
    if "server_optimizer" in method.owns:
        return "its server remembers its updates, and here there are several"
    has_own = method.personalised or {"personal", "finetune"} & method.owns
    return "its clients keep models of their own" if has_own else ""


def overrides_hook(method: Any, hook: str) -> bool:
    if isinstance(method, type):
        return getattr(method, hook) is not getattr(SummingServer, hook)
    return overrides(method, SummingServer, hook)


SHOWN = 6
"""Methods that a refusal names."""


def methods_with(feature: Feature) -> list[str]:
    """Return the names of the package's methods whose classes can have a feature."""
    kinds, names = [SummingServer], set()
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        concrete = not inspect.isabstract(kind) and kind.__name__ != "Method"
        if (
            concrete
            and kind.__module__.startswith("fl_lightning.methods.")
            and not why_not(kind, feature)
        ):
            names.add(kind.__name__)
    return sorted(names)


def some_with(feature: Feature) -> str:
    """Return the first names of :func:`methods_with`, and where the others stand."""
    names = sorted(methods_with(feature), key=lambda name: (name != "FedAvg", name))
    shown, others = ", ".join(names[:SHOWN]), len(names) - SHOWN
    return shown + (f" or {others} more in docs/what-works.md" if others > 0 else "")


def feature_of(task: Task) -> TaskFeature:
    """Return of which kind a task is."""
    if isinstance(task, Classification):
        return "classification"
    if isinstance(task, LanguageModelling):
        return "language"
    return "other_classes" if task.has_classes else "no_classes"


def only(task: TaskFeature, why: str) -> dict[Feature, str]:
    """Return the ``refuses`` of a method that learns one kind of task alone.

    >>> sorted(only("language", "it decides token by token"))
    ['classification', 'no_classes', 'other_classes']
    """
    return {other: why for other in TASKS if other != task}


def no_personal(why: str) -> dict[Feature, str]:
    """Return the ``refuses`` of a method of which nothing can stay on a client or be tuned
    there."""
    return {"personal": why, "finetune": why}


def check_refuses(method: Any) -> None:
    """Check the names in the ``refuses`` of a method, or of a class of methods.

    Raises:
        MisuseError: one is no feature, so that its reason would refuse nothing.
    """
    names = () if isinstance(method.refuses, property) else method.refuses
    kind = method if isinstance(method, type) else type(method)
    for name in names:
        if name not in FEATURES:
            given, near = f"{kind.__name__}.refuses with {name!r}", nearest_or_list(name, FEATURES)
            raise MisuseError(given, "a run has no such feature", f"write {near}")


FORMER: dict[str, tuple[Feature, ...]] = {
    "received_refused": ("received_terms",),
    "attack_refused": ("attack",),
    "secure_refused": ("secure_sum",),
    "privacy_refused": ("privacy",),
    "module_refused": ("module",),
    "classification_only": ("language", "other_classes", "no_classes"),
    "language_only": ("classification", "other_classes", "no_classes"),
}
"""Attributes that methods of earlier versions set, and the entries of ``refuses`` that they are
now."""


def adopt_former(kind: Any) -> None:
    """Take over what a method's class declares in the way of earlier versions, and warn."""
    for name, features in FORMER.items():
        if why := vars(kind).get(name):
            text = f"{kind.__name__}.{name}; reasons are entries of refuses; write refuses with {features[0]}"
            warnings.warn(text, DeprecationWarning, stacklevel=4)
            kind.refuses = {**kind.refuses, **dict.fromkeys(features, why)}
