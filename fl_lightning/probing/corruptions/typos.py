"""Synthetic noise in the words of a text, by the recipe of Belinkov & Bisk (ICLR 2018, arXiv
1711.02173, section 3.2): every word of ASCII letters that is long enough gets one error, which may
leave it as it was. No noise changes the number of characters.

Their natural noise, mistakes that people made, needs word lists that this package does not have.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

KEYBOARD = ("qwertyuiop", "asdfghjkl", "zxcvbnm")
"""Rows of a QWERTY keyboard; each stands half a key to the right of the one above it."""


def _neighbours() -> dict[str, str]:
    """Return the keys around each letter.

    >>> _neighbours()["a"], _neighbours()["h"]
    ('sqwz', 'gjyubn')
    """
    found: dict[str, str] = {}
    for row, keys in enumerate(KEYBOARD):
        for place, letter in enumerate(keys):
            around = [(row, place - 1), (row, place + 1)]
            around += [
                (row - 1, place),
                (row - 1, place + 1),
                (row + 1, place - 1),
                (row + 1, place),
            ]
            found[letter] = "".join(
                KEYBOARD[y][x]
                for y, x in around
                if 0 <= y < len(KEYBOARD) and 0 <= x < len(KEYBOARD[y])
            )
    return found


NEIGHBOURS = _neighbours()


def swap(word: str, rng: np.random.Generator) -> str:
    """Exchange two neighbouring letters, not the first or the last; words of three letters stay."""
    if len(word) < 4:
        return word
    at = int(rng.integers(1, len(word) - 2))
    return word[:at] + word[at + 1] + word[at] + word[at + 2 :]


def middle(word: str, rng: np.random.Generator) -> str:
    """Shuffle all letters but the first and the last."""
    return word[:1] + full(word[1:-1], rng) + word[-1:] if len(word) > 3 else word


def full(word: str, rng: np.random.Generator) -> str:
    """Shuffle all letters."""
    return "".join(np.array(list(word), "<U1")[rng.permutation(len(word))])


def keyboard(word: str, rng: np.random.Generator) -> str:
    """Replace one letter by that of a neighbouring key, a capital by a capital."""
    at = int(rng.integers(len(word)))
    near = NEIGHBOURS[word[at].lower()]
    hit = near[int(rng.integers(len(near)))]
    return word[:at] + (hit.upper() if word[at].isupper() else hit) + word[at + 1 :]


NOISES: dict[str, Callable[[str, np.random.Generator], str]] = {
    "swap": swap,
    "middle": middle,
    "full": full,
    "keyboard": keyboard,
}
"""The noises by name; the paper calls them Swap, Mid, Rand and Key."""


def add_noise(text: str, noise: str, rng: np.random.Generator) -> str:
    """Return the text with one error in each word; what is no ASCII letter stays where it is.

    Args:
        text: the text.
        noise: one of ``NOISES``.
        rng: draws the errors.
    """
    return re.sub("[A-Za-z]+", lambda word: NOISES[noise](word.group(), rng), text)
