"""Exceptions that end a run with one line instead of a traceback."""


class InputError(ValueError):
    """Bad input, found anywhere: the command line prints the message as one line and exits with 2, without a traceback.

    The message has three parts, separated by semicolons: what was given; the rule; what to write instead.
    """


class RankLost(RuntimeError):
    """One of the run's processes died or does not answer: the command line prints the message as one line and exits with 1."""
