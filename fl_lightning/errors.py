"""The one exception that is the user's to mend."""


class InputError(ValueError):
    """Bad input, found anywhere: the command line prints the message as one line and exits with 2, without a traceback.

    The message has three parts, separated by semicolons: what was given; the rule; what to write instead.
    """
