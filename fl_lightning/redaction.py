"""What is written about a run must not hold passwords."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# up to the last @: a password may hold slashes and further @
_URL = re.compile(r"(?<=://)(?:[^/\s@:'\"]*:[^\s'\"]*|[^/\s@'\"]+)(?=@)")
_NAME = r"(?:password|passwd|pwd|secret|token|auth|bearer|sig|signature|api_?key|access_?key|credentials?)"
_HEADER = re.compile(r"(?i)(authorization\s*[=:]\s*)(?:\w+\s+)?[^\s'\",}]+")
_NAMED = re.compile(rf"(?i)\b((?:[\w.-]*[._-])?{_NAME}(?:\s*[=:]\s*))(?!null\b|none\b|\*\*\*)('[^']*'|\"[^\"]*\"|[^\s,}}]+)")
_FLAG = re.compile(rf"(?i)^--?(?:[\w.-]*[._-])?{_NAME}$")


def redact(text: str) -> str:
    """Without the ``user:password`` of addresses and the values of settings named like a secret.

    >>> redact("--uri=http://me:pw@host:5000/x --trainer.logger.token=abc")
    '--uri=http://***@host:5000/x --trainer.logger.token=***'
    """
    return _NAMED.sub(r"\1***", _HEADER.sub(r"\1***", _URL.sub("***", text)))


def redact_arguments(arguments: list[str]) -> list[str]:
    """A command line; ``--token VALUE`` in two words too."""
    return [
        "***" if before and _FLAG.match(before) else redact(word)
        for before, word in zip(["", *arguments], arguments, strict=False)
    ]


def redact_settings(settings: Any, name: str = "") -> Any:
    """Nested settings."""
    if isinstance(settings, Mapping):
        return {key: redact_settings(value, str(key)) for key, value in settings.items()}
    if isinstance(settings, list):
        return [redact_settings(value, name) for value in settings]
    if isinstance(settings, str):
        return "***" if _FLAG.match(f"--{name}") else redact(settings)
    return settings
