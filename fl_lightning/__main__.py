"""The program ``python -m fl_lightning``: it runs a command and turns errors into a line and an
exit code.

Torch is imported only when a command runs.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from errno import EACCES, EDQUOT, ENOSPC, EPERM, EROFS
from typing import Any, NoReturn

from fl_lightning.cli.commands import TRACEBACK_VARIABLE, answer_quickly
from fl_lightning.errors import InputError, RunStopped
from fl_lightning.support.imports import import_quickly

INTERRUPTED = (130, 143)
"""Exit codes after Ctrl-C and SIGTERM."""
CONTINUED = ("fit", "deploy")
"""Commands that ``--ckpt_path`` continues."""


def main(argv: list[str] | None = None) -> int:
    """Run one command and return the exit code.

    An exception that is a bug is raised, unless its traceback is in the ``run.log`` of a run.
    """
    describe = argv is None and "torch" not in sys.modules
    argv = sys.argv[1:] if argv is None else argv
    try:
        code = _answer_quickly(argv)
        if code is None:
            _check_folder()
            # imports yaml, which --help does without
            from fl_lightning.cli.early import refuse_early

            refuse_early(argv[0], argv[1:])
            run = import_quickly("fl_lightning.cli.parser").run

            run(argv[0], argv[1:], describe=describe)
    except InputError as error:
        return _one_line(error, str(error), code=2)
    except RunStopped as error:
        return _one_line(error, str(error), code=1)
    except OSError as error:
        if hasattr(error, "run_log") or hasattr(error, "failed_at"):
            return _bug(error)
        if error.errno in (EACCES, EPERM) and error.filename is not None:
            path = os.fsdecode(error.filename)
            rule = f"it cannot be read or written ({error.strerror})"
            return _one_line(error, f"{path}; {rule}; make it so, or name another", code=2)
        if error.errno not in (ENOSPC, EDQUOT, EROFS):
            raise
        again = "continue with --ckpt_path" if argv[0] in CONTINUED else "give the command again"
        needed = "needs room to write; make some"
        if error.errno == EROFS:
            needed = "writes, and this file system is read-only; make it writable"
        return _one_line(error, f"{error}; {argv[0]} {needed} and {again}", code=1)
    except KeyboardInterrupt:
        return 130
    except SystemExit as stop:  # --help and --print_config: 0; after SIGTERM: 143
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except Exception as error:
        if not hasattr(error, "run_log") and not hasattr(error, "failed_at"):
            raise
        return _bug(error)
    return code or 0


def _check_folder() -> None:
    """Refuse a working directory that has been removed or may not be entered."""
    try:
        os.getcwd()
    except OSError as error:
        rule = f"it is not there any more, or closed ({error.strerror})"
        raise InputError("the working directory", rule, "change to another one with cd") from None


def _answer_quickly(argv: list[str]) -> int | None:
    """Answer what needs no torch, as far as somebody reads it; return the exit code, or None if a
    command has to be run."""
    try:
        code = answer_quickly(argv)
        if code is not None:
            sys.stdout.flush()
    except BrokenPipeError:  # what is left in the buffer has to go somewhere when Python ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def _bug(error: Exception) -> int:
    """Write one line about an error in somebody's code and where its traceback is; return the exit
    code.

    The traceback is in the log of the run; before there is a run, the line says at which item of a
    dataset.
    """
    what = f"{type(error).__name__}: {error}"
    if hasattr(error, "failed_at"):
        return _one_line(
            error, f"{error.failed_at}; {what}; {TRACEBACK_VARIABLE}=1 prints its traceback", code=1
        )
    where = f"its traceback is in {error.run_log}; {TRACEBACK_VARIABLE}=1 prints it here"  # type: ignore[attr-defined]
    return _one_line(error, f"{what}; {where}", code=1)


def _one_line(error: Exception, message: str, *, code: int) -> int:
    """Write the message as one line without secrets, and return the exit code.

    The traceback is written as well if the user asks for it.
    """
    from fl_lightning.support.redaction import redact, show_exception

    _wait_for_rank_zero()
    if os.environ.get(TRACEBACK_VARIABLE, "") not in ("", "0"):
        show_exception(type(error), error, error.__traceback__)
    sys.stderr.write(f"fl_lightning: error: {' '.join(redact(message).split())}\n")
    return code


def _wait_for_rank_zero() -> None:
    """Wait 10 s on ranks other than 0 before they report an error.

    Usually all ranks have the same error. Rank 0 reports it, and its end stops the other processes
    before they report it too. An error of one other rank alone is reported after the wait.
    """
    rank = (
        os.environ.get("RANK")
        or os.environ.get("LOCAL_RANK")
        or os.environ.get("SLURM_PROCID")
        or "0"
    )
    # a text that is no number is no rank's
    if rank.isdecimal() and int(rank):
        time.sleep(10)


def _show_exception(*error: Any) -> None:
    from fl_lightning.support.redaction import show_exception

    show_exception(*error)


def program() -> NoReturn:
    """Run one command and end the process, which a second signal after the first does not disturb.
    A traceback shows no secrets."""
    sys.excepthook = _show_exception
    code = main()
    if code in INTERRUPTED:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
    sys.exit(code)


if __name__ == "__main__":
    program()
