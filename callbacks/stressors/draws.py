"""How two stressors of one class draw apart."""

from __future__ import annotations

from fl_lightning.hooks import Context, Stressor


def own_stream(purpose: str, stressor: Stressor, context: Context, *, by: str = "") -> str:
    """Return the purpose that a stressor draws for.

    The second of its class among the callbacks has its number behind it, ``straggler/2``: under one
    name it would draw the numbers of the first, and hit the same clients.

    Args:
        purpose: of the first.
        stressor: which one draws.
        context: the federation.
        by: an attribute, which the purpose names: stressors that differ in it draw apart already.
    """
    others = getattr(context, "callbacks", ())
    alike = [
        one
        for one in others
        if type(one) is type(stressor) and (not by or getattr(one, by) == getattr(stressor, by))
    ]
    number = next((place for place, one in enumerate(alike) if one is stressor), 0)
    return f"{purpose}/{number + 1}" if number else purpose
