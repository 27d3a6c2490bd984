"""How many bits the pixels of an image of PIL have."""

from __future__ import annotations

from typing import Any

DEEP_MODES = ("I", "F", "I;16", "I;16L", "I;16B")
"""Modes of PIL whose pixels have more than 8 bits."""


def is_deep(image: Any) -> bool:
    """Return whether the pixels of an image, which has not been decoded yet, have more than 8 bits
    a channel.

    Converted to RGB such pixels are cut off at 255. PIL calls colours of 16 bits ``RGB`` as well;
    what it is about to decode tells them. Its ``BGR;16`` is 5, 6 and 5 bits.
    """
    coded = [str(part) for tile in getattr(image, "tile", ()) for part in tile]
    return image.mode in DEEP_MODES or any(";16" in part.replace("BGR;16", "") for part in coded)
