"""Functions that hide passwords, tokens and keys in everything that is written and printed about a
run.

:func:`is_secret` decides whether a name is that of a secret. The name may belong to a setting, to a
flag, or to ``name=value`` or ``"name": "value"`` in a text. Text goes through :func:`redact`,
settings go through :func:`redact_settings`, and a command line goes through
:func:`redact_arguments`. Every message of the project's logger goes through the filter
:data:`REDACTING`.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from types import TracebackType
from typing import Any

HIDDEN = "***"
# up to the last @: a password may hold slashes and further @
_URL = re.compile(r"(?<=://)(?:[^/\s@:'\"]*:[^\s\"]*|[^/\s@'\"]+)(?=@)")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_SECRET = re.compile(
    r"(?:password|passwd|passphrase|passcode|secret|credential|authorization)s?\d*(?:$|_(?!file$|path$|dir$|length$|policy$))"
    r"|(?:^|_)(?:pwd|pw|pass|pat|jwt|cookie|auth|bearer|sig|signature)$"
    r"|(?:api|access|private|secret|account|signing|encryption|master|ssh|license|subscription)_?keys?(?:$|_(?!file$|path$|dir$))"
    r"|(?:^|_)token_(?:prod|dev|test|staging|live|read|write|admin)$"
    r"|(?:^|_|auth|access|refresh|session|security|bearer)tokens?$"
)
# names that look like that of a secret and are not: tokens of a vocabulary, and numbers of tokens
_ORDINARY = re.compile(
    r"(?:^|_)(?:pad|eos|bos|unk|sep|cls|mask|sos|start|end|stop|special|new|next|first|last|max|min|num|image)_tokens?$|(?:^|_)tokens$"
)
_MAY_BE_NUMBERS = re.compile(r"(?:tokens?|sig|signature|auth|pass)$")
_NAMED = re.compile(
    r"(?<![\w.-])((?:(?i:api|access|secret|private) )?[\w.-]*\w)\\*[\"']?\]?\s*(?:=>|[=:])\s*"
)
_FLAG = re.compile(r"(?<!\S)(--?[\w.-]*\w)\s+(?!-)")
_VALUE = re.compile(
    # quoted, or cut off within the quotes
    r"\"(?:\\.|[^\"\\])*(?:\"|$)|'(?:\\.|''|[^'\\])*(?:'|$)|(\\+)([\"']).*?(?:\1\2|$)"
    r"|(?i:(?:bearer|basic|digest|token|negotiate)\s+)?[^\s,;&}\"']+"
)
_BRACKET = re.compile(r"[{}\[\]()]")
_QUOTE = re.compile(r"\\*[\"']")
_BEARER = re.compile(r"(?i)\b(bearer\s+)[\w.~+/=-]{8,}")
# of GitHub, GitLab, Hugging Face, OpenAI and the like, AWS and Slack
_TOKEN = re.compile(
    r"(?<![A-Za-z0-9])(?:gh[opsur]_[A-Za-z0-9]{10,}|github_pat_\w{10,}|glpat-[\w-]{10,}|hf_[A-Za-z0-9]{16,}"
    r"|sk-(?=[\w-]*\d)[\w-]{16,}|A[KS]IA[A-Z0-9]{12,}|npm_[A-Za-z0-9]{30,}|pypi-[\w-]{30,}|xox[abeoprs]-[\w-]{10,})"
)
PROMPTS = frozenset(("template", "constants", "system"))
"""Settings of ``data`` whose texts a language model is shown: a name and a colon there are no
secret's."""
_PLAIN = re.compile(r"(?i)(?:null|none|true|false|~|\*\*\*)?$")
_NUMBER = re.compile(r"[-+]?[\d.]+(?:[eE][-+]?\d+)?$")


@lru_cache(maxsize=4096)
def is_secret(name: str) -> bool:
    """Return whether a name, or a part of a dotted name, is that of a secret.

    >>> [*map(is_secret, ("trainer.logger.token", "AWS_SECRET_ACCESS_KEY", "clientSecret", "sslpassword"))]
    [True, True, True, True]
    >>> [*map(is_secret, ("monkey", "keep_checkpoints", "tokens_per_batch", "author", "keys", "pad_token"))]
    [False, False, False, False, False, False]
    """
    parts = [
        _CAMEL.sub("_", part).lower().replace("-", "_").replace(" ", "_")
        for part in name.lstrip("-").split(".")
    ]
    return any(
        _SECRET.search(part) is not None and _ORDINARY.search(part) is None for part in parts
    )


def redact(text: str) -> str:
    """Return a text without the ``user:password`` of addresses, without values of secrets' names,
    and without tokens that are known by their beginning.

    >>> redact("--uri=http://me:pw@host:5000/x --trainer.logger.token=abc")
    '--uri=http://***@host:5000/x --trainer.logger.token=***'
    >>> redact("pushed with ghp_16C7e42F292c6912E7")
    'pushed with ***'
    """
    return _hide_named(_FLAG, _hide_named(_NAMED, _redact_known(text)))


