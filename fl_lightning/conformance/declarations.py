"""What a method declares to the kit alone, where it differs by design from what the checks expect.

A method declares it by class attributes of these names, such as ``uniform_clients = True``, or by
properties where it depends on settings; nothing but the kit reads them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Declarations:
    """What a method declares; each check finds out whether it is so.

    Args:
        uniform_clients: every client that returned counts once in the average, whatever its n_k.
            Where nothing is declared, ``weigh_by`` says it.
        control_variates: clients and server keep the control variates of SCAFFOLD's option II,
            which steer local steps.
        dynamic_regularisation: clients and server keep FedDyn's H_i and H; the weight of both terms
            is the method's ``alpha``.
        scales_with_federation: the server's step depends on how many clients the federation has,
            not on those that returned alone.
        measured: names of what clients keep for callbacks to read, and the method never does.
    """

    uniform_clients: bool = False
    control_variates: bool = False
    dynamic_regularisation: bool = False
    scales_with_federation: bool = False
    measured: frozenset[str] = frozenset()


def declared(method: object) -> Declarations:
    """Return what a method, or a class of methods, declares.

    Of a class, a property counts as declared: it may be so at some settings.

    >>> declared(type("Mean", (), {"uniform_clients": True})).uniform_clients
    True
    """
    found: dict[str, Any] = {"uniform_clients": getattr(method, "weigh_by", "") == "clients"}
    for each in fields(Declarations):
        if hasattr(method, each.name):
            value = getattr(method, each.name)
            found[each.name] = True if isinstance(value, property) else value
    return Declarations(**found)
