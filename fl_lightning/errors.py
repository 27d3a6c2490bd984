"""Exceptions that end a run with one line."""


class InputError(ValueError):
    """Bad input, found anywhere: the command line prints the message as one line and exits with 2.

    The message has three parts, separated by semicolons: what was given; the rule; what to write instead.
    """


class RunStopped(RuntimeError):
    """The run cannot go on, though neither code nor input is wrong: the command line prints the message and exits with 1."""


class RankLost(RunStopped):
    """One of the run's processes died or does not answer."""