def _redact_known(text: str) -> str:
    """Return a text without what is a secret by its own form, whatever stands before it."""
    return _BEARER.sub(rf"\1{HIDDEN}", _TOKEN.sub(HIDDEN, _URL.sub(HIDDEN, text)))


def _hide_named(names: re.Pattern[str], text: str) -> str:
    """Return a text in which the value after each secret's name that ``names`` finds is hidden."""
    parts, at, done = [], 0, 0
    while (found := names.search(text, at)) is not None:
        at = found.end()
        if not is_secret(found[1]) or not _tells(found[1], value := _value(text, at)):
            continue
        quote = _QUOTE.match(value)
        parts += [text[done:at], f"{quote[0]}{HIDDEN}{quote[0]}" if quote else HIDDEN]
        at = done = at + len(value)
    return "".join([*parts, text[done:]])


def _value(text: str, at: int) -> str:
    """Return the value that begins at ``at``: a word, a quoted text, or everything between
    brackets."""
    depth = 0
    for bracket in _BRACKET.finditer(text, at) if text[at : at + 1] in ("{", "[", "(") else ():
        depth += 1 if bracket[0] in "{[(" else -1
        if not depth:
            return text[at : bracket.end()]
    if depth:
        return text[at:]
    value = _VALUE.match(text, at)
    return value[0] if value else ""


def _tells(name: str, value: str) -> bool:
    """Return whether the value of a secret's name can be a secret; null or a number of tokens
    cannot."""
    bare = value.strip("\\\"'")
    return not (
        _PLAIN.match(bare) or (_NUMBER.match(bare) and _MAY_BE_NUMBERS.search(name.lower()))
    )


def redact_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the words of a command line without secrets.

    They are found in ``--token=VALUE``, in the two words ``--token VALUE``, and in a word that is
    JSON.

    >>> tags = '{"api_key": {"deep": "s"}, "note": "n"}'
    >>> redact_arguments(["--x.password", "a b", "--tags", tags, "--y.token=a,b"])
    ['--x.password', '***', '--tags', '{"api_key": {"deep": "***"}, "note": "n"}', '--y.token=***']
    """
    return [
        _redact_word(word, before)
        for before, word in zip(["", *arguments], arguments, strict=False)
    ]


def _redact_word(word: str, before: str) -> str:
    if (
        before.startswith("-")
        and "=" not in before
        and is_secret(before)
        and not word.startswith("--")
    ):
        return HIDDEN if _tells(before, word) else word
    name, equals, value = word.partition("=") if word.startswith("-") else ("", "", word)
    if equals and is_secret(name):
        return f"{name}={HIDDEN}" if _tells(name, value) else word
    if value.lstrip()[:1] in ("{", "["):
        with suppress(ValueError, RecursionError):
            document = json.loads(value)
            hidden = redact_settings(document)
            return word if hidden == document else f"{name}{equals}{json.dumps(hidden)}"
    return redact(word)


def redact_settings(settings: Any, name: str = "", *, secret: bool = False) -> Any:
    """Return nested settings of the same form without secrets.

    Of prompts (:data:`PROMPTS` of ``data``) only what is a secret by its own form is hidden.

    Args:
        settings: mappings, lists, texts and numbers.
        name: the dotted name of these settings.
        secret: whether they lie below the name of a secret; all texts and numbers are then hidden.
    """
    secret = secret or is_secret(name)
    if isinstance(settings, Mapping):
        return {
            redact(key) if isinstance(key, str) else key: redact_settings(
                value, f"{name}.{key}" if name else str(key), secret=secret
            )
            for key, value in settings.items()
        }
    if isinstance(settings, (list, tuple)):
        return [redact_settings(value, name, secret=secret) for value in settings]
    if secret and not isinstance(settings, bool) and isinstance(settings, (str, int, float)):
        return HIDDEN if _tells(name, str(settings)) else settings
    if not isinstance(settings, str):
        return settings
    parts = name.split(".")  # of a study also settings.data.template
    is_prompt = "data" in parts and not PROMPTS.isdisjoint(parts[parts.index("data") + 1 :])
    return _redact_known(settings) if is_prompt else redact(settings)


class RedactionFilter(logging.Filter):
    """A filter, of a logger or of a handler, that hides secrets in a record's message and
    traceback."""

    def filter(self, record: logging.LogRecord) -> bool:
        # the arguments do not fit the message, which logging reports
        with suppress(TypeError, ValueError):
            record.msg, record.args = redact(record.getMessage()), ()
        if record.exc_info:
            record.exc_text = redact(
                record.exc_text or logging.Formatter().formatException(record.exc_info)
            )
        return True


REDACTING = RedactionFilter()
logging.getLogger("fl_lightning").addFilter(REDACTING)


def show_exception(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Write the traceback that Python prints, without secrets; this is a ``sys.excepthook``."""
    sys.stderr.write(redact("".join(traceback.format_exception(kind, error, trace))))
