"""Exceptions that end a run, or refuse an upload, with one line in three parts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T", bound="ThreePartError")


class ThreePartError(Exception):
    """What was given; the rule that it breaks; what to write or do instead.

    Args:
        given: what was given, or what happened.
        rule: what would have been right.
        instead: what to write or do.
    """

    def __init__(self, given: str, rule: str, instead: str) -> None:
        super().__init__(given, rule, instead)
        self.given, self.rule, self.instead = given, rule, instead

    def __str__(self) -> str:
        return "; ".join(filter(None, (self.given, self.rule, self.instead)))

    @classmethod
    def from_text(cls: type[T], text: str) -> T:
        """Return the error whose message is ``text``, of as many of the three parts as it has."""
        return cls(*[*text.split("; ", 2), "", ""][:3])

    def within(self: T, place: str) -> T:
        """Return the same error, which also says where it was found, such as the cell of a
        study."""
        return type(self)(f"{place}: {self.given}", self.rule, self.instead)


class InputError(ThreePartError, ValueError):
    """Bad input, found anywhere: the command line prints the message as one line and exits with
    2."""


class MisuseError(ThreePartError, ValueError):
    """A function was given what it cannot take: a bug of the code that calls it, and not of the
    user's input.

    So it keeps its type and its traceback, and a run that it ends exits with 1.
    """


class LostStateError(InputError):
    """What a client kept is not here, cannot be read, or is of other data: without it, it is not
    trained."""


def require(valid: object, given: str, rule: str, instead: str) -> None:
    """Refuse bad input."""
    if not valid:
        raise InputError(given, rule, instead)


def error_reason(error: BaseException) -> str:
    """Return what an error says in one line, with its type where its message does not stand
    alone."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = " ".join(str(error).split())[:300]
    stands_alone = text and isinstance(error, (OSError, ValueError, ImportError, RuntimeError))
    return text if stands_alone else f"{type(error).__name__}: {text}".removesuffix(": ")


@contextmanager
def as_bad_input(given: str, rule: str, instead: str, *errors: type[Exception]) -> Iterator[None]:
    """Make bad input of what the block raises.

    Args:
        given: what was given.
        rule: what is wrong with it; the reason that the error gives follows in brackets.
        instead: what to write or do.
        errors: the types of errors that are meant; by default, what a file of text raises that
            cannot be read.

    Raises:
        InputError: the block raised one of them.
    """
    meant = errors or (OSError, UnicodeDecodeError)
    try:
        yield
    except InputError:
        raise
    except meant as error:
        raise InputError(given, f"{rule} ({error_reason(error)})", instead) from error


class RunStopped(ThreePartError, RuntimeError):
    """The run cannot go on, though neither code nor input is wrong: the command line prints the
    message and exits with 1."""


class RankLost(RunStopped):
    """One of the run's processes died or does not answer."""
