"""Whether a value that is no class is one of a type: a number, a text, a truth value, one of some
words.

A verdict is certain, or :class:`Unsure` is raised: YAML reads some texts in ways that only the
parser knows.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

Verdict = Literal["good", "bad"]

WORD = re.compile(r"[A-Za-z_][\w-]*")
INT = re.compile(r"-?(0|[1-9]\d{0,15})")
DECIMAL = re.compile(r"-?(0|[1-9]\d{0,15})\.\d{1,15}")
POWER = re.compile(r"-?\d{1,15}(\.\d{1,15})?[eE][+-]?\d{1,2}")
PLAIN = re.compile(r"[A-Za-z_./][\w./:=-]*")  # a text that YAML reads as one
NO_NUMBERS = ("true", "false", "nan", "inf")  # as they are written here; .nan and .inf are numbers
SPECIAL = {"true", "false", "null", "yes", "no", "on", "off", "y", "n", "none", "nan", "inf"}


class Unsure(Exception):
    """Only the parser knows whether the command line is right."""


def plain_value(kind: Any, value: Any) -> Any:
    """Return a number, a text or a truth value as its type makes it; None for all others."""
    if isinstance(kind, dict):
        return str(value) if "literal" in kind else None
    if kind == "bool":
        return value in (True, "true")
    return _MAKERS[kind](value) if kind in _MAKERS else None


_MAKERS: dict[str, Callable[[Any], Any]] = {
    "int": int, "seed": int, "float": float, "str": str, "path": str,
}  # fmt: skip


def unsure() -> Verdict:
    raise Unsure


def is_word(text: str) -> bool:
    """Return whether a text can be nothing but a name: no number, no special word of YAML, and no
    file."""
    return bool(WORD.fullmatch(text)) and text.lower() not in SPECIAL and not Path(text).exists()


def is_number(text: str) -> bool:
    return bool(INT.fullmatch(text) or DECIMAL.fullmatch(text))


def of_text(kind: Any, text: str) -> Verdict:
    """Return whether a text of the command line is a value of a type that is no class."""
    number = is_number(text)
    if isinstance(kind, dict):
        return "good" if text in kind["literal"] else "bad" if number or is_word(text) else unsure()
    return CHECKS[kind](text, number) if kind in CHECKS else unsure()


def _int(text: str, number: bool) -> Verdict:
    if INT.fullmatch(text):
        return "good"
    other = number or not text or POWER.fullmatch(text) or text in NO_NUMBERS
    return "bad" if other or is_word(text) else unsure()


def _seed(text: str, number: bool) -> Verdict:
    if re.fullmatch(r"\d{20,}", text):
        return "bad"
    verdict = _int(text, number)
    return "bad" if text.startswith("-") else verdict


def _float(text: str, number: bool) -> Verdict:
    if number or POWER.fullmatch(text):
        return "good"
    return "bad" if text in NO_NUMBERS or is_word(text) else unsure()


def _bool(text: str, number: bool) -> Verdict:
    return "good" if text in ("true", "false") else "bad" if is_word(text) else unsure()


def _null(text: str, number: bool) -> Verdict:
    if text == "null":
        return "good"
    plain = number or not text or text in ("true", "false") or is_word(text)
    return "bad" if plain or text.startswith("[") else unsure()


def _str(text: str, number: bool) -> Verdict:
    return "good" if number or (PLAIN.fullmatch(text) and text.lower() not in SPECIAL) else unsure()


def _path(text: str, number: bool) -> Verdict:
    return unsure() if number else _str(text, number)


CHECKS = {
    "int": _int, "seed": _seed, "float": _float, "bool": _bool, "null": _null, "str": _str, "path": _path,
}  # fmt: skip


def of_yaml(kind: Any, value: Any) -> Verdict:
    """Return whether a value of a file is one of a type that is no class."""
    if isinstance(value, str):
        if kind == "str":
            return "good"
        verdict = of_text(kind, value)
        if verdict == "good" and kind in ("int", "seed", "bool", "null"):  # a number in quotes
            raise Unsure
        return verdict
    if value is None and kind == "null":
        return "good"
    if isinstance(value, bool) and kind == "bool":
        return "good"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Unsure
    if isinstance(kind, dict):
        return "good" if str(value) in kind["literal"] else "bad"
    if kind == "float" or (
        kind in ("int", "seed") and isinstance(value, int) and 0 <= value < 2**63
    ):
        return "good"
    if kind == "int" and isinstance(value, int):
        return "good"
    return "bad" if kind in ("int", "null") else unsure()
